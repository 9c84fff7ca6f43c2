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
from typing import Any, TypeVar, cast

from flowspec.core.head.certain import CertainOf
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    Emit,
    FeaturesArrived,
    Finished,
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
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Features, Open, Release, Segment, Verified
from flowspec.core.protocol.model_spec import SlidingWindow
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
from flowspec.draft.base import CopiesFeatures, Drafter
from flowspec.draft.lookup import LookUpDrafter
from flowspec.plan.timing import DIRECT, INSTANT, Curve, LinkSpec, slowest
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.device import DeviceSpec, SimulatedDevice
from flowspec.sim.drafter_device import DrafterDevice, DrafterDeviceSpec
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.head_checker import HeadChecker
from flowspec.sim.language import Language
from flowspec.sim.link import Frames, Receive, SimulatedLink
from flowspec.sim.record import HEAD, Digest, SimulatedAnswer
from flowspec.wire.codec import Envelope, join_rows

EVENTS_MAX = 1_000_000

T = TypeVar("T")


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

    There is one device for each stage. `control` leads from the head to each stage, `data` to each stage and
    from the last one to the head: all alike, or one by one. Features of other stages than the last go to the
    head on ways like `control`. `method` is a name, to which `options` belong as `make_method` takes them, or
    makes one. `prefix_block` is that of `HeadCore`, `levels` say which drafters are intermediates, above 0
    (none: nobody), and `head_s` is what the head spends on each event.

    Drafters: `drafting` is the time of every one for a number of rows, or of each, and `boards` say which of
    them share a board (none: nobody; each has processors of its own at the head). A drafter that says of its
    last job how many rows each pass had (`pass_rows`) takes as long as these; any other takes one pass. Where
    one had none, and says how many rows it ranked all the same (`ranked_rows`: a block that was guessed
    before), these take what `ranking` says, which is `lm_head`'s time.

    Bytes: `row_bytes` is what a row of a segment's payload has on the wire (None: a few bytes), on its way to
    each stage; `feature_bytes` what a captured state has. Where a drafter wants features each stage captures
    as many states as `captured` says (none: both ends one). Where the head verifies instead of the last
    stage, `returned_row_bytes` of each row that this one ran travel back, and `verifying` is the head's time
    for them.
    """

    devices: tuple[DeviceSpec, ...]
    control: LinkSpec | tuple[LinkSpec, ...] = DIRECT
    data: LinkSpec | tuple[LinkSpec, ...] = DIRECT
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
    row_bytes: int | None = None
    captured: tuple[int, ...] = ()
    feature_bytes: int | None = None
    returned_row_bytes: int = 0
    verifying: Curve = INSTANT
    seed: int = 0
    certain_of: CertainOf | None = None


class World:
    """One run of a cluster: executes the commands of its `head` and `stages`. Worlds of one cluster and equal
    events run alike; a drafter has state, so give each its own."""

    def __init__(
        self,
        cluster: Cluster,
        language: Language,
        drafters: Sequence[Drafter] = (),
        on_event: Callable[[Handled], None] | None = None,
        *,
        checks: bool = True,
    ) -> None:
        count = len(cluster.devices)
        last = count - 1
        traits = [
            DrafterTraits(
                context=drafter.context,
                needs_features=bool(drafter.captures),
                level=level,
                looks_up=isinstance(drafter, LookUpDrafter),
                copies_features=isinstance(drafter, CopiesFeatures),
            )
            for drafter, level in zip(drafters, cluster.levels or (0,) * len(drafters), strict=True)
        ]
        captured = (0,) * count
        if any(each.needs_features for each in traits):
            captured = cluster.captured or tuple(int(index in (0, last)) for index in range(count))
        method = cluster.method
        self.clock = Clock()
        self.head = HeadCore(
            context=cluster.context,
            stage_count=count,
            method=make_method(method, **cluster.options) if isinstance(method, str) else method(),
            drafters=traits,
            slot_s=slowest([device.curve for device in cluster.devices]),
            sliding_window=cluster.sliding_window,
            prefix_block=cluster.prefix_block,
            certain_of=cluster.certain_of,
            capturing=tuple(index for index, own in enumerate(captured) if own),
        )
        # As daemons make them (`tests/sim/test_beginning.py` compares); clusters that fail are `lab.faults`.
        self.stages = [
            StageCore(
                is_last=index == last,
                slots_max=cluster.context + limits.TREE_NODES_MAX,
                sliding_window=cluster.sliding_window,
            )
            for index in range(count)
        ]
        self.layers = FakeLayers(count, language, sliding_window=cluster.sliding_window)
        self.drafters = list(drafters)
        self.answers: dict[int, list[SimulatedAnswer]] = {}
        self.timings: list[SegmentTimed] = []
        self.digest = Digest()
        self.events = 0
        self.timers = 0
        self.drafts = 0
        self.on_event = on_event
        self.checks = checks
        self._cluster = cluster
        self._checker = HeadChecker()
        self._head_free_s = 0.0
        self._timer: Alarm | None = None
        self.drafting: set[int] = set()
        """Drafters that have a job."""
        self.devices = [
            SimulatedDevice(
                self.clock,
                spec,
                index,
                self.layers,
                index == last,
                partial(self._to_stage, index),
                captures=captured[index],
            )
            for index, spec in enumerate(cluster.devices)
        ]
        # Each connection has its own chance: what is late on one says nothing about the others, so control
        # and data interleave freely.
        chances = random.Random(cluster.seed)

        def connect(
            sender: str, spec: LinkSpec, receive: Receive, row_bytes: int | None = None
        ) -> SimulatedLink:
            chance = random.Random(chances.getrandbits(64))
            return SimulatedLink(self.clock, spec, sender, receive, chance=chance, row_bytes=row_bytes)

        control, data = _each(cluster.control, count), _each(cluster.data, count + 1)
        state_bytes = cluster.feature_bytes
        feature_bytes = [None if state_bytes is None else state_bytes * own for own in captured]
        self.control = [
            connect("head", spec, partial(self._arrived, index)) for index, spec in enumerate(control)
        ]
        self.data = [
            connect(
                f"stage{index - 1}" if index else "head",
                data[index],
                partial(self._arrived, index),
                cluster.row_bytes,
            )
            for index in range(count)
        ]
        self.data.append(
            connect(f"stage{last}", data[-1], partial(self._to_head_arrived, last), feature_bytes[last])
        )
        drafting = _each(cluster.drafting, len(drafters))
        boards = cluster.boards or [DrafterDeviceSpec(drafters=(number,)) for number in range(len(drafters))]
        assert sorted(number for spec in boards for number in spec.drafters) == list(range(len(drafters))), (
            "each drafter is on one board"
        )
        self.boards = [
            DrafterDevice(
                self.clock,
                spec,
                drafters,
                drafting,
                cluster.ranking or drafting,
                self._to_head,
                chance=random.Random(chances.getrandbits(64)),
            )
            for spec in boards
        ]
        # By drafter: there it can be made slow, or be lost before the head hears of it.
        self.board_of = {
            number: board for board, spec in zip(self.boards, boards, strict=True) for number in spec.drafters
        }
        self.features = {
            index: connect(
                f"stage{index}", control[index], partial(self._to_head_arrived, index), feature_bytes[index]
            )
            for index in range(last)
            if captured[index]
        }

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes for link in (*self.control, *self.data, *self.features.values())) + sum(
            board.bytes_sent for board in self.boards
        )

    def at(self, time_s: float, event: HeadEvent) -> None:
        """Have someone at the head ask for something, or a drafter lost or back, at `time_s`, or now if that
        is past."""
        self.clock.at(time_s, lambda: self._happen(event))

    def run(self, until_s: float = float("inf"), events_max: int = EVENTS_MAX) -> None:
        """Lets virtual time pass until nothing moves any more, or up to `until_s`."""
        while self.clock.step(until_s):
            assert self.events <= events_max, f"the cluster does not come to rest within {events_max} events"

    # --------------------------------------------------------------------------------------------- the head

    def _happen(self, event: HeadEvent) -> None:
        if isinstance(event, DrafterLost):
            self.board_of[event.drafter].lose(event.drafter)
        elif isinstance(event, DrafterRecovered):
            self.board_of[event.drafter].bring_back(event.drafter)
        self._to_head(event)

    def _to_head(self, event: HeadEvent, frames: Frames = (), verifying_s: float = 0.0) -> None:
        """The head takes events one by one; each keeps it busy, and its commands go out when it is done with
        it."""
        work_s = self._cluster.head_s + verifying_s
        if work_s == 0:
            self._head(event, frames)
        else:
            self._head_free_s = max(self._head_free_s, self.clock.now_s) + work_s
            self.clock.at(self._head_free_s, lambda: self._head(event, frames))

    def _head(self, event: HeadEvent, frames: Frames) -> None:
        now_s = self.clock.now_s
        self.digest.add(now_s, HEAD, event, frames)
        if isinstance(event, Drafted | DrafterLost):
            self.drafting.discard(event.drafter)
        commands = self.head.handle(event, now_s)
        if isinstance(event, Submit):
            self.answers.setdefault(event.request, []).append(SimulatedAnswer(event, now_s))
        for command in commands:
            self._do_for_head(command)
        self._handled(Handled(now_s, HEAD, event, commands))

    def _do_for_head(self, command: HeadCommand) -> None:
        now_s = self.clock.now_s
        if isinstance(command, SendToStages):
            for link in self.control:
                link.send(command.message)
        elif isinstance(command, SendToFirstStage):
            self.data[0].send(command.segment)
        elif isinstance(command, Draft):
            assert command.drafter not in self.drafting, (
                f"draft {command.job} is asked for while another is under way"
            )
            self.drafting.add(command.drafter)
            self.drafts += 1
            self.board_of[command.drafter].give(command)
        elif isinstance(command, SendToDrafter):
            self.board_of[command.drafter].give(command)
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
        verifying_s = self._cluster.verifying.seconds(returned) if returned else 0.0
        self._to_head(VerifiedArrived(verified=message), frames, verifying_s)

    # ------------------------------------------------------------------------------------------- the stages

    def _arrived(self, index: int, envelope: Envelope, frames: Frames) -> None:
        message = envelope.message
        event: StageEvent
        if isinstance(message, Segment):
            event = SegmentArrived(segment=message, payload=envelope.tensor, received_s=self.clock.now_s)
        else:
            assert isinstance(message, Open | Commit | Release)
            event = ControlArrived(message=message)
        self._to_stage(index, event, frames)

    def _to_stage(self, index: int, event: StageEvent, frames: Frames = ()) -> None:
        now_s = self.clock.now_s
        self.digest.add(now_s, index, event, frames)
        commands = self.stages[index].handle(event, now_s)
        device, onward = self.devices[index], self.data[index + 1]
        for command in commands:
            if isinstance(command, RunLayers):
                device.run(command)
            elif isinstance(command, Trim):
                device.trim(command)
            elif isinstance(command, OpenCache | ClearSlots | CloseCache):
                device.change_cache(command)
            elif isinstance(command, SendSegment):
                has_rows = command.payload is not None and command.rows  # none at all is a header only
                onward.send(command.segment, command.payload.select(command.rows) if has_rows else None)
            elif isinstance(command, SendFeatures):
                rows = join_rows([(row,) for row in command.rows])
                self.features.get(index, onward).send(command.features, rows)
            else:
                returned = self._cluster.returned_row_bytes * command.verified.hops[-1].rows
                onward.send(command.verified, extra_bytes=returned)
        self._handled(Handled(now_s, index, event, commands))

    def _handled(self, handled: Handled) -> None:
        self.events += 1
        if self.checks:
            self._validate(handled)
        if self.on_event is not None:
            self.on_event(handled)

    # ----------------------------------------------------------------------------------------------- checks

    def _validate(self, handled: Handled) -> None:
        """What is true after every event; raises `AssertionError`."""
        place = handled.place
        if place == HEAD:
            self.head.validate()
            event, commands = cast(HeadEvent, handled.event), cast(Sequence[HeadCommand], handled.commands)
            self._checker.check(self.head, event, commands)
        else:
            stage = self.stages[place]
            stage.validate()
            assert stage.queued <= self.head.flights_max, f"{stage.queued} segments wait at stage {place}"
            if self.devices[place].is_idle:
                self.layers.validate(place, stage)
                self._check_copies(handled)
        others = self.events - self.timers
        assert self.timers <= others + 10, (
            f"{self.timers} timers beside {others} other events: somebody polls"
        )

    def _check_copies(self, handled: Handled) -> None:
        """What a stage copied for a request is what that request begins with, by what the head knows."""
        known = {request.number: request for request in self.head.requests()}
        caches = self.layers.caches[handled.place]
        for command in handled.commands:
            if isinstance(command, OpenCache) and command.copied is not None and command.request in known:
                text = known[command.request].tree.committed_tokens()
                found = caches[command.request].tokens[: len(command.copied.slots)]
                assert found.tolist() == text[: len(found)], (
                    f"stage {handled.place} copied another text than request {command.request} begins with"
                )


def _each(value: T | tuple[T, ...], count: int) -> tuple[T, ...]:
    """One for each, if it is not yet."""
    found = value if isinstance(value, tuple) else (value,) * count
    assert len(found) == count
    return found
