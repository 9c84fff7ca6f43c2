"""Dead rows leave while a stage works: between the layers of a job that runs, and in every place of a real
cluster.

The first part is a real stage core and compute thread over a real slice, one layer of which waits until the
test lets it go on, so what comes while it runs is no matter of luck. The second is four processes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flowspec.bench.records import EXACT
from flowspec.bench.verify import Case, answer_of, judge
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Open, Sampling, Segment
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendSegment,
    Trim,
)
from flowspec.core.stage.stage import StageCore
from flowspec.model.attention import Angles
from flowspec.model.cpu import _Pass
from flowspec.model.files import ModelFiles
from flowspec.model.layer import Program
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from flowspec.wire.codec import Tensor
from tests.checkpoints import SMALL, make_checkpoint
from tests.core.stages import part_of
from tests.runtime.clusters import WAIT_S
from tests.runtime.compute_bench import CONTEXT, Bench

LAYERS = 6
"""Of the model's eight: a slice that sends hidden states on."""
ASSIGNMENT_IDS = itertools.count(1)
"""As in a daemon, each core has a number of its own, for all of them number their jobs from 1."""
PROMPT = (5, 6, 7)


class Watched:
    """Counts the rows that a layer is given and, if asked to, waits before it runs."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.entered = threading.Event()
        self.may_run = threading.Event()
        self.may_run.set()

    def look(self, rows: int) -> None:
        self.rows.append(rows)
        self.entered.set()
        assert self.may_run.wait(WAIT_S), "the test never let the layer go on"


@dataclass
class Stage:
    """What a daemon does with its core and its compute thread, without sockets."""

    bench: Bench
    layers: list[Watched]
    core: StageCore = field(
        default_factory=lambda: StageCore(is_last=False, slots_max=CONTEXT + limits.TREE_NODES_MAX)
    )
    sent: list[SendSegment] = field(default_factory=list)
    assignment_id: int = field(default_factory=lambda: next(ASSIGNMENT_IDS))

    def give(self, event: SegmentArrived | ControlArrived | LayersDone) -> None:
        for command in self.core.handle(event, 0.0):
            if isinstance(command, RunLayers | OpenCache | ClearSlots | CloseCache):
                self.bench.compute.post(self.assignment_id, command)
            elif isinstance(command, Trim):
                self.bench.compute.trim(self.assignment_id, command.job, command.rows)
            else:
                assert isinstance(command, SendSegment)
                self.sent.append(command)

    def run(self, segment: Segment) -> None:
        self.give(SegmentArrived(segment=segment, payload=None, received_s=0.0))

    def finish(self) -> tuple[Segment, Tensor | None]:
        """Waits until the job that runs is done; what it sends on."""
        done = self.bench.result(self.assignment_id)
        assert isinstance(done, LayersDone), done
        self.give(done)
        sent = self.sent.pop()
        return sent.segment, sent.payload.select(sent.rows) if sent.rows else None

    def rows_seen(self) -> list[int]:
        """Rows of the last job that each layer was given; 0 for a layer that did not run."""
        seen = [layer.rows[-1] if layer.rows else 0 for layer in self.layers]
        for layer in self.layers:
            layer.rows.clear()
        return seen


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[tuple[Bench, list[Watched]]]:
    bench = Bench(folder)
    bench.load(next(ASSIGNMENT_IDS), (0, LAYERS))
    layers, run_layer, part = [Watched() for _ in range(LAYERS)], _Pass.run, bench.slice()

    def run(rows: _Pass, layer: Program, angles: Angles) -> None:
        if layer in part.layers:
            layers[part.layers.index(layer)].look(len(rows.hidden))
        run_layer(rows, layer, angles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Pass, "run", run)
        yield bench, layers
    bench.close()


def opening(request: int) -> Open:
    length, slots = len(PROMPT), CONTEXT + limits.TREE_NODES_MAX
    return Open(
        **{"request": request, "epoch": 0, "keep": 0, "length": length, "root": 2, "slots": slots},
        sampling=Sampling(),
        answer_start=length,
    )


def commit(*path: int, request: int = 1) -> Commit:
    return Commit(request=request, epoch=0, base=len(PROMPT), path=path)


def segment(
    number: int, rows: Sequence[tuple[int, int, int, int]], *, request: int = 1, opens: Open | None = None
) -> Segment:
    """Rows are (id, parent, token, position)."""
    part = part_of(commit(request=request), rows, opens, is_prompt=opens is not None)
    return Segment(segment=number, parts=(part,))


def prepared(loaded: tuple[Bench, list[Watched]], request: int) -> Stage:
    """A stage that has run the prompt of a request: nodes 0, 1 and 2, of which 2 is the root."""
    stage = Stage(*loaded)
    rows = [(node, node - 1, token, node) for node, token in enumerate(PROMPT)]
    stage.run(segment(0, rows, request=request, opens=opening(request)))
    stage.finish()
    assert stage.rows_seen() == [3] * LAYERS
    return stage


@pytest.fixture
def stage(loaded: tuple[Bench, list[Watched]]) -> Stage:
    return prepared(loaded, 1)


@pytest.fixture
def alone(loaded: tuple[Bench, list[Watched]]) -> Stage:
    """A second stage on the same slice, for the run without what dies: request 2."""
    return prepared(loaded, 2)


TREE = [
    *((3, 2, 30, 3), (4, 2, 40, 3), (5, 3, 50, 4), (6, 4, 60, 4)),
    *((7, 5, 70, 5), (8, 2, 80, 3), (9, 5, 90, 5)),
]
"""Three children of the root; below node 3 hang 5 and then 7 and 9, below node 4 node 6."""


def below(*nodes: int) -> list[tuple[int, int, int, int]]:
    return [row for row in TREE if row[0] in nodes]


def hold(stage: Stage, layer: int) -> None:
    """The next job waits before this layer runs."""
    stage.layers[layer].entered.clear()
    stage.layers[layer].may_run.clear()


def tell_at(stage: Stage, layer: int, message: Commit) -> None:
    """A Commit that comes while this layer waits."""
    watched = stage.layers[layer]
    assert watched.entered.wait(WAIT_S), f"layer {layer} is never reached"
    stage.give(ControlArrived(message=message))
    watched.may_run.set()


def assert_alike(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert bytes(found.data) == bytes(expected.data)
    assert any(found.data)


def dead(sent: Segment) -> tuple[int, int, int, int]:
    """Rows that began to run; those that left in the queue, between layers and late."""
    (hop,) = sent.hops
    return hop.rows, hop.dead_in_queue, hop.dead_between_layers, hop.dead_late


@pytest.mark.parametrize("layer", [0, LAYERS - 2])
def test_a_commit_in_mid_run_takes_the_dead_rows_out_at_the_next_layer(
    stage: Stage, alone: Stage, layer: int
) -> None:
    hold(stage, layer)
    stage.run(segment(1, TREE))
    tell_at(stage, layer, commit(3))
    sent, payload = stage.finish()
    assert stage.rows_seen() == [7] * (layer + 1) + [4] * (LAYERS - 1 - layer)
    assert sent.parts[0].ids == (3, 5, 7, 9)
    assert dead(sent) == (7, 0, 3, 0)
    alone.run(segment(1, below(3, 5, 7, 9), request=2))
    _, expected = alone.finish()
    assert alone.rows_seen() == [4] * LAYERS
    assert_alike(payload, expected)


def test_a_job_whose_rows_are_all_dead_stops_and_passes_on_as_a_header(stage: Stage) -> None:
    stage.run(segment(1, below(3, 4)))
    stage.finish()
    stage.rows_seen()
    hold(stage, 2)
    stage.run(segment(2, below(6)))
    tell_at(stage, 2, commit(3))
    sent, payload = stage.finish()
    assert stage.rows_seen() == [1, 1, 1, 0, 0, 0]
    assert (sent.row_count, payload, dead(sent)) == (0, None, (1, 0, 1, 0))


def test_slots_that_dead_rows_left_half_written_are_clean_for_the_next(stage: Stage, alone: Stage) -> None:
    """Node 10 and 11 take the slots of 4 and 6, whose keys stand in the caches of the layers before the
    trim."""
    hold(stage, 3)
    stage.run(segment(1, below(3, 4, 5, 6)))
    tell_at(stage, 3, commit(3))
    stage.finish()
    later = [(10, 5, 100, 5), (11, 10, 110, 6)]
    stage.run(segment(2, later))
    _, payload = stage.finish()
    alone.run(segment(1, below(3, 5), request=2))
    alone.finish()
    alone.run(segment(2, later, request=2))
    assert_alike(payload, alone.finish()[1])


PLACES = ("dead_in_queue", "dead_between_layers", "dead_late")
ANSWERS_MAX = 12
WIDTHS = {"hidden_size": 384, "intermediate_size": 1152, "num_attention_heads": 8, "num_key_value_heads": 8}
SHAPE = {**SMALL, **WIDTHS}
FLAT = {"initializer_range": 0.03}
"""Flat enough that the noise of the draw decides: a drafter that shares it is right now and then, and wrong
now and then."""


@pytest.mark.usefixtures("lent")
def test_rows_are_dropped_in_every_place_of_a_real_cluster_and_the_answers_stay_plain(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", {**SHAPE, **FLAT}, seed=1)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    drafter = make_checkpoint(tmp_path / "drafter", "llama", {**SMALL, **small, **FLAT}, seed=2)
    prompt = tuple(range(5, 25))
    end = Limits(new_tokens_max=30, stop_ids=frozenset())
    dropped = dict.fromkeys(PLACES, 0)
    found = []
    decoding = Decoding(method="continuous", drafters=(str(drafter),))
    with (
        open_cluster(ClusterOptions(model=str(target), dtype="float32", local=4, context=100)) as cluster,
        cluster.session(decoding, lambda text, share: None) as session,
    ):
        for seed in range(1, ANSWERS_MAX + 1):
            case = Case(prompt_id=str(seed), prompt=prompt, sampling=Sampling(temperature=1.0, seed=seed))
            running, timing = session.ask(prompt, case.sampling, end)
            found.append(answer_of(session, case, running, timing, end))
            assert running.end is not None
            for place in PLACES:
                dropped[place] += running.end.statistics[place]
            if all(dropped.values()):
                break
    assert all(dropped.values()), f"in {len(found)} answers: {dropped}"
    step_by_step = StepByStep.load(ModelFiles(str(target)), "float32")
    verdicts = [judge(step_by_step, one, end.stop_ids) for one in found]
    assert [verdict for verdict in verdicts if verdict["verdict"] != EXACT] == []
