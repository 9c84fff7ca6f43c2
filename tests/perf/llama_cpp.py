"""Packed weights beside llama.cpp at the same class of precision: a pass of one row and of segments of rows,
one thread, as ratios.

Needs the packages gguf and llama-cpp-python, built for this machine; the checkpoint is written to GGUF files
for it, in BF16, Q8_0 and Q4_0. Each model is loaded in a process of its own, and these take turns
(`packed.py`). A pass is a chain of rows through all layers, logits of all rows included, from an empty cache;
its time is the least of all rounds.

CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python gguf python -m
flowspec.bench.checkpoints FOLDER --gigabyte python -m tests.perf.llama_cpp --model FOLDER [--dtypes
bfloat16,int8] [--rows 1,16] [--rounds 5] [--files FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowspec.bench.console import show
from flowspec.cli.options import positive, positives
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import MISSING_PACKAGE
from flowspec.plan.memory import mib
from tests.command import Parser, run_command
from tests.perf.packed import serve, take_turns

KINDS = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's types of the same class, by precision."""
FIRST_TOKEN = 10


def serve_llama_cpp(pipe: Connection, path: str, rows: Sequence[int]) -> None:
    """As `packed.serve`, for a GGUF file in llama.cpp."""
    api = importlib.import_module("llama_cpp")
    context = _context(api, path, max(rows))
    batches = {count: _batch(api, count) for count in rows}
    pipe.send(api.llama_model_size(api.llama_get_model(context)))
    while (asked := pipe.recv()) is not None:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        began_s = time.perf_counter()
        if api.llama_decode(context, batches[asked]):
            raise InputError(f"llama.cpp cannot run {asked} rows of {path}")
        api.llama_synchronize(context)
        pipe.send(time.perf_counter() - began_s)


def _context(api: Any, path: str, rows_max: int) -> Any:
    """A context for passes of up to `rows_max` rows, on one thread of the processor."""
    api.llama_log_set(_silence(api), None)
    api.llama_backend_init()
    of_model = api.llama_model_default_params()
    of_model.n_gpu_layers = 0
    model = api.llama_model_load_from_file(path.encode(), of_model)
    if model is None:
        raise InputError(f"llama.cpp cannot load {path}")
    of_context = api.llama_context_default_params()
    of_context.n_ctx = max(256, rows_max)
    of_context.n_batch = of_context.n_ubatch = rows_max
    of_context.n_threads = of_context.n_threads_batch = 1
    return api.llama_init_from_model(model, of_context)


@functools.cache
def _silence(api: Any) -> Any:
    """A callback of llama.cpp's that drops its log of several thousand lines; kept, since llama.cpp only has
    its address."""
    return api.llama_log_callback(lambda level, text, data: None)


def _batch(api: Any, count: int) -> Any:
    """A chain of so many tokens, with logits for each."""
    batch = api.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for row in range(count):
        batch.token[row] = FIRST_TOKEN + row
        batch.pos[row] = row
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = 0
        batch.logits[row] = True
    return batch


def write_files(model: str, dtypes: Sequence[str], folder: Path) -> dict[str, Path]:
    """The GGUF files of a checkpoint by precision; those that are in `folder` already are taken as they
    are."""
    from gguf import GGMLQuantizationType

    from tests.ggufs import convert

    folder.mkdir(parents=True, exist_ok=True)
    paths = {dtype: folder / f"{KINDS[dtype]}.gguf" for dtype in dtypes}
    for dtype, path in paths.items():
        if not path.exists():
            kind = GGMLQuantizationType[KINDS[dtype]]
            convert(
                Path(model), path.with_suffix(".part"), kind, metadata={"tokenizer.ggml.model": "no_vocab"}
            ).replace(path)
    return paths


def measure(
    model: str, dtypes: Sequence[str], rows: Sequence[int], rounds: int, files: Path
) -> dict[str, Any]:
    """By precision: bytes of weights and least seconds of a pass by rows, ours and llama.cpp's, and our rows
    per second over its."""
    paths = write_files(model, dtypes, files)
    ours = {dtype: (serve, (model, dtype, rows)) for dtype in dtypes}
    theirs = {KINDS[dtype]: (serve_llama_cpp, (str(path), rows)) for dtype, path in paths.items()}
    found = take_turns({**ours, **theirs}, rows, rounds)
    return {
        dtype: {
            "kind": KINDS[dtype],
            "weight_bytes": [found[name].weight_bytes for name in (dtype, KINDS[dtype])],
            "pass_s": {
                str(count): [found[name].pass_s[count] for name in (dtype, KINDS[dtype])] for count in rows
            },
            "rows_per_s_ratio": {
                str(count): found[KINDS[dtype]].pass_s[count] / found[dtype].pass_s[count] for count in rows
            },
        }
        for dtype in dtypes
    }


def command(args: argparse.Namespace) -> int:
    wrong = [name for name in args.dtypes if name not in KINDS]
    if wrong:
        raise InputError(f"--dtypes: expected some of {', '.join(KINDS)}, got {wrong[0]!r}")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(MISSING_PACKAGE)
    if importlib.util.find_spec("llama_cpp") is None:
        raise InputError(
            "llama.cpp's Python package is not here: CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python"
        )
    files = ModelFiles(args.model)
    if files.config().model_type != "llama" or not Path(args.model).is_dir():
        raise InputError(
            "--model: expected a folder with a Llama, such as flowspec.bench.checkpoints --gigabyte "
            f"makes, got {args.model!r}"
        )
    with contextlib.ExitStack() as stack:
        folder = (
            Path(stack.enter_context(tempfile.TemporaryDirectory())) if args.files is None else args.files
        )
        found = measure(args.model, args.dtypes, args.rows, args.rounds, folder)
    if args.json:
        print(json.dumps(found))
        return 0
    show(
        f"{args.model}, one thread: milliseconds of a pass by rows, ours and llama.cpp's, and our rows per "
        "second over its",
        (
            "precision",
            "weights",
            *(f"ms at {count}" for count in args.rows),
            *(f"x at {count}" for count in args.rows),
        ),
        [
            (
                f"{dtype} / {each['kind']}",
                " / ".join(mib(size) for size in each["weight_bytes"]),
                *(" / ".join(f"{1e3 * s:.0f}" for s in each["pass_s"][str(count)]) for count in args.rows),
                *(f"{each['rows_per_s_ratio'][str(count)]:.2f}" for count in args.rows),
            )
            for dtype, each in found.items()
        ],
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.llama_cpp", __doc__)
    parser.add_argument("--model", "-m", required=True, help="a Llama's folder")
    parser.add_argument(
        "--dtypes",
        type=lambda text: tuple(text.split(",")),
        default=("bfloat16", "int8"),
        help="our precisions: bfloat16, int8, int4 (default: bfloat16,int8)",
    )
    parser.add_argument("--rows", type=positives, default=(1, 16), help="rows of a pass (default: 1,16)")
    parser.add_argument(
        "--rounds", type=positive, default=5, help="times each is measured (default: %(default)s)"
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="keep the GGUF files there, and take those that are there",
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
