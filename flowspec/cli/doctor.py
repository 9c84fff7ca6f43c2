"""Check every device and link of a cluster, or this machine; tell what is wrong and what to do.

Exit status: 0 when nothing is wrong (there may be warnings), 1 when there is a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.markup import escape

from flowspec.bench.console import progress
from flowspec.cli.options import LOCAL, add_model_arguments, cluster_options
from flowspec.cli.result import Result
from flowspec.cli.terminal import broken_for
from flowspec.core.protocol.device_messages import AskFacts, LinkFacts
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.plan.memory import PROCESS_BYTES, mib
from flowspec.runtime.cluster import Device, stage_devices
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.health.diagnose import PROBLEM, Finding, diagnose, rate
from flowspec.runtime.health.examine import Examined, examine
from flowspec.runtime.health.gather import read_software
from flowspec.runtime.health.needs import ModelNeeds, find_needs
from flowspec.runtime.health.this_machine import describe, measure_apart
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.planning.survey import machine_of, usable_memory
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.validation import as_dict
from flowspec.version import __version__

PROBLEMS = 1
"""Exit status."""
COLOURS = {"problem": "red", "warning": "yellow", "note": "blue"}
COLUMNS = (
    "device",
    "layers",
    "FlowSpec",
    "torch",
    "may use",
    "layers need",
    "interface",
    "from here",
    "onward",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    options = cluster_options(args, args.local or LOCAL)
    keys = None
    if options.cluster is not None:
        devices = read_cluster(options.cluster)
        keys = cluster_keys(options.cluster, devices)
    else:
        devices = [Device(name=f"local-{index}", address="") for index in range(options.local)]
    needs = find_needs(options, stage_devices(devices), keys)
    order = [need.device for need in needs.stages]
    devices = sorted(
        devices, key=lambda device: order.index(device.name) if device.name in order else len(order)
    )
    with contextlib.ExitStack() as stack:
        if options.cluster is None:
            level = "INFO" if args.verbose else "WARNING"
            cluster = LocalCluster(options.local, log_level=level, log_file=options.log_file)
            devices = [
                Device(name=daemon.name, address=daemon.address)
                for daemon in stack.enter_context(cluster).wait()
            ]
        steps = 3 * len(devices) - 1  # each, its link from here, and its link to the next
        step = stack.enter_context(progress("asking", steps))
        found = examine(
            devices,
            AskFacts(model=needs.model, fingerprint=needs.fingerprint, dtype=needs.dtype),
            step=step,
            tell=lambda text, share: step(f"{text} ({share:.0%})", 0),
            keys=keys,
        )
        measured: dict[str, Any] = {}
        if options.cluster is None:
            step("this machine", 0)
            measured = measure_apart()
    findings = diagnose(found, read_software(), needs, measured)
    if args.json:
        print(json.dumps(report(found, findings, needs, measured)))
    else:
        show(found, findings, needs, measured)
    return PROBLEMS if any(finding.severity == PROBLEM for finding in findings) else 0


# ------------------------------------------------------------------------------------------------------- JSON


def report(
    found: Sequence[Examined], findings: Sequence[Finding], needs: ModelNeeds, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """What `--json` prints."""
    count = Counter(finding.severity for finding in findings)
    return {
        "version": __version__,
        "model": needs.model,
        "dtype": needs.dtype,
        "context": needs.context,
        "problems": count["problem"],
        "warnings": count["warning"],
        "findings": [finding._asdict() for finding in findings],
        "devices": [
            {
                "name": each.device.name,
                "address": each.device.address,
                "layers": need and [need.first, need.end],
                "need_bytes": need and need.memory.total_bytes,
                "version": each.welcome and each.welcome.version,
                "trip_s": each.trip_s,
                "clock_offset_s": each.clock_offset_s,
                "own_interface": each.own and as_dict(each.own),
                "facts": each.facts and as_dict(each.facts),
                "from_head": each.from_head and as_dict(each.from_head),
                "onward": each.onward and as_dict(each.onward),
            }
            for each, need in ((each, needs.of(each.device.name)) for each in found)
        ],
        **({"this_machine": measured} if measured else {}),
    }


# ------------------------------------------------------------------------------------------------------- text


def show(
    found: Sequence[Examined], findings: Sequence[Finding], needs: ModelNeeds, measured: Mapping[str, Any]
) -> None:
    answered = [each for each in found if each.facts is not None]
    usable = usable_memory(answered, {each.device.name: machine_of(each.device.address) for each in answered})
    result = Result()
    rows = [_row(each, needs, usable.get(each.device.name, 0)) for each in found]
    result.table(COLUMNS, rows, texts=len(COLUMNS))
    result.print()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    parts = f"weights, cache for {needs.context} tokens and {mib(WORK_BYTES)} to work in"
    also = f"{mib(PROCESS_BYTES)} more are set aside for the daemon's process, which mostly takes less"
    lines = [f"layers of {PurePath(needs.model).name} need: {parts}; {also}"]
    best: dict[str, list[str]] = {}
    for each in answered:
        if each.facts and each.facts.kernel and each.facts.kernel.arithmetics:
            best.setdefault(each.facts.kernel.arithmetics[0], []).append(each.device.name)
    lines += [f"best arithmetic of {', '.join(names)}: {arithmetic}" for arithmetic, names in best.items()]
    lines += [describe(measured)] if measured and "fault" not in measured else []
    for line in lines:
        console.print(broken_for(sys.stdout, line), markup=False, soft_wrap=True)
    console.print()
    for finding in findings:
        colour, severity = COLOURS[finding.severity], finding.severity
        said = broken_for(sys.stdout, f"{severity} {finding.device}: {finding.text}").removeprefix(severity)
        console.print(f"[{colour}]{severity}[/]{escape(said)}", soft_wrap=True)
        console.print(escape(broken_for(sys.stdout, f"        -> {finding.advice}")), soft_wrap=True)
    count = Counter(finding.severity for finding in findings)
    if findings:
        console.print()
    console.print(f"{_many(count['problem'], 'problem')}, {_many(count['warning'], 'warning')}")


def _row(each: Examined, needs: ModelNeeds, usable_bytes: int) -> list[str]:
    need, facts = needs.of(each.device.name), each.facts
    layers = "-" if need is None else f"{need.first}-{need.end - 1}"
    size = "-" if need is None else mib(need.memory.total_bytes)
    if facts is None:
        return [each.device.name, layers, "-", "-", "-", size, "-", "-", "-"]
    interface, software = facts.interface, facts.software
    speed = f" {interface.speed_mbps} Mbit/s" if interface is not None and interface.speed_mbps else ""
    return [
        each.device.name,
        layers,
        each.welcome.version if each.welcome is not None else "-",
        f"{software.torch or '-'}{f' (CUDA {software.cuda})' if software.cuda else ''}",
        mib(usable_bytes),
        size,
        f"{interface.name}, {interface.kind}{speed}" if interface is not None else "-",
        *("-" if link is None or link.problem else _link(link) for link in (each.from_head, each.onward)),
    ]


def _link(found: LinkFacts) -> str:
    return f"{1000 * found.latency_s:.2f} ms, {rate(found.bandwidth_mbps)}"


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
