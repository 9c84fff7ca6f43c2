"""Emulated devices take the time that the simulator's would, links the simulator's delays; what is too slow
says so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flowspec.core.protocol.cluster_messages import Ping
from flowspec.core.protocol.messages import Features, Sampling
from flowspec.core.stage.events import JobPart, RunLayers, Trim
from flowspec.errors import ClusterError
from flowspec.plan.timing import DIRECT, Curve, LinkSpec
from flowspec.runtime.emulation import (
    JOBS_MAX,
    JOBS_MIN,
    WARM_UP_JOBS,
    DeviceEmulation,
    Lateness,
    Pacer,
    Shaper,
    wait_until,
)
from flowspec.runtime.transport import poll_timeout_ms
from flowspec.sim.clock import Clock
from flowspec.sim.device import DeviceSpec, SimulatedDevice
from flowspec.sim.link import INCARNATION, SimulatedLink
from flowspec.wire.codec import Envelope, Tensor, decode, encode
from tests.nightly import seeds

CURVE = Curve(base_s=0.03, row_s=0.004, extra_row_s=0.001, fixed_s=0.002, context_s=1e-5)
SAMPLING = Curve(base_s=0.003, extra_row_s=0.0005)
TICK_S = 1e-6


class Time:
    """A clock that only sleeping moves, and computing by hand."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += max(seconds, TICK_S)


def pacer(clock: Time, layers: int, *, stage: int = 0) -> Pacer:
    """Of one of two stages."""
    declared = DeviceEmulation(layers=CURVE, sampling=SAMPLING, outgoing=DIRECT, row_bytes=0)
    return Pacer(declared, stage=stage, stages=2, layers=layers, clock=clock, sleep=clock.sleep)


def job_of(rows: int, positions: Sequence[int], asked: Sequence[bool]) -> RunLayers:
    part = JobPart(
        request=1,
        slots=np.arange(rows),
        tokens=np.arange(rows),
        positions=np.array(positions),
        key_positions=np.arange(rows, dtype=np.int32),
        visible=np.ones((rows, rows), dtype=np.bool_),
        sampled=np.array(asked),
        sampling=Sampling(),
    )
    return RunLayers(job=1, parts=(part,), payload=None, rows=tuple(range(rows)))


class NoLayers:
    """Layers of the simulator that compute nothing."""

    def run(
        self, stage: int, job: RunLayers, payload: Tensor | None, rows: tuple[int, ...]
    ) -> tuple[None, tuple[int, ...], tuple[()]]:
        return None, (0,) * len(rows), ()

    def change_cache(self, stage: int, command: object) -> None: ...


def simulated_end(
    job: RunLayers, layers: int, trims: Sequence[tuple[float, tuple[int, ...]]], *, is_last: bool
) -> float:
    """When the simulator's device ends a job that begins at 0."""
    clock, ends = Clock(), []
    spec = DeviceSpec(curve=CURVE, layers=layers, sampling=SAMPLING)
    simulated = SimulatedDevice(clock, spec, 0, NoLayers(), is_last, lambda done: ends.append(done.ended_s))
    simulated.run(job)
    for at_s, rows in trims:
        clock.at(
            at_s, lambda rows=rows: None if simulated.is_idle else simulated.trim(Trim(job=1, rows=rows))
        )  # type: ignore[misc]
    while clock.step(float("inf")):
        pass
    return float(ends[0])


def paced_end(
    job: RunLayers, layers: int, trims: Sequence[tuple[float, tuple[int, ...]]], *, is_last: bool
) -> float:
    """The same by a pacer, the layers driven as `Slice.run` does."""
    clock = Time()

    def dead_rows() -> frozenset[int]:
        return frozenset(row for at_s, rows in trims if at_s <= clock.now_s for row in rows)

    paced = pacer(clock, layers, stage=int(is_last))
    paced.begin(job.sampled, job.context, 0.0)
    for _ in range(layers):
        if len(paced.boundary(dead_rows)) == len(job.rows):
            break
    return paced.end(dead_rows)


@pytest.mark.parametrize("seed", seeds(20, 1000))
def test_a_job_ends_when_the_simulator_says_so_whatever_is_trimmed(seed: int) -> None:
    chance = random.Random(seed)
    layers, count = chance.randint(1, 6), chance.randint(1, 12)
    positions = [chance.randint(0, 2000) for _ in range(count)]
    job = job_of(count, positions, [chance.random() < 0.7 for _ in range(count)])
    rows = chance.sample(range(count), count)
    trims = []
    while rows and chance.random() < 0.7:
        gone = tuple(rows.pop() for _ in range(chance.randint(1, len(rows))))
        trims.append((chance.uniform(0, 0.12), gone))
    for is_last in (False, True):
        expected = simulated_end(job, layers, trims, is_last=is_last)
        assert paced_end(job, layers, trims, is_last=is_last) == pytest.approx(
            expected, abs=(layers + 2) * TICK_S
        )


def test_what_one_layer_took_too_long_the_next_ones_catch_up_or_the_job_is_late() -> None:
    for slow_s, end_s in ((0.017, CURVE.seconds(1)), (0.5, 0.503)):  # of 0.00875 declared for each
        clock = Time()
        paced = pacer(clock, 4)
        paced.begin(np.ones(1, dtype=np.bool_), 0, 0.0)
        for index in range(4):
            paced.boundary(frozenset)
            clock.now_s += slow_s if index == 0 else 0.001
        assert paced.end(frozenset) == pytest.approx(end_s, abs=1e-5)


def test_a_wait_sleeps_most_of_it_at_once_and_yields_only_at_its_end() -> None:
    clock = Time(5.0)
    assert wait_until(5.04, clock, clock.sleep) == pytest.approx(5.04, abs=2 * TICK_S)
    assert clock.sleeps[0] == pytest.approx(0.039)
    assert sum(seconds == 0 for seconds in clock.sleeps) * TICK_S <= 0.0003
    assert wait_until(4.0, clock, clock.sleep) == clock.now_s, "an instant that is past is not waited for"


def counted(lateness: Lateness, jobs: int, declared_s: float, took_s: float) -> None:
    for _ in range(jobs):
        lateness.count(declared_s, took_s)


def test_a_machine_that_is_too_slow_is_told_so_once_enough_jobs_are_done() -> None:
    lateness = Lateness("stage 2 of 4", "use fewer stages")
    counted(lateness, WARM_UP_JOBS, 0.010, 1.0)
    counted(lateness, JOBS_MIN - 1, 0.010, 0.0125)
    said = r"^stage 2 of 4 cannot keep up .* 10\.00 ms a pass, .* 12\.50 ms .* use fewer stages$"
    with pytest.raises(ClusterError, match=said):
        lateness.count(0.010, 0.0125)


def test_a_little_lateness_is_accepted_old_lateness_forgotten_and_earliness_pays_for_nothing() -> None:
    counted(Lateness("the drafter", ""), 500, 0.010, 0.01049)
    lateness = Lateness("the drafter", "")
    counted(lateness, WARM_UP_JOBS + JOBS_MAX - 1, 0.010, 0.010)
    for _ in range(10):  # one job in a window may be late by what all of the window may
        lateness.count(0.010, 0.034)
        counted(lateness, JOBS_MAX - 1, 0.010, 0.010)
    lateness.count(0.010, 0.034)
    early = Lateness("stage 1 of 1", "")
    counted(early, WARM_UP_JOBS + 19, 0.010, 0.002)
    for late in (lateness, early):  # what ended early pays for nothing
        with pytest.raises(ClusterError):
            late.count(0.010, 0.034)


def arrivals(shaper: Shaper, sends: Sequence[tuple[float, Any, Tensor | None]]) -> list[float]:
    for number, (at_s, message, tensor) in enumerate(sends):
        frames = encode(
            Envelope(incarnation=INCARNATION, sender="a", sequence=number, message=message, tensor=tensor)
        )
        assert shaper.put(frames, tensor, at_s)
    found = []
    while (due_s := shaper.due_s) < float("inf"):
        assert shaper.take(due_s - 1e-9) is None
        frames_taken = shaper.take(due_s)
        assert frames_taken is not None
        assert decode(frames_taken).sequence == len(found), "messages arrive in order"
        found.append(due_s)
    assert shaper.take(float("inf")) is None
    return found


def simulated_arrivals(
    spec: LinkSpec, row_bytes: int | None, sends: Sequence[tuple[float, Any, Tensor | None]]
) -> list[float]:
    clock = Clock()
    found: list[float] = []
    link = SimulatedLink(
        clock, spec, "a", lambda *_: found.append(clock.now_s), chance=random.Random("x"), row_bytes=row_bytes
    )
    for at_s, message, tensor in sends:
        clock.at(at_s, lambda message=message, tensor=tensor: link.send(message, tensor))  # type: ignore[misc]
    while clock.step(float("inf")):
        pass
    return found


@pytest.mark.parametrize(
    ("spec", "row_bytes"),
    [
        (DIRECT, 0),
        (LinkSpec(delay_s=0.001, bandwidth_mbps=2.0), 4096),
        (LinkSpec(delay_s=0.002, bandwidth_mbps=50.0, jitter_s=0.03), 0),
    ],
    ids=str,
)
def test_messages_arrive_when_the_simulator_says_so(spec: LinkSpec, row_bytes: int) -> None:
    chance = random.Random(3)
    sends: list[tuple[float, Any, Tensor | None]] = []
    at_s = 0.0
    for _ in range(60):
        at_s += chance.uniform(0, 0.01)
        if chance.random() < 0.4:
            sends.append((at_s, Ping(), None))
            continue
        rows = chance.randint(1, 9)  # of a message that carries a payload
        tensor = Tensor(rows=rows, width=8, dtype="float32", data=bytes(32 * rows))
        sends.append((at_s, Features(request=1, epoch=0, ids=tuple(range(rows))), tensor))
    found = arrivals(Shaper(spec, row_bytes=row_bytes, chance=random.Random("x")), sends)
    assert found == pytest.approx(simulated_arrivals(spec, row_bytes or None, sends), abs=1e-12)
    assert found == sorted(found)


def test_a_poll_ends_less_than_half_a_millisecond_from_what_is_due() -> None:
    assert poll_timeout_ms(float("inf"), 100.0, 60_000) == 60_000
    assert poll_timeout_ms(99.0, 100.0, 500) == 0
    assert poll_timeout_ms(101.0, 100.0, 500) == 500
    for step in range(1000):
        due_s = 100.0 + 0.02 + step * 1.7e-5
        assert 100.0 + poll_timeout_ms(due_s, 100.0, 500) / 1000 == pytest.approx(due_s, abs=0.000501)
