"""No plan is slower than what a part of its devices would do: clusters drawn by number, each beside one
device, parts drawn by chance, and no guesses at all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flowspec.draft.choosing import without_model
from flowspec.plan.absence import among
from flowspec.plan.planner import DoesNotFit, make_plan
from flowspec.plan.sites import PlanRequest
from lab.perf.planner_check import drawn

CLUSTERS, GROUPS = 300, 10
DEVICES_MAX = 4
LEAST = 0.99


def cluster(number: int) -> PlanRequest:
    """A mix of at most four boards; every second guesses with n-grams."""
    request = drawn(number)
    if number % 2:
        request = replace(request, drafter=without_model(request.shape))
    return replace(request, sites=request.sites[:DEVICES_MAX])


def parts(request: PlanRequest, chance: random.Random) -> list[set[str]]:
    """One device, and some but not all."""
    names = [each.name for each in request.sites]
    return [{chance.choice(names)}, *({*chance.sample(names, size)} for size in range(2, len(names)))]


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_plan_is_slower_than_one_of_fewer_devices(group: int) -> None:
    fitting = 0
    for number in range(group, CLUSTERS, GROUPS):
        request = cluster(number)
        try:
            best = make_plan(request)
        except DoesNotFit:
            continue
        fitting += 1
        rate = best.forecast.tokens_per_s
        assert rate >= best.plain.tokens_per_s
        for names in parts(request, random.Random(number)):
            try:
                part = make_plan(among(request, names)).forecast.tokens_per_s
            except DoesNotFit:
                continue
            assert rate >= LEAST * part, f"cluster {number}: {names} alone would be faster"
    assert fitting > CLUSTERS / GROUPS / 2
