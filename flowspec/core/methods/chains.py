"""Which chains of models come into question: all of them where they are few, else the best that a bounded
search finds.

A chain takes as long as its slowest link, its first model's own turn or a step from one model to the one
above it, and foresees as much as its surest model. So for each model there is one best chain that ends with
it, found level by level as the least slowest link, and the best of all chains is one of these: whatever stood
above a chain's surest model could only make it slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise, product
from math import prod

Chain = tuple[int, ...]
"""Models by number, the lowest level first; the target at its end is implied."""
Step = Callable[[int, int], float]
"""Seconds of the step from a model to one above it."""

CHAINS_MAX = 255
"""Up to so many chains, which are those of eight levels, all come into question."""


def by_level(levels: Sequence[int], models: Iterable[int]) -> list[list[int]]:
    order = sorted(models, key=lambda model: (levels[model], model))
    return [list(group) for _, group in groupby(order, key=lambda model: levels[model])]


def every_chain(groups: Sequence[Sequence[int]]) -> list[Chain]:
    """Every chain but plain decoding, the shortest first: at most one model of each level."""
    rank = {model: place for place, model in enumerate(model for group in groups for model in group)}
    picks = product(*[(None, *group) for group in groups])
    found = [tuple(model for model in picked if model is not None) for picked in picks]
    return sorted(filter(None, found), key=lambda chain: (len(chain), [rank[model] for model in chain]))


def chains_to_try(groups: Sequence[Sequence[int]], turn_s: Sequence[float], step_s: Step) -> list[Chain]:
    """All chains, or of more than `CHAINS_MAX` those that may be the best; `turn_s` are the models' turns by
    number."""
    if prod(len(group) + 1 for group in groups) - 1 <= CHAINS_MAX:
        return every_chain(groups)
    best = _best_to_each(groups, turn_s, step_s)
    helped = [_with_free_judges(chain, groups, turn_s, step_s) for chain in best]
    alone = [(model,) for group in groups for model in group]
    return list(dict.fromkeys([*best, *helped, *alone]))


def slowest_s(chain: Chain, turn_s: Sequence[float], step_s: Step) -> float:
    """The seconds of a chain's slowest link."""
    return max(turn_s[chain[0]], *(step_s(low, high) for low, high in pairwise(chain)), 0.0)


def _best_to_each(groups: Sequence[Sequence[int]], turn_s: Sequence[float], step_s: Step) -> list[Chain]:
    """For each model the chain that ends with it whose slowest link is the fastest."""
    found: dict[int, tuple[float, Chain]] = {}
    for group in groups:
        below = list(found.items())
        for model in group:
            ways = [(max(slowest, step_s(low, model)), (*chain, model)) for low, (slowest, chain) in below]
            found[model] = min([(turn_s[model], (model,)), *ways])
    return [chain for _, chain in found.values()]


def _with_free_judges(
    chain: Chain, groups: Sequence[Sequence[int]], turn_s: Sequence[float], step_s: Step
) -> Chain:
    """The same chain with a model of each level that has none, where it makes the chain no slower: it may
    help."""
    most_s = slowest_s(chain, turn_s, step_s)
    taken = {place: model for place, group in enumerate(groups) for model in group if model in chain}
    for place, group in enumerate(groups):
        if place in taken:
            continue
        for model in group:
            longer = {**taken, place: model}
            candidate = tuple(longer[at] for at in sorted(longer))
            if slowest_s(candidate, turn_s, step_s) <= most_s:
                taken = longer
                break
    return tuple(taken[at] for at in sorted(taken))
