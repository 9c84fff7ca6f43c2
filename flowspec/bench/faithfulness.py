"""Is a whole slice faithful to the model, as transformers computes it (`model/reference.py`)?

Four figures decide. Both read a text of 2,000 tokens, the slice in portions of different sizes, so that
kernels for one row and for many take part: the *largest difference of a logit*, the *typical* one, and by how
much *perplexity* differs. And each *matrix* multiplies rows of its own: a wrong scale of one output, or of
one group of weights, moves logits by less than rounding does, and is plain there.

Limits are measured, too. How far rounding may move a logit depends on the model: in a mixture it swaps
experts. So transformers reads the text once more, with numbers rounded where slices round them, and experts
swapped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.parts import LAYER_INPUT, LayerShape, Linear, Plain, RouterPart, Stack
from flowspec.model.reference import Reference, is_inputs_first
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.sampler import F32
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer
from flowspec.model.weights import LM_HEAD, family_named

TOKENS = 2000
WINDOW_MAX = 500
"""Tokens that are read in one go: logits of more take too much memory."""
PORTIONS = (16, 1, 32, 4, 17, 1, 64, 2)
"""Rows of one pass after another, over and over."""
PERPLEXITY_LIMIT = 0.005
"""By such a share it may differ, or by `STANDARD_ERRORS` times the standard error that rounding makes, if
that is more: where a model was never trained, and rounding moves its states far, chance alone makes half a
percent over 2,000 tokens."""
STANDARD_ERRORS = 4.0
NOISE_FACTOR = 3.0
"""So many times what rounding does may a logit differ at most: that is one in millions, left to chance. Over
all families and precisions it was 2.2 at most."""
TYPICAL_FACTOR = 1.3
"""So many times what rounding does may they differ typically. Over all families and precisions it was 1.15 at
most, in mixtures less, since slices swap experts less often."""
LEAST_SHARE = 0.001
"""Of the spread of logits: a limit below that is none, since float32 is not rounded. It has .00002, TF32
would have .007.
"""
MATRIX_ROWS = (1, 15)
MATRIX_FACTOR = 2.0
MATRIX_LIMIT_MIN = 1e-4
"""An output may be off by so many times the precision's `eps`, or by that least share. Rounding alone makes
half of it at most (int4, which rounds before and after a bias)."""
TEXT = "text.txt"
"""In `flowspec/demo`: talk of the recipe and prompts of `bench.jsonl`, all written for this project."""
FIRST_ID = 3
"""Of random ids: those below stop, begin or pad in the checkpoints that tests make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixError:
    """The output of the model's matrices that is off by the largest share of what it is (root mean square
    over rows).
    """

    matrix: str
    output: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faithfulness:
    """What was found on a text of so many `tokens`. Differences and `spread` in logits.

    `spread`: how far the logits of a row lie apart, their standard deviation. `largest` and `typical` (root
    mean square) are differences, with a `limit` and a `typical_limit`. `unrounded` is the perplexity before
    weights were packed, None where none are.
    """

    dtype: str
    text: str
    tokens: int
    largest: float
    limit: float
    typical: float
    typical_limit: float
    spread: float
    perplexity: float
    reference: float
    unrounded: float | None
    matrix: MatrixError
    matrix_limit: float
    perplexity_limit: float = PERPLEXITY_LIMIT

    @property
    def change(self) -> float:
        """By which share of the reference's perplexity ours is higher."""
        return self.perplexity / self.reference - 1

    @property
    def faults(self) -> list[str]:
        """What is beyond its limit, in words; empty for a faithful model. What is no number is beyond any."""
        found = []
        if not self.largest <= self.limit:
            found.append(f"a logit is off by {self.largest:.3g}, where rounding explains {self.limit:.3g}")
        if not self.typical <= self.typical_limit:
            text = f"logits are off by {self.typical:.3g} typically"
            found.append(f"{text}, where rounding explains {self.typical_limit:.3g}")
        if not abs(self.change) <= self.perplexity_limit:
            found.append(f"perplexity is {self.perplexity:.5g}, where transformers has {self.reference:.5g}")
        if not self.matrix.share <= self.matrix_limit:
            text = f"output {self.matrix.output} of {self.matrix.matrix} is off by {self.matrix.share:.2%}"
            found.append(f"{text}, where rounding explains {self.matrix_limit:.2%}")
        return found

    @property
    def is_faithful(self) -> bool:
        return not self.faults

    def report(self) -> dict[str, Any]:
        """For JSON; what is no number is None."""
        figures = {**asdict(self), "change": self.change}
        return {"is_faithful": self.is_faithful, **_in_json(figures), "faults": self.faults}


def _in_json(figures: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in figures.items():
        is_number = not isinstance(value, float) or math.isfinite(value)
        found[name] = _in_json(value) if isinstance(value, dict) else value if is_number else None
    return found


def check(
    files: ModelFiles, dtype: str, whole: StepByStep, tell: Callable[[float], None] = lambda share: None
) -> Faithfulness:
    """Reads the text with `whole`, which is that model in that precision, and with transformers; `tell` hears
    how far that is, from 0 to 1.

    Raises `ClusterError` when the model overflows in its dtype.
    """
    text, windows = read_windows(files)
    tokens, done = sum(map(len, windows)), 0
    readings = 5 + (dtype in ROUNDINGS)  # three or four of the text; to load and to multiply count as two

    def step(count: int) -> None:
        nonlocal done
        done += count
        tell(done / (readings * tokens))

    whole.tell = step
    reference = Reference(files, "float32")
    step(tokens)
    unrounded = _perplexity(reference, windows, step) if dtype in ROUNDINGS else None
    reference.round_to(dtype)
    return compare(reference, whole, dtype, text, windows, unrounded, step)


def compare(
    reference: Reference,
    whole: StepByStep,
    dtype: str,
    text: str,
    windows: Sequence[tuple[int, ...]],
    unrounded: float | None = None,
    step: Callable[[int], None] = lambda count: None,
) -> Faithfulness:
    """Both read the same windows of a text, each for itself; `reference` holds weights as `dtype` does.
    `step` hears how many tokens the reference has read."""
    ours, theirs, rounded = _Surprise(), _Surprise(), _Surprise()
    largest, noise, squares, noises, spreads = 0.0, 0.0, [], [], []
    for window in windows:
        expected = _read(reference, window)
        step(len(window))
        with reference.rounding_to(dtype, whole.part.cache, whole.part.device):
            moved = _read(reference, window)
        step(len(window))
        noise = float(np.maximum(noise, np.abs(moved - expected).max()))
        noises.append(np.square(moved - expected, dtype=np.float64).mean(axis=1))
        rounded.add(moved[:-1], window[1:])
        first = 0
        for found in whole.logits(window, list(portions(len(window)))):
            rows = expected[first : first + len(found)]
            off = np.abs(found - rows)
            largest = float(np.maximum(largest, off.max()))  # what is no number stays
            squares.append(np.square(off, dtype=np.float64).mean(axis=1))
            spreads.append(rows.std(axis=1))
            following = window[first + 1 : first + 1 + len(found)]
            ours.add(found[: len(following)], following)
            theirs.add(rows[: len(following)], following)
            first += len(found)
    spread = float(np.concatenate(spreads).mean())
    return Faithfulness(
        dtype=dtype,
        text=text,
        tokens=sum(map(len, windows)),
        largest=largest,
        limit=max(NOISE_FACTOR * noise, LEAST_SHARE * spread),
        typical=float(np.sqrt(np.concatenate(squares).mean())),
        typical_limit=max(
            TYPICAL_FACTOR * float(np.sqrt(np.concatenate(noises).mean())), LEAST_SHARE * spread
        ),
        spread=spread,
        perplexity=ours.perplexity,
        reference=theirs.perplexity,
        unrounded=unrounded,
        matrix=worst_matrix(whole.part, reference),
        matrix_limit=max(MATRIX_LIMIT_MIN, MATRIX_FACTOR * torch.finfo(getattr(torch, whole.part.dtype)).eps),
        perplexity_limit=max(PERPLEXITY_LIMIT, STANDARD_ERRORS * rounded.error_beside(theirs)),
    )


# ------------------------------------------------------------------------------------------------ text


def read_windows(files: ModelFiles) -> tuple[str, list[tuple[int, ...]]]:
    """What is read, in words, and its tokens, in windows of equal length that the context has room for.

    For a model without a tokenizer the tokens are random, the same every time.
    """
    spec = files.spec
    if files.has_tokenizer:
        name = "the shipped text"
        ids = Tokenizer(files).encode(bundled_folder(TEXT).read_text("utf-8"))[:TOKENS]
    else:
        name, chance = "random tokens", random.Random(1)
        ids = [chance.randrange(FIRST_ID, spec.vocabulary) for _ in range(TOKENS)]
    longest = min(WINDOW_MAX, spec.context_max)
    if longest < 2:
        raise InputError(f"model {files.model!r}: expected a context of 2 tokens or more, got {longest}")
    count = -(-len(ids) // longest)
    cuts = [place * len(ids) // count for place in range(count + 1)]
    return name, [tuple(ids[first:end]) for first, end in pairwise(cuts)]


def portions(count: int, sizes: Sequence[int] = PORTIONS) -> Iterator[int]:
    """`sizes` over and over, and a rest, `count` in all."""
    place = 0
    while count:
        rows = min(count, sizes[place % len(sizes)])
        yield rows
        count, place = count - rows, place + 1


class _Surprise:
    """The perplexity of a text, row by row."""

    def __init__(self) -> None:
        self._nats: list[float] = []

    def add(self, logits: F32, tokens: Sequence[int]) -> None:
        """Logits `[rows, vocabulary]`, and the token that follows each row."""
        highest = logits.max(axis=1, keepdims=True)
        totals = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64)) + highest[:, 0]
        self._nats += (totals - logits[np.arange(len(tokens)), list(tokens)]).tolist()

    def error_beside(self, other: _Surprise) -> float:
        """The standard error of the difference in nats a token, over the same tokens: about the share by
        which perplexities differ by chance."""
        apart = np.array(self._nats) - np.array(other._nats)
        return float(apart.std() / math.sqrt(len(apart)))

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(self._nats)))


def _read(reference: Reference, window: tuple[int, ...]) -> F32:
    """Logits `[tokens, vocabulary]`."""
    return np.stack(reference.forced_logits(window[:1], list(window[1:])))


def _perplexity(
    reference: Reference, windows: Sequence[tuple[int, ...]], step: Callable[[int], None]
) -> float:
    found = _Surprise()
    for window in windows:
        found.add(_read(reference, window)[:-1], window[1:])
        step(len(window))
    return found.perplexity


# -------------------------------------------------------------------------------------------- matrices


@torch.inference_mode()
def worst_matrix(part: Slice, reference: Reference) -> MatrixError:
    """Multiplies the same random rows by each matrix of a slice, and by the reference's."""
    worst = MatrixError(matrix="", output=0, share=0.0)
    engine, (alone, together) = part.engine, MATRIX_ROWS
    generator = torch.Generator().manual_seed(1)
    for name, linear, weight, bias in _matrices(part, reference):
        drawn = torch.randn((alone + together, weight.shape[1]), generator=generator)
        rows, product = engine.cast(drawn.numpy()), engine.rows(linear=linear)
        made = [engine.numpy(engine.wide(product(some))) for some in (rows[:alone], rows[alone:])]
        expected = F.linear(torch.from_numpy(engine.numpy(engine.wide(rows))), weight, bias)
        off = (torch.from_numpy(np.concatenate(made)) - expected).square().mean(dim=0).sqrt()  # [out]
        squares = weight.square().sum(dim=1) + (0 if bias is None else bias.square())
        size = squares.sqrt()  # of an output, on average
        shares = (off / size.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(torch.inf)
        output = int(shares.argmax())
        if not shares[output] <= worst.share:
            worst = MatrixError(matrix=name, output=output, share=float(shares[output]))
    return worst


Matrix = tuple[str, Linear, torch.Tensor, torch.Tensor | None]


def _matrices(part: Slice, reference: Reference) -> Iterator[Matrix]:
    """Name, how the slice has it, its values `[out, in]` in float32, and its bias `[out]`."""
    decoder = reference.model.get_decoder()
    for index in range(part.span.count):
        plain, own = decoder.layers[index], _by_parameter(part, index)
        if (given := own.get(f"{LAYER_INPUT}.projection.weight")) is not None:
            first = index * given.outputs
            matrix = decoder.per_layer_model_projection.weight[first : first + given.outputs]
            yield f"layers.{index}.{LAYER_INPUT}.projection.weight", given, matrix, None
        for path, module in plain.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                full = f"{path}.{name}"
                if type(module) is nn.Linear and name == "weight":
                    yield f"layers.{index}.{full}", own[full], weight, module.bias
                elif weight.dim() == 3 and not isinstance(module, nn.Conv1d):  # a mixture's experts
                    for expert, (values, linear) in enumerate(zip(weight, own[full].linears, strict=True)):
                        if is_inputs_first(module):
                            values = values.T
                            if name == "gate_up_proj":
                                values = torch.cat([values[::2], values[1::2]])
                        yield f"layers.{index}.{full}[{expert}]", linear, values, None
    yield "lm_head.weight", part.parts[LM_HEAD], reference.head.weight, None


def _by_parameter(part: Slice, index: int) -> dict[str, Any]:
    """A layer's linear layers, and stacks of such, by what transformers calls their weights."""
    spec, own = part.spec, part.spec.layers[index]
    shape = LayerShape(spec=own, family=family_named(spec), hidden=spec.hidden, is_own=own.source == index)
    found: dict[str, Any] = {}
    for name, (stem, own_shape) in shape.places.items():
        made = part.parts[index][name]
        if isinstance(made, RouterPart):
            made = Linear(inputs=spec.hidden, matrices=(Plain(made.weights),))
        if isinstance(made, Linear | Stack):
            found |= {stem + end: made for end in own_shape.parameters}
    return found
