"""A cluster in virtual time: the real cores and the real codec, executed under a virtual clock.

The second executor of the cores' commands beside the runtime. Owns what happens when: frames on links, jobs
on devices, drafts, timers. Decides nothing; the same seed and the same events give the same run, digest
included. Tensors are stand-ins: what a row costs to compute and to send comes from the specs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from flowspec.core.head.certain import CertainOf
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    Cancel,
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    Emit,
    FeaturesArrived,
    Finished,
    Forget,
    HeadCommand,
    HeadEvent,
    SegmentTimed,
    SendToDrafter,
    SendToFirstStage,
    SendToStages,
    SetTimer,
    Submit,
    TimerFired,
    VerifiedArrived,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.head.sharing import BLOCK
from flowspec.core.methods import WITHOUT_GUESSES, make_method
from flowspec.core.methods.base import Method
from flowspec.core.protocol.messages import Commit, Features, Open, Release, Segment, Verified
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendFeatures,
    SendSegment,
    StageCommand,
    StageEvent,
    Trim,
)
from flowspec.core.stage.stage import StageCore
from flowspec.draft.protocol import CopiesFeatures, Drafter
from flowspec.draft.text import TextDrafter
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.timing import DIRECT, INSTANT, Curve, LinkSpec, slowest
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.device import DeviceSpec, Layers, SimulatedDevice
from flowspec.sim.drafter_device import DrafterDevice, DrafterDeviceSpec
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.forming import FormedPipeline
from flowspec.sim.head_checker import HeadChecker
from flowspec.sim.language import Language
from flowspec.sim.link import Frames, SimulatedLink
from flowspec.sim.record import HEAD, Digest, SimulatedAnswer
from flowspec.wire.codec import Envelope, Tensor, joined

EVENTS_MAX = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """`control[i]` is from the head to stage i; `data[i]` leads to stage i, and the last one from the last
    stage to the head. Features of other stages than the last go to the head on ways like `control[i]`."""

    control: tuple[LinkSpec, ...]
    data: tuple[LinkSpec, ...]


@dataclass(frozen=True, slots=True)
class Handled:
    """An event that was handled at `place` (`HEAD` or a stage), and the commands it led to."""

    now_s: float
    place: int
    event: HeadEvent | StageEvent
    commands: Sequence[HeadCommand | StageCommand]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Parameters of a simulated cluster, from plain values; the language and the drafters are given.

    There is one device for each stage; every connection is like `control` and `data` unless `links` says
    otherwise. `method` is a name, to which `options` belong as `make_method` takes them, or makes one.
    `prefix_block` is that of `HeadCore`, `levels` say which drafters are intermediates, above 0 (none:
    nobody), and `head_s` is what the head spends on each event.

    Drafters: `drafting` is the time of every one for a number of rows, or of each, and `boards` say which of
    them share a board (none: nobody; each has processors of its own at the head). A drafter that says of its
    last job how many rows each pass had (`pass_rows`) takes as long as these; any other takes one pass. Where
    one had none, and says how many rows it ranked all the same (`ranked_rows`: a block that was guessed
    before), these take what `ranking` says, which is `lm_head`'s time.

    Bytes: `row_bytes` is what a row of a segment's payload has on the wire (None: a few bytes), on its way to
    each stage alike, or one by one; `feature_bytes` what a captured state has. Where a drafter wants features
    each stage captures as many states as `captured` says (none: both ends one). Where the head verifies
    instead of the last stage, `returned_row_bytes` of each row that this one ran travel back, and `verifying`
    is the head's time for them.
    """

    devices: tuple[DeviceSpec, ...]
    control: LinkSpec = DIRECT
    data: LinkSpec = DIRECT
    links: Links | None = None
    method: str | Callable[[], Method] = WITHOUT_GUESSES
    options: Mapping[str, Any] = field(default_factory=dict)
    context: int = 4096
    sliding_window: SlidingWindow | None = None
    prefix_block: int = BLOCK
    drafting: Curve | tuple[Curve, ...] = INSTANT
    ranking: tuple[Curve, ...] = ()
    boards: tuple[DrafterDeviceSpec, ...] = ()
    levels: tuple[int, ...] = ()
    head_s: float = 0.0
    row_bytes: int | tuple[int, ...] | None = None
    captured: tuple[int, ...] = ()
    feature_bytes: int | None = None
    returned_row_bytes: int = 0
    verifying: Curve = INSTANT
    seed: int = 0
    certain_of: CertainOf | None = None

    def captured_by(self, traits: Sequence[DrafterTraits]) -> tuple[int, ...]:
        """How many states each stage captures for these models beside the target; empty for none."""
        if not any(each.needs_features for each in traits):
            return ()
        last = len(self.devices) - 1
        return self.captured or tuple(int(index in (0, last)) for index in range(last + 1))

    def plan(self, captured: Sequence[int] = ()) -> ClusterPlan:
        """What its devices are told that they are: as many layers each as one of them captures, at least one,
        by number."""
        wide = max([1, *captured])
        names = [f"stage{index}" for index in range(len(self.devices))]
        return ClusterPlan(
            model="simulated",
            fingerprint="simulated",
            dtype="float32",
            context=self.context,
            stages=tuple(
                StagePlan(name=name, address=f"{name}:1", first=at * wide, end=(at + 1) * wide)
                for at, name in enumerate(names)
            ),
            captures=tuple(at * wide + each for at, own in enumerate(captured) for each in range(own)),
            sliding_window=self.sliding_window,
        )

    def build(
        self,
        language: Language,
        drafters: Sequence[Drafter] = (),
        on_event: Callable[[Handled], None] | None = None,
        *,
        checks: bool = True,
    ) -> World:
        """A world at time 0. Worlds of one cluster and equal events run alike; a drafter has state, so
        give each its own."""
        count = len(self.devices)
        traits = [
            DrafterTraits(
                context=drafter.context,
                needs_features=bool(drafter.captures),
                level=level,
                looks_up=isinstance(drafter, TextDrafter),
                copies_features=isinstance(drafter, CopiesFeatures),
            )
            for drafter, level in zip(drafters, self.levels or (0,) * len(drafters), strict=True)
        ]
        method = make_method(self.method, **self.options) if isinstance(self.method, str) else self.method()
        captured = self.captured_by(traits)
        slot_s = slowest([device.curve for device in self.devices])
        head = HeadCore(
            context=self.context,
            stage_count=count,
            method=method,
            drafters=traits,
            slot_s=slot_s,
            sliding_window=self.sliding_window,
            prefix_block=self.prefix_block,
            certain_of=self.certain_of,
            capturing=tuple(index for index, own in enumerate(captured) if own),
        )
        stages = FormedPipeline(self.plan(captured)).stages
        layers = FakeLayers(count, language, sliding_window=self.sliding_window)
        return World(self, head, stages, layers, drafters, captured, on_event, checks=checks)


class World:
    """Executes the commands of `head` and `stages`, of which each captures as many states of a row as
    `captured` says (empty: none)."""

    def __init__(
        self,
        cluster: Cluster,
        head: HeadCore,
        stages: Sequence[StageCore],
        layers: Layers,
        drafters: Sequence[Drafter] = (),
        captured: Sequence[int] = (),
        on_event: Callable[[Handled], None] | None = None,
        *,
        checks: bool = True,
    ) -> None:
        count, last = len(stages), len(stages) - 1
        links = cluster.links or Links(control=(cluster.control,) * count, data=(cluster.data,) * (count + 1))
        drafting = cluster.drafting
        if not isinstance(drafting, tuple):
            drafting = (drafting,) * len(drafters)
        assert len(cluster.devices) == len(links.control) == len(stages)
        assert len(drafters) == len(drafting)
        assert len(links.data) == len(stages) + 1
        self.clock = Clock()
        self.layers = layers
        self.head = head
        self.stages = list(stages)
        self.drafters = list(drafters)
        self.answers: dict[int, list[SimulatedAnswer]] = {}
        self.timings: list[SegmentTimed] = []
        self.digest = Digest()
        self.events = 0
        self.timers = 0
        self.drafts = 0
        self.on_event = on_event
        self.checks = checks
        self._checker = HeadChecker()
        self._head_s = cluster.head_s
        self._returned_row_bytes = cluster.returned_row_bytes
        self._verifying = cluster.verifying
        self._head_free_s = 0.0
        self._timer: Alarm | None = None
        self._is_drafting = [False] * len(drafters)
        self.devices = [
            SimulatedDevice(
                self.clock,
                spec,
                index,
                layers,
                index == last,
                partial(self._to_stage, index),
                captures=captured[index] if captured else 0,
            )
            for index, spec in enumerate(cluster.devices)
        ]
        # Each connection has its own chance: what is late on one says nothing about the others, so control
        # and data interleave freely.
        chances = random.Random(cluster.seed)
        self.control = [
            SimulatedLink(
                self.clock,
                spec,
                "head",
                partial(self._control_arrived, index),
                chance=random.Random(chances.getrandbits(64)),
            )
            for index, spec in enumerate(links.control)
        ]
        row_bytes, feature_bytes, ranking = cluster.row_bytes, cluster.feature_bytes, cluster.ranking
        sizes = row_bytes if isinstance(row_bytes, tuple) else (row_bytes,) * count
        specs = cluster.boards or [DrafterDeviceSpec(drafters=(number,)) for number in range(len(drafters))]
        assert sorted(number for spec in specs for number in spec.drafters) == list(range(len(drafters))), (
            "each drafter is on one board"
        )
        self.data = [
            SimulatedLink(
                self.clock,
                spec,
                "head" if index == 0 else f"stage{index - 1}",
                partial(self._segment_arrived, index)
                if index <= last
                else partial(self._to_head_arrived, last),
                chance=random.Random(chances.getrandbits(64)),
                row_bytes=(*sizes, _feature_bytes(feature_bytes, captured, last))[index],
            )
            for index, spec in enumerate(links.data)
        ]
        self.boards = [
            DrafterDevice(
                self.clock,
                spec,
                {number: drafters[number] for number in spec.drafters},
                {number: drafting[number] for number in spec.drafters},
                {number: (ranking or drafting)[number] for number in spec.drafters},
                self._to_head,
                chance=random.Random(chances.getrandbits(64)),
            )
            for spec in specs
        ]
        self.features = {
            index: SimulatedLink(
                self.clock,
                links.control[index],
                f"stage{index}",
                partial(self._to_head_arrived, index),
                chance=random.Random(chances.getrandbits(64)),
                row_bytes=_feature_bytes(feature_bytes, captured, index),
            )
            for index in range(last)
            if captured and captured[index]
        }
        self._board_of = {
            number: board for board, spec in zip(self.boards, specs, strict=True) for number in spec.drafters
        }

    @property
    def is_drafting(self) -> bool:
        return any(self._is_drafting)

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes for link in (*self.control, *self.data, *self.features.values())) + sum(
            board.bytes_sent for board in self.boards
        )

    def at(self, time_s: float, event: Submit | Cancel | Forget | DrafterLost | DrafterRecovered) -> None:
        """Have someone at the head ask for something, or a drafter lost or back, at `time_s`, or now if that
        is past."""
        self.clock.at(time_s, lambda: self._happen(event))

    def board_of(self, drafter: int) -> DrafterDevice:
        """Where it runs: there it can be made slow, or be lost before the head hears of it."""
        return self._board_of[drafter]

    def run(self, until_s: float = float("inf"), events_max: int = EVENTS_MAX) -> None:
        """Lets virtual time pass until nothing moves any more, or up to `until_s`."""
        while self.clock.step(until_s):
            assert self.events <= events_max, f"the cluster does not come to rest within {events_max} events"

    # --------------------------------------------------------------------------------------------- the head

    def _happen(self, event: Submit | Cancel | Forget | DrafterLost | DrafterRecovered) -> None:
        if isinstance(event, DrafterLost):
            self._board_of[event.drafter].lose(event.drafter)
        elif isinstance(event, DrafterRecovered):
            self._board_of[event.drafter].bring_back(event.drafter)
        self._to_head(event)

    def _to_head(self, event: HeadEvent, frames: Frames = (), verifying_s: float = 0.0) -> None:
        """The head takes events one by one; each keeps it busy, and its commands go out when it is done with
        it."""
        work_s = self._head_s + verifying_s
        if work_s == 0:
            self._head(event, frames)
        else:
            self._head_free_s = max(self._head_free_s, self.clock.now_s) + work_s
            self.clock.at(self._head_free_s, lambda: self._head(event, frames))

    def _head(self, event: HeadEvent, frames: Frames) -> None:
        now_s = self.clock.now_s
        self.digest.add(now_s, HEAD, event, frames)
        if isinstance(event, Drafted | DrafterLost):
            self._is_drafting[event.drafter] = False
        commands = self.head.handle(event, now_s)
        if isinstance(event, Submit):
            self.answers.setdefault(event.request, []).append(SimulatedAnswer(event, now_s))
        for command in commands:
            self._do_for_head(command)
        self._handled(HEAD, event, commands)

    def _do_for_head(self, command: HeadCommand) -> None:
        now_s = self.clock.now_s
        if isinstance(command, SendToStages):
            for link in self.control:
                link.send(command.message)
        elif isinstance(command, SendToFirstStage):
            self.data[0].send(command.segment)
        elif isinstance(command, Draft):
            self._draft(command)
        elif isinstance(command, SendToDrafter):
            self._board_of[command.drafter].give(command)
        elif isinstance(command, SetTimer):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.clock.at(command.at_s, self._fire)
        elif isinstance(command, Emit):
            answer = self.answers[command.request][-1]
            answer.tokens += command.tokens
            answer.logprobs += command.logprobs
            answer.times_s += [now_s] * len(command.tokens)
        elif isinstance(command, Finished):
            answer = self.answers[command.request][-1]
            answer.end, answer.ended_s = command, now_s
        else:
            self.timings.append(command)

    def _draft(self, draft: Draft) -> None:
        assert not self._is_drafting[draft.drafter], (
            f"draft {draft.job} is asked for while another is under way"
        )
        self._is_drafting[draft.drafter] = True
        self.drafts += 1
        self._board_of[draft.drafter].give(draft)

    def _fire(self) -> None:
        self._timer = None
        self.timers += 1
        self._to_head(TimerFired())

    def _to_head_arrived(self, stage: int, envelope: Envelope, frames: Frames) -> None:
        message = envelope.message
        if isinstance(message, Features):
            assert envelope.tensor is not None, "features come with rows"
            rows = envelope.tensor.apart()
            self._to_head(FeaturesArrived(stage=stage, features=message, rows=rows), frames)
            return
        assert isinstance(message, Verified)
        returned = message.hops[-1].rows
        self._to_head(
            VerifiedArrived(verified=message), frames, self._verifying.seconds(returned) if returned else 0.0
        )

    # ------------------------------------------------------------------------------------------- the stages

    def _control_arrived(self, index: int, envelope: Envelope, frames: Frames) -> None:
        message = envelope.message
        assert isinstance(message, Open | Commit | Release)
        self._to_stage(index, ControlArrived(message=message), frames)

    def _segment_arrived(self, index: int, envelope: Envelope, frames: Frames) -> None:
        segment = envelope.message
        assert isinstance(segment, Segment)
        self._to_stage(
            index,
            SegmentArrived(segment=segment, payload=envelope.tensor, received_s=self.clock.now_s),
            frames,
        )

    def _to_stage(self, index: int, event: StageEvent, frames: Frames = ()) -> None:
        self.digest.add(self.clock.now_s, index, event, frames)
        commands = self.stages[index].handle(event, self.clock.now_s)
        device, onward = self.devices[index], self.data[index + 1]
        for command in commands:
            if isinstance(command, RunLayers):
                device.run(command)
            elif isinstance(command, Trim):
                device.trim(command)
            elif isinstance(command, OpenCache | ClearSlots | CloseCache):
                device.change_cache(command)
            elif isinstance(command, SendSegment):
                onward.send(command.segment, _rows_of(command))
            elif isinstance(command, SendFeatures):
                way = self.features.get(index, onward)
                way.send(command.features, joined([(row,) for row in command.rows]))
            else:
                returned = self._returned_row_bytes * command.verified.hops[-1].rows
                onward.send(command.verified, extra_bytes=returned)
        self._handled(index, event, commands)

    def _handled(
        self, place: int, event: HeadEvent | StageEvent, commands: Sequence[HeadCommand | StageCommand]
    ) -> None:
        self.events += 1
        if self.checks:
            self._validate(place, event, commands)
        if self.on_event is not None:
            self.on_event(Handled(self.clock.now_s, place, event, commands))

    # ----------------------------------------------------------------------------------------------- checks

    def _validate(
        self, place: int, event: HeadEvent | StageEvent, commands: Sequence[HeadCommand | StageCommand]
    ) -> None:
        """What is true after every event; raises `AssertionError`."""
        if place == HEAD:
            self.head.validate()
            self._checker.check(self.head, cast(HeadEvent, event), cast(Sequence[HeadCommand], commands))
        else:
            stage = self.stages[place]
            stage.validate()
            assert stage.queued <= self.head.flights_max, f"{stage.queued} segments wait at stage {place}"
            if isinstance(self.layers, FakeLayers) and self.devices[place].is_idle:
                self.layers.validate(place, stage)
                self._check_copies(place, commands, self.layers)
        others = self.events - self.timers
        assert self.timers <= others + 10, (
            f"{self.timers} timers beside {others} other events: somebody polls"
        )

    def _check_copies(
        self, place: int, commands: Sequence[HeadCommand | StageCommand], layers: FakeLayers
    ) -> None:
        """What a stage copied for a request is what that request begins with, by what the head knows."""
        known = {request.number: request for request in self.head.requests()}
        for command in commands:
            if isinstance(command, OpenCache) and command.copied is not None and command.request in known:
                text = known[command.request].tree.committed_tokens()
                found = layers.caches[place][command.request].tokens[: len(command.copied.slots)]
                assert found.tolist() == text[: len(found)], (
                    f"stage {place} copied another text than request {command.request} begins with"
                )


def _feature_bytes(state: int | None, captured: Sequence[int], stage: int) -> int | None:
    """What a row of a stage's features has on the wire, where a captured state has so many bytes."""
    return None if state is None or not captured else state * captured[stage]


def _rows_of(command: SendSegment) -> Tensor | None:
    """The rows of a payload that travel; none at all is a header only."""
    if command.payload is None or not command.rows:
        return None
    payload: Tensor = command.payload
    return payload.select(command.rows)
