"""A head's side of a conversation with a drafter, for tests: a growing tree, and the segments that tell a
drafter of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flowspec.core.protocol.messages import Commit, Open, Sampling, Segment, SegmentPart
from flowspec.core.text_before import TextBefore
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}


@dataclass
class Teller:
    """One request. Nodes are numbered as they come; `given` are those the drafter has been given."""

    request: int
    sampling: Sampling
    slots: int = 400
    epoch: int = -1
    keep: int = 0
    told: int = 0
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    prompt_length: int = 0
    given: set[int] = field(default_factory=set)

    @property
    def root(self) -> int:
        return self.path[-1]

    @property
    def filled(self) -> int:
        """Path nodes from the first on that the drafter has and knows to be committed: what a new turn may
        keep."""
        return next(
            (at for at, node in enumerate(self.path[: self.told]) if node not in self.given), self.told
        )

    def begin(self, prompt: Sequence[int], keep: int = 0) -> None:
        """A new turn: the first `keep` tokens are those of the last one."""
        assert keep <= self.filled
        self.epoch += 1
        self.keep = keep
        self.given &= set(self.path[:keep])
        del self.path[keep:]
        for token in prompt[keep:]:
            self.path.append(self.add(self.path[-1] if self.path else -1, token))
        self.told = self.prompt_length = len(prompt)

    def add(self, parent: int, token: int) -> int:
        self.parents.append(parent)
        self.tokens.append(token)
        return len(self.parents) - 1

    def commit(self, node: int) -> None:
        assert self.parents[node] == self.root
        self.path.append(node)

    def is_living(self, node: int) -> bool:
        while node > self.root:
            node = self.parents[node]
        return node == self.root

    def line(self, node: int) -> list[int]:
        """The nodes from the first to this one."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def text(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[each] for each in self.line(node))

    def before(self, node: int) -> TextBefore:
        """What stands before a child of this node."""
        return TextBefore(np.array(self.text(node)), self.prompt_length)

    def missing(self) -> list[int]:
        """Path nodes before the root that the drafter has not been given."""
        return [node for node in self.path[:-1] if node not in self.given]

    def part(self, nodes: Sequence[int], *, committed: Sequence[int] = ()) -> SegmentPart:
        """Rows `committed`, flagged so, then `nodes`; the Commit tells the path so far."""
        rows = [*committed, *nodes]
        part = SegmentPart(
            commit=Commit(
                request=self.request, epoch=self.epoch, base=self.told, path=tuple(self.path[self.told :])
            ),
            opening=Open(
                request=self.request,
                epoch=self.epoch,
                keep=self.keep,
                length=self.prompt_length,
                root=self.path[self.prompt_length - 1],
                slots=self.slots,
                sampling=self.sampling,
                answer_start=self.prompt_length,
            ),
            ids=tuple(rows),
            parents=tuple(self.parents[node] for node in rows),
            tokens=tuple(self.tokens[node] for node in rows),
            positions=tuple(len(self.line(node)) - 1 for node in rows),
            committed=(True,) * len(committed) + (False,) * len(nodes),
        )
        self.told = len(self.path)
        self.given.update(rows)
        return part


def segment(*parts: SegmentPart) -> Segment:
    return Segment(segment=0, parts=parts)


def chain_batch(cache: TreeCache, first: int, end: int) -> TreeBatch:
    """Rows of a chain, in slots of the same numbers."""
    places, visible = np.arange(end), np.tri(end, dtype=np.bool_)
    own = slice(first, end)
    rows = TreeRows(cache, 0, places[own], places[own], places.astype(np.int32), visible[own])
    return TreeBatch([rows])
