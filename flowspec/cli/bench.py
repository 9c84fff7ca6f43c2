"""Run an experiment: methods x prompts x testbeds, on real, emulated or simulated devices.

Writes results.jsonl while it runs, then summary.json, summary.md, report.html, speedup.png (load.png of
loads, chains.png where chains of models are chosen), and of single answers timeline.png, trace.json and in
virtual time a recording of an answer by each of a few methods. Interrupted, it goes on where it was when it
is started again. Exit status 1 if an answer differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flowspec.bench import plots, timeline
from flowspec.bench.cases import ANSWERS, PlainCase, count_answers, make_samplings, read_cases, warm_up_cases
from flowspec.bench.console import progress
from flowspec.bench.drafters import RANDOM
from flowspec.bench.engine import Engine, all_keys, in_order, run_simulated
from flowspec.bench.experiment import (
    AR,
    CLUSTER,
    EMULATED,
    FOLDER,
    OURS,
    SIMULATED,
    WORLDS,
    Experiment,
    check_names,
    find_experiment,
    pick_setups,
    read_experiment,
)
from flowspec.bench.records import (
    RESULTS,
    WRONG,
    AnyRecord,
    LoadRecord,
    Record,
    Trace,
    hold_folder,
    open_folder,
    read_records,
)
from flowspec.bench.report import command_of, markdown, overview, setting_of, write_report
from flowspec.bench.simulated import stages_of
from flowspec.bench.statistics import PAPER, REFERENCES, first_of, summarise
from flowspec.cli.options import drafter_names, number_list, positive, positives, reals
from flowspec.cli.parser import Rare
from flowspec.cli.result import Result
from flowspec.cli.terminal import note
from flowspec.core.protocol.limits import DRAFTERS_MAX
from flowspec.draft.registry import NONE, WORDS, check_drafter
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import ModelFiles
from flowspec.plan.tables import shipped_files
from flowspec.runtime.cluster_file import read_cluster
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.recording import About, record_document, write_recording

DEFAULT = "paper-bundled"
JOBS_MAX = 64
DRAWN = ((AR,), REFERENCES, PAPER, (OURS,))
"""What is worth a panel of the timeline: of each the first that the experiment has."""
PANELS_MAX = 4
AS_IS = (
    *("world", "model", "acceptance", "limit", "repeat", "local", "users", "answers"),
    *("temperatures", "seeds"),
)
"""Flags that say what the experiment has under their name."""
STARTING = {
    SIMULATED: "starting processes",
    EMULATED: "starting local daemons",
    CLUSTER: "connecting to the devices",
}
"""What is under way before the first answer, by world."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"a file, or one of {', '.join(sorted(shipped_files(FOLDER)))} (default: %(default)s)"
    parser.add_argument("--experiment", default=DEFAULT, metavar="NAME-OR-FILE", help=text)
    text = "where results go and are continued (default: results/NAME-WORLD)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    text, jobs = Rare("processes in virtual time (default: all cores)"), min(JOBS_MAX, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=positive, default=jobs, metavar="N", help=text)
    parser.add_argument("--no-plots", action="store_true", help="draw nothing: works without matplotlib")
    group = parser.add_argument_group("instead of what the experiment says")
    text = "simulated: virtual time; emulated: real processes, padded; cluster: real devices"
    group.add_argument("--world", choices=WORLDS, help=text)
    group.add_argument("--testbeds", metavar="NAME,...", help=Rare("only these of the experiment's testbeds"))
    text = "only these; a method that the experiment lacks runs with its defaults"
    group.add_argument("--methods", metavar="NAME,...", help=text)
    group.add_argument("--model", "-m", metavar="PATH-OR-HUB-ID", help="the model that answers")
    text = (
        "bundled or another bundled model by name, a folder or hub id of a small model, "
        f"{', '.join(WORDS[:-1])}, {RANDOM} or {WORDS[-1]}; may be repeated"
    )
    names = "NAME[,NAME...]"
    group.add_argument("--drafter", action="extend", type=drafter_names, metavar=names, help=text)
    text = "jsonl in Spec-Bench form, `shipped` or `shipped-unseen`; may be repeated"
    group.add_argument("--prompts", action="append", metavar="FILE", help=text)
    text = Rare("the share of a synthetic drafter's best guesses that are right, the same everywhere")
    group.add_argument("--acceptance", type=float, metavar="SHARE", help=text)
    group.add_argument("--limit", type=positive, metavar="N", help="prompts per file")
    group.add_argument("--temperatures", type=reals, metavar="0,1", help="sampling temperatures")
    group.add_argument("--seeds", type=number_list, metavar="1,2", help="seeds, at temperatures above 0")
    text = Rare("answers of each kind (virtual time needs one)")
    group.add_argument("--repeat", type=positive, metavar="N", help=text)
    text = "loads: so many users, who each ask the next prompt when one is answered"
    group.add_argument("--users", type=positives, metavar="1,4,16", help=text)
    text = Rare("answers of each load, of all its users (default: each prompt once)")
    group.add_argument("--answers", type=positive, metavar="N", help=text)
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer")
    where = group.add_mutually_exclusive_group()
    text = "the devices of this cluster file (world cluster)"
    where.add_argument("--cluster", type=Path, metavar="FILE.toml", help=text)
    where.add_argument("--local", type=positive, metavar="N", help="N local processes (world cluster)")


# ------------------------------------------------------------------------------------------ what is asked for


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say instead of the experiment's file, by its keys."""
    flags = {name: getattr(args, name) for name in AS_IS} | {"new_tokens": args.max_new_tokens}
    return {name: value for name, value in flags.items() if value is not None}


def pick_experiment(args: argparse.Namespace, experiment: Experiment | None = None) -> Experiment:
    """What its file says, which is read unless it is given, with what the flags say instead. What cannot be
    run is refused before anything is started or written: raises `InputError`."""
    experiment = experiment or read_experiment(find_experiment(args.experiment), flags=flags_of(args))
    changes: dict[str, Any] = {"cluster": args.cluster}
    for name, values in (("drafters", args.drafter), ("prompts", args.prompts)):
        if values is not None:
            changes[name] = tuple(dict.fromkeys(values))
    if args.methods is not None:
        changes["setups"] = pick_setups(experiment.setups, args.methods.split(","))
    if args.testbeds is not None:
        names = args.testbeds.split(",")
        check_names("--testbeds", names, [testbed.name for testbed in experiment.testbeds])
        changes["testbeds"] = tuple(each for each in experiment.testbeds if each.name in names)
    experiment = replace(experiment, **{name: value for name, value in changes.items() if value is not None})
    if args.local is not None:
        experiment = replace(experiment, cluster=None)
    if experiment.world == CLUSTER:
        if experiment.cluster is not None:
            read_cluster(experiment.cluster)  # now, not behind hours of plain answers
        if args.cluster or experiment.cluster is None or len(experiment.testbeds) > 1:
            experiment = replace(experiment, testbeds=())  # its boards are not the ones that are there
    for text in _refusals(experiment, args):
        raise InputError(text)
    make_samplings(experiment.temperatures, experiment.seeds)
    if not experiment.is_synthetic:
        for name in filter(RANDOM.__ne__, experiment.drafters):
            check_drafter(name)
    return experiment


def _refusals(experiment: Experiment, args: argparse.Namespace) -> Iterator[str]:
    """What is wrong with flags that no key of a file stands for."""
    world, drafters, testbeds = experiment.world, experiment.drafters, experiment.testbeds
    names = ", ".join(drafters)
    for flag, value in (("--drafter", args.drafter), ("--prompts", args.prompts)):
        if experiment.is_synthetic and value is not None:
            yield f"{flag}: expected none with model synthetic, which draws prompts and guesses by chance"
    if NONE in drafters and len(drafters) > 1:
        yield f"--drafter: expected {NONE} alone, got {names}"
    if len(drafters) > DRAFTERS_MAX:
        yield f"--drafter: expected at most {DRAFTERS_MAX}, got {len(drafters)}"
    for setup in experiment.setups:
        for missing in (each for each in setup.drafters or () if each not in drafters):
            yield f"--drafter: method {setup.name!r} of the experiment needs {missing!r}, got {names}"
    if world != CLUSTER and (args.cluster or args.local):
        yield f"--cluster and --local are for --world cluster; the experiment's world is {world}"
    if testbeds and not any(setup.runs_on(each.name) for setup in experiment.setups for each in testbeds):
        yield "--methods and --testbeds: expected a method that is run on one of the testbeds, got none"
    if args.jobs > JOBS_MAX:
        yield f"--jobs: expected at most {JOBS_MAX}, got {args.jobs}"


def published_hint(args: argparse.Namespace, experiment: Experiment) -> str | None:
    """A line for whom asks for a published method and gets it as kindly as ours does it; None where it runs
    as published, too."""
    for name in (args.experiment, DEFAULT):
        setups = read_experiment(find_experiment(name)).setups
        if known := {setup.method: setup.name for setup in setups if setup.published}:
            break
    where = "" if name == args.experiment else f" --experiment {name}"
    if experiment.world != SIMULATED:
        where += f" --world {SIMULATED}"
    both = {setup.method for setup in experiment.setups if setup.published}
    ours = dict.fromkeys(each.method for each in experiment.setups if each.method in known.keys() - both)
    names = shlex.quote(",".join(known[method] for method in ours))
    kinder = "as ours does it, kinder than the paper's code (docs/paper.md)"
    return f"{', '.join(ours)}: {kinder}; as published:{where} --methods {names}" if ours else None


# ------------------------------------------------------------------------------------------ running it


def run(args: argparse.Namespace) -> int:
    experiment = pick_experiment(args)
    if not args.no_plots and not plots.can_draw():
        raise InputError(f"{plots.NEEDED}; --no-plots goes on without")
    if not args.json and (hint := published_hint(args, experiment)):
        note(hint)
    out = args.out or Path("results") / f"{experiment.name}-{experiment.world}"
    open_folder(experiment, out, command_of(args.words))
    with hold_folder(out):
        return _run_in(out, experiment, args)


def _run_in(out: Path, experiment: Experiment, args: argparse.Namespace) -> int:
    world, with_plots = experiment.world, not args.no_plots
    kind: type[Any] = LoadRecord if experiment.is_load else Record
    done, total = read_records(out / RESULTS, kind), 0
    records: Sequence[Any]
    traces: dict[str, Trace] = {}
    try:
        cases = read_cases(experiment, out / ANSWERS)
        total = len(all_keys(experiment, cases))
        with progress(STARTING[world], total, len(done), quiet=args.json) as step:
            if world == SIMULATED:
                records = run_simulated(experiment, cases, done, out, args.jobs, step)
            else:
                from flowspec.bench.live import run_live  # sockets and processes

                records, traces = run_live(experiment, cases, done, out, step)
        records = in_order(experiment, cases, records)
        summary = summarise(experiment, records)
        summary["setting"] = setting_of(experiment, cases, args.words)
        if with_plots and not args.json:
            note("drawing what was found ...")
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
        (out / "summary.md").write_text(markdown(summary), "utf-8")
        if with_plots and experiment.is_load:
            plots.draw_loads(summary, out / "load.png")
        elif with_plots:
            plots.draw_speedup(summary, out / "speedup.png")
            plots.draw_chains(experiment, records, out / "chains.png")
        if world == SIMULATED and not experiment.is_load:
            traces = record_answers(Engine(experiment, warm_up_cases(cases)), cases, out)
        if traces and with_plots:
            picture = out / "timeline.png"
            timeline.draw_timeline(traces, picture, name=experiment.name, world=world)
        if traces:
            (out / "trace.json").write_text(json.dumps(timeline.chrome(traces)), "utf-8")
        write_report(summary, out)
    except (KeyboardInterrupt, ClusterError) as error:
        kept = f"{count_answers(out / ANSWERS)} plain answers"
        if total:
            what = "loads" if experiment.is_load else "answers"
            kept = f"{len(read_records(out / RESULTS, kind))} of {total} {what}"
        text = f"kept {kept} in {out}; go on with: {command_of(args.words)}"
        if isinstance(error, ClusterError):
            note(f"flowspec bench: {error}")
            raise ClusterError(text) from None
        raise KeyboardInterrupt(text) from None
    result_of(summary).print(as_json=args.json)
    if not args.json:
        note(f"report: {out}/report.html (all it is made of is beside it)")
    return exit_status(summary, records)


def result_of(summary: Mapping[str, Any]) -> Result:
    """A summary as the terminal shows it."""
    result = Result(summary)
    for part in overview(summary):
        if isinstance(part, str):
            result.note(part)
        else:
            result.table(part.columns, part.rows, title=part.title)
    return result


def exit_status(summary: dict[str, Any], records: Sequence[AnyRecord]) -> int:
    wrong = [each for each in records if isinstance(each, Record) and each.agreement == WRONG]
    for record in wrong[:5]:
        where = f"{record.testbed or record.world}, prompt {record.prompt_id}"
        drawn = f"temperature {record.temperature:g}, seed {record.seed}"
        note(f"WRONG: {record.method} on {where}, {drawn}: not what plain decoding says")
    return 1 if wrong or summary.get("wrong") else 0


def record_answers(engine: Engine, cases: Sequence[PlainCase], out: Path) -> dict[str, Trace]:
    """One answer of the first testbed with each of a few methods: the longest at the first temperature.
    Writes a recording of each, too."""
    experiment = engine.experiment
    testbed, temperature = experiment.testbeds[0], experiment.temperatures[0]
    here = {setup.name: setup for setup in experiment.setups if setup.runs_on(testbed.name)}
    chosen = [here[name] for names in DRAWN if (name := first_of(names, here))]
    some = [case for case in cases if case.sampling.temperature == temperature]
    case, decode, traces = max(some, key=lambda case: len(case.answer)), as_numbers, {}
    if not experiment.is_synthetic and (files := ModelFiles(experiment.model)).has_tokenizer:
        from flowspec.model.text import Tokenizer  # which takes seconds to import

        decode = Tokenizer(files).decode
    for setup in (chosen if len(chosen) > 1 else list(here.values()))[-PANELS_MAX:]:
        run = engine.run(testbed, setup, case, decode)
        about = About(
            world=SIMULATED,
            model=experiment.model,
            method=setup.name,
            drafters=experiment.drafters_of(setup),
            stages=stages_of(testbed),
        )
        slug = re.sub("[^a-z0-9]+", "-", setup.name.lower()).strip("-")
        write_recording(out / f"recording-{slug}.json", record_document(about, run.frames))
        traces[setup.name] = run.trace
    return traces
