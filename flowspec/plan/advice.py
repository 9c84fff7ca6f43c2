"""What limits a plan, what would help most, and what to do when nothing fits: each answer is another plan,
made the same way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from flowspec.core.protocol.limits import STAGES_MAX
from flowspec.core.protocol.precision import OF_ANY_MODEL, PRECISION_BYTES, Q8_0, is_packed
from flowspec.errors import InputError
from flowspec.plan.forecast import FITTED
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.planner import Plan, make_plan
from flowspec.plan.profile import DeviceProfile, find_profile, profile_names
from flowspec.plan.sites import Network, PlanRequest, Site, site
from flowspec.plan.split import weighted_split
from flowspec.plan.timing import LinkSpec
from flowspec.rounding import duration

GIGABIT = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)
BETTER_DRAFTER = 0.1
ACCEPTANCE_MAX = 0.95
GAIN_MIN = 0.01
ANEW, ANEW_GAIN_MIN = "--dtype {}, which packs the weights anew", 1.0
"""Another precision of the same size is advised where it is twice as fast, as where a device has only a plain
kernel for what a file packs: rounding what is rounded loses something."""
CONTEXT_MIN = 256
MORE_MAX = 16
"""How many boards more are tried of the kinds that are there."""
MORE = (1, 2, 4, 8)
"""The same of other kinds."""
LOWER = ("float16", *filter(is_packed, OF_ANY_MODEL))
"""Precisions to advise, from the widest; of the two with 16 bits the one that more boards are fast in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change, and what the planner foretells of it; `gain` is by how much the rate grows, None where there
    was no rate."""

    text: str
    tokens_per_s: float
    gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """What a device would need for its share by memory of the layers, and has."""

    name: str
    layers: int
    need_bytes: int
    have_bytes: int

    @property
    def short_bytes(self) -> int:
        return max(0, self.need_bytes - self.have_bytes)


def limits(request: PlanRequest, plan: Plan) -> list[str]:
    """What a slot waits for, and what misses cost, the weightier first."""
    forecast = plan.forecast
    slowest = max(plan.stages, key=lambda stage: stage.slot_s)
    drafting_s = 0.0
    if plan.guesses:
        drafting_s = float(
            FITTED.pass_levels * forecast.levels * Partition(request).guessing(plan.split.arrangement).pass_s
        )
    slot_s = max(slowest.slot_s, plan.link_s, drafting_s)
    if slot_s == drafting_s:
        slot = f"the drafter on {plan.head.name}: {duration(slot_s)} for what a slot needs"
    elif slot_s == plan.link_s:
        slot = f"the slowest link: {duration(slot_s)} for a slot's nodes"
    else:
        slot = f"the slowest stage, {slowest.site.name}: {duration(slot_s)} of a slot"
    if not plan.guesses:
        trip = f"every token waits for a whole trip of {duration(forecast.trip_s)}"
        return [trip, slot] if request.users == 1 else [slot]
    share = min(1.0, forecast.missed * forecast.trip_s * forecast.tokens_per_s / request.users)
    missed = (
        f"wrong guesses: {forecast.missed:.0%} of the tokens wait for a whole trip, {share:.0%} of the time"
    )
    return [missed, slot] if share > 0.5 else [slot, missed]


def improvements(request: PlanRequest, plan: Plan) -> list[Option]:
    """What would help, the most helpful first; each change is planned anew."""
    found = []
    for text, changed in _changes(request, plan):
        try:
            rate = make_plan(changed).forecast.tokens_per_s
        except InputError:  # a precision that a profile says nothing about
            continue
        gain = rate / plan.forecast.tokens_per_s - 1
        if gain >= (ANEW_GAIN_MIN if text == ANEW.format(*changed.precisions) else GAIN_MIN):
            found.append(Option(text=text, tokens_per_s=rate, gain=gain))
    return sorted(found, key=lambda option: -option.tokens_per_s)


def _changes(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, PlanRequest]]:
    names = {each.name for each in request.sites}
    hops = Partition(request).hops(plan.split.arrangement)
    if any(link.bandwidth_mbps < GIGABIT.bandwidth_mbps or link.delay_s > GIGABIT.delay_s for link in hops):
        pairs = {pair: _faster(link) for pair, link in request.network.pairs.items()}
        yield (
            "gigabit links",
            replace(request, network=Network(default=_faster(request.network.default), pairs=pairs)),
        )
    slowest = max(plan.stages, key=lambda stage: stage.slot_s).site
    quick = tuple(
        replace(each, profile=each.profile.slowed(0.5)) if each.name == slowest.name else each
        for each in request.sites
    )
    yield f"a board twice as fast as {slowest.name}", replace(request, sites=quick)
    for profile in {each.profile.name: each.profile for each in (slowest, plan.head)}.values():
        one = next(each for each in request.sites if each.profile.name == profile.name)
        name = _new_name(profile.name, names)
        shared = None if one.shared is None else replace(one.shared, host=name)  # it brings cores of its own
        more = replace(one, name=name, runs_stages=True, shared=shared)
        where = "" if shared is None else ", on a machine of its own"
        yield f"{_count_more(1, one)}{where}", replace(request, sites=(*request.sites, more))
    for precision in LOWER:
        beyond = PRECISION_BYTES[precision] - PRECISION_BYTES[plan.precision]
        if beyond <= 0 and precision not in request.precisions:
            text = precision if beyond < 0 else ANEW.format(precision)
            yield text, replace(request, precisions=(precision,))
    drafter = request.drafter
    # How often n-grams are right is the text's, and nothing that anybody could choose.
    if drafter is not None and drafter.shape and drafter.acceptance + BETTER_DRAFTER <= ACCEPTANCE_MAX:
        better = drafter.acceptance + BETTER_DRAFTER
        yield (
            f"a drafter that is right at {better:.0%}",
            replace(request, drafter=replace(drafter, acceptance=better)),
        )


def _faster(link: LinkSpec) -> LinkSpec:
    return replace(
        link,
        delay_s=min(link.delay_s, GIGABIT.delay_s),
        bandwidth_mbps=max(link.bandwidth_mbps, GIGABIT.bandwidth_mbps),
        jitter_s=0.0,
    )


def _new_name(name: str, taken: set[str]) -> str:
    return next(
        each
        for each in (f"{name}-more{number or ''}" for number in range(len(taken) + 1))
        if each not in taken
    )


def shortfalls(request: PlanRequest) -> list[Shortfall]:
    """Of each device, with a share of the layers by memory, in the smallest of the request's precisions,
    without a drafter."""
    precision = min(request.precisions, key=lambda each: PRECISION_BYTES[each])
    sites = sorted(request.stage_sites, key=lambda each: -each.memory_bytes)[: request.shape.layers]
    order = tuple(each for each in request.stage_sites if each in sites)
    head = next((each for each in request.heads if each in sites), request.heads[0])
    arrangement = Arrangement(order=order, head=head, precision=precision, guesses=False)
    partition = Partition(request)
    found = []
    for index, (place, layers) in enumerate(
        zip(order, weighted_split(request.shape.layers, [each.memory_bytes for each in order]), strict=True)
    ):
        need = partition.stage_need(arrangement, index, layers).total_bytes + partition.other_bytes(
            arrangement, place
        )
        found.append(
            Shortfall(name=place.name, layers=layers, need_bytes=need, have_bytes=place.memory_bytes)
        )
    return found


def fitting_options(request: PlanRequest) -> list[Option]:
    """Changes under which the model fits: a lower precision, the longest shorter context, fewer users, more
    devices; else several at once."""
    found = []
    for precision in _lower(request):
        found += _first([(precision, replace(request, precisions=(precision,)))])
    if request.cache != Q8_0:
        found += _first([("keys and values in q8_0 (--cache q8_0)", replace(request, cache=Q8_0))])
    contexts: list[int] = []
    while (shorter := (contexts[-1] if contexts else request.context) // 2) >= CONTEXT_MIN:
        contexts.append(shorter)
    found += _first([(f"a context of {each} tokens", replace(request, context=each)) for each in contexts])
    found += _first(
        [
            (f"{users} users" if users > 1 else "one user", replace(request, users=users))
            for users in range(request.users - 1, 0, -1)
        ]
    )
    found += _with_more(request)
    lower = _lower(request)
    if lower and all(option.text != lower[-1] for option in found):
        more = _with_more(replace(request, precisions=lower[-1:]))
        found += [replace(option, text=f"{lower[-1]}, and {option.text}") for option in more]
    return found


def _lower(request: PlanRequest) -> tuple[str, ...]:
    least = min(PRECISION_BYTES[each] for each in request.precisions)
    return tuple(each for each in LOWER if PRECISION_BYTES[each] < least)


def _with_more(request: PlanRequest) -> list[Option]:
    """The fewest boards more of those that are there, and where one does not do the fewest of others that can
    be had, smaller ones first."""
    own = {each.profile.name: each.profile for each in request.sites}
    known = [find_profile(name) for name in profile_names() if name not in own]
    others = sorted((each for each in known if not each.caution), key=lambda each: each.memory_gb)
    usable = [each for each in own.values() if not each.caution] or list(own.values())
    found = _first(_more(request, usable, range(1, MORE_MAX + 1)))
    if not found or not found[0].text.startswith("one "):
        found += _first(_more(request, others, MORE))
    return found


def _more(
    request: PlanRequest, profiles: Sequence[DeviceProfile], counts: Sequence[int]
) -> Iterator[tuple[str, PlanRequest]]:
    for count in counts:
        if len(request.sites) + count > STAGES_MAX:
            return
        for profile in profiles:
            added: list[Site] = []
            for _ in range(count):
                taken = {each.name for each in (*request.sites, *added)}
                added.append(site(_new_name(profile.name, taken), profile))
            like = next((each for each in request.sites if each.profile.name == profile.name), added[0])
            yield _count_more(count, like), replace(request, sites=(*request.sites, *added))


def _count_more(count: int, like: Site) -> str:
    """So many boards more; of devices that are no known boards, such as were asked, by the name of one."""
    many = "one" if count == 1 else f"{count}x"
    board = like.profile.name
    return f"{many} {board} more" if board in profile_names() else f"{many} more like {like.name}"


def _first(changes: Iterable[tuple[str, PlanRequest]]) -> list[Option]:
    """The first change that fits, if one does."""
    for text, changed in changes:
        try:
            plan = make_plan(changed)
        except InputError:
            continue
        return [Option(text=text, tokens_per_s=plan.forecast.tokens_per_s)]
    return []
