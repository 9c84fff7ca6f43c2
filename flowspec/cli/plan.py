"""Tell what will run where and how fast: devices, order, layers, memory, and what would help.

Nothing is started or loaded. Rates are predicted from device profiles by a cost model and a formula
(docs/devices.md), not measured.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from flowspec.bench.planned import PROMPTS, first_token_s
from flowspec.cli.options import add_cache_argument, drafter_names, number_list, positive
from flowspec.cli.parser import Rare
from flowspec.cli.plan_request import GIVEN, PlanInputs, add_device_arguments, read_plan_inputs
from flowspec.core.methods import DEFAULT, WITHOUT_GUESSES
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.draft.feature_kinds import SKETCH
from flowspec.draft.registry import FALLBACK, KINDS, NONE, PLANNED_FALLBACK, plan_drafter
from flowspec.errors import InputError, counted
from flowspec.model.files import BUNDLED, TOY
from flowspec.plan.absence import among, without_each
from flowspec.plan.advice import GAIN_MIN, Option, improvements, limits
from flowspec.plan.left_out import why_left_out
from flowspec.plan.memory import PROCESS_BYTES, mib
from flowspec.plan.partition import Partition
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.refusal import ModelDoesNotFitError, plan_or_refuse
from flowspec.plan.sites import PlanRequest
from flowspec.plan.split import checked_split
from flowspec.plan.tensor_parallel import best_cut
from flowspec.plan.timing import LinkSpec
from flowspec.rounding import duration, rounded
from flowspec.runtime.cluster import split_layers, stage_devices
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.planning import choose
from flowspec.runtime.survey import ASSUMED, DECLARED, LOOPBACK, MEASURED

HELPS_SHOWN = 5
HELP_WIDTH = 50
NAME_WIDTH = 24
WIDTH = 80
LINK_SOURCES = {
    DECLARED: "as the cluster file says",
    MEASURED: "as measured",
    ASSUMED: "else give --link",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    what = group.add_mutually_exclusive_group()
    what.add_argument(
        "--model",
        "-m",
        default=BUNDLED,
        metavar="PATH-OR-HUB-ID",
        help="model folder, GGUF file or hub id (default: the bundled model)",
    )
    what.add_argument(
        "--shape", metavar="NAME", help="a well-known model by name, such as llama-3-8b; needs no files"
    )
    group.add_argument(
        "--dtype",
        metavar="NAME[,NAME]",
        help="allowed precisions (default: the checkpoint's, of a shape float16)",
    )
    add_cache_argument(group)
    group.add_argument(
        "--context",
        type=positive,
        metavar="TOKENS",
        help="of each user; memory is reserved for it (default: 4096)",
    )
    group.add_argument(
        "--users", type=positive, default=1, metavar="N", help="who ask at once (default: %(default)s)"
    )
    group = parser.add_argument_group("devices")
    add_device_arguments(group)
    group.add_argument(
        "--all-devices",
        action="store_true",
        help="a stage on each of them, also on the head's and where answers are faster without",
    )
    group.add_argument(
        "--head",
        metavar="NAME",
        help=Rare("where the head and the drafter run: a device, or one board more (default: chosen)"),
    )
    group.add_argument(
        "--layers",
        type=number_list,
        metavar="3,1,2,2",
        help="a split by hand to compare with, devices in order",
    )
    group = parser.add_argument_group("guessing")
    group.add_argument(
        "--drafter",
        action="append",
        type=drafter_names,
        metavar="NAME[,NAME...]",
        help="what guesses ahead, as for chat; eagle is an EAGLE head for the model; or a shape's name "
        "(default, as for chat: the cluster file's, else bundled for the bundled model or the best published "
        f"one that is here, else {FALLBACK})",
    )
    group.add_argument(
        "--acceptance",
        type=float,
        metavar="SHARE",
        help=Rare(
            "of its best guesses (default: "
            + ", ".join(f"{kind.plural} {kind.acceptance:g}" for kind in KINDS)
            + ")"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.users > REQUESTS_MAX:
        raise InputError(f"--users: expected at most {REQUESTS_MAX}, got {args.users}")
    inputs = read_plan_inputs(args)
    by_hand = _by_hand(args, inputs.request)
    try:
        plan = _make_plan(inputs)
    except ModelDoesNotFitError as refusal:
        print(json.dumps(refusal.report) if args.json else refusal)
        return refusal.exit_status
    report = make_report(args, inputs, plan, by_hand)
    print(json.dumps(report) if args.json else "\n".join(plan_lines(args, inputs, plan, report)))
    return 0


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
    if len(layers) == len(order) - 1 and request.head is not None:
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


# ------------------------------------------------------------------------------------------------------- JSON


def make_report(
    args: argparse.Namespace, inputs: PlanInputs, plan: Plan, by_hand: Plan | None
) -> dict[str, Any]:
    """What `--json` prints, and text is made of."""
    request, drafter, rate = inputs.request, inputs.request.drafter, plan.forecast.tokens_per_s
    helps = improvements(request, plan)
    if eagle := _with_eagle(request, rate):
        helps = sorted([*helps, eagle], key=lambda option: -(option.gain or 0.0))
    left_out = why_left_out(request, plan)
    if inputs.survey is None:  # else the head is where the user is, whatever suits it
        left_out.pop(plan.head.name, None)
    cut = best_cut(request, plan.precision) if request.users == 1 else None
    return {
        "fits": True,
        "model": request.shape.name,
        "precisions": list(request.precisions),
        "context": request.context,
        "users": request.users,
        **_numbers(plan),
        "first_token_s": {
            size: first_token_s(request, plan, size) for size in PROMPTS if size < request.context
        },
        "drafters": list(inputs.drafters),
        "acceptance": None if drafter is None else drafter.acceptance,
        "not_used": list(left_out),
        "why_not_used": left_out,
        "alone": _alone(request) if _is_shared(plan) else None,
        "tensor_parallel": None
        if cut is None
        else {"boards": cut[1], "tokens_per_s": 1 / cut[0], "times": 1 / cut[0] / rate},
        "limits": limits(request, plan),
        "would_help": [
            {"change": each.text, "tokens_per_s": rate * (1 + (each.gain or 0.0)), "gain": each.gain}
            for each in helps
        ],
        "assumptions": _assumptions(args, inputs, plan),
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
    return plan.head_bytes <= plan.head.memory_bytes and all(
        stage.total_bytes <= stage.site.memory_bytes for stage in plan.stages
    )


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
    rows, seen = list[dict[str, Any]](), []
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


def _with_eagle(request: PlanRequest, tokens_per_s: float) -> Option | None:
    """What an EAGLE head for the model would give beside `tokens_per_s`; None where it would not help, or
    where a model that was trained guesses already."""
    if request.drafter is not None and request.drafter.shape is not None:
        return None
    head = plan_drafter(SKETCH, request.shape)
    try:
        rate = make_plan(replace(request, drafter=head)).forecast.tokens_per_s
    except InputError:
        return None
    gain = rate / tokens_per_s - 1
    text = f"--drafter {SKETCH}, a head that is right at {head.acceptance:.1%}"
    return Option(text=text, tokens_per_s=rate, gain=gain) if gain >= GAIN_MIN else None


def _absence(inputs: PlanInputs, plan: Plan) -> dict[str, Any]:
    """For each device of a cluster file that the plan uses what a head does while it is absent.

    `was_asked` says whether all were asked whether they are there, and `not_there` which are not, and why.
    """
    return {
        "was_asked": inputs.survey is not None,
        "not_there": {} if inputs.survey is None else inputs.survey.absent,
        "without": [
            {
                "device": each.device,
                "fits": each.plan is not None,
                "tokens_per_s": None if each.plan is None else each.plan.forecast.tokens_per_s,
                "short_bytes": each.short_bytes,
            }
            for each in without_each(inputs.request, plan)
        ],
    }


def _assumptions(args: argparse.Namespace, inputs: PlanInputs, plan: Plan) -> list[str]:
    """What the forecast stands on."""
    request = inputs.request
    partition, arrangement = Partition(request), plan.split.arrangement
    lines = [
        "each board does what its profile says; a tenth of its memory is its system's"
        if inputs.survey is None
        else "each device is as fast as it, or the file, says; memory is what is free now",
        *_link_lines(args, inputs),
        f"{request.typical_context} tokens of context on average",
    ]
    cautions = {place.profile.name: place.profile.caution for place in (*arrangement.order, plan.head)}
    lines += [f"{board}: {caution}" for board, caution in cautions.items() if caution]
    lines += plan.bases
    if plan.guesses and request.drafter is not None:
        source = "else give --acceptance"
        if args.acceptance is not None:
            source = "as you say"
        elif inputs.is_acceptance_published:
            source = f"as is published of it; {source}"
        lines.append(f"{request.drafter.acceptance:.1%} of the drafter's best guesses are right; {source}")
    if plan.guesses and partition.drafts_on_cores and not plan.is_head_free and plan.head.shared is None:
        lines.append("head and stage share a device: each takes twice as long there")
    hosts = Counter(each.shared.host for each in request.stage_sites if each.shared is not None)
    shares = {
        each.site.shared.host: (each.site.shared.cores, partition.slowdown(arrangement, each.site))
        for each in plan.stages
        if each.site.shared is not None
    }
    for host, (cores, slowdown) in shares.items():
        if hosts[host] > 1 or slowdown > 1:
            longer = f": each takes {rounded(slowdown)} times as long" if slowdown > 1 else ""
            lines.append(f"what runs on {host} shares its {counted(cores, 'core')}{longer}")
    return lines


def _link_lines(args: argparse.Namespace, inputs: PlanInputs) -> Iterator[str]:
    """The links, and where they are from."""
    network = inputs.request.network
    usual, others = network.default, len(network.pairs)
    if inputs.links == MEASURED:
        links = Counter(link for link in (usual, *network.pairs.values()) if link != LOOPBACK)
        if len(links) < len({usual, *network.pairs.values()}):
            yield f"links within a machine, which are not measured, of {_link(LOOPBACK)}"
        if not links:
            return
        usual, others = links.most_common(1)[0][0], links.total() - 1
    more = f", and {'one other' if others == 1 else f'{others} others'}" if others else ""
    if inputs.links != GIVEN:
        yield f"links of {_link(usual)}{more}; {LINK_SOURCES[inputs.links]}"
        return
    of_all = [text for text in args.link if "=" not in text]
    if not of_all:
        yield f"links of {_link(usual)}; else give --link; {more.removeprefix(', and ')} as you say"
    elif "/" not in of_all[-1]:
        typed, delay = f"{usual.bandwidth_mbps:g} Mbit/s{more}", f"{1000 * usual.delay_s:g} ms"
        yield f"links of {typed}, as you say, and {delay}; else give --link MBIT/MS"
    else:
        yield f"links of {_link(usual)}{more}; as you say"


def _link(link: LinkSpec) -> str:
    return f"{link.bandwidth_mbps:g} Mbit/s and {1000 * link.delay_s:g} ms"


# ------------------------------------------------------------------------------------------------------- text


def plan_lines(
    args: argparse.Namespace, inputs: PlanInputs, plan: Plan, report: Mapping[str, Any]
) -> Iterator[str]:
    """The report for people."""
    request, head, tokens_per_s = inputs.request, report["head"], report["tokens_per_s"]
    users = "one user" if request.users == 1 else f"{request.users} users"
    yield (
        f"{PurePath(request.shape.name).name} in {plan.precision}, {users}, context {request.context}: "
        f"layers on {len(plan.stages)} of {len(request.sites)} devices"
    )
    if args.shape is None and args.model == BUNDLED:
        yield f"the {TOY}; name another: --model or --shape"
    if inputs.survey is None:
        boards = Counter(place.profile.name for place in request.sites)
        counts = (name if count == 1 else f"{count}x {name}" for name, count in boards.items())
        yield from _wrap(f"devices: {', '.join(counts)}")
    heads = f"{'layers':>8}{'weights':>10}{'cache':>10}{'needs':>10}{'has':>10}{'a slot':>8}"
    yield f"\n{'stage':<{NAME_WIDTH}}{heads}"
    needs = f"needs: weights, cache, {mib(WORK_BYTES)} to work in, {mib(PROCESS_BYTES)} for the daemon"
    needs += ", which mostly takes less"
    for stage in report["stages"]:
        layers = f"{stage['layers'][0]}-{stage['layers'][1] - 1}"
        sizes = [mib(stage[f"{name}_bytes"]) for name in ("weight", "cache", "total", "memory")]
        columns = "".join(f"{size:>10}" for size in sizes)
        yield f"{stage['device']:<{NAME_WIDTH}}{layers:>8}{columns}{stage['slot_ms']:>5.0f} ms"
        if stage["device"] == head["device"]:
            drafter_bytes = stage["other_bytes"] - 2 * PROCESS_BYTES
            drafter = f" and {mib(drafter_bytes)} for the drafter" if drafter_bytes else ""
            needs += f"; on {head['device']} {mib(PROCESS_BYTES)} for the head{drafter}, too"
    yield from _wrap(needs)
    room = f"no stage there, {mib(head['bytes'])} of {mib(plan.head.memory_bytes)}"
    where = "beside its stage" if head["runs_a_stage"] else room
    yield f"head{' and drafter' if plan.guesses else ''} on {head['device']}: {where}"
    accepted = f", {request.drafter.acceptance:.1%} of its best guesses right" if request.drafter else ""
    first, *others = inputs.drafters or (NONE,)
    beside = f"; what {' and '.join(others)} will guess, too, is not counted" if others else ""
    yield from _wrap(f"drafter {first}{inputs.drafter_note}{accepted}{beside}")
    yield from _left_out_lines(inputs, report["why_not_used"])
    yield from _forecast_lines(request, plan, report)
    if _is_shared(plan):
        yield from _wrap(_alone_line(inputs, report))
    cut = report["tensor_parallel"]
    if cut is not None and cut["times"] >= 1 + GAIN_MIN:
        yield from _wrap(
            f"tensor parallelism: distributed-llama on {cut['boards']} of the boards would give "
            f"{rounded(cut['tokens_per_s'])} tokens/s, {rounded(cut['times'])} times the plan's"
        )
    helps = report["would_help"][:HELPS_SHOWN]
    width = max([HELP_WIDTH, *(len(each["change"]) + 1 for each in helps)])
    yield from ["\nwould help"] if helps else []
    for each in helps:
        rate = rounded(each["tokens_per_s"])
        yield f"  {each['change']:<{width}}{each['gain'] or 0:>+7.0%}{rate:>7} tokens/s"
    if (by_hand := report["by_hand"]) is not None:
        rate, share = rounded(by_hand["tokens_per_s"]), by_hand["tokens_per_s"] / tokens_per_s
        counts = (str(end - first) for first, end in (stage["layers"] for stage in by_hand["stages"]))
        yield f"\nby hand, {','.join(counts)}"
        short = [each["device"] for each in by_hand["stages"] if each["total_bytes"] > each["memory_bytes"]]
        lacks = f"; does not fit {', '.join(short)}" if short else ""
        yield f"  {rate} tokens/s, {share:.0%} of the plan's{lacks}"
    yield "\nassumed"
    for line in report["assumptions"]:
        yield from (f"  {part}" for part in _wrap(line, WIDTH - 2))
    if by_hand is not None and args.layers is None:
        yield ""
        yield from _wrap(f"chat runs the layers by hand, which are those of {args.cluster}")
    if report["absent"] is not None:
        yield from _absent_lines(report["absent"])


def _left_out_lines(inputs: PlanInputs, left_out: Mapping[str, str]) -> Iterator[str]:
    """A line for each device without a stage; boards that are alike have one together."""
    boards = {site.name: site.profile.name for site in inputs.request.sites}
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in left_out.items():
        alike.setdefault((boards[name] if inputs.survey is None else name, why), []).append(name)
    for (board, why), names in alike.items():
        which = f"{names[0]} is" if len(names) == 1 else f"{len(names)}x {board} are"
        yield from _wrap(f"{which} left out: {why}")
    if inputs.survey is not None:
        for name, why in inputs.survey.left_out.items():
            yield from _wrap(f"{name} is left out: it says that it has {why}, which cannot be")
        for name, why in inputs.survey.absent.items():
            yield from _wrap(f"{name} is left out: it is absent ({why})")


def _forecast_lines(request: PlanRequest, plan: Plan, report: Mapping[str, Any]) -> Iterator[str]:
    rate = report["tokens_per_s"]
    each = f", {rounded(rate / request.users)} each" if request.users > 1 else ""
    yield f"\nforecast: {rounded(rate)} tokens/s{each}"
    if plan.guesses:
        nodes, slots = counted(report["nodes_per_slot"], "node"), counted(plan.window, "slot")
        yield f"  guessing pays: plain decoding would give {rounded(report['plain_tokens_per_s'])}"
        yield f"  --method {DEFAULT}: about {nodes} a slot, {slots} in flight"
    elif request.drafter is not None and plan.guessed is None:
        yield from _wrap(
            f"  {request.drafter.name} has no room beside the model: the forecast is for --method "
            f"{WITHOUT_GUESSES}; --drafter {FALLBACK} needs none"
        )
    elif request.drafter is not None:
        yield from _wrap(
            f"  guessing does not pay: the forecast is for --method {WITHOUT_GUESSES}; {DEFAULT}, the "
            "default, tries guesses and does without where they are slower"
        )
    first = [f"{duration(seconds)} after {size}" for size, seconds in report["first_token_s"].items()]
    if first:
        yield from _wrap(f"  first token of an answer: {', '.join(first)} tokens of prompt")
    yield f"  a slot takes {duration(plan.forecast.slot_s)}, a trip {duration(plan.forecast.trip_s)}"
    yield "limited by"
    yield from (f"  {line}" for line in report["limits"])


def _alone_line(inputs: PlanInputs, report: Mapping[str, Any]) -> str:
    """Whether more than one device is worth it."""
    one = report["alone"]
    if one is None:
        return "alone: the model fits none of the devices by itself"
    name = f"one {one['board']}" if inputs.survey is None else one["device"]
    how = "without guesses" if one["drafter"] is None else f"with {one['drafter']}"
    times = rounded(report["tokens_per_s"] / one["tokens_per_s"])
    lacks = f"; {one['no_room_for']} has no room there beside the model" if one["no_room_for"] else ""
    rate = rounded(one["tokens_per_s"])
    return f"alone: {name} {how} gives {rate} tokens/s; the plan is {times} times as fast{lacks}"


def _absent_lines(absent: Mapping[str, Any]) -> Iterator[str]:
    asked, not_asked = "if one is lost", "absent devices (none was asked whether it is there)"
    yield f"\n{asked if absent['was_asked'] else not_asked}"
    yield "  a head begins without one if the model fits the others, and takes it in later"
    for each in absent["without"]:
        left = "nothing is left"
        if each["fits"]:
            left = f"{rounded(each['tokens_per_s'])} tokens/s"
        elif each["short_bytes"]:
            left = f"does not fit: the others lack {mib(each['short_bytes'])}"
        yield f"  without {each['device']:<{NAME_WIDTH}}{left}"


def _wrap(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
