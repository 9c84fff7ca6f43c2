"""What a local search finds, memory to the byte, and what changes a plan; `lab.perf.planner_check` compares
plans with all that could be chosen. And splits, and that fewer devices are no faster."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import Heads
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.draft.registry import PLANNED_FALLBACK
from flowspec.errors import InputError
from flowspec.plan import planner
from flowspec.plan.advice import among, fitting_options, improvements, shortfalls
from flowspec.plan.memory import PROCESS_BYTES, SliceMemory, cache_bytes, weights_of
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.placement import checked_split, even_split, weighted_split
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import ModelShape, eagle_shape, find_shape, layers_held
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, SharedCores, site
from flowspec.plan.timing import LinkSpec
from lab.perf.planner_check import drawn

FAST = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)
SHAPE = find_shape("llama-2-7b")


def request_of(
    *boards: str, shape: ModelShape = SHAPE, precision: str = "float16", **changes: object
) -> PlanRequest:
    sites = tuple(site(f"{board}-{number}", find_profile(board)) for number, board in enumerate(boards))
    request = PlanRequest(
        sites=sites,
        network=Network(default=FAST),
        shape=shape,
        weights=weights_of(shape),
        precisions=(precision,),
        drafter=PlannedDrafter(name="eagle", shape=eagle_shape(shape), acceptance=0.635),
    )
    return replace(request, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "boards",
    [("raspberry-pi-5",) * 2, ("raspberry-pi-5", "old-laptop"), ("raspberry-pi-4", "n100-mini-pc") * 2],
)
def test_a_machine_that_is_only_the_heads_runs_no_stage(boards: tuple[str, ...]) -> None:
    request = request_of(*boards, shape=replace(SHAPE, name="six", layers=6))
    best = replace(site("laptop", find_profile("jetson-agx-orin")), runs_stages=False)
    plan = make_plan(replace(request, sites=(*request.sites, best), head="laptop"))
    assert (plan.head.name, plan.is_head_free) == ("laptop", True)
    other = make_plan(replace(request, sites=(*request.sites, replace(best, runs_stages=True))))
    assert "laptop" in {stage.site.name for stage in other.stages}
    large = find_shape("llama-2-70b")
    sites = (*request.sites, best)
    huge = replace(request, shape=large, weights=weights_of(large), sites=sites, head="laptop")
    assert "laptop" not in {each.site.name for each in shortfalls(huge)}


def test_a_plan_is_the_faster_with_guesses_or_without_as_a_local_search_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_of("jetson-orin-nano", "raspberry-pi-5", "old-laptop")
    best = make_plan(request)
    plain, guessing = (make_plan(request, guesses=guesses) for guesses in (False, True))
    assert (plain.guesses, guessing.guesses) == (False, True)
    assert best == max(plain, guessing, key=lambda plan: plan.forecast.tokens_per_s)
    assert (best.plain, best.guessed) == (plain.forecast, guessing.forecast)
    request = request_of("jetson-orin-nano", "raspberry-pi-5", "old-laptop")
    best = make_plan(request)
    monkeypatch.setattr(planner, "ORDERS_MAX", 0)
    assert make_plan(request).forecast.tokens_per_s == pytest.approx(best.forecast.tokens_per_s, rel=0.01)


def assert_it_fits(request: PlanRequest, plan: Plan) -> None:
    """By a count of its own: weights, caches, processes, room to work."""
    shape, size = request.shape, {"float16": 2.0}[plan.precision]
    assert plan.stages[0].first == 0
    assert [stage.first for stage in plan.stages[1:]] == [stage.end for stage in plan.stages[:-1]]
    assert plan.stages[-1].end == shape.layers
    used: dict[str, float] = {plan.head.name: PROCESS_BYTES}
    if plan.guesses:
        drafter = eagle_shape(shape)
        weights = drafter.params + shape.head_params + 3 * shape.hidden  # embedding and norms
        cache = request.users * 2 * shape.kv_heads * shape.head_dim * (request.context + 1024) * size
        used[plan.head.name] += weights * size + cache + WORK_BYTES
    for stage in plan.stages:
        layers = stage.end - stage.first
        weights = layers * (shape.layer_params + 2 * shape.hidden)
        weights += shape.head_params * (stage.first == 0) + (shape.head_params + shape.hidden) * (
            stage.end == shape.layers
        )
        cache = request.users * layers * 2 * shape.kv_heads * shape.head_dim * (request.context + 256) * size
        before = used.get(stage.site.name, 0)
        used[stage.site.name] = before + weights * size + cache + WORK_BYTES + PROCESS_BYTES
    memory = {each.name: each.memory_bytes for each in request.sites}
    for name, total in used.items():
        assert total <= memory[name] + 4, f"{name} has {memory[name]} bytes for {total:.0f}"
    for stage in plan.stages:
        assert stage.total_bytes == pytest.approx(used[stage.site.name], abs=4)


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_takes_more_memory_than_there_is(seed: int) -> None:
    chance = random.Random(seed)
    boards = chance.choices(["jetson-orin-nano", "raspberry-pi-5"], k=4)
    request = request_of(*boards, context=chance.choice((512, 4096)), users=chance.choice((1, 2)))
    request = replace(
        request,
        sites=tuple(replace(each, memory_bytes=int(chance.uniform(4.5, 8) * 1e9)) for each in request.sites),
    )
    assert_it_fits(request, make_plan(request))


def test_a_layer_more_than_the_memory_holds_is_not_planned() -> None:
    request = request_of("jetson-orin-nano", "jetson-orin-nano", "jetson-orin-nano")
    partition = Partition(request)
    arrangement = Arrangement(
        order=request.sites[:2], head=request.sites[2], precision="float16", guesses=True
    )
    for index, most in enumerate(partition.room(arrangement)):
        free = request.sites[index].memory_bytes - partition.other_bytes(arrangement, request.sites[index])
        assert partition.stage_need(arrangement, index, most).total_bytes <= free
        assert partition.stage_need(arrangement, index, most + 1).total_bytes > free


def test_a_slow_device_and_a_useless_drafter_are_left_out_and_a_free_one_drafts() -> None:
    plan = make_plan(request_of("jetson-agx-orin", "raspberry-pi-4", "jetson-agx-orin"))
    assert [stage.site.profile.name for stage in plan.stages] == ["jetson-agx-orin"]
    assert plan.head.profile.name == "jetson-agx-orin"
    assert plan.is_head_free
    assert plan.guesses
    request = request_of("raspberry-pi-5", "raspberry-pi-5", precision="int4")
    plan = make_plan(replace(request, drafter=PlannedDrafter(name="a", shape=SHAPE, acceptance=0.05)))
    assert not plan.guesses
    assert plan.forecast == plan.plain
    assert plan.forecast.nodes == 1


def test_more_users_get_more_together_and_the_fastest_precision_that_fits() -> None:
    one, four = (
        make_plan(request_of(*["jetson-orin-nano"] * 5, users=users)).forecast.tokens_per_s
        for users in (1, 4)
    )
    assert one < four < 4 * one
    request = request_of("jetson-orin-nano", "raspberry-pi-5")
    in_float32 = [
        structs.replace(each.profile, tflops={**each.profile.tflops, "float32": 1.0})
        for each in request.sites
    ]
    sites = [replace(each, profile=of) for each, of in zip(request.sites, in_float32, strict=True)]
    with pytest.raises(DoesNotFit):
        make_plan(replace(request, precisions=("float32",), sites=tuple(sites)))
    assert make_plan(replace(request, precisions=("float16", "int4"))).precision == "int4"


def test_what_helps_is_planned_anew_and_sorted() -> None:
    slow = Network(default=LinkSpec(bandwidth_mbps=20, delay_s=0.02))
    request = request_of(*["jetson-orin-nano"] * 5, network=slow)
    plan, faster = make_plan(request), replace(request, network=Network(default=FAST))
    found = {option.text: option for option in improvements(request, plan, [("faster links", faster)])}
    rate = make_plan(faster).forecast.tokens_per_s
    assert found["faster links"].tokens_per_s == rate
    assert found["faster links"].gain == pytest.approx(rate / plan.forecast.tokens_per_s - 1)
    assert "int4" in found
    rates = [option.tokens_per_s for option in found.values()]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) > plan.forecast.tokens_per_s


def test_of_splits_that_decode_alike_the_one_is_taken_by_which_prompts_are_through_soonest() -> None:
    request = request_of("raspberry-pi-5", "raspberry-pi-5", precision="int4", drafter=None, all_devices=True)
    plan = make_plan(request)
    for first in range(8, SHAPE.layers - 8):
        other = rate_split(request, request.sites, plan.head, [first, SHAPE.layers - first])
        assert other.forecast.tokens_per_s == pytest.approx(plan.forecast.tokens_per_s, rel=1e-6)
        assert other.forecast.slot_s >= plan.forecast.slot_s * (1 - 1e-9)


def test_a_model_that_does_not_fit_comes_with_shortfalls_and_options_that_do() -> None:
    request = request_of("jetson-orin-nano", "raspberry-pi-5", context=4096)
    with pytest.raises(DoesNotFit, match="llama-2-7b does not fit the devices in float16"):
        make_plan(request)
    short = shortfalls(request)
    assert sum(each.layers for each in short) == 32
    assert any(each.short_bytes == each.total_bytes - each.site.memory_bytes > 0 for each in short)
    options = {option.text: option.tokens_per_s for option in fitting_options(request)}
    assert options["int8"] == make_plan(replace(request, precisions=("int8",))).forecast.tokens_per_s
    assert any(text.startswith("one jetson-orin-nano more") for text in options)
    assert not any("context" in text for text in options), "no context is short enough"
    longer = replace(request_of(*["jetson-orin-nano"] * 3), context=65536)
    with pytest.raises(DoesNotFit):
        make_plan(longer)
    (context,) = [option.text for option in fitting_options(longer) if "context" in option.text]
    tokens = int(context.split()[3])
    assert make_plan(replace(longer, context=tokens)).stages
    with pytest.raises(DoesNotFit):
        make_plan(replace(longer, context=2 * tokens))


def sharing(*threads: int, cores: int = 4, **changes: object) -> tuple[PlanRequest, Partition, Arrangement]:
    """Old laptops that are daemons of one machine, all with a stage, the head beside the first."""
    request = request_of(*("old-laptop",) * len(threads), **changes)
    sites = tuple(
        replace(each, shared=SharedCores(host="here", cores=cores, threads=count))
        for each, count in zip(request.sites, threads, strict=True)
    )
    request = replace(request, sites=sites)
    arrangement = Arrangement(order=sites, head=sites[0], precision="float16", guesses=False)
    return request, Partition(request), arrangement


@pytest.mark.parametrize(
    ("threads", "users", "expected"),
    [
        ((4, 4, 4), 1, 1.0),  # one token of one user is in one place
        ((4, 4, 4), 2, 2.0),
        ((4, 4, 4), 9, 3.0),
        ((1, 1, 1), 9, 1.0),
        ((4, 1, 1), 9, 1.5),
    ],
)
def test_daemons_of_one_machine_share_its_cores(
    threads: tuple[int, ...], users: int, expected: float
) -> None:
    _, partition, arrangement = sharing(*threads, users=users)
    assert [partition.slowdown(arrangement, each) for each in arrangement.order] == [expected] * 3


def test_the_drafter_and_a_second_daemon_share_the_cores() -> None:
    _, partition, arrangement = sharing(4, 4)
    guessing = replace(arrangement, guesses=True)
    assert partition.slowdown(guessing, guessing.head) == 3.0
    away = replace(guessing, head=site("other", find_profile("old-laptop")))
    assert [partition.slowdown(away, each) for each in (*away.order, away.head)] == [2.0, 2.0, 1.0]
    _, partition, arrangement = sharing(4, 4, drafter=PlannedDrafter(name="n", shape=None, acceptance=0.25))
    assert partition.slowdown(replace(arrangement, guesses=True), arrangement.head) == 2.0
    tiny = find_shape("tinyllama-1.1b")
    apart = make_plan(request_of("old-laptop", "old-laptop", shape=tiny, drafter=None, users=4))
    together = make_plan(sharing(4, 4, shape=tiny, drafter=None, users=4)[0])
    assert len(apart.stages) == 2
    assert len(together.stages) == 1
    assert together.forecast.tokens_per_s < apart.forecast.tokens_per_s


# ----------------------------------------------------------------------------------------------------- splits

WEIGHTS = st.lists(st.one_of(st.integers(1, 16).map(float), st.floats(1, 2.0**62)), min_size=1, max_size=12)
SPARE = st.integers(0, 90)
"""Layers beyond one for each stage."""


@given(WEIGHTS, SPARE)
def test_a_weighted_split_sums_up_and_follows_the_weights(weights: list[float], spare: int) -> None:
    counts = weighted_split(len(weights) + spare, weights)
    assert len(counts) == len(weights)
    assert sum(counts) == len(weights) + spare
    assert min(counts) >= 1
    ordered = sorted(zip(weights, counts, strict=True))
    assert all(a <= b for (low, a), (high, b) in pairwise(ordered) if low < high)


@given(WEIGHTS, SPARE, st.integers(0, 11), st.floats(1, 100))
def test_a_device_that_grows_loses_no_layer(weights: list[float], spare: int, at: int, factor: float) -> None:
    at %= len(weights)
    grown = [weight * factor if index == at else weight for index, weight in enumerate(weights)]
    assert (
        weighted_split(len(weights) + spare, grown)[at] >= weighted_split(len(weights) + spare, weights)[at]
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(1, 1 << 30))
def test_weights_that_divide_evenly_are_followed_exactly(counts: list[int], unit: int) -> None:
    assert weighted_split(sum(counts), [float(count * unit) for count in counts]) == counts


@given(st.integers(1, 12), SPARE)
def test_an_even_split_differs_by_one_and_spares_the_last(stages: int, spare: int) -> None:
    counts = even_split(stages + spare, stages)
    assert sum(counts) == stages + spare
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True), "the last stage also runs lm_head"


def test_splits_by_hand_are_taken_or_refused_and_none_has_too_many_devices() -> None:
    with pytest.raises(InputError, match=r"9 devices but only 8 layers.*use fewer devices"):
        even_split(8, 9)
    assert checked_split((3, 1, 2, 2), 8, 4) == [3, 1, 2, 2]
    with pytest.raises(InputError, match="--layers: expected 4 numbers, one for each device, got 2"):
        checked_split((4, 4), 8, 4)
    with pytest.raises(InputError, match=r"--layers: 3\+1\+2\+1 is 7, but the model has 8"):
        checked_split((3, 1, 2, 1), 8, 4)
    for counts in ((9, -1), (8, 0)):
        with pytest.raises(
            InputError, match=f"--layers: expected at least one layer for each device, got 8?9?,{counts[1]}"
        ):
            checked_split(counts, 8, 2)


def test_memory_is_keys_and_values_of_context_and_tree() -> None:
    found = cache_bytes(layers_held([Heads(count=5, width=64)] * 3), context=1000, held="bfloat16")
    assert found == 2 * 3 * 5 * 64 * (1000 + limits.TREE_NODES_MAX) * 2
    assert SliceMemory(weight_bytes=7, cache_bytes=found).total_bytes == 7 + found + WORK_BYTES


# ---------------------------------------------------------------------------------------------- fewer devices

CLUSTERS, GROUPS = 300, 10
DEVICES_MAX = 4
LEAST = 0.99


def cluster(number: int) -> PlanRequest:
    """A mix of at most four boards; every second guesses with n-grams."""
    request = drawn(number)
    if number % 2:
        request = replace(request, drafter=PLANNED_FALLBACK)
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
