"""Measure this machine (and its links to other daemons), and write a device profile for planning and
simulating.

The file is of the kind of devices/*.toml. What is measured is effective, so that its efficiencies are 1; the
raw times are kept in it, too. Packed precisions are measured with the kernels that a stage would use here. A
cluster's daemons should be idle meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowspec.bench.console import progress
from flowspec.bench.profile import LM_HEAD, QUICK, Effort, MeasuredMachine, error, fit, measure, report
from flowspec.cli.options import check_new_toml, positive, write_file
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.core.protocol.precision import PACKED, PRECISIONS, UNPACKED
from flowspec.errors import ClusterError, InputError
from flowspec.model.accelerator import Accelerator, find
from flowspec.model.arithmetic.compiled import threads, use_threads
from flowspec.model.engines import prepare, run_trial, torch_version
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.tables import toml_of
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.device.links import measure_link
from flowspec.runtime.device.report import kept_profile
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.validation import as_dict

FIT_POOR = 0.3  # something disturbed the times then: on idle machines .05 to .2 were seen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    text = "where to write it (default: the host's name, in this folder)"
    where.add_argument("--out", type=Path, metavar="FILE.toml", help=text)
    text = "write it where this user's daemons find it, over an older one"
    where.add_argument("--keep", action="store_true", help=text)
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    text = "measure the links to this cluster's daemons, too"
    parser.add_argument("--cluster", type=Path, metavar="FILE.toml", help=text)
    text = Rare(
        f"precisions: one of {', '.join(UNPACKED)} (default: float32, on CUDA float16), and any of "
        f"{', '.join(PACKED)} (default: all)"
    )
    parser.add_argument("--dtype", type=precisions, metavar="NAME[,NAME...]", help=text)
    text = Rare("what to measure (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    text = Rare("threads that compute (default: one on each core, or OMP_NUM_THREADS)")
    parser.add_argument("--threads", type=positive, metavar="N", help=text)
    text = "fewer and smaller measurements: seconds instead of minutes"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print what was measured as one JSON object")


def precisions(text: str) -> tuple[str, ...]:
    """For argparse: names with commas, of which one at most is not packed."""
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= PRECISIONS.keys() or len(set(names) & set(UNPACKED)) > 1:
        raise argparse.ArgumentTypeError(
            f"expected names among {', '.join(PRECISIONS)}, and one of {', '.join(UNPACKED)} at most, got "
            f"{text!r:.80}"
        )
    return names


def run(args: argparse.Namespace) -> int:
    host = socket.gethostname()
    out = args.out or Path(f"{re.sub('[^A-Za-z0-9_-]', '-', host.split('.')[0]) or 'machine'}.toml")
    if args.keep:
        out = kept_profile()
        out.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_new_toml("--out", out, force=args.force or args.keep)
    if not out.parent.is_dir():
        raise InputError(f"--out: expected a file in a folder that exists, got {out}")
    devices = [] if args.cluster is None else read_cluster(args.cluster)
    keys = None if args.cluster is None else cluster_keys(args.cluster, devices)
    prepare()
    here = find(args.device)
    use_threads(args.threads)
    machine = measured_machine(here, args.dtype)
    effort = (QUICK if args.quick else Effort()).fitting(machine)
    work = "links to other devices" if devices else "measuring"
    with progress(work, effort.step_count(machine) + len(devices)) as step:
        links = {}
        for device in devices:
            links[device.name] = link = measure_link(device, keys)
            if link.problem:
                raise ClusterError(f"{device.name} at {device.address}: {link.problem}")
            step(f"link to {device.name}")
        times = measure(machine, effort, step)
    basis = f"measured by flowspec profile on {datetime.date.today().isoformat()}"
    source = basis if here.is_cpu else f"{basis}, torch {torch_version()}"
    profile, measured = fit(times, machine, out.stem, basis), report(machine, times, links)
    shape = times[LM_HEAD][0].shape
    size = {"lm_head_size": [shape.hidden, shape.vocabulary]}
    about = f"{host} ({here.name}, {threads()} threads)"
    check_new_toml("--out", out, force=args.force or args.keep)
    write_file("--out", out, profile_text(profile, about, source, {**size, **measured}))
    if args.json:
        print(json.dumps({"file": str(out), "profile": tables(profile), "measured": measured}))
    else:
        for dtype in machine.dtypes:
            rates = profile.rates(dtype)
            print(f"{dtype}: {rates.gb_per_s:.1f} GB/s, {1000 * rates.tflops:.1f} GFLOP/s")
        print(f"{profile.layer_us:.0f} us a layer, {profile.expert_us:.0f} us an expert")
        for name, link in links.items():
            print(f"{name}: {1000 * link.latency_s:.2f} ms, {link.bandwidth_mbps:.0f} Mbit/s")
        print(f"written to {out}")
    off = {dtype: error(profile, times[dtype]) for dtype in machine.dtypes}
    far = ", ".join(f"{dtype} {100 * share:.0f}%" for dtype, share in off.items())
    note(f"the cost model is off by so much (root mean square) from the times it was fitted to: {far}")
    if max(off.values()) > FIT_POOR:
        note("that is too much to plan with: something else used the machine; measure again when it is idle")
    if not here.is_cpu:
        note(
            "FlowSpec's makers ran it on two servers' GPUs: docs/devices.md tells how to send in what you see"
        )
    return 0


def measured_machine(here: Accelerator, asked: Sequence[str] | None) -> MeasuredMachine:
    """What is measured where these precisions are asked for; with None the usual one and the packed ones that
    have a right kernel here. Raises `InputError` for one that was asked for and has none."""
    packed = []
    for dtype in PACKED if asked is None else filter(PACKED.__contains__, asked):
        try:
            run_trial(dtype, here.device)
            packed.append(dtype)
        except InputError as problem:
            if asked is not None:
                raise
            note(f"{dtype} is not measured: {problem}")
    own = next(filter(UNPACKED.__contains__, asked or ()), "float32" if here.is_cpu else "float16")
    return MeasuredMachine(device=here.device, dtype=own, packed=tuple(packed))


def tables(profile: DeviceProfile) -> dict[str, dict[str, Any]]:
    """Of the file, power left out: nothing here can measure it."""

    def rounded(table: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value if key == "basis" else float(f"{value:.4g}") for key, value in table.items()}

    memory = rounded({"gb_per_s": profile.memory_gb_per_s, "efficiency": 1.0})
    return {
        "memory": {"gb": round(profile.memory_gb, 2), **memory},
        "compute": rounded({**profile.tflops, "efficiency": 1.0, "serial": profile.serial}),
        **{f"packed.{dtype}": rounded(as_dict(rates)) for dtype, rates in profile.packed.items()},
        "overhead": {name: round(getattr(profile, name), 1) for name in ("layer_us", "expert_us", "pass_us")},
    }


def profile_text(profile: DeviceProfile, about: str, source: str, measured: Mapping[str, Any]) -> str:
    """The file, every number with where it is from."""
    comments = {
        "gb": "all of the device's memory",
        "gb_per_s": f"{source}: fitted to layers of few rows",
        "efficiency": "what is measured is what is reached",
        **dict.fromkeys((*profile.tflops, "tflops"), f"{source}: fitted to layers of many rows"),
        "serial": f"{source}: the share of computing that reading does not hide",
        "basis": "for people",
        **dict.fromkeys(("layer_us", "pass_us"), f"{source}: tiny layers"),
        "expert_us": f"{source}: tiny layers with few and many experts a row",
    }
    about_power = f"# {source}. No [power]: it has to be read from a meter.\n"
    known = toml_of({"description": about, **tables(profile)}, comments)
    return f"{about_power}{known}\n# {source}; milliseconds by rows\n{toml_of({'measured': measured})}"
