"""How far logits are from float32's, and llama.cpp's on the same file: `python -m lab.accuracy MODEL.gguf`.

Each text of `accuracy.toml` is read once, one token after another. The reference is transformers in float32
on the weights as they are when unpacked. Of each position: the KL divergence from it, in nats; whether the
two best tokens are exactly equal where the reference's are not; and whether the best one is another. Ratios
have intervals of 95%: blocks of BLOCK positions are drawn again, the same ones of both.

In 16 bits transformers reads the texts in that dtype, too.

`--llama PYTHON`: an interpreter that has llama-cpp-python, which reads the texts with its own defaults, flash
attention off and on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES, FILED
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.gpu import DTYPES
from flowspec.model.reference import Reference
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer
from flowspec.plan.tables import read_toml
from lab.command import Parser, run_command

TEXTS = Path(__file__).with_name("accuracy.toml")
BLOCK, DRAWS = 100, 2000
OURS = "flowspec"
READ = """
import json, sys, llama_cpp, numpy
model, folder, texts = sys.argv[1], sys.argv[2], json.load(sys.stdin)
for flash in (False, True):
    for name, tokens in texts.items():
        llama = llama_cpp.Llama(model, n_ctx=len(tokens), logits_all=True, flash_attn=flash, verbose=False)
        llama.eval(tokens)
        found = numpy.array(llama.scores[: len(tokens)], numpy.float32)
        numpy.save(f"{folder}/{name}{' flash' * flash}.npy", found)
        llama.close()
print(llama_cpp.__version__)
"""
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reading:
    """What is told of a text's logits; `far` by position."""

    far: F64
    ties: int
    moved: int
    perplexity: float


def reading(logits: F32, expected: F32, tokens: Sequence[int]) -> Reading:
    """Both `[tokens, vocabulary]`."""
    ours, theirs = _log_shares(logits), _log_shares(expected)
    return Reading(
        far=(np.exp(theirs) * (theirs - ours)).sum(axis=1),
        ties=int((_are_tied(logits) & ~_are_tied(expected)).sum()),
        moved=int((logits.argmax(axis=1) != expected.argmax(axis=1)).sum()),
        perplexity=float(np.exp(-ours[np.arange(len(tokens) - 1), tokens[1:]].mean())),
    )


def _log_shares(logits: F32) -> F64:
    above = logits - logits.max(axis=1, keepdims=True).astype(np.float64)
    found: F64 = above - np.log(np.exp(above).sum(axis=1, keepdims=True))
    return found


def _are_tied(logits: F32) -> npt.NDArray[np.bool_]:
    best = np.partition(logits, -2, axis=1)
    found: npt.NDArray[np.bool_] = best[:, -2] == best[:, -1]
    return found


def ratio(ours: F64, theirs: F64) -> tuple[float, float, float]:
    """Of the means, and its interval."""
    cuts = range(BLOCK, len(ours), BLOCK)
    first, second = (np.array([block.sum() for block in np.split(each, cuts)]) for each in (ours, theirs))
    drawn = np.random.default_rng(1).integers(len(first), size=(DRAWS, len(first)))
    low, high = np.quantile(first[drawn].sum(axis=1) / second[drawn].sum(axis=1), (0.025, 0.975))
    return float(ours.mean() / theirs.mean()), float(low), float(high)


def read(args: argparse.Namespace) -> dict[str, dict[str, Reading]]:
    """By program and text."""
    files, given = ModelFiles(args.model), read_toml(TEXTS, dict, "texts")["texts"]
    tokenizer = Tokenizer(files)
    texts = {name: tokenizer.encode(text)[: args.tokens] for name, text in given.items()}
    reference, expected = Reference(files, args.dtype), dict[str, F32]()
    whole, found = StepByStep.load(files, args.dtype, cache=args.cache), dict[str, dict[str, Reading]]()
    for name, tokens in texts.items():
        print(f"reading {name}: {len(tokens)} tokens ...", file=sys.stderr)
        expected[name] = np.stack(reference.forced_logits(tuple(tokens[:1]), tokens[1:]))
        ours = np.concatenate([*whole.logits(tokens, [BLOCK])])
        found.setdefault(OURS, {})[name] = reading(ours, expected[name], tokens)
    if args.dtype in ("bfloat16", "float16"):
        print("transformers reads them ...", file=sys.stderr)
        for name, tokens in texts.items():
            logits = in_dtype(reference, args.dtype, tokens)
            found.setdefault(f"transformers {args.dtype}", {})[name] = reading(logits, expected[name], tokens)
    if args.llama is None:
        return found
    print("llama.cpp reads them ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [args.llama, "-c", READ, args.model, folder]
        done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2] or f"it ended with status {done.returncode}"
            raise InputError(f"--llama {args.llama}: expected llama-cpp-python there; {why}")
        for flash in ("", " flash"):
            program = f"llama-cpp-python {done.stdout.strip()}{flash}"
            for name, tokens in texts.items():
                logits = np.load(f"{folder}/{name}{flash}.npy")
                found.setdefault(program, {})[name] = reading(logits, expected[name], tokens)
    return found


@torch.inference_mode()
def in_dtype(reference: Reference, dtype: str, tokens: Sequence[int]) -> F32:
    """Logits `[tokens, vocabulary]` by transformers, all of whose numbers are of this dtype."""
    model = reference.model.to(DTYPES[dtype])
    found: F32 = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return found


def told(found: Mapping[str, Mapping[str, Reading]]) -> list[dict[str, Any]]:
    """A row for each program and text; of others how far ours is in their measure."""
    rows = list[dict[str, Any]]()
    for program, readings in found.items():
        for name, own in readings.items():
            figures = {"kl": float(own.far.mean()), "ties": own.ties, "moved": own.moved}
            row = {"program": program, "text": name, **figures, "perplexity": own.perplexity}
            times = None if program == OURS else ratio(found[OURS][name].far, own.far)
            rows.append({**row, "ours": times})
    return rows


def command(args: argparse.Namespace) -> int:
    rows = told(read(args))
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        times = "" if row["ours"] is None else "ours is {:.2f} of it ({:.2f} to {:.2f})".format(*row["ours"])
        figures = f"KL {row['kl']:.3e}  ties {row['ties']:3}  moved {row['moved']:3}"
        print(f"{row['program']:30} {row['text']:12} {figures}  perplexity {row['perplexity']:8.4f}  {times}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.accuracy", __doc__)
    parser.add_argument("model", help="a GGUF file, or a folder")
    parser.add_argument("--dtype", choices=sorted(ACTIVATIONS), default=FILED)
    parser.add_argument("--cache", choices=CACHES, default=CACHE_AUTO)
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.whole("--tokens", 1000, "of each text")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
