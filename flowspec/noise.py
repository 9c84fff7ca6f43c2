"""The coupled noise: Gumbel values that depend only on (seed, position, vocabulary id).

Every sampler and every drafter adds the same noise to its log-probabilities, so two models that agree on the
distribution agree on the token (Gumbel-max coupling, Daliri et al. 2408.07978). The generator is
counter-based (splitmix64's finaliser over a keyed counter), so any value can be had without the ones before
it. 53-bit uniforms in float64: a float32 uniform rounds to 1 and would give an infinite Gumbel value.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
CACHE_BYTES_MAX = 24 * 2**20


def _finalise(x: int) -> int:
    """splitmix64's finaliser on a Python integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def position_key(seed: int, position: int) -> int:
    """The 64-bit key of one position: seed and position, each diffused over all bits."""
    return _finalise((_finalise((seed + _GOLDEN) & _MASK) + position * _GOLDEN) & _MASK)


def draw_bits(seed: int, position: int, ids: npt.NDArray[np.integer]) -> U64:
    """Uniform 53-bit integers for vocabulary ids `[n]`; larger bits mean larger noise."""
    x = ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(position_key(seed, position))
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    x >>= np.uint64(11)
    return x


def gumbel(bits: U64) -> F64:
    """Standard Gumbel values of 53-bit integers; the half step keeps the uniform above 0, the bound keeps it
    below 1."""
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    np.minimum(
        uniform, 1 - 2.0**-53, out=uniform
    )  # the half step rounds the largest integer up to 1: infinite noise
    return -np.log(-np.log(uniform))


def bits_above(noise: float) -> int:
    """The least 53-bit integer whose Gumbel value can exceed `noise` (rounded down, so none is missed)."""
    uniform = np.exp(-np.exp(-noise))
    return max(0, int(uniform * 2.0**53) - 2**8)


class NoiseCache:
    """The bits of the whole vocabulary for the positions in use, least recently used dropped first."""

    def __init__(self, seed: int, vocabulary_size: int, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self.seed = seed
        self.ids = np.arange(vocabulary_size, dtype=np.uint64)
        self.count_max = max(2, bytes_max // (8 * vocabulary_size))
        self._bits: OrderedDict[int, U64] = OrderedDict()

    def bits(self, position: int) -> U64:
        """53-bit integers `[vocabulary]` of one position."""
        found = self._bits.get(position)
        if found is None:
            found = draw_bits(self.seed, position, self.ids)
            self._bits[position] = found
            if len(self._bits) > self.count_max:
                self._bits.popitem(last=False)
        else:
            self._bits.move_to_end(position)
        return found
