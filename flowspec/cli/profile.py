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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec.cli.options import positive
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.core.protocol.precision import PACKED, PRECISIONS, UNPACKED
from flowspec.errors import InputError
from flowspec.plan.tables import toml_of
from flowspec.runtime.health.own_speed import kept_profile

if TYPE_CHECKING:
    from flowspec.bench.measure import MachineTimes, MeasuredMachine
    from flowspec.model.accelerator import Accelerator
    from flowspec.plan.profile import DeviceProfile
    from flowspec.runtime.links import MeasuredPeer

FIT_POOR = 0.3
"""A cost model that is farther off was fitted to times that something else disturbed: on idle machines .05 to
.2 were seen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="where to write it (default: the host's name, in this folder)",
    )
    where.add_argument(
        "--keep", action="store_true", help="write it where this user's daemons find it, over an older one"
    )
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE.toml", help="measure the links to this cluster's daemons, too"
    )
    parser.add_argument(
        "--dtype",
        type=precisions,
        metavar="NAME[,NAME...]",
        help=Rare(
            f"precisions: one of {', '.join(UNPACKED)} (default: float32, on CUDA float16), and any of "
            f"{', '.join(PACKED)} (default: all)"
        ),
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help=Rare("what to measure (default: %(default)s)"),
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help=Rare("threads that compute (default: one on each core, or OMP_NUM_THREADS)"),
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller measurements: seconds instead of minutes"
    )
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
    out = (
        kept_profile()
        if args.keep
        else args.out or Path(f"{re.sub('[^A-Za-z0-9_-]', '-', host.split('.')[0]) or 'machine'}.toml")
    )
    if args.keep:
        out.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_out(out, args.force or args.keep)
    from flowspec.model.trials import prepare, torch_version
    from flowspec.runtime.cluster_file import read_cluster
    from flowspec.runtime.security.cluster_keys import cluster_keys

    devices = [] if args.cluster is None else read_cluster(args.cluster)
    keys = None if args.cluster is None else cluster_keys(args.cluster, devices)
    prepare()
    from flowspec.bench.console import progress
    from flowspec.bench.fitting import error, fit
    from flowspec.bench.measure import QUICK, Effort, measure_beside, step_count
    from flowspec.model.accelerator import find, use_threads
    from flowspec.runtime.links import measure_links

    here = find(args.device)
    use_threads(args.threads)
    machine = measured_machine(here, args.dtype)
    effort = (QUICK if args.quick else Effort()).fitting(machine)
    with progress(
        "links to other devices" if devices else "measuring", step_count(machine, effort) + 2 * len(devices)
    ) as step:
        peers = measure_links(devices, step, keys=keys)
        measured, _ = measure_beside(machine, effort, {}, step)
    basis = f"measured by flowspec profile on {datetime.date.today().isoformat()}"
    profile = fit(measured, machine, out.stem, basis)
    source = basis if here.is_cpu else f"{basis}, torch {torch_version()}"
    text = profile_text(profile, machine, measured, peers, host, source)
    _check_out(out, args.force or args.keep)
    try:
        out.write_text(text, "utf-8")
    except OSError as problem:
        raise InputError(
            f"--out: expected a file that can be written, got {out} ({problem.strerror})"
        ) from None
    off = {dtype: error(profile, points, dtype) for dtype, points in measured.layers.items()}
    if args.json:
        print(
            json.dumps(
                {"file": str(out), "profile": numbers(profile), "measured": raw(machine, measured, peers)}
            )
        )
    else:
        for dtype in off:
            rates = profile.rates(dtype)
            print(f"{dtype}: {rates.gb_per_s:.1f} GB/s, {1000 * rates.tflops:.1f} GFLOP/s")
        print(f"{profile.layer_us:.0f} us a layer, {profile.expert_us:.0f} us an expert")
        for peer in peers:
            print(f"{peer.name}: {1000 * peer.latency_s:.2f} ms, {peer.bandwidth_mbps:.0f} Mbit/s")
        print(f"written to {out}")
    far = ", ".join(f"{dtype} {100 * share:.0f}%" for dtype, share in off.items())
    note(f"the cost model is off by so much (root mean square) from the times it was fitted to: {far}")
    if max(off.values(), default=0.0) > FIT_POOR:
        note("that is too much to plan with: something else used the machine; measure again when it is idle")
    if not here.is_cpu:
        note(
            "FlowSpec's makers ran it on two servers' GPUs: docs/devices.md tells how to send in what you see"
        )
    return 0


def measured_machine(here: Accelerator, asked: Sequence[str] | None) -> MeasuredMachine:
    """What is measured where these precisions are asked for; with None the usual one and the packed ones that
    have a right kernel here. Raises `InputError` for one that was asked for and has none."""
    from flowspec.bench.measure import MeasuredMachine
    from flowspec.model.trials import run_trial

    packed = []
    for dtype in PACKED if asked is None else filter(PACKED.__contains__, asked):
        try:
            run_trial(dtype, here.device)
        except InputError as problem:
            if asked is not None:
                raise
            note(f"{dtype} is not measured: {problem}")
        else:
            packed.append(dtype)
    usual = "float32" if here.is_cpu else "float16"
    own = next(filter(UNPACKED.__contains__, asked or ()), usual)
    return MeasuredMachine(device=here.device, dtype=own, packed=tuple(packed))


def _check_out(out: Path, force: bool) -> None:
    if out.suffix != ".toml":
        raise InputError(f"--out: expected a file that ends with .toml, got {out}")
    if not out.parent.is_dir():
        raise InputError(f"--out: expected a file in a folder that exists, got {out}")
    if out.exists() and not force:
        raise InputError(f"{out} exists; give --force to overwrite it, or another file with --out")


def numbers(profile: DeviceProfile) -> dict[str, dict[str, Any]]:
    """The tables of the file, power left out: nothing here can measure it."""
    rounded = {key: float(f"{value:.4g}") for key, value in profile.tflops.items()}
    return {
        "memory": {
            "gb": round(profile.memory_gb, 2),
            "gb_per_s": float(f"{profile.memory_gb_per_s:.4g}"),
            "efficiency": 1.0,
        },
        "compute": {**rounded, "efficiency": 1.0, "serial": profile.serial},
        **{
            f"packed.{dtype}": {
                "gb_per_s": float(f"{rates.gb_per_s:.4g}"),
                "tflops": float(f"{rates.tflops:.4g}"),
                "serial": rates.serial,
                "basis": rates.basis,
            }
            for dtype, rates in profile.packed.items()
        },
        "overhead": {
            "layer_us": round(profile.layer_us, 1),
            "expert_us": round(profile.expert_us, 1),
            "pass_us": round(profile.pass_us, 1),
        },
    }


def raw(machine: MeasuredMachine, measured: MachineTimes, peers: Sequence[MeasuredPeer]) -> dict[str, Any]:
    """What was measured: milliseconds by rows (of a layer by precision and width, too), links by device name,
    and which kernels those of packed precisions are."""
    from flowspec.model.trials import run_trial

    layers: dict[str, dict[str, dict[str, float]]] = {}
    for dtype, points in measured.layers.items():
        for point in points:
            by_rows = layers.setdefault(dtype, {}).setdefault(str(point.shape.hidden), {})
            by_rows[str(point.rows)] = round(1e3 * point.s / point.layers, 4)
    return {
        "dtype": machine.dtype,
        "device": machine.device,
        "kernels": {dtype: run_trial(dtype, machine.device).arithmetics[0] for dtype in machine.packed},
        "layer_ms": layers,
        "tiny_pass_ms": {str(point.layers): round(1e3 * point.s, 4) for point in measured.tiny},
        "tiny_experts_pass_ms": {
            str(point.shape.experts_per_row): round(1e3 * point.s, 4) for point in measured.tiny_mixtures
        },
        "lm_head_ms": {str(rows): round(1e3 * spent, 4) for rows, spent in measured.lm_head_s.items()},
        "drafter_ms": {str(rows): round(1e3 * spent, 4) for rows, spent in measured.drafter_s.items()},
        "links": {
            peer.name: {
                "latency_ms": round(1e3 * peer.latency_s, 3),
                "mbit_per_s": round(peer.bandwidth_mbps, 1),
            }
            for peer in peers
        },
    }


def profile_text(
    profile: DeviceProfile,
    machine: MeasuredMachine,
    measured: MachineTimes,
    peers: Sequence[MeasuredPeer],
    host: str,
    source: str,
) -> str:
    """The file, every number with where it is from."""
    from flowspec.model.accelerator import accelerator_of
    from flowspec.model.arithmetic.compiled import threads

    (dtype,) = profile.tflops
    comments = {
        "gb": "all of the device's memory",
        "gb_per_s": f"{source}: fitted to layers of few rows",
        "efficiency": "what is measured is what is reached",
        dtype: f"{source}: fitted to layers of many rows",
        "tflops": f"{source}: fitted to layers of many rows",
        "serial": f"{source}: the share of computing that reading does not hide",
        "basis": "for people",
        "layer_us": f"{source}: tiny layers",
        "expert_us": f"{source}: tiny layers with few and many experts a row",
        "pass_us": f"{source}: tiny layers",
    }
    about = f"{host} ({accelerator_of(machine.device).name}, {threads()} threads)"
    size = [measured.lm_head_shape.hidden, measured.lm_head_shape.vocabulary]
    times = {"lm_head_size": size, **raw(machine, measured, peers)}
    return (
        f"# {source}. No [power]: it has to be read from a meter.\n"
        + toml_of({"description": about, **numbers(profile)}, comments)
        + f"\n# {source}; milliseconds by rows\n"
        + toml_of({"measured": times})
    )
