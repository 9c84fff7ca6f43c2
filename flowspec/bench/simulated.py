"""The simulated world: a testbed's devices and links in virtual time, and one answer in it.

What a method costs as the papers' code does it (`Setup.published`, arXiv 2507.02620 and its repository) and
not as ours does:

- the head verifies: hidden states of all rows of a segment travel back to it, and it runs `lm_head` over
  them;
- every turn, each stage waits for the head's verdict on the segment before it goes on: a verification and a
  message more per slot;
- every turn, each stage copies its whole cache to compact it;
- (what stays kinder: rows known to be wrong are not run, trees are merged by node.)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowspec import checking
from flowspec.bench.config import SIMULATED, Bench, Setup, Testbed
from flowspec.bench.drafter_places import places_of
from flowspec.bench.guesses import depths_of
from flowspec.bench.oracle import Station
from flowspec.bench.outcome import Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.recording import RecordedAnswer, energy_of, record_of
from flowspec.bench.trace import Trace
from flowspec.core.head.events import Submit
from flowspec.core.head.head import Experience
from flowspec.core.methods import find_method
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.protocol import Drafter
from flowspec.plan.cost import head_curve, layers_curve, row_bytes
from flowspec.plan.timing import INSTANT, Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import AnswerLanguage
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled, Links, World
from flowspec.watch.detokenizer import Decode
from flowspec.watch.figures import EVERY_S, Frame
from flowspec.watch.recorder import Recorder, StageRows

TYPICAL_ROWS = 16
"""Rows of the published methods' segments, for what a turn's verification takes."""
TYPICAL_CONTEXT = 256
"""Tokens in the caches that a turn compacts: half of a prompt of some hundred tokens and 256 new ones, and
more."""
SIM_LAYERS = 8
"""Instants at which a running job can drop rows; a stage of fewer layers has as many as layers."""


Drafters = Mapping[str, Drafter]
"""The models beside the target by name, in the order in which the head numbers them."""


def stage_curves(testbed: Testbed) -> list[Curve]:
    """The time of each stage's layers, without `lm_head`."""
    layers = zip(testbed.devices, testbed.layers, strict=True)
    return [
        layers_curve(device, testbed.shape, testbed.precision, count).scaled(testbed.slowdown)
        for device, count in layers
    ]


def sampling_curve(testbed: Testbed) -> Curve:
    """What `lm_head` adds on the last stage."""
    return head_curve(testbed.devices[-1], testbed.shape, testbed.precision).scaled(testbed.slowdown)


def experiment(
    testbed: Testbed,
    setup: Setup,
    context: int,
    models: Sequence[str] = (),
    depths: Sequence[float] = (),
) -> Experiment:
    """The testbed as the simulator takes it, for one method with these models beside the target, which read
    the target's states at these `depths` (`depths_of`), each captured by the stage that has its layer."""
    places = places_of(testbed, models)
    curves = stage_curves(testbed)
    verifying = INSTANT
    if setup.published:
        verifying = head_curve(testbed.head, testbed.shape, testbed.precision).scaled(testbed.head_slowdown)
        if find_method(setup.method).waits_each_turn:
            waiting_s = verifying.seconds(TYPICAL_ROWS) + testbed.link.delay_s
            curves = [
                curve.and_fixed(waiting_s + _copy_s(testbed, count, index))
                for index, (curve, count) in enumerate(zip(curves, testbed.layers, strict=True))
            ]
    last = len(curves) - 1
    sampling = INSTANT if setup.published else sampling_curve(testbed)
    row = row_bytes(testbed.shape, testbed.precision)
    return Experiment(
        devices=tuple(
            DeviceSpec(
                curve=curve, layers=min(SIM_LAYERS, count), sampling=sampling if index == last else INSTANT
            )
            for index, (curve, count) in enumerate(zip(curves, testbed.layers, strict=True))
        ),
        control=testbed.link,
        data=testbed.link,
        links=Links(control=(testbed.link,) * len(curves), data=testbed.hops) if testbed.hops else None,
        method=setup.method,
        options=setup.options,
        context=context,
        drafting=places.curves,
        ranking=places.rankings,
        boards=places.boards,
        levels=tuple(range(len(models))) if setup.chain else (),
        head_s=testbed.head_s,
        row_bytes=row,
        captured=captured_by(testbed.layers, depths) if depths else (),
        feature_bytes=row,
        returned_row_bytes=row if setup.published else 0,
        verifying=verifying,
    )


def stations_of(experiment: Experiment, context: int) -> list[Station]:
    """What carries segments in such a cluster, in order, for an answer behind `context` tokens: the way to
    each stage with the stage, the way back, the head. Of messages the payload alone is counted."""
    links = experiment.links
    stages = len(experiment.devices)
    ways = (experiment.data,) * (stages + 1) if links is None else links.data
    sizes = experiment.row_bytes
    rows_bytes = list(sizes) if isinstance(sizes, tuple) else [sizes or 0] * stages
    rows_bytes[0] = 0  # tokens
    found = []
    for number, (way, row, device) in enumerate(zip(ways, rows_bytes, experiment.devices, strict=False)):
        found += [_way(way, row), _stage(device, context, number)]
    last_states = experiment.captured[-1] if experiment.captured else 0  # the verdict comes behind them
    features = last_states * (experiment.feature_bytes or 0)
    found.append(_way(ways[-1], features + experiment.returned_row_bytes))
    verifying, head_s = experiment.verifying, experiment.head_s
    found.append(Station(busy_s=lambda rows: head_s + verifying.seconds(rows)))
    return found


def _way(link: LinkSpec, row_bytes: int) -> Station:
    return Station(busy_s=lambda rows: link.transfer_s(rows * row_bytes), delay_s=link.delay_s)


def _stage(device: DeviceSpec, context: int, number: int) -> Station:
    return Station(
        busy_s=lambda rows: device.curve.seconds(rows, context) + device.sampling.seconds(rows), stage=number
    )


def captured_by(layers: Sequence[int], depths: Sequence[float]) -> tuple[int, ...]:
    """How many of the states at these depths, as shares of all layers, each stage has; 1 is what comes out of
    the last."""
    ends, count = list(itertools.accumulate(layers)), sum(layers)
    places = [min(bisect.bisect_right(ends, depth * count), len(ends) - 1) for depth in depths]
    return tuple(places.count(stage) for stage in range(len(ends)))


def _copy_s(testbed: Testbed, layers: int, index: int) -> float:
    """A stage's whole cache, read and written."""
    device = testbed.devices[index]
    size = (
        layers * testbed.shape.cache_values() * max(2.0, PRECISION_BYTES[testbed.precision]) * TYPICAL_CONTEXT
    )
    return testbed.slowdown * 2 * size / device.bytes_per_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An answer in virtual time: its record, what happened (as frames, if these were asked for), and what the
    head learnt."""

    record: Record
    trace: Trace
    experience: Experience
    frames: tuple[Frame, ...] = ()


def run(
    bench: Bench,
    testbed: Testbed,
    setup: Setup,
    case: PlainCase,
    drafters: Drafters,
    experience: Experience | None = None,
    decode: Decode | None = None,
) -> Run:
    """Answers a case in a world of its own, with the `experience` so far (which is learnt from on, so give a
    copy).

    With a `decode`, which gives tokens' text, it is recorded.
    """
    trace = Trace()
    frames: list[Frame] = []
    world = build(testbed, setup, [case], drafters, bench.context, experience)
    recorder = (
        None if decode is None else Recorder(world.head.requests, lambda: stages_of(testbed), decode, 0.0)
    )

    def watch(handled: Handled) -> None:
        if handled.place == HEAD:
            trace.watch(handled.event, handled.commands, handled.now_s)  # type: ignore[arg-type]
            if recorder is not None:
                recorder(handled.event, handled.commands, handled.now_s)  # type: ignore[arg-type]
                frames.extend(recorder.frames())

    world.on_event = watch
    world.at(0.0, submit_of(case))
    world.run()
    if recorder is not None:
        frames.extend(recorder.frames(world.clock.now_s + EVERY_S))
    record = _record(bench, testbed, setup, case, drafters, world, trace)
    return Run(record=record, trace=trace, experience=world.head.experience(), frames=tuple(frames))


def stages_of(testbed: Testbed) -> StageRows:
    ends = list(itertools.accumulate(testbed.layers))
    return [
        {"name": f"{index + 1}: {device.name}", "layers": [end - count, end]}
        for index, (device, count, end) in enumerate(zip(testbed.devices, testbed.layers, ends, strict=True))
    ]


def run_many(
    testbed: Testbed,
    setup: Setup,
    cases: Sequence[PlainCase],
    drafters: Drafters,
    context: int,
    experience: Experience | None = None,
    watch: Callable[[Handled], None] | None = None,
) -> World:
    """A world in which all cases were asked at time 0, each as the request of its place, and answered; with
    what is `experience` as in `run`."""
    world = build(testbed, setup, cases, drafters, context, experience, watch)
    for request, case in enumerate(cases):
        world.at(0.0, submit_of(case, request))
    world.run()
    return world


def build(
    testbed: Testbed,
    setup: Setup,
    cases: Sequence[PlainCase],
    drafters: Drafters,
    context: int,
    experience: Experience | None = None,
    watch: Callable[[Handled], None] | None = None,
) -> World:
    """A world at time 0 that knows the plain answers to all cases, with what is `experience` as in `run`."""
    language = AnswerLanguage({case.prompt: case.answer for case in cases})
    depths = depths_of(drafters.values())
    world = experiment(testbed, setup, context, list(drafters), depths).build(
        language, list(drafters.values()), watch, checks=checking.is_on()
    )
    if experience is not None:
        world.head.take(experience)
    return world


def busy_of(testbed: Testbed, drafters: Drafters, world: World) -> dict[int | None, float]:
    """For how long the boards of the drafters computed, as `recording.energy_of` takes it."""
    busy_s: dict[int | None, float] = {}
    for number, board in zip(places_of(testbed, list(drafters)).numbers, world.boards, strict=True):
        busy_s[number] = busy_s.get(number, 0.0) + board.busy_s
    return busy_s


def submit_of(case: PlainCase, request: int = 0) -> Submit:
    return Submit(
        request=request,
        prompt=case.prompt,
        new_tokens_max=case.new_tokens_max,
        sampling=case.sampling,
        stop_ids=case.stop_ids,
    )


def _record(
    bench: Bench,
    testbed: Testbed,
    setup: Setup,
    case: PlainCase,
    drafters: Drafters,
    world: World,
    trace: Trace,
) -> Record:
    (answer,) = world.answers[0]
    assert answer.end is not None, "the world came to rest without an end of the answer"
    first_s, last_s = (answer.times_s[0], answer.times_s[-1]) if answer.times_s else (0.0, 0.0)
    answered = RecordedAnswer(
        tokens=tuple(answer.tokens),
        reason=answer.end.reason,
        submitted_s=0.0,
        first_s=first_s,
        last_s=last_s,
        report=answer.end.statistics.report(),
        trace=trace,
    )
    return record_of(
        bench,
        testbed.name,
        setup,
        case,
        answered,
        world=SIMULATED,
        repeat=0,
        network_bytes=world.bytes_sent,
        energy_j=energy_of(
            testbed, last_s, [device.busy_s for device in world.devices], busy_of(testbed, drafters, world)
        ),
        events=world.events,
        digest=world.digest.hex(),
        stations=stations_of(
            experiment(testbed, setup, bench.context, list(drafters), depths_of(drafters.values())),
            len(case.prompt),
        ),
    )
