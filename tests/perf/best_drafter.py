"""What the best drafter for each prompt gives, known beforehand, beside one drafter for all: an experiment in
which the same method ran with several.

    python -m tests.perf.best_drafter FOLDER [--single NAME] [--json]

FOLDER is the experiment's output, `results.jsonl` in it. Those that are compared are setups whose names begin
with that of the single one. A speed is the single one's seconds for the same answers, from the question to
the last token, by the setup's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flowspec.bench.bench import RESULTS
from flowspec.bench.config import OURS
from flowspec.bench.console import show
from flowspec.bench.outcome import Key, Record, read_records
from flowspec.errors import InputError
from tests.command import Parser, run_command

ALL, BEST = "all", "best for each prompt"


def answer_of(record: Record) -> Key:
    return (record.testbed, "", record.prompt_id, record.temperature, record.seed, record.repeat)


def speeds(records: Sequence[Record], single: str) -> dict[str, dict[str, float]]:
    """By setup, the best for each prompt among them, and domain: how many times as fast as with the single
    one."""
    took: dict[str, dict[Key, float]] = {}
    domains: dict[Key, str] = {}
    for record in records:
        took.setdefault(record.method, {})[answer_of(record)] = record.whole_s
        domains[answer_of(record)] = record.domain
    if single not in took:
        raise InputError(f"--single: expected one of {', '.join(took)}, got {single!r}")
    among = [name for name in took if name.startswith(single)]
    of_all = set.intersection(*(set(took[name]) for name in among))
    took[BEST] = {answer: min(took[name][answer] for name in among) for answer in of_all}
    found: dict[str, dict[str, float]] = {}
    for name, answers in took.items():
        for domain in [*dict.fromkeys(domains.values()), ALL]:
            both = [answer for answer in of_all & set(answers) if domain in (domains[answer], ALL)]
            if both:
                found.setdefault(name, {})[domain] = sum(took[single][each] for each in both) / sum(
                    answers[each] for each in both
                )
    return found


def command(args: argparse.Namespace) -> int:
    found = speeds(read_records(args.folder / RESULTS), args.single)
    if args.json:
        print(json.dumps(found))
    else:
        columns = list(dict.fromkeys(domain for by_domain in found.values() for domain in by_domain))
        rows = [[name, *(by_domain.get(each, "-") for each in columns)] for name, by_domain in found.items()]
        show(f"Times as fast as {args.single}", ["", *columns], rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.best_drafter", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--single", default=OURS, help="default: %(default)s")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
