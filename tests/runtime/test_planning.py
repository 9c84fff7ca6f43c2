"""Choosing: slow devices left out, splits by hand compared, refusals, memory that does not wobble; and what
explains forecasts that were wrong by more than a factor of two.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from flowspec.core.protocol.messages import Hop
from flowspec.draft.registry import find_drafter
from flowspec.errors import ClusterError
from flowspec.plan.advice import ModelDoesNotFitError
from flowspec.plan.memory import weights_of
from flowspec.plan.partition import Partition
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.planner import DoesNotFit, Plan, make_plan
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.sites import Network, PlanRequest, SharedCores, Site, site
from flowspec.plan.timing import LinkSpec
from flowspec.rounding import rounded
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import LINK_DEFAULT
from flowspec.runtime.device.links import HERE
from flowspec.runtime.forecast_check import TOKENS_MIN, Measured, causes, is_wrong
from flowspec.runtime.plan_inputs import enough_bytes
from flowspec.runtime.planning import Chosen, Replanner, choose, compare, steadied
from flowspec.runtime.survey import Survey

GIB = 1 << 30
SHAPE = find_shape("llama-3.2-1b")
NANO, PI = find_profile("jetson-orin-nano"), find_profile("raspberry-pi-4")


def survey_of(*profiles: DeviceProfile, memory_bytes: int = 6 * GIB) -> Survey:
    """`d0`, `d1`, ... with these profiles."""
    sites = tuple(
        Site(name=f"d{number}", profile=profile, memory_bytes=memory_bytes)
        for number, profile in enumerate(profiles)
    )
    return Survey(
        sites=sites,
        network=Network(default=LINK_DEFAULT),
        head="d0",
        sources={site.name: "probed" for site in sites},
    )


def request_of(found: Survey) -> PlanRequest:
    return PlanRequest(
        sites=found.sites,
        network=found.network,
        shape=SHAPE,
        weights=weights_of(SHAPE),
        precisions=("float16",),
        drafter=find_drafter("ngram").plan(SHAPE),
        context=1024,
        head=found.head,
    )


def given(found: Survey, *layers: int) -> Chosen:
    """A split by hand over the devices in order."""
    ends = [sum(layers[: index + 1]) for index in range(len(layers))]
    stages = [
        StagePlan(name=f"d{number}", address="", first=end - count, end=end)
        for number, (count, end) in enumerate(zip(layers, ends, strict=True))
    ]
    return compare(request_of(found), found, stages)


def lines(chosen: Chosen) -> list[str]:
    """What is told while the plan's own stages run."""
    return chosen.lines(stages(chosen.plan))


def stages(plan: Plan) -> list[StagePlan]:
    return [
        StagePlan(name=stage.site.name, address="", first=stage.first, end=stage.end) for stage in plan.stages
    ]


def test_a_slow_device_is_left_out_and_that_is_said() -> None:
    found = survey_of(NANO, PI, NANO, memory_bytes=5 * GIB // 2)  # of which two hold the model
    chosen = choose(request_of(found), found)
    devices = [Device(name=site.name, address=f"{site.name}:7700") for site in found.sites]
    assert list(chosen.unused) == ["d1"]
    assert {(stage.name, stage.address) for stage in chosen.stages(devices)} <= {
        ("d0", "d0:7700"),
        ("d2", "d2:7700"),
    }
    assert chosen.stages(devices)[-1].end == SHAPE.layers
    assert len(chosen.curves()) == 2, "the stages that run, not the devices that there are"
    rate = rounded(chosen.plan.forecast.tokens_per_s)
    told, why, how = lines(chosen)
    assert how.startswith("--all-devices ")
    assert told == f"layers as planned: forecast {rate} tokens/s"
    assert re.fullmatch(rf"d1 is left out: the forecast is {rate} tokens/s, [\d.]+ with one device more", why)
    report = chosen.report()
    assert (report["is_given"], report["not_used"], report["better"]) == (False, ["d1"], None)
    assert report["profiles"]["d1"] == {"board": "raspberry-pi-4", "source": "probed"}


def test_a_split_by_hand_is_kept_and_told_of_a_better_one() -> None:
    found = survey_of(NANO, PI)
    chosen = given(found, 8, 8)
    assert [stage.end - stage.first for stage in chosen.plan.stages] == [8, 8]
    assert chosen.better is not None
    assert chosen.gain > 0.05
    assert lines(chosen)[1].endswith(f" ({1 + chosen.gain:.1f} times that): 16 on d0")
    assert chosen.report()["better"]["gain"] == chosen.gain
    left = [StagePlan(name="d0", address="", first=0, end=16)]
    assert chosen.lines(left) == ["layers shared out anew"], "after a loss nothing is told of others by now"
    assert given(survey_of(NANO), 16).better is None
    lying = replace(survey_of(NANO, NANO), left_out={"d2": "0 MiB of memory"})
    assert choose(request_of(lying), lying).report()["left_out"] == lying.left_out
    with pytest.raises(ClusterError, match="d2 is given layers, but says that it has 0 MiB of memory"):
        given(lying, 6, 5, 5)


def test_what_does_not_fit_is_refused_with_shortfalls_and_options_but_by_hand_the_daemons_decide() -> None:
    found = survey_of(PI, PI, memory_bytes=GIB)
    with pytest.raises(ModelDoesNotFitError, match=r"does not fit the devices in float16") as caught:
        choose(request_of(found), found)
    assert "it would fit with" in str(caught.value)
    report = caught.value.report
    assert any(each["short_bytes"] > 0 for each in report["devices"])
    assert "one raspberry-pi-4 more" in [each["change"] for each in report["would_fit"]]
    assert given(found, 8, 8).better is None
    assert "raise memory" not in str(caught.value)
    with pytest.raises(ModelDoesNotFitError, match="more is not allowed on d1: raise memory in the cluster"):
        choose(request_of(found), replace(found, limited=("d1",)))


def test_devices_that_are_left_get_the_plan_that_they_had_got_without_the_others() -> None:
    found = survey_of(NANO, PI, NANO)
    chosen = choose(request_of(found), found)
    d0, d1, d2 = (Device(name=site.name, address=f"{site.name}:7700") for site in found.sites)
    assert chosen.stages_of([d0, d1, d2], {}) == chosen.stages([d0, d1, d2])
    assert {stage.name for stage in chosen.stages_of([d1, d2], {})} == {"d2"}, (
        "the head may stay where the daemon was lost"
    )
    (alone,) = chosen.stages_of([d1], {})
    assert (alone.name, alone.address, alone.first, alone.end) == ("d1", "d1:7700", 0, SHAPE.layers)
    scarce = survey_of(PI, PI, memory_bytes=2 * GIB)
    with pytest.raises(DoesNotFit, match=r"does not fit the devices in float16"):
        choose(request_of(scarce), scarce).stages_of([d1], {})


def test_a_device_that_has_become_slower_gets_fewer_layers_and_the_forecast_says_what_that_gains() -> None:
    found = survey_of(PI, PI)
    chosen = choose(request_of(found), found)
    devices = [Device(name=site.name, address=f"{site.name}:7700") for site in found.sites]
    slowness = {"d1": 2.0}
    before, after = chosen.stages_of(devices, {}), chosen.stages_of(devices, slowness)
    layers = [{stage.name: stage.end - stage.first for stage in stages} for stages in (before, after)]
    assert layers[1].get("d1", 0) < layers[0]["d1"]
    plans = [
        ClusterPlan(model="m", fingerprint="f", dtype="float16", context=100, stages=tuple(stages))
        for stages in (before, after)
    ]
    assert chosen.rate(plans[0], {}) == pytest.approx(chosen.plan.forecast.tokens_per_s)
    assert chosen.rate(plans[0], slowness) < chosen.rate(plans[0], {})
    assert chosen.rate(plans[1], slowness) > 1.05 * chosen.rate(plans[0], slowness)
    left = [device for device in devices if device.name in {stage.name for stage in before}]
    planner = Replanner(plans[0], left, chosen, None)
    names = [device.name for device in left]
    assert planner.plan_of(names) is plans[0], "as at first"
    assert list(planner.plan_of(names, slowness).stages) == after
    assert planner.rate(plans[1], slowness) == chosen.rate(plans[1], slowness)


def test_what_does_not_fit_without_an_absent_device_is_one_line_that_names_it() -> None:
    found = replace(survey_of(PI, memory_bytes=2 * GIB), absent={"d1": "nothing listens; start its daemon"})
    with pytest.raises(ClusterError) as caught:
        choose(request_of(found), found)
    (line,) = str(caught.value).splitlines()
    assert re.match(r"device d1 is absent \(.*\); .* does not fit the others: they lack \d+ MiB", line)
    found = replace(survey_of(PI), absent={"d1": "nothing listens; start its daemon"})
    assert choose(request_of(found), found).report()["absent"] == found.absent


def test_memory_that_is_enough_gives_the_same_request() -> None:
    request = request_of(survey_of(PI, PI))
    more = tuple(replace(site, memory_bytes=site.memory_bytes + 12345) for site in request.sites)
    assert steadied(request) == steadied(replace(request, sites=more))
    assert steadied(request).sites[0].memory_bytes == enough_bytes(request)
    scarce = replace(request, sites=(replace(request.sites[0], memory_bytes=GIB),))
    assert steadied(scarce) == scarce


REQUEST = PlanRequest(
    sites=tuple(site(name, find_profile("raspberry-pi-5")) for name in ("a", "b")),
    network=Network(default=LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)),
    shape=SHAPE,
    weights=weights_of(SHAPE),
    precisions=("float16",),
    drafter=find_drafter("ngram").plan(SHAPE),
    context=512,
    head="a",
    all_devices=True,
)
PLAN = make_plan(REQUEST)
RATE = PLAN.forecast.tokens_per_s
TIMES = Partition(REQUEST).times(PLAN)
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
        ({"b": 4.0}, {}, "b took 4 times as long as predicted (cores busy"),
        ({"a": 2.0, "b": 3.0}, {"hosts": {"a": HERE, "b": HERE}}, "b and a took 3 and 2 times as long"),
        ({"b": 5.0}, {"in_use": {"c": "10.0.0.2", "d": "10.0.0.3"}}, "b took 5 times as long"),
        ({"b": 2.5}, {"why_slow": {"b": "throttled, 84 degrees"}}, "b took 2.5 times as long"),
        ({"a": 0.25}, {"tokens_per_s": 3 * RATE}, "a is 4 times as fast as predicted"),
        ({}, {"links_s": 5.0}, "links took 5 s of a trip, not "),
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


@pytest.mark.parametrize("cores", [4, 1])
def test_more_threads_than_cores(cores: int) -> None:
    shared = SharedCores(host="10.0.0.1", cores=cores, threads=cores)
    request = replace(REQUEST, sites=tuple(replace(each, shared=shared) for each in REQUEST.sites))
    plan = make_plan(request)
    assert plan.forecast.tokens_per_s < RATE
    (why,) = told(request, plan, measured({"a": 8.0, "b": 8.0}, tokens_per_s=0.01 * RATE))
    advice = (
        "start each daemon there with --threads 2" if cores > 1 else "let fewer daemons there have layers"
    )
    assert why.endswith(f"({2 * cores} threads on {cores} core{'s' * (cores > 1)}: {advice})")


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
