"""Runs an experiment of the laboratory in virtual time: `python -m lab.bench --experiment NAME-OR-FILE`.

It is a file, one of `lab/experiments` or a shipped one. Writes results.jsonl while it runs, summary.json,
summary.md and recordings of some answers; where figures of it are published (`lab/published`), it is compared
with them. Exit status 1 if an answer differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs

from flowspec.bench.cases import ANSWERS
from flowspec.bench.console import progress
from flowspec.bench.engine import all_keys, in_order, run_simulated
from flowspec.bench.experiment import Experiment
from flowspec.bench.records import RESULTS, AnyRecord, LoadRecord, Record, open_folder, read_records
from flowspec.bench.report import few, format_rate, markdown
from flowspec.bench.statistics import counts, summarise
from flowspec.cli.bench import exit_status, record_answers, result_of
from flowspec.plan.tables import NotNegative, Positive, Table, Text, read_toml, some_tables
from lab.bench.experiment import engine_of, make_parser, pick_study
from lab.bench.tune import tune
from lab.command import run_command, show

PUBLISHED = Path(__file__).parents[1] / "published"
NOTE = (
    "Speed-up: over the first method. Off by: how far the speed-up here is from the published one. Slowdown: "
    "how many times as long as by their profiles the stages' boards compute. *: the slowdown was set on this "
    "figure, with all prompts, so that it says nothing."
)
COLUMNS = {
    "published tok/s": "published_tokens_per_s",
    "here tok/s": "tokens_per_s",
    "published x": "published_ratio",
    "here x": "ratio",
    "slowdown": "slowdown",
}


def command(args: argparse.Namespace) -> int:
    study = pick_study(args)
    out = args.out or Path("results") / f"{study.name}-{study.world}"
    command_line = shlex.join(["python", "-m", "lab.bench", *args.words])
    if args.tune:
        open_folder(study, out, command_line)  # is it this study's?
        tuned = tune(study, out / "tuned.toml", args.jobs, quiet=args.json)
        names = {setup.name for setup in tuned}
        others = (setup for setup in study.setups if setup.name not in names)
        study = structs.replace(study, setups=(*others, *tuned))
    open_folder(study, out, command_line)
    kind: type[Any] = LoadRecord if study.is_load else Record
    done, cases = read_records(out / RESULTS, kind), study.cases(out / ANSWERS)
    with progress("starting processes", len(all_keys(study, cases)), len(done), quiet=args.json) as step:
        records = run_simulated(study, cases, done, out, args.jobs, step, engine_of(study, cases))
    records = in_order(study, cases, records)
    summary = summarise(study, records)
    summary["setting"] = {"prompts": len(dict.fromkeys(case.prompt_id for case in cases))}
    summary["published"] = compare(study, records)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (out / "summary.md").write_text(markdown(summary), "utf-8")
    if not study.is_load:
        record_answers(engine_of(study, cases)(), cases, out)
    if args.json:
        print(json.dumps(summary))
    else:
        result_of(summary).print()
        show_published(summary)
    return exit_status(summary, records)


class Published(Table, frozen=True, kw_only=True):
    """Published rates of one testbed at one temperature, by setup. `fitted`: the testbed's slowdown was set
    on its reference."""

    testbed: Text
    temperature: NotNegative = 0.0
    reference: Text
    tokens_per_s: Annotated[Mapping[str, Positive], Meta(min_length=1)]
    fitted: bool = False


class PublishedFile(Table, frozen=True, kw_only=True):
    published: Annotated[tuple[Published, ...], some_tables("published")]


def compare(experiment: Experiment, records: Sequence[AnyRecord]) -> list[dict[str, Any]]:
    """A row for each published figure of a setup that was run."""
    path = PUBLISHED / f"{experiment.name}.toml"
    known = read_toml(path, PublishedFile, "published figures").published if path.is_file() else ()
    answers = [record for record in records if isinstance(record, Record)]
    slowdowns = {testbed.name: testbed.slowdown for testbed in experiment.testbeds}
    return [row for each in known for row in _rows(each, slowdowns.get(each.testbed), answers)]


def _rows(of: Published, slowdown: float | None, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    here = [each for each in records if (each.testbed, each.temperature) == (of.testbed, of.temperature)]
    rates = {name: _rate([each for each in here if each.method == name]) for name in of.tokens_per_s}
    reference = rates[of.reference]
    for name, published in of.tokens_per_s.items():
        rate = rates[name]
        if rate is not None and reference is not None:
            ratio, published_ratio = rate / reference, published / of.tokens_per_s[of.reference]
            yield {
                "testbed": of.testbed,
                "method": name + " *" * (of.fitted and name == of.reference),
                "published_tokens_per_s": published,
                "tokens_per_s": rate,
                "published_ratio": published_ratio,
                "ratio": ratio,
                "deviation": ratio / published_ratio - 1,
                "slowdown": slowdown,
            }


def _rate(records: Sequence[Record]) -> float | None:
    """All tokens by all time."""
    timed = [record for record in records if counts(record)]
    tokens = sum(record.new_tokens - 1 for record in timed)
    return tokens / sum(record.decode_s for record in timed) if timed else None


def show_published(summary: dict[str, Any]) -> None:
    rows = []
    for row in summary["published"]:
        figures = [format_rate(row[key]) for key in COLUMNS.values()]
        rows.append([f"{row['testbed']}: {row['method']}", *figures, f"{100 * row['deviation']:+.0f}%"])
    if rows:
        show("", ["testbed: method", *COLUMNS, "off by"], rows)
        print(f"\n{NOTE}" + f" Of {few(summary)} only it says nothing." * bool(few(summary)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("lab.bench", __doc__)
    parser.add_argument(
        "--tune", action="store_true", help="first find each method's best parameters; writes tuned.toml"
    )
    parser.set_defaults(words=sys.argv[1:] if argv is None else list(argv))
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
