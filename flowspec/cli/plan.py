"""Tell what will run where and how fast: devices, order, layers, memory, and what would help.

Nothing is started or loaded. Rates are foretold from device profiles by a cost model and answers in virtual
time (docs/devices.md), not measured.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.bench.planned import FORETOLD_TOKENS, Simulated, foretold, refined_plan
from flowspec.cli.options import number_list, positive
from flowspec.cli.plan_wish import find_wish
from flowspec.core.methods import DEFAULT, WITHOUT_GUESSES
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.draft.kinds import ALL as KINDS
from flowspec.draft.kinds import SUPPOSED, WORDS
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from flowspec.plan.absence import Without, without_each
from flowspec.plan.advice import Option, improvements, limits
from flowspec.plan.memory import mib
from flowspec.plan.planner import Plan, make_plan, rate_split
from flowspec.plan.refusal import ModelDoesNotFitError, refusing
from flowspec.plan.sites import PlanRequest
from flowspec.plan.split import checked_split

HELPS_SHOWN = 5
SIMULATED_WORK_MAX = 24
"""Devices times users up to which plans are simulated; beyond, that would take more than some seconds."""
NAME_WIDTH = 24
WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    what = group.add_mutually_exclusive_group()
    what.add_argument(
        "--model",
        "-m",
        default=BUNDLED,
        metavar="PATH-OR-HUB-ID",
        help="model folder, GGUF file or hub id (default: the bundled demo model)",
    )
    what.add_argument(
        "--shape", metavar="NAME", help="a well-known model by name, such as llama-3-8b; needs no files"
    )
    group.add_argument(
        "--precision",
        metavar="NAME[,NAME]",
        help="allowed precisions (default: the checkpoint's, of a shape float16)",
    )
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
    group.add_argument(
        "--devices",
        metavar="BOARD[xN],...",
        help="boards by name or profile file, such as jetson-orin-nano,raspberry-pi-5x2",
    )
    group.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE.toml",
        help="a cluster file; boards from its profile keys or --devices",
    )
    group.add_argument(
        "--head",
        metavar="NAME",
        help="where the head and the drafter run: a device, or one board more (default: chosen)",
    )
    group.add_argument(
        "--link",
        action="append",
        metavar="[A:B=]MBIT/MS",
        help="of all links (default: 1000/0.5), or of one; may be repeated",
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
        metavar="NAME",
        help=f"{SUPPOSED}, {', '.join(WORDS)}, a shape's name, a folder or hub id (default: {SUPPOSED})",
    )
    group.add_argument(
        "--acceptance",
        type=float,
        metavar="SHARE",
        help="of its best guesses (default: "
        + ", ".join(f"{kind.plural} {kind.acceptance:g}" for kind in KINDS if kind.acceptance)
        + ")",
    )
    parser.add_argument(
        "--quick", action="store_true", help="foretell by a formula, at once, and not by simulations"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.users > REQUESTS_MAX:
        raise InputError(f"--users: expected at most {REQUESTS_MAX}, got {args.users}")
    wish = find_wish(args)
    by_hand = _by_hand(args, wish)
    simulation: Simulated | None = None
    try:
        with refusing(wish):
            if args.quick or len(wish.sites) * wish.users > SIMULATED_WORK_MAX:
                fastest = plan = make_plan(wish)
            else:
                refined = refined_plan(wish)
                fastest, plan, simulation = refined.fastest, refined.plan, refined.simulated
    except ModelDoesNotFitError as refusal:
        print(json.dumps(refusal.report) if args.json else refusal)
        return refusal.exit_status
    helps = improvements(wish, fastest)
    best = Rated(plan=plan, simulation=simulation)
    hand = (
        None
        if by_hand is None
        else Rated(plan=by_hand, simulation=None if simulation is None else foretold(wish, by_hand))
    )
    without = None if args.cluster is None else without_each(wish, plan)
    if args.json:
        print(json.dumps({**report(wish, best, helps, hand), "absent": absent_report(without)}))
    else:
        print("\n".join([*plan_lines(wish, best, helps, hand), *absent_lines(without)]))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A plan, and the simulation that foretells its rate; without one the formula does."""

    plan: Plan
    simulation: Simulated | None

    @property
    def tokens_per_s(self) -> float:
        return self.plan.forecast.tokens_per_s if self.simulation is None else self.simulation.tokens_per_s


def _by_hand(args: argparse.Namespace, wish: PlanRequest) -> Plan | None:
    """The split of `--layers`, over all devices but one that `--head` added."""
    if args.layers is None:
        return None
    order = list(wish.sites)
    if len(args.layers) == len(order) - 1 and wish.head is not None:
        order = [each for each in order if each.name != wish.head]
    head = wish.heads[0] if wish.head is not None else order[0]
    return rate_split(wish, order, head, checked_split(args.layers, wish.shape.layers, len(order)))


# ------------------------------------------------------------------------------------------------------- JSON


def report(wish: PlanRequest, best: Rated, helps: list[Option], by_hand: Rated | None) -> dict[str, Any]:
    """What `--json` prints."""
    plan = best.plan
    return {
        "fits": True,
        "model": wish.shape.name,
        "precisions": list(wish.precisions),
        "context": wish.context,
        "users": wish.users,
        **_numbers(best),
        "not_used": _unused(wish, plan),
        "limits": limits(wish, plan),
        "would_help": [
            {"change": each.text, "tokens_per_s": _helped(best, each), "gain": each.gain} for each in helps
        ],
        "assumptions": assumptions(wish, plan),
        "by_hand": None if by_hand is None else {**_numbers(by_hand), "fits": _fits(by_hand.plan)},
    }


def _numbers(rated: Rated) -> dict[str, Any]:
    plan, simulation = rated.plan, rated.simulation
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
        "tokens_per_s": rated.tokens_per_s,
        "simulated": None
        if simulation is None
        else {
            "answers": len(simulation.tokens),
            "tokens": sum(simulation.tokens),
            "standard_error": simulation.error or None,
        },
        "formula_tokens_per_s": found.tokens_per_s,
        "plain_tokens_per_s": plan.plain.tokens_per_s,
        "nodes_per_slot": found.nodes,
        "slot_ms": 1000 * found.slot_s,
        "trip_ms": 1000 * found.trip_s,
        "missed": found.missed if plan.guesses else None,
    }


# ------------------------------------------------------------------------------------------------------- text


def plan_lines(wish: PlanRequest, best: Rated, helps: list[Option], by_hand: Rated | None) -> Iterator[str]:
    plan = best.plan
    users = "one user" if wish.users == 1 else f"{wish.users} users"
    yield (
        f"{wish.shape.name} in {plan.precision}, {users}, context {wish.context}: {len(plan.stages)} of "
        f"{len(wish.sites)} devices\n"
    )
    heads = f"{'layers':>9}{'weights':>10}{'cache':>10}{'in use':>10}{'of':>9}{'a slot':>8}"
    yield f"{'stage':<{NAME_WIDTH}}{heads}"
    for stage in plan.stages:
        layers = f"{stage.first}-{stage.end - 1}"
        sizes = "".join(
            f"{mib(size):>10}"
            for size in (stage.need.weight_bytes, stage.need.cache_bytes, stage.total_bytes)
        )
        room = f"{mib(stage.site.memory_bytes):>9}{1000 * stage.slot_s:>5.0f} ms"
        yield f"{stage.site.name:<{NAME_WIDTH}}{layers:>9}{sizes}{room}"
    alone = (
        f"no stage there, {mib(plan.head_bytes)} of {mib(plan.head.memory_bytes)}"
        if plan.is_head_free
        else "beside its stage"
    )
    yield f"head{' and drafter' if plan.guesses else ''} on {plan.head.name}: {alone}"
    unused = _unused(wish, plan)
    if unused:
        yield from textwrap.wrap(f"not used: {', '.join(unused)}", WIDTH)
    yield ""
    yield from _forecast_lines(wish, best)
    if helps:
        yield "\nwould help"
        for option in helps[:HELPS_SHOWN]:
            yield f"  {option.text:<50}{option.gain or 0:>+7.0%}{_helped(best, option):>7.3g} tokens/s"
    if by_hand is not None:
        share = by_hand.tokens_per_s / best.tokens_per_s
        yield f"\nby hand, {','.join(map(str, by_hand.plan.split.layers))}"
        yield f"  {by_hand.tokens_per_s:.3g} tokens/s, {share:.0%} of the plan's{_lacks(by_hand.plan)}"
    yield "\nassumed"
    yield from (f"  {line}" for line in assumptions(wish, plan))


def absent_report(without: Sequence[Without] | None) -> dict[str, Any] | None:
    """For each device of a cluster file that the plan uses what a head does while it is absent.

    `was_asked` says that none was asked whether it is there.
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
    return {"was_asked": False, "without": found}


def absent_lines(without: Sequence[Without] | None) -> Iterator[str]:
    """The same for people."""
    if without is None:
        return
    yield "\nabsent devices (none was asked whether it is there)"
    yield "  a head begins without one if the model fits the others, and takes it in later"
    for each in without:
        left = "nothing is left"
        if each.short_bytes:
            left = f"does not fit: the others lack {mib(each.short_bytes)}"
        if each.plan is not None:
            left = f"{each.plan.forecast.tokens_per_s:.3g} tokens/s, by formula"
        yield f"  without {each.device:<{NAME_WIDTH}}{left}"


def _helped(best: Rated, option: Option) -> float:
    """The rate with a change, whose gain the formula tells."""
    return best.tokens_per_s * (1 + (option.gain or 0.0))


def _forecast_lines(wish: PlanRequest, best: Rated) -> Iterator[str]:
    plan, simulation, found = best.plan, best.simulation, best.plan.forecast
    each = f", {best.tokens_per_s / wish.users:.3g} each" if wish.users > 1 else ""
    yield f"foretold: {best.tokens_per_s:.3g} tokens/s{each}"
    if simulation is not None and plan.guesses:
        noise = f" (standard error {simulation.error:.0%})" if simulation.error else ""
        yield (
            f"  simulated, {len(simulation.tokens)} answers of {FORETOLD_TOKENS} tokens{noise}; by formula "
            f"{found.tokens_per_s:.3g}"
        )
    if plan.guesses:
        yield f"  guessing pays: plain decoding would give {plan.plain.tokens_per_s:.3g}"
        slots = "1 slot" if plan.window == 1 else f"{plan.window} slots"
        yield f"  --method {DEFAULT}: some {found.nodes} nodes a slot, {slots} in flight"
    elif wish.drafter is not None:
        yield f"  guessing does not pay: --method {WITHOUT_GUESSES}"
    yield f"  a slot takes {1000 * found.slot_s:.3g} ms, a trip {1000 * found.trip_s:.3g} ms"
    yield "limited by"
    yield from (f"  {line}" for line in limits(wish, plan))


def assumptions(wish: PlanRequest, plan: Plan) -> list[str]:
    """What the forecast stands on."""
    found = [
        "each board does what its profile says; a tenth of its memory is its system's",
        f"links of {wish.network.default.bandwidth_mbps:g} Mbit/s and "
        f"{1000 * wish.network.default.delay_s:g} ms"
        + (f", {len(wish.network.pairs)} others as given" if wish.network.pairs else ""),
        f"{wish.typical_context} tokens of context on average",
    ]
    if plan.guesses and wish.drafter is not None:
        found.append(f"drafter {wish.drafter.name}, {wish.drafter.acceptance:.1%} of its best guesses right")
        if not plan.is_head_free:
            found.append("head and stage share a device: each takes twice as long there")
    return found


def _unused(wish: PlanRequest, plan: Plan) -> list[str]:
    used = {plan.head.name, *(stage.site.name for stage in plan.stages)}
    return [each.name for each in wish.sites if each.name not in used]


def _fits(plan: Plan) -> bool:
    return (
        all(stage.total_bytes <= stage.site.memory_bytes for stage in plan.stages)
        and plan.head_bytes <= plan.head.memory_bytes
    )


def _lacks(plan: Plan) -> str:
    short = [stage.site.name for stage in plan.stages if stage.total_bytes > stage.site.memory_bytes]
    return f"; does not fit {', '.join(short)}" if short else ""
