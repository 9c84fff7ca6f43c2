"""The token tree of one request: which tokens are guessed, sent, verified and known to be in the output.

An append-only table of nodes. Node ids grow and parents come before children. The *committed path* holds one node per
position from the first prompt token on; its last node is the *root*, the newest token known to be in the output. Every
other living node hangs below the root. Knows nothing of models, messages or time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np


class NodeState(IntEnum):
    """Where a node stands; the order is the order of a node's life."""

    DRAFTED = 0
    SENT = 1
    COMMITTED = 2
    DEAD = 3


class TokenTree:
    """Nodes `{id, parent, token, position, value, state}`; `value` estimates the chance to end up in the output."""

    def __init__(self) -> None:
        size = 256
        self._parent = np.full(size, -1, dtype=np.int64)
        self._token = np.zeros(size, dtype=np.int64)
        self._position = np.zeros(size, dtype=np.int64)
        self._value = np.zeros(size, dtype=np.float64)
        self._state = np.zeros(size, dtype=np.uint8)
        self._count = 0
        self._children: dict[int, dict[int, int]] = {}
        self._alive: set[int] = set()
        self.path: list[int] = []

    def __len__(self) -> int:
        return self._count

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

    def parent(self, node: int) -> int:
        return int(self._parent[self._known(node)])

    def token(self, node: int) -> int:
        return int(self._token[self._known(node)])

    def position(self, node: int) -> int:
        return int(self._position[self._known(node)])

    def value(self, node: int) -> float:
        return float(self._value[self._known(node)])

    def state(self, node: int) -> NodeState:
        return NodeState(int(self._state[self._known(node)]))

    def child(self, node: int, token: int) -> int | None:
        """The living child of `node` that holds `token`, if there is one."""
        return self._children.get(node, {}).get(token)

    def committed_tokens(self) -> list[int]:
        """Tokens of the committed path, by position."""
        return [int(t) for t in self._token[self.path]]

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

    def add(self, parent: int, token: int, value: float) -> int:
        """Draft a node below the root or below another living node; returns its id.

        `(parent, token)` is unique among the living, and a node never counts for more than its parent.
        """
        assert parent == self.root or parent in self._alive, f"parent {parent} is neither root nor alive"
        assert self.child(parent, token) is None, f"node {parent} already has a child {token}"
        if parent != self.root:
            value = min(value, float(self._value[parent]))
        node = self._append(parent, token, value, NodeState.DRAFTED)
        self._children.setdefault(parent, {})[token] = node
        self._alive.add(node)
        return node

    def best_unsent(self, count_max: int, value_min: float = 0.0) -> list[int]:
        """The most valuable drafted nodes whose parents are sent, committed or chosen too; parents come first."""
        ready = [n for n in self._alive if self._state[n] == NodeState.DRAFTED and self._is_out(int(self._parent[n]))]
        heap = [(-float(self._value[n]), n) for n in ready]
        heapq.heapify(heap)
        chosen: list[int] = []
        while heap and len(chosen) < count_max:
            cost, node = heapq.heappop(heap)
            if -cost < value_min:
                break
            chosen.append(node)
            for child in self._children.get(node, {}).values():
                heapq.heappush(heap, (-float(self._value[child]), child))
        return chosen

    def mark_sent(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            if self._state[node] == NodeState.DRAFTED:
                self._state[node] = NodeState.SENT

    def commit(self, node: int) -> list[int]:
        """Make a child of the root the new root; returns the ids that died, in growing order."""
        assert node in self._alive, f"node {node} is not alive"
        assert self._parent[node] == self.root, f"node {node} is no child of the root"
        siblings = self._children.pop(self.root)
        dead = [n for child in siblings.values() if child != node for n in self._subtree(child)]
        self._kill(dead)
        self._alive.discard(node)
        self._state[node] = NodeState.COMMITTED
        self.path.append(node)
        return sorted(dead)

    def rewind(self, length: int) -> None:
        """Forget every committed token from position `length` on, and all that was drafted."""
        assert 0 <= length <= len(self.path)
        self._kill([*self._alive, *self.path[length:]])
        self._children.clear()
        del self.path[length:]

    def _known(self, node: int) -> int:
        assert 0 <= node < self._count, f"no node {node}"
        return node

    def _is_out(self, node: int) -> bool:
        return bool(self._state[node] in (NodeState.SENT, NodeState.COMMITTED))

    def _subtree(self, node: int) -> list[int]:
        found = [node]
        for parent in found:
            found.extend(self._children.get(parent, {}).values())
        return found

    def _kill(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._state[node] = NodeState.DEAD
            self._alive.discard(node)
            self._children.pop(node, None)

    def _append(self, parent: int, token: int, value: float, state: NodeState) -> int:
        node = self._count
        if node == len(self._parent):
            for name in ("_parent", "_token", "_position", "_value", "_state"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._parent[node] = parent
        self._token[node] = token
        self._position[node] = self._position[parent] + 1 if parent >= 0 else 0
        self._value[node] = value
        self._state[node] = state
        self._count += 1
        return node
