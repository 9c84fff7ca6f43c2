"""Tell what will run where and how fast: devices, order, layers, memory, and what would help.

Nothing is started or loaded. Rates are predicted from device profiles by a cost model and a formula
(docs/devices.md), not measured.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from flowspec.bench.planned import PROMPTS, first_token_s
from flowspec.cli.options import add_cache_argument, drafter_names, number_list, positive
from flowspec.cli.parser import Rare
from flowspec.cli.plan_beside import Alone, alone, with_eagle
from flowspec.cli.plan_request import GIVEN, Wanted, add_device_arguments, read_plan_request
from flowspec.core.methods import DEFAULT, WITHOUT_GUESSES
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.draft.choosing import Download, best_download, on, without_model
from flowspec.draft.kinds import ALL as KINDS
from flowspec.draft.kinds import FALLBACK, NONE
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, TOY
from flowspec.plan.absence import Without, without_each
from flowspec.plan.advice import GAIN_MIN, Option, improvements, limits
from flowspec.plan.left_out import why_left_out
from flowspec.plan.memory import PROCESS_BYTES, mib
from flowspec.plan.partition import Partition
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.refusal import ModelDoesNotFitError, refusing
from flowspec.plan.sites import PlanRequest, Site
from flowspec.plan.split import checked_split
from flowspec.plan.tensor_parallel import best_cut
from flowspec.plan.timing import LinkSpec
from flowspec.rounding import duration, rounded
from flowspec.runtime.cluster import split_layers, stage_devices
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.planning.choose import choose
from flowspec.runtime.planning.survey import ASSUMED, DECLARED, LOOPBACK, MEASURED, Survey

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
            + ", ".join(f"{kind.plural} {kind.acceptance:g}" for kind in KINDS if kind.acceptance)
            + ")"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.users > REQUESTS_MAX:
        raise InputError(f"--users: expected at most {REQUESTS_MAX}, got {args.users}")
    asked = read_plan_request(args)
    wanted = _fitting(asked)
    request, found = wanted.request, wanted.survey
    by_hand = _by_hand(args, request)
    try:
        best = _planned(wanted)
        helps = improvements(request, best.plan)
        download = _download(wanted)
        if not download and (eagle := with_eagle(request, best.tokens_per_s)):
            helps = sorted([*helps, eagle], key=lambda option: -(option.gain or 0.0))
        one = alone(request) if _is_shared(best) else None
    except ModelDoesNotFitError as refusal:
        print(json.dumps(refusal.report) if args.json else refusal)
        return refusal.exit_status
    without = None if args.cluster is None else without_each(request, best.plan)
    if args.json:
        told = report(wanted, best, one, helps, download, by_hand)
        print(json.dumps({**told, "absent": absent_report(without, found)}))
    else:
        note = "" if args.drafter else ", the default"
        if wanted.taken is not None and wanted.taken.drafter is not None:
            note = f", the best one that is here (--drafter {FALLBACK} does without)"
        elif wanted.drafters != asked.drafters:
            note = f": beside {asked.drafters[0]}, which is here, the model does not fit"
        lines = list(plan_lines(wanted, best, one, helps, download, by_hand, note))
        if by_hand is not None and args.layers is None:
            lines += ["", *_filled(f"chat runs the layers by hand, which are those of {args.cluster}")]
        print("\n".join([*lines, *absent_lines(without, found)]))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The plan to take, and why it leaves devices out."""

    plan: Plan
    left_out: dict[str, str]

    @property
    def tokens_per_s(self) -> float:
        return self.plan.forecast.tokens_per_s


def _planned(wanted: Wanted) -> Best:
    """The plan that is fastest; of devices that were asked, chat's."""
    request = wanted.request
    if wanted.survey is not None:
        plan = _with_all_memory(request, choose(request, wanted.survey).plan)
    else:
        with refusing(request):
            plan = make_plan(request)
    left_out = why_left_out(request, plan)
    if wanted.survey is None:  # else the head is where the user is, whatever suits it
        left_out.pop(plan.head.name, None)
    return Best(plan=plan, left_out=left_out)


def _fitting(wanted: Wanted) -> Wanted:
    """As it is asked; without a drafter that nobody named where the model does not fit beside it, as chat
    then does without."""
    if wanted.taken is None or wanted.taken.drafter is None:
        return wanted
    try:
        make_plan(wanted.request)
    except DoesNotFit:
        request = replace(wanted.request, drafter=without_model(wanted.request.shape))
        taken = replace(wanted.taken, drafter=None)
        return replace(
            wanted, request=request, drafters=(FALLBACK,), taken=taken, is_acceptance_published=False
        )
    return wanted


def _download(wanted: Wanted) -> Download | None:
    """The drafter that is not here and would help most."""
    if wanted.taken is None:
        return None
    return best_download(wanted.taken.candidates, on(wanted.request), wanted.request.drafter)


def _with_all_memory(request: PlanRequest, plan: Plan) -> Plan:
    """A plan whose devices have the memory that is free, of which chat's counts what may be needed."""
    found = {site.name: site for site in request.sites}
    return replace(plan, stages=tuple(replace(stage, site=found[stage.site.name]) for stage in plan.stages))


def _by_hand(args: argparse.Namespace, request: PlanRequest) -> Plan | None:
    """The split of `--layers`, else the cluster file's, over all devices but one that `--head` added."""
    listed = _listed_layers(args, request.shape.layers) if args.layers is None else None
    layers = args.layers or listed
    if layers is None:
        return None
    order = list(request.stage_sites)
    if len(layers) == len(order) - 1 and request.head is not None:
        order = [each for each in order if each.name != request.head]
    if listed is not None and len(layers) != len(order):
        raise InputError(
            f"{args.cluster}: layers: expected all {len(layers)} devices that have some, got {len(order)}; "
            "start the others, or take the layers away"
        )
    head = request.heads[0] if request.head is not None else order[0]
    return rate_split(request, order, head, checked_split(layers, request.shape.layers, len(order)))


def _listed_layers(args: argparse.Namespace, layer_count: int) -> list[int] | None:
    """How many layers each device has in the cluster file, if it says."""
    devices = [] if args.cluster is None else stage_devices(read_cluster(args.cluster))
    if not devices or devices[0].layers is None:
        return None
    return [stage.end - stage.first for stage in split_layers(devices, layer_count, None)]


# ------------------------------------------------------------------------------------------------------- JSON


def report(
    wanted: Wanted,
    best: Best,
    one: Alone | None,
    helps: list[Option],
    download: Download | None,
    by_hand: Plan | None,
) -> dict[str, Any]:
    """What `--json` prints."""
    plan, request, drafter = best.plan, wanted.request, wanted.request.drafter
    return {
        "fits": True,
        "model": request.shape.name,
        "precisions": list(request.precisions),
        "context": request.context,
        "users": request.users,
        **_numbers(plan),
        "first_token_s": _first_tokens(request, plan),
        "drafters": list(wanted.drafters),
        "acceptance": None if drafter is None else drafter.acceptance,
        "not_used": list(best.left_out),
        "why_not_used": best.left_out,
        "alone": None
        if one is None
        else {
            "device": one.site.name,
            "board": one.site.profile.name,
            "drafter": None if one.drafter is None else one.drafter.name,
            "no_room_for": None if one.left_out is None else one.left_out.name,
            "tokens_per_s": one.tokens_per_s,
        },
        "tensor_parallel": _cut_report(request, best),
        "limits": limits(request, plan),
        "would_help": [
            {
                "change": each.text,
                "tokens_per_s": _helped(best, each),
                "gain": each.gain,
            }
            for each in helps
        ],
        "would_download": None
        if download is None
        else {"drafter": download[0].row.drafter, "gain": download[1]},
        "assumptions": assumptions(wanted, plan),
        "by_hand": None if by_hand is None else {**_numbers(by_hand), "fits": _fits(by_hand)},
    }


def _numbers(plan: Plan) -> dict[str, Any]:
    found = plan.forecast
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
        "tokens_per_s": found.tokens_per_s,
        "plain_tokens_per_s": plan.plain.tokens_per_s,
        "nodes_per_slot": found.nodes,
        "slot_ms": 1000 * found.slot_s,
        "trip_ms": 1000 * found.trip_s,
        "missed": found.missed if plan.guesses else None,
    }


# ------------------------------------------------------------------------------------------------------- text


def plan_lines(
    wanted: Wanted,
    best: Best,
    one: Alone | None,
    helps: list[Option],
    download: Download | None,
    by_hand: Plan | None,
    note: str,
) -> Iterator[str]:
    """The `note` tells of the drafter whether it is the default."""
    plan, request = best.plan, wanted.request
    users = "one user" if request.users == 1 else f"{request.users} users"
    model = PurePath(request.shape.name).name
    yield (
        f"{model} in {plan.precision}, {users}, context {request.context}: layers on {len(plan.stages)} of "
        f"{len(request.sites)} devices"
    )
    if wanted.is_toy:
        yield f"the {TOY}; name another: --model or --shape"
    yield from _filled(f"devices: {_boards(request.sites)}\n" if wanted.survey is None else "")
    yield ""
    heads = f"{'layers':>8}{'weights':>10}{'cache':>10}{'needs':>10}{'has':>10}{'a slot':>8}"
    yield f"{'stage':<{NAME_WIDTH}}{heads}"
    for stage in plan.stages:
        layers = f"{stage.first}-{stage.end - 1}"
        sizes = "".join(
            f"{mib(size):>10}"
            for size in (stage.need.weight_bytes, stage.need.cache_bytes, stage.total_bytes)
        )
        room = f"{mib(stage.site.memory_bytes):>10}{1000 * stage.slot_s:>5.0f} ms"
        yield f"{stage.site.name:<{NAME_WIDTH}}{layers:>8}{sizes}{room}"
    yield from _filled(_needs_line(plan))
    alone = (
        f"no stage there, {mib(plan.head_bytes)} of {mib(plan.head.memory_bytes)}"
        if plan.is_head_free
        else "beside its stage"
    )
    yield f"head{' and drafter' if plan.guesses else ''} on {plan.head.name}: {alone}"
    accepted = f", {request.drafter.acceptance:.1%} of its best guesses right" if request.drafter else ""
    others = wanted.drafters[1:]
    beside = f"; what {' and '.join(others)} will guess, too, is not counted" if others else ""
    yield from _filled(f"drafter {wanted.drafters[0] if wanted.drafters else NONE}{note}{accepted}{beside}")
    yield from _left_out_lines(wanted, best)
    yield ""
    yield from _forecast_lines(request, best)
    if _is_shared(best):
        yield from _filled(_beside_one(wanted, best, one))
    yield from _filled(_beside_cut(request, best))
    shown = helps[:HELPS_SHOWN]
    width = max(HELP_WIDTH, *(len(option.text) + 1 for option in shown), 0)
    if shown:
        yield "\nwould help"
    for option in shown:
        rate = rounded(_helped(best, option))
        yield f"  {option.text:<{width}}{option.gain or 0:>+7.0%}{rate:>7} tokens/s"
    if download is not None:
        found, gain = download
        yield ""
        yield from _filled(
            f"a drafter that is not here would give {gain:+.0%}: chat with --drafter "
            f"{found.name} downloads it"
        )
    if by_hand is not None:
        share = by_hand.forecast.tokens_per_s / best.tokens_per_s
        yield f"\nby hand, {','.join(map(str, by_hand.split.layers))}"
        rate = rounded(by_hand.forecast.tokens_per_s)
        yield f"  {rate} tokens/s, {share:.0%} of the plan's{_lacks(by_hand)}"
    yield "\nassumed"
    for line in assumptions(wanted, plan):
        yield from (f"  {part}" for part in _filled(line, WIDTH - 2))


def _needs_line(plan: Plan) -> str:
    """What stages need beside weights and caches."""
    each = (
        f"needs: weights, cache, {mib(WORK_BYTES)} to work in, {mib(PROCESS_BYTES)} for the daemon, which "
        "mostly takes less"
    )
    beside = [stage.other_bytes for stage in plan.stages if stage.site.name == plan.head.name]
    if not beside:
        return each
    drafter_bytes = beside[0] - 2 * PROCESS_BYTES
    drafter = f" and {mib(drafter_bytes)} for the drafter" if drafter_bytes else ""
    return f"{each}; on {plan.head.name} {mib(PROCESS_BYTES)} for the head{drafter}, too"


def _is_shared(best: Best) -> bool:
    """Whether more than one device that could have done it alone takes part."""
    used = {stage.site.name for stage in best.plan.stages}
    return len(used | ({best.plan.head.name} if best.plan.head.runs_stages else set())) > 1


def _beside_one(wanted: Wanted, best: Best, one: Alone | None) -> str:
    """Whether more than one device is worth it."""
    if one is None:
        return "alone: the model fits none of the devices by itself"
    name = f"one {one.site.profile.name}" if wanted.survey is None else one.site.name
    how = "without guesses" if one.drafter is None else f"with {one.drafter.name}"
    times = rounded(best.tokens_per_s / one.tokens_per_s)
    lacks = f"; {one.left_out.name} has no room there beside the model" if one.left_out is not None else ""
    return (
        f"alone: {name} {how} gives {rounded(one.tokens_per_s)} tokens/s; the plan is {times} times as fast"
        f"{lacks}"
    )


def _cut_report(request: PlanRequest, best: Best) -> dict[str, Any] | None:
    """What tensor parallelism would give one user, of models that distributed-llama has."""
    cut = best_cut(request, best.plan.precision) if request.users == 1 else None
    if cut is None:
        return None
    seconds, boards = cut
    return {"boards": boards, "tokens_per_s": 1 / seconds, "times": 1 / seconds / best.tokens_per_s}


def _beside_cut(request: PlanRequest, best: Best) -> str:
    """Where tensor parallelism would win, and by how much; else nothing."""
    found = _cut_report(request, best)
    if found is None or found["times"] < 1 + GAIN_MIN:
        return ""
    return (
        f"tensor parallelism: distributed-llama on {found['boards']} of the boards would give "
        f"{rounded(found['tokens_per_s'])} tokens/s, {rounded(found['times'])} times the plan's"
    )


def _left_out_lines(wanted: Wanted, best: Best) -> Iterator[str]:
    """A line for each device without a stage; boards that are alike have one together."""
    boards = {site.name: site.profile.name for site in wanted.request.sites}
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in best.left_out.items():
        alike.setdefault((boards[name] if wanted.survey is None else name, why), []).append(name)
    for (board, why), names in alike.items():
        which = f"{names[0]} is" if len(names) == 1 else f"{len(names)}x {board} are"
        yield from _filled(f"{which} left out: {why}")
    if wanted.survey is not None:
        for name, why in wanted.survey.left_out.items():
            yield from _filled(f"{name} is left out: it says that it has {why}, which cannot be")
        for name, why in wanted.survey.absent.items():
            yield from _filled(f"{name} is left out: it is absent ({why})")


def _boards(places: Sequence[Site]) -> str:
    counts = Counter(place.profile.name for place in places)
    return ", ".join(name if count == 1 else f"{count}x {name}" for name, count in counts.items())


def _filled(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def absent_report(without: Sequence[Without] | None, asked: Survey | None) -> dict[str, Any] | None:
    """For each device of a cluster file that the plan uses what a head does while it is absent.

    `was_asked` says whether all were asked whether they are there, and `not_there` which are not, and why.
    """
    if without is None:
        return None
    found = [
        {
            "device": each.device,
            "fits": each.plan is not None,
            "tokens_per_s": None if each.plan is None else each.plan.forecast.tokens_per_s,
            "short_bytes": each.short_bytes,
        }
        for each in without
    ]
    return {
        "was_asked": asked is not None,
        "not_there": {} if asked is None else asked.absent,
        "without": found,
    }


def absent_lines(without: Sequence[Without] | None, asked: Survey | None) -> Iterator[str]:
    """The same for people."""
    if without is None:
        return
    yield "\nif one is lost" if asked is not None else "\nabsent devices (none was asked whether it is there)"
    yield "  a head begins without one if the model fits the others, and takes it in later"
    for each in without:
        left = "nothing is left"
        if each.short_bytes:
            left = f"does not fit: the others lack {mib(each.short_bytes)}"
        if each.plan is not None:
            left = f"{rounded(each.plan.forecast.tokens_per_s)} tokens/s"
        yield f"  without {each.device:<{NAME_WIDTH}}{left}"


def _helped(best: Best, option: Option) -> float:
    """The rate with a change, by its gain."""
    return best.tokens_per_s * (1 + (option.gain or 0.0))


def _forecast_lines(request: PlanRequest, best: Best) -> Iterator[str]:
    plan, found = best.plan, best.plan.forecast
    each = f", {rounded(best.tokens_per_s / request.users)} each" if request.users > 1 else ""
    yield f"forecast: {rounded(best.tokens_per_s)} tokens/s{each}"
    if plan.guesses:
        yield f"  guessing pays: plain decoding would give {rounded(plan.plain.tokens_per_s)}"
        slots = "1 slot" if plan.window == 1 else f"{plan.window} slots"
        nodes = "1 node" if found.nodes == 1 else f"{found.nodes} nodes"
        yield f"  --method {DEFAULT}: about {nodes} a slot, {slots} in flight"
    elif request.drafter is not None and plan.guessed is None:
        yield from _filled(
            f"  {request.drafter.name} has no room beside the model: the forecast is for --method "
            f"{WITHOUT_GUESSES}; --drafter {FALLBACK} needs none"
        )
    elif request.drafter is not None:
        yield from _filled(
            f"  guessing does not pay: the forecast is for --method {WITHOUT_GUESSES}; {DEFAULT}, the "
            "default, tries guesses and does without where they are slower"
        )
    first = [f"{duration(seconds)} after {size}" for size, seconds in _first_tokens(request, plan).items()]
    if first:
        yield from _filled(f"  first token of an answer: {', '.join(first)} tokens of prompt")
    yield f"  a slot takes {duration(found.slot_s)}, a trip {duration(found.trip_s)}"
    yield "limited by"
    yield from (f"  {line}" for line in limits(request, plan))


def _first_tokens(request: PlanRequest, plan: Plan) -> dict[int, float]:
    """Seconds to an answer's first token, by the tokens of its prompt."""
    return {size: first_token_s(request, plan, size) for size in PROMPTS if size < request.context}


def assumptions(wanted: Wanted, plan: Plan) -> list[str]:
    """What the forecast stands on."""
    request = wanted.request
    found = [
        "each board does what its profile says; a tenth of its memory is its system's"
        if wanted.survey is None
        else "each device is as fast as it, or the file, says; memory is what is free now",
        *_link_lines(wanted),
        f"{request.typical_context} tokens of context on average",
    ]
    cautions = {
        place.profile.name: place.profile.caution for place in (*plan.split.arrangement.order, plan.head)
    }
    found += [f"{board}: {caution}" for board, caution in cautions.items() if caution]
    found += plan.bases
    if plan.guesses and request.drafter is not None:
        source = "else give --acceptance"
        if wanted.is_acceptance_given:
            source = "as you say"
        elif wanted.is_acceptance_published:
            source = f"as is published of it; {source}"
        found.append(f"{request.drafter.acceptance:.1%} of the drafter's best guesses are right; {source}")
    is_on_cores = request.drafter is not None and request.drafter.shape is not None
    if plan.guesses and is_on_cores and not plan.is_head_free and plan.head.shared is None:
        found.append("head and stage share a device: each takes twice as long there")
    partition = Partition(request)
    times = {
        each.site.shared.host: (each.site.shared.cores, partition.slowdown(plan.split.arrangement, each.site))
        for each in plan.stages
        if each.site.shared is not None
    }
    hosts = Counter(each.shared.host for each in request.stage_sites if each.shared is not None)
    for host, (cores, slowdown) in times.items():
        if hosts[host] == 1 and slowdown == 1:
            continue
        among = f"what runs on {host} shares its {'1 core' if cores == 1 else f'{cores} cores'}"
        found.append(f"{among}" + (f": each takes {rounded(slowdown)} times as long" if slowdown > 1 else ""))
    return found


def _link_lines(wanted: Wanted) -> Iterator[str]:
    """The links, and where they are from."""
    network = wanted.request.network
    usual, others = network.default, len(network.pairs)
    if wanted.links == MEASURED:
        links = Counter(link for link in (usual, *network.pairs.values()) if link != LOOPBACK)
        if len(links) < len({usual, *network.pairs.values()}):
            yield f"links within a machine, which are not measured, of {_link(LOOPBACK)}"
        if not links:
            return
        usual, others = links.most_common(1)[0][0], links.total() - 1
    more = f", and {'one other' if others == 1 else f'{others} others'}" if others else ""
    if wanted.links != GIVEN:
        yield f"links of {_link(usual)}{more}; {LINK_SOURCES[wanted.links]}"
        return
    of_all = [text for text in wanted.typed if "=" not in text]
    if not of_all:
        yield f"links of {_link(usual)}; else give --link; {more.removeprefix(', and ')} as you say"
    elif "/" not in of_all[-1]:
        typed, delay = f"{usual.bandwidth_mbps:g} Mbit/s{more}", f"{1000 * usual.delay_s:g} ms"
        yield f"links of {typed}, as you say, and {delay}; else give --link MBIT/MS"
    else:
        yield f"links of {_link(usual)}{more}; as you say"


def _link(link: LinkSpec) -> str:
    return f"{link.bandwidth_mbps:g} Mbit/s and {1000 * link.delay_s:g} ms"


def _fits(plan: Plan) -> bool:
    return (
        all(stage.total_bytes <= stage.site.memory_bytes for stage in plan.stages)
        and plan.head_bytes <= plan.head.memory_bytes
    )


def _lacks(plan: Plan) -> str:
    short = [stage.site.name for stage in plan.stages if stage.total_bytes > stage.site.memory_bytes]
    return f"; does not fit {', '.join(short)}" if short else ""
