"""Every method side by side in virtual time, with the bundled target and a real drafter, by domain and temperature.

Rates are tokens per unit of time, one unit being a stage's pass over one node (`testbed.virtual` says what all else costs). A
domain's rate is its tokens by its time after the first token; the last row is the harmonic mean of the domains. `*` marks
where `continuous` is not the best. `tree-sd tuned` is the best of a grid of trees for the temperature: all of the grid runs on
the first prompts of each domain (`--tune`), the best three of it on all. Every answer is compared with the plain one.

    python -m flowspec.testbed.compare [--temperatures 0,1] [--board jetson|pi] [--stages 4] [--cache FILE] [--json]
    python -m flowspec.testbed.compare --check-floor     # with a useless drafter; status 1 below 0.95 of `ar`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.testbed.command import Parser, progress, reals, run_command, show, whole, wholes
from flowspec.testbed.guesses import RANDOM, Drafting, open_drafting
from flowspec.testbed.plain import Case, first_of_each
from flowspec.testbed.virtual import OVERALL, Learnt, Pipeline, Run, Setup, add_world_arguments, cases_of, rates, run

OURS = "continuous"
TUNED = "tree-sd tuned"
FIXED = ("ar", "chunk-pp", "pipedec", "flowspec-paper", OURS)
FINALISTS = 3
FLOOR = 0.95
COLUMNS = ("ar", TUNED, "chunk-pp", "pipedec", "flowspec-paper", OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All runs at one temperature by the name of the method; `grid` are the rates of the tuned method's trees on its part of the prompts."""

    temperature: float
    runs: dict[str, list[Run]]
    grid: dict[str, float]

    @property
    def tuned(self) -> Setup:
        return self.runs[TUNED][0].setup

    def rates(self) -> dict[str, dict[str, float]]:
        """By method and domain."""
        return {name: rates(self.runs[name]) for name in COLUMNS if name in self.runs}


def grid_of(nodes: Sequence[int], depths: Sequence[int]) -> list[Setup]:
    return [
        Setup(name=f"{count} nodes, depth {depth}", method="tree-sd", options={"nodes": count, "depth": depth})
        for depth in depths
        for count in nodes
    ]


def compare(
    pipeline: Pipeline, drafting: Drafting, cases: Sequence[Case], methods: Sequence[str], grid: Sequence[Setup], tune: int
) -> Comparison:
    """Runs cases of one temperature; `tune` prompts of each domain (with the first seed) decide which trees run on all."""
    fixed = [Setup(name=name, method=name) for name in methods]
    first_seed = [case for case in cases if case.sampling == cases[0].sampling]
    trial = set(first_of_each(first_seed, tune)) if len(grid) > FINALISTS else set()
    rest = [case for case in cases if case not in trial]
    found: dict[str, list[Run]] = defaultdict(list)
    learnt: dict[str, Learnt] = defaultdict(Learnt)
    trees = {setup.name: setup for setup in grid}
    finals = list(trees)
    total = len(trial) * (len(fixed) + len(grid)) + len(rest) * (len(fixed) + min(FINALISTS, len(grid)))
    with progress(f"temperature {cases[0].sampling.temperature:g}", total) as step:
        for case in sorted(cases, key=lambda case: case not in trial):
            if len(finals) > FINALISTS and case not in trial:
                finals = sorted(trees, key=lambda name: -rates(found[name])[OVERALL])[:FINALISTS]
            make = drafting.begin(case)
            for setup in (*fixed, *(trees[name] for name in finals)):
                drafter = None if setup.method == "ar" else make()
                found[setup.name].append(run(pipeline, setup, case, drafter, learnt[setup.name]))
                step(f"T={case.sampling.temperature:g} {case.domain}, {setup.method}")
    if not any(one.time for runs in found.values() for one in runs):
        raise InputError("no answer has a second token, so there is no rate; give more --tokens or other --prompts")
    best = max((name for name in trees if len(found[name]) == len(cases)), key=lambda name: rates(found[name])[OVERALL], default=None)
    by_method = {name: found[name] for name in methods}
    return Comparison(
        temperature=cases[0].sampling.temperature,
        runs=by_method if best is None else {**by_method, TUNED: found[best]},
        grid={name: rates([one for one in found[name] if not trial or one.case in trial])[OVERALL] for name in trees},
    )


def totals(runs: Sequence[Run], stages: int) -> dict[str, float]:
    """What the statistics of several answers say together; counts are per token of the answers."""
    found = [one.statistics for one in runs]
    tokens = sum(each.tokens for each in found)
    segments = sum(each.segments for each in found)
    followed = sum(each.tokens_in_flight for each in found)
    busy = sum(sum(each.compute_s) for each in found)
    time = sum(each.last_token_s - each.submitted_s for each in found)

    def per(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    return {
        "tokens_per_commit": per(tokens, sum(each.committing_segments for each in found)),
        "share_in_flight": per(followed, sum(max(0, each.tokens - 1) for each in found)),
        "stage_busy": per(busy, stages * time),
        "window": per(sum(each.windows for each in found), segments),
        "acceptance_length": per(tokens, segments),
        "calibration_error": per(sum(each.calibration_error for each in found), len(found)),
        "nodes_drafted": per(sum(each.nodes_drafted for each in found), tokens),
        "nodes_sent": per(sum(each.nodes_sent for each in found), tokens),
        "dropped_alive": per(sum(each.dropped_alive for each in found), tokens),
        "dead_in_queue": per(sum(each.dead_in_queue for each in found), tokens),
        "dead_between_layers": per(sum(each.dead_between_layers for each in found), tokens),
        "dead_late": per(sum(each.dead_late for each in found), tokens),
    }


STATISTICS = {
    "tokens_per_commit": "S",
    "share_in_flight": "rho",
    "stage_busy": "busy",
    "window": "window",
    "acceptance_length": "accepted",
    "calibration_error": "calib.",
    "nodes_drafted": "drafted",
    "nodes_sent": "sent",
    "dropped_alive": "unused",
    "dead_in_queue": "queue",
    "dead_between_layers": "layers",
    "dead_late": "late",
}


def report(comparison: Comparison, stages: int) -> dict[str, Any]:
    """One temperature as `--json` shows it."""
    by_method = comparison.rates()
    ours = comparison.runs.get(OURS, [])
    domains = list(dict.fromkeys(one.case.domain for one in ours))
    return {
        "temperature": comparison.temperature,
        "answers": len(ours),
        "tuned": dict(comparison.tuned.options) if TUNED in comparison.runs else None,
        "grid": comparison.grid,
        "rates": by_method,
        "statistics": {domain: totals([one for one in ours if one.case.domain == domain], stages) for domain in domains}
        | {"all": totals(ours, stages)},
    }


def show_comparison(found: dict[str, Any]) -> None:
    by_method = found["rates"]
    names = [name for name in COLUMNS if name in by_method]
    others = [name for name in names if name != OURS]
    rows = []
    for domain, ours in by_method[OURS].items():
        best = max(others, key=lambda name: by_method[name].get(domain, 0.0))
        ratio = ours / by_method[best][domain]
        mark = "" if ratio >= 1 else " *"
        rows.append([domain, *(by_method[name].get(domain) for name in names), f"{ratio:.3f}{mark}", best])
    tuned = f"; {TUNED}: {found['tuned']['nodes']} nodes, depth {found['tuned']['depth']}" if found["tuned"] else ""
    title = f"temperature {found['temperature']:g}, {found['answers']} answers, tokens per unit of time{tuned}"
    show(title, ["domain", *names, "ratio", "to the best other"], rows)
    show(
        f"{OURS} at temperature {found['temperature']:g}: what happened (from `drafted` on per token)",
        ["domain", *STATISTICS.values()],
        [[domain, *(values[name] for name in STATISTICS)] for domain, values in found["statistics"].items()],
    )


def check_floor(comparisons: Sequence[Comparison]) -> bool:
    """Whether `continuous` keeps the promised share of `ar`; says so."""
    kept = True
    for comparison in comparisons:
        by_method = comparison.rates()
        ratios = {domain: rate / by_method["ar"][domain] for domain, rate in by_method[OURS].items()}
        overall = ratios.pop(OVERALL)
        worst = min(ratios, key=lambda domain: ratios[domain])
        kept = kept and overall >= FLOOR
        verdict = "kept" if overall >= FLOOR else "BROKEN"
        print(
            f"temperature {comparison.temperature:g}: {OURS} / ar {overall:.3f}, least {ratios[worst]:.3f} ({worst}); floor {FLOOR} {verdict}",
            file=sys.stderr,
        )
    return kept


def command(args: argparse.Namespace) -> int:
    target = ModelFiles(BUNDLED)
    drafter = args.drafter or (RANDOM if args.check_floor else BUNDLED)
    drafting = open_drafting(drafter, target, coupled=not args.uncoupled)
    pipeline = Pipeline(stages=args.stages, board=args.board, context=target.config().max_position_embeddings)
    cases = cases_of(args, target, args.temperatures)
    methods, grid = (("ar", OURS), []) if args.check_floor else (FIXED, grid_of(args.nodes, args.depths))
    comparisons = []
    for temperature in args.temperatures:
        alike = [case for case in cases if case.sampling.temperature == temperature]
        comparisons.append(compare(pipeline, drafting, alike, methods, grid, args.tune))
    found = [report(comparison, args.stages) for comparison in comparisons]
    if args.json:
        about = {"world": "simulated", "board": args.board, "stages": args.stages, "drafter": drafter, "coupled": not args.uncoupled}
        print(json.dumps({**about, "tokens": args.tokens, "temperatures": found}))
    else:
        coupling = ", uncoupled" if args.uncoupled else ""
        print(f"simulated: {args.stages} stages, {args.board}-like, drafter {drafter}{coupling}, answers of up to {args.tokens} tokens")
        for each in found:
            show_comparison(each)
    return 0 if not args.check_floor or check_floor(comparisons) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("compare", __doc__)
    add_world_arguments(parser)
    parser.add_argument("--temperatures", type=reals, default=(0.0, 1.0), metavar="0,1", help="default: 0,1")
    parser.add_argument(
        "--uncoupled", action="store_true", help="the drafter ranks without the noise of the sampler, as published methods do"
    )
    parser.add_argument("--nodes", type=wholes, default=(8, 16, 24, 32, 48), metavar="8,16", help="tree-sd's grid: trees of so many nodes")
    parser.add_argument("--depths", type=wholes, default=(3, 5, 7), metavar="3,5", help="tree-sd's grid: and of such depths")
    parser.add_argument(
        "--tune", type=whole, default=2, metavar="N", help="prompts of each domain for the whole grid (default: %(default)s)"
    )
    parser.add_argument("--check-floor", action="store_true", help="only `continuous` beside `ar`, with a useless drafter")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
