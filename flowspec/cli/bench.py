"""Run an experiment: methods x prompts x testbeds, on real, emulated or simulated devices.

Writes results.jsonl while it runs, then summary.json, summary.md, speedup.png, timeline.png and trace.json,
and of virtual time a recording of an answer by each of a few methods; with users loads.jsonl, then
summary.json, summary.md and load.png; with chains of models chains.png, too. Interrupted, it goes on where it
was when it is started again. Exit status 1 if an answer differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flowspec.bench import chain_report, chains, load_report, load_summary, plots, timeline
from flowspec.bench.bench import (
    ANSWERS,
    LOADS,
    TUNED_FILE,
    Step,
    in_order,
    open_out,
    read_cases,
    run_simulated,
    total,
    warm_up_cases,
)
from flowspec.bench.config import (
    AR,
    CLUSTER,
    OURS,
    SIMULATED,
    SYNTHETIC,
    USERS_MAX,
    WORLDS,
    Bench,
    Setup,
    Testbed,
)
from flowspec.bench.drafting import RANDOM
from flowspec.bench.experiments import find_experiment, pick_setups, read_experiment
from flowspec.bench.load import read_loads
from flowspec.bench.load_runs import run_loads
from flowspec.bench.load_runs import total as load_total
from flowspec.bench.outcome import WRONG, Record
from flowspec.bench.plain import PlainCase, make_samplings
from flowspec.bench.report import markdown, show
from flowspec.bench.simulated import stages_of
from flowspec.bench.summary import PAPER, REFERENCES, summarise
from flowspec.bench.trace import Trace
from flowspec.bench.tune import Start, tune
from flowspec.bench.validation import show_validation, validate
from flowspec.bench.virtual_runs import VirtualRuns
from flowspec.cli.options import number_list, positive, positives, reals
from flowspec.cli.terminal import note
from flowspec.core.protocol.limits import DRAFTERS_MAX
from flowspec.draft.kinds import NONE, WORDS, check_drafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.watch.recording import About, record_document, write_recording
from flowspec.watch.spelling import Decode, as_numbers

DEFAULT = "paper-bundled"
JOBS_MAX = 64
DRAWN = (AR, *REFERENCES, *PAPER, OURS)
"""Methods that are worth a panel of the timeline, if the experiment has them; the best known and ours."""
PANELS_MAX = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--experiment",
        default=DEFAULT,
        metavar="FILE",
        help="experiment file, or a shipped one's name (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where results go and are continued (default: results/NAME-WORLD)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="first find each method's best parameters, on other prompts; writes tuned.toml",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=min(JOBS_MAX, os.cpu_count() or 1),
        metavar="N",
        help="processes in virtual time (default: all cores)",
    )
    group = parser.add_argument_group("instead of what the experiment says")
    group.add_argument(
        "--world",
        choices=WORLDS,
        help="simulated: virtual time; emulated: real processes, padded; cluster: real devices",
    )
    group.add_argument("--testbeds", metavar="NAME,...", help="only these of the experiment's testbeds")
    group.add_argument(
        "--methods",
        metavar="NAME,...",
        help="only these; a method that the experiment lacks runs with its defaults",
    )
    group.add_argument("--model", "-m", metavar="PATH-OR-HUB-ID", help="the model that answers")
    group.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help=(
            "bundled or another bundled model by name, a folder or hub id of a small model, "
            f"{', '.join(WORDS[:-1])}, {RANDOM} or {WORDS[-1]}; may be repeated"
        ),
    )
    group.add_argument(
        "--prompts",
        action="append",
        metavar="FILE",
        help="jsonl in Spec-Bench form, or `shipped`; may be repeated",
    )
    group.add_argument("--limit", type=positive, metavar="N", help="prompts per file")
    group.add_argument("--temperatures", type=reals, metavar="0,1", help="sampling temperatures")
    group.add_argument("--seeds", type=number_list, metavar="1,2", help="seeds, at temperatures above 0")
    group.add_argument(
        "--repeat", type=positive, metavar="N", help="answers of each kind (virtual time needs one)"
    )
    group.add_argument(
        "--users",
        type=positives,
        metavar="1,4,16",
        help="loads: so many users, who each ask the next prompt when one is answered",
    )
    group.add_argument(
        "--answers",
        type=positive,
        metavar="N",
        help="answers of each load, of all its users (default: each prompt once)",
    )
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer")
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--cluster", type=Path, metavar="FILE.toml", help="the devices of this cluster file (world cluster)"
    )
    where.add_argument("--local", type=positive, metavar="N", help="N local processes (world cluster)")


def run(args: argparse.Namespace) -> int:
    bench = pick_experiment(args)
    out = args.out or Path("results") / f"{bench.name}-{bench.world}"
    if args.tune:
        bench = _tuned(bench, out, args)
    done = open_out(bench, out)
    cases = read_cases(bench, out / ANSWERS)
    if bench.users:
        return _loads(bench, cases, out, args)
    records, traces = _run(bench, cases, done, out, args)
    records = in_order(bench, cases, records)
    summary: dict[str, Any] = summarise(bench.name, bench.world, records)
    if bench.published:
        summary["validation"] = validate(bench, records)
    if tables := chains.compare(bench, records):
        summary["chains"] = tables
        chain_report.draw(bench, records, out / "chains.png")
    _write(bench, cases, summary, traces, out)
    if args.json:
        print(json.dumps(summary))
    else:
        show(summary)
        chain_report.show(summary.get("chains", ()), bench.world)
        if bench.published:
            show_validation(summary["validation"])
        note(f"results, tables and pictures are in {out}")
    return _verdict(records)


def _loads(bench: Bench, cases: Sequence[PlainCase], out: Path, args: argparse.Namespace) -> int:
    done = read_loads(out / LOADS)
    with _bar(args, "loads") as (start, step):
        start(load_total(bench, cases), len(done))
        records = run_loads(bench, cases, done, out, args.jobs, step)
    summary = load_summary.summarise(bench.name, bench.world, records)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(load_report.markdown(summary), "utf-8")
    load_report.draw(summary, out / "load.png")
    if args.json:
        print(json.dumps(summary))
    else:
        load_report.show(summary)
        note(f"results, tables and pictures are in {out}")
    return 1 if summary["wrong"] else 0


def _verdict(records: Sequence[Record]) -> int:
    wrong = [record for record in records if record.agreement == WRONG]
    for record in wrong[:5]:
        where = (
            f"{record.testbed or record.world}, prompt {record.prompt_id}, temperature "
            f"{record.temperature:g}, seed {record.seed}"
        )
        note(f"WRONG: {record.method} on {where}: not what plain decoding says")
    return 1 if wrong else 0


def pick_experiment(args: argparse.Namespace) -> Bench:
    """The experiment with what the flags say instead; raises `InputError`."""
    bench = read_experiment(find_experiment(args.experiment))
    changes: dict[str, Any] = {
        "world": args.world,
        "model": args.model,
        "drafters": None if args.drafter is None else tuple(dict.fromkeys(args.drafter)),
        "prompts": tuple(args.prompts) if args.prompts else None,
        "limit": args.limit,
        "temperatures": args.temperatures and tuple(dict.fromkeys(args.temperatures)),
        "seeds": None if args.seeds is None else tuple(dict.fromkeys(args.seeds)),
        "repeat": args.repeat,
        "new_tokens": args.max_new_tokens,
        "cluster": args.cluster,
        "local": args.local,
        "users": None if args.users is None else tuple(sorted(set(args.users))),
        "answers": args.answers,
    }
    if args.model not in (None, SYNTHETIC) and bench.is_synthetic and args.drafter is None:
        changes["drafters"] = (BUNDLED,)
    bench = replace(bench, **{name: value for name, value in changes.items() if value is not None})
    if args.local is not None:
        bench = replace(bench, cluster=None)
    if args.methods is not None:
        bench = replace(bench, setups=pick_setups(bench.setups, args.methods.split(",")))
    if args.testbeds is not None:
        bench = replace(bench, testbeds=_pick_testbeds(bench, args.testbeds.split(",")))
    if bench.world == CLUSTER and (args.cluster or args.local or len(bench.testbeds) > 1):
        bench = replace(bench, testbeds=())  # the experiment's boards are not the ones that are there
    _check(bench, args)
    return bench


def _pick_testbeds(bench: Bench, names: Sequence[str]) -> tuple[Testbed, ...]:
    known = [testbed.name for testbed in bench.testbeds]
    for name in names:
        if name not in known:
            raise InputError(f"--testbeds: expected names among {'; '.join(known)}, got {name!r:.80}")
    return tuple(testbed for testbed in bench.testbeds if testbed.name in names)


def _check(bench: Bench, args: argparse.Namespace) -> None:
    """Refuses what cannot be run, before anything is started or written."""
    if any(seed < 0 for seed in bench.seeds):
        raise InputError(f"--seeds: expected whole numbers from 0, got {min(bench.seeds)}")
    make_samplings(bench.temperatures, bench.seeds)
    if bench.is_synthetic and bench.acceptance == 0:
        raise InputError("--model: synthetic is for experiments that say its `acceptance`")
    for flag, value in (("--drafter", args.drafter), ("--prompts", args.prompts)):
        if bench.is_synthetic and value is not None:
            raise InputError(
                f"{flag}: expected none with model synthetic, which draws prompts and guesses by chance"
            )
    for name in () if bench.is_synthetic else bench.drafters:
        if name != RANDOM:
            check_drafter(name)
    _check_drafters(bench)
    if bench.world != CLUSTER and (args.cluster or args.local):
        raise InputError(
            f"--cluster and --local are for --world cluster; the experiment's world is {bench.world}"
        )
    if bench.world != CLUSTER and not bench.testbeds:
        raise InputError(
            f"--world {bench.world}: expected an experiment with a testbed, got {bench.name!r} without one"
        )
    if bench.testbeds and not any(
        setup.runs_on(testbed.name) for testbed in bench.testbeds for setup in bench.setups
    ):
        raise InputError(
            "--methods and --testbeds: expected a method that is run on one of the testbeds, got none"
        )
    if bench.world == SIMULATED and bench.repeat > 1:
        raise InputError(
            f"--repeat: virtual time gives the same figures every time; expected 1, got {bench.repeat}"
        )
    if bench.users and bench.world != SIMULATED:
        raise InputError(
            f"--users: loads are run in virtual time; expected --world simulated, got {bench.world}"
        )
    if bench.users and max(bench.users) > USERS_MAX:
        raise InputError(f"--users: expected at most {USERS_MAX} at once, got {max(bench.users)}")
    if args.tune and len(bench.drafters) > 1:
        raise InputError(
            "--tune finds parameters for one drafter; expected an experiment with one, got "
            f"{', '.join(bench.drafters)}"
        )
    if args.tune and bench.users:
        raise InputError("--tune works on single answers: expected no --users")
    if bench.answers and not bench.users:
        raise InputError("--answers is for loads: expected --users, too")
    if args.tune and bench.world != SIMULATED:
        raise InputError(f"--tune works in virtual time: expected --world simulated, got {bench.world}")
    if args.jobs > JOBS_MAX:
        raise InputError(f"--jobs: expected at most {JOBS_MAX}, got {args.jobs}")


def _check_drafters(bench: Bench) -> None:
    """Refuses what flags can make of several drafters; a file's own are checked as it is read."""
    if NONE in bench.drafters and len(bench.drafters) > 1:
        raise InputError(f"--drafter: expected {NONE} alone, got {', '.join(bench.drafters)}")
    if len(bench.drafters) > DRAFTERS_MAX:
        raise InputError(f"--drafter: expected at most {DRAFTERS_MAX}, got {len(bench.drafters)}")
    for setup in bench.setups:
        missing = [name for name in setup.drafters or () if name not in bench.drafters]
        if missing:
            raise InputError(
                f"--drafter: method {setup.name!r} of the experiment needs {missing[0]!r}, got "
                f"{', '.join(bench.drafters)}"
            )


def _tuned(bench: Bench, out: Path, args: argparse.Namespace) -> Bench:
    """The experiment with the best parameters of each method on each testbed added."""
    open_out(bench, out, to_be_tuned=True)
    with _bar(args, "tuning") as (start, step):
        found = tune(bench, out / TUNED_FILE, args.jobs, start, step)
    names = {setup.name for setup in found}
    return replace(bench, setups=(*(setup for setup in bench.setups if setup.name not in names), *found))


def _run(
    bench: Bench, cases: Sequence[PlainCase], done: Sequence[Record], out: Path, args: argparse.Namespace
) -> tuple[list[Record], dict[str, Trace]]:
    with _bar(args, bench.world) as (start, step):
        start(total(bench, cases), len(done))
        if bench.world == SIMULATED:
            return run_simulated(bench, cases, done, out, args.jobs, step), {}
        from flowspec.bench.live import run_live  # sockets and processes, which virtual time does without

        return run_live(bench, cases, done, out, step, lambda text, share: None)


@contextlib.contextmanager
def _bar(args: argparse.Namespace, text: str) -> Iterator[tuple[Start, Step]]:
    """A bar on standard error with what is done and the time left, from the call of `start(total, done)` on;
    and a `Step`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=args.json or not console.is_terminal)
    task = bar.add_task(text, total=None)

    def start(count: int, done: int) -> None:
        bar.update(task, total=count, completed=done)
        bar.start()

    try:
        yield start, lambda name, count: bar.update(task, advance=count, description=f"{name:.40}")
    finally:
        bar.stop()


def _write(
    bench: Bench, cases: Sequence[PlainCase], summary: dict[str, Any], traces: dict[str, Trace], out: Path
) -> None:
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(
        markdown(summary) + chain_report.markdown(summary.get("chains", ()), bench.world), "utf-8"
    )
    plots.speedup(summary, out / "speedup.png")
    if bench.world == SIMULATED:
        traces = _recorded(bench, cases, out)
    if traces:
        stages = max(len(trip.hops) for trace in traces.values() for trip in trace.trips)
        timeline.draw(traces, out / "timeline.png", title=f"{bench.name} ({bench.world})", stages=stages)
        (out / "trace.json").write_text(json.dumps(timeline.chrome(traces)), "utf-8")


def _recorded(bench: Bench, cases: Sequence[PlainCase], out: Path) -> dict[str, Trace]:
    """One answer of the first testbed with each of a few methods: the longest at the first temperature.
    Writes a recording of each, too."""
    testbed = bench.testbeds[0]
    here = [setup for setup in bench.setups if setup.runs_on(testbed.name)]
    chosen = [setup for name in DRAWN for setup in here if setup.name == name]
    drawn: list[Setup] = (chosen if len(chosen) > 1 else here)[-PANELS_MAX:]
    case = max(
        (case for case in cases if case.sampling.temperature == bench.temperatures[0]),
        key=lambda case: len(case.answer),
    )
    runs = VirtualRuns(bench, warm_up_cases(cases))
    decode = _decode(bench)
    traces = {}
    for setup in drawn:
        run = runs.recorded(testbed, setup, case, decode)
        about = About(
            world=SIMULATED,
            model=bench.model,
            method=setup.name,
            drafters=bench.drafters_of(setup),
            stages=stages_of(testbed),
        )
        slug = re.sub("[^a-z0-9]+", "-", setup.name.lower()).strip("-")
        write_recording(out / f"recording-{slug}.json", record_document(about, run.frames))
        traces[setup.name] = run.trace
    return traces


def _decode(bench: Bench) -> Decode:
    """What tokens of the experiment's model read as."""
    if bench.is_synthetic or not (files := ModelFiles(bench.model)).has_tokenizer:
        return as_numbers
    from flowspec.model.text import Tokenizer  # which takes seconds to import

    return Tokenizer(files).decode
