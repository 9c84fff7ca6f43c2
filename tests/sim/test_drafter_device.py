"""What a drafter's job costs in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flowspec.core.head.events import Draft, Drafted
from flowspec.core.protocol.messages import Commit, Proposal, Release, Segment, SegmentPart
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.clock import Clock
from flowspec.sim.drafter_device import DrafterDevice, DrafterDeviceSpec

PASS, RANKING = Curve(fixed_s=1.0, extra_row_s=0.1), Curve(fixed_s=0.01, extra_row_s=0.001)
ROWS = 3


class Silent:
    """Proposes nothing, and says as much of its last job as it is told to."""

    captures: tuple[int, ...] = ()
    context = 100
    weight_bytes = cache_slots = 0

    def __init__(self, **said: object) -> None:
        vars(self).update(said)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        return ()

    def release(self, message: Release) -> None: ...

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None: ...


def made(clock: Clock, done: list[Drafted], link: LinkSpec | None = None, **said: object) -> DrafterDevice:
    return DrafterDevice(
        clock,
        DrafterDeviceSpec(drafters=(0,), link=link),
        {0: Silent(**said)},
        {0: PASS},
        {0: RANKING},
        done.append,
        chance=random.Random(1),
    )


def job(number: int) -> Draft:
    part = SegmentPart(
        commit=Commit(request=0, epoch=0, base=1, path=()),
        opening=None,
        ids=tuple(range(1, 1 + ROWS)),
        parents=tuple(range(ROWS)),
        tokens=(7,) * ROWS,
        positions=tuple(range(1, 1 + ROWS)),
        committed=(False,) * ROWS,
    )
    return Draft(job=number, segment=Segment(segment=0, parts=(part,)), width=4)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({}, 1.3),
        ({"pass_rows": []}, 1.3),
        ({"pass_rows": [5, 2]}, 2.7),
        ({"pass_rows": [5, 2], "ranked_rows": 9}, 2.7),
        ({"pass_rows": [], "ranked_rows": 9}, 0.019),
        ({"pass_rows": [], "ranked_rows": 0}, 0.0),
    ],
)
def test_a_job_takes_its_passes_or_lm_head_alone(said: dict[str, object], seconds: float) -> None:
    """A block that was guessed before is ranked again without a pass of the layers."""
    clock, done = Clock(), list[Drafted]()
    device = made(clock, done, **said)
    device.give(job(1))
    while clock.step():
        pass
    assert [each.ended_s for each in done] == [pytest.approx(seconds)]


def test_one_that_is_slow_takes_so_many_times_as_long_until_it_is_not() -> None:
    clock, done = Clock(), list[Drafted]()
    device = made(clock, done)
    for number, times in enumerate((1.0, 3.0, 1.0)):
        device.slow(0, times)
        device.give(job(number))
        while clock.step():
            pass
    assert [each.ended_s - each.started_s for each in done] == [
        pytest.approx(1.3 * times) for times in (1, 3, 1)
    ]


@pytest.mark.parametrize("link", [None, LinkSpec(bandwidth_mbps=100, delay_s=0.5)])
def test_what_it_was_at_when_it_was_lost_is_never_told_though_it_comes_back(link: LinkSpec | None) -> None:
    clock, done = Clock(), list[Drafted]()
    device = made(clock, done, link)
    device.give(job(1))
    clock.at(0.6, lambda: device.lose(0))
    clock.at(0.7, lambda: device.bring_back(0))
    clock.at(0.8, lambda: device.give(job(2)))
    while clock.step():
        pass
    assert [each.job for each in done] == [2]
