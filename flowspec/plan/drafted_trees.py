"""What trees of guesses are worth, of a drafter of which nothing is known but how often it is right.

It is the synthetic drafter of `bench.synthetic`: after each prefix its confidences are `c (1 - c)^i`, with c
drawn for the prefix from a Beta distribution whose mean is the acceptance, and true as often as they say. So
a node's value, the product of the confidences above it, is the chance that the answer goes through it, and a
tree gives as many tokens as its nodes' values sum up to. Means of trees that are always the same.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

CONCENTRATION = 2.0
"""As `bench.synthetic`."""
CHILDREN = 10
"""Of a node that are looked at, as EAGLE-2 does."""
NODES_MAX, DEPTH_MAX = 64, 8
TREES = 256


@lru_cache(maxsize=64)
def tree_lengths(acceptance: float) -> F64:
    """`[depth, nodes]`: tokens that the best tree of so many nodes, its root among them, gives, if it has at
    most so many levels below the root; the target's own token counts. Row and column 0 mean nothing."""
    found = np.ones((DEPTH_MAX + 1, NODES_MAX + 1))
    values = np.ones((TREES, 0))
    for depth, level in enumerate(_levels(acceptance, NODES_MAX), 1):
        values = -np.sort(-np.concatenate([values, level], axis=1), axis=1)[:, : NODES_MAX - 1]
        sums = 1 + np.cumsum(values.mean(axis=0))
        found[depth, 2 : 2 + len(sums)] = sums
        found[depth, 2 + len(sums) :] = sums[-1]
    return found


def _levels(acceptance: float, width: int) -> list[F64]:
    """Values `[trees, nodes]` of the best nodes of each level, of which the next one's are children."""
    chance = np.random.default_rng(0)
    own = acceptance * CONCENTRATION
    level, found = np.ones((TREES, 1)), []
    for _ in range(DEPTH_MAX):
        sure = chance.beta(own, CONCENTRATION - own, level.shape)[..., None]
        children = (level[..., None] * sure * (1 - sure) ** np.arange(CHILDREN)).reshape(TREES, -1)
        level = -np.partition(-children, min(width, children.shape[1]) - 1, axis=1)[:, :width]
        found.append(level)
    return found
