"""Which tokens a drafter proposes below a node: the best by `log q / T + G`, with the target's own noise,
unfiltered.

`q` is the drafter's distribution at temperature 1, `T` the request's temperature and `G` the coupled noise of
the child's position (docs/design/exactness.md); at temperature 0 the order is `q`'s. Its logits are shaped
as the target's are (`model.sampler`), and tokens that may not be drawn are not proposed. The confidence of a
child is its share in the softmax of these scores over the whole vocabulary. Knows nothing of models, trees or
torch.

Cheap for large vocabularies, and exact. A position's noise is kept for all rows there, and a row's softmax
costs one exponential per entry, in single precision. Its exponents also tell which few ids can be among the
best; only those are scored in double precision, exactly as the sampler scores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import TextBefore
from flowspec.model.grammar import GrammarVocabulary, Mask
from flowspec.model.sampler import Shaping
from flowspec.noise import CACHE_BYTES_MAX, U64, draw_bits, gumbel

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

BLOCK_MAX = 256
ROUGHNESS = 1e-6
"""More than the rounding of single precision can do to a score, as a share of the numbers that it is made of:
of the noise, which is below 100, and of the score's distance to the best logit's."""
SHAPINGS_MAX = 16
"""Samplings of which is kept what they change."""


@dataclass(frozen=True, slots=True)
class Children:
    """Tokens proposed below one node, best first, and the drafter's confidence in each (0 to 1)."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


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
        self._rough = np.empty(len(self._ids), dtype=np.float32)  # room for one row
        self._noise = lru_cache(max(2, bytes_max // (12 * len(self._ids))))(self._make_noise)
        self.shaping = lru_cache(SHAPINGS_MAX)(self._make_shaping)
        """What makes of a model's logits what is ranked with a sampling. Its masks may be asked for by
        another thread, as long as `best` is given them and asks for none itself."""
        self.grammars: GrammarVocabulary | None = None

    def take_grammars(self, grammars: GrammarVocabulary | None) -> None:
        """From now on children are those that grammars allow; without their vocabulary, any."""
        self.grammars = grammars
        self.shaping.cache_clear()

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
        children = []
        nothing = [None] * len(asked)
        for row, (sampling, position), text, mask in zip(
            logits[:, : len(self._ids)], asked, texts or nothing, masks or nothing, strict=True
        ):
            is_noisy = self._coupled and sampling.temperature > 0
            noise = self._noise(sampling.seed, position) if is_noisy else None
            count = width
            if sampling.is_shaped:  # there may be fewer tokens that may be drawn, or none
                row = self.shaping(sampling).of(row, text, mask)
                count = min(width, int(np.count_nonzero(row > -np.inf)))
            children.append(self._children(row, sampling.temperature, noise, count))
        return children

    def _children(
        self, logits: F32, temperature: float, noise: tuple[U64, F32] | None, width: int
    ) -> Children:
        if not width:
            return Children((), ())
        scale = 1 / temperature if temperature > 0 else 1.0
        highest = logits.max()
        rough = self._rough[: len(logits)]
        np.subtract(logits, highest, out=rough)
        with np.errstate(over="ignore"):
            # The least float32 marks ids never to be drawn; over T it is minus infinity, as meant.
            rough *= np.float32(scale)
            if noise is not None:
                rough += noise[1][: len(logits)]
            bound = _bound(rough, width)
            columns = np.flatnonzero(rough >= bound - np.float32(ROUGHNESS) * (100 + abs(bound)))
        scores = logits[columns].astype(np.float64) * scale
        if noise is not None:
            scores += gumbel(noise[0][columns])
        order = np.argsort(-scores, kind="stable")[:width]  # the lowest column first among equals
        np.exp(rough, out=rough)
        shares = np.exp(scores[order] - float(highest) * scale) / float(rough.sum())
        tokens = tuple(int(token) for token in self._ids[columns[order]])
        return Children(tokens, tuple(min(1.0, float(share)) for share in shares))

    def _make_noise(self, seed: int, position: int) -> tuple[U64, F32]:
        """One position's noise for every column: its bits, and roughly its values."""
        bits = draw_bits(seed, position, self._ids)
        uniform = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)  # as in `gumbel`
        return bits, -np.log((-np.log(uniform)).astype(np.float32))

    def _make_shaping(self, sampling: Sampling) -> Shaping:
        obeyed = sampling if self.grammars is not None else structs.replace(sampling, grammar=None)
        return Shaping(obeyed, self._ids, self.grammars)


def _bound(values: F32, count: int) -> np.float32:
    """A value that at least `count` of the values reach (all, if there are fewer), and few more: from the
    maxima of blocks."""
    if count >= len(values):
        return np.float32(values.min())
    size = max(1, min(BLOCK_MAX, len(values) // (4 * count)))
    blocks = len(values) // size
    maxima = values[: blocks * size].reshape(blocks, size).max(axis=1)  # [blocks]
    return np.float32(np.partition(maxima, blocks - count)[blocks - count])
