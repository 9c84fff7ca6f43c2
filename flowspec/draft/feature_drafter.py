"""Drafters over a `FeatureModel`, which read features of committed nodes that the target gives.

Features are kept by node, for a later turn may go on below any of them. They may come before the rows that
they belong to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from flowspec.core.head.events import CopyFeatures
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.stage.events import ClearSlots, JobPart, RunLayers
from flowspec.draft.cached import Masks, Row, TreeCachedDrafter
from flowspec.draft.feature_model import FeatureModel
from flowspec.draft.ranking import F32, Ranker
from flowspec.errors import ClusterError
from flowspec.model.arithmetic.arrays import Array, Bools, namespace
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows

SLACK = 14
"""Each generation is a pass. In virtual time on the published testbed, 40 prompts, the bundled EAGLE-3 head
gives 17.2 tokens/s without this, 18.5 with 8 and 18.6 with 14, and the EAGLE-1 head 15.1, 14.6 and 14.9."""


@dataclass(slots=True)
class Run:
    """A row, its slot and the slots that it sees `[high]`. One that has run is kept as long as its own
    prediction `[width]` may be needed, or what it stems from is one: so many `steps` in a row, 0 where its
    parent's feature was the target's."""

    row: Row
    slot: int
    seen: Bools
    predicted: Array | None = None
    steps: int = 0


@dataclass(slots=True)
class _Block:
    """It begins at a position with a node; `guesses` `[places, width]` are of the places after."""

    node: int
    begin: int
    guesses: Array


@dataclass(slots=True)
class Request:
    """What the drafter has of a request.

    `path` holds the committed nodes by position as far as they were named; after a rewind it may hold dead
    ones until others take their places, which is before the new root is run. `written`: how many positions
    from the first have keys that are made of the target's features. `node_at`: by slot the node of a `run` or
    a row. Of chains, `runs` are rows that have run, and `has_keys` the slots of such; of blocks, `rows` are
    those that came and live, but for those before the last `block`.
    """

    opening: Open
    root: int
    cache: TreeCache | None = None
    path: dict[int, int] = field(default_factory=dict)
    written: int = 0
    node_at: dict[int, int] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    has_keys: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [slots]
    rows: dict[int, Row] = field(default_factory=dict)
    block: _Block | None = None

    def begin(self, opening: Open) -> None:
        self.opening, self.root = opening, opening.root
        self.written = min(self.written, opening.keep)
        self.path = {position: node for position, node in self.path.items() if position < opening.length}
        self.path[opening.length - 1] = opening.root

    def learn(self, part: SegmentPart) -> bool:
        """Takes what a part says of the path; True when with it the path is known from the first node to the
        last."""
        for position, node in enumerate(part.commit.path, part.commit.base):
            self.path[position] = node
            self.root = max(self.root, node)
        for node, position, is_committed in zip(part.ids, part.positions, part.committed, strict=True):
            if is_committed:
                self.path[position] = node
        return self.opening.root in part.ids

    def is_committed(self, row: Row) -> bool:
        return self.path.get(row.position) == row.node

    def forget(self, node: int) -> None:
        """Drops a node's run."""
        if run := self.runs.pop(node, None):
            del self.node_at[run.slot]


class FeatureDrafter(TreeCachedDrafter):
    """A `Drafter`."""

    def __init__(
        self, model: FeatureModel, vocabulary: int, *, context: int | None = None, coupled: bool = True
    ) -> None:
        """Over a network that is loaded for a target of this vocabulary; `context` is the target's."""
        own = min(model.context_max, limits.CONTEXT_MAX)
        self.captures, self.context = model.captures, own if context is None else min(own, context)
        context_max = max(self.context, context or 0)
        super().__init__(
            Ranker(vocabulary, ids=model.target_ids, coupled=coupled),
            context_max=context_max,
            device=model.engine.device,
            slot_bytes=model.slot_bytes,
        )
        self._model, self.weight_bytes = model, model.weight_bytes
        self.pass_rows: list[int] = []
        """Rows of each pass of the network in the last job."""
        self._requests: dict[int, Request] = {}
        self._truths: dict[int, dict[int, Array]] = {}
        """By request and node the target's feature `[width]`."""
        self._truths_max = context_max + limits.DRAFT_NODES_MAX
        self._released: OrderedDict[int, int] = OrderedDict()  # request -> the last epoch that is over

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Array) -> None:
        """The target's features `[len(ids), hidden * len(captures)]` of nodes of the output's path; they may
        come before the rows."""
        known = self._requests.get(request)
        newest = self._released.get(request, -1) + 1 if known is None else known.opening.epoch
        if not len(ids) or epoch < newest:
            return
        truths = self._truths.setdefault(request, {})
        truths.update(zip(ids, self._model.project(features), strict=True))
        while len(truths) > self._truths_max:
            del truths[next(iter(truths))]  # the oldest, which only a rewind far back could need

    def release(self, message: Release) -> None:
        """Forgets a request; features of it that are still on their way are not taken."""
        super().release(message)
        self._released[message.request] = message.epoch
        if len(self._released) > limits.REQUESTS_MAX:
            self._released.popitem(last=False)
        self._requests.pop(message.request, None)
        self._truths.pop(message.request, None)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """As every drafter's; may also propose again below a root that it knows better by now."""
        for part in segment.parts:  # before the core takes its Opens and Commits
            self._learn(part)
        return super().draft(segment, width)

    def _learn(self, part: SegmentPart) -> None:
        opening, number = part.opening, part.commit.request
        request = self._requests.get(number)
        if opening is not None and (request is None or opening.epoch > request.opening.epoch):
            request = self._requests.setdefault(number, Request(opening, opening.root))
            request.begin(opening)
            self._truths.setdefault(number, {})
        if request is not None and part.commit.epoch == request.opening.epoch and request.learn(part):
            # Features of what a rewind left behind can go; those of nodes after the new root may have come.
            living, truths = {*request.path.values()}, self._truths[number]
            kept = (node for node in truths if node in living or node > request.opening.root)
            self._truths[number] = {node: truths[node] for node in kept}

    def open_cache(self, request: int, slots: int) -> None:
        own = self._requests[request]
        own.cache, own.has_keys, own.written = self._model.new_cache(slots), np.zeros(slots, dtype=bool), 0

    def close_cache(self, request: int) -> None:
        self._requests.pop(request, None)

    def logits(self, hidden: Array) -> F32:
        logits = self._model.logits(hidden)
        if not np.isfinite(logits.max(axis=1, initial=0)).all():
            raise ClusterError(
                f"the drafter computed no finite numbers in {self._model.engine.dtype}; try --dtype bfloat16 "
                "or float32"
            )
        return logits

    def _write(self, number: int) -> None:
        """Keys and values of committed nodes from the first on that has none, as far as their features have
        come; of these stays what rows read."""
        request, truths, read = self._requests[number], self._truths[number], self._model.feature_width
        begin, nodes = request.written, list[int]()
        while (node := request.path.get(begin + len(nodes), -1)) in truths and len(truths[node]) != read:
            nodes.append(node)
        if not nodes:
            return
        assert request.cache is not None
        request.written += len(nodes)
        request.cache.reserve(request.written)
        features = namespace(truths[nodes[0]]).stack([truths[node] for node in nodes])
        self._model.write(features, np.arange(begin, request.written), request.cache)
        for node in nodes:
            if read:
                truths[node] = self._model.engine.copied(truths[node][-read:])
            else:
                del truths[node]


class ChainDrafter(FeatureDrafter):
    """A row reads its token and the feature of its parent; a guess's feature is the drafter's own prediction.
    Once the target's is known below a guess that is committed by then, and the guess is the root, it is
    ranked again, for what comes after it is now known better (the papers call this the catch-up pass).

    A row whose parent has no feature cannot run: nothing attends to it, and nothing is proposed below it.
    That is the first token of every text, and no other if features come before the rows that read them.
    """

    def clear_slots(self, command: ClearSlots) -> None:
        request = self._requests[command.request]
        for slot in command.slots:
            request.forget(request.node_at.get(slot, -1))

    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], Array]:
        """Runs rows whose parent's feature is known, and those to be run again, then the rows below them, as
        far as it goes."""
        parts = [(part, place) for part in job.parts for place in range(len(part.slots))]
        given = zip(rows, parts, strict=True)
        waiting = [Run(row, int(part.slots[place]), part.visible[place]) for row, (part, place) in given]
        waiting = [run for run in waiting if self._must_run(run.row)]
        for part in job.parts:
            waiting += self._again(part)
        self.pass_rows = []
        asked: list[Row] = []
        model = self._model
        found = [model.engine.zeros((0, model.hidden_size), model.engine.dtype)]
        while waiting:
            pending = {(run.row.request, run.row.node) for run in waiting}
            features = [(run, self._feature(run.row, pending)) for run in waiting]
            ready = [(run, feature) for run, feature in features if feature is not None]
            if not ready:
                break
            waiting = [run for run, feature in features if feature is None]
            ready.sort(key=lambda pair: pair[0].row.request)
            runs = [run for run, _ in ready]
            self.pass_rows.append(len(runs))
            hidden, predicted = self._run_pass(job, runs, [feature for _, feature in ready])
            for run, feature in zip(runs, predicted, strict=True):
                self._note(run, feature)
            asked += [run.row for run in runs if run.row.asked]
            found.append(hidden[[index for index, run in enumerate(runs) if run.row.asked]])
        return asked, namespace(found[0]).concatenate(found)

    def _run_pass(
        self, job: RunLayers, runs: Sequence[Run], features: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Of rows, sorted by request, with their parents' features."""
        batch, first = TreeBatch([]), 0
        for part in sorted(job.parts, key=lambda part: part.request):
            own = [run for run in runs if run.row.request == part.request]
            if own:
                batch.requests.append(self._tree_rows(part, own, first))
                first += len(own)
        tokens = np.array([run.row.token for run in runs])
        return self._model.run(tokens, namespace(features[0]).stack(features), batch)

    def _feature(self, row: Row, pending: Set[tuple[int, int]]) -> Array | None:
        """What is read of the parent's feature: of the target's where it is known, else of the drafter's own;
        None where neither is, or the parent is among nodes of requests that are still to run."""
        truth = self._truths[row.request].get(row.parent)
        if truth is not None:
            return truth[-self._model.feature_width :]
        run = self._requests[row.request].runs.get(row.parent)
        return None if run is None or (row.request, row.parent) in pending else run.predicted

    def _note(self, run: Run, predicted: Array) -> None:
        """Remembers a row that has run, and drops what is now known for good."""
        row, request, truths = run.row, self._requests[run.row.request], self._truths[run.row.request]
        above = request.runs.get(row.parent)
        run.steps = 0 if row.parent in truths else 1 if above is None else above.steps + 1
        request.forget(row.node)
        if run.steps or row.node not in truths:
            run.predicted = self._model.engine.copied(predicted)  # a view would keep all rows in memory
            request.runs[row.node], request.node_at[run.slot] = run, row.node
        if above is not None and not run.steps and not above.steps:
            request.forget(row.parent)

    def _must_run(self, row: Row) -> bool:
        return True

    @abstractmethod
    def _again(self, part: JobPart) -> Iterator[Run]:
        """Rows of earlier jobs that are to run again."""

    @abstractmethod
    def _tree_rows(self, part: JobPart, runs: Sequence[Run], first: int) -> TreeRows:
        """What rows of a request see, and where."""


class CachedChainDrafter(ChainDrafter):
    """Rows have keys of their own (EAGLE, MTP). Once the target's feature is known and a guess below it is
    committed, the guess's keys and values are made again from the truth.

    Guesses that live go on from predictions of predictions. In a full pipeline no guess is wrong for a long
    time, so their chain would grow without end, and heads are trained for a few tokens. So once it is `SLACK`
    steps longer than it need be by what is known now, all of a request's living guesses are made again from
    the truth, one generation after another, and proposed children anew.
    """

    def copy_features(self, message: CopyFeatures) -> None:
        """The rows that were copied are run here all the same, with the same features."""
        own, others = self._truths.setdefault(message.request, {}), self._truths.get(message.source, {})
        for node, other in zip(message.nodes, message.source_nodes, strict=True):
            if other in others:
                own[node] = others[other]

    def clear_slots(self, command: ClearSlots) -> None:
        request, slots = self._requests[command.request], command.slots
        assert request.cache is not None
        request.cache.clear(slots)
        request.has_keys[list(slots)] = False
        super().clear_slots(command)

    def _again(self, part: JobPart) -> Iterator[Run]:
        """Committed rows of a request whose keys stem from a prediction while the truth is known by now; and
        all guesses that live, where their chain is too long."""
        request, truths = self._requests[part.request], self._truths[part.request]
        committed, guesses = list[Run](), list[Run]()
        for run in request.runs.values():
            (committed if request.is_committed(run.row) else guesses).append(run)
        is_long = any(run.steps - self._steps_needed(run) >= SLACK for run in guesses)
        again = [run for run in committed if run.steps and run.row.parent in truths]
        for run in again + guesses * is_long:
            seen = np.zeros(len(part.key_positions), dtype=bool)
            seen[: len(run.seen)] = run.seen[: len(seen)]  # slots behind the last in use are nobody's
            is_asked = run.row.node == request.root or not request.is_committed(run.row)
            yield Run(replace(run.row, asked=is_asked), run.slot, seen)

    def _steps_needed(self, run: Run) -> int:
        """How many predictions in a row it would stem from if it ran now."""
        runs, truths = self._requests[run.row.request].runs, self._truths[run.row.request]
        steps = 0
        while run.row.parent not in truths and run.row.parent in runs:
            run, steps = runs[run.row.parent], steps + 1
        return steps

    def _tree_rows(self, part: JobPart, runs: Sequence[Run], first: int) -> TreeRows:
        request, keys = self._requests[part.request], part.key_positions
        slots, positions = (
            np.array(each) for each in zip(*((r.slot, r.row.position) for r in runs), strict=True)
        )
        request.has_keys[slots] = True
        seen = np.stack([run.seen for run in runs]) & request.has_keys[: len(keys)]  # [own, high]
        assert request.cache is not None
        return TreeRows(request.cache, first, slots, positions, keys, seen)


class SharedKeysDrafter(ChainDrafter):
    """Rows have no keys of their own, but see those of the committed text that the target's layers make
    (assistants of Gemma 4).

    All guesses below a committed node stand at that node's place, and see what it sees, as the publisher's
    own code has it. That node is the last one on a row's path whose parent's feature the target has given.
    """

    def _must_run(self, row: Row) -> bool:
        """Nothing is remembered of committed rows that nobody asks for but their keys."""
        return row.asked or not self._requests[row.request].is_committed(row)

    def _again(self, part: JobPart) -> Iterator[Run]:
        self._write(part.request)
        request, truths = self._requests[part.request], self._truths[part.request]
        run = request.runs.get(request.root)
        if run is not None and run.steps and run.row.parent in truths:
            yield Run(replace(run.row, asked=True), run.slot, run.seen)

    def _feature(self, row: Row, pending: Set[tuple[int, int]]) -> Array | None:
        return super()._feature(row, pending) if self._requests[row.request].written else None

    def _tree_rows(self, part: JobPart, runs: Sequence[Run], first: int) -> TreeRows:
        request, own = self._requests[part.request], np.array([self._place(run.row) for run in runs])
        keys = np.arange(request.written, dtype=np.int32)
        assert request.cache is not None
        return TreeRows(request.cache, first, own, own, keys, keys[None] < own[:, None])

    def _place(self, row: Row) -> int:
        """The position of the last row on a path, this one included, whose parent's feature is the
        target's."""
        runs, truths = self._requests[row.request].runs, self._truths[row.request]
        while row.parent not in truths and row.parent in runs:
            row = runs[row.parent].row
        return row.position


class BlockDrafter(FeatureDrafter):
    """A block begins with the newest committed node whose feature the target has not given yet. What one pass
    guesses for a place goes for all nodes at the place before, but for what their own tokens add: whoever
    builds the tree takes the best pairs of node and token first (as arXiv 2604.12989 has it). Once more
    features come, the next block begins further on, and all nodes that live are proposed children anew.
    """

    def clear_slots(self, command: ClearSlots) -> None:
        request = self._requests[command.request]
        for slot in command.slots:
            request.rows.pop(request.node_at.pop(slot, -1), None)

    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], Array]:
        """Runs a block of each request of which more is known than of the last one; returns the rows that
        are proposed children, and what the block has for them."""
        slots = (int(slot) for part in job.parts for slot in part.slots)
        for row, slot in zip(rows, slots, strict=True):
            request = self._requests[row.request]
            request.rows[row.node], request.node_at[slot] = row, row.node
        for part in job.parts:
            self._write(part.request)
        begun = self._begin([self._requests[part.request] for part in job.parts])
        asked = [row for row in rows if row.asked and row.request not in begun]
        for request in begun.values():
            living = request.rows.values()
            asked += [row for row in living if row.node == request.root or not request.is_committed(row)]
        found, guesses = list[Row](), list[Array]()
        for row in asked:
            block = self._requests[row.request].block
            if block is not None and 0 <= row.position - block.begin < len(block.guesses):
                found.append(row)
                guesses.append(block.guesses[row.position - block.begin])
        if not found:
            return [], self._model.engine.zeros((0, self._model.hidden_size), self._model.engine.dtype)
        stacked = namespace(guesses[0]).stack(guesses)
        return found, self._model.after(stacked, [row.token for row in found])

    def _begin(self, requests: Sequence[Request]) -> dict[int, Request]:
        """Runs the next block of each request of which more is known than of its last one; these."""
        ready = list[tuple[Request, Row]]()
        for request in requests:
            row = request.rows.get(request.path.get(request.written, -1))
            is_known = request.block is not None and row is not None and request.block.node == row.node
            if row is not None and request.written and not is_known:
                ready.append((request, row))
        block = self._model.block
        assert block is not None
        self.pass_rows = [len(ready) * block.size] if ready else []
        if not ready:
            return {}
        caches = [request.cache for request, _ in ready if request.cache is not None]
        begins = [request.written for request, _ in ready]
        guesses = self._model.guess([row.token for _, row in ready], begins, caches)
        for (request, row), begin, own in zip(ready, begins, guesses, strict=True):
            request.block = _Block(row.node, begin, own)
            request.rows = {node: row for node, row in request.rows.items() if row.position >= begin}
        return {row.request: request for request, row in ready}

    def _propose(self, rows: Sequence[Row], hidden: Array, width: int, masks: Masks) -> list[Proposal]:
        """Ranks once for all nodes of a request that have the same guesses: those at one place, of a drafter
        that looks at the token before, those with one token there. Where the text before changes what is
        drawn, each has its own."""
        is_of_token = self._model.layout.rank > 0
        places = [
            (row.request, row.position, is_of_token * row.token, row.sampling.needs_text * row.node)
            for row in rows
        ]
        first = {place: index for index, place in reversed([*enumerate(places)])}
        chosen = sorted(first.values())
        ranked = super()._propose([rows[index] for index in chosen], hidden[chosen], width, masks)
        found = dict(zip((places[index] for index in chosen), ranked, strict=True))
        each = zip(rows, places, strict=True)
        return [structs.replace(found[place], epoch=row.epoch, node=row.node) for row, place in each]


def drafter_over(model: FeatureModel) -> type[FeatureDrafter]:
    if model.block is not None:
        return BlockDrafter
    return SharedKeysDrafter if model.layout.key_sources else CachedChainDrafter
