"""Tell what will run where and how fast: devices, order, layers, memory, and what would help.

Nothing is started or loaded. Rates are predicted from device profiles by a cost model and a formula
(docs/devices.md), not measured.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path, PurePath
from typing import Any

from flowspec.cli.options import (
    add_cache_argument,
    add_model_argument,
    drafter_names,
    joined,
    number_list,
    positive,
)
from flowspec.cli.parser import Rare
from flowspec.cli.result import Columns, Result
from flowspec.core.methods import DEFAULT, WITHOUT_GUESSES
from flowspec.core.protocol.limits import REQUESTS_MAX, STAGES_MAX
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.draft.feature_kinds import SKETCH
from flowspec.draft.layouts import has_mtp
from flowspec.draft.registry import FALLBACK, KINDS, NONE, PLANNED_FALLBACK, plan_drafter
from flowspec.errors import InputError, counted
from flowspec.model.files import BUNDLED, TOY, ModelFiles
from flowspec.plan.advice import (
    GAIN_MIN,
    ModelDoesNotFitError,
    among,
    improvements,
    limits,
    plan_or_refuse,
    why_left_out,
    without,
)
from flowspec.plan.memory import PROCESS_BYTES, ModelWeights, mib, weights_of
from flowspec.plan.partition import Partition
from flowspec.plan.placement import checked_split
from flowspec.plan.planner import DoesNotFit, Plan, first_token_s, make_plan, rate_split
from flowspec.plan.profile import completed, find_profile
from flowspec.plan.shape import SHAPES, ModelShape, find_shape, shape_of
from flowspec.plan.sites import Network, PlanRequest, Site, site
from flowspec.plan.tensor_parallel import best_cut
from flowspec.plan.timing import LinkSpec
from flowspec.rounding import duration, rounded
from flowspec.runtime.cluster import pick_context, split_layers, stage_devices
from flowspec.runtime.cluster_file import (
    LINK_DEFAULT,
    declared_profile,
    parse_links,
    read_cluster,
    read_drafters,
    read_links,
)
from flowspec.runtime.decoding import Decoding, choose_drafter
from flowspec.runtime.plan_inputs import drafter_inputs, model_weights, typical_context
from flowspec.runtime.planning import choose
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.runtime.session import pick_dtype
from flowspec.runtime.survey import ASSUMED, DECLARED, LOOPBACK, MEASURED, Survey, Surveyor

BOARDS = r"(?:([1-9]\d{0,2}) ?x)?\s*((?!\d+( ?x)?(\s|$)|.*\s\d+ ?x\b)\S.*)"
"""How many, and the name or file of one."""
GIVEN = "given"
"""By `--link`."""
PROMPTS = (512, 4000, 16000)
"""Tokens of prompts whose first token is predicted, where the context has room for them."""
LINK_SOURCES = {
    GIVEN: "as you say",
    DECLARED: "as the cluster file says",
    MEASURED: "as measured",
    ASSUMED: "else give --link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the planner is asked, with the names of the drafters and what is said of them; the `survey` where
    the devices of a cluster file were asked. The links are `given`, `declared`, `measured` or `assumed`."""

    request: PlanRequest
    drafters: tuple[str, ...]
    survey: Survey | None
    links: str
    is_acceptance_published: bool
    drafter_note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    what = group.add_mutually_exclusive_group()
    add_model_argument(what)
    text = "a well-known model by name, such as llama-3-8b; needs no files"
    what.add_argument("--shape", metavar="NAME", help=text)
    text = "allowed precisions (default: the checkpoint's, of a shape float16)"
    group.add_argument("--dtype", metavar="NAME[,NAME]", help=text)
    add_cache_argument(group)
    text = "of each user; memory is reserved for it (default: 4096)"
    group.add_argument("--context", type=positive, metavar="TOKENS", help=text)
    text = "who ask at once (default: %(default)s)"
    group.add_argument("--users", type=positive, default=1, metavar="N", help=text)
    group = parser.add_argument_group("devices")
    text = (
        "devices that need not be there, by their boards (kinds of devices, by name or profile file): "
        "4x jetson-orin-nano, raspberry-pi-5"
    )
    group.add_argument("--devices", nargs="+", metavar="[Nx] BOARD,", help=text)
    text = "the devices of this cluster file, which are asked how fast they are, as chat asks them"
    group.add_argument("--cluster", type=Path, metavar="FILE.toml", help=text)
    text = Rare("with --cluster: ask no device, and take its board from its profile key")
    group.add_argument("--offline", action="store_true", help=text)
    text = (
        "of all links, or of one; may be repeated (default: the cluster file's, or as measured where its "
        "devices are asked, else 1000/0.5)"
    )
    group.add_argument("--link", action="append", metavar="[A:B=]MBIT/MS", help=text)
    text = "a stage on each of them, also on the head's and where answers are faster without"
    group.add_argument("--all-devices", action="store_true", help=text)
    text = Rare("where the head and the drafter run: a device, or one board more (default: chosen)")
    group.add_argument("--head", metavar="NAME", help=text)
    text = "a split by hand to compare with, devices in order"
    group.add_argument("--layers", type=number_list, metavar="3,1,2,2", help=text)
    group = parser.add_argument_group("guessing")
    text = (
        "what guesses ahead, as for chat; eagle is an EAGLE head for the model; or a shape's name (default, "
        "as for chat: the cluster file's, else bundled for the bundled model or the best published one that "
        f"is here, else {FALLBACK})"
    )
    names = "NAME[,NAME...]"
    group.add_argument("--drafter", action="append", type=drafter_names, metavar=names, help=text)
    shares = ", ".join(f"{kind.plural} {kind.acceptance:g}" for kind in KINDS)
    text = Rare(f"of its best guesses (default: {shares})")
    group.add_argument("--acceptance", type=float, metavar="SHARE", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.users > REQUESTS_MAX:
        raise InputError(f"--users: expected at most {REQUESTS_MAX}, got {args.users}")
    inputs = read_plan_inputs(args)
    by_hand = _by_hand(args, inputs.request)
    try:
        plan = _make_plan(inputs)
    except ModelDoesNotFitError as refusal:
        result = Result(refusal.report)
        result.note(str(refusal))
    else:
        result = Result(make_report(args, inputs, plan, by_hand))
        add_text(result, args, inputs, plan)
    result.print(as_json=args.json)
    return 0 if result.document["fits"] else ModelDoesNotFitError.exit_status


def _by_hand(args: argparse.Namespace, request: PlanRequest) -> Plan | None:
    """The split of `--layers`, else the cluster file's, over all devices but one that `--head` added."""
    layers, order = args.layers, list(request.stage_sites)
    is_listed = False
    if layers is None and args.cluster is not None:
        devices = stage_devices(read_cluster(args.cluster))
        if is_listed := devices[0].layers is not None:
            layers = [each.end - each.first for each in split_layers(devices, request.shape.layers, None)]
    if layers is None:
        return None
    if len(layers) == len(order) - 1:
        order = [each for each in order if each.name != request.head]
    if is_listed and len(layers) != len(order):
        raise InputError(
            f"{args.cluster}: layers: expected all {len(layers)} devices that have some, got {len(order)}; "
            "start the others, or take the layers away"
        )
    head = request.heads[0] if request.head is not None else order[0]
    return rate_split(request, order, head, checked_split(layers, request.shape.layers, len(order)))


def _make_plan(inputs: PlanInputs) -> Plan:
    """The plan that is fastest; of devices that were asked chat's, but with all the memory that is free, of
    which chat's counts what may be needed."""
    request = inputs.request
    if inputs.survey is None:
        return plan_or_refuse(request)
    plan = choose(request, inputs.survey).plan
    sites = {site.name: site for site in request.sites}
    return replace(plan, stages=tuple(replace(stage, site=sites[stage.site.name]) for stage in plan.stages))


# ------------------------------------------------------------------------------------------------ the request


def read_plan_inputs(args: argparse.Namespace) -> PlanInputs:
    """What the flags ask for, but no drafter that nobody named where the model does not fit beside it, as
    chat then does without; raises `InputError`, and `ClusterError` where no device of a cluster file
    answers."""
    shape, weights, precisions = _read_model(args)
    context = pick_context(args.context, shape.positions)
    if args.acceptance is not None and not 0 < args.acceptance < 1:
        raise InputError(f"--acceptance: expected a share above 0 and below 1, got {args.acceptance:g}")
    decoding = Decoding(drafters=joined(args.drafter))
    if args.shape is None:
        decoding = choose_drafter(decoding, args.model, args.cluster)
    placed = {} if args.cluster is None else read_drafters(args.cluster)
    drafters = decoding.drafters_for(args.shape or args.model, tuple(placed))
    drafter = drafter_inputs(drafters, placed, shape, may_fetch=decoding.may_fetch)
    planned, is_published = drafter.planned, drafter.is_published
    if planned is not None and args.acceptance is not None:
        planned = replace(planned, acceptance=args.acceptance)
    survey, head = None, None
    if args.cluster is not None and args.devices is None and not args.offline:
        every = read_cluster(args.cluster)
        survey = Surveyor(
            devices=tuple(stage_devices(every)),
            cluster=args.cluster,
            precision=precisions[0],
            keys=cluster_keys(args.cluster, every),
        ).survey(head_drafts=drafter.head_drafts, needs_all=False)
        head = survey.head
        sites = [replace(each, profile=reduce(completed, precisions, each.profile)) for each in survey.sites]
    else:
        sites = _read_sites(args)
    if args.head is not None:
        head, names = args.head, [each.name for each in sites]
        if head not in names:  # a board that is there for the head; it may run a stage, too
            profile = find_profile(head, what="--head")
            head = f"{profile.name}-head" if profile.name in names else profile.name
            sites.append(site(head, profile))
    if len(sites) > STAGES_MAX:
        raise InputError(f"--devices: expected at most {STAGES_MAX} devices, got {len(sites)}")
    for each in sites:
        for precision in precisions:
            each.profile.rates(precision)  # raises for one that it says nothing about
    network, links = _read_network(args, [each.name for each in sites], survey)
    request = PlanRequest(
        sites=tuple(sites),
        network=network,
        shape=shape,
        weights=weights,
        precisions=precisions,
        drafter=planned,
        context=context,
        typical_context=typical_context(context),
        users=args.users,
        head=head,
        all_devices=args.all_devices,
        cache=args.cache,
    )
    note = "" if args.drafter else ", the default"
    if decoding.is_default:
        note = f", the best one that is here (--drafter {FALLBACK} does without)"
        try:
            make_plan(request)
        except DoesNotFit:
            note = f": beside {drafters[0]}, which is here, the model does not fit"
            request, drafters, is_published = replace(request, drafter=PLANNED_FALLBACK), (FALLBACK,), False
    return PlanInputs(
        request=request,
        drafters=drafters,
        survey=survey,
        links=links,
        is_acceptance_published=is_published,
        drafter_note=note,
    )


def _read_model(args: argparse.Namespace) -> tuple[ModelShape, ModelWeights, tuple[str, ...]]:
    """With the precisions that are allowed."""
    precisions = () if args.dtype is None else tuple(dict.fromkeys(args.dtype.split(",")))
    if args.shape is not None:
        shape = find_shape(args.shape)
        weights, default = weights_of(shape), "float16"
    elif args.model in SHAPES and not Path(args.model).exists():
        raise InputError(f"--model: expected files, got the name of a shape; give --shape {args.model}")
    else:
        files = ModelFiles(args.model)
        config = files.config()
        shape = shape_of(files.spec, args.model, files.filed_bytes, has_mtp=has_mtp(files, config))
        weights, default = model_weights(files, shape), pick_dtype(None, files, config)
    for each in precisions:
        if each not in PRECISION_BYTES:
            raise InputError(f"--dtype: expected {', '.join(PRECISION_BYTES)}, got {each!r:.80}")
    return shape, weights, precisions or (default,)


def _read_network(
    args: argparse.Namespace, names: Sequence[str], survey: Survey | None
) -> tuple[Network, str]:
    """As `--link` says, else as measured, else as the cluster file says; and which of these (`links`)."""
    if args.link:
        return parse_links(args.link, names, "--link"), GIVEN
    if survey is not None:
        return survey.network, survey.links
    declared = None if args.cluster is None else read_links(args.cluster, names)
    if declared is not None:
        return declared, DECLARED
    return Network(default=LINK_DEFAULT), ASSUMED


def _read_sites(args: argparse.Namespace) -> list[Site]:
    """The devices of `--devices`, or of the cluster file with their boards from there or, in order, from
    `--devices`."""
    boards = _read_boards(args.devices or ())
    if args.cluster is None:
        if not boards:
            raise InputError("expected --devices or --cluster: which devices are there?")
        sites = []
        for at, name in enumerate(boards):
            profile = find_profile(name, what="--devices")
            number = f"-{boards[: at + 1].count(name)}" if boards.count(name) > 1 else ""
            sites.append(site(f"{profile.name}{number}", profile))
        ((name, count),) = Counter(each.name for each in sites).most_common(1)
        if count > 1:
            raise InputError(f"--devices: expected different names, got two files named {name!r}")
        return sites
    devices = stage_devices(read_cluster(args.cluster))
    if boards and len(boards) != len(devices):
        expected = f"a board for each of the {len(devices)} devices of {args.cluster}"
        raise InputError(f"--devices: expected {expected}, got {len(boards)}")
    sites = []
    for at, device in enumerate(devices):
        board = boards[at] if boards else device.profile
        declared = declared_profile(replace(device, profile=board), args.cluster)
        if declared is None:
            raise InputError(
                f'{args.cluster}: {device.name}: expected profile = "raspberry-pi-5", another board or a '
                "profile file, or --devices with a board for each; with --offline no daemon is asked how "
                "fast it is"
            )
        sites.append(site(device.name, declared, device.memory_bytes))
    return sites


def _read_boards(words: Sequence[str]) -> list[str]:
    """`2x raspberry-pi-5, jetson-orin-nano`, in as many words as it was typed, as names."""
    found: list[str] = []
    for part in " ".join(words).split(",") if words else ():
        match = re.fullmatch(BOARDS, part.strip())
        if match is None:
            expected = "boards with commas, one or more of each, such as 2x raspberry-pi-5"
            raise InputError(f"--devices: expected {expected}, got {part!r:.80}")
        found += [match[2]] * int(match[1] or 1)
    return found


# ------------------------------------------------------------------------------------------------------- JSON


def make_report(
    args: argparse.Namespace, inputs: PlanInputs, plan: Plan, by_hand: Plan | None
) -> dict[str, Any]:
    """What `--json` prints."""
    request, drafter, rate = inputs.request, inputs.request.drafter, plan.forecast.tokens_per_s
    others = []
    if drafter is None or drafter.shape is None:  # else a trained model guesses already
        head = plan_drafter(SKETCH, request.shape)
        text = f"--drafter {SKETCH}, a head that is right at {head.acceptance:.1%}"
        others.append((text, replace(request, drafter=head)))
    left_out = why_left_out(request, plan)
    if inputs.survey is None:  # else the head is where the user is, whatever suits it
        left_out.pop(plan.head.name, None)
    cut = best_cut(request, plan.precision) if request.users == 1 else None
    sizes = [size for size in PROMPTS if size < request.context]
    return {
        "fits": True,
        "model": request.shape.name,
        "precisions": request.precisions,
        "context": request.context,
        "users": request.users,
        **_numbers(plan),
        "first_token_s": {size: first_token_s(request, plan, size) for size in sizes},
        "drafters": inputs.drafters,
        "acceptance": drafter and drafter.acceptance,
        "not_used": list(left_out),
        "why_not_used": left_out,
        "alone": _alone(request) if _is_shared(plan) else None,
        "tensor_parallel": cut and {"boards": cut[1], "tokens_per_s": 1 / cut[0], "times": 1 / cut[0] / rate},
        "limits": limits(request, plan),
        "would_help": [
            {"change": each.text, "tokens_per_s": rate * (1 + (each.gain or 0.0)), "gain": each.gain}
            for each in improvements(request, plan, others)
        ],
        "assumptions": [*_assumptions(args, inputs, plan)],
        "by_hand": by_hand and {**_numbers(by_hand), "fits": _fits(by_hand)},
        "absent": None if args.cluster is None else _absence(inputs, plan),
    }


def _numbers(plan: Plan) -> dict[str, Any]:
    forecast = plan.forecast
    return {
        "precision": plan.precision,
        "stages": [
            {
                "device": stage.site.name,
                "board": stage.site.profile.name,
                "layers": [stage.first, stage.end],
                "slot_ms": 1000 * stage.slot_s,
                "weight_bytes": stage.need.weight_bytes,
                "cache_bytes": stage.need.cache_bytes,
                "work_bytes": stage.need.work_bytes,
                "other_bytes": stage.other_bytes,
                "total_bytes": stage.total_bytes,
                "memory_bytes": stage.site.memory_bytes,
            }
            for stage in plan.stages
        ],
        "head": {"device": plan.head.name, "runs_a_stage": not plan.is_head_free, "bytes": plan.head_bytes},
        "method": DEFAULT if plan.guesses else WITHOUT_GUESSES,
        "guessing_pays": plan.guesses,
        "window": plan.window,
        "tokens_per_s": forecast.tokens_per_s,
        "plain_tokens_per_s": plan.plain.tokens_per_s,
        "nodes_per_slot": forecast.nodes,
        "slot_ms": 1000 * forecast.slot_s,
        "trip_ms": 1000 * forecast.trip_s,
        "missed": forecast.missed if plan.guesses else None,
    }


def _fits(plan: Plan) -> bool:
    is_short = any(stage.short_bytes for stage in plan.stages)
    return plan.head_bytes <= plan.head.memory_bytes and not is_short


def _is_shared(plan: Plan) -> bool:
    """Whether more than one device that could have done it alone takes part."""
    used = {stage.site.name for stage in plan.stages}
    return len(used | ({plan.head.name} if plan.head.runs_stages else set())) > 1


def _alone(request: PlanRequest) -> dict[str, Any] | None:
    """The device that is fastest without the others, by the best plan with the request's drafter, n-grams and
    no guesses; None where the model fits no device alone. There is `no_room_for` a drafter that does not fit
    beside the model there."""
    own = request.drafter
    drafters = [own] if own is None else [own, PLANNED_FALLBACK]
    rows, seen = list[dict[str, Any]](), list[Any]()
    for place in request.stage_sites:
        if (place.profile, place.memory_bytes) in seen:
            continue
        seen.append((place.profile, place.memory_bytes))
        only = among(request, {place.name})
        try:
            plans = [(make_plan(replace(only, drafter=each)), each) for each in drafters]
        except DoesNotFit:  # a plan may do without its drafter, so the model itself does not fit
            continue
        plan, drafter = max(plans, key=lambda each: each[0].forecast.tokens_per_s)
        rows.append(
            {
                "device": place.name,
                "board": place.profile.name,
                "drafter": drafter.name if plan.guesses and drafter is not None else None,
                "no_room_for": own.name if own is not None and plans[0][0].guessed is None else None,
                "tokens_per_s": plan.forecast.tokens_per_s,
            }
        )
    return max(rows, key=lambda row: row["tokens_per_s"], default=None)


def _absence(inputs: PlanInputs, plan: Plan) -> dict[str, Any]:
    """For each device of a cluster file that the plan uses what a head does while it is absent; `was_asked`
    says whether all were asked whether they are there, and `not_there` which are not, and why."""
    rows = []
    for stage in plan.stages:
        left, short_bytes = without(inputs.request, stage.site.name)
        rate = left and left.forecast.tokens_per_s
        rows.append({"device": stage.site.name, "fits": left is not None, "tokens_per_s": rate})
        rows[-1]["short_bytes"] = short_bytes
    survey = inputs.survey
    return {"was_asked": survey is not None, "not_there": survey.absent if survey else {}, "without": rows}


def _assumptions(args: argparse.Namespace, inputs: PlanInputs, plan: Plan) -> Iterator[str]:
    """What the forecast stands on."""
    request = inputs.request
    partition = Partition(request)
    if inputs.survey is None:
        yield "each board does what its profile says; a tenth of its memory is its system's"
    else:
        yield "each device is as fast as it, or the file, says; memory is what is free now"
    links = [request.network.default, *request.network.pairs.values()]
    measured = [link for link in links if link != LOOPBACK]
    if inputs.links == MEASURED and len(measured) < len(links):
        yield f"links within a machine, which are not measured, of {_link(LOOPBACK)}"
        links = measured
    if links:
        usual, count = Counter(links).most_common(1)[0] if inputs.links == MEASURED else (links[0], 1)
        others = len(links) - count
        more = f", and {'one other' if others == 1 else f'{others} others'}" if others else ""
        yield f"links of {_link(usual)}{more}; {LINK_SOURCES[inputs.links]}"
    yield f"{request.typical_context} tokens of context on average"
    profiles = {site.profile.name: site.profile for site in (*plan.order, plan.head)}
    yield from (f"{name}: {profile.caution}" for name, profile in profiles.items() if profile.caution)
    yield from plan.bases
    if plan.guesses and request.drafter is not None:
        source = "as is published of it; " if inputs.is_acceptance_published else ""
        source = "as you say" if args.acceptance is not None else f"{source}else give --acceptance"
        yield f"{request.drafter.acceptance:.1%} of the drafter's best guesses are right; {source}"
    if plan.guesses and partition.drafts_on_cores and not plan.is_head_free and plan.head.shared is None:
        yield "head and stage share a device: each takes twice as long there"
    hosts = Counter(site.shared.host for site in request.stage_sites if site.shared is not None)
    shared = {site.shared.host: site for site in plan.order if site.shared is not None}
    for host, place in shared.items():
        slowdown = partition.slowdown(plan, place)
        if place.shared is not None and (hosts[host] > 1 or slowdown > 1):
            longer = f": each takes {rounded(slowdown)} times as long" if slowdown > 1 else ""
            yield f"what runs on {host} shares its {counted(place.shared.cores, 'core')}{longer}"


def _link(link: LinkSpec) -> str:
    return f"{link.bandwidth_mbps:g} Mbit/s and {1000 * link.delay_s:g} ms"


# ------------------------------------------------------------------------------------------------------- text


def add_text(result: Result, args: argparse.Namespace, inputs: PlanInputs, plan: Plan) -> None:
    """What people read of a report."""
    report, request, survey, note = result.document, inputs.request, inputs.survey, result.note
    head = report["head"]
    users = "one user" if request.users == 1 else f"{request.users} users"
    note(
        f"{PurePath(request.shape.name).name} in {plan.precision}, {users}, context {request.context}: "
        f"layers on {len(plan.stages)} of {len(request.sites)} devices"
    )
    if args.shape is None and args.model == BUNDLED:
        note(f"the {TOY}; name another: --model or --shape")
    if survey is None:
        boards = Counter(site.profile.name for site in request.sites)
        named = (name if count == 1 else f"{count}x {name}" for name, count in boards.items())
        note(f"devices: {', '.join(named)}")
    note()
    result.table(
        {
            "stage": "device",
            "layers": lambda stage: f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
            "weights": lambda stage: mib(stage["weight_bytes"]),
            "cache": lambda stage: mib(stage["cache_bytes"]),
            "needs": lambda stage: mib(stage["total_bytes"]),
            "has": lambda stage: mib(stage["memory_bytes"]),
            "a slot": lambda stage: f"{stage['slot_ms']:.0f} ms",
        },
        report["stages"],
    )
    needs = f"needs: weights, cache, {mib(WORK_BYTES)} to work in, {mib(PROCESS_BYTES)} for the daemon"
    needs += ", which mostly takes less"
    if not plan.is_head_free:
        drafter_bytes = plan.head_bytes - 2 * PROCESS_BYTES
        drafter = f" and {mib(drafter_bytes)} for the drafter" if drafter_bytes else ""
        needs += f"; on {head['device']} {mib(PROCESS_BYTES)} for the head{drafter}, too"
    note(needs)
    room = f"no stage there, {mib(head['bytes'])} of {mib(plan.head.memory_bytes)}"
    where = "beside its stage" if head["runs_a_stage"] else room
    note(f"head{' and drafter' if plan.guesses else ''} on {head['device']}: {where}")
    accepted = f", {request.drafter.acceptance:.1%} of its best guesses right" if request.drafter else ""
    first, *others = inputs.drafters or (NONE,)
    beside = f"; what {' and '.join(others)} will guess, too, is not counted" if others else ""
    note(f"drafter {first}{inputs.drafter_note}{accepted}{beside}")
    for line in _left_out(inputs, report["why_not_used"]):
        note(line)
    _add_forecast(result, inputs, plan)
    _add_comparisons(result)
    note("\nassumed")
    for each in report["assumptions"]:
        note(f"  {each}")
    if report["by_hand"] is not None and args.layers is None:
        note(f"\nchat runs the layers by hand, which are those of {args.cluster}")
    if (absent := report["absent"]) is not None:
        not_asked = "absent devices (none was asked whether it is there)"
        note(f"\n{'if one is lost' if absent['was_asked'] else not_asked}")
        note("  a head begins without one if the model fits the others, and takes it in later")
        result.table({"without": "device", "left": _left}, absent["without"], texts=2)


def _add_forecast(result: Result, inputs: PlanInputs, plan: Plan) -> None:
    """How fast the plan is, what limits it, and how much slower one device would be."""
    report, request, note = result.document, inputs.request, result.note
    tokens_per_s = report["tokens_per_s"]
    each_user = f", {rounded(tokens_per_s / request.users)} each" if request.users > 1 else ""
    note(f"\nforecast: {rounded(tokens_per_s)} tokens/s{each_user}")
    if guessing := _guessing(request, plan):
        note(guessing)
    if seconds := [f"{duration(each)} after {size}" for size, each in report["first_token_s"].items()]:
        note(f"  first token of an answer: {', '.join(seconds)} tokens of prompt")
    note(f"  a slot takes {duration(plan.forecast.slot_s)}, a trip {duration(plan.forecast.trip_s)}")
    note("limited by")
    for each in report["limits"]:
        note(f"  {each}")
    if (one := report["alone"]) is not None:
        name = f"one {one['board']}" if inputs.survey is None else one["device"]
        how = "without guesses" if one["drafter"] is None else f"with {one['drafter']}"
        times, rate = rounded(tokens_per_s / one["tokens_per_s"]), rounded(one["tokens_per_s"])
        lacks = f"; {one['no_room_for']} has no room there beside the model" if one["no_room_for"] else ""
        note(f"alone: {name} {how} gives {rate} tokens/s; the plan is {times} times as fast{lacks}")
    elif _is_shared(plan):
        note("alone: the model fits none of the devices by itself")


def _add_comparisons(result: Result) -> None:
    """Tensor parallelism, what would help, and the split by hand."""
    report, note = result.document, result.note
    if (cut := report["tensor_parallel"]) is not None and cut["times"] >= 1 + GAIN_MIN:
        note(
            f"tensor parallelism: distributed-llama on {cut['boards']} of the boards would give "
            f"{rounded(cut['tokens_per_s'])} tokens/s, {rounded(cut['times'])} times the plan's"
        )
    if report["would_help"]:
        columns: Columns = {
            "would help": "change",
            "faster by": lambda row: f"{row['gain']:+.0%}",
            "tokens/s": "tokens_per_s",
        }
        note()
        result.table(columns, report["would_help"][:5])
    if (by_hand := report["by_hand"]) is not None:
        stages, rate = by_hand["stages"], by_hand["tokens_per_s"]
        counts = [str(stage["layers"][1] - stage["layers"][0]) for stage in stages]
        short = [stage["device"] for stage in stages if stage["total_bytes"] > stage["memory_bytes"]]
        lacks = f"; does not fit {', '.join(short)}" if short else ""
        note(f"\nby hand, {','.join(counts)}")
        share = f"{rate / report['tokens_per_s']:.0%} of the plan's"
        note(f"  {rounded(rate)} tokens/s, {share}{lacks}")


def _guessing(request: PlanRequest, plan: Plan) -> str:
    """Whether guessing pays."""
    if plan.guesses:
        nodes, slots = counted(plan.forecast.nodes, "node"), counted(plan.window, "slot")
        return (
            f"  guessing pays: plain decoding would give {rounded(plan.plain.tokens_per_s)}\n"
            f"  --method {DEFAULT}: about {nodes} a slot, {slots} in flight"
        )
    if request.drafter is None:
        return ""
    if plan.guessed is None:
        return (
            f"  {request.drafter.name} has no room beside the model: the forecast is for --method "
            f"{WITHOUT_GUESSES}; --drafter {FALLBACK} needs none"
        )
    return (
        f"  guessing does not pay: the forecast is for --method {WITHOUT_GUESSES}; {DEFAULT}, the default, "
        "tries guesses and does without where they are slower"
    )


def _left_out(inputs: PlanInputs, why_left_out: Mapping[str, str]) -> Iterator[str]:
    """A line for each device without a stage; boards that are alike have one together."""
    survey, boards = inputs.survey, {site.name: site.profile.name for site in inputs.request.sites}
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in why_left_out.items():
        alike.setdefault((boards[name] if survey is None else name, why), []).append(name)
    for (board, why), names in alike.items():
        which = f"{names[0]} is" if len(names) == 1 else f"{len(names)}x {board} are"
        yield f"{which} left out: {why}"
    if survey is not None:
        for name, why in survey.left_out.items():
            yield f"{name} is left out: it says that it has {why}, which cannot be"
        for name, why in survey.absent.items():
            yield f"{name} is left out: it is absent ({why})"


def _left(row: Mapping[str, Any]) -> str:
    """What the devices do without one."""
    if row["fits"]:
        return f"{rounded(row['tokens_per_s'])} tokens/s"
    if row["short_bytes"]:
        return f"does not fit: the others lack {mib(row['short_bytes'])}"
    return "nothing is left"
