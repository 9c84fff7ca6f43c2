"""Is a whole slice faithful to the model, as transformers computes it (`model/reference.py`)?

docs/design/exactness.md says what is compared. How far rounding may move a logit depends on the model, so the
limits are measured, too: transformers reads the text once more, with numbers rounded as slices round them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.layer import LAYER_INPUT, Linear, Plain, RouterPart
from flowspec.model.reference import Reference, is_inputs_first
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer
from flowspec.model.weights import LM_HEAD, layer_shape

TOKENS = 2000
WINDOW_MAX = 500  # tokens that are read in one go: logits of more take too much memory
PORTIONS = (16, 1, 32, 4, 17, 1, 64, 2)  # rows of one pass after another, over and over
PERPLEXITY_LIMIT = 0.005
"""By such a share it may differ, or by `STANDARD_ERRORS` times the standard error that rounding makes: in a
model that was never trained chance alone makes half a percent over 2,000 tokens."""
STANDARD_ERRORS = 4.0
NOISE_FACTOR, TYPICAL_FACTOR = 3.0, 1.3
"""So many times what rounding does may logits differ, at most and typically. Over all families and precisions
it was 2.2 and 1.15."""
LEAST_SHARE = 0.001
"""Of the spread of logits: no limit is below that. Float32, which is not rounded, has .00002, TF32 .007."""
MATRIX_FACTOR, MATRIX_LIMIT_MIN = 2.0, 1e-4
"""An output may be off by so many times the precision's `eps`, or by that share. Rounding alone makes half of
it at most (int4, which rounds before and after a bias)."""


def check(
    files: ModelFiles, dtype: str, whole: StepByStep, tell: Callable[[float], object] = lambda share: None
) -> dict[str, Any]:
    """Compares `whole`, which is that model in that precision, with transformers; `tell` hears of each share
    of the work that is done. Raises `ClusterError` when the model overflows in its dtype.

    Differences, their limits and the `spread` (the standard deviation of a row) are in logits; `reference`
    is the perplexity of transformers, `unrounded` that before weights were packed, None where none are.
    """
    text, windows = read_windows(files)
    tokens = sum(map(len, windows))
    readings = 5 + (dtype in ROUNDINGS)  # three or four of the text; to load and to multiply count as two

    def step(count: int) -> None:
        tell(count / (readings * tokens))

    def read(window: Sequence[int]) -> F32:
        """The reference's logits `[tokens, vocabulary]`."""
        logits = np.stack(reference.forced_logits(tuple(window[:1]), list(window[1:])))
        step(len(window))
        return logits

    whole.tell = step
    reference = Reference(files, "float32")
    step(tokens)
    plain = [_nats(read(window), window[1:]) for window in windows if dtype in ROUNDINGS]
    reference.round_to(dtype)
    rounded, ours, theirs, spreads = [], [], list[Any](), []
    for window in windows:
        expected, following = read(window), window[1:]
        with reference.rounding_to(dtype, whole.part.cache, whole.part.device):
            rounded.append(_differences(read(window), expected, following))
        ours.append(_differences(np.concatenate([*whole.logits(window, PORTIONS)]), expected, following))
        theirs.append(_nats(expected, following))
        spreads.append(expected.std(axis=1))
    largest, squares, nats = (np.concatenate(each) for each in zip(*ours, strict=True))
    noise, noises, moved = (np.concatenate(each) for each in zip(*rounded, strict=True))
    spread = float(np.concatenate(spreads).mean())
    apart = moved - np.concatenate(theirs)
    error = float(apart.std() / math.sqrt(len(apart)))  # about the share by which chance moves perplexity
    eps = torch.finfo(getattr(torch, whole.part.dtype)).eps
    return assess(
        {
            "dtype": dtype,
            "text": text,
            "tokens": tokens,
            "largest": float(largest.max()),
            "limit": max(NOISE_FACTOR * float(noise.max()), LEAST_SHARE * spread),
            "typical": float(np.sqrt(squares.mean())),
            "typical_limit": max(TYPICAL_FACTOR * float(np.sqrt(noises.mean())), LEAST_SHARE * spread),
            "spread": spread,
            "perplexity": _perplexity([nats]),
            "reference": _perplexity(theirs),
            "unrounded": _perplexity(plain) if plain else None,
            "matrix": worst_matrix(files, whole, reference),
            "matrix_limit": max(MATRIX_LIMIT_MIN, MATRIX_FACTOR * eps),
            "perplexity_limit": max(PERPLEXITY_LIMIT, STANDARD_ERRORS * error),
        }
    )


def assess(figures: dict[str, Any]) -> dict[str, Any]:
    """Adds by which share perplexity `change`s, and `faults`: what is beyond its limit, in words. What is no
    number is beyond any."""
    change = figures["perplexity"] / figures["reference"] - 1
    logit = "a logit is off by {largest:.3g}, where rounding explains {limit:.3g}"
    logits = "logits are off by {typical:.3g} typically, where rounding explains {typical_limit:.3g}"
    perplexity = "perplexity is {perplexity:.5g}, where transformers has {reference:.5g}"
    output = "output {matrix[output]} of {matrix[matrix]} is off by {matrix[share]:.2%}, where rounding "
    checks = (
        (figures["largest"], "limit", logit),
        (figures["typical"], "typical_limit", logits),
        (abs(change), "perplexity_limit", perplexity),
        (figures["matrix"]["share"], "matrix_limit", output + "explains {matrix_limit:.2%}"),
    )
    faults = [fault.format(**figures) for off, limit, fault in checks if not off <= figures[limit]]
    return {"is_faithful": not faults, **figures, "change": change, "faults": faults}


def read_windows(files: ModelFiles) -> tuple[str, list[tuple[int, ...]]]:
    """What is read, in words, and its tokens, in windows of equal length that the context has room for.

    For a model without a tokenizer the tokens are random, the same every time.
    """
    spec = files.spec
    if files.has_tokenizer:
        name = "the shipped text"
        ids = Tokenizer(files).encode(bundled_folder("text.txt").read_text("utf-8"))[:TOKENS]
    else:
        name, chance = "random tokens", random.Random(1)
        ids = [chance.randrange(3, spec.vocabulary) for _ in range(TOKENS)]  # some below have meanings
    longest = min(WINDOW_MAX, spec.context_max)
    if longest < 2:
        raise InputError(f"model {files.model!r}: expected a context of 2 tokens or more, got {longest}")
    count = -(-len(ids) // longest)
    cuts = [place * len(ids) // count for place in range(count + 1)]
    return name, [tuple(ids[first:end]) for first, end in itertools.pairwise(cuts)]


def _differences(logits: F32, expected: F32, following: Sequence[int]) -> tuple[Any, Any, Any]:
    """Of each row the largest difference, the mean of squares, and how surprised it is by what follows."""
    off = np.abs(logits - expected)
    return off.max(axis=1), np.square(off, dtype=np.float64).mean(axis=1), _nats(logits, following)


def _nats(logits: F32, following: Sequence[int]) -> Any:
    """How surprised logits `[rows, vocabulary]` are by the token that follows each row."""
    logits = logits[: len(following)]
    highest = logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64)) + highest[:, 0]
    return totals - logits[np.arange(len(following)), list(following)]


def _perplexity(nats: Sequence[Any]) -> float:
    return float(np.exp(np.concatenate(nats).mean()))


@torch.inference_mode()
def worst_matrix(files: ModelFiles, whole: StepByStep, reference: Reference) -> dict[str, Any]:
    """Multiplies the same random rows by each matrix of a slice, and by the reference's; returns which output
    is off by the largest share of what it is (root mean square over rows)."""
    found, engine = [], whole.part.engine
    generator = torch.Generator().manual_seed(1)
    for name, linear, weight, bias in _matrices(files, whole, reference):
        drawn = torch.randn((16, weight.shape[1]), generator=generator)
        rows, product = engine.cast(drawn.numpy()), engine.rows(linear=linear)
        made = [engine.numpy(engine.wide(product(some))) for some in (rows[:1], rows[1:])]
        expected = F.linear(torch.from_numpy(engine.numpy(engine.wide(rows))), weight, bias)
        off = (torch.from_numpy(np.concatenate(made)) - expected).square().mean(dim=0).sqrt()  # [out]
        squares = weight.square().sum(dim=1) + (0 if bias is None else bias.square())
        size = squares.sqrt()  # of an output, on average
        shares = (off / size.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(torch.inf)
        output = int(shares.argmax())
        found.append({"matrix": name, "output": output, "share": float(shares[output])})
    return max(found, key=lambda each: each["share"])


Matrix = tuple[str, Linear, torch.Tensor, torch.Tensor | None]


def _matrices(files: ModelFiles, whole: StepByStep, reference: Reference) -> Iterator[Matrix]:
    """Name, how the slice has it, its values `[out, in]` in float32, and its bias `[out]`."""
    part, decoder, tensors = whole.part, reference.model.get_decoder(), files.tensors()
    for index in range(part.span.count):
        own: dict[str, Any] = {}  # by what transformers calls their weights
        for name, (stem, shape) in layer_shape(part.spec, index, tensors).places.items():
            made = part.parts[index][name]
            if isinstance(made, RouterPart):
                made = Linear(inputs=part.spec.hidden, matrices=(Plain(made.weights),))
            if isinstance(made, Linear | tuple):
                own |= {stem + end: made for end in shape.parameters}
        if (given := own.get(f"{LAYER_INPUT}.projection.weight")) is not None:
            first = index * given.outputs
            matrix = decoder.per_layer_model_projection.weight[first : first + given.outputs]
            yield f"layers.{index}.{LAYER_INPUT}.projection.weight", given, matrix, None
        for path, module in decoder.layers[index].named_modules():
            for name, weight in module.named_parameters(recurse=False):
                full = f"{path}.{name}"
                if type(module) is nn.Linear and name == "weight":
                    yield f"layers.{index}.{full}", own[full], weight, module.bias
                elif weight.dim() == 3 and not isinstance(module, nn.Conv1d):  # a mixture's experts
                    for expert, (values, linear) in enumerate(zip(weight, own[full], strict=True)):
                        if is_inputs_first(module):
                            values = values.T
                            if name == "gate_up_proj":
                                values = torch.cat([values[::2], values[1::2]])
                        without_bias = replace(linear, bias=None)
                        yield f"layers.{index}.{full}[{expert}]", without_bias, values, None
    yield "lm_head.weight", part.parts[LM_HEAD], reference.head.weight, None
