"""Whose a daemon is, and what it says to whom: event in, exact command list out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from flowspec.core.cluster.daemon import (
    Attach,
    Ban,
    Caller,
    CallerBrokeProtocol,
    CallerConnected,
    CallerMessageArrived,
    CommandFailed,
    ComputeFailed,
    ComputeReported,
    DaemonCommand,
    DaemonCore,
    DaemonEvent,
    DaemonLimits,
    DaemonStopping,
    DaemonTick,
    Deliver,
    EndAssignment,
    EndPreparation,
    Loaded,
    NextHopLost,
    NextHopMessageArrived,
    PrepareSlice,
    Send,
    SendPong,
    SendReady,
    SliceRoom,
    StartAssignment,
    room_for,
)
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.driving import Log
from flowspec.core.protocol.cluster_messages import Assign, Error, Loading, Ping, Reset, Welcome
from flowspec.core.protocol.device_messages import AskModel, AskNames, ModelOffer, NameList
from flowspec.core.protocol.messages import Segment
from flowspec.core.protocol.types import Message

LOADED = Loaded(
    weight_bytes=1, cache_slots=600, received_bytes=0, hidden_size=4, vocabulary_size=9, reused=False
)
WELCOME = Welcome(name="b", version="1", device="cpu", pid=1, memory_bytes=1, count=0)
FIRST, SECOND, THIRD = (incarnation_of(7, generation) for generation in (1, 2, 3))
OTHER = incarnation_of(8, 1)


def assign(stages: int = 2, stage: int = 0) -> Assign:
    is_last = stage == stages - 1
    return Assign(
        model="m",
        fingerprint="f",
        stage=stage,
        stages=stages,
        first_layer=stage,
        end_layer=stage + 1,
        layer_count=stages,
        next_hop="" if is_last else "b:1",
        next_name="" if is_last else "b",
        dtype="float32",
        context=100,
    )


class Bench:
    """A daemon's core with a clock; what it logs is left out of what it does."""

    def __init__(self) -> None:
        self.core = DaemonCore(DaemonLimits(lease_s=5.0, link_s=10.0))
        self.now_s = 0.0

    def give(self, event: DaemonEvent) -> list[DaemonCommand]:
        found = self.core.handle(event, self.now_s)
        self.core.validate()
        return [command for command in found if not isinstance(command, Log)]

    def hears(self, caller: Caller, message: Message, payload: object = None) -> list[DaemonCommand]:
        return self.give(CallerMessageArrived(caller=caller, message=message, payload=payload))

    def reports(self, result: Any, number: int = 1) -> list[DaemonCommand]:
        """What the computing of an assignment says."""
        return self.give(ComputeReported(assignment_id=number, result=result))

    def dial(self, role: str = "head-control", incarnation: int = FIRST) -> Caller:
        caller = Caller("head", role, incarnation)
        self.give(CallerConnected(caller=caller))
        return caller

    def held(self, stages: int = 2, stage: int = 0) -> Caller:
        """The head that holds it: its control connection. All is ready."""
        head = self.dial()
        self.dial("head-data")
        self.hears(head, assign(stages, stage))
        self.reports(LOADED, self.core.number)
        if stage < stages - 1:
            self.give(NextHopMessageArrived(assignment_id=self.core.number, message=WELCOME))
        assert self.core.assignment is not None
        assert self.core.assignment.is_ready
        return head


def says(head: Caller, text: str, cause: str = "") -> Send:
    return Send(caller=head, message=Error(text=text, cause=cause))


def test_a_stage_is_ready_once_its_slice_is_loaded_and_its_next_hop_reached() -> None:
    for order in (1, -1):
        bench = Bench()
        head = bench.dial()
        assert bench.hears(head, assign()) == [StartAssignment(assignment_id=1, caller=head, assign=assign())]
        events: list[DaemonEvent] = [
            ComputeReported(assignment_id=1, result=LOADED),
            NextHopMessageArrived(assignment_id=1, message=WELCOME),
        ]
        first, second = events[::order]
        assert bench.give(first) == []
        assert bench.give(second) == [SendReady(caller=head, loaded=LOADED)]


def test_the_connection_for_data_is_attached_whenever_it_comes() -> None:
    for order in (1, -1):
        bench = Bench()
        head, data = bench.dial(), Caller("head", "head-data", FIRST)
        begin = CallerMessageArrived(caller=head, message=assign(), payload=None)
        *_, last = [bench.give(event) for event in (CallerConnected(caller=data), begin)[::order]]
        assert Attach(assignment_id=1, caller=data) in last


def test_another_head_is_put_off_and_a_later_pipeline_of_the_same_takes_over() -> None:
    bench = Bench()
    bench.held()
    bench.now_s = 1.0
    other = bench.dial(incarnation=OTHER)
    text = "in use by another head; a device serves one head at a time, and is free at most 5 s after "
    text += "that one stops"
    assert bench.hears(other, assign()) == [Send(caller=other, message=Error(text=text, retry_after_s=4.0))]
    later = bench.dial(incarnation=SECOND)
    taken = bench.hears(later, assign())
    assert taken == [
        EndAssignment(assignment_id=1, requests=()),
        StartAssignment(assignment_id=2, caller=later, assign=assign()),
    ]
    bench.hears(later, Reset())
    assert bench.hears(bench.dial(), assign()) == [], "the first one is over"
    assert bench.core.fired == Counter({"held": 1, "superseded": 1, "stale": 1})


def test_a_head_that_falls_silent_loses_its_hold_unless_its_words_may_wait_to_be_read() -> None:
    bench = Bench()
    head = bench.held()
    bench.now_s = 4.0
    life = SendPong(caller=head, queued=0, done=0, running_s=0.0)
    assert bench.hears(head, Ping()) == [life]
    bench.now_s = 8.9
    assert bench.give(DaemonTick()) == []
    bench.now_s = 9.1
    assert bench.give(DaemonTick()) == [
        says(head, "no word of the head for 5 s", "again"),
        EndAssignment(assignment_id=1, requests=()),
    ]
    assert bench.give(DaemonTick()) == []
    bench = Bench()
    head = bench.held()
    bench.now_s = 60.0
    assert bench.give(DaemonTick(is_read=False)) == []
    bench.hears(head, Ping())
    assert bench.give(DaemonTick()) == []
    assert bench.core.fired == Counter({"held up": 1})


def test_a_next_hop_that_does_not_answer_is_told_of_with_what_is_known() -> None:
    bench = Bench()
    head = bench.dial()
    bench.hears(head, assign())
    for bench.now_s in range(11):
        bench.hears(head, Ping())
    bench.now_s = 10.5
    text = "the next device b at b:1 did not answer within 10 s: it has no keys"
    assert bench.give(DaemonTick(next_trouble="it has no keys"))[0] == says(head, text, "next")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            NextHopLost(assignment_id=1, text="was lost: its connection closed"),
            "was lost: its connection closed",
        ),
        (NextHopMessageArrived(assignment_id=1, message=Error(text="it is full")), "refuses: it is full"),
        (
            NextHopMessageArrived(assignment_id=1, message=WELCOME),
            "said Welcome, where one Welcome is expected",
        ),
        (CommandFailed(assignment_id=1, message=Segment(segment=1, parts=())), "takes no more frames"),
    ],
)
def test_what_becomes_of_the_next_hop_ends_the_hold(event: DaemonEvent, text: str) -> None:
    bench = Bench()
    head = bench.held()
    assert bench.give(event) == [
        says(head, f"the next device b at b:1 {text}", "next"),
        EndAssignment(assignment_id=1, requests=()),
    ]
    assert bench.give(event) == [], "it is told once"


def test_who_breaks_the_protocol_ends_the_hold_only_if_it_is_of_ours() -> None:
    bench = Bench()
    head, before = bench.held(2, 1), bench.dial("stage")
    text = "a stage connection carries segments, not Ping"
    assert bench.hears(before, Ping()) == [
        Ban(caller=before, error=Error(text=text, cause="again")),
        says(head, f"head: {text}", "again"),
        EndAssignment(assignment_id=1, requests=()),
    ]
    bench = Bench()
    bench.held()
    stranger = bench.dial("stage", OTHER)
    banned = Ban(caller=stranger, error=Error(text="gibberish"))
    assert bench.give(CallerBrokeProtocol(caller=stranger, text="gibberish")) == [banned]
    assert bench.hears(bench.dial("stage", OTHER), Segment(segment=1, parts=())) == []
    assert bench.core.number == 1


@pytest.mark.parametrize(
    ("is_ready", "is_part", "cause"), [(False, False, "part"), (True, True, "part"), (True, False, "")]
)
def test_what_cannot_be_done_is_told_with_what_it_means(is_ready: bool, is_part: bool, cause: str) -> None:
    bench = Bench()
    head = bench.held(1) if is_ready else bench.dial()
    if not is_ready:
        bench.hears(head, assign(1))
    assert bench.give(ComputeFailed(assignment_id=1, text="2 GiB are missing", is_part=is_part))[0] == says(
        head, "2 GiB are missing", cause
    )


def test_questions_about_weights_go_to_the_head_which_hears_when_the_daemon_stops() -> None:
    bench = Bench()
    head = bench.dial()
    bench.hears(head, assign(1))
    assert bench.reports(AskModel()) == [Send(caller=head, message=AskModel(), assignment_id=1)]
    assert bench.reports(Loading(share=0.5)) == [Send(caller=head, message=Loading(share=0.5))]
    weights = bench.dial("head-weights")
    answer = NameList(names=())
    assert bench.hears(weights, answer) == [Deliver(assignment_id=1, answer=answer, payload=None)]
    assert bench.reports(AskNames(first=1)) == [
        Send(caller=weights, message=AskNames(first=1), assignment_id=1)
    ]
    bench.hears(weights, answer)
    assert isinstance(bench.hears(weights, answer)[0], Ban), "nobody asked for it"
    bench = Bench()
    head = bench.held()
    assert bench.give(DaemonStopping(reason="SIGTERM"))[0] == says(head, "the daemon stops (SIGTERM)", "gone")
    assert bench.give(DaemonStopping(reason="SIGTERM")) == []


def assigned_beside() -> Assign:
    """Other layers than those of `assign`, in a later pipeline of the same head."""
    return structs.replace(assign(3, 1), is_beside=True)


def test_a_slice_is_made_ready_beside_the_pipeline_that_works_and_found_by_the_next_assign() -> None:
    bench = Bench()
    bench.held()
    later, weights = bench.dial(incarnation=SECOND), Caller("head", "head-weights", SECOND)
    wanted = assigned_beside()
    assert bench.hears(later, wanted) == [PrepareSlice(assignment_id=2, caller=later, assign=wanted)]
    assert bench.core.number == 1, "the pipeline that works goes on"
    question = AskModel()
    assert bench.reports(question, 2) == [Send(caller=later, message=question, assignment_id=2)]
    bench.give(CallerConnected(caller=weights))
    answer = ModelOffer(config="{}", gguf="", tensor_count=1)
    assert bench.hears(weights, answer) == [Deliver(assignment_id=2, answer=answer, payload=None)]
    loading = Loading(share=0.5)
    assert bench.reports(loading, 2) == [Send(caller=later, message=loading)]
    life = SendPong(caller=later, queued=0, done=0, running_s=0.0)
    assert bench.hears(later, Ping()) == [life]
    assert bench.reports(LOADED, 2) == [SendReady(caller=later, loaded=LOADED)]
    assert bench.hears(later, Reset()) == [EndPreparation(assignment_id=2)]
    assert bench.core.number == 1
    taken = bench.hears(bench.dial(incarnation=THIRD), assign())
    assert [type(command) for command in taken] == [EndAssignment, StartAssignment]
    assert bench.core.fired == Counter({"beside": 1, "superseded": 1})


def test_what_is_made_ready_is_given_up_with_the_pipeline_that_works_and_never_ends_it() -> None:
    for ends in ("reset", "lease", "silence", "error", "weights", "nonsense"):
        bench = Bench()
        head = bench.held()
        later = bench.dial(incarnation=SECOND)
        bench.hears(later, assigned_beside())
        if ends == "reset":
            assert bench.hears(head, Reset())[0] == EndPreparation(assignment_id=2)
        elif ends == "lease":
            bench.now_s = 6.0
            assert EndPreparation(assignment_id=2) in bench.give(DaemonTick())
        elif ends == "silence":
            for bench.now_s in (4.0, 6.0):
                bench.hears(head, Ping())
            assert bench.give(DaemonTick()) == [EndPreparation(assignment_id=2)], (
                "the other connection is gone"
            )
        elif ends == "error":
            told = bench.give(ComputeFailed(assignment_id=2, text="it is damaged", is_part=True))
            assert told == [says(later, "it is damaged", "part"), EndPreparation(assignment_id=2)]
        elif ends == "weights":
            told = bench.reports(AskNames(first=0), 2)
            assert told[-1] == EndPreparation(assignment_id=2), "it asks where nobody serves"
        else:
            told = bench.hears(later, Loading(share=0.1))
            assert [type(command) for command in told] == [Ban, EndPreparation]
        assert bench.core.beside is None
        assert (bench.core.assignment is None) == (ends in ("reset", "lease"))
        assert bench.core.fired["given up"] == 1
        bench.reports(LOADED, 2)
        assert bench.core.fired["late result"] == 1


def test_nothing_is_made_ready_beside_nothing_and_the_last_of_two_counts() -> None:
    bench = Bench()
    wanted = assigned_beside()
    text = "no earlier pipeline of this head works here: there is nothing to make ready beside"
    first = bench.dial()
    assert bench.hears(first, wanted) == [says(first, text, "again")]
    bench.held()
    for incarnation in (FIRST, OTHER):
        caller = bench.dial(incarnation=incarnation)
        assert bench.hears(caller, wanted) == [says(caller, text, "again")]
    assert bench.core.fired == Counter({"beside nothing": 3})
    bench = Bench()
    bench.held()
    second, third = bench.dial(incarnation=SECOND), bench.dial(incarnation=THIRD)
    bench.hears(second, assigned_beside())
    told = bench.hears(third, assigned_beside())
    assert told == [
        EndPreparation(assignment_id=2),
        PrepareSlice(assignment_id=3, caller=third, assign=assigned_beside()),
    ]
    assert bench.hears(second, assigned_beside()) == []
    assert bench.core.fired == Counter({"beside": 2, "given up": 1, "stale": 1})


@pytest.mark.parametrize(
    ("new", "free", "growth", "given_up", "room"),
    [
        (6, 6, 0, 0, SliceRoom.NONE),
        (6, 6, 0, 1, SliceRoom.BESIDE),
        (6, 7, 1, 0, SliceRoom.BESIDE),
        (6, 6, 1, 1, SliceRoom.AFTER),
        (6, 3, 0, 4, SliceRoom.AFTER),
        (6, 3, 0, 3, SliceRoom.NONE),
        (0, 0, 0, 1, SliceRoom.BESIDE),
    ],
)
def test_where_a_slice_fits_that_is_made_ready(
    new: int, free: int, growth: int, given_up: int, room: SliceRoom
) -> None:
    assert room_for(new=new, cache=1, free=free, growth=growth, given_up=given_up) is room
