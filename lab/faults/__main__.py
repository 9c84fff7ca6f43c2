"""Fault schedules by the thousand, in virtual time: `python -m lab.faults --seeds 20000 --jobs 2`.

Each seed draws a cluster and what happens to it (`lab.faults.schedule`; docs/design/testing.md). No token may
ever be wrong, and once all is well again every answer must end, whole, and every device come back in time. A
seed that fails is printed with its command; `--seed N --story` tells what happened. Every rule that decides
(`core/head/head.py`, `stage.py`, `membership.py`, `forming.py`, `cluster/daemon.py`, `remote_drafter.py`)
counts how often it fired: in a run of `RULES_SEEDS` seeds or more one that never did is a failure, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from flowspec.bench.engine import interrupted_later, open_pool
from lab.command import Parser, run_command
from lab.faults.play import FaultError, Play
from lab.faults.schedule import draw
from lab.faults.tally import RULES, Tally, play

CHUNK = 25
REPORTED_EVERY = 1000
STORY_LINES = 400


def replay_command(seed: int) -> str:
    return f"python -m lab.faults --seed {seed} --story"


def story(seed: int, lines_max: int = STORY_LINES) -> list[str]:
    """What happened in a seed's run, line by line, up to its end or its failure."""
    run = Play(draw(seed))
    ending = "every answer is whole"
    try:
        run.run()
    except FaultError as error:
        ending = f"FAILED {error}"
    lines = [f"{at_s:9.3f}  {who:<10} {text}" for at_s, who, text in run.story]
    cut = [f"({len(lines) - lines_max} earlier lines left out)"] if len(lines) > lines_max else []
    return [*cut, *lines[-lines_max:], ending]


def command(args: argparse.Namespace) -> int:
    if args.seed is not None and args.story:
        lines = story(args.seed)
        print("\n".join(lines))
        return 1 if lines[-1].startswith("FAILED") else 0
    seeds = [args.seed] if args.seed is not None else list(range(args.first, args.first + args.seeds))
    started_s, total = time.monotonic(), Tally()
    with open_pool(args.jobs) as pool:
        with interrupted_later():
            tallies = pool.map(play, [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)])
        for tally in tallies:
            total.add(tally)
            if total.seeds % REPORTED_EVERY == 0:
                print(
                    f"{total.seeds} of {len(seeds)}, {len(total.failures)} failed",
                    file=sys.stderr,
                    flush=True,
                )
            for seed, text in tally.failures.items():
                print(f"seed {seed}: {text}\n  {replay_command(seed)}", file=sys.stderr, flush=True)
    report = {
        "seeds": total.seeds,
        "failed": sorted(total.failures),
        "pipelines": total.pipelines,
        "given_up": total.given_up,
        "answers": total.answers,
        "tokens": total.tokens,
        "faults": dict(sorted(total.faults.items())),
        "rules": {rule: total.fired[rule] for rule in RULES},
        "idle_rules": total.idle_rules,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    if args.json:
        print(json.dumps(report))
    else:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(total.faults.items()))
        print(
            f"{total.seeds} schedules, {len(total.failures)} failed; {total.answers} answers of "
            f"{total.tokens} tokens"
        )
        print(f"over {total.pipelines} pipelines in {report['seconds']} s; faults: {kinds}")
        print("rules that fired: " + ", ".join(f"{rule} {total.fired[rule]}" for rule in RULES))
    for rule in total.idle_rules:
        print(f"the rule {rule!r} never fired ({RULES[rule]}): nothing here tests it", file=sys.stderr)
    return 1 if total.failures or total.idle_rules else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.faults", __doc__)
    parser.whole("--seeds", 1000, "how many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default: 0)")
    parser.whole("--jobs", 2, "processes")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--story", action="store_true", help="with --seed: tell what happened")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
