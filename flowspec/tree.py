"""The token tree of one request: which tokens are guessed, sent, verified and known to be in the output.

An append-only table of nodes. Node ids grow and parents come before children. The *committed path* holds one
node per position from the first prompt token on; its last node is the *root*, the newest token known to be in
the output. Every other living node hangs below the root. Knows nothing of models, messages or time.

A node's *chance* is the estimated probability that it is right if its parent is; its *value*, that it ends up
in the output, is the product of the chances from the root down. It is kept as a logarithm, so it needs no
update when the root moves on: everything below only comes nearer. Who knows better may give a node another
chance, or drop it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

CHANCE_MIN = 1e-30
"""Chances below count as this one, so that values keep their order far below the root."""


class NodeState(IntEnum):
    """Where a node stands; the order is the order of a node's life."""

    DRAFTED = 0
    SENT = 1
    COMMITTED = 2
    DEAD = 3


class TokenTree:
    """Nodes `{id, parent, token, position, value, state}`."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._token: list[int] = []
        self._position: list[int] = []
        self._log_chance: list[float] = []
        self._log_value: list[float] = []
        self._state: list[NodeState] = []
        self._children: dict[int, dict[int, int]] = {}
        self._alive: set[int] = set()
        self._ready: set[int] = set()
        self._unsent: list[float] = []
        self.path: list[int] = []
        self.dropped: list[int] = []
        """Every node that was dropped (`drop`), in order; what else dies follows from the path."""
        self.sent_alive = 0

    def __len__(self) -> int:
        return len(self._parent)

    @property
    def root(self) -> int:
        """Id of the newest token known to be in the output."""
        return self.path[-1]

    @property
    def committed_length(self) -> int:
        return len(self.path)

    @property
    def alive(self) -> frozenset[int]:
        """Ids of the nodes below the root that may still come true."""
        return frozenset(self._alive)

    @property
    def alive_count(self) -> int:
        return len(self._alive)

    def living(self) -> Iterator[int]:
        """The nodes below the root that may still come true; the tree must not change meanwhile."""
        return iter(self._alive)

    def is_alive(self, node: int) -> bool:
        """Whether a node hangs below the root."""
        return node in self._alive

    def parent(self, node: int) -> int:
        return self._parent[node]

    def token(self, node: int) -> int:
        return self._token[node]

    def position(self, node: int) -> int:
        return self._position[node]

    def value(self, node: int) -> float:
        """The estimated probability that a living node ends up in the output; 1 for the root."""
        return math.exp(min(0.0, self._log_value[node] - self._log_value[self.path[-1]]))

    def log_value(self, node: int) -> float:
        """The logarithm of the chances from the beginning of the text to a node; it ranks nodes, wherever the
        root is."""
        return self._log_value[node]

    def unsent_value(self, rank: int) -> float:
        """The value of the drafted node that comes at `rank` (1 is the best) among those not sent; 0 if there
        are fewer."""
        if rank > len(self._unsent):
            return 0.0
        return math.exp(min(0.0, self._unsent[-rank] - self._log_value[self.path[-1]]))

    def table(self, first: int) -> tuple[list[int], list[int], list[float]]:
        """Parents, tokens and log values of all nodes from id `first` on, whatever became of them."""
        return self._parent[first:], self._token[first:], self._log_value[first:]

    def state(self, node: int) -> NodeState:
        return self._state[node]

    def depth(self, node: int) -> int:
        """Steps below the root."""
        return self._position[node] - self._position[self.path[-1]]

    def child(self, node: int, token: int) -> int | None:
        """The living child of `node` that holds `token`, if there is one."""
        return self._children.get(node, {}).get(token)

    def children(self, node: int) -> list[int]:
        """The living children of a node, in the order in which they were drafted."""
        return list(self._children.get(node, {}).values())

    def committed_tokens(self) -> list[int]:
        """Tokens of the committed path, by position."""
        return [self._token[node] for node in self.path]

    def extend_path(self, tokens: Sequence[int]) -> list[int]:
        """Append known tokens (a prompt) to the committed path; returns their node ids.

        Only before anything is drafted below the root: a path that jumps would orphan the drafts.
        """
        assert not self._alive, "the path grows by tokens only while nothing is drafted"
        added = []
        for token in tokens:
            node = self._append(self.path[-1] if self.path else -1, token, 1.0, NodeState.COMMITTED)
            self.path.append(node)
            added.append(node)
        return added

    def add(self, parent: int, token: int, chance: float) -> int:
        """Draft a node below the root or below another living node; returns its id. `(parent, token)` is
        unique among the living."""
        assert parent == self.root or parent in self._alive, f"parent {parent} is neither root nor alive"
        assert self.child(parent, token) is None, f"node {parent} already has a child {token}"
        node = self._append(parent, token, chance, NodeState.DRAFTED)
        self._children.setdefault(parent, {})[token] = node
        self._alive.add(node)
        insort(self._unsent, self._log_value[node])
        if self._is_out(parent):
            self._ready.add(node)
        return node

    def revalue(self, node: int, chance: float) -> list[int]:
        """Give a living node another chance; returns the nodes whose values change with it, parents first."""
        assert node in self._alive, f"node {node} is not alive"
        assert 0 <= chance <= 1, f"expected a chance from 0 to 1, got {chance}"
        log_chance = math.log(max(chance, CHANCE_MIN))
        if log_chance == self._log_chance[node]:
            return []
        self._log_chance[node] = log_chance
        moved = self._subtree(node)
        for below in moved:
            self._drop_unsent(below)
            self._log_value[below] = self._log_value[self._parent[below]] + self._log_chance[below]
            if self._state[below] is NodeState.DRAFTED:
                insort(self._unsent, self._log_value[below])
        return moved

    def drop(self, node: int) -> list[int]:
        """A drafted node is not wanted any more, nor is what hangs below it; returns the ids that died, in
        growing order."""
        assert self._state[node] is NodeState.DRAFTED, f"node {node} is not waiting to be sent"
        dead = self._subtree(node)
        del self._children[self._parent[node]][self._token[node]]
        self._kill(dead)
        self.dropped += dead
        return sorted(dead)

    def best_unsent(self, count_max: int, value_min: float = 0.0) -> list[int]:
        """The most valuable drafted nodes whose parents are sent, committed or chosen too; parents come
        first."""
        least = self._log_value[self.path[-1]] + (math.log(value_min) if value_min > 0 else -math.inf)
        heap = [(-self._log_value[node], node) for node in self._ready]
        heapq.heapify(heap)
        chosen: list[int] = []
        while heap and len(chosen) < count_max:
            cost, node = heapq.heappop(heap)
            if -cost < least:
                break
            chosen.append(node)
            for child in self._children.get(node, {}).values():
                heapq.heappush(heap, (-self._log_value[child], child))
        return chosen

    def mark_sent(self, nodes: Iterable[int]) -> None:
        """These nodes went out; parents come before their children."""
        for node in nodes:
            if self._state[node] is NodeState.DRAFTED:
                self._drop_unsent(node)
                self._state[node] = NodeState.SENT
                self.sent_alive += 1
                self._release_children(node)

    def commit(self, node: int) -> list[int]:
        """Make a child of the root the new root; returns the ids that died, in growing order."""
        assert node in self._alive, f"node {node} is not alive"
        assert self._parent[node] == self.root, f"node {node} is no child of the root"
        siblings = self._children.pop(self.root)
        dead = [n for child in siblings.values() if child != node for n in self._subtree(child)]
        self._kill(dead)
        self._alive.discard(node)
        self.sent_alive -= self._state[node] is NodeState.SENT
        self._drop_unsent(node)
        self._state[node] = NodeState.COMMITTED
        self._release_children(node)
        self.path.append(node)
        return sorted(dead)

    def rewind(self, length: int) -> None:
        """Forget every committed token from position `length` on, and all that was drafted."""
        assert 0 <= length <= len(self.path)
        self._kill([*self._alive, *self.path[length:]])
        self._children.clear()
        del self.path[length:]

    def validate(self) -> None:
        state = self._state
        drafted, sent = 0, 0
        for node in self._alive:
            drafted += state[node] is NodeState.DRAFTED
            sent += state[node] is NodeState.SENT
            parent = self._parent[node]
            assert parent == self.path[-1] or parent in self._alive, (
                f"node {node} lives below {parent}, which does not"
            )
            is_ready = state[node] is NodeState.DRAFTED and self._is_out(parent)
            assert is_ready == (node in self._ready), f"node {node} is ready to be sent: {not is_ready}"
        assert drafted + sent == len(self._alive), "a node lives that is committed or dead"
        assert sent == self.sent_alive, f"{sent} living nodes are sent, {self.sent_alive} are counted"
        assert drafted == len(self._unsent), (
            f"{drafted} living nodes are not sent, {len(self._unsent)} are counted"
        )
        assert len(self._ready) <= drafted, "a node is ready to be sent that does not live"
        assert not self.path or state[self.path[-1]] is NodeState.COMMITTED, "the root is not committed"

    def _is_out(self, node: int) -> bool:
        return self._state[node] in (NodeState.SENT, NodeState.COMMITTED)

    def _release_children(self, node: int) -> None:
        """A node is out: it is ready no more, and its drafted children are."""
        self._ready.discard(node)
        for child in self._children.get(node, {}).values():
            if self._state[child] is NodeState.DRAFTED:
                self._ready.add(child)

    def _drop_unsent(self, node: int) -> None:
        if self._state[node] is NodeState.DRAFTED:
            del self._unsent[bisect_left(self._unsent, self._log_value[node])]

    def _subtree(self, node: int) -> list[int]:
        found = [node]
        for parent in found:
            found.extend(self._children.get(parent, {}).values())
        return found

    def _kill(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.sent_alive -= node in self._alive and self._state[node] is NodeState.SENT
            self._drop_unsent(node)
            self._state[node] = NodeState.DEAD
            self._alive.discard(node)
            self._ready.discard(node)
            self._children.pop(node, None)

    def _append(self, parent: int, token: int, chance: float, state: NodeState) -> int:
        assert 0 <= chance <= 1, f"expected a chance from 0 to 1, got {chance}"
        self._parent.append(parent)
        self._token.append(token)
        self._position.append(self._position[parent] + 1 if parent >= 0 else 0)
        self._log_chance.append(math.log(max(chance, CHANCE_MIN)))
        self._log_value.append((self._log_value[parent] if parent >= 0 else 0.0) + self._log_chance[-1])
        self._state.append(state)
        return len(self._parent) - 1
