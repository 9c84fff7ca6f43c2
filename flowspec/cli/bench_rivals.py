"""`flowspec bench` with an experiment of rivals: its flags, its folder, what it writes and prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from msgspec.structs import replace

from flowspec.bench import plots, rival_report
from flowspec.bench.bench import RESULTS
from flowspec.bench.console import progress
from flowspec.bench.experiments import check_names
from flowspec.bench.out_folder import open_folder
from flowspec.bench.outcome import read_records
from flowspec.bench.rival_experiment import RivalExperiment, read_rivals
from flowspec.bench.rival_runs import RivalRecord, run_rivals, total
from flowspec.bench.setting import command_of
from flowspec.cli.bench_request import JOBS_MAX
from flowspec.cli.terminal import note
from flowspec.errors import InputError

OTHERS = (
    "world",
    "methods",
    "model",
    "drafter",
    "prompts",
    "profile",
    "acceptance",
    "limit",
    "temperatures",
    "seeds",
    "repeat",
    "users",
    "answers",
    "max_new_tokens",
    "cluster",
    "local",
    "tune",
    "nothing_learnt",
)
"""Flags that such an experiment has no use for."""


def run_rival_bench(args: argparse.Namespace, path: Path) -> int:
    bench = _picked(args, read_rivals(path))
    if not args.no_plots and not plots.can_draw():
        raise InputError(f"{plots.NEEDED}; --no-plots goes on without")
    out = args.out or Path("results") / f"{bench.name}-simulated"
    open_folder(bench, out, command_of(args.words), results=(RESULTS,))
    done = read_records(out / RESULTS, RivalRecord)
    try:
        with progress("starting processes", total(bench), len(done), quiet=args.json) as step:
            records = run_rivals(bench, done, out, args.jobs, step)
    except KeyboardInterrupt:
        kept = f"{len(read_records(out / RESULTS, RivalRecord))} of {total(bench)} answers in {out}"
        raise KeyboardInterrupt(f"kept {kept}; go on with: {command_of(args.words)}") from None
    summary = rival_report.summarise(bench, records)
    summary["command"] = command_of(args.words)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(rival_report.markdown(summary), "utf-8")
    if not args.no_plots:
        rival_report.draw(summary, out)
    if args.json:
        print(json.dumps(summary))
    else:
        rival_report.show(summary)
        note(f"tables: {out}/summary.md (plots, a board kind each, and all it is made of are beside it)")
    return 0


def _picked(args: argparse.Namespace, bench: RivalExperiment) -> RivalExperiment:
    for name in OTHERS:
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{flag}: expected none with an experiment of rivals, which takes --testbeds, --out, --jobs, "
                "--json and --no-plots"
            )
    if args.jobs > JOBS_MAX:
        raise InputError(f"--jobs: expected at most {JOBS_MAX}, got {args.jobs}")
    if args.testbeds is None:
        return bench
    names, known = args.testbeds.split(","), [testbed.name for testbed in bench.testbeds]
    check_names("--testbeds", names, known)
    return replace(
        bench,
        testbeds=tuple(testbed for testbed in bench.testbeds if testbed.name in names),
        figures=tuple(each for each in bench.figures if each.testbed in names),
    )
