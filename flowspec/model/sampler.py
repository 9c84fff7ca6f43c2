"""Draws next tokens by the coupled Gumbel-max rule: `argmax(log p + G[seed, position, id])` of filtered ids.

Logits are shaped first, once each, in float32, and in this order; a token that may not be drawn has minus
infinity from then on, no mass in any filter, and no chance:

- `logit_bias` is added, and the logits of `suppress_tokens` are minus infinity.
- Tokens of the text so far are penalised. The repetition penalty of all tokens of prompt and answer divides
  what is above 0 and multiplies the rest; the frequency penalty times how often a token stands in the answer
  is taken off; the presence penalty is taken off where it stands there at all.
- Only those stay that a grammar allows (`model.grammar`).

Drafters shape theirs alike, so that one that agrees with the target still does. Filters in order:
temperature, top-k, top-p, min-p, each over (probability descending, id ascending). Temperature 0 is argmax,
lowest id first. The vocabulary is not sorted as a whole: the unfiltered winner comes first, which is drawn
from p and so stands before top-p with a chance of about top-p, else the next best is tried; top-k and min-p
leave small sets.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Logprobs, Sampling
from flowspec.core.text_before import TextBefore
from flowspec.errors import ClusterError
from flowspec.model.arithmetic.arrays import F32, I64
from flowspec.model.grammar import GrammarMasks, GrammarVocabulary, Mask
from flowspec.noise import NoiseCache, bits_above, draw_bits, gumbel

F64 = npt.NDArray[np.float64]
HEAD_COUNT = 64  # largest logits that are scored outright
TRIES_MAX = 12  # winners tried against top-p before the exact sort takes over
SORTED_COUNTS = (512, 8192)  # sizes of the sorted head that are tried before the whole vocabulary is sorted
LOW_TOP_P = 0.5  # below this, winners fail too often for trying; a sorted head is taken at once
MOST = np.finfo(np.float32).max
BESIDE_TOKENS_MIN = 1 << 14  # a mask of a smaller vocabulary takes less than a thread: .02 to .1 ms


def are_masks_beside(grammars: GrammarVocabulary | None) -> bool:
    """Whether masks are to be computed by another thread (`model.ahead`) while layers run."""
    is_large = grammars is not None and len(grammars.tokens.texts) >= BESIDE_TOKENS_MIN
    return is_large and len(os.sched_getaffinity(0)) > 1


class Shaping:
    """For rows of logits whose columns are the tokens `ids`. Without the vocabulary of a grammar (`grammars`)
    an answer that one binds can only end."""

    def __init__(
        self,
        sampling: Sampling,
        ids: npt.NDArray[np.integer],
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        self._sampling = sampling
        self._ids: I64 = ids.astype(np.int64)
        biases = {**dict(sampling.logit_bias), **dict.fromkeys(sampling.suppress_tokens, -math.inf)}
        self._biased = np.flatnonzero(np.isin(self._ids, list(biases)))
        named = self._ids[self._biased].tolist()
        self._biases: F32 = np.array([biases[token] for token in named], dtype=np.float32)
        self._columns: I64 = np.full(int(self._ids.max()) + 1, -1, dtype=np.int64)
        self._columns[self._ids] = np.arange(len(self._ids))
        self._masks = None
        if sampling.grammar is not None and grammars is not None:
            self._masks = GrammarMasks(sampling.grammar, grammars)

    def mask(self, text: TextBefore) -> Mask | None:
        """What the grammar allows behind a text, `[vocabulary]`; None without one. One thread at a time."""
        grammar = self._sampling.grammar
        if grammar is None:
            return None
        if self._masks is not None:
            return self._masks.allowed(text.answer.tolist())
        only_ends: Mask = np.zeros(grammar.ends[-1] + 1, dtype=np.bool_)
        only_ends[list(grammar.ends)] = True
        return only_ends

    def of(self, logits: F32, text: TextBefore | None, mask: Mask | None = None) -> F32:
        """Float32 `[columns]` or the first of them, as a new array; `text` may be None where the sampling
        needs none, `mask` where it is not known yet."""
        shaped = logits.copy()
        count = int(np.searchsorted(self._biased, len(logits)))
        shaped[self._biased[:count]] += self._biases[:count]
        if self._sampling.needs_text:
            assert text is not None, "what is drawn depends on the text before it"
            self._penalise(shaped, text)
            allowed = self.mask(text) if mask is None else mask
            if allowed is not None:
                self._mask(shaped, logits, allowed)
        return shaped

    def _penalise(self, logits: F32, text: TextBefore) -> None:
        """Changes logits in place. What is finite stays so, and minus infinity, too."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            seen, _ = self._count(text.tokens, len(logits))
            seen = seen[logits[seen] > -np.inf]
            own, penalty = logits[seen], np.float32(sampling.repetition_penalty)
            with np.errstate(over="ignore"):
                less, more = np.minimum(own / penalty, MOST), np.maximum(own * penalty, -MOST)
            logits[seen] = np.where(own > 0, less, more)
        if sampling.frequency_penalty or sampling.presence_penalty:
            seen, counts = self._count(text.answer, len(logits))
            if sampling.frequency_penalty:
                logits[seen] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
            if sampling.presence_penalty:
                logits[seen] -= np.float32(sampling.presence_penalty)

    def _count(self, tokens: I64, size: int) -> tuple[I64, I64]:
        """The columns below `size` of these tokens, each once, and how often it is among them."""
        ids, counts = np.unique(tokens, return_counts=True)
        is_known = ids < len(self._columns)
        columns, counts = self._columns[ids[is_known]], counts[is_known]
        is_here = (columns >= 0) & (columns < size)
        return columns[is_here], counts[is_here]

    def _mask(self, shaped: F32, logits: F32, allowed: Mask) -> None:
        """Takes the others out. Biases that leave none of the allowed ones do not count."""
        ids = self._ids[: len(shaped)]
        known = ids < len(allowed)
        columns = np.zeros(len(shaped), dtype=np.bool_)
        columns[known] = allowed[ids[known]]
        if not (shaped[columns] > -np.inf).any():
            shaped[columns] = logits[columns]
        shaped[~columns] = -np.inf


class Sampler:
    """Draws the tokens of one request. `logits` rows are float32 `[vocabulary]`, finite, as the model gives
    them; `text` is what stands before the token, and may be None where the sampling does not need it. For
    grammars their vocabulary must be known (`grammars`)."""

    def __init__(
        self, sampling: Sampling, vocabulary_size: int, grammars: GrammarVocabulary | None = None
    ) -> None:
        self.sampling = sampling
        self._noise = NoiseCache(sampling.seed, vocabulary_size)
        ids = np.arange(vocabulary_size)
        self._shaping = Shaping(sampling, ids, grammars) if sampling.is_shaped else None

    def mask(self, text: TextBefore) -> Mask | None:
        """Which tokens a grammar allows behind a text (`Shaping.mask`); None where none binds it."""
        return None if self._shaping is None else self._shaping.mask(text)

    def shaped(self, logits: F32, text: TextBefore | None = None, mask: Mask | None = None) -> F32:
        """What is drawn from: the logits themselves where nothing is to be changed of them."""
        return logits if self._shaping is None else self._shaping.of(logits, text, mask)

    def draw(
        self, logits: F32, position: int, text: TextBefore | None = None, mask: Mask | None = None
    ) -> int:
        """The token that is drawn at `position`; the `mask` behind the text where that is known already."""
        sampling, logits = self.sampling, self.shaped(logits, text, mask)
        if sampling.temperature == 0:
            return int(np.argmax(logits))
        if not (self._is_top_k(logits) or sampling.min_p):
            if sampling.top_p == 1:
                return self._winner(logits, position)
            if sampling.top_p >= LOW_TOP_P:
                weights, left = _weights(logits, sampling.temperature), logits.copy()
                total = float(weights.sum(dtype=np.float64))
                for _ in range(TRIES_MAX):
                    token = self._winner(left, position)
                    if self._is_within_top_p(logits, weights, total, token):
                        return token
                    left[token] = -np.inf
        ids = self.filtered(logits)
        return int(ids[np.argmax(self.scores(logits, ids, position))])

    def scores(self, logits: F32, ids: I64, position: int) -> F64:
        """`logit / T + G` of some ids, by what is drawn from; log p differs from it by a constant."""
        bits = draw_bits(self.sampling.seed, position, ids)
        return logits[ids].astype(np.float64) / self.sampling.temperature + gumbel(bits)

    def _is_top_k(self, logits: F32) -> bool:
        return 0 < self.sampling.top_k < len(logits)

    def filtered(self, logits: F32) -> I64:
        """Ids that pass all filters, sorted; top-p is of the mass that top-k leaves."""
        temperature, top_p, min_p = self.sampling.temperature, self.sampling.top_p, self.sampling.min_p
        if self._is_top_k(logits):
            ids = _top_k(logits, self.sampling.top_k)
            wide = logits[ids].astype(np.float64)
            total = float(np.exp((wide - wide[0]) / temperature).sum())
        else:
            ids, total = self._sorted_head(logits)
        kept = logits[ids].astype(np.float64) / temperature
        if top_p < 1:
            weights = np.exp(kept - kept[0])
            before = np.cumsum(weights) - weights
            count = max(1, int(np.searchsorted(before, top_p * total)))
            ids, kept = ids[:count], kept[:count]
        if min_p > 0:
            ids = ids[kept >= kept[0] + np.log(min_p)]
        return ids

    def _sorted_head(self, logits: F32) -> tuple[I64, float]:
        """The largest ids that top-p and min-p can need, sorted; and all mass relative to the first."""
        temperature, top_p, min_p = self.sampling.temperature, self.sampling.top_p, self.sampling.min_p
        highest = float(logits.max())
        _check_any(highest > -np.inf)
        total = float(_weights(logits, temperature).sum(dtype=np.float64))
        if min_p > 0:
            # A shade below the floor, which `_filtered` applies to the letter.
            floor = highest + np.log(min_p) * temperature - 1e-3 * max(1.0, abs(highest))
            ids = np.flatnonzero(logits >= np.float32(max(floor, -MOST)))
            return ids[np.argsort(-logits[ids], kind="stable")], total
        for count in SORTED_COUNTS if top_p < 1 else ():
            if count >= len(logits):
                break
            ids = _top_k(logits, count)
            if np.exp((logits[ids].astype(np.float64) - highest) / temperature).sum() > top_p * total:
                return ids, total
        return np.argsort(-logits, kind="stable"), total

    def _winner(self, logits: F32, position: int) -> int:
        """The argmax of `logit / T + G`, of ids that may be drawn. The largest logits are scored; of others
        only those whose random bits, as integers, are above the bound on what may win."""
        bits, temperature = self._noise.bits(position), self.sampling.temperature
        count = min(HEAD_COUNT, len(logits))
        bound = np.float32(np.partition(logits, len(logits) - count)[len(logits) - count])
        head = np.flatnonzero(logits >= bound if bound > -np.inf else logits > bound)
        _check_any(len(head) > 0)
        best = float((logits[head].astype(np.float64) / temperature + gumbel(bits[head])).max())
        rest = np.flatnonzero(bits >= np.uint64(bits_above(best - float(bound) / temperature)))
        candidates = np.union1d(head, rest)
        scores = logits[candidates].astype(np.float64) / temperature + gumbel(bits[candidates])
        return int(candidates[np.argmax(scores)])

    def _is_within_top_p(self, logits: F32, weights: F32, total: float, token: int) -> bool:
        """Whether the mass before a token is below top-p of the total."""
        own = logits[token]
        before = float(weights[logits > own].sum(dtype=np.float64))
        before += float(weights[token]) * int(np.count_nonzero(logits[:token] == own))
        return before < self.sampling.top_p * total


def _check_any(has_any: bool) -> None:
    if not has_any:
        raise ClusterError(
            "no token may be drawn: expected a logit above -inf, got none; take another model, or fewer "
            "suppress_tokens in its generation_config.json"
        )


def _weights(logits: F32, temperature: float) -> F32:
    """Probabilities relative to the largest one."""
    with np.errstate(over="ignore"):  # what is never to be drawn is the least float32; over T minus infinity
        weights: F32 = np.exp((logits - logits.max()) * np.float32(1 / temperature))
    return weights


def _top_k(logits: F32, count: int) -> I64:
    """The `count` largest, by logit descending and id ascending."""
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def logprobs(logits: F32, token: int, count: int) -> Logprobs:
    """Log-probabilities of `token` and of the `count` likeliest tokens, by the softmax of the raw `logits`
    `[vocabulary]`, not of what is drawn from.

    What float32 cannot tell from minus infinity is its least number.
    """
    highest = float(logits.max())
    total = highest + float(np.log(_weights(logits, 1.0).sum(dtype=np.float64)))
    ids = _top_k(logits, min(count, len(logits))) if count else np.empty(0, dtype=np.int64)
    chosen, *values = np.maximum(logits[[token, *ids]].astype(np.float64) - total, -MOST).tolist()
    return Logprobs(chosen=chosen, ids=tuple(ids.tolist()), values=tuple(values))
