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


class Silent:
    """Proposes nothing, and says as much of its last job as it is told to."""

    captures: tuple[int, ...] = ()
    context = 100
    weight_bytes = cache_slots = 0

    def __init__(self, said: dict[str, object]) -> None:
        vars(self).update(said)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        return ()

    def release(self, message: Release) -> None: ...

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None: ...


class Bench:
    """A device with one drafter, and what it has done."""

    def __init__(self, said: dict[str, object] | None = None, link: LinkSpec | None = None) -> None:
        self.clock, self.done = Clock(), list[Drafted]()
        spec = DrafterDeviceSpec(drafters=(0,), link=link)
        chance, drafters = random.Random(1), {0: Silent(said or {})}
        self.device = DrafterDevice(
            self.clock, spec, drafters, {0: PASS}, {0: RANKING}, self.done.append, chance=chance
        )

    def give(self, job: int) -> None:
        """A job of three rows."""
        part = SegmentPart(
            commit=Commit(request=0, epoch=0, base=1, path=()),
            opening=None,
            ids=(1, 2, 3),
            parents=(0, 1, 2),
            tokens=(7, 7, 7),
            positions=(1, 2, 3),
            committed=(False, False, False),
        )
        self.device.give(Draft(job=job, segment=Segment(segment=0, parts=(part,)), width=4))

    def settle(self) -> None:
        while self.clock.step():
            pass


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({}, 1.3),
        ({"pass_rows": [5, 2], "ranked_rows": 9}, 2.7),
        ({"pass_rows": [], "ranked_rows": 9}, 0.019),
        ({"pass_rows": [], "ranked_rows": 0}, 0.0),
    ],
)
def test_a_job_takes_its_passes_or_lm_head_alone_and_longer_while_the_device_is_slow(
    said: dict[str, object], seconds: float
) -> None:
    """A block that was guessed before is ranked again without a pass of the layers."""
    bench = Bench(said)
    for number, times in enumerate((1.0, 3.0, 1.0)):
        bench.device.slow(0, times)
        bench.give(number)
        bench.settle()
    took_s = [each.ended_s - each.started_s for each in bench.done]
    assert took_s == pytest.approx([seconds, 3 * seconds, seconds])


@pytest.mark.parametrize("link", [None, LinkSpec(bandwidth_mbps=100, delay_s=0.5)])
def test_what_it_was_at_when_it_was_lost_is_never_told_though_it_comes_back(link: LinkSpec | None) -> None:
    bench = Bench(link=link)
    bench.give(1)
    bench.clock.at(0.6, lambda: bench.device.lose(0))
    bench.clock.at(0.7, lambda: bench.device.bring_back(0))
    bench.clock.at(0.8, lambda: bench.give(2))
    bench.settle()
    assert [each.job for each in bench.done] == [2]
