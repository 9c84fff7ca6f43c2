"""Does the cost model tell the time of a stage? Profiles this machine quickly, and compares with stages of
real models.

The stages are the second quarter of the bundled target, of a model made for this, of some hundred million
parameters, and of a mixture in Qwen3's layout, with OLMoE's numbers of experts. They are measured
in the same rounds as the profile, since a shared machine is not equally fast from minute to minute. Rows are
random, and so are weights: how many experts rows have in common is counted from what routers choose, and told
to the forecast.

    python -m tests.perf.cost_check [--rows 1,2,4,8,16,32] [--models mixture] [--dtype bfloat16] [--rounds 12]
        [--threads 1] [--cpu-time] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

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
from flowspec.core.protocol.precision import FILED, PRECISIONS, is_packed
from flowspec.errors import InputError
from flowspec.model.accelerator import find
from flowspec.model.experts import EXPERTS_NAME
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.plan.cost import layers_curve
from flowspec.plan.shape import ModelShape, shape_of
from tests.command import Parser, run_command

STAGES = 4
MADE = ModelShape(
    name="made", layers=8, hidden=1536, intermediate=4096, heads=24, kv_heads=8, head_dim=64, vocabulary=8192
)
MIXTURE = ModelShape(
    name="mixture",
    layers=4,
    hidden=1024,
    intermediate=8 * 768,
    heads=16,
    kv_heads=16,
    head_dim=64,
    vocabulary=8192,
    experts=64,
    experts_per_row=8,
)
MODELS = ("bundled", "made", "mixture")
Choices = list[list[set[int]]]
"""By layer, by row: the experts that it chooses."""
Clock = Callable[[], float]


def stage_of(machine: MeasuredMachine, files: ModelFiles, dtype: str) -> Slice:
    """The second quarter of a model's layers: neither embedding nor `lm_head`."""
    count = files.config().num_hidden_layers
    return Slice.load(
        files,
        Span(first=count // STAGES, end=2 * count // STAGES, count=count),
        dtype,
        machine.device,
    )


@contextmanager
def noted_choices() -> Iterator[Choices]:
    """What the routers of all passes meanwhile choose."""
    plain, noted = ALL_EXPERTS_FUNCTIONS[EXPERTS_NAME], Choices()

    def note(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        noted.append([set(row) for row in chosen.tolist()])
        found: torch.Tensor = plain(experts, hidden, chosen, weights)
        return found

    ALL_EXPERTS_FUNCTIONS[EXPERTS_NAME] = note
    try:
        yield noted
    finally:
        ALL_EXPERTS_FUNCTIONS[EXPERTS_NAME] = plain


def distinct(choices: Choices) -> float:
    """Experts that all rows of a pass choose together, the average of its layers."""
    return mean(len(set.union(*rows)) for rows in choices)


def shared(passes: Sequence[Choices]) -> float:
    """Of a row's experts those that the row before it chooses, too; 0 where no pass has two rows."""
    pairs = [pair for choices in passes for rows in choices for pair in pairwise(rows)]
    return mean(len(one & other) / len(other) for one, other in pairs) if pairs else 0.0


@torch.inference_mode()
def choices_of(tasks: Mapping[tuple[str, int], Task]) -> dict[tuple[str, int], Choices]:
    """Of each pass of a mixture what its routers choose, in one run."""
    found = {}
    for key, task in tasks.items():
        with noted_choices() as noted:
            task()
        if noted:
            found[key] = noted
    return found


def check(
    machine: MeasuredMachine,
    effort: Effort,
    rows: Sequence[int],
    models: Sequence[str],
    dtype: str,
    clock: Clock,
) -> dict[str, Any]:
    """The profile that was fitted, and for each model and number of rows what it predicts for `dtype` and
    what was measured."""
    stages: dict[str, tuple[ModelShape, Slice]] = {}
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            made = {"made": MADE, "mixture": MIXTURE}.get(name)
            files = ModelFiles(BUNDLED) if made is None else made_model(Path(folder), made)
            stages[name] = (shape_of(files.config(), name), stage_of(machine, files, dtype))
    tasks: dict[tuple[str, int], Task] = {
        (name, count): pass_task(machine, part, count) for name, (_, part) in stages.items() for count in rows
    }
    chosen = choices_of(tasks)
    for name, (shape, part) in stages.items():
        own = [choices for (of, _), choices in chosen.items() if of == name]
        stages[name] = replace(shape, experts_shared=shared(own)), part
    with progress("measuring", step_count(machine, effort, len(tasks))) as step:
        measured, spent = measure_beside(machine, effort, tasks, step, clock)
    profile = fit(measured, machine, "this machine", "measured")
    rates = profile.rates(dtype)
    table = []
    for (name, count), measured_s in spent.items():
        shape, part = stages[name]
        layers = part.span.end - part.span.first
        curve = layers_curve(profile, shape, dtype, layers)
        predicted_s = curve.seconds(count)
        experts = distinct(chosen[name, count]) if (name, count) in chosen else 0.0
        table.append(
            {
                "model": name,
                "params_millions": round((shape.params) / 1e6, 1),
                "stage_layers": layers,
                "rows": count,
                "experts_counted": round(experts, 1),
                "experts_predicted": round(shape.experts_per_row * curve.choices_of(count), 1)
                if experts
                else 0.0,
                "predicted_ms": round(1e3 * predicted_s, 3),
                "measured_ms": round(1e3 * measured_s, 3),
                "ratio": round(predicted_s / measured_s, 3),
            }
        )
    return {
        "device": str(machine.device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "gb_per_s": round(rates.gb_per_s, 2),
        "tflops": round(rates.tflops, 4),
        "serial": rates.serial,
        "layer_us": round(profile.layer_us, 1),
        "expert_us": round(profile.expert_us, 1),
        "pass_us": round(profile.pass_us, 1),
        "fit_error": round(error(profile, measured.layers[dtype], dtype), 3),
        "stages": table,
    }


def names(text: str) -> tuple[str, ...]:
    """For argparse: models with commas."""
    found = tuple(dict.fromkeys(text.split(",")))
    if not set(found) <= set(MODELS):
        raise argparse.ArgumentTypeError(f"expected names among {', '.join(MODELS)}, got {text!r:.80}")
    return found


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    here, packs = find(args.device), is_packed(args.dtype)
    if args.cpu_time and (args.threads > 1 or not here.is_cpu):
        raise InputError(
            "--cpu-time: expected one thread on a CPU; leave it out, or give --threads 1 and --device cpu"
        )
    machine = MeasuredMachine(
        device=here.device,
        dtype=here.usual_dtype if packs else args.dtype,
        packed=(args.dtype,) if packs else (),
    )
    effort = replace(QUICK, rounds=args.rounds).fitting(machine)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    found = check(machine, effort, args.rows, args.models, args.dtype, clock)
    if args.json:
        print(json.dumps(found))
        return 0
    show(
        f"{found['gb_per_s']} GB/s, {found['tflops']} TFLOP/s ({found['dtype']}), serial {found['serial']}, "
        f"{found['layer_us']} us a layer, {found['expert_us']} us an expert, {found['pass_us']} us a pass; "
        f"the fit is off by {100 * found['fit_error']:.0f}% (root mean square)",
        (
            *("model", "million parameters", "layers", "rows", "experts counted", "experts predicted"),
            *("predicted ms", "measured ms", "ratio"),
        ),
        [tuple(row.values()) for row in found["stages"]],
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.cost_check", __doc__)
    parser.add_argument(
        "--rows",
        type=positives,
        default=(1, 2, 4, 8, 16, 32),
        metavar="1,8",
        help="nodes of a pass (default: 1,2,4,8,16,32)",
    )
    parser.add_argument(
        "--models",
        type=names,
        default=MODELS,
        metavar="NAME[,NAME...]",
        help=f"what to run: any of {', '.join(MODELS)} (default: all)",
    )
    parser.whole("--rounds", 12, "runs of each task")
    parser.add_argument(
        "--dtype",
        choices=sorted(set(PRECISIONS) - {FILED}),
        default="float32",
        help="precision (default: %(default)s)",
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
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="by the processor time of the thread, which what else runs takes no part of",
    )
    return run_command(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
