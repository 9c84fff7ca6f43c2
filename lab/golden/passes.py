"""Passes through a model's slices as stages make them: rows of several requests, trees, drops, commits, with
slots as `StageCore` gives them; each gives the logits of its rows.

This is where `lab.golden` and the tests of bits know how FlowSpec runs layers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from flowspec.core.protocol.messages import Sampling
from flowspec.core.stage.events import ClearSlots, JobPart, RunLayers
from flowspec.core.stage.slots import SlotMap
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span
from tests.checkpoints import VOCABULARY_SIZE

SLOTS = 2000
Path_ = tuple[int, ...]
NONE: frozenset[int] = frozenset()
NOBODY: Mapping[int, frozenset[tuple[int, Path_]]] = {}


@dataclass
class Node:
    """One token of a request's tree; `path` is what it stands for, itself last."""

    path: Path_
    above: Node | None
    slots: list[int] = field(default_factory=list)
    """At each stage."""
    has_run: bool = False
    is_committed: bool = False

    def branch(self, stage: int) -> list[int]:
        found, node = [self.slots[stage]], self.above
        while node is not None and not node.is_committed:
            found.append(node.slots[stage])
            node = node.above
        return found


class Stages:
    """A model in consecutive slices, each with slots of its own, as `StageCore` gives them."""

    def __init__(self, files: ModelFiles, dtype: str, cuts: Sequence[int], cache: str) -> None:
        layers = cuts[-1]
        self.slices = [
            Slice.load(files, Span(first=first, end=end, count=layers), dtype, cache=cache)
            for first, end in itertools.pairwise(cuts)
        ]
        self.maps: dict[int, list[SlotMap]] = {}

    def open(self, request: int) -> None:
        self.maps[request] = [SlotMap(SLOTS) for _ in self.slices]
        for part in self.slices:
            part.open_cache(request, SLOTS)

    def give_slots(self, request: int, node: Node, *, is_committed: bool) -> None:
        node.is_committed = is_committed
        node.slots = [
            slots.allocate(len(node.path) - 1, committed=is_committed) for slots in self.maps[request]
        ]

    def commit(self, request: int, node: Node) -> None:
        node.is_committed = True
        for slots, slot in zip(self.maps[request], node.slots, strict=True):
            slots.committed[slot] = True

    def free(self, request: int, nodes: Sequence[Node]) -> None:
        for stage, (part, slots) in enumerate(zip(self.slices, self.maps[request], strict=True)):
            gone = [node.slots[stage] for node in nodes]
            slots.free(gone)
            part.clear_slots(ClearSlots(request=request, slots=tuple(gone)))

    def run(
        self, rows: Sequence[tuple[int, Node]], dying: Mapping[int, frozenset[tuple[int, Path_]]] = NOBODY
    ) -> dict[Path_, bytes]:
        """The logits of nodes of some requests as one job; those `dying` at a stage go after its first
        layer."""
        payload: Array | None = None
        states: Array | None = None
        alive = list(rows)
        for stage, part in enumerate(self.slices):
            gone = dying.get(stage, frozenset())
            dead = frozenset(row for row, (request, node) in enumerate(alive) if (request, node.path) in gone)
            calls = itertools.chain([NONE], itertools.repeat(dead))
            kept, states = part.forward(self._job(stage, alive), payload, partial(next, calls))
            payload = part.engine.numpy(states)
            alive = [alive[row] for row in kept]
            if not alive:
                return {}
        assert states is not None
        logits = self.slices[-1].logits(states)
        return {node.path: found.tobytes() for (_, node), found in zip(alive, logits, strict=True)}

    def _job(self, stage: int, rows: Sequence[tuple[int, Node]]) -> RunLayers:
        parts = []
        for request, group in itertools.groupby(rows, key=lambda row: row[0]):
            nodes = [node for _, node in group]
            slots = self.maps[request][stage]
            positions = [len(node.path) - 1 for node in nodes]
            parts.append(
                JobPart(
                    request=request,
                    slots=np.array([node.slots[stage] for node in nodes], dtype=np.int64),
                    tokens=np.array([node.path[-1] for node in nodes], dtype=np.int64),
                    positions=np.array(positions, dtype=np.int64),
                    key_positions=slots.position[: slots.high].copy(),
                    visible=slots.visible(positions, [node.branch(stage) for node in nodes]),
                    sampled=np.ones(len(nodes), dtype=bool),
                    sampling=Sampling(),
                    committed=int(slots.position[slots.committed].max(initial=-1)) + 1,
                )
            )
        return RunLayers(job=1, parts=tuple(parts), payload=None, rows=tuple(range(len(rows))))


class StepByStep:
    """All layers in one slice, one token at a time; remembers what it has computed.

    Each path goes on from where it leaves the one before it, whose end is given up.
    """

    def __init__(self, files: ModelFiles, dtype: str, layers: int, cache: str) -> None:
        self._stages = Stages(files, dtype, (0, layers), cache)
        self._stages.open(1)
        self._known: dict[Path_, bytes] = {}
        self._line: list[Node] = []

    def logits(self, path: Path_) -> bytes:
        if path not in self._known:
            shared = sum(node.path == path[: len(node.path)] for node in self._line)
            self._stages.free(1, self._line[shared:])
            del self._line[shared:]
            for length in range(shared + 1, len(path) + 1):
                node = Node(path[:length], self._line[-1] if self._line else None)
                self._stages.give_slots(1, node, is_committed=True)
                self._known.update(self._stages.run([(1, node)]))
                self._line.append(node)
        return self._known[path]


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, and rows of its chunks and of one request's part of a segment: one of each."""

    prompt: int = 14
    chunks: tuple[int, ...] = (1, 2, 7, 40)
    segments: tuple[int, ...] = (1, 2, 5, 9, 30)


def play(
    rng: random.Random, stages: Stages, requests: int, steps: int, sizes: Sizes
) -> Iterator[dict[Path_, bytes]]:
    """Random prompts in chunks, trees, segments, drops, commits of several requests; what each pass
    computed."""
    roots: dict[int, Node] = {}
    trees: dict[int, list[Node]] = {}
    for request in range(1, requests + 1):
        stages.open(request)
        above, waiting = None, []
        for _ in range(1, sizes.prompt + rng.randrange(3)):
            node = Node(((above.path if above else ()) + (rng.randrange(3, VOCABULARY_SIZE),)), above)
            above = node
            waiting.append(node)
        while waiting:
            chunk = waiting[: rng.choice(sizes.chunks)]
            waiting = waiting[len(chunk) :]
            for node in chunk:
                stages.give_slots(request, node, is_committed=True)
            yield stages.run([(request, node) for node in chunk])
        assert above is not None
        roots[request], trees[request] = above, []
    for _ in range(steps):
        rows: list[tuple[int, Node]] = []
        for request in rng.sample(sorted(roots), rng.randrange(1, requests + 1)):
            for _ in range(rng.choice(sizes.segments)):
                above = rng.choice([roots[request], *trees[request]])
                node = Node((*above.path, rng.randrange(3, VOCABULARY_SIZE)), above)
                if any(other.path == node.path for other in trees[request]):
                    continue
                stages.give_slots(request, node, is_committed=False)
                trees[request].append(node)
                rows.append((request, node))
        rows.sort(key=lambda row: row[0])
        dying = {
            stage: frozenset(_dying(rng, rows)) for stage in range(len(stages.slices)) if rng.random() < 0.3
        }
        left = len(rows)
        found = stages.run(rows, dying)
        yield found
        for request in roots:
            lost = [node for own, node in rows if own == request and node.path not in found]
            alive = _without(trees[request], lost)
            if alive and rng.random() < 0.6:  # one step or more along a branch is known
                leaf = rng.choice(alive)
                line = [node for node in alive if node.path == leaf.path[: len(node.path)]]
                for node in sorted(line, key=lambda node: len(node.path))[: rng.randrange(1, 4)]:
                    stages.commit(request, node)
                    roots[request] = node
                below = len(roots[request].path)
                alive = [
                    node
                    for node in alive
                    if len(node.path) > below and node.path[:below] == roots[request].path
                ]
            gone = [node for node in trees[request] if node not in alive and not node.is_committed]
            stages.free(request, gone)
            trees[request] = alive
        assert left >= len(found)


def _dying(rng: random.Random, rows: Sequence[tuple[int, Node]]) -> set[tuple[int, Path_]]:
    """Some nodes, by request, and all below them."""
    chosen = [row for row in rows if rng.random() < 0.2]
    return {
        (request, node.path)
        for request, node in rows
        if any(request == own and node.path[: len(dead.path)] == dead.path for own, dead in chosen)
    }


def _without(nodes: list[Node], lost: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if not any(node.path[: len(each.path)] == each.path for each in lost)]
