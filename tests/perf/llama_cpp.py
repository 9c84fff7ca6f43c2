"""A whole model beside llama.cpp: the same GGUF file, one thread each, in turns: `python -m
tests.perf.llama_cpp --library FOLDER FILE.gguf ...`.

FOLDER has llama.cpp's shared libraries, with a kernel file for each processor (the npm package
`@node-llama-cpp/linux-x64` has them), two of them linked as libllama.so and libggml.so; files of processors
that shall not be used are taken out of it. The module `llama_cpp` of the package llama-cpp-python of the same
llama.cpp calls them.

Each file is loaded in two processes, ours and llama.cpp's, and these take turns. A pass is a chain of rows
from an empty cache, with logits of each row, or of the last one where there are as many as in a prompt; its
time is the least of all rounds.

`--text TEXT.txt` compares the perplexity of both on a text instead, in windows of 256 tokens of the
tokenizer of `--tokenizer MODEL`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.bench.console import progress, show
from flowspec.cli.options import positive, positives
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.text import Tokenizer
from tests.command import Parser, run_command

PROMPT_ROWS = 512
"""Of so many rows only the last one's logits are asked for, as of a prompt's."""
FIRST_TOKEN = 10
WINDOW = 256
"""Tokens of a text that are seen together."""
Tokens = tuple[int, ...]
Server = Callable[[Connection, str, int, Path], None]


def serve_ours(pipe: Connection, path: str, rows_max: int, library: Path) -> None:
    """Loads a file, and answers as `_answer` does."""
    import torch

    from flowspec.core.protocol.messages import Sampling
    from flowspec.core.protocol.precision import FILED
    from flowspec.core.stage.events import JobPart, RunLayers
    from flowspec.model.files import ModelFiles
    from flowspec.model.pieces import Span
    from flowspec.model.slice import Slice

    torch.set_num_threads(1)
    files = ModelFiles(path)
    count = files.config().num_hidden_layers
    dtype = FILED if files.is_packed else "bfloat16"
    part = Slice.load(files, Span(first=0, end=count, count=count), dtype, torch.device("cpu"))
    part.open_cache(0, rows_max)

    def run(tokens: Tokens) -> np.ndarray:
        numbers, rows = np.arange(len(tokens)), len(tokens)
        chain = JobPart(
            request=0,
            slots=numbers,
            tokens=np.array(tokens),
            positions=numbers,
            key_positions=numbers.astype(np.int32),
            visible=np.tril(np.ones((rows, rows), dtype=np.bool_)),
            sampled=np.zeros(rows, dtype=np.bool_),
            sampling=Sampling(),
        )
        _, hidden = part.forward(
            RunLayers(job=0, parts=(chain,), payload=None, rows=tuple(range(rows))), None
        )
        return part.logits(hidden[-1:] if rows == PROMPT_ROWS else hidden)

    with torch.inference_mode():
        _answer(pipe, run)


def serve_llama_cpp(pipe: Connection, path: str, rows_max: int, library: Path) -> None:
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
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = max(256, rows_max)
    wanted.n_threads = wanted.n_threads_batch = 1
    context = api.llama_init_from_model(model, wanted)
    memory = api.llama_get_memory(context)
    entries = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(rows_max, 0, 1)

    def run(tokens: Tokens) -> np.ndarray:
        _fill(batch, tokens)
        api.llama_memory_clear(memory, True)
        if api.llama_decode(context, batch):
            raise InputError(f"llama.cpp cannot run {len(tokens)} rows of {path}")
        api.llama_synchronize(context)
        rows = 1 if len(tokens) == PROMPT_ROWS else len(tokens)
        return np.ctypeslib.as_array(api.llama_get_logits(context), (rows, entries))

    _answer(pipe, run)


def _fill(batch: Any, tokens: Tokens) -> None:
    """A chain of these tokens."""
    batch.n_tokens = len(tokens)
    for row, token in enumerate(tokens):
        batch.token[row], batch.pos[row] = token, row
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        batch.logits[row] = len(tokens) != PROMPT_ROWS or row == len(tokens) - 1


def _answer(pipe: Connection, run: Callable[[Tokens], np.ndarray]) -> None:
    """Answers tokens with the seconds of a pass and, but for a prompt, what the next one of each costs in
    nats."""
    pipe.send(None)
    while (tokens := pipe.recv()) is not None:
        began_s = time.perf_counter()
        logits = run(tokens)
        spent_s, costs = time.perf_counter() - began_s, None
        if len(tokens) == WINDOW:
            rows = logits[:-1].astype(np.float64)
            sums = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
            costs = sums - rows[np.arange(len(rows)), list(tokens[1:])]
        pipe.send((spent_s, costs))


@contextlib.contextmanager
def both(path: str, rows_max: int, library: Path) -> Iterator[list[Connection]]:
    """Pipes to a process of ours and to one of llama.cpp's that have loaded a file."""
    context = multiprocessing.get_context("spawn")
    servers: tuple[Server, ...] = (serve_ours, serve_llama_cpp)
    pipes, children = [], []
    try:
        for server in servers:
            ours, theirs = context.Pipe()
            child = context.Process(target=server, args=(theirs, path, rows_max, library), daemon=True)
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
            ours.recv()
        yield pipes
    except EOFError:
        raise InputError(f"{path} could not be loaded or run; its process has said why") from None
    finally:
        for child in children:
            child.terminate()
            child.join()


def times(path: str, rows: Sequence[int], rounds: int, library: Path) -> dict[int, list[float]]:
    """By rows: least seconds of a pass, ours and llama.cpp's."""
    found = {count: [float("inf"), float("inf")] for count in rows}
    with both(path, max(rows), library) as pipes, progress("passes", 2 * rounds * len(rows)) as step:
        for _, count, (number, pipe) in itertools.product(range(rounds), rows, enumerate(pipes)):
            pipe.send(tuple(range(FIRST_TOKEN, FIRST_TOKEN + count)))
            found[count][number] = min(found[count][number], pipe.recv()[0])
            step(f"{count} rows")
    return found


def perplexities(path: str, tokens: Tokens, library: Path) -> list[float]:
    """Ours and llama.cpp's."""
    windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    costs: list[list[np.ndarray]] = [[], []]
    with both(path, WINDOW, library) as pipes, progress("windows", 2 * len(windows)) as step:
        for window, (number, pipe) in itertools.product(windows, enumerate(pipes)):
            pipe.send(window)
            costs[number].append(pipe.recv()[1])
            step("")
    return [float(np.exp(np.concatenate(each).mean())) for each in costs]


def command(args: argparse.Namespace) -> int:
    if not (args.library / "libggml.so").is_file():
        raise InputError(
            f"--library: expected a folder with llama.cpp's libggml.so, got {str(args.library)!r}"
        )
    for path in args.files:
        if not Path(path).is_file():
            raise InputError(f"expected a GGUF file, got {path!r}")
    if args.text is None:
        timed = {Path(path).name: times(path, args.rows, args.rounds, args.library) for path in args.files}
        table = [
            [name, count, 1000 * ours, 1000 * theirs, theirs / ours]
            for name, found in timed.items()
            for count, (ours, theirs) in found.items()
        ]
        columns = ("file", "rows", "ours ms", "its ms", "our rows/s over its")
        return _tell(args, timed, "One thread beside llama.cpp", columns, table)
    tokens = tuple(Tokenizer(ModelFiles(args.tokenizer)).encode(args.text.read_text())[: args.tokens])
    told = {Path(path).name: perplexities(path, tokens, args.library) for path in args.files}
    table = [[name, ours, theirs, 100 * (ours / theirs - 1)] for name, (ours, theirs) in told.items()]
    return _tell(
        args, told, "Perplexity beside llama.cpp", ("file", "ours", "its", "ours over its, %"), table
    )


def _tell(
    args: argparse.Namespace, found: Any, title: str, columns: Sequence[str], table: list[list[Any]]
) -> int:
    if args.json:
        print(json.dumps(found))
    else:
        show(title, columns, table)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.llama_cpp", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--library", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rows", type=positives, default=(1, 4, 8, 16, 32, PROMPT_ROWS))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--text", type=Path, metavar="TEXT.txt")
    parser.add_argument("--tokenizer", default="bundled", metavar="MODEL")
    parser.add_argument("--tokens", type=positive, default=40 * WINDOW, help="of the text")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
