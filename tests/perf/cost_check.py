"""Does the cost model tell the time of a stage? Profiles this machine quickly, and compares with stages of
real models.

The stages are the second quarter of the bundled target and of a model made for this, of some hundred million
parameters. They are measured in the same rounds as the profile, since a shared machine is not equally fast
from minute to minute.

    python -m tests.perf.cost_check [--rows 1,8,32,64] [--rounds 12] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowspec.bench.console import progress, show
from flowspec.bench.fitting import error, fit
from flowspec.bench.measure import (
    QUICK,
    Effort,
    MeasuredMachine,
    Task,
    made_model,
    measure_beside,
    pass_task,
    step_count,
)
from flowspec.cli.options import positive, positives
from flowspec.model.accelerator import find
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.kernels import DTYPES
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.plan.cost import layers_curve
from flowspec.plan.shape import ModelShape, shape_of
from tests.command import Parser, run_command

STAGES = 4
MADE = ModelShape(
    name="made", layers=8, hidden=1536, intermediate=4096, heads=24, kv_heads=8, head_dim=64, vocabulary=8192
)


def stage_of(machine: MeasuredMachine, files: ModelFiles) -> Slice:
    """The second quarter of a model's layers: neither embedding nor `lm_head`."""
    count = files.config().num_hidden_layers
    return Slice.load(
        files,
        Span(first=count // STAGES, end=2 * count // STAGES, count=count),
        machine.dtype,
        machine.device,
    )


def check(machine: MeasuredMachine, effort: Effort, rows: Sequence[int]) -> dict[str, Any]:
    """The profile that was fitted, and for each model and number of rows what it predicts and what was
    measured."""
    stages: dict[str, tuple[ModelShape, Slice]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, files in (("bundled", ModelFiles(BUNDLED)), ("made", made_model(Path(folder), MADE))):
            stages[name] = (shape_of(files.config(), name), stage_of(machine, files))
    tasks: dict[tuple[str, int], Task] = {
        (name, count): pass_task(machine, part, count) for name, (_, part) in stages.items() for count in rows
    }
    with progress("measuring", step_count(machine, effort, len(tasks))) as step:
        measured, spent = measure_beside(machine, effort, tasks, step)
    profile = fit(measured, machine, "this machine", "measured")
    table = []
    for (name, count), measured_s in spent.items():
        shape, part = stages[name]
        layers = part.span.end - part.span.first
        predicted_s = layers_curve(profile, shape, machine.dtype, layers).seconds(count)
        table.append(
            {
                "model": name,
                "params_millions": round((shape.params) / 1e6, 1),
                "stage_layers": layers,
                "rows": count,
                "predicted_ms": round(1e3 * predicted_s, 3),
                "measured_ms": round(1e3 * measured_s, 3),
                "ratio": round(predicted_s / measured_s, 3),
            }
        )
    return {
        "device": str(machine.device),
        "dtype": machine.dtype,
        "threads": torch.get_num_threads(),
        "gb_per_s": round(profile.memory_gb_per_s, 2),
        "tflops": round(profile.tflops[machine.dtype], 4),
        "serial": profile.serial,
        "layer_us": round(profile.layer_us, 1),
        "pass_us": round(profile.pass_us, 1),
        "fit_error": round(error(profile, measured.layers[machine.dtype], machine.dtype), 3),
        "stages": table,
    }


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    machine = MeasuredMachine(device=find(args.device).device, dtype=args.dtype)
    found = check(machine, replace(QUICK, rounds=args.rounds).fitting(machine), args.rows)
    if args.json:
        print(json.dumps(found))
        return 0
    show(
        f"{found['gb_per_s']} GB/s, {found['tflops']} TFLOP/s ({found['dtype']}), serial {found['serial']}, "
        f"{found['layer_us']} us a layer, "
        f"{found['pass_us']} us a pass; the fit is off by {100 * found['fit_error']:.0f}% (root mean square)",
        ("model", "million parameters", "layers", "rows", "predicted ms", "measured ms", "ratio"),
        [tuple(row.values()) for row in found["stages"]],
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.cost_check", __doc__)
    parser.add_argument(
        "--rows",
        type=positives,
        default=(1, 8, 32, 64),
        metavar="1,8",
        help="nodes of a pass (default: 1,8,32,64)",
    )
    parser.whole("--rounds", 12, "runs of each task")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="float32", help="precision (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=1,
        metavar="N",
        help="torch threads (default: 1, as local daemons)",
    )
    return run_command(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
