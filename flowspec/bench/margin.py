"""How far rounding must move the logits of a model before it draws another token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import TextBefore
from flowspec.model.sampler import F32, Sampler
from flowspec.model.step_by_step import StepByStep

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def margin_of_last(
    plain: StepByStep, prompt: tuple[int, ...], sampling: Sampling, answer: tuple[int, ...]
) -> float:
    """By how many logits the last token of `answer`, which is what the model says, leads there."""
    *before, last = answer
    *_, rows = plain.logits((*prompt, *before))
    text = TextBefore(np.array([*prompt, *before], dtype=np.int64), len(prompt))
    sampler = Sampler(sampling, plain.vocabulary_size, plain.grammars)
    return margin(sampler, rows[0], len(text.tokens), last, text)


def margin(sampler: Sampler, logits: F32, position: int, token: int, text: TextBefore | None = None) -> float:
    """How far the logits that are drawn from must move against each other, at least, before another token
    than `token` is drawn at `position`.

    `token` is the one drawn. The least of: its distance to where a filter drops it, and for every other id
    the larger of the lead over it and its distance to where the filters let it in (0 if they do). Rounding
    can change a choice only where it is small: that takes errors of half the margin, up for some logits and
    down for others.
    """
    temperature, survivors = sampler.sampling.temperature, survivors_of(sampler, logits, text)
    logits = sampler.shaped(logits, text)
    if temperature == 0:
        return float(np.float64(logits[token]) - np.delete(logits, token).max(initial=-np.inf))
    order = np.argsort(-logits, kind="stable")
    order = order[logits[order] > -np.inf]
    sorted_logits = logits[order].astype(np.float64)
    scores = sampler.scores(logits, order, position)
    rank = int(np.flatnonzero(order == token)[0])
    alive = np.isin(order, survivors)
    leads = np.maximum(0, scores[rank] - scores) * temperature
    leads[rank] = np.inf
    least = min(_to_filters(sampler.sampling, sorted_logits, rank), float(leads[alive].min()))
    rivals = np.flatnonzero(~alive & (leads < least))
    for index in rivals[np.argsort(leads[rivals])]:
        if leads[index] >= least:
            break
        least = min(least, max(float(leads[index]), _to_filters(sampler.sampling, sorted_logits, int(index))))
    return least


def survivors_of(sampler: Sampler, logits: F32, text: TextBefore | None = None) -> I64:
    """Ids that may be drawn, most probable first; sorts the vocabulary."""
    logits = sampler.shaped(logits, text)
    if sampler.sampling.temperature == 0:
        return np.array([np.argmax(logits)])
    found = sampler.filtered(logits)
    return found[logits[found] > -np.inf]


def _to_filters(sampling: Sampling, logits: F64, rank: int) -> float:
    """By how much sorted logits must move against each other, at least, before the id at `rank` passes or
    fails all filters."""
    found = []  # positive: passes by that much; negative: fails by that much
    top_k = sampling.top_k if 0 < sampling.top_k < len(logits) else len(logits)
    if top_k < len(logits):
        found.append(logits[rank] - (logits[top_k] if rank < top_k else logits[top_k - 1]))
    if sampling.min_p > 0:
        found.append(logits[rank] - logits[0] - np.log(sampling.min_p) * sampling.temperature)
    if sampling.top_p < 1:
        found.append(_to_top_p(sampling, logits[:top_k], float(logits[rank]), rank))
    return abs(float(min(found))) if found else float("inf")


def _to_top_p(sampling: Sampling, logits: F64, own: float, rank: int) -> float:
    """The distance of the id at `rank` to the top-p boundary, positive inside; it also gets there by changing
    its rank.

    A movement of m brings at most the ids within m across its own, and multiplies the odds of the mass before
    it by at most `exp(m / T)`. So m is at least the larger of the two needs, and the least of those over how
    many ids cross.
    """
    weights = np.exp((logits - logits[0]) / sampling.temperature)
    before = (np.cumsum(weights) - weights) / weights.sum()  # [top_k]
    if rank < len(logits) and before[rank] < sampling.top_p:
        shares = np.append(
            before[rank], before[rank + 1 :] + (weights[rank + 1 :] - weights[rank]) / weights.sum()
        )
        crossed = own - logits[rank:]
        sign = 1
    else:
        shares = before[: rank + 1]
        crossed = logits[: rank + 1] - own
        sign = -1
    shares = np.clip(shares, 1e-300, 1 - 2.0**-53)
    odds = np.log(shares) - np.log1p(-shares)
    needed = sign * (np.log(sampling.top_p) - np.log1p(-sampling.top_p) - odds) * sampling.temperature
    return sign * float(np.maximum(crossed, np.maximum(needed, 0)).min())
