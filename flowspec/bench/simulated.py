"""The simulated world: a testbed's devices and links in virtual time, and an answer or a load in it.

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
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import NamedTuple

from flowspec import checking
from flowspec.bench.cases import PlainCase
from flowspec.bench.drafters import DrafterForEach, depths_of
from flowspec.bench.experiment import DrafterPlacement, Experiment, LoadStep, Setup, Testbed
from flowspec.bench.records import (
    LoadAnswer,
    LoadRecord,
    Record,
    Trace,
    agreement_of,
    energy_of,
    record_of,
)
from flowspec.core.head.events import DrafterLost, DrafterRecovered, Emit, Finished, Forget, Submit
from flowspec.core.head.head import Experience
from flowspec.core.methods import find_method
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.base import Drafter
from flowspec.draft.lookup import LookUpDrafter
from flowspec.draft.registry import WITHOUT_TENSORS
from flowspec.plan.cost import drafter_curve, head_curve, layers_curve, row_bytes
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.timing import INSTANT, Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter_device import DrafterDeviceSpec
from flowspec.sim.language import AnswerLanguage
from flowspec.sim.record import HEAD
from flowspec.sim.world import Cluster, Handled, World
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
LOOKING_UP = Curve(extra_row_s=3e-4)
"""A drafter that looks up texts: three times what a row took on the x86-64 machine this was written on."""

Drafters = Mapping[str, Drafter]
"""The models other than the target by name, in the order in which the head numbers them."""
Place = int | None
"""A board's number in `Testbed.boards`; None: the head's."""


# ------------------------------------------------------------------------------------------ what things cost


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


def drafting_curve(testbed: Testbed) -> Curve:
    """A pass at the head of a model that has no other place."""
    return _drafter_curves(testbed, None)[0]


def _drafter_curves(testbed: Testbed, board: DrafterPlacement | None) -> tuple[Curve, Curve]:
    """Of a pass of a model on a board (None: at the head), and of its `lm_head` alone."""
    device, shape, precision = testbed.head, testbed.drafter_shape, testbed.precision
    if board is not None:
        device, shape = board.device or device, board.shape
    if shape is None:
        return INSTANT, INSTANT
    one_pass, ranking = drafter_curve(device, shape, precision), head_curve(device, shape, precision)
    return one_pass.scaled(testbed.head_slowdown), ranking.scaled(testbed.head_slowdown)


class DrafterPlaces(NamedTuple):
    """Where some models run: `curves` of a pass for each, and `rankings` of its `lm_head` alone; the `boards`
    that they run on, with the place of each (the head's looks up texts beside a model's passes)."""

    curves: tuple[Curve, ...]
    rankings: tuple[Curve, ...]
    boards: tuple[DrafterDeviceSpec, ...]
    places: tuple[Place, ...]


def places_of(testbed: Testbed, models: Sequence[str]) -> DrafterPlaces:
    """Models at the head share its processors, those on another board that one's."""
    named = {name: number for number, board in enumerate(testbed.boards) for name in board.models}
    curves, sharing = list[tuple[Curve, Curve]](), dict[tuple[Place, int | None], list[int]]()
    for at, model in enumerate(models):
        place = named.get(model)
        board = None if place is None else testbed.boards[place]
        is_lookup = board is None and model in WITHOUT_TENSORS
        curves.append((LOOKING_UP, LOOKING_UP) if is_lookup else _drafter_curves(testbed, board))
        if board is not None and board.device is None:
            place = None
        # Who looks up texts has a thread alone.
        sharing.setdefault((place, at if is_lookup else None), []).append(at)
    places = tuple(place for place, _ in sharing)
    return DrafterPlaces(
        curves=tuple(one_pass for one_pass, _ in curves),
        rankings=tuple(ranking for _, ranking in curves),
        boards=tuple(
            DrafterDeviceSpec(drafters=tuple(some), link=None if place is None else testbed.link)
            for (place, _), some in sharing.items()
        ),
        places=places,
    )


def cluster_of(
    testbed: Testbed,
    setup: Setup,
    context: int,
    models: Sequence[str] = (),
    depths: Sequence[float] = (),
) -> Cluster:
    """The testbed as the simulator takes it, for one method with these models beside the target, which read
    the target's states at these `depths` (`depths_of`), each captured by the stage that has its layer."""
    places, layers = places_of(testbed, models), testbed.layers
    verifying, curves = INSTANT, stage_curves(testbed)
    if setup.published:
        verifying = head_curve(testbed.head, testbed.shape, testbed.precision).scaled(testbed.head_slowdown)
        if find_method(setup.method).waits_each_turn:
            waiting_s = verifying.seconds(TYPICAL_ROWS) + testbed.link.delay_s
            stages = zip(curves, testbed.devices, layers, strict=True)
            curves = [
                curve.and_fixed(waiting_s + _copy_s(testbed, device, count))
                for curve, device, count in stages
            ]
    devices = [
        DeviceSpec(curve=curve, layers=min(SIM_LAYERS, count))
        for curve, count in zip(curves, layers, strict=True)
    ]
    if not setup.published:
        devices[-1] = replace(devices[-1], sampling=sampling_curve(testbed))
    row = row_bytes(testbed.shape, testbed.precision)
    return Cluster(
        devices=tuple(devices),
        control=testbed.link,
        data=testbed.hops or testbed.link,
        method=setup.method,
        options=setup.options,
        context=context,
        drafting=places.curves,
        ranking=places.rankings,
        boards=places.boards,
        levels=tuple(range(len(models))) if setup.chain else (),
        head_s=testbed.head_s,
        row_bytes=row,
        captured=captured_by(layers, depths) if depths else (),
        feature_bytes=row,
        returned_row_bytes=row if setup.published else 0,
        verifying=verifying,
    )


def captured_by(layers: Sequence[int], depths: Sequence[float]) -> tuple[int, ...]:
    """How many of the states at these depths, as shares of all layers, each stage has; 1 is what comes out of
    the last."""
    ends, count = list(itertools.accumulate(layers)), sum(layers)
    places = [min(bisect.bisect_right(ends, depth * count), len(ends) - 1) for depth in depths]
    return tuple(places.count(stage) for stage in range(len(ends)))


def _copy_s(testbed: Testbed, device: DeviceProfile, layers: int) -> float:
    """A stage's whole cache, read and written."""
    value_bytes = max(2.0, PRECISION_BYTES[testbed.precision])
    size = layers * testbed.shape.cache_values() * value_bytes * TYPICAL_CONTEXT
    return testbed.slowdown * 2 * size / device.bytes_per_s()


# ------------------------------------------------------------------------------------------ worlds


def build(
    testbed: Testbed,
    setup: Setup,
    cases: Sequence[PlainCase],
    drafters: Drafters,
    context: int,
    experience: Experience | None = None,
) -> World:
    """A world at time 0 that knows the plain answers to all cases, whose head has the `experience` so far
    (which is learnt from on, so give a copy)."""
    language = AnswerLanguage({case.prompt: case.answer for case in cases})
    cluster = cluster_of(testbed, setup, context, list(drafters), depths_of(drafters.values()))
    world = World(cluster, language, list(drafters.values()), checks=checking.is_on())
    if experience is not None:
        world.head.take(experience)
    return world


def run_many(
    testbed: Testbed,
    setup: Setup,
    cases: Sequence[PlainCase],
    drafters: Drafters,
    context: int,
    experience: Experience | None = None,
    watch: Callable[[Handled], None] | None = None,
) -> World:
    """A world of `build` in which all cases were asked at time 0, each as the request of its place, and
    answered."""
    world = build(testbed, setup, cases, drafters, context, experience)
    world.on_event = watch
    for request, case in enumerate(cases):
        world.at(0.0, submit_of(case, request))
    world.run()
    return world


def submit_of(case: PlainCase, request: int = 0) -> Submit:
    return Submit(
        request=request,
        prompt=case.prompt,
        new_tokens_max=case.new_tokens_max,
        sampling=case.sampling,
        stop_ids=case.stop_ids,
    )


def busy_of(testbed: Testbed, drafters: Drafters, world: World) -> dict[Place, float]:
    """For how long the boards of the drafters computed up to now, as `records.energy_of` takes it."""
    busy_s: dict[Place, float] = {}
    for place, board in zip(places_of(testbed, list(drafters)).places, world.boards, strict=True):
        busy_s[place] = busy_s.get(place, 0.0) + board.busy_until(world.clock.now_s)
    return busy_s


def stages_of(testbed: Testbed) -> StageRows:
    ends = list(itertools.accumulate(testbed.layers))
    return [
        {"name": f"{index + 1}: {device.name}", "layers": [end - count, end]}
        for index, (device, count, end) in enumerate(zip(testbed.devices, testbed.layers, ends, strict=True))
    ]


# ------------------------------------------------------------------------------------------ one user


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An answer in virtual time: its record, what happened (as frames, if these were asked for), and what the
    head learnt."""

    record: Record
    trace: Trace
    experience: Experience
    frames: tuple[Frame, ...] = ()


def run(
    experiment: Experiment,
    testbed: Testbed,
    setup: Setup,
    case: PlainCase,
    drafters: Drafters,
    experience: Experience | None = None,
    decode: Decode | None = None,
) -> Run:
    """Answers a case in a world of its own, with `experience` as in `build`. With a `decode`, which gives
    tokens' text, it is recorded."""
    trace, frames = Trace(), list[Frame]()
    world = build(testbed, setup, [case], drafters, experiment.context, experience)
    recorder = None
    if decode is not None:
        recorder = Recorder(world.head.requests, lambda: stages_of(testbed), decode, 0.0)

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
    (answer,) = world.answers[0]
    assert answer.end is not None, "the world came to rest without an end of the answer"
    last_s = answer.times_s[-1] if answer.times_s else 0.0
    stages_s = [device.busy_s for device in world.devices]
    record = record_of(
        experiment,
        testbed.name,
        setup,
        case,
        trace,
        answer.end.statistics.report(),
        tokens=answer.tokens,
        reason=answer.end.reason,
        asked_s=0.0,
        first_s=answer.times_s[0] if answer.times_s else 0.0,
        last_s=last_s,
        repeat=0,
        network_bytes=world.bytes_sent,
        energy_j=energy_of(testbed, last_s, stages_s, busy_of(testbed, drafters, world)),
        events=world.events,
        digest=world.digest.hex(),
        arithmetic="",
    )
    return Run(record=record, trace=trace, experience=world.head.experience(), frames=tuple(frames))


# ------------------------------------------------------------------------------------------ many users


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Closed loops: each of the users asks the next prompt the moment the last one is answered. Either so
    many `users` ask all `cases` once, in their order; or they come and go in `steps`, while drafters are
    slow, lost, back, and who goes waits for the answer that is under way. All setups are asked the same."""

    cases: tuple[PlainCase, ...]
    users: int = 0
    steps: tuple[LoadStep, ...] = ()


def shuffle_cases(cases: Sequence[PlainCase], count: int, seed: int) -> list[PlainCase]:
    """So many cases in an order by chance: all of them once, then all again in another order."""
    chance = random.Random(seed)
    order: list[PlainCase] = []
    while len(order) < count:
        order += chance.sample(list(cases), len(cases))
    return order[:count]


def scheduled_case(cases: Sequence[PlainCase], users: int, step: int, user: int, turn: int) -> PlainCase:
    """What a user asks at a turn of a step, however far others get: domains in turns, beginning with another
    one for the next user; of a domain's prompts, in an order by chance, nobody is given one that another has
    at this turn, as long as there are so many."""
    domains = list(dict.fromkeys(case.domain for case in cases))
    domain = domains[(user + turn) % len(domains)]
    own = [case for case in cases if case.domain == domain]
    order = random.Random(f"{step} {domain}").sample(own, len(own))
    together = -(-users // len(domains))
    return order[(turn * together + user // len(domains)) % len(own)]


class _Asked(NamedTuple):
    step: int
    user: int
    case: PlainCase
    at_s: float


class _Totals(NamedTuple):
    """What happened in a world until the begin of a step, or the end."""

    tokens: int
    stages_s: list[float]
    boards_s: dict[Place, float]
    network_bytes: int


@dataclass
class LoadedWorld:
    """A load in a world of its own: asks, hears when an answer ends, and has each step happen. Requests are
    numbered as they are asked; `drafters_of` makes the models other than the target for one answer to a case,
    and `experience` is as in `build`."""

    experiment: Experiment
    testbed: Testbed
    setup: Setup
    load: Load
    drafters_of: Callable[[PlainCase], Drafters]
    experience: InitVar[Experience | None] = None

    def __post_init__(self, experience: Experience | None) -> None:
        load = self.load
        self._steps = load.steps or (LoadStep(users=load.users, seconds=1.0),)
        self._at = -1
        self._asked: list[_Asked] = []
        self._turns = Counter[tuple[int, int]]()
        self._waiting: set[int] = set()
        self._tokens = 0
        self._totals: list[_Totals] = []
        self._each = {name: [drafter] for name, drafter in self.drafters_of(load.cases[0]).items()}
        # One that guesses from texts takes all answers, as at a head, and may remember them.
        self._drafters = {
            name: some[0] if isinstance(some[0], LookUpDrafter) else DrafterForEach(some)
            for name, some in self._each.items()
        }
        self._world = build(
            self.testbed, self.setup, load.cases, self._drafters, self.experiment.context, experience
        )
        self._world.on_event = self._watch
        for some in self._each.values():
            some.clear()
        starts_s = itertools.accumulate((step.seconds for step in load.steps), initial=0.0)
        for number, start_s in enumerate(starts_s):
            self._world.clock.at(start_s, partial(self._begin, number))

    def _begin(self, number: int) -> None:
        """A step begins; after the last one of a schedule nobody asks any more."""
        self._count()
        self._at = number
        if number == len(self._steps):
            return
        step = self._steps[number]
        lost_before = self._steps[number - 1].lost if number else ()
        for drafter, name in enumerate(self._drafters):
            board, now_s = self._world.board_of[drafter], self._world.clock.now_s
            board.slow(drafter, step.slow.get(name, 1.0))
            if name in step.lost and name not in lost_before:
                # Its board says no more from now on; the head hears of that when it has been silent so long.
                board.lose(drafter)
                self._world.at(now_s + self.experiment.silent_s, DrafterLost(drafter=drafter))
            elif name in lost_before and name not in step.lost:
                self._world.at(now_s, DrafterRecovered(drafter=drafter))
        for user in range(step.users):
            if user not in self._waiting:
                self._ask(user)

    def _ask(self, user: int) -> None:
        cases, now_s = self.load.cases, self._world.clock.now_s
        if self.load.steps:
            turn = self._turns[self._at, user]
            self._turns[self._at, user] += 1
            case = scheduled_case(cases, self._steps[self._at].users, self._at, user, turn)
        elif len(self._asked) < len(cases):
            case = cases[len(self._asked)]
        else:
            return
        for name, drafter in self.drafters_of(case).items():
            self._each[name].append(drafter)
        self._waiting.add(user)
        self._asked.append(_Asked(step=self._at, user=user, case=case, at_s=now_s))
        self._world.at(now_s, submit_of(case, len(self._asked) - 1))

    def _watch(self, handled: Handled) -> None:
        for command in handled.commands if handled.place == HEAD else ():
            if isinstance(command, Emit):
                self._tokens += len(command.tokens)
            elif isinstance(command, Finished):
                user = self._asked[command.request].user
                self._waiting.discard(user)
                self._world.at(handled.now_s, Forget(request=command.request))
                if self._at < len(self._steps) and user < self._steps[self._at].users:
                    self._ask(user)

    def _count(self) -> None:
        world = self._world
        self._totals.append(
            _Totals(
                tokens=self._tokens,
                stages_s=[device.busy_until(world.clock.now_s) for device in world.devices],
                boards_s=busy_of(self.testbed, self._drafters, world),
                network_bytes=world.bytes_sent,
            )
        )

    def records(self) -> list[LoadRecord]:
        """The load's record, or one for each step of a schedule."""
        self._world.run()
        is_schedule = bool(self.load.steps)
        if not is_schedule:
            self._count()
        return [
            self._record(step, number if is_schedule else 0, *totals)
            for number, (step, totals) in enumerate(
                zip(self._steps, itertools.pairwise(self._totals), strict=True), 1
            )
        ]

    def _record(self, step: LoadStep, number: int, before: _Totals, after: _Totals) -> LoadRecord:
        """Of a load's only step (`number` 0), or one of a schedule."""
        world, testbed, sampling = self._world, self.testbed, self.load.cases[0].sampling
        own = [
            self._answer(request)
            for request, asked in enumerate(self._asked)
            if asked.step == max(0, number - 1)
        ]
        seconds = step.seconds if number else max(answer.last_s for answer in own)
        stages_s = [end - begin for begin, end in zip(before.stages_s, after.stages_s, strict=True)]
        boards_s = {place: end - before.boards_s[place] for place, end in after.boards_s.items()}
        places = [None, *(at for at, board in enumerate(testbed.boards) if board.device is not None)]
        return LoadRecord(
            experiment=self.experiment.name,
            world=self.experiment.world,
            testbed=testbed.name,
            method=self.setup.name,
            users=step.users,
            step=number,
            label=step.label,
            temperature=sampling.temperature,
            seed=sampling.seed,
            drafters=len(self._drafters),
            seconds=seconds,
            tokens=after.tokens - before.tokens,
            answers=own,
            stage_busy=[busy_s / seconds for busy_s in stages_s],
            board_busy=[boards_s.get(place, 0.0) / seconds for place in places],
            network_bytes=after.network_bytes - before.network_bytes,
            energy_j=energy_of(testbed, seconds, stages_s, boards_s),
            events=world.events,
            digest=world.digest.hex(),
        )

    def _answer(self, request: int) -> LoadAnswer:
        asked = self._asked[request]
        (answer,) = self._world.answers[request]
        assert answer.end is not None, "the world came to rest without an end of an answer"
        times_s = answer.times_s or [answer.ended_s]
        return LoadAnswer(
            user=asked.user,
            prompt_id=asked.case.prompt_id,
            domain=asked.case.domain,
            asked_s=asked.at_s,
            first_s=times_s[0],
            last_s=times_s[-1],
            new_tokens=len(answer.tokens),
            agreement=agreement_of(asked.case, answer.tokens, answer.end.reason),
        )
