"""Draws next tokens by the coupled Gumbel-max rule: `argmax(log p + G[seed, position, id])` over the filtered ids.

Filters in order: temperature, top-k, top-p, min-p, each over (probability descending, id ascending). Temperature 0 is
argmax, lowest id first. Exact without a full sort of the vocabulary:

- The unfiltered winner. Score the largest logits exactly; any other id needs noise above a bound to win, and that bound
  is a bound on its random bits, which are compared as integers. Few ids pass, and only those get their logarithms.
- Top-p and min-p. The winner stands if the mass before it is below top-p, one masked sum. The winner is itself drawn
  from p, so it stands with probability of about top-p; if not, the next best is tried.
- Top-k leaves a small set, which is filtered and scored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowspec.core.messages import Sampling
from flowspec.noise import NoiseCache, bits_above, draw_bits, gumbel

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

HEAD_COUNT = 64
"""Largest logits that are scored outright."""
TRIES_MAX = 12
"""Winners tried against top-p before the exact sort takes over."""
SORTED_COUNTS = (512, 8192)
"""Sizes of the sorted head that are tried before the whole vocabulary is sorted."""
LOW_TOP_P = 0.5
"""Below this, winners fail too often for trying; a sorted head is taken at once."""


class Sampler:
    """Draws the tokens of one request. `logits` rows are float32 `[vocabulary]`, finite."""

    def __init__(self, sampling: Sampling, vocabulary_size: int) -> None:
        self.sampling = sampling
        self._noise = NoiseCache(sampling.seed, vocabulary_size)

    def draw(self, logits: F32, position: int) -> int:
        """The token at `position`, that of the token being drawn."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return int(np.argmax(logits))
        if 0 < sampling.top_k < len(logits):
            return self._best(logits, self._filtered(logits, _top_k(logits, sampling.top_k)), position)
        if sampling.top_p == 1 and sampling.min_p == 0:
            return self._winner(logits, position, [])
        if sampling.top_p >= LOW_TOP_P:
            failed: list[int] = []
            weights = np.exp((logits - logits.max()) * np.float32(1 / sampling.temperature)) if sampling.top_p < 1 else None
            total = 0.0 if weights is None else float(weights.sum(dtype=np.float64))
            while len(failed) < TRIES_MAX:
                token = self._winner(logits, position, failed)
                if self._stands(logits, weights, total, token):
                    return token
                failed.append(token)
        return self._best(logits, self._filtered(logits, None), position)

    def survivors(self, logits: F32) -> I64:
        """Ids that pass all filters, most probable first. Sorts the vocabulary: for checking and reporting."""
        if self.sampling.temperature == 0:
            return np.array([np.argmax(logits)])
        top_k = self.sampling.top_k
        return self._filtered(logits, _top_k(logits, top_k) if 0 < top_k < len(logits) else None)

    def scores(self, logits: F32, ids: I64, position: int) -> F64:
        """`logit / T + G` of some ids; log p differs from it by a constant."""
        bits = draw_bits(self.sampling.seed, position, ids)
        return logits[ids].astype(np.float64) / self.sampling.temperature + gumbel(bits)

    def _best(self, logits: F32, ids: I64, position: int) -> int:
        return int(ids[np.argmax(self.scores(logits, ids, position))])

    def _filtered(self, logits: F32, ids: I64 | None) -> I64:
        """Applies top-p and min-p to sorted ids (None: to all), over the mass of those ids."""
        temperature, top_p, min_p = self.sampling.temperature, self.sampling.top_p, self.sampling.min_p
        if ids is None:
            ids, total = self._sorted_head(logits)
        else:
            total = float(np.exp((logits[ids].astype(np.float64) - float(logits[ids[0]])) / temperature).sum())
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
        """The largest ids, sorted, as many as top-p and min-p can need; and the mass of all relative to the first."""
        temperature, top_p, min_p = self.sampling.temperature, self.sampling.top_p, self.sampling.min_p
        highest = float(logits.max())
        total = float(np.exp((logits - np.float32(highest)) * np.float32(1 / temperature)).sum(dtype=np.float64))
        for count in SORTED_COUNTS:
            if count >= len(logits):
                break
            ids = _top_k(logits, count)
            kept = (logits[ids].astype(np.float64) - highest) / temperature
            if (top_p < 1 and np.exp(kept).sum() > top_p * total) or (min_p > 0 and kept[-1] < np.log(min_p)):
                return ids, total
        return np.argsort(-logits, kind="stable"), total

    def _winner(self, logits: F32, position: int, failed: Sequence[int]) -> int:
        """The unfiltered argmax of `logit / T + G`, leaving out the ids that failed a filter."""
        bits = self._noise.bits(position)
        count = min(HEAD_COUNT, len(logits))
        bound = np.float32(np.partition(logits, len(logits) - count)[len(logits) - count])
        head = np.flatnonzero(logits >= bound)
        head = head[~np.isin(head, failed)] if failed else head
        threshold = 0
        if len(head):
            best = float((logits[head].astype(np.float64) / self.sampling.temperature + gumbel(bits[head])).max())
            threshold = bits_above(best - float(bound) / self.sampling.temperature)
        rest = np.flatnonzero(bits >= np.uint64(threshold))
        candidates = np.union1d(head, rest)
        if failed:
            candidates = candidates[~np.isin(candidates, failed)]
        scores = logits[candidates].astype(np.float64) / self.sampling.temperature + gumbel(bits[candidates])
        return int(candidates[np.argmax(scores)])

    def _stands(self, logits: F32, weights: F32 | None, total: float, token: int) -> bool:
        """Whether a token passes top-p and min-p among the whole vocabulary."""
        own = logits[token]
        if self.sampling.min_p > 0:
            floor = float(logits.max()) / self.sampling.temperature + np.log(self.sampling.min_p)
            if float(own) / self.sampling.temperature < floor:
                return False
        if weights is None:
            return True
        before = float(weights[logits > own].sum(dtype=np.float64))
        before += float(weights[token]) * int(np.count_nonzero(logits[:token] == own))
        return before < self.sampling.top_p * total


def _top_k(logits: F32, count: int) -> I64:
    """The `count` largest, by logit descending and id ascending."""
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def margin(sampler: Sampler, logits: F32, position: int, token: int) -> float:
    """How far, in logits, `token` is from not being drawn at `position` (DESIGN section 3).

    The least of: its lead over the best other survivor, and its distances, or those of a better-scoring id that was
    filtered out, to the top-k, top-p and min-p boundaries. Small margins are near-ties: rounding may flip them. For a
    token that was not the one drawn the lead is how much it lacks.
    """
    sampling = sampler.sampling
    temperature = sampling.temperature
    if temperature == 0:
        others = np.delete(logits, token)
        return float(abs(np.float64(logits[token]) - others.max()))
    order = np.argsort(-logits, kind="stable")
    scores = sampler.scores(logits, order, position)
    rank = int(np.flatnonzero(order == token)[0])
    alive = np.isin(order, sampler.survivors(logits))
    rivals = scores[alive & (order != token)]
    found = [] if len(rivals) == 0 else [abs(float(scores[rank] - rivals.max())) * temperature]
    sorted_logits = logits[order].astype(np.float64)
    watched = [rank, *np.flatnonzero(~alive & (scores > scores[rank]))]
    top_k = sampling.top_k if 0 < sampling.top_k < len(logits) else len(logits)
    weights = np.exp((sorted_logits - sorted_logits[0]) / temperature)
    before = (np.cumsum(weights) - weights) / weights[:top_k].sum()
    for index in watched:
        if top_k < len(logits):
            edge = sorted_logits[top_k] if index < top_k else sorted_logits[top_k - 1]
            found.append(abs(sorted_logits[index] - edge))
        if sampling.top_p < 1 and index > 0:
            # Moving the mass before an id by d takes logits moved by at least d / (p (1 - p)) of its share p.
            share = min(max(before[index], 1e-12), 1 - 1e-12)
            found.append(abs(before[index] - sampling.top_p) / (share * (1 - share)) * temperature)
        if sampling.min_p > 0:
            found.append(abs(sorted_logits[index] - sorted_logits[0] - np.log(sampling.min_p) * temperature))
    return float(min(found)) if found else float("inf")
