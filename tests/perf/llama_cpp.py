"""A whole model beside llama.cpp: the same GGUF file, one thread each, in turns: `python -m
tests.perf.llama_cpp --library FOLDER FILE.gguf ...`.

FOLDER has llama.cpp's shared libraries, with a kernel file for each processor (the npm package
`@node-llama-cpp/linux-x64` has them); files of processors that shall not be used are taken out of it. The
module `llama_cpp` of the package llama-cpp-python of the same llama.cpp calls them.

Each file is loaded in two processes, ours and llama.cpp's, and these take turns. A pass is a chain of rows
from an empty cache, with logits of each row, or of the last one where there are as many as in a prompt; its
time is the least of all rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowspec.bench.console import progress, show
from flowspec.cli.options import positive, positives
from flowspec.errors import InputError
from tests.command import Parser, run_command

PROMPT_ROWS = 64
"""From here on only the last row's logits are asked for, as in a prompt."""
FIRST_TOKEN = 10
Server = Callable[[Connection, str, Sequence[int], Path], None]


def serve_ours(pipe: Connection, path: str, rows: Sequence[int], library: Path) -> None:
    """Loads a file, and answers each number of rows with the seconds of a pass."""
    import torch

    from flowspec.bench.measure import REQUEST, MeasuredMachine, head_task, pass_task
    from flowspec.core.protocol.precision import FILED
    from flowspec.model.files import ModelFiles
    from flowspec.model.pieces import Span
    from flowspec.model.slice import Slice

    torch.set_num_threads(1)
    files = ModelFiles(path)
    dtype = "bfloat16" if "BF16" in Path(path).name else FILED
    machine = MeasuredMachine(device=torch.device("cpu"), dtype=dtype)
    count = files.config().num_hidden_layers
    part = Slice.load(files, Span(first=0, end=count, count=count), dtype, machine.device)
    with torch.inference_mode():
        tasks = {
            each: (
                pass_task(machine, part, each),
                head_task(machine, part, each if each < PROMPT_ROWS else 1),
            )
            for each in rows
        }
        part.open_cache(REQUEST, max(rows))
        _answer(pipe, lambda asked: [task() for task in tasks[asked]])


def serve_llama_cpp(pipe: Connection, path: str, rows: Sequence[int], library: Path) -> None:
    """As `serve_ours`, in llama.cpp."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(library)
    ggml = ctypes.CDLL(str(library / "libggml.so"), mode=ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load_all_from_path(str(library).encode())
    api = importlib.import_module("llama_cpp")
    silence = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silence, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if model is None:
        raise InputError(f"llama.cpp cannot load {path}")
    wanted = api.llama_context_default_params()
    wanted.n_ctx = max(256, *rows)
    wanted.n_batch = wanted.n_ubatch = max(rows)
    wanted.n_threads = wanted.n_threads_batch = 1
    context = api.llama_init_from_model(model, wanted)
    memory = api.llama_get_memory(context)
    batches = {count: _batch(api, count) for count in rows}

    def run(asked: int) -> None:
        api.llama_memory_clear(memory, True)
        if api.llama_decode(context, batches[asked]):
            raise InputError(f"llama.cpp cannot run {asked} rows of {path}")
        api.llama_synchronize(context)

    _answer(pipe, run)


def _batch(api: Any, count: int) -> Any:
    """A chain of so many tokens."""
    batch = api.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for row in range(count):
        batch.token[row] = FIRST_TOKEN + row
        batch.pos[row] = row
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = 0
        batch.logits[row] = count < PROMPT_ROWS or row == count - 1
    return batch


def _answer(pipe: Connection, run: Callable[[int], Any]) -> None:
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        began_s = time.perf_counter()
        run(asked)
        pipe.send(time.perf_counter() - began_s)


def measure(path: str, rows: Sequence[int], rounds: int, library: Path) -> dict[int, list[float]]:
    """By rows: least seconds of a pass, ours and llama.cpp's."""
    context = multiprocessing.get_context("spawn")
    servers: tuple[Server, ...] = (serve_ours, serve_llama_cpp)
    pipes: list[Connection] = []
    children = []
    found = {count: [float("inf"), float("inf")] for count in rows}
    try:
        with progress("passes", 2 * (1 + rounds * len(rows))) as step:
            for server in servers:
                ours, theirs = context.Pipe()
                child = context.Process(target=server, args=(theirs, path, rows, library), daemon=True)
                child.start()
                theirs.close()
                children.append(child)
                pipes.append(ours)
                ours.recv()
                step("loaded")
            for _ in range(rounds):
                for count in rows:
                    for number, pipe in enumerate(pipes):
                        pipe.send(count)
                        found[count][number] = min(found[count][number], pipe.recv())
                        step(f"{count} rows")
    except EOFError:
        raise InputError(f"{path} could not be loaded or run; its process has said why") from None
    finally:
        for child in children:
            child.terminate()
            child.join()
    return found


def command(args: argparse.Namespace) -> int:
    found = {}
    for path in args.files:
        if not Path(path).is_file():
            raise InputError(f"expected a GGUF file, got {path!r}")
        found[Path(path).name] = measure(path, args.rows, args.rounds, args.library)
    if args.json:
        print(json.dumps(found))
        return 0
    lines = [
        [name, count, 1000 * ours, 1000 * theirs, theirs / ours]
        for name, times in found.items()
        for count, (ours, theirs) in times.items()
    ]
    show("One thread beside llama.cpp", ("file", "rows", "ours ms", "its ms", "our rows/s over its"), lines)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.llama_cpp", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--library", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rows", type=positives, default=(1, 4, 8, 16, 32, 512))
    parser.add_argument("--rounds", type=positive, default=5)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
