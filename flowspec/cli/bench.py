"""Run an experiment: methods x prompts x testbeds, on real, emulated or simulated devices.

Writes results.jsonl while it runs, then summary.json, summary.md, report.html, speedup.png (load.png of
loads, chains.png where chains of models are chosen), timeline.png and trace.json, and of virtual time a
recording of an answer by each of a few methods. Interrupted, it goes on where it was when it is started
again. Exit status 1 if an answer differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flowspec.bench import plots, timeline
from flowspec.bench.cases import ANSWERS, PlainCase, count_answers, make_samplings, read_cases, warm_up_cases
from flowspec.bench.console import progress
from flowspec.bench.drafters import RANDOM
from flowspec.bench.engine import Engine, all_keys, in_order, run_simulated
from flowspec.bench.experiment import (
    ACCEPTANCE_MAX,
    AR,
    CLUSTER,
    EMULATED,
    FOLDER,
    OURS,
    SIMULATED,
    SYNTHETIC,
    USERS_MAX,
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
    open_folder,
    read_records,
)
from flowspec.bench.report import command_of, markdown, setting_of, show, write_report
from flowspec.bench.simulated import stages_of
from flowspec.bench.statistics import PAPER, REFERENCES, first_of, summarise
from flowspec.cli.options import drafter_names, number_list, positive, positives, reals
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.core.protocol.limits import DRAFTERS_MAX
from flowspec.draft.kinds import NONE, WORDS, check_drafter
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.plan.tables import shipped_files
from flowspec.watch.detokenizer import Decode, as_numbers
from flowspec.watch.recording import About, record_document, write_recording

DEFAULT = "paper-bundled"
JOBS_MAX = 64
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
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--cluster", type=Path, metavar="FILE.toml", help="the devices of this cluster file (world cluster)"
    )
    where.add_argument("--local", type=positive, metavar="N", help="N local processes (world cluster)")


# ------------------------------------------------------------------------------------------ what is asked for


def pick_experiment(args: argparse.Namespace, experiment: Experiment | None = None) -> Experiment:
    """What its file says, which is read unless it is given, with what the flags say instead. What cannot be
    run is refused before anything is started or written: raises `InputError`."""
    experiment = experiment or read_experiment(find_experiment(args.experiment))
    changes: dict[str, Any] = {
        "world": args.world,
        "model": args.model,
        "drafters": None if args.drafter is None else tuple(dict.fromkeys(args.drafter)),
        "prompts": tuple(args.prompts) if args.prompts else None,
        "acceptance": args.acceptance,
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
    if args.model not in (None, SYNTHETIC) and experiment.is_synthetic and args.drafter is None:
        changes["drafters"] = (BUNDLED,)
    experiment = replace(experiment, **{name: value for name, value in changes.items() if value is not None})
    if args.local is not None:
        experiment = replace(experiment, cluster=None)
    if args.methods is not None:
        experiment = replace(experiment, setups=pick_setups(experiment.setups, args.methods.split(",")))
    if args.testbeds is not None:
        names = args.testbeds.split(",")
        check_names("--testbeds", names, [testbed.name for testbed in experiment.testbeds])
        some = tuple(testbed for testbed in experiment.testbeds if testbed.name in names)
        experiment = replace(experiment, testbeds=some)
    if experiment.world == CLUSTER and (args.cluster or args.local or len(experiment.testbeds) > 1):
        experiment = replace(experiment, testbeds=())  # its boards are not the ones that are there
    for is_wrong, text in _refusals(experiment, args):
        if is_wrong:
            raise InputError(text)
    make_samplings(experiment.temperatures, experiment.seeds)
    for name in () if experiment.is_synthetic else experiment.drafters:
        if name != RANDOM:
            check_drafter(name)
    return experiment


def _refusals(experiment: Experiment, args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Whether something is wrong, and what; flags are told of as they are called."""
    world, drafters = experiment.world, experiment.drafters
    is_synthetic, is_simulated, is_cluster = experiment.is_synthetic, world == SIMULATED, world == CLUSTER
    got, names = f"got {world}", ", ".join(drafters)
    share = args.acceptance
    yield (
        share is not None and not is_synthetic,
        "--acceptance is for a synthetic drafter; expected an experiment with model synthetic, got "
        f"{experiment.model!r:.80}",
    )
    yield (
        share is not None and not 0 < share <= ACCEPTANCE_MAX,
        f"--acceptance: expected a share above 0, up to {ACCEPTANCE_MAX:g}, got {share or 0:g}",
    )
    seed = min(experiment.seeds)
    yield seed < 0, f"--seeds: expected whole numbers from 0, got {seed}"
    yield (
        is_simulated and experiment.repeat > 1,
        f"--repeat: virtual time gives the same figures every time; expected 1, got {experiment.repeat}",
    )
    yield (
        experiment.needs_acceptance and experiment.acceptance is None,
        "--model: synthetic is for experiments that say its `acceptance`",
    )
    for flag, value in (("--drafter", args.drafter), ("--prompts", args.prompts)):
        yield (
            is_synthetic and value is not None,
            f"{flag}: expected none with model synthetic, which draws prompts and guesses by chance",
        )
    yield NONE in drafters and len(drafters) > 1, f"--drafter: expected {NONE} alone, got {names}"
    yield (
        len(drafters) > DRAFTERS_MAX,
        f"--drafter: expected at most {DRAFTERS_MAX}, got {len(drafters)}",
    )
    for setup in experiment.setups:
        missing = [name for name in setup.drafters or () if name not in drafters]
        needed = repr(missing[0]) if missing else ""
        yield (
            bool(missing),
            f"--drafter: method {setup.name!r} of the experiment needs {needed}, got {names}",
        )
    yield (
        not is_cluster and bool(args.cluster or args.local),
        f"--cluster and --local are for --world cluster; the experiment's world is {world}",
    )
    yield (
        not is_cluster and not experiment.testbeds,
        f"--world {world}: expected an experiment with a testbed, got {experiment.name!r} without one",
    )
    runs = [setup.runs_on(testbed.name) for testbed in experiment.testbeds for setup in experiment.setups]
    yield (
        bool(experiment.testbeds) and not any(runs),
        "--methods and --testbeds: expected a method that is run on one of the testbeds, got none",
    )
    flag = "--users" if experiment.users else "--answers"
    yield (
        bool(experiment.steps and (experiment.users or experiment.answers)),
        f"{flag}: expected none with experiment {experiment.name!r}, whose tables [[step]] say how many "
        "users there are",
    )
    flag, what = ("--world", " with tables [[step]]") if experiment.steps else ("--users", "")
    expected = "simulated" if experiment.steps else "--world simulated"
    yield (
        experiment.is_load and not is_simulated,
        f"{flag}: loads are run in virtual time; expected {expected}{what}, {got}",
    )
    yield (
        bool(experiment.answers and not experiment.users),
        "--answers is for loads: expected --users, too",
    )
    most = max(experiment.users, default=0)
    yield most > USERS_MAX, f"--users: expected at most {USERS_MAX} at once, got {most}"
    yield args.jobs > JOBS_MAX, f"--jobs: expected at most {JOBS_MAX}, got {args.jobs}"


def published_hint(args: argparse.Namespace, experiment: Experiment) -> str | None:
    """A line for whom asks for a published method and gets it as kindly as ours does it; None where it runs
    as published, too."""
    known, where = _published(args.experiment), ""
    if not known:
        known, where = _published(DEFAULT), f" --experiment {DEFAULT}"
    if experiment.world != SIMULATED:
        where += f" --world {SIMULATED}"
    both = {setup.method for setup in experiment.setups if setup.published}
    ours = dict.fromkeys(
        setup.method for setup in experiment.setups if setup.method in known and setup.method not in both
    )
    if not ours:
        return None
    names = shlex.quote(",".join(known[method] for method in ours))
    return (
        f"{', '.join(ours)}: as ours does it, kinder than the paper's code (docs/paper.md); "
        f"as published:{where} --methods {names}"
    )


def _published(experiment: str) -> dict[str, str]:
    """What an experiment calls its setups that run as their papers' code does it, by method."""
    setups = read_experiment(find_experiment(experiment)).setups
    return {setup.method: setup.name for setup in setups if setup.published}


# ------------------------------------------------------------------------------------------ running it


def run(args: argparse.Namespace) -> int:
    experiment = pick_experiment(args)
    if not args.no_plots and not plots.can_draw():
        raise InputError(f"{plots.NEEDED}; --no-plots goes on without")
    if not args.json and (hint := published_hint(args, experiment)):
        note(hint)
    out = args.out or Path("results") / f"{experiment.name}-{experiment.world}"
    open_folder(experiment, out, command_of(args.words))
    kind: type[Any] = LoadRecord if experiment.is_load else Record
    done = read_records(out / RESULTS, kind)
    with _interruptible(lambda: f"{count_answers(out / ANSWERS)} plain answers in {out}", args):
        cases = read_cases(experiment, out / ANSWERS)
    total = len(all_keys(experiment, cases))
    what = "loads" if experiment.is_load else "answers"
    with _interruptible(lambda: f"{len(read_records(out / RESULTS, kind))} of {total} {what} in {out}", args):
        with progress(STARTING[experiment.world], total, len(done), quiet=args.json) as step:
            records: Sequence[Any]
            traces: dict[str, Trace] = {}
            if experiment.world == SIMULATED:
                records = run_simulated(experiment, cases, done, out, args.jobs, step)
            else:
                from flowspec.bench.live import run_live  # sockets and processes

                records, traces = run_live(experiment, cases, done, out, step)
        records = in_order(experiment, cases, records)
        summary = summarise(experiment, records)
        summary["setting"] = setting_of(experiment, cases, args.words)
        if not args.json and not args.no_plots:
            note("drawing what was found ...")
        _write(experiment, cases, records, summary, traces, out, with_plots=not args.no_plots)
    if args.json:
        print(json.dumps(summary))
    else:
        show(summary)
        note(f"report: {out}/report.html (all it is made of is beside it)")
    return exit_status(summary, records)


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


def exit_status(summary: dict[str, Any], records: Sequence[AnyRecord]) -> int:
    wrong = [each for each in records if isinstance(each, Record) and each.agreement == WRONG]
    for record in wrong[:5]:
        where = (
            f"{record.testbed or record.world}, prompt {record.prompt_id}, temperature "
            f"{record.temperature:g}, seed {record.seed}"
        )
        note(f"WRONG: {record.method} on {where}: not what plain decoding says")
    return 1 if wrong or summary.get("wrong") else 0


# ------------------------------------------------------------------------------------------ what is written


def _write(
    experiment: Experiment,
    cases: Sequence[PlainCase],
    records: Sequence[Any],
    summary: dict[str, Any],
    traces: dict[str, Trace],
    out: Path,
    *,
    with_plots: bool,
) -> None:
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(markdown(summary), "utf-8")
    if with_plots and experiment.is_load:
        plots.draw_loads(summary, out / "load.png")
    elif with_plots:
        plots.draw_speedup(summary, out / "speedup.png")
        plots.draw_chains(experiment, records, out / "chains.png")
    if experiment.world == SIMULATED and not experiment.is_load:
        traces = record_answers(Engine(experiment, warm_up_cases(cases)), cases, out)
    if traces:
        if with_plots:
            picture, world = out / "timeline.png", experiment.world
            timeline.draw_timeline(traces, picture, name=experiment.name, world=world)
        (out / "trace.json").write_text(json.dumps(timeline.chrome(traces)), "utf-8")
    write_report(summary, out)


def record_answers(engine: Engine, cases: Sequence[PlainCase], out: Path) -> dict[str, Trace]:
    """One answer of the first testbed with each of a few methods: the longest at the first temperature.
    Writes a recording of each, too."""
    experiment = engine.experiment
    testbed = experiment.testbeds[0]
    here = [setup for setup in experiment.setups if setup.runs_on(testbed.name)]
    by_name = {setup.name: setup for setup in here}
    chosen = [by_name[name] for names in DRAWN if (name := first_of(names, by_name))]
    case = max(
        (case for case in cases if case.sampling.temperature == experiment.temperatures[0]),
        key=lambda case: len(case.answer),
    )
    decode, traces = _decode(experiment), {}
    for setup in (chosen if len(chosen) > 1 else here)[-PANELS_MAX:]:
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


def _decode(experiment: Experiment) -> Decode:
    """What tokens of the experiment's model read as."""
    if experiment.is_synthetic or not (files := ModelFiles(experiment.model)).has_tokenizer:
        return as_numbers
    from flowspec.model.text import Tokenizer  # which takes seconds to import

    return Tokenizer(files).decode
