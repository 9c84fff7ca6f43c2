"""A conversation as the head knows it: its tree, how far the stages are, the messages that follow from both; and what is in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from flowspec.core import limits
from flowspec.core.drafting import DraftState
from flowspec.core.events import Submit
from flowspec.core.messages import Commit, Open, Part
from flowspec.core.statistics import Statistics
from flowspec.tree import TokenTree


@dataclass(slots=True)
class Request:
    """A conversation: its tree lives on between answers, `submit` is the answer under way (None between answers).

    `unsent` is the next prompt position to send; positions below `computed` have passed every stage. `known_length` is
    the committed length that every stage has been told, so Commits begin there. `held` are tokens verified that the
    method has not walked yet, `plan` is the method's own note.
    """

    tree: TokenTree
    submit: Submit | None
    opening: Open
    context: int
    unsent: int
    computed: int
    known_length: int
    draft: DraftState
    statistics: Statistics
    opened: bool = False
    new_tokens: list[int] = field(default_factory=list)
    next_tokens: dict[int, int] = field(default_factory=dict)
    held: deque[dict[int, int]] = field(default_factory=deque)
    root_sent: bool = False
    in_flight: int = 0
    served: int = 0
    plan: Any = None

    @property
    def number(self) -> int:
        return self.opening.request

    @property
    def is_prefilled(self) -> bool:
        """Whether all of the prompt is on its way."""
        return self.unsent >= self.opening.length

    @property
    def is_decoding(self) -> bool:
        return self.submit is not None and self.is_prefilled

    def is_living(self, node: int) -> bool:
        """Whether a node is the root or hangs below it."""
        return node == self.tree.root or self.tree.is_alive(node)

    @property
    def kept_everywhere(self) -> int:
        """Path nodes that an Open may keep: every stage has run them, and been told that they are committed (else they die there)."""
        return min(self.computed, self.known_length)

    def fitting(self, nodes: list[int]) -> list[int]:
        """As many of the nodes as the stages have slots for; the root's is reserved with the context."""
        return nodes[: limits.TREE_NODES_MAX - self.tree.sent_alive + (nodes[0] == self.tree.root)]

    def next_chunk(self) -> list[int]:
        """The next nodes of the prompt; they count as sent."""
        nodes = self.tree.path[self.unsent : min(self.unsent + limits.PREFILL_CHUNK, self.opening.length)]
        self.unsent += len(nodes)
        self.root_sent = self.is_prefilled
        return nodes

    def commit(self) -> Commit:
        """The newest Commit, back to what every stage is known to have."""
        path = tuple(self.tree.path[self.known_length :])
        return Commit(request=self.number, epoch=self.opening.epoch, base=self.known_length, path=path)

    def part(self, nodes: list[int], *, is_prompt: bool) -> Part:
        """These nodes as they travel in a segment, parents first."""
        tree = self.tree
        return Part(
            commit=self.commit(),
            opening=None if self.opened else self.opening,
            ids=tuple(nodes),
            parents=tuple(tree.parent(n) for n in nodes),
            tokens=tuple(tree.token(n) for n in nodes),
            positions=tuple(tree.position(n) for n in nodes),
            committed=(is_prompt,) * len(nodes),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """What one segment in flight carries of one request: once it is back, every stage has seen it.

    `end` is the position after its last committed row (0 without one).
    """

    request: int
    epoch: int
    end: int
    committed_length: int
    nodes: tuple[int, ...]
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class Flight:
    """A segment in flight."""

    loads: tuple[Load, ...]
    sent_s: float
    rows: int
