"""How a head forms its pipelines and what it makes of what goes wrong: event in, exact command list out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from msgspec import structs

from flowspec import __version__
from flowspec.core.cluster.forming import (
    CONTROL,
    DATA,
    RULES,
    AddressNotFound,
    AskPlan,
    Assignment,
    ConnectionClosed,
    DeviceBrokeProtocol,
    DeviceMessageArrived,
    Dial,
    DialRefused,
    EndSession,
    FormingCommand,
    FormingEvent,
    FormingTimeouts,
    HangUp,
    OpenPipeline,
    PipelineCore,
    PlanFailed,
    PlanMade,
    SendControl,
    SendFailed,
    SendTokens,
    ServeWeights,
    ShowProgress,
    Start,
    StartPipeline,
    StopPipeline,
    WeightsUnavailable,
    computing,
)
from flowspec.core.cluster.membership import (
    DeviceSurveyed,
    Membership,
    Note,
    Probe,
    ProbeAnswered,
    SessionStarted,
    SurveyDevice,
    Tick,
)
from flowspec.core.driving import Log
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import (
    Arithmetics,
    AskArithmetics,
    Assign,
    Drafting,
    Error,
    Loading,
    Ping,
    Pong,
    Ready,
    Reset,
    Welcome,
)
from flowspec.core.protocol.device_messages import AskModel, AskTokens
from flowspec.core.protocol.types import Message
from flowspec.core.stage.slots import CacheRoom
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of
from tests.core.runs import MEMBERSHIP_TIMEOUTS

FORMING_TIMEOUTS = FormingTimeouts(
    connect_s=6.0, reconnect_s=3.0, held_s=15.0, ping_s=1.0, watch_s=0.5, settle_s=0.1
)
WELCOME = Welcome(name="x", version=__version__, device="cpu", pid=1, memory_bytes=1, count=0)
ASK = AskArithmetics(dtype="float32")
READY = Ready(weight_bytes=1, memory_bytes=1, cache_slots=100 + limits.TREE_NODES_MAX)


def rooms_of(stages: int, slots: int = READY.cache_slots) -> tuple[CacheRoom, ...]:
    """Of stages with a layer each."""
    return (CacheRoom(slots=slots),) * stages


def parts_of(*devices: str, captures: tuple[int, ...] = ()) -> tuple[Assignment, ...]:
    """A plan with a layer for each."""
    stages = tuple(
        StagePlan(name=name, address=f"{name}:1", first=index, end=index + 1)
        for index, name in enumerate(devices)
    )
    plan = ClusterPlan(
        model="m", fingerprint="f", dtype="float32", context=100, stages=stages, captures=captures
    )
    return tuple(
        Assignment(device=name, place=f"device {name} at {name}:1", assign=assign)
        for name, assign in zip(devices, assigns_of(plan), strict=True)
    )


class Bench:
    """The core with a clock. Plans are made as they are asked for."""

    def __init__(
        self,
        *names: str,
        start: Start = Start.WHOLE,
        is_only: bool = False,
        forming_timeouts: FormingTimeouts = FORMING_TIMEOUTS,
        arithmetic: str = "",
    ) -> None:
        self.names = names or ("a", "b", "c")
        membership = Membership(self.names, MEMBERSHIP_TIMEOUTS)
        self.core = PipelineCore(
            membership, forming_timeouts, start=start, is_only=is_only, arithmetic=arithmetic
        )
        self.has: dict[str, tuple[str, ...]] = {}
        self.now_s = 0.0
        self.captures: tuple[int, ...] = ()

    def give(self, event: FormingEvent) -> list[FormingCommand]:
        found = []
        for command in self.core.handle(event, self.now_s):
            found.append(command)
            if isinstance(command, AskPlan):
                parts = parts_of(*command.devices, captures=self.captures)
                planned = PlanMade(parts=parts, is_beside=command.is_beside)
                found += self.core.handle(planned, self.now_s)
        self.core.validate()
        assert self.core.fired.keys() <= RULES.keys()
        return found

    def says(self, device: str, message: Message, role: str = CONTROL) -> list[FormingCommand]:
        return self.give(
            DeviceMessageArrived(pipeline=self.core.number, device=device, role=role, message=message)
        )

    def welcomes(self, *devices: str) -> list[FormingCommand]:
        """These answer, and tell what they are asked."""
        found = []
        for device in devices:
            asked = self.says(device, WELCOME)
            if SendControl(pipeline=self.core.number, device=device, message=ASK) in asked:
                told = Arithmetics(dtype="float32", names=self.has.get(device, ("x",)))
                asked = [*asked[:-1], *self.says(device, told)]
            found += asked
        return found

    def form(self) -> list[FormingCommand]:
        """All do their part; what comes of the last word."""
        devices = self.core.membership.members
        self.welcomes(*devices)
        for device in devices:
            self.says(device, READY)
        self.says(devices[0], WELCOME, DATA)
        return self.says(devices[-1], WELCOME, DATA)

    def pass_time(self, seconds: float) -> list[FormingCommand]:
        """What comes of it, but for pings."""
        found: list[FormingCommand] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.1
            found += self.give(Tick())
        return [
            command
            for command in found
            if not (isinstance(command, SendControl) and isinstance(command.message, Ping))
        ]


def running(*names: str, is_only: bool = False) -> Bench:
    bench = Bench(*names, is_only=is_only)
    bench.give(SessionStarted())
    bench.form()
    assert bench.core.is_formed
    return bench


def without_b() -> Bench:
    """The second pipeline works, of the other two."""
    bench = running()
    bench.give(ConnectionClosed(pipeline=1, device="b"))
    bench.form()
    return bench


def in_use(retry_after_s: float) -> Error:
    return Error(text="in use by head x", retry_after_s=retry_after_s)


def word(device: str, message: Message, number: int = 1) -> DeviceMessageArrived:
    return DeviceMessageArrived(pipeline=number, device=device, role=CONTROL, message=message)


def dials(number: int, *devices: str, role: str = CONTROL) -> list[FormingCommand]:
    return [Dial(pipeline=number, device=device, role=role) for device in devices]


def lets_go(number: int, *devices: str, lost: str = "") -> list[FormingCommand]:
    """A formed pipeline is given up."""
    return [
        *(SendControl(pipeline=number, device=device, message=Reset()) for device in devices),
        HangUp(pipeline=number, device=lost),
    ]


def begins(number: int, *devices: str) -> list[FormingCommand]:
    return [
        AskPlan(devices=devices, is_first=number == 1),
        OpenPipeline(pipeline=number, parts=parts_of(*devices)),
        *dials(number, *devices),
    ]


def test_a_pipeline_is_dialled_assigned_and_there_when_all_are_ready_and_both_ends_have_data() -> None:
    bench = Bench()
    assert bench.give(SessionStarted()) == begins(1, "a", "b", "c")
    assert bench.welcomes("c", "a") == []
    parts = computing(parts_of("a", "b", "c"), "x")
    assigned = [SendControl(pipeline=1, device=part.device, message=part.assign) for part in parts]
    assert bench.welcomes("b") == [*dials(1, "a", "c", role=DATA), *assigned]
    for device in ("a", "b", "c"):
        assert bench.says(device, structs.replace(READY, cache_slots=500)) == [
            ShowProgress(device=device, doing="ready", share=1.0)
        ]
    assert bench.says("a", WELCOME, DATA) == []
    assert bench.says("c", WELCOME, DATA) == [
        StartPipeline(pipeline=1, stage_count=3, rooms=rooms_of(3, 500), arithmetic="x")
    ]


def test_whoever_captures_features_gets_a_data_connection_too_and_the_pipeline_waits_for_it() -> None:
    bench = Bench("a", "b", "c", "d")
    bench.captures = (1, 4)
    bench.give(SessionStarted())
    found = bench.welcomes("a", "b", "c", "d")
    assert [each for each in found if isinstance(each, Dial)] == dials(1, "a", "b", "d", role=DATA)
    for device in ("a", "b", "c", "d"):
        bench.says(device, READY)
    assert [bench.says(device, WELCOME, DATA) for device in ("a", "d")] == [[], []]
    (started,) = bench.says("b", WELCOME, DATA)
    assert isinstance(started, StartPipeline)
    assert started.capturing == (1, 3)


def test_leases_are_kept_with_those_who_have_answered() -> None:
    bench = Bench("a", "b")
    bench.give(SessionStarted())
    bench.welcomes("b")
    bench.now_s = 0.1
    assert bench.give(Tick()) == [SendControl(pipeline=1, device="b", message=Ping())]
    bench.now_s = 1.0
    assert bench.give(Tick()) == []
    bench.now_s = 1.1
    assert bench.give(Tick()) == [SendControl(pipeline=1, device="b", message=Ping())]


def test_a_closed_connection_leads_to_another_pipeline_and_explains_best() -> None:
    bench = running()
    assert bench.give(ConnectionClosed(pipeline=1, device="b")) == [
        Note(text="device b is lost (its connection closed)"),
        StopPipeline(silent_s=0.0),
        *lets_go(1, "a", "b", "c", lost="b"),
        *begins(2, "a", "c")[:1],
        Note(text="going on with 2 devices"),
        *begins(2, "a", "c")[1:],
    ]
    assert bench.give(ConnectionClosed(pipeline=1, device="c")) == [], "that pipeline is over"
    assert bench.form() == [StartPipeline(pipeline=2, stage_count=2, rooms=rooms_of(2), arithmetic="x")]
    bench = running()
    bench.says("a", Error(text="the data connection is gone", cause="again"))
    assert bench.give(ConnectionClosed(pipeline=1, device="c"))[0] == Note(
        text="device c is lost (its connection closed)"
    )
    assert bench.core.fired["better explained"] == 1


AGAIN = "; beginning again with the same devices"


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (word("a", Error(text="no word", cause="again")), f"no word{AGAIN}"),
        (word("b", Error(text="it is full", cause="part")), "device b cannot do its part (it is full)"),
        (word("b", Error(text="it is full", cause="gone")), "device b is lost (it is full)"),
        (word("b", Error(text="no number")), EndSession(text="device b at b:1: no number")),
        (word("a", parts_of("a")[0].assign), f"device a at a:1 sent an unexpected Assign{AGAIN}"),
        (WeightsUnavailable(pipeline=1, text="it changed"), EndSession(text="it changed")),
        (DeviceBrokeProtocol(pipeline=1, device="b", text="gibberish"), "device b is lost (gibberish)"),
        (DeviceBrokeProtocol(pipeline=1, device="", text="gibberish"), f"gibberish{AGAIN}"),
        (SendFailed(pipeline=1, device="a", what="segments"), "device a is lost (it takes no more segments)"),
        (AddressNotFound(pipeline=1, device="b", text="no name"), "device b is lost (no name)"),
        (DialRefused(pipeline=1, device="b", text="no key", is_final=True), "device b is lost (no key)"),
    ],
)
def test_what_goes_wrong_with_a_pipeline_that_works(event: FormingEvent, told: str | EndSession) -> None:
    bench = running()
    found = [*bench.give(event), *bench.pass_time(0.2)]
    assert found[0] == (Note(text=told) if isinstance(told, str) else told)
    if isinstance(told, str):
        old = word("a", Pong(queued=0, done=0, memory_bytes=0), number=1)
        assert bench.give(old) == [], "of a pipeline that is over"
        assert bench.core.fired["fenced word"] == 1


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (AddressNotFound(pipeline=1, device="b", text="no name"), "device b at b:1: no name"),
        (
            DialRefused(pipeline=1, device="b", text="no key", is_final=True),
            "device b at b:1 refuses: no key",
        ),
    ],
)
def test_at_the_start_that_is_an_error(event: FormingEvent, text: str) -> None:
    bench = Bench(start=Start.SHORT if isinstance(event, DialRefused) else Start.WHOLE)
    bench.give(SessionStarted())
    assert bench.give(event) == [EndSession(text=text)]


def test_of_a_link_that_fails_both_ends_are_suspects_and_the_link_is_named() -> None:
    bench = running()
    bench.says("a", Error(text="the next device b takes no more frames", cause="next"))
    told = bench.pass_time(0.2)
    assert told[0] == Note(text="device b is lost (the link from a to b failed: lost by a)")


def test_who_does_not_answer_the_first_time_is_an_error_unless_some_may_be_missing() -> None:
    bench = Bench()
    bench.give(SessionStarted())
    bench.welcomes("a", "c")
    assert bench.pass_time(5.9) == []
    text = "device b at b:1 did not answer within 6 s; is `flowspec daemon` running there?"
    assert bench.pass_time(0.3)[0] == EndSession(text=text)
    bench = Bench()
    bench.give(SessionStarted())
    bench.welcomes("a", "c")
    bench.give(DialRefused(pipeline=1, device="b", text="it hung up", is_final=False))
    assert bench.pass_time(6.2)[0] == EndSession(text="device b at b:1 did not answer within 6 s: it hung up")
    bench = Bench(start=Start.SHORT)
    bench.give(SessionStarted())
    bench.welcomes("a", "c")
    told = bench.pass_time(6.2)
    assert told[0] == Note(text="device b is lost (no answer within 6 s)")
    assert Note(text="going on with 2 devices") in told
    assert bench.form() == [StartPipeline(pipeline=2, stage_count=2, rooms=rooms_of(2), arithmetic="x")]


def test_a_device_whose_head_died_is_waited_for_at_the_start() -> None:
    bench = Bench("a", "b")
    bench.give(SessionStarted())
    bench.welcomes("a", "b")
    assert bench.says("b", in_use(4.0)) == [], "it may be there, or not"
    again = SendControl(pipeline=1, device="b", message=computing(parts_of("a", "b"), "x")[1].assign)
    assert bench.pass_time(1.2) == [again]
    text = "waiting for device b at b:1, whose head seems to have died: in use by head x"
    assert bench.says("b", in_use(2.8)) == [Log(text=text, level="warning")]
    assert bench.pass_time(1.2) == [again]
    assert bench.says("b", in_use(1.6)) == [], "that was said"
    bench.now_s = 15.5
    assert bench.says("b", in_use(0.5)) == [EndSession(text="device b at b:1: in use by head x")]


@pytest.mark.parametrize(
    ("names", "start"), [(("a", "b"), Start.WHOLE), (("a", "b"), Start.SHORT), (("b",), Start.SHORT)]
)
def test_a_device_that_another_head_uses(names: tuple[str, ...], start: Start) -> None:
    """An error as soon as that head is heard of, if it is wanted or the only one."""
    bench = Bench(*names, start=start)
    bench.give(SessionStarted())
    bench.welcomes(*names)
    assert bench.says("b", in_use(4.0)) == [], "its head may have died"
    bench.pass_time(1.2)
    told = bench.says("b", in_use(3.9))
    if names == ("b",) or start is Start.WHOLE:
        assert told == [EndSession(text="device b at b:1: in use by head x")]
    else:
        assert told[0] == Note(text="device b cannot be had (in use by head x)")
        assert bench.core.membership.members == ("a",)


def test_a_device_that_cannot_do_its_part_later_is_left_out_at_once() -> None:
    bench = running()
    bench.give(ConnectionClosed(pipeline=1, device="c"))
    bench.welcomes("a", "b")
    assert bench.says("b", in_use(4.0))[0] == Note(text="device b cannot be had (in use by head x)")
    assert bench.core.membership.members == ("a",)
    bench = running("a", "b")
    bench.give(ConnectionClosed(pipeline=1, device="b"))
    bench.welcomes("a")
    note = bench.says("a", structs.replace(READY, cache_slots=7))[0]
    assert isinstance(note, Note)
    assert "cannot do its part (expected room for 356 cache slots, got 7" in note.text


def test_a_device_that_loads_for_ever_makes_no_progress_but_each_precision_does() -> None:
    """It goes to and fro between two steps."""
    bench = running("a", "b")
    bench.give(ConnectionClosed(pipeline=1, device="b"))
    bench.welcomes("a")
    told: list[FormingCommand] = []
    for at in range(90):
        bench.says("a", Loading(share=0.5, doing=("checking", "receiving")[at % 2]))
        told += [command for command in bench.pass_time(1.0) if isinstance(command, Note)]
    assert told[0] == Note(text="device a is lost (no progress in loading for 60 s)")
    bench = running("a", "b")
    bench.give(ConnectionClosed(pipeline=1, device="b"))
    bench.welcomes("a")
    for doing in ("trying kernels", "asking for weights", "trying kernels", "receiving", "loading"):
        for share in (0.0, 0.5, 1.0):
            bench.says("a", Loading(share=share, doing=doing))
            for _ in range(4):
                assert [command for command in bench.pass_time(10.0) if isinstance(command, Note)] == []
                bench.says("a", Pong(queued=0, done=0, memory_bytes=0))


def test_a_pipeline_that_is_the_only_one_ends_with_its_first_failure() -> None:
    text = "device b at b:1 was lost while answering: its connection closed; see the daemon's log there"
    assert running(is_only=True).give(ConnectionClosed(pipeline=1, device="b")) == [EndSession(text=text)]
    assert running(is_only=True).pass_time(7)[-1] == EndSession(
        text="device a is lost (no sign of life for 5 s)"
    )
    alone = running("a", is_only=True)
    assert alone.pass_time(7)[-1] == EndSession(text="device a is lost (no sign of life for 5 s)"), "and why"


def test_a_user_does_not_wait_longer_than_asked() -> None:
    bench = running("a")
    bench.core.timeouts = replace(FORMING_TIMEOUTS, wait_s=10.0)
    told = bench.core.handle(ConnectionClosed(pipeline=1, device="a"), bench.now_s)
    text = "no device is left; waiting for a device to come back"
    assert Note(text=f"{text}, for 10 s at most; start its daemon again") in told
    assert [command for command in bench.pass_time(9.5) if isinstance(command, EndSession)] == []
    assert EndSession(text=f"{text}; nothing changed within 10 s") in bench.pass_time(1.0)


def test_a_user_who_waits_without_a_limit_is_not_given_one() -> None:
    told = running("a").core.handle(ConnectionClosed(pipeline=1, device="a"), 0.0)
    text = "no device is left; waiting for a device to come back, as long as it takes; start its daemon again"
    assert Note(text=text) in told


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_where_no_device_can_come_back_nobody_waits(names: tuple[str, ...]) -> None:
    bench = running(*names)
    bench.core.timeouts = replace(FORMING_TIMEOUTS, wait_s=0.0)
    told = bench.core.handle(ConnectionClosed(pipeline=1, device="a"), bench.now_s)
    text = "no device is left"
    if len(names) > 1:
        text = "the model does not fit on what is left: 4 GiB are missing"
        told += bench.core.handle(PlanFailed(text="4 GiB are missing"), bench.now_s)
    assert [each.text for each in told if isinstance(each, Note)] == [
        "device a is lost (its connection closed)"
    ]
    assert told[-1] == EndSession(text=text)


def test_a_drafter_has_no_data_connections() -> None:
    bench = Bench("a")
    part = parts_of("a")[0]
    drafting = structs.replace(part.assign, drafting=Drafting(vocabulary=9, coupled=True))
    assert isinstance(drafting, Assign)
    bench.core.handle(SessionStarted(), 0.0)
    bench.core.handle(PlanMade(parts=(replace(part, assign=drafting),)), 0.0)
    assert bench.welcomes("a") == [SendControl(pipeline=1, device="a", message=drafting)]
    assert bench.says("a", structs.replace(READY, cache_slots=0))[-1] == StartPipeline(
        pipeline=1, stage_count=1, rooms=rooms_of(1, 0)
    )


def back(bench: Bench, device: str) -> list[FormingCommand]:
    """A lost device answers, until something comes of it."""
    for _ in range(80):
        bench.give(ProbeAnswered(device=device))
        for member in bench.core.membership.members:
            bench.says(member, Pong(queued=0, done=0, memory_bytes=0))
        told = [command for command in bench.pass_time(0.1) if not isinstance(command, Probe)]
        if told:
            return told
    raise AssertionError(f"nothing comes of {device}")


def beside(bench: Bench, device: str, message: Message, number: int = 3) -> list[FormingCommand]:
    """What comes of a word of a device that makes ready for pipeline `number`."""
    return bench.give(DeviceMessageArrived(pipeline=number, device=device, role=CONTROL, message=message))


def test_a_device_that_is_back_loads_beside_the_pipeline_that_works_and_the_switch_comes_after() -> None:
    bench = without_b()
    parts = parts_of("a", "b", "c")
    plan = AskPlan(devices=("a", "b", "c"), is_first=False, is_beside=True)
    opened = OpenPipeline(pipeline=3, parts=parts, is_beside=True)
    assert back(bench, "b") == [plan, opened, *dials(3, "b", "c")], "the layers of the first one stay"
    assert bench.core.is_formed
    assert bench.core.number == 2
    assigned = computing(parts, "x")
    told = Arithmetics(dtype="float32", names=("y", "x"))
    for name in ("b", "c"):
        assert beside(bench, name, WELCOME) == [SendControl(pipeline=3, device=name, message=ASK)]
    assert beside(bench, "b", told) == [SendControl(pipeline=3, device="b", message=assigned[1].assign)]
    assert beside(bench, "b", AskModel()) == [ServeWeights(pipeline=3, device="b")]
    assert beside(bench, "b", AskTokens(offset=7)) == [SendTokens(pipeline=3, device="b", offset=7)]
    assert bench.core.membership.returning == ["b"]
    assert beside(bench, "b", Loading(share=0.5)) == [ShowProgress(device="b", doing="loading", share=0.5)]
    assert beside(bench, "c", Loading(share=0.5)) == [], "it is at work all the same"
    assert beside(bench, "b", READY) == [], "the other is not ready"
    other = structs.replace(assigned[2].assign, is_beside=True)
    assert beside(bench, "c", told) == [SendControl(pipeline=3, device="c", message=other)]
    resets: list[FormingCommand] = [
        SendControl(pipeline=3, device=name, message=Reset()) for name in ("b", "c")
    ]
    assert beside(bench, "c", READY) == [*resets, HangUp(pipeline=3, device="")]
    assert bench.core.is_formed
    switched = [command for command in bench.pass_time(0.6) if not isinstance(command, Probe)]
    assert switched[0] == StopPipeline(silent_s=0.0)
    assert switched[-5:-3] == [
        AskPlan(devices=("a", "b", "c"), is_first=False),
        OpenPipeline(pipeline=4, parts=parts),
    ]
    bench.now_s += 1.2
    notes = [command.text for command in bench.form() if isinstance(command, Note)]
    assert notes[0] == "device b is back"
    assert re.fullmatch(r"changing the pipeline took 1.\d s; other layers run now on device c", notes[1])


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (ConnectionClosed(pipeline=3, device="b"), "its connection closed"),
        (
            DeviceMessageArrived(
                pipeline=3, device="b", role=CONTROL, message=Error(text="it is full", cause="part")
            ),
            "it is full",
        ),
        (DialRefused(pipeline=3, device="b", text="another key", is_final=True), "another key"),
        (WeightsUnavailable(pipeline=3, text="the model changed"), "the model changed"),
        (
            word("c", Error(text="2 GiB are missing", cause="part"), number=3),
            "c cannot make ready for it: 2 GiB are missing",
        ),
        (
            word("b", Arithmetics(dtype="float32", names=("safe",)), number=3),
            "expected the arithmetic x, which this began with, got safe; "
            "use devices that have it, or begin anew",
        ),
    ],
)
def test_a_device_that_cannot_make_ready_costs_the_pipeline_that_works_nothing(
    event: FormingEvent, why: str
) -> None:
    bench = without_b()
    back(bench, "b")
    for device in ("b", "c"):
        beside(bench, device, WELCOME)
    assert bench.give(event)[-1] == Note(text=f"device b is not taken in ({why})")
    assert bench.core.is_formed


def test_a_loss_ends_what_is_made_ready_for_a_pipeline_that_will_not_be() -> None:
    bench = without_b()
    back(bench, "b")
    told = bench.give(ConnectionClosed(pipeline=2, device="c"))
    assert HangUp(pipeline=3, device="") in told
    assert beside(bench, "b", WELCOME) == []


def test_a_device_that_lacks_the_arithmetic_is_left_out_of_later_pipelines() -> None:
    bench = running()
    bench.give(ConnectionClosed(pipeline=1, device="b"))
    bench.has = {"c": ("safe",)}
    told = notes_of(bench.welcomes("a", "c"))
    assert told[0].startswith("device c cannot do its part (expected the arithmetic x, ")
    assert bench.core.membership.members == ("a",)
    assert bench.core.fired["lacks"] == 1


ABSENT = (
    "device {} is absent (nothing listens there); beginning without it, and taking it in when it is there"
)


def short(*absent: str, forming_timeouts: FormingTimeouts = FORMING_TIMEOUTS) -> Bench:
    """A pipeline of the rest works; those that are absent are known to be."""
    bench = Bench(start=Start.SHORT, forming_timeouts=forming_timeouts)
    there = tuple(name for name in bench.names if name not in absent)
    told = bench.give(SessionStarted(absent=tuple((name, "nothing listens there") for name in absent)))
    assert told == [*(Note(text=ABSENT.format(name)) for name in absent), *begins(1, *there)]
    bench.form()
    return bench


def answered(bench: Bench, device: str, seconds: float) -> list[FormingCommand]:
    """What comes of it when a device answers each probe for so long."""
    found = []
    for _ in range(round(seconds / 0.5)):
        bench.give(ProbeAnswered(device=device))
        for member in bench.core.membership.members:
            bench.says(member, Pong(queued=0, done=0, memory_bytes=0))
        found += [command for command in bench.pass_time(0.5) if not isinstance(command, Probe)]
    return found


def test_a_device_that_is_absent_at_first_is_surveyed_before_it_makes_ready_and_is_taken_in() -> None:
    bench = short("b")
    assert Probe(device="b") in bench.pass_time(1.0)
    assert answered(bench, "b", 6.0) == [SurveyDevice(device="b")], (
        "once, and nobody plans with it before it is known"
    )
    assert bench.give(DeviceSurveyed(device="b")) == []
    prepared = answered(bench, "b", 0.5)
    assert prepared[0] == AskPlan(devices=("a", "b", "c"), is_first=False, is_beside=True)
    for name, said in ((name, said) for name in ("b", "c") for said in (WELCOME, READY)):
        beside(bench, name, said, 2)
    bench.pass_time(0.5)
    assert Note(text="device b is there now") in bench.form()
    assert bench.core.membership.members == ("a", "b", "c")
    fired = bench.core.membership.fired
    assert [fired[rule] for rule in ("began without", "surveyed", "back")] == [1, 1, 1]
    assert bench.give(ConnectionClosed(pipeline=3, device="b"))[0] == Note(
        text="device b is lost (its connection closed)"
    )


def notes_of(commands: list[FormingCommand]) -> list[str]:
    return [command.text for command in commands if isinstance(command, Note)]


def assigned(commands: list[FormingCommand]) -> dict[str, str]:
    """The arithmetic of each device that gets its part."""
    tells = [command for command in commands if isinstance(command, SendControl)]
    return {tell.device: tell.message.arithmetic for tell in tells if isinstance(tell.message, Assign)}


def test_the_best_arithmetic_that_all_have_is_assigned_and_kept_also_from_earlier() -> None:
    bench = Bench()
    bench.has = {"a": ("fast", "good", "safe"), "b": ("other", "safe", "good"), "c": ("good", "safe")}
    bench.give(SessionStarted())
    assert assigned(bench.welcomes("a", "b", "c")) == dict.fromkeys("abc", "good")
    bench.form()
    bench.give(ConnectionClosed(pipeline=1, device="c"))
    assert assigned(bench.welcomes("a", "b")) == dict.fromkeys("ab", "good")
    bench.form()
    bench.give(ConnectionClosed(pipeline=2, device="b"))
    assert assigned(bench.welcomes("a")) == {"a": "good"}, "though it alone would take fast"
    bench = Bench("a", "b", arithmetic="safe")
    bench.has = dict.fromkeys("ab", ("fast", "safe"))
    bench.give(SessionStarted())
    assert assigned(bench.welcomes("a", "b")) == dict.fromkeys("ab", "safe")
    bench = Bench("a", "b", arithmetic="old")
    bench.give(SessionStarted())
    (end,) = [each for each in bench.welcomes("a", "b") if isinstance(each, EndSession)]
    assert end.text == (
        "device a at a:1: expected the arithmetic old, which this began with, got x; "
        "use devices that have it, or begin anew"
    )
