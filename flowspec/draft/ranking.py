"""Which tokens a drafter proposes below a node: the best by `log q / T + G`, with the target's own noise,
unfiltered.

`q` is the drafter's distribution at temperature 1, `T` the request's temperature and `G` the coupled noise of
the child's position (docs/design/exactness.md); at temperature 0 the order is `q`'s. Its logits are shaped
as the target's are (`model.sampler`), and tokens that may not be drawn are not proposed. The confidence of a
child is its share in the softmax of these scores over the whole vocabulary. Knows nothing of models, trees or
torch.

Cheap for large vocabularies, and exact. `exp(G)` is `-1 / log u` of the uniform `u`: one logarithm per entry
and position, kept for all rows at that position, so a row's softmax costs one exponential per entry. Its
terms, in single precision, also tell which few ids can be among the best; only those are scored in double
precision, exactly as the sampler scores them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import TextBefore
from flowspec.model.grammar import GrammarVocabulary, Mask
from flowspec.model.sampler import Shaping
from flowspec.noise import CACHE_BYTES_MAX, U64, bits_above, draw_bits, gumbel

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BLOCK_MAX = 256
WEIGHT_ERROR = 1e-3
"""More than the rounding of single precision can do to a weight."""
WEIGHT_MIN = 1e-30
"""Weights below may have lost their order to underflow."""
SHAPINGS_MAX = 16
"""Samplings of which is kept what they change."""


@dataclass(frozen=True, slots=True)
class Children:
    """Tokens proposed below one node, best first, and the drafter's confidence in each (0 to 1)."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Noise:
    """One position's noise for every column: its bits, and `exp(G)`."""

    bits: U64  # [columns]
    factors: F32  # [columns]


class Ranker:
    """Ranks the children of nodes of any number of requests. Rows of logits are float32 `[columns]`, finite.

    Columns are the target's ids below `vocabulary_size` (columns beyond are padding and never proposed), or
    with a reduced vocabulary the target's `ids`. `coupled=False` ranks and trusts by `log q / T` alone, as
    published methods do.
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        ids: I64 | None = None,
        coupled: bool = True,
        bytes_max: int = CACHE_BYTES_MAX,
    ) -> None:
        assert ids is None or (ids.min() >= 0 and ids.max() < vocabulary_size), (
            "the drafter's ids go beyond the target's vocabulary"
        )
        self._ids = np.arange(vocabulary_size) if ids is None else ids
        self._coupled = coupled
        self._weights = np.empty(len(self._ids), dtype=np.float32)  # room for one row
        self._noises: OrderedDict[tuple[int, int], _Noise] = OrderedDict()
        self._noises_max = max(2, bytes_max // (12 * len(self._ids)))
        self._shapings: OrderedDict[Sampling, Shaping] = OrderedDict()
        self.grammars: GrammarVocabulary | None = None

    def take_grammars(self, grammars: GrammarVocabulary | None) -> None:
        """From now on children are those that grammars allow; without their vocabulary, any."""
        self.grammars = grammars
        self._shapings.clear()

    def best(
        self,
        logits: F32,
        asked: Sequence[tuple[Sampling, int]],
        width: int,
        texts: Sequence[TextBefore | None] = (),
        masks: Sequence[Mask | None] = (),
    ) -> list[Children]:
        """Up to `width` children for each row of `logits` `[rows, columns]`; `asked` is its sampling and the
        children's position, `texts` what stands before them (empty: no sampling needs it), `masks` what
        their `shaping` allows there, where it was asked."""
        logits = logits[:, : len(self._ids)]
        found = []
        nothing = [None] * len(asked)
        for row, (sampling, position), text, mask in zip(
            logits, asked, texts or nothing, masks or nothing, strict=True
        ):
            is_noisy = self._coupled and sampling.temperature > 0
            noise = self._noise(sampling.seed, position) if is_noisy else None
            if sampling.is_shaped:
                shaped = self.shaping(sampling).of(row, text, mask)
                found.append(self._allowed(shaped, sampling, noise, width))
            else:
                found.append(self._children(row, sampling.temperature, noise, width))
        return found

    def _allowed(self, logits: F32, sampling: Sampling, noise: _Noise | None, width: int) -> Children:
        """The children among tokens that may be drawn; there may be fewer of them, or none."""
        count = min(width, int(np.count_nonzero(logits > -np.inf)))
        return self._children(logits, sampling.temperature, noise, count) if count else Children((), ())

    def shaping(self, sampling: Sampling) -> Shaping:
        """What makes of a model's logits what is ranked. Its masks may be asked for by another thread, as
        long as `best` is given them and asks for none itself."""
        found = self._shapings.get(sampling)
        if found is None:
            if len(self._shapings) >= SHAPINGS_MAX:
                self._shapings.popitem(last=False)
            obeyed = sampling if self.grammars is not None else structs.replace(sampling, grammar=None)
            found = self._shapings[sampling] = Shaping(obeyed, self._ids, self.grammars)
        else:
            self._shapings.move_to_end(sampling)
        return found

    def _children(self, logits: F32, temperature: float, noise: _Noise | None, width: int) -> Children:
        scale = 1 / temperature if temperature > 0 else 1.0
        highest = logits.max()
        weights = self._weights[: len(logits)]
        np.subtract(logits, highest, out=weights)
        with np.errstate(
            over="ignore"
        ):  # the least float32 marks ids never to be drawn; over T it is minus infinity, as meant
            weights *= np.float32(scale)
        np.exp(weights, out=weights)
        if noise is None:
            columns, scores = _largest(logits, width, scale)
        else:
            weights *= noise.factors[: len(logits)]
            columns, scores = _noisiest(logits, weights, noise.bits[: len(logits)], width, scale)
        shares = np.exp(scores - float(highest) * scale) / float(weights.sum())
        tokens = tuple(int(token) for token in self._ids[columns])
        return Children(tokens, tuple(min(1.0, float(share)) for share in shares))

    def _noise(self, seed: int, position: int) -> _Noise:
        found = self._noises.get((seed, position))
        if found is None:
            bits = draw_bits(seed, position, self._ids)
            uniform = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)  # as in `gumbel`
            found = self._noises[seed, position] = _Noise(bits, (-1 / np.log(uniform)).astype(np.float32))
            if len(self._noises) > self._noises_max:
                self._noises.popitem(last=False)
        else:
            self._noises.move_to_end((seed, position))
        return found


def _bound(values: F32, count: int) -> np.float32:
    """A value that at least `count` of the values reach (all, if there are fewer), and few more: from the
    maxima of blocks."""
    if count >= len(values):
        return np.float32(values.min())
    size = max(1, min(BLOCK_MAX, len(values) // (4 * count)))
    blocks = len(values) // size
    maxima = values[: blocks * size].reshape(blocks, size).max(axis=1)  # [blocks]
    return np.float32(np.partition(maxima, blocks - count)[blocks - count])


def _best(columns: I64, scores: F64, width: int) -> tuple[I64, F64]:
    """The `width` best by score, lowest column first among equals; `columns` grow."""
    order = np.argsort(-scores, kind="stable")[:width]
    return columns[order], scores[order]


def _largest(logits: F32, width: int, scale: float) -> tuple[I64, F64]:
    """The columns that are best by logit, and their scores."""
    columns = np.flatnonzero(logits >= _bound(logits, width))
    return _best(columns, logits[columns].astype(np.float64) * scale, width)


def _noisiest(logits: F32, weights: F32, bits: U64, width: int, scale: float) -> tuple[I64, F64]:
    """The columns that are best by `logit / T + G`, and their scores; `weights` are `exp` of that,
    roughly."""
    bound = _bound(weights, width)
    if bound > WEIGHT_MIN:
        columns = np.flatnonzero(weights >= bound * np.float32(1 - WEIGHT_ERROR))
    else:  # cold: most weights have vanished, but few ids can still make up for their logit by their noise
        least_logit = _bound(logits, width)
        is_head = logits >= least_logit
        scores = logits[is_head].astype(np.float64) * scale + gumbel(bits[is_head])
        least = float(
            np.partition(scores, len(scores) - min(width, len(scores)))[len(scores) - min(width, len(scores))]
        )
        columns = np.flatnonzero(
            is_head | (bits >= np.uint64(bits_above(least - float(least_logit) * scale)))
        )
    return _best(columns, logits[columns].astype(np.float64) * scale + gumbel(bits[columns]), width)
