"""Run an experiment: methods x prompts x testbeds, on real, emulated or simulated devices.

Writes results.jsonl while it runs, then report.html, summary.json, summary.md, speedup.png, timeline.png and
trace.json, and of virtual time a recording of an answer by each of a few methods; with users loads.jsonl,
then report.html, summary.json, summary.md and load.png, or steps.png where the load changes in steps; with
chains of models chains.png, too; of rivals summary.json, summary.md and a plot for each kind of boards.
Interrupted, it goes on where it was when it is started again. Exit status 1 if an answer differs from plain
decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flowspec.bench import (
    chain_report,
    chains,
    load_report,
    load_steps_report,
    load_steps_runs,
    load_steps_summary,
    load_summary,
    plain,
    plots,
    timeline,
    validation,
)
from flowspec.bench.bench import (
    ANSWERS,
    LOADS,
    RESULTS,
    TUNED_FILE,
    in_order,
    open_out,
    read_cases,
    run_simulated,
    total,
    warm_up_cases,
)
from flowspec.bench.config import AR, CLUSTER, EMULATED, OURS, SIMULATED, WORLDS, Bench, Setup
from flowspec.bench.console import progress
from flowspec.bench.drafting import RANDOM
from flowspec.bench.experiments import FOLDER, find_experiment
from flowspec.bench.html_report import write_report
from flowspec.bench.load import LoadRecord
from flowspec.bench.load_runs import run_loads
from flowspec.bench.load_runs import total as load_total
from flowspec.bench.load_steps import StepsRecord
from flowspec.bench.outcome import WRONG, Record, read_records
from flowspec.bench.plain import PlainCase
from flowspec.bench.report import few, markdown, show
from flowspec.bench.rival_experiment import is_of_rivals
from flowspec.bench.setting import command_of, setting_of
from flowspec.bench.simulated import stages_of
from flowspec.bench.summary import PAPER, REFERENCES, first_of, summarise
from flowspec.bench.trace import Trace
from flowspec.bench.tune import todo_of, tune
from flowspec.bench.tune import total as tuning_total
from flowspec.bench.virtual_runs import VirtualRuns
from flowspec.cli.bench_request import DEFAULT, JOBS_MAX, kinder, pick_experiment
from flowspec.cli.bench_rivals import run_rival_bench
from flowspec.cli.options import drafter_names, number_list, positive, positives, reals
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.draft.kinds import WORDS
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import ModelFiles
from flowspec.plan.tables import shipped_files
from flowspec.watch.detokenizer import Decode, as_numbers
from flowspec.watch.recording import About, record_document, write_recording

DRAWN = ((AR,), REFERENCES, PAPER, (OURS,))
"""What is worth a panel of the timeline: of each the first that the experiment has."""
PANELS_MAX = 4
STARTING = {
    SIMULATED: "starting processes",
    EMULATED: "starting local daemons",
    CLUSTER: "connecting to the devices",
}
"""What is under way before the first answer, by world."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--experiment",
        default=DEFAULT,
        metavar="NAME-OR-FILE",
        help=f"a file, or one of {', '.join(sorted(shipped_files(FOLDER)))} (default: %(default)s)",
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
        help=Rare("processes in virtual time (default: all cores)"),
    )
    parser.add_argument("--no-plots", action="store_true", help="draw nothing: works without matplotlib")
    group = parser.add_argument_group("instead of what the experiment says")
    group.add_argument(
        "--world",
        choices=WORLDS,
        help="simulated: virtual time; emulated: real processes, padded; cluster: real devices",
    )
    group.add_argument("--testbeds", metavar="NAME,...", help=Rare("only these of the experiment's testbeds"))
    group.add_argument(
        "--methods",
        metavar="NAME,...",
        help="only these; a method that the experiment lacks runs with its defaults",
    )
    group.add_argument("--model", "-m", metavar="PATH-OR-HUB-ID", help="the model that answers")
    group.add_argument(
        "--drafter",
        action="extend",
        type=drafter_names,
        metavar="NAME[,NAME...]",
        help=(
            "bundled or another bundled model by name, a folder or hub id of a small model, "
            f"{', '.join(WORDS[:-1])}, {RANDOM} or {WORDS[-1]}; may be repeated"
        ),
    )
    group.add_argument(
        "--prompts",
        action="append",
        metavar="FILE",
        help="jsonl in Spec-Bench form, `shipped` or `shipped-unseen`; may be repeated",
    )
    group.add_argument(
        "--profile",
        metavar="NAME-OR-FILE",
        help=Rare("how often a synthetic drafter is right: a shipped profile's name, or a .toml file"),
    )
    group.add_argument(
        "--acceptance",
        type=float,
        metavar="SHARE",
        help=Rare("the share of a synthetic drafter's best guesses that are right, the same everywhere"),
    )
    group.add_argument("--limit", type=positive, metavar="N", help="prompts per file")
    group.add_argument("--temperatures", type=reals, metavar="0,1", help="sampling temperatures")
    group.add_argument("--seeds", type=number_list, metavar="1,2", help="seeds, at temperatures above 0")
    group.add_argument(
        "--repeat", type=positive, metavar="N", help=Rare("answers of each kind (virtual time needs one)")
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
        help=Rare("answers of each load, of all its users (default: each prompt once)"),
    )
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer")
    group.add_argument(
        "--nothing-learnt",
        action="store_true",
        help=Rare("in virtual time, by heads that have answered nothing before (default: two answers)"),
    )
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--cluster", type=Path, metavar="FILE.toml", help="the devices of this cluster file (world cluster)"
    )
    where.add_argument("--local", type=positive, metavar="N", help="N local processes (world cluster)")


def run(args: argparse.Namespace) -> int:
    if is_of_rivals(path := find_experiment(args.experiment)):
        return run_rival_bench(args, path)
    bench = pick_experiment(args)
    if not args.no_plots and not plots.can_draw():
        raise InputError(f"{plots.NEEDED}; --no-plots goes on without")
    if not args.json and (hint := kinder(args, bench)):
        note(hint)
    out = args.out or Path("results") / f"{bench.name}-{bench.world}"
    if args.tune:
        bench = _tuned(bench, out, args)
    done = open_out(bench, out, command_of(args.words))
    with _interruptible(lambda: f"{plain.kept(out / ANSWERS)} plain answers in {out}", args):
        cases = read_cases(bench, out / ANSWERS)
    if bench.users or bench.steps:
        kind: Any = LoadRecord if bench.users else StepsRecord
        run, count = (_loads, load_total) if bench.users else (_step_loads, load_steps_runs.total)
        of = count(bench, cases)
        with _interruptible(lambda: f"{len(read_records(out / LOADS, kind))} of {of} loads in {out}", args):
            return run(bench, cases, out, args)
    of = total(bench, cases)
    with _interruptible(lambda: f"{len(read_records(out / RESULTS, Record))} of {of} answers in {out}", args):
        return _answers(bench, cases, done, out, args)


@contextlib.contextmanager
def _interruptible(kept: Callable[[], str], args: argparse.Namespace) -> Iterator[None]:
    """Work whose interruption, or loss of a device, says what is kept of it, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"kept {kept()}; go on with: {command_of(args.words)}") from None
    except ClusterError as error:
        note(f"flowspec bench: {error}")
        raise ClusterError(f"kept {kept()}; go on with: {command_of(args.words)}") from None


def _answers(
    bench: Bench, cases: Sequence[PlainCase], done: Sequence[Record], out: Path, args: argparse.Namespace
) -> int:
    records, traces = _run(bench, cases, done, out, args)
    records = in_order(bench, cases, records)
    summary: dict[str, Any] = summarise(bench.name, bench.world, records)
    summary["setting"] = setting_of(bench, cases, args.words)
    if bench.published:
        summary["validation"] = validation.validate(bench, records)
    if tables := chains.compare(bench, records):
        summary["chains"] = tables
        if not args.no_plots:
            chain_report.draw(bench, records, out / "chains.png")
    if not args.json and not args.no_plots:
        note("drawing what was found ...")
    _write(bench, cases, summary, traces, out, with_plots=not args.no_plots)
    if args.json:
        print(json.dumps(summary))
    else:
        show(summary)
        chain_report.show(summary.get("chains", ()), bench.world)
        validation.show_validation(summary.get("validation", ()), bench.world, few(summary))
        note(f"report: {out}/report.html (all it is made of is beside it)")
    return _verdict(records)


def _loads(bench: Bench, cases: Sequence[PlainCase], out: Path, args: argparse.Namespace) -> int:
    done = read_records(out / LOADS, LoadRecord)
    with progress(STARTING[bench.world], load_total(bench, cases), len(done), quiet=args.json) as step:
        records = run_loads(bench, cases, done, out, args.jobs, step)
    summary = load_summary.summarise(bench.name, bench.world, records)
    summary["setting"] = setting_of(bench, cases, args.words)
    draw = partial(load_report.draw, summary, out / "load.png")
    return _tell_loads(summary, out, args, load_report.markdown, load_report.show, draw)


def _step_loads(bench: Bench, cases: Sequence[PlainCase], out: Path, args: argparse.Namespace) -> int:
    done = read_records(out / LOADS, StepsRecord)
    of = load_steps_runs.total(bench, cases)
    with progress(STARTING[bench.world], of, len(done), quiet=args.json) as step:
        records = load_steps_runs.run_step_loads(bench, cases, done, out, args.jobs, step)
    summary = load_steps_summary.summarise(bench, records)
    summary["setting"] = setting_of(bench, cases, args.words)
    draw = partial(load_steps_report.draw, summary, out / "steps.png")
    return _tell_loads(summary, out, args, load_steps_report.markdown, load_steps_report.show, draw)


def _tell_loads(
    summary: dict[str, Any],
    out: Path,
    args: argparse.Namespace,
    markdown: Callable[[Mapping[str, Any]], str],
    show: Callable[[Mapping[str, Any]], None],
    draw: Callable[[], None],
) -> int:
    """Writes what came of loads and tells it; the exit status."""
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(markdown(summary), "utf-8")
    if not args.no_plots:
        draw()
    write_report(summary, out)
    if args.json:
        print(json.dumps(summary))
    else:
        show(summary)
        note(f"report: {out}/report.html (all it is made of is beside it)")
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


def _tuned(bench: Bench, out: Path, args: argparse.Namespace) -> Bench:
    """The experiment with the best parameters of each method on each testbed added."""
    open_out(bench, out, command_of(args.words), to_be_tuned=True)
    path = out / TUNED_FILE
    todo = todo_of(bench, path)
    with (
        _interruptible(
            lambda: f"{len(todo) - len(todo_of(bench, path))} of {len(todo)} tunings in {out}", args
        ),
        progress("tuning", tuning_total(todo), quiet=args.json) as step,
    ):
        found = tune(bench, path, args.jobs, step)
    names = {setup.name for setup in found}
    return replace(bench, setups=(*(setup for setup in bench.setups if setup.name not in names), *found))


def _run(
    bench: Bench, cases: Sequence[PlainCase], done: Sequence[Record], out: Path, args: argparse.Namespace
) -> tuple[list[Record], dict[str, Trace]]:
    with progress(STARTING[bench.world], total(bench, cases), len(done), quiet=args.json) as step:
        if bench.world == SIMULATED:
            return run_simulated(bench, cases, done, out, args.jobs, step), {}
        from flowspec.bench.live import run_live  # sockets and processes, which virtual time does without

        return run_live(bench, cases, done, out, step, lambda text, share: step(text, 0))


def _write(
    bench: Bench,
    cases: Sequence[PlainCase],
    summary: dict[str, Any],
    traces: dict[str, Trace],
    out: Path,
    *,
    with_plots: bool,
) -> None:
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(
        markdown(summary)
        + validation.markdown(summary.get("validation", ()), bench.world, few(summary))
        + chain_report.markdown(summary.get("chains", ()), bench.world),
        "utf-8",
    )
    if with_plots:
        plots.speedup(summary, out / "speedup.png")
    if bench.world == SIMULATED:
        traces = _recorded(bench, cases, out)
    if traces:
        if with_plots:
            stages = max(len(trip.hops) for trace in traces.values() for trip in trace.trips)
            picture = out / "timeline.png"
            timeline.draw(traces, picture, name=bench.name, world=bench.world, stages=stages)
        (out / "trace.json").write_text(json.dumps(timeline.chrome(traces)), "utf-8")
    write_report(summary, out)


def _recorded(bench: Bench, cases: Sequence[PlainCase], out: Path) -> dict[str, Trace]:
    """One answer of the first testbed with each of a few methods: the longest at the first temperature.
    Writes a recording of each, too."""
    testbed = bench.testbeds[0]
    here = [setup for setup in bench.setups if setup.runs_on(testbed.name)]
    by_name = {setup.name: setup for setup in here}
    chosen = [by_name[name] for names in DRAWN if (name := first_of(names, by_name))]
    drawn: list[Setup] = (chosen if len(chosen) > 1 else here)[-PANELS_MAX:]
    case = max(
        (case for case in cases if case.sampling.temperature == bench.temperatures[0]),
        key=lambda case: len(case.answer),
    )
    runs = VirtualRuns(bench, warm_up_cases(bench, cases))
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
