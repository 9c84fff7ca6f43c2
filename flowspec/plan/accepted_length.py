"""From what is published of a drafter, tokens that are accepted in a round, to what the planner reckons with,
the share of its best guesses that are right.

An accepted length counts the token that the target adds itself. In a chain of k guesses it is
1 + a + a^2 + ... + a^k, where a is the share and each guess is right as often as the first. In a tree it is 1
plus the values of the tree's nodes; the tree's are those of the synthetic drafter (`bench.drafters`), whose
one parameter is the share, too.
"""

from __future__ import annotations

import numpy as np

EAGLE_2_TREE = "eagle-2 tree"
"""60 nodes on 6 levels, of each of which the ten best are expanded (2406.16858)."""
EAGLE_2_LENGTHS = (
    (0.4, 3.02),
    (0.5, 3.65),
    (0.6, 4.36),
    (0.7, 5.19),
    (0.8, 6.07),
    (0.9, 6.74),
)
"""Shares, and the length that this tree accepts of such a drafter: means of 20,000 trees. A test draws
others."""
STEPS = 50


def share_right(length: float, drafted: int | str | None) -> float | None:
    """The share that gives this accepted length in a chain of so many guesses, or in `EAGLE_2_TREE`.

    None where it is not known what was drafted, or a length cannot be of that."""
    if drafted == EAGLE_2_TREE:
        shares, lengths = zip(*EAGLE_2_LENGTHS, strict=True)
        is_within = lengths[0] <= length <= lengths[-1]
        return float(np.interp(length, lengths, shares)) if is_within else None
    if not isinstance(drafted, int) or not 1 < length < drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if chain_length(middle, drafted) < length:
            low = middle
        else:
            high = middle
    return low


def chain_length(share: float, drafted: int) -> float:
    """What a chain of so many guesses accepts, with the target's own token."""
    return sum(share**guess for guess in range(drafted + 1))
