"""What counts as a device that has become slower: passes of the same kind, over a minute of work, and no
noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.cluster.slowing import Change, Slowing, why_slow
from flowspec.core.protocol.cluster_messages import Pong
from flowspec.core.protocol.messages import Hop

MINUTE_S = 60.0


def pass_s(rows: int, context: int) -> float:
    """What a pass of a board takes: more rows than four are computed longer than weights are read, and so is
    a context."""
    return 0.1 * max(1.0, rows / 4) + 1e-4 * context


def hop(seconds: float, rows: int, *, dead: int = 0) -> Hop:
    return Hop(
        received_s=0.0, queued_s=0.0, compute_s=seconds, own_s=0.0, rows=rows, dead_between_layers=dead
    )


class Bench:
    """Two devices at work, a segment every half a second; `heat` is how many times as long the second one
    takes."""

    def __init__(self) -> None:
        self.core = Slowing(MINUTE_S)
        self.core.begin(("a", "b"))
        self.now_s = 0.0
        self.heat = 1.0
        self.rows = 4
        self.context = 10

    def work(self, seconds: float, chance: random.Random | None = None, noise: float = 0.0) -> list[Change]:
        found: list[Change] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.5
            usual_s = pass_s(self.rows, self.context)
            factors = [1.0 if chance is None else chance.uniform(1 - noise, 1 + noise) for _ in range(2)]
            hops = (hop(usual_s * factors[0], self.rows), hop(usual_s * self.heat * factors[1], self.rows))
            self.core.passed(hops, self.context)
            found = self.core.look(self.now_s)
        return found


def test_a_fifth_for_a_minute_is_told_and_less_of_either_is_not() -> None:
    bench = Bench()
    assert bench.work(60) == []
    bench.heat = 1.19
    assert bench.work(600) == []
    bench.heat = 1.21
    assert bench.work(60) == []
    (change,) = bench.work(10)
    assert (change.device, change.slowness) == ("b", pytest.approx(1.21))
    assert str(change) == "b has slowed down to 83% of its speed"


def test_a_minute_begins_anew_when_it_is_as_it_was_and_pauses_do_not_count() -> None:
    bench = Bench()
    bench.work(60)
    for _ in range(5):
        bench.heat = 1.5
        assert bench.work(50) == []
        bench.heat = 1.0
        assert bench.work(20) == []
    bench = Bench()
    bench.work(60)
    bench.heat = 1.5
    assert bench.work(10) == []
    bench.now_s += 3600
    assert bench.core.look(bench.now_s) == []
    assert bench.work(20) == []
    assert bench.work(45) != []


def test_what_is_known_of_a_device_counts_for_the_next_plan_and_what_comes_after_on_top() -> None:
    bench = Bench()
    bench.work(60)
    assert bench.core.slowness == {}
    bench.heat = 1.5
    bench.work(70)
    assert bench.core.slowness == {"b": pytest.approx(1.5)}
    bench.core.begin(("b", "c"))
    assert bench.core.slowness == {"b": pytest.approx(1.5)}
    assert bench.work(120) == [], "it is as slow as the plan takes it for"
    bench.core.begin(("a", "b"))
    bench.work(60)
    bench.heat = 1.0
    assert bench.work(75) != [], "it has cooled down"
    bench.core.begin(("a", "b"))
    assert bench.core.slowness == {}, "as at first"


def test_passes_that_lost_rows_and_segments_that_nobody_timed_say_nothing() -> None:
    core = Slowing(MINUTE_S)
    core.begin(("a",))
    for at in range(1000):
        core.passed((hop(0.1 if at < 300 else 9.0, 4, dead=int(at >= 300)),), 10)
        core.passed((), 10)
        assert core.look(at / 2) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), noise=st.floats(0.0, 0.09))
def test_noise_is_never_taken_for_a_change(seed: int, noise: float) -> None:
    """Whatever the mix of rows and contexts: times within 9% of each other's mean are never a fifth apart."""
    chance = random.Random(seed)
    bench = Bench()
    for _ in range(40):
        bench.rows, bench.context = chance.choice((1, 3, 4, 5, 12)), chance.choice((5, 90, 130, 150))
        assert bench.work(chance.choice((0.5, 3.0, 20.0)), chance, noise) == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), heat=st.floats(1.35, 3.0))
def test_a_device_that_heat_slows_down_is_found_whatever_the_mix(seed: int, heat: float) -> None:
    chance = random.Random(seed)
    bench = Bench()
    for hot in (1.0, heat):
        bench.heat = hot
        found: list[Change] = []
        for _ in range(300):
            bench.rows = chance.choice((1, 3, 4, 5, 12))
            found = bench.work(0.5, chance, 0.05)
    assert [change.device for change in found] == ["b"]


def test_why_a_device_is_slow_is_what_it_says_while_it_works() -> None:
    core = Slowing(MINUTE_S)
    hot = Pong(
        queued=1,
        done=1,
        memory_bytes=1,
        running_s=0.1,
        temperature_c=82.4,
        clock_mhz=1500,
        clock_max_mhz=2400,
        is_throttled=True,
    )
    assert why_slow(hot) == "throttled, 82 degrees, clock at 1500 of 2400 MHz"
    assert why_slow(Pong(queued=0, done=0, memory_bytes=1)) == ""
    core.heard("a", hot)
    core.heard("a", Pong(queued=0, done=2, memory_bytes=1, clock_mhz=600, clock_max_mhz=2400))
    core.begin(("a",))
    for at in range(400):
        core.passed((hop(0.1 if at < 200 else 0.2, 4),), 10)
        found = core.look(at / 2)
    assert [str(change) for change in found] == [
        "a has slowed down to 50% of its speed (throttled, 82 degrees, clock at 1500 of 2400 MHz)"
    ]
