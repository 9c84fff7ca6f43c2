"""What the coupled noise is worth: tokens per segment with the same nodes, drafted with the sampler's own noise and without it.

At temperature 1, with the bundled pair in virtual time, for trees of one size in one segment (`tree-sd`) and for the segments of
`continuous` of at most so many nodes; temperature 0 stands beside it. Tokens are those after the first of each answer, a stop token
counted, segments those after the prompt. Totals are all tokens by all segments. Every answer is compared with the plain one.

    python -m flowspec.testbed.coupling [--trees 16,32] [--depth 5] [--segments 16] [--board jetson|pi] [--cache FILE] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.testbed.command import Parser, progress, run_command, show, whole, wholes
from flowspec.testbed.guesses import Drafting, open_drafting
from flowspec.testbed.plain import Case
from flowspec.testbed.virtual import Pipeline, Run, Setup, add_world_arguments, cases_of, run

TOTAL = "all"
GREEDY, PLAIN, COUPLED = "T=0", "T=1 plain", "T=1 coupled"


def setups_of(trees: Sequence[int], depth: int, segments: Sequence[int]) -> list[Setup]:
    """The methods, each with a fixed number of nodes for a segment."""
    return [
        *(Setup(name=f"tree-sd, {nodes} nodes", method="tree-sd", options={"nodes": nodes, "depth": depth}) for nodes in trees),
        *(Setup(name=f"continuous, {nodes} nodes", method="continuous", options={"nodes": nodes}) for nodes in segments),
    ]


def per_segment(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens per segment by domain, and of all."""
    found = {}
    for domain in (*dict.fromkeys(one.case.domain for one in runs), TOTAL):
        some = [one for one in runs if domain in (one.case.domain, TOTAL)]
        segments = sum(one.statistics.segments for one in some)
        if segments:
            found[domain] = sum(one.tokens for one in some) / segments
    return found


def measure(
    pipeline: Pipeline, draftings: Mapping[bool, Drafting], cases: Sequence[Case], setups: Sequence[Setup]
) -> dict[str, dict[str, dict[str, float]]]:
    """By setup, by way of drafting, and by domain; `draftings` are the drafter without and with coupling."""
    runs: dict[tuple[str, str], list[Run]] = {}
    sampled = [case for case in cases if case.sampling.temperature > 0]
    passes = ((GREEDY, [case for case in cases if case not in sampled], True), (PLAIN, sampled, False), (COUPLED, sampled, True))
    with progress("answers", sum(len(some) for _, some, _ in passes) * len(setups)) as step:
        for way, some, coupled in passes:
            for case in some:
                make = draftings[coupled].begin(case)
                for setup in setups:
                    runs.setdefault((setup.name, way), []).append(run(pipeline, setup, case, make()))
                    step(f"{way}, {setup.name}")
    return {setup.name: {way: per_segment(runs[setup.name, way]) for way, _, _ in passes} for setup in setups}


def command(args: argparse.Namespace) -> int:
    if args.temperature <= 0:
        raise InputError(f"--temperature: expected more than 0, where there is noise to couple, got {args.temperature:g}")
    target = ModelFiles(BUNDLED)
    drafter = args.drafter or BUNDLED
    ways = {is_coupled: open_drafting(drafter, target, coupled=is_coupled) for is_coupled in (False, True)}
    pipeline = Pipeline(stages=args.stages, board=args.board, context=target.config().max_position_embeddings)
    cases = cases_of(args, target, (0.0, args.temperature))
    found = measure(pipeline, ways, cases, setups_of(args.trees, args.depth, args.segments))
    if args.json:
        about = {"world": "simulated", "board": args.board, "stages": args.stages, "drafter": drafter, "temperature": args.temperature}
        print(json.dumps({**about, "tokens_per_segment": found}))
        return 0
    print(f"simulated: {args.stages} stages, {args.board}-like, drafter {drafter}, answers of up to {args.tokens} tokens")
    for name, by_way in found.items():
        rows = []
        for domain in by_way[COUPLED]:
            greedy, plain, coupled = (by_way[way].get(domain) for way in (GREEDY, PLAIN, COUPLED))
            gain = f"{coupled / plain:.2f}" if plain and coupled else None
            rows.append([domain, greedy, plain, coupled, gain])
        show(f"{name}: tokens per segment", ["domain", GREEDY, PLAIN, COUPLED, "coupled / plain"], rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("coupling", __doc__)
    add_world_arguments(parser)
    parser.add_argument("--trees", type=wholes, default=(16, 32), metavar="16,32", help="nodes of tree-sd's tree (default: 16,32)")
    parser.add_argument("--depth", type=whole, default=5, metavar="N", help="depth of tree-sd's tree (default: %(default)s)")
    parser.add_argument("--segments", type=wholes, default=(16,), metavar="16", help="nodes of a segment of continuous (default: 16)")
    parser.add_argument("--temperature", type=float, default=1.0, help="the temperature beside 0 (default: %(default)g)")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
