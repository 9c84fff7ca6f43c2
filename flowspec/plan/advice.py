"""What is said of a plan: what limits it and what would help, why devices are left out, what is left without
one, and what would fit where nothing does. Each answer is another plan, made the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from flowspec.core.protocol.limits import STAGES_MAX
from flowspec.core.protocol.precision import OF_ANY_MODEL, PRECISION_BYTES, Q8_0, is_packed
from flowspec.errors import InputError
from flowspec.plan.forecast import PASS_LEVELS
from flowspec.plan.memory import mib
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.placement import weighted_split
from flowspec.plan.planner import NEARLY, DoesNotFit, Plan, PlannedStage, make_plan
from flowspec.plan.profile import profile_names
from flowspec.plan.sites import PlanRequest, Site, whole_memory
from flowspec.rounding import duration, rounded

GAIN_MIN = 0.01
CONTEXT_MIN = 256
MORE_MAX = 16
"""How many boards more are tried."""
LOWER = ("float16", *filter(is_packed, OF_ANY_MODEL))
"""Precisions to advise, from the widest; of the two with 16 bits the one that more boards are fast in."""
NAME_WIDTH = 32
Change = tuple[str, PlanRequest]
"""What a user could do, and the request then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change with the rate that is predicted; `gain` is by how much that grows, None where there was no
    rate."""

    text: str
    tokens_per_s: float
    gain: float | None = None


class ModelDoesNotFitError(DoesNotFit):
    """A model that does not fit: the text says in several lines what each device lacks and what would fit,
    `report` the same for programs. `limited` are devices that have more memory than we are allowed."""

    exit_status = 1

    def __init__(
        self,
        reason: str,
        short: Sequence[PlannedStage],
        options: Sequence[Option],
        limited: Sequence[str] = (),
    ) -> None:
        heads = f"{'layers':>7}{'needs':>10}{'has':>10}{'short':>10}"
        lines = [f"{reason}:", f"\n{'device, with a share by memory':<{NAME_WIDTH}}{heads}"]
        for each in short:
            lack = mib(each.short_bytes) if each.short_bytes else "-"
            sizes = f"{mib(each.total_bytes):>10}{mib(each.site.memory_bytes):>10}{lack:>10}"
            lines.append(f"{each.site.name:<{NAME_WIDTH}}{each.layers:>7}{sizes}")
        none = "no lower precision, shorter context or few boards more make it fit"
        lines.append(f"\n{'it would fit with' if options else none}")
        lines += [f"  {each.text:<40}{rounded(each.tokens_per_s):>8} tokens/s" for each in options]
        if limited:
            lines.append(f"\nmore is not allowed on {', '.join(limited)}: raise memory in the cluster file,")
            lines.append("or --memory of the daemon there")
        super().__init__("\n".join(lines))
        self.shortfalls = short
        self.report = {
            "fits": False,
            "devices": [
                {
                    "device": each.site.name,
                    "layers": each.layers,
                    "need_bytes": each.total_bytes,
                    "memory_bytes": each.site.memory_bytes,
                    "short_bytes": each.short_bytes,
                }
                for each in short
            ],
            "would_fit": [{"change": each.text, "tokens_per_s": each.tokens_per_s} for each in options],
        }


def plan_or_refuse(request: PlanRequest, limited: Sequence[str] = ()) -> Plan:
    """The fastest plan; raises `ModelDoesNotFitError` where there is none."""
    try:
        return make_plan(request)
    except DoesNotFit as error:
        short, options = shortfalls(request), fitting_options(request)
        raise ModelDoesNotFitError(str(error), short, options, limited) from None


def limits(request: PlanRequest, plan: Plan) -> list[str]:
    """What a slot waits for, and what misses cost, the weightier first."""
    forecast = plan.forecast
    slowest = max(plan.stages, key=lambda stage: stage.slot_s)
    drafting_s = 0.0
    if plan.guesses:
        pass_s = Partition(request).pass_s(plan)
        drafting_s = PASS_LEVELS * forecast.levels * pass_s
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


def improvements(request: PlanRequest, plan: Plan, others: Sequence[Change] = ()) -> list[Option]:
    """What would help, the most helpful first: a board more, a lower precision, and the `others`."""
    slowest = max(plan.stages, key=lambda stage: stage.slot_s).site
    boards = {each.profile.name: each for each in (plan.head, slowest)}
    changes = (*_more(request, boards.values(), 1), *_lower(request, plan.precision), *others)
    found = []
    for text, changed in changes:
        try:
            rate = make_plan(changed).forecast.tokens_per_s
        except InputError:  # a precision that a profile says nothing about
            continue
        gain = rate / plan.forecast.tokens_per_s - 1
        if gain >= GAIN_MIN:
            found.append(Option(text=text, tokens_per_s=rate, gain=gain))
    return sorted(found, key=lambda option: -option.tokens_per_s)


def fitting_options(request: PlanRequest) -> list[Option]:
    """Changes under which the model fits: a lower precision, the longest shorter context, fewer users, more
    devices; else several at once."""
    lower = _lower(request, min(request.precisions, key=PRECISION_BYTES.__getitem__))
    found = [option for change in lower for option in _first([change])]
    if request.cache != Q8_0:
        found += _first([("keys and values in q8_0 (--cache q8_0)", replace(request, cache=Q8_0))])
    contexts = (request.context >> halvings for halvings in range(1, request.context.bit_length()))
    found += _first(
        (f"a context of {each} tokens", replace(request, context=each))
        for each in contexts
        if each >= CONTEXT_MIN
    )
    found += _first(
        (f"{users} users" if users > 1 else "one user", replace(request, users=users))
        for users in range(request.users - 1, 0, -1)
    )
    found += _with_more(request)
    if lower and all(option.text != lower[-1][0] for option in found):
        least, changed = lower[-1]
        found += [replace(option, text=f"{least}, and {option.text}") for option in _with_more(changed)]
    return found


def _first(changes: Iterable[Change]) -> list[Option]:
    """The first change that fits, if one does."""
    for text, changed in changes:
        try:
            return [Option(text=text, tokens_per_s=make_plan(changed).forecast.tokens_per_s)]
        except InputError:
            continue
    return []


def _lower(request: PlanRequest, precision: str) -> list[Change]:
    return [
        (each, replace(request, precisions=(each,)))
        for each in LOWER
        if PRECISION_BYTES[each] < PRECISION_BYTES[precision]
    ]


def _with_more(request: PlanRequest) -> list[Option]:
    """The fewest boards more, with all of their memory, whatever the user allows on those that are there."""
    boards = {
        each.profile.name: replace(each, memory_bytes=whole_memory(each.profile)) for each in request.sites
    }
    return _first(
        change for count in range(1, MORE_MAX + 1) for change in _more(request, boards.values(), count)
    )


def _more(request: PlanRequest, boards: Iterable[Site], count: int) -> Iterator[Change]:
    """So many devices more like one of these; each brings cores of its own."""
    taken = {each.name for each in request.sites}
    for board in boards if len(taken) + count <= STAGES_MAX else ():
        name, shared = board.profile.name, board.shared
        names = (f"{name}-more{number or ''}" for number in range(len(taken) + count))
        added = [
            replace(board, name=each, runs_stages=True, shared=shared and replace(shared, host=each))
            for each in [each for each in names if each not in taken][:count]
        ]
        # Devices that are no known boards, such as were asked, go by the name of one.
        which = f"{name} more" if name in profile_names() else f"more like {board.name}"
        where = "" if shared is None else ", on a machine of its own"
        many = "one" if count == 1 else f"{count}x"
        yield f"{many} {which}{where}", replace(request, sites=(*request.sites, *added))


def shortfalls(request: PlanRequest) -> list[PlannedStage]:
    """Each device with a share of the layers by memory, in the smallest of the request's precisions, without
    a drafter."""
    precision = min(request.precisions, key=PRECISION_BYTES.__getitem__)
    largest = sorted(request.stage_sites, key=lambda each: -each.memory_bytes)[: request.shape.layers]
    order = tuple(each for each in request.stage_sites if each in largest)
    head = next((each for each in request.heads if each in order), request.heads[0])
    arrangement = Arrangement(order=order, head=head, precision=precision, guesses=False)
    partition, found, end = Partition(request), list[PlannedStage](), 0
    counts = weighted_split(request.shape.layers, [each.memory_bytes for each in order])
    for index, (place, layers) in enumerate(zip(order, counts, strict=True)):
        end += layers
        found.append(
            PlannedStage(
                site=place,
                first=end - layers,
                end=end,
                need=partition.stage_need(arrangement, index, layers),
                other_bytes=partition.other_bytes(arrangement, place),
            )
        )
    return found


def among(request: PlanRequest, names: Collection[str]) -> PlanRequest:
    """The same request with only these devices for stages; the head stays, also without a daemon there."""
    left = (each if each.name in names else replace(each, runs_stages=False) for each in request.sites)
    sites = tuple(each for each in left if each.runs_stages or each.name == request.head)
    return replace(request, sites=sites)


def without(request: PlanRequest, name: str) -> tuple[Plan | None, int]:
    """The plan without a device; None where the model does not fit the others, and the bytes that they
    lack."""
    others = among(request, {site.name for site in request.stage_sites} - {name})
    if not others.stage_sites:
        return None, 0
    try:
        return make_plan(others), 0
    except DoesNotFit:
        return None, sum(each.short_bytes for each in shortfalls(others))


def why_left_out(request: PlanRequest, plan: Plan) -> dict[str, str]:
    """Each device that could run a stage and runs none in a plan, in the user's order, with why."""
    used = {stage.site.name for stage in plan.stages}
    partition = Partition(request)
    return {site.name: _why(partition, plan, site) for site in request.stage_sites if site.name not in used}


def _why(partition: Partition, plan: Plan, site: Site) -> str:
    """What the device would change at its best place in the plan."""
    layers, order = partition.request.shape.layers, plan.order
    if len(order) == layers:
        return f"each of the {layers} layers has a device"
    orders = [(*order[:at], site, *order[at:]) for at in range(len(order) + 1)]
    wider = [
        Arrangement(order=each, head=plan.head, precision=plan.precision, guesses=plan.guesses)
        for each in orders
    ]
    rates = [split.forecast.tokens_per_s for split in partition.best_of(wider) if split is not None]
    if not rates:
        needed = min(
            partition.stage_need(each, at, 1).total_bytes + partition.other_bytes(each, site)
            for at, each in enumerate(wider)
        )
        return f"a single layer needs {mib(needed)} there, and it has {mib(site.memory_bytes)}"
    own, with_it = plan.forecast.tokens_per_s, max(rates)
    said = f"the forecast is {rounded(own)} tokens/s, {rounded(with_it)} with one device more"
    return f"{said}, which is too little to count" if own < with_it <= own / NEARLY else said
