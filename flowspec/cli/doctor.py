"""Check every device and link of a cluster, or this machine; tell what is wrong and what to do.

Exit status: 0 when nothing is wrong (there may be warnings), 1 when there is a problem.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from flowspec.bench.console import progress
from flowspec.cli.options import LOCAL, add_model_arguments, cluster_options
from flowspec.cli.result import Result
from flowspec.core.protocol.device_messages import AskFacts, Facts, Interface, LinkFacts
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.plan.memory import PROCESS_BYTES, mib
from flowspec.rounding import rounded
from flowspec.runtime.cluster import Device, stage_devices
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.device.links import DeviceReport
from flowspec.runtime.device.report import measure_apart, read_software
from flowspec.runtime.doctor import PROBLEM, ModelNeeds, diagnose, examine, find_needs, rate
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.pipeline_connections import KERNELS, told_of
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.runtime.survey import usable_memory
from flowspec.validation import as_dict
from flowspec.version import __version__

PROBLEMS = 1
"""Exit status."""
COLOURS = {"problem": "red", "warning": "yellow", "note": "blue"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    options, keys = cluster_options(args, args.local or LOCAL), None
    if options.cluster is not None:
        devices = read_cluster(options.cluster)
        keys = cluster_keys(options.cluster, devices)
    else:
        devices = [Device(name=f"local-{index}", address="") for index in range(options.local)]
    needs = find_needs(options, stage_devices(devices), keys)
    plan, measured = needs.plan, dict[str, Any]()
    order = [stage.name for stage in plan.stages]
    devices.sort(key=lambda device: order.index(device.name) if device.name in order else len(order))

    def tell(name: str, doing: str, share: float) -> None:
        far = f" ({share:.0%})" if doing in KERNELS else ""
        step(f"{told_of(name, doing)}{far}", share == 1 and not far)

    with contextlib.ExitStack() as stack:
        if options.cluster is None:
            level = "INFO" if args.verbose else "WARNING"
            cluster = LocalCluster(options.local, log_level=level, log_file=options.log_file)
            daemons = stack.enter_context(cluster).wait()
            devices = [Device(name=daemon.name, address=daemon.address) for daemon in daemons]
        steps = 3 * len(devices) - 1  # each, its link from here, and its link to the next
        step = stack.enter_context(progress("asking", steps))
        reports = examine(
            devices,
            keys,
            AskFacts(model=plan.model, fingerprint=plan.fingerprint, dtype=plan.dtype),
            tell,
        )
        if options.cluster is None:
            step("this machine", 0)
            measured = measure_apart()
    findings = diagnose(reports, read_software(), needs, measured)
    count = Counter(finding.severity for finding in findings)
    result = Result(
        {
            "version": __version__,
            "model": plan.model,
            "dtype": plan.dtype,
            "context": plan.context,
            "problems": count["problem"],
            "warnings": count["warning"],
            "findings": [finding._asdict() for finding in findings],
            "devices": [_document(report, needs) for report in reports],
            **({"this_machine": measured} if measured else {}),
        }
    )
    _show_devices(result, reports, needs)
    if measured and "fault" not in measured:
        result.note(describe(measured))
    result.note()
    for severity, device, _, text, advice in findings:
        result.note(f"{severity} {device}: {text}", COLOURS[severity])
        result.note(f"        -> {advice}")
    if findings:
        result.note()
    counts = ((count[each], each) for each in ("problem", "warning"))
    result.note(", ".join(f"{number or 'no'} {each}{'s' * (number != 1)}" for number, each in counts))
    result.print(as_json=args.json)
    return PROBLEMS if count[PROBLEM] else 0


def describe(measured: Mapping[str, Any]) -> str:
    """The figures of this machine, in a line."""
    name, speed = measured["facts"]["name"], "speed unknown"
    if measured["speed"]:
        speed = f"reads {rounded(measured['speed']['gb_per_s'])} GB/s"
    if measured["no_gpu"]:
        return f"this machine has no GPU to use ({measured['no_gpu']}); {name}: {speed}"
    right = [each["dtype"] for each in measured["kernels"] if each["kernel"]]
    memory = f"{mib(measured['free_bytes'])} of {mib(measured['facts']['total_bytes'])} free"
    return f"this machine's GPU {name}: {memory}, {speed}, right in {', '.join(right) or 'no precision'}"


def _document(report: DeviceReport, needs: ModelNeeds) -> dict[str, Any]:
    stage = needs.stage_of(report.device.name)
    return {
        "name": report.device.name,
        "address": report.device.address,
        "layers": stage and [stage.first, stage.end],
        "need_bytes": stage and needs.memory[stage.name].total_bytes,
        "version": report.welcome and report.welcome.version,
        "trip_s": report.trip_s,
        "clock_offset_s": report.clock_offset_s,
        "own_interface": as_dict(report.own),
        "facts": as_dict(report.facts),
        "from_head": as_dict(report.from_head),
        "onward": as_dict(report.onward),
    }


def _show_devices(result: Result, reports: Sequence[DeviceReport], needs: ModelNeeds) -> None:
    """What each has, and what its layers need."""
    usable, stages = usable_memory(reports), {stage.name: stage for stage in needs.plan.stages}

    def show_layers(report: DeviceReport) -> str | None:
        stage = stages.get(report.device.name)
        return None if stage is None else f"{stage.first}-{stage.end - 1}"

    def show_torch(facts: Facts) -> str:
        cuda = f" (CUDA {facts.software.cuda})" if facts.software.cuda else ""
        return f"{facts.software.torch or '-'}{cuda}"

    def show_interface(interface: Interface) -> str:
        speed = f" {interface.speed_mbps} Mbit/s" if interface.speed_mbps else ""
        return f"{interface.name}, {interface.kind}{speed}"

    def show_link(link: LinkFacts | None) -> str | None:
        return (
            None
            if link is None or link.problem
            else f"{1000 * link.latency_s:.2f} ms, {rate(link.bandwidth_mbps)}"
        )

    columns: dict[str, Callable[[DeviceReport], object]] = {
        "device": lambda each: each.device.name,
        "layers": show_layers,
        "FlowSpec": lambda each: each.welcome.version if each.facts and each.welcome else None,
        "torch": lambda each: each.facts and show_torch(each.facts),
        "may use": lambda each: mib(usable[each.device.name]) if each.facts else None,
        "layers need": lambda each: (
            mib(needs.memory[each.device.name].total_bytes) if each.device.name in stages else None
        ),
        "interface": lambda each: (
            each.facts and each.facts.interface and show_interface(each.facts.interface)
        ),
        "from here": lambda each: show_link(each.from_head),
        "onward": lambda each: show_link(each.onward),
    }
    result.table(columns, reports, texts=len(columns))
    parts = f"weights, cache for {needs.plan.context} tokens and {mib(WORK_BYTES)} to work in"
    also = f"{mib(PROCESS_BYTES)} more are set aside for the daemon's process, which mostly takes less"
    result.note(f"layers of {PurePath(needs.plan.model).name} need: {parts}; {also}")
    best: dict[str, list[str]] = {}
    for each in reports:
        if each.facts and each.facts.kernel and each.facts.kernel.arithmetics:
            best.setdefault(each.facts.kernel.arithmetics[0], []).append(each.device.name)
    for arithmetic, names in best.items():
        result.note(f"best arithmetic of {', '.join(names)}: {arithmetic}")
