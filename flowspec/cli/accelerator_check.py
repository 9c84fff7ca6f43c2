"""`flowspec doctor --accelerator`: the check of this machine's accelerator, told as it goes; then a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from flowspec.bench.accelerator import check
from flowspec.bench.accelerator.check import LEFT_OUT, RIGHT, SECONDS, UNFINISHED, Check, Outcome
from flowspec.bench.accelerator.report import (
    SEND,
    BoardState,
    check_file,
    findings_of,
    private_names,
    report_of,
    write_file,
)
from flowspec.bench.console import show_table
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.core.protocol.precision import OF_ANY_MODEL
from flowspec.errors import InputError
from flowspec.extras import imported
from flowspec.plan.memory import mib
from flowspec.rounding import rounded
from flowspec.runtime.health.board import read_board
from flowspec.runtime.health.finding import PROBLEM, Finding
from flowspec.runtime.health.system import read_clocks, read_system

REPORT = Path("flowspec-accelerator.json")
WIDTH = 80
COLUMNS = ("precision", "kernel", "off", "allowed", "alone", "ms: 1", "4", "16 rows")
UNDONE = (UNFINISHED, LEFT_OUT)
NEEDLESS = ("cluster", "layers", "all_devices", "context", "model")
"""Flags of the doctor that mean nothing here, where no cluster is asked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("this machine's accelerator")
    group.add_argument(
        "--accelerator",
        action="store_true",
        help="check this machine's GPU or CPU instead, and write a report to send in",
    )
    group.add_argument("--device", metavar="auto|cpu|cuda:N", help="what to check (default: auto)")
    group.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=Rare(f"where to write the report (default: {REPORT})"),
    )
    group.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=Rare(f"how long all may take; what does not fit is left out (default: {SECONDS:.0f})"),
    )


def check_flags(args: argparse.Namespace, parsed_defaults: Mapping[str, Any]) -> None:
    """Refuses flags that belong to the other of the doctor's two jobs."""
    if args.accelerator:
        for name in NEEDLESS:
            if getattr(args, name) != parsed_defaults[name]:
                text = "goes with a cluster; --accelerator checks this machine with the bundled model"
                raise InputError(f"--{name.replace('_', '-')} {text}")
        device = args.device or "auto"
        if device not in ("auto", "cpu") and not (device.startswith("cuda:") and device[5:].isdecimal()):
            raise InputError(f"--device: expected auto, cpu or cuda:N, got {device!r}")
        if args.seconds is not None and not 1 <= args.seconds <= 86400:
            raise InputError(f"--seconds: expected 1 to 86400, got {args.seconds:g}")
        return
    for name in ("device", "report", "seconds"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name} goes with --accelerator")


def run(args: argparse.Namespace) -> int:
    imported("torch")  # of which the check is told what is right
    path, device = args.report or REPORT, args.device or "auto"
    check_file(path)
    dtypes = OF_ANY_MODEL if args.dtype is None else (args.dtype,)
    system, before = read_system(), _moment()
    asked = Check(device, dtypes, args.seconds or SECONDS, tell, check.COMMAND)
    outcomes = asked.run()
    after = _moment()
    findings = findings_of(outcomes, before, after, device)
    document = report_of(
        outcomes,
        findings,
        system=system,
        before=before,
        after=after,
        device=device,
        seconds=asked.watch.s,
        names=private_names(),
    )
    write_file(path, document)
    if args.json:
        print(json.dumps(document))
    else:
        show(document, findings)
        print(f"\nwritten to {path}\n{SEND}")
    return 1 if any(finding.severity == PROBLEM for finding in findings) else 0


def tell(outcome: Outcome) -> None:
    """A line for each outcome, as it comes."""
    what = f"{outcome.step} {outcome.dtype}".strip()
    note(f"{what:18} {_in_short(outcome)} ({outcome.s:.1f} s)")


def _in_short(outcome: Outcome) -> str:
    found = outcome.found
    if outcome.state in UNDONE:
        return f"{outcome.state}: {outcome.fault}"
    if outcome.state != RIGHT:
        return f"WRONG: {outcome.fault}"
    if outcome.step == "torch":
        return f"{found['device']}, {found['facts']['name']}"
    if outcome.step == "kernels":
        return f"{found['kernel']} is right" if found["kernel"] else found["faults"]
    if outcome.step == "slice":
        return f"logits off by {found['logits_off']}, {found['logits_allowed']} allowed"
    if outcome.step == "verify":
        return f"{found['exact']} exact, {found['wrong']} wrong"
    return "right"


def _moment() -> BoardState:
    return BoardState(board=read_board(), clocks=read_clocks())


# ------------------------------------------------------------------------------------------------------- text


def show(document: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """What was found, on 80 columns."""
    console = Console(width=WIDTH, highlight=False)
    for line in _head(document):
        console.print(escape(line))
    console.print()
    show_table(COLUMNS, list(_rows(document["steps"])), numbers_from=2)
    for step in document["steps"]:
        if step["step"] == "verify" and step["found"]:
            console.print(f"\n{escape(_verified(step['found']))}")
    console.print()
    for finding in findings:
        console.print(escape(f"{finding.severity} {finding.check}: {finding.text}"))
        console.print(escape(f"  -> {finding.advice}"))
    count = document["problems"]
    undone = sum(step["state"] in UNDONE for step in document["steps"])
    but = f", {undone} not finished or left out" if undone else ""
    console.print(f"{count or 'no'} problem{'' if count == 1 else 's'}{but}, in {document['seconds']:.0f} s")


def _head(document: Mapping[str, Any]) -> list[str]:
    system, before, after = document["system"], document["before"]["board"], document["after"]["board"]
    software = document["software"]
    found = [step["found"] for step in document["steps"] if step["step"] == "torch" and step["found"]]
    lines = [before["model"] or system["processor"]]
    lines.append(f"{system['system']}, Python {software['python']}, torch {software['torch']}")
    for used in found[:1]:
        capability = used["facts"].get("capability")
        name = f"{used['facts']['name']}{f', capability {capability}' if capability else ''}"
        speed = f"reads {rounded(used['gb_per_s'])} GB/s"
        lines.append(f"{used['device']} ({name}): {mib(used['free_bytes'])} free, {speed}")
    modes = [moment["power_mode"] for moment in (before, after) if moment["power_mode"]]
    heat = [f"{moment['celsius']:.0f}" for moment in (before, after) if moment["celsius"] is not None]
    if modes:
        lines.append(f"power mode {' then '.join(dict.fromkeys(modes))}")
    if heat:
        lines.append(f"{' then '.join(heat)} degrees")
    return lines


def _rows(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A line for each precision, as `COLUMNS` has it."""
    parts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for step in steps:
        if step["dtype"] and step["step"] in ("kernels", "slice"):
            parts.setdefault(step["dtype"], {})[step["step"]] = step
    for dtype, found in parts.items():
        tried = found["kernels"]
        kernel = tried["found"].get("kernel") or ("-" if tried["state"] in UNDONE else "none")
        part = found.get("slice", {}).get("found")
        if not part:
            yield dtype, kernel, *["-"] * 6
            continue
        alone = "same" if not part["rows_alone"]["other_bits"] else f"{part['rows_alone']['off']:.1g}"
        times = [f"{part['pass_ms'][rows]:.1f}" for rows in ("1", "4", "16")]
        logits = [f"{part[name]:.2g}" for name in ("logits_off", "logits_allowed")]
        yield dtype, kernel, *logits, alone, *times


def _verified(found: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{method} {rate:.0f}" for method, rate in found["tokens_per_s"].items())
    counts = f"{found['exact']} exact, {found['wrong']} wrong"
    return f"verify in {found['dtype']}: {counts}\ntokens/s: {rates}"
