"""Blocks of packed weights as they lie in a GGUF file, spread out into levels and scales without a loss: no
weight is rounded anew.

The layouts are those of ggml's `block_q4_0`, `block_q4_K` and so on, as the gguf package reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.model.arithmetic.packed import FORMS, GROUP, Levels

Octets = npt.NDArray[np.uint8]
Blocks = Octets
"""`[out, units, bytes of a block]`."""


def levels_of(kind: str, rows: Octets, inputs: int) -> Levels:
    """Of a matrix of ggml's type `kind`, one of `FORMS`, from its rows in the file, `[out, row bytes]`."""
    return _READ[kind](rows.reshape(len(rows), inputs // FORMS[kind].unit, -1))


def _halves(blocks: Blocks, at: int) -> npt.NDArray[np.float16]:
    """A float16 of each block, `[out, units]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(blocks: Blocks) -> Octets:
    """Levels of four bits of 32 inputs, `[out, groups, 32]`: low halves of 16 bytes, then high ones."""
    return np.concatenate([blocks & 15, blocks >> 4], 2)


def _bits(four: Blocks) -> Octets:
    """Each of the 32 bits of four bytes, `[out, groups, 32]`."""
    return np.unpackbits(four, 2, bitorder="little")


def _q4_0(blocks: Blocks) -> Levels:
    return Levels(scales=_halves(blocks, 0), levels=_nibbles(blocks[..., 2:]))


def _q4_1(blocks: Blocks) -> Levels:
    """ggml adds the minimum, a panel's is taken off."""
    return Levels(scales=_halves(blocks, 0), minimums=-_halves(blocks, 2), levels=_nibbles(blocks[..., 4:]))


def _q5_0(blocks: Blocks) -> Levels:
    levels = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Levels(scales=_halves(blocks, 0), levels=levels)


def _q5_1(blocks: Blocks) -> Levels:
    levels = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Levels(scales=_halves(blocks, 0), minimums=-_halves(blocks, 2), levels=levels)


def _q8_0(blocks: Blocks) -> Levels:
    return Levels(scales=_halves(blocks, 0), levels=blocks[..., 2:] ^ 128)


def _six_bits(twelve: Blocks) -> tuple[Octets, Octets]:
    """Scales and minimums of eight groups, each `[out, units, 8]`: the first four in the low bits of eight
    bytes, the others in four bytes' halves and what is above those bits."""
    first, second, third = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 2)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 2)


def _grouped(blocks: Blocks, levels: npt.NDArray[Any]) -> Levels:
    """Of Q4_K and Q5_K, which begin alike; levels `[out, units, 8, 32]`."""
    scales, minimums = (each.reshape(len(blocks), -1) for each in _six_bits(blocks[..., 4:16]))
    return Levels(
        levels=levels.reshape(len(blocks), -1, GROUP),
        scales=_halves(blocks, 0),
        minimums=_halves(blocks, 2),
        whole_scales=scales[..., None],
        whole_minimums=minimums,
    )


def _pairs(blocks: Blocks) -> Octets:
    """`[out, units, 8, 32]` from 128 bytes: a group in the low halves of 32 bytes, the next in the high
    ones."""
    chunks = blocks.reshape(*blocks.shape[:2], 4, GROUP)
    return np.stack([chunks & 15, chunks >> 4], 3).reshape(*blocks.shape[:2], 8, GROUP)


def _q4_k(blocks: Blocks) -> Levels:
    return _grouped(blocks, _pairs(blocks[..., 16:]))


def _q5_k(blocks: Blocks) -> Levels:
    places = np.arange(8, dtype=np.uint8)[:, None]
    return _grouped(blocks, _pairs(blocks[..., 48:]) | (blocks[..., None, 16:48] >> places & 1) << 4)


def _q6_k(blocks: Blocks) -> Levels:
    """Of 128 inputs: four bits in 64 bytes, of the first half in the low halves; two bits in 32 bytes."""
    size = blocks.shape[:2]
    low, high = blocks[..., :128].reshape(*size, 2, 64), blocks[..., 128:192].reshape(*size, 2, 1, GROUP)
    fours = np.concatenate([low & 15, low >> 4], 3).reshape(*size, 2, 4, GROUP)
    twos = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return Levels(
        levels=(fours | twos << 4).reshape(len(blocks), -1, GROUP),
        scales=_halves(blocks, 208),
        whole_scales=np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1, 2),
    )


def _mxfp4(blocks: Blocks) -> Levels:
    return Levels(scales=blocks[..., 0], levels=_nibbles(blocks[..., 1:]))


_READ: dict[str, Callable[[Blocks], Levels]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "MXFP4": _mxfp4,
}
