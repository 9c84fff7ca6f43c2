"""Precisions beside each other on this machine: memory of the weights, and a pass of one row and of segments
of rows, as ratios.

Each precision's model is loaded whole in a process of its own, one thread; these take turns, so that other
load meets all alike. A pass is a chain of rows through all layers and `lm_head`; its time is the least of all
rounds.

python -m flowspec.bench.checkpoints FOLDER --gigabyte python -m tests.perf.packed --model FOLDER
[--dtypes bfloat16,int8,int4] [--rows 1,4,16,32] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from flowspec.bench.console import progress, show
from flowspec.cli.options import positive, positives
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.plan.memory import mib
from tests.command import Parser, run_command


def serve(pipe: Connection, model: str, dtype: str, rows: Sequence[int]) -> None:
    """Loads a model, says how many bytes its weights are, and answers each number of rows with the seconds of
    a pass."""
    import torch

    from flowspec.bench.measure import MeasuredMachine, head_task, pass_task
    from flowspec.model.pieces import Span
    from flowspec.model.slice import Slice

    torch.set_num_threads(1)
    machine = MeasuredMachine(device=torch.device("cpu"), dtype=dtype)
    files = ModelFiles(model)
    count = files.config().num_hidden_layers
    part = Slice.load(files, Span(first=0, end=count, count=count), dtype, machine.device)
    with torch.inference_mode():
        tasks = {each: (pass_task(machine, part, each), head_task(machine, part, each)) for each in rows}
        pipe.send(part.weight_bytes)
        while (asked := pipe.recv()) is not None:
            began_s = time.perf_counter()
            for task in tasks[asked]:
                task()
            pipe.send(time.perf_counter() - began_s)


def measure(model: str, dtypes: Sequence[str], rows: Sequence[int], rounds: int) -> dict[str, Any]:
    """By precision: bytes of weights, least seconds of a pass by rows, and both beside the first one's."""
    ModelFiles(model).config()  # what is wrong with the model is said here, not in a child
    found = take_turns({dtype: (serve, (model, dtype, rows)) for dtype in dtypes}, rows, rounds)
    first = found[dtypes[0]]
    return {
        dtype: {
            "weight_bytes": each.weight_bytes,
            "memory_ratio": each.weight_bytes / first.weight_bytes,
            "pass_s": {str(count): each.pass_s[count] for count in rows},
            "rows_per_s_ratio": {str(count): first.pass_s[count] / each.pass_s[count] for count in rows},
        }
        for dtype, each in found.items()
    }


@dataclass(frozen=True, slots=True)
class Passes:
    """What a model takes: bytes of its weights, and the least seconds of a pass by rows."""

    weight_bytes: int
    pass_s: dict[int, float]


def take_turns(
    servers: Mapping[str, tuple[Callable[..., None], tuple[Any, ...]]], rows: Sequence[int], rounds: int
) -> dict[str, Passes]:
    """Runs each server, by name, in a process of its own, and asks one after another for passes.

    A server is a function of a pipe and further arguments. It sends the bytes of its weights, then for each
    number of rows that it receives the seconds of a pass. Raises `InputError` when one ends before its time.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    children = []
    found: dict[str, Passes] = {}
    try:
        with progress("passes", len(servers) * (1 + rounds * len(rows))) as step:
            for name, (target, args) in servers.items():
                pipes[name], theirs = context.Pipe()
                child = context.Process(target=target, args=(theirs, *args), daemon=True)
                child.start()
                theirs.close()
                children.append(child)
                found[name] = Passes(pipes[name].recv(), dict.fromkeys(rows, float("inf")))
                step(f"{name} is loaded")
            for _ in range(rounds):
                for count in rows:
                    for name, pipe in pipes.items():
                        pipe.send(count)
                        found[name].pass_s[count] = min(found[name].pass_s[count], pipe.recv())
                        step(f"{name}, {count} rows")
    except EOFError:
        raise InputError(f"{name} could not be loaded or run; its process has said why") from None
    finally:
        for child in children:
            child.terminate()
            child.join()
    return found


def command(args: argparse.Namespace) -> int:
    wrong = [name for name in args.dtypes if name not in ACTIVATIONS]
    if wrong:
        raise InputError(f"--dtypes: expected some of {', '.join(ACTIVATIONS)}, got {wrong[0]!r}")
    found = measure(args.model, args.dtypes, args.rows, args.rounds)
    if args.json:
        print(json.dumps(found))
        return 0
    headings = (
        "precision",
        "weights",
        *(f"ms at {count}" for count in args.rows),
        *(f"x at {count}" for count in args.rows),
    )
    show(
        f"{args.model}, one thread: milliseconds of a pass by rows, and rows per second over "
        f"{args.dtypes[0]}",
        headings,
        [
            (
                dtype,
                mib(each["weight_bytes"]),
                *(f"{1e3 * each['pass_s'][str(count)]:.1f}" for count in args.rows),
                *(f"{each['rows_per_s_ratio'][str(count)]:.2f}" for count in args.rows),
            )
            for dtype, each in found.items()
        ],
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.packed", __doc__)
    parser.add_argument("--model", "-m", required=True, help="a model's folder or hub id")
    parser.add_argument(
        "--dtypes",
        type=lambda text: tuple(text.split(",")),
        default=("bfloat16", "int8", "int4"),
        help="precisions, the first the standard (default: bfloat16,int8,int4)",
    )
    parser.add_argument(
        "--rows", type=positives, default=(1, 4, 16, 32), help="rows of a pass (default: 1,4,16,32)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, help="times each is measured (default: %(default)s)"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
