"""What a drafter's job costs in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flowspec.core.head.events import Draft, Drafted
from flowspec.core.protocol.messages import Commit, Proposal, Release, Segment, SegmentPart
from flowspec.plan.timing import Curve
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
    device = DrafterDevice(
        clock,
        DrafterDeviceSpec(drafters=(0,)),
        {0: Silent(**said)},
        {0: PASS},
        {0: RANKING},
        done.append,
        chance=random.Random(1),
    )
    part = SegmentPart(
        commit=Commit(request=0, epoch=0, base=1, path=()),
        opening=None,
        ids=tuple(range(1, 1 + ROWS)),
        parents=tuple(range(ROWS)),
        tokens=(7,) * ROWS,
        positions=tuple(range(1, 1 + ROWS)),
        committed=(False,) * ROWS,
    )
    device.give(Draft(job=1, segment=Segment(segment=0, parts=(part,)), width=4))
    while clock.step():
        pass
    assert [each.ended_s for each in done] == [pytest.approx(seconds)]
