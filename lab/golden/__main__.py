"""What must not change: is it still as it was recorded?

python -m lab.golden check [PART ...]        compares what FlowSpec does now with the recordings
python -m lab.golden make [PART ...]         records anew; refuses to on a changed tree
python -m lab.golden observe PART            prints what a part sees, a JSON object a line
python -m lab.golden parts                   lists the parts, and what is recorded of them
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from lab.golden import timed
from lab.golden.parts import PARTS, Part
from lab.golden.place import ROOT, Place, UnavailableError, machine, make_place, versions
from lab.golden.recording import (
    FOLDER,
    Absent,
    Comparison,
    Difference,
    Observation,
    Origin,
    Recording,
    file_of,
)

SHOWN_MAX = 40
"""Differences of a part that are printed; with `--json` all are."""
SAID_EVERY_S = 15.0


COMMAND = (sys.executable, "-m", "lab.golden")


class GoldenError(Exception):
    """What a person can put right; `status` is the command's."""

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Verdict:
    part: str
    seconds: float = 0.0
    observations: int = 0
    differences: list[Difference] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return asdict(self)


def observe(part: Part, place: Place, pattern: str = "*") -> Iterator[Observation | Absent]:
    """What a part sees, in a process of its own that has the place's environment."""
    command = [*COMMAND, "observe", part.name]
    command += ["--home", str(place.home), "--models", str(place.models), "--only", pattern]
    with place.start(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                found = json.loads(line)
                yield Absent(**found) if "why" in found else Observation(**found)
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                os.killpg(child.pid, signal.SIGTERM)
    if child.returncode:
        ended = f"its process ended with status {child.returncode}; its words are above"
        raise GoldenError(f"{part.name}: {ended}", 1)


def print_observations(part: Part, place: Place) -> None:
    """The other end of `observe`. What the product prints meanwhile goes to standard error."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for found in part.observe(place):
            if isinstance(found, Absent) or fnmatch.fnmatch(found.key, place.only):
                print(json.dumps(asdict(found)), file=lines, flush=True)
    except UnavailableError as error:
        raise GoldenError(f"{part.name}: {error}", 1) from None


class Progress:
    """A line on standard error that moves, or one every so often where no terminal is."""

    def __init__(self, part: str) -> None:
        self._part, self._started_s, self._said_s = part, time.monotonic(), time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def tell(self, count: int, key: str) -> None:
        now_s = time.monotonic()
        text = f"{self._part}: {count} seen in {now_s - self._started_s:.0f} s; {key}"
        if self._is_terminal:
            print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)
        elif now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(part: Part, recording: Recording | None, pattern: str) -> tuple[Verdict, dict[str, Any]]:
    """Compares a part with a recording; without one collects what a new one holds."""
    verdict, started_s = Verdict(part=part.name), time.monotonic()
    progress = Progress(part.name)
    entries: dict[str, Any]
    if part.is_timed:
        entries = {}
        for found in timed.run(part, recording, pattern, observe, progress.tell):
            if isinstance(found, Absent):
                verdict.absent.append(found)
            else:
                verdict.differences += found.differences
                entries[found.key] = found.value
    else:
        wanted = None
        if recording is not None:
            wanted = {key: each for key, each in recording.entries.items() if fnmatch.fnmatch(key, pattern)}
        comparison = Comparison(wanted)
        with make_place() as place:
            for each in observe(part, place, pattern):
                verdict.differences += comparison.take(each)
                progress.tell(comparison.observations, each.key)
        verdict.differences += comparison.end()
        verdict.absent, entries = comparison.absent, comparison.seen
        verdict.observations = comparison.observations
    progress.end()
    verdict.seconds = round(time.monotonic() - started_s, 1)
    verdict.observations = verdict.observations or len(entries)
    return verdict, entries


def check(parts: Sequence[Part], pattern: str) -> list[Verdict]:
    for part in parts:
        if not file_of(part.name).is_file():
            raise GoldenError(
                f"{part.name}: expected a recording in {FOLDER.relative_to(ROOT)}, found none; record it "
                f"from a commit that is right: python -m lab.golden make {part.name}"
            )
    found = []
    for part in parts:
        found.append(run(part, Recording.read(part.name), pattern)[0])
        show(found[-1])
    return found


def make(parts: Sequence[Part]) -> list[Verdict]:
    changed = git("status", "--porcelain", "--", ".", f":!{FOLDER.relative_to(ROOT)}").splitlines()
    if changed:
        raise GoldenError(
            f"expected a tree without changes, so that the commit says what was recorded; {len(changed)} "
            f"files differ from it, such as {changed[0][3:]}; commit or stash them"
        )
    origin = Origin(
        commit=git("rev-parse", "HEAD"),
        date=datetime.now(timezone.utc).date().isoformat(),
        machine=machine(),
        versions=versions(),
    )
    found = []
    for part in parts:
        verdict, entries = run(part, None, "*")
        found.append(verdict)
        show(verdict)
        if verdict.differences:
            raise GoldenError(f"{part.name}: not recorded, since it has two answers to one question", 1)
        Recording(origin=origin, entries=entries).write(part.name)
    return found


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GoldenError(f"git {arguments[0]}: {done.stderr.strip().splitlines()[0]}")
    return done.stdout.strip("\n")


def show(verdict: Verdict) -> None:
    """On standard error, so that `--json` has standard output for itself."""
    count = len(verdict.differences)
    said = f"{count} differences" if count != 1 else "1 difference"
    for difference in verdict.differences[:SHOWN_MAX]:
        print(f"{verdict.part}: {difference}", file=sys.stderr)
    if count > SHOWN_MAX:
        print(f"{verdict.part}: and {count - SHOWN_MAX} more; --json has all", file=sys.stderr)
    for absent in verdict.absent:
        print(f"{verdict.part}: {absent.key} not compared: {absent.why}", file=sys.stderr)
    print(
        f"{verdict.part}: {verdict.observations} observations, {said if count else 'no difference'}, "
        f"{verdict.seconds / 60:.1f} min",
        file=sys.stderr,
    )


def show_parts() -> list[dict[str, Any]]:
    rows = []
    for part in PARTS.values():
        path = file_of(part.name)
        recording = Recording.read(part.name)
        rows.append(
            {
                "part": part.name,
                "about": part.about,
                "is_timed": part.is_timed,
                "entries": 0 if recording is None else len(recording.entries),
                "bytes": path.stat().st_size if path.is_file() else 0,
                "origin": None if recording is None else asdict(recording.origin),
            }
        )
    return rows


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "python -m lab.golden", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, text in (("check", "compare with the recordings"), ("make", "record anew")):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "check":
            command.add_argument("--only", default="*", metavar="PATTERN", help="keys, such as 'qwen3*'")
    command = commands.add_parser("observe", help="print what a part sees", allow_abbrev=False)
    command.add_argument("parts", nargs=1, metavar="PART")
    command.add_argument(
        "--home", type=Path, help="an empty folder in place of the user's (default: a new one)"
    )
    command.add_argument("--models", type=Path, help="where made models are kept")
    command.add_argument("--only", default="*", metavar="PATTERN")
    command = commands.add_parser("parts", help="list the parts", allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    for name in getattr(args, "parts", ()):
        if name not in PARTS:
            parser.error(f"expected parts of {', '.join(PARTS)}, got {name!r}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = read_arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all it started ends
    parts = [PARTS[name] for name in getattr(args, "parts", ()) or PARTS]
    try:
        if args.command == "observe":
            with contextlib.ExitStack() as stack:
                place = stack.enter_context(make_place()) if args.home is None else None
                home, models = (place.home, place.models) if place else (args.home, args.models)
                print_observations(parts[0], Place(tree=Path.cwd(), home=home, models=models, only=args.only))
            return 0
        if args.command == "parts":
            rows = show_parts()
            if args.json:
                print(json.dumps({"parts": rows}))
                return 0
            for row in rows:
                origin = (
                    f"of {row['origin']['commit'][:8]}, {row['origin']['date']}" if row["origin"] else "none"
                )
                print(f"{row['part']:16} {row['entries']:5} entries {row['bytes'] / 1e3:7.0f} kB {origin}")
                print(f"{'':16} {row['about']}")
            return 0
        found = check(parts, args.only) if args.command == "check" else make(parts)
    except GoldenError as error:
        print(f"python -m lab.golden: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("python -m lab.golden: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps({"parts": [verdict.report() for verdict in found]}))
    return 1 if any(verdict.differences for verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())
