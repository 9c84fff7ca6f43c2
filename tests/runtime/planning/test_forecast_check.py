"""Forecasts that were wrong by more than a factor of two: what explains them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowspec.core.protocol.messages import Hop
from flowspec.draft.kinds import find_drafter
from flowspec.plan.memory import weights_of
from flowspec.plan.partition import Partition
from flowspec.plan.planner import Plan, make_plan
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.sites import Network, PlanRequest, SharedCores, site
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.planning.forecast_check import TOKENS_MIN, Measured, causes, is_wrong
from flowspec.runtime.planning.survey import HERE

SHAPE = find_shape("llama-3.2-1b")
REQUEST = PlanRequest(
    sites=tuple(site(name, find_profile("raspberry-pi-5")) for name in ("a", "b")),
    network=Network(default=LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)),
    shape=SHAPE,
    weights=weights_of(SHAPE),
    precisions=("float16",),
    drafter=find_drafter("ngram").reckoned(SHAPE),
    context=512,
    head="a",
    all_devices=True,
)
PLAN = make_plan(REQUEST)
RATE = PLAN.forecast.tokens_per_s
TIMES = Partition(REQUEST).times(PLAN.split.arrangement)
ROWS = int(TIMES.nodes[2])


def measured(slowness: dict[str, float] | None = None, **changes: object) -> Measured:
    """An answer as it was foretold, on devices that are so many times as slow."""
    hops = []
    for index, stage in enumerate(PLAN.stages):
        layers = stage.end - stage.first
        reckoned_s = float(TIMES.fixed_s[2, index] + layers * TIMES.layer_s[2, index])
        seconds = (slowness or {}).get(stage.site.name, 1.0) * reckoned_s
        hops.append(Hop(received_s=0.0, queued_s=0.0, compute_s=seconds, own_s=0.0, rows=ROWS))
    found = Measured(
        tokens_per_s=RATE / 3,
        new_tokens=50,
        hops=[tuple(hops)] * 10,
        links_s=float(np.interp(PLAN.forecast.nodes, TIMES.nodes, TIMES.links_s)),
        missed=PLAN.forecast.missed,
        why_slow={},
        hosts={"a": "10.0.0.1", "b": "10.0.0.2"},
        runs={stage.site.name: stage.end - stage.first for stage in PLAN.stages},
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def told(request: PlanRequest, plan: Plan, measured: Measured) -> list[str]:
    return [cause.text for cause in causes(request, plan, measured)]


@pytest.mark.parametrize(("share", "expected"), [(0.4, True), (0.6, False), (1.9, False), (2.1, True)])
def test_a_factor_of_two_either_way_is_wrong(share: float, expected: bool) -> None:
    found = measured(tokens_per_s=share * RATE)
    assert is_wrong(PLAN, found) == expected
    assert not is_wrong(PLAN, replace(found, new_tokens=TOKENS_MIN - 1)), "too short to say"


@pytest.mark.parametrize(
    ("slowness", "changes", "expected"),
    [
        ({}, {}, ""),
        ({"b": 4.0}, {}, "b computes 4 times as long as reckoned (cores busy"),
        ({"a": 2.0, "b": 3.0}, {"hosts": {"a": HERE, "b": HERE}}, "b and a compute 3 and 2 times as long"),
        ({"b": 5.0}, {"in_use": {"c": "10.0.0.2", "d": "10.0.0.3"}}, "b computes 5 times as long"),
        ({"b": 2.5}, {"why_slow": {"b": "throttled, 84 degrees"}}, "b computes 2.5 times as long"),
        ({"a": 0.25}, {"tokens_per_s": 3 * RATE}, "a is 4 times as fast as reckoned"),
        ({}, {"links_s": 5.0}, "links take 5 s of a trip, not "),
        ({}, {"links_s": 5.0, "hosts": {"a": HERE, "b": HERE}}, ""),  # there are none within a machine
        (
            {},
            {"missed": min(1.0, PLAN.forecast.missed + 0.3)},
            f"{min(1.0, PLAN.forecast.missed + 0.3):.0%} of the",
        ),
        ({}, {"missed": 0.0}, ""),  # which does not explain slowness
        ({}, {"missed": 0.0, "tokens_per_s": 3 * RATE}, "0% of the tokens were not guessed"),
    ],
    ids=range(11),
)
def test_the_one_cause_of_a_wrong_forecast(
    slowness: dict[str, float], changes: dict[str, object], expected: str
) -> None:
    found = told(REQUEST, PLAN, measured(slowness, **changes))
    if not expected:
        assert found == []
    else:
        (why,) = found
        assert why.startswith(expected)
        for said in changes.get("why_slow", {}).values():  # type: ignore[attr-defined]
            assert said in why
        assert ("which other heads use" in why) == ("in_use" in changes)
        assert ("1 more of our processes" in why) == ("hosts" in changes)


def test_more_threads_than_cores() -> None:
    shared = SharedCores(host="10.0.0.1", cores=4, threads=4)
    request = replace(REQUEST, sites=tuple(replace(each, shared=shared) for each in REQUEST.sites))
    plan = make_plan(request)
    assert plan.forecast.tokens_per_s < RATE
    (why,) = told(request, plan, measured({"a": 8.0, "b": 8.0}, tokens_per_s=0.01 * RATE))
    assert why.endswith("(8 threads on 4 cores: start each daemon there with --threads 2)")


ALONE = {"a": SHAPE.layers}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"runs": ALONE, "recoveries": 1, "recovery_s": 17.3}, "b was lost meanwhile, and it took 17.3 s"),
        ({"recoveries": 2, "recovery_s": 30.0}, "a device was lost meanwhile, and it took 30 s"),
        ({"runs": ALONE}, "b is lost since the plan was made"),
        ({"runs": ALONE, "returning": ["b"]}, "b was lost, and loads now"),
        ({"runs": {"a": 1, "b": SHAPE.layers - 1}}, "layers were shared out anew since then"),
    ],
)
def test_a_lost_device_is_the_one_cause(changes: dict[str, object], expected: str) -> None:
    """What its hops seem to say is of other layers."""
    (why,) = told(REQUEST, PLAN, measured({"b": 50.0}, **changes))
    assert why.startswith(expected)
