"""Who is lost, who may return, and when: event in, exact command list out; who holds a device; and when names
are looked up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.cluster.addresses import AddressBook, Lookup, LookupTimeouts, is_good_for
from flowspec.core.cluster.holder import Holder
from flowspec.core.cluster.incarnation import (
    GENERATION_BITS,
    SESSION_BITS,
    SESSIONS_MAX,
    Lease,
    incarnation_of,
)
from flowspec.core.cluster.membership import (
    DevicesPrepared,
    Disband,
    GiveUp,
    HeartbeatArrived,
    LinkBroken,
    MemberProgressed,
    MembersChosen,
    Membership,
    MembershipCommand,
    MembershipEvent,
    NoPlanFound,
    Note,
    PipelineBroken,
    PipelineFormed,
    PlanRejected,
    PreparationFailed,
    Prepare,
    Probe,
    ProbeAnswered,
    Reform,
    SessionStarted,
    SpeedChanged,
    Tick,
)
from flowspec.core.protocol import limits
from flowspec.core.protocol.types import is_numeric
from tests.core.runs import MEMBERSHIP_TIMEOUTS

TIMEOUTS = replace(MEMBERSHIP_TIMEOUTS, worth=10.0)


class Bench:
    """A membership of three devices with a clock; time passes in ticks of half a second, in which those in
    `alive` are heard.

    Devices that are to make ready have done so at once, or what `outcome` or `prepares` says comes of it.
    """

    def __init__(self, *names: str) -> None:
        self.core = Membership(names or ("a", "b", "c"), TIMEOUTS)
        self.now_s = 0.0
        self.alive = set(names or ("a", "b", "c"))
        self.tick = Tick()
        self.prepared: list[Prepare] = []
        self.outcome: PreparationFailed | PlanRejected | None = None
        self.prepares: DevicesPrepared | None = None

    def give(self, event: MembershipEvent) -> list[MembershipCommand]:
        return self.core.handle(event, self.now_s)

    def form(self, after_s: float = 0.0) -> list[MembershipCommand]:
        self.now_s += after_s
        return self.give(PipelineFormed())

    def pass_time(self, seconds: float) -> list[MembershipCommand]:
        """What is decided meanwhile; probes of devices that are alive are answered, and not told of."""
        found: list[MembershipCommand] = []
        for _ in range(int(seconds / 0.5)):
            self.now_s += 0.5
            for name in sorted(self.alive):
                self.give(HeartbeatArrived(device=name))
            for command in self.give(self.tick):
                if isinstance(command, Probe):
                    if command.device in self.alive:
                        self.give(ProbeAnswered(device=command.device))
                elif isinstance(command, Prepare):
                    self.prepared.append(command)
                    found += self.give(
                        self.outcome or self.prepares or DevicesPrepared(devices=command.returning)
                    )
                else:
                    found.append(command)
        return found


def running(*names: str) -> Bench:
    bench = Bench(*names)
    bench.give(SessionStarted())
    bench.form()
    return bench


def without_b(forming_s: float = 0.0) -> Bench:
    """It is lost, and the others work without it, once another pipeline is formed."""
    bench = running()
    bench.give(PipelineBroken(device="b", text="its connection closed"))
    bench.form(forming_s)
    return bench


def test_the_devices_that_are_gone_on_with_are_those_of_the_plan() -> None:
    bench = running("a", "b", "c", "d")
    bench.give(PipelineBroken(device="b", text="its connection closed"))
    assert bench.give(MembersChosen(devices=("a", "c"))) == [Note(text="going on with 2 devices")], (
        "d stands by"
    )
    assert bench.give(MembersChosen(devices=("a", "c", "d"))) == [], "nobody was lost since"


def test_silence_is_loss_but_for_a_head_that_was_stopped_itself() -> None:
    bench = running()
    bench.alive.discard("c")
    assert bench.pass_time(6) == [
        Note(text="device c is lost (no sign of life for 6 s)"),
        Reform(devices=("a", "b"), silent_s=5.5),
    ]
    bench = running()
    bench.now_s += 3600
    assert bench.give(Tick()) == []
    assert bench.pass_time(10) == []


def test_while_devices_load_silence_lasts_longer_and_progress_counts() -> None:
    bench = Bench()
    bench.give(SessionStarted())
    bench.alive.discard("a")
    assert bench.pass_time(14) == []
    assert [type(command) for command in bench.pass_time(2)] == [Note, Reform]
    bench.give(MemberProgressed(device="b", is_ready=True))
    lost = bench.pass_time(61)
    assert lost[0] == Note(text="device c is lost (no progress in loading for 60 s)")


def test_a_device_that_hangs_in_a_segment_is_lost_though_it_answers() -> None:
    """However often it is heard of meanwhile, and though the segment counts as one that somebody is at."""
    bench = running()
    for seconds in range(31):
        bench.now_s += 1.0
        for name in ("a", "b", "c"):
            assert (
                bench.give(
                    HeartbeatArrived(
                        device=name, running_s=seconds if name == "b" else 0.0, queued=name == "b"
                    )
                )
                == []
            )
        assert bench.give(Tick(flight_s=seconds)) == []
    assert bench.give(HeartbeatArrived(device="b", running_s=31))[0] == Note(
        text="device b is lost (at one segment for 31 s)"
    )
    assert bench.core.fired == Counter({"stuck": 1})


def test_only_passes_that_ended_teach_how_long_one_may_take() -> None:
    bench = running()
    for seconds in (2, 4, 6):
        assert bench.give(HeartbeatArrived(device="b", running_s=seconds)) == []
    assert bench.give(HeartbeatArrived(device="b", running_s=1, done=1)) == [], (
        "a pass of at least six seconds has ended"
    )
    assert bench.give(HeartbeatArrived(device="b", running_s=60, done=1)) == []
    assert isinstance(bench.give(HeartbeatArrived(device="b", running_s=61, done=1))[0], Note)
    bench = running()
    bench.give(HeartbeatArrived(device="b", running_s=6))
    assert isinstance(bench.give(HeartbeatArrived(device="b", running_s=31))[0], Note), "it has not ended"


def test_failures_that_were_nobodys_end_it_unless_tokens_make_them_good() -> None:
    bench = running()
    bench.tick = Tick(flight_s=100.0)
    for _ in range(3):
        said = bench.pass_time(31)
        assert [type(command) for command in said] == [Note, Reform]
        assert said[1] == Reform(devices=("a", "b", "c"))
        bench.form()
    assert isinstance(bench.pass_time(31)[-1], GiveUp)
    bench = running()
    for tokens in range(1, 8):
        assert isinstance(bench.give(PipelineBroken(device="", text="the lease lapsed"))[-1], Reform)
        bench.form()
        bench.tick = Tick(tokens=tokens)
        bench.pass_time(1)


def on_its_way(flight_bytes: int) -> Bench:
    """Segment 7 has come to the first device, which is done with it, and not to the second."""
    bench = running()
    bench.tick = Tick(flight_s=1000.0, flight=7, flight_bytes=flight_bytes)
    bench.alive.clear()
    return bench


def wait_for(bench: Bench, seconds: float) -> list[MembershipCommand]:
    found = []
    for _ in range(int(seconds)):
        for name, arrived in (("a", 7), ("b", 6), ("c", 6)):
            bench.give(HeartbeatArrived(device=name, arrived=arrived))
        found += bench.pass_time(1.0)
    return found


def test_a_link_on_which_a_segment_is_for_long_is_named_waited_for_and_broken() -> None:
    bench = on_its_way(512 << 10)
    note = "the link from a to b carries less than 138 kbit/s: 512 KiB have been on their way for 30 s"
    assert wait_for(bench, 31) == [Note(text=note)], "once"
    assert wait_for(bench, 200) == []
    said = wait_for(bench, 40)
    assert said[0] == Note(
        text="device b is lost (the link from a to b failed: 512 KiB did not come over it within 262 s)"
    )
    assert said[1] == Reform(devices=("a", "c"), silent_s=1.0)
    bench = on_its_way(90 << 10)
    for at in range(300):
        bench.tick = Tick(flight_s=1.0 + at % 40, flight=7, flight_bytes=90 << 10)
        assert [command for command in wait_for(bench, 1) if isinstance(command, Reform)] == []
    said = wait_for(on_its_way(4096), 31)
    assert said[0] == Note(
        text="device b is lost (the link from a to b failed: 4 KiB did not come over it within 30 s)"
    )


def test_who_answers_again_returns_after_a_while_that_doubles_and_is_forgiven() -> None:
    bench = running()
    for wait_s in (4, 8, 16):
        bench.give(PipelineBroken(device="b", text="its connection closed"))
        bench.form()
        assert bench.pass_time(wait_s - 1) == []
        assert bench.pass_time(2.5) == [Reform(devices=("a", "b", "c"))]
        assert bench.form() == [Note(text="device b is back"), Note(text="changing the pipeline took 1.0 s")]
    bench = running()
    for _ in range(3):
        bench.give(PipelineBroken(device="b", text="its connection closed"))
        bench.form()
        assert bench.pass_time(6.5) == [Reform(devices=("a", "b", "c"))]
        bench.form()
        bench.pass_time(301)


def test_who_is_back_waits_for_an_answer_that_ends_soon_but_not_for_ever() -> None:
    bench = without_b(2.0)
    bench.tick = Tick(left_s=20.0)
    assert bench.pass_time(12) == []
    bench.tick = Tick(left_s=21.0)
    assert bench.pass_time(1) == [Reform(devices=("a", "b", "c"))]
    bench = without_b(2.0)
    bench.tick = Tick(left_s=1.0)
    assert bench.pass_time(12) == []
    assert bench.pass_time(6) == [Reform(devices=("a", "b", "c"))]
    assert bench.core.fired["waited enough"] == 1


def test_without_devices_or_a_plan_for_the_rest_one_waits_for_who_comes() -> None:
    bench = running("a")
    bench.alive.clear()
    said = bench.give(PipelineBroken(device="a", text="its connection closed"))
    assert said == [
        Note(text="device a is lost (its connection closed)"),
        Note(text="no device is left; waiting for a device to come back"),
        Disband(),
    ]
    assert bench.pass_time(30) == []
    bench.alive.add("a")
    assert bench.pass_time(3) == [Reform(devices=("a",))]
    bench = running()
    bench.give(PipelineBroken(device="a", text="its connection closed"))
    said = bench.give(NoPlanFound(text="4 GiB are missing"))
    assert said == [
        Note(
            text=(
                "the model does not fit on what is left: 4 GiB are missing; waiting for a device to come back"
            )
        ),
        Disband(),
    ]
    assert bench.pass_time(7)[-1] == Reform(devices=("a", "b", "c"))


def test_what_takes_long_to_make_ready_disturbs_nobody_and_is_asked_for_once() -> None:
    bench = without_b()
    bench.tick = Tick(left_s=5.0)
    assert bench.core.returning == [], "it is lost"
    for _ in range(14):
        bench.now_s += 0.5
        bench.give(ProbeAnswered(device="b"))
        assert bench.core.returning == ["b"]
        said = bench.give(Tick(left_s=5.0))
        if any(isinstance(command, Prepare) for command in said):
            break
    assert bench.pass_time(20) == [], "it loads"
    assert bench.core.returning == ["b"]
    bench.give(ProbeAnswered(device="b", is_held=True))
    assert bench.give(DevicesPrepared(devices=("b",))) == []
    assert bench.give(Tick()) == [Reform(devices=("a", "b", "c"))], (
        "what was heard of it meanwhile was our own"
    )


def test_a_device_that_cannot_make_ready_stays_out_and_one_without_work_stands_by() -> None:
    bench = without_b()
    bench.outcome = PreparationFailed(devices=("b",), text="2 GiB are missing")
    assert bench.pass_time(6.5) == [Note(text="device b is not taken in (2 GiB are missing)")]
    bench.outcome = None
    assert bench.pass_time(5) == [], "twice as long as before"
    assert bench.pass_time(4) == [Reform(devices=("a", "b", "c"))]
    bench = without_b()
    bench.outcome = PlanRejected(devices=("b",))
    assert bench.pass_time(30) == [Note(text="device b is back, and stands by")]
    assert bench.give(PipelineBroken(device="a", text="its connection closed"))[-1] == Reform(
        devices=("b", "c"), silent_s=0.5
    )


SLOW = SpeedChanged(text="b has slowed down to 70% of its speed (throttled, 82 degrees)")
GOING_OVER = Note(text=f"device {SLOW.text}: going over to another plan, which is 1.20 times as fast")


def test_a_better_plan_is_gone_over_to_between_two_answers_and_its_switch_is_timed() -> None:
    bench = running()
    assert bench.give(SLOW) == [Prepare(devices=("a", "b", "c"), returning=())]
    assert bench.give(SLOW) == [], "it is being made"
    assert bench.give(DevicesPrepared(devices=(), gain=1.2)) == []
    bench.tick = Tick(left_s=500.0)
    assert bench.pass_time(30) == []
    assert bench.give(Tick()) == [GOING_OVER, Reform(devices=("a", "b", "c"))]
    bench.now_s += 1.5
    text = "changing the pipeline took 1.5 s; other layers run now on device a, device b"
    assert bench.give(PipelineFormed(moved=("a", "b"))) == [Note(text=text)]
    bench.tick = Tick()
    assert bench.pass_time(500) == []
    assert bench.give(SLOW) == [], "plans are ten minutes apart"
    assert bench.pass_time(100) == []
    assert bench.give(SLOW) == [Prepare(devices=("a", "b", "c"), returning=())]


def test_a_better_plan_waits_for_an_answer_to_end_but_no_longer_than_a_minute() -> None:
    bench = running()
    bench.give(SLOW)
    bench.give(DevicesPrepared(devices=(), gain=1.2))
    bench.tick = Tick(left_s=500.0)
    assert bench.pass_time(60) == []
    assert bench.pass_time(1) == [GOING_OVER, Reform(devices=("a", "b", "c"))]
    bench = running()
    bench.give(SLOW)
    assert bench.give(DevicesPrepared(devices=(), gain=1.2, load_s=101.0)) == []
    assert bench.pass_time(60) == []
    assert (bench.core.fired["too dear"], bench.core.fired["stays"]) == (1, 1)
    bench.pass_time(600)
    bench.give(SLOW)
    assert bench.give(DevicesPrepared(devices=(), gain=1.2, load_s=99.0)) == []
    assert bench.pass_time(1) == [GOING_OVER, Reform(devices=("a", "b", "c"))]
    assert bench.form(99.5) == [Note(text="changing the pipeline took 100.0 s")]
    assert bench.core.fired["loads then"] == 1
    assert bench.core.pause_s(0.0) == 1.0, "that is what the next switch takes, if nothing is to be loaded"


def test_a_switch_must_gain_more_than_it_costs() -> None:
    bench = running()
    assert not bench.core.is_worth(1.0)
    assert not bench.core.is_worth(1.04), "forecasts are not that exact"
    assert bench.core.is_worth(1.05)
    slow = Bench()
    slow.give(SessionStarted())
    slow.form(60.0)
    assert slow.core.is_worth(1.05), "all are ready before it: what forming took at first does not count"
    assert slow.core.pause_s(58.0) == 60.0
    assert not slow.core.is_worth(1.1, 58.0), "a tenth of ten minutes is what it costs"
    assert slow.core.is_worth(1.12, 58.0)


def test_a_device_that_another_head_has_is_not_back() -> None:
    bench = without_b()
    bench.alive.discard("b")
    for _ in range(20):
        assert bench.pass_time(1) == []
        bench.give(ProbeAnswered(device="b", is_held=True))
    bench.alive.add("b")
    assert bench.pass_time(3) == [Reform(devices=("a", "b", "c"))]


def test_of_a_link_one_end_is_left_out_and_the_other_a_suspect_with_less_time() -> None:
    bench = running()
    said = bench.give(LinkBroken(first="a", second="b", text="lost by a"))
    assert said == [
        Note(text="device b is lost (the link from a to b failed: lost by a)"),
        Reform(devices=("a", "c")),
    ]
    said = bench.give(LinkBroken(first="a", second="c", text="lost by a"))
    assert said == [
        Note(text="device a is lost (the link from a to c failed: lost by a)"),
        Reform(devices=("c",)),
    ]
    bench = running()
    bench.give(LinkBroken(first="a", second="b", text="lost by a"))
    bench.give(MemberProgressed(device="c", is_ready=True))
    assert bench.pass_time(10) == []
    assert bench.pass_time(1)[0] == Note(text="device a is lost (no progress in loading for 10 s)")
    assert bench.core.fired["suspect stalled"] == 1
    assert bench.core.fired["stalled"] == 0


# ----------------------------------------------------------------------------------------- holders and leases

FIRST, SECOND, OTHER = incarnation_of(7, 1), incarnation_of(7, 2), incarnation_of(8, 1)


def test_silence_ends_a_lease_a_word_renews_it_and_numbers_fit_into_messages() -> None:
    assert incarnation_of((1 << SESSION_BITS) - 1, (1 << GENERATION_BITS) - 1) <= limits.ID_MAX
    assert SECOND > FIRST
    lease = Lease(5.0)
    assert not lease.is_over(100.0)
    lease.take(FIRST, 0.0)
    lease.renew(3.0)
    assert not lease.is_over(8.0)
    assert lease.is_over(8.1)


@given(st.lists(st.integers(0, 3 * SESSIONS_MAX), max_size=3 * SESSIONS_MAX))
def test_no_number_of_heads_makes_a_device_remember_more_than_its_limit(sessions: list[int]) -> None:
    lease = Lease(5.0)
    for session in sessions:
        lease.take(incarnation_of(session, 1), 0.0)
        lease.release()
    assert len(lease._newest) <= SESSIONS_MAX


def test_a_head_that_renews_its_lease_is_there_and_one_that_died_is_not() -> None:
    holder = Holder()
    assert not holder.is_there(4.2, 10.0), "it is not known yet"
    assert holder.is_there(4.1, 11.1)
    holder = Holder()
    asked = [(4.9, 10.0), (3.9, 11.4), (2.7, 12.1), (1.7, 13.4), (0.5, 14.8), (0.5, 15.0)]
    assert not any(holder.is_there(lease_s, now_s) for lease_s, now_s in asked)
    holder = Holder()
    assert not holder.is_there(0.5, 10.0)
    assert holder.is_there(4.9, 11.1)


# -------------------------------------------------------------------------------------------------- addresses

FORMING_TIMEOUTS = LookupTimeouts(limit_s=3.0, fresh_s=30.0, again_s=2.0)


@pytest.fixture
def book() -> AddressBook:
    return AddressBook(FORMING_TIMEOUTS)


def test_a_name_is_looked_up_once_waited_for_and_asked_again_when_it_is_none(book: AddressBook) -> None:
    assert book.ask("pi", 0.0) == Lookup(is_wanted=True)
    assert book.ask("pi", 2.9) == Lookup()
    assert book.ask("nano", 2.9) == Lookup(is_wanted=True), "each name for itself"
    assert book.ask("pi", 3.0) == Lookup(trouble="no name service answered within 3 s")
    assert book.ask("pi", 60.0).is_wanted is False, "the look-up that hangs is not joined by others"
    book.found("pi", "10.0.0.2", 61.0)
    assert book.ask("pi", 61.0) == Lookup(address="10.0.0.2")
    book.ask("tv", 0.0)
    book.failed("tv", "no such name", 0.5)
    assert book.ask("tv", 2.4) == Lookup(trouble="no such name")
    assert book.ask("tv", 2.5) == Lookup(is_wanted=True)


def test_an_address_is_used_while_it_is_looked_up_again_and_when_that_fails(book: AddressBook) -> None:
    book.ask("pi", 0.0)
    book.found("pi", "10.0.0.2", 0.5)
    assert book.ask("pi", 30.0) == Lookup(address="10.0.0.2"), "it is fresh"
    assert book.ask("pi", 30.5) == Lookup(address="10.0.0.2", is_wanted=True)
    assert book.ask("pi", 50.0) == Lookup(address="10.0.0.2"), "a look-up that hangs changes nothing"
    book.failed("pi", "no such name", 51.0)
    assert book.ask("pi", 52.0) == Lookup(address="10.0.0.2")
    assert book.ask("pi", 53.0) == Lookup(address="10.0.0.2", is_wanted=True), (
        "sooner than one that was found"
    )
    book.found("pi", "10.0.0.7", 54.0)
    assert book.ask("pi", 54.0) == Lookup(address="10.0.0.7"), "a device that moved is found"


def test_loopback_is_told_only_to_who_is_on_loopback() -> None:
    assert is_good_for("10.0.0.2", "10.0.0.3")
    assert is_good_for("127.0.0.1", "127.0.1.1")
    assert not is_good_for("127.0.1.1", "10.0.0.3")
    assert all(is_numeric(host) for host in ("10.0.0.2", "::1", "fe80::1%eth0"))
    assert not any(is_numeric(host) for host in ("pi", "", "localhost"))
