"""Blocks of packed weights as they lie in a GGUF file, spread out into levels and scales without a loss: no
weight is rounded anew.

The layouts are those of ggml's `block_q4_0`, `block_q4_K` and so on, as the gguf package reads them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.model.arithmetic.packed import FORMS, GROUP, Form, Levels
from flowspec.model.gguf.file import Octets


def levels_of(kind: str, rows: Octets, inputs: int) -> Levels:
    """Of a matrix of ggml's type `kind`, one of `FORMS`, from its rows in the file, `[out, row bytes]`."""
    form = FORMS[kind]
    blocks = rows.reshape(len(rows), inputs // form.unit, -1)  # [out, units, bytes of a block]
    if form.unit == GROUP:
        return _of_groups(form, blocks)
    return _of_sixteen_inputs(blocks) if form.halves == 2 else _of_eight_groups(form, blocks)


def _of_groups(form: Form, blocks: Octets) -> Levels:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q8_0 and MXFP4: a scale, in some a minimum (ggml adds it, a panel's is
    taken off), in some the fifth bit of each level, and levels."""
    if form.has_exponents:
        return Levels(scales=blocks[..., 0], levels=_nibbles(blocks[..., 1:]))
    if form.bits == 8:
        return Levels(scales=_halves(blocks, 0), levels=blocks[..., 2:] ^ 128)
    rest = blocks[..., 4:] if form.has_minimum else blocks[..., 2:]
    levels = _nibbles(rest[..., -GROUP // 2 :])
    if form.bits == 5:
        levels |= np.unpackbits(rest[..., :4], 2, bitorder="little") << 4
    minimums = -_halves(blocks, 2) if form.has_minimum else None
    return Levels(scales=_halves(blocks, 0), minimums=minimums, levels=levels)


def _of_eight_groups(form: Form, blocks: Octets) -> Levels:
    """Q4_K and Q5_K: a scale, a minimum, whole ones of groups, in Q5_K the fifth bit of each level, and
    levels: a group in the low halves of 32 bytes, the next in the high ones."""
    whole_scales, whole_minimums = _six_bits(blocks[..., 4:16])
    chunks = blocks[..., -128:].reshape(*blocks.shape[:2], 4, GROUP)
    levels = np.stack([chunks & 15, chunks >> 4], 3).reshape(*blocks.shape[:2], 8, GROUP)
    if form.bits == 5:
        places = np.arange(8, dtype=np.uint8)[:, None]
        levels |= (blocks[..., None, 16:48] >> places & 1) << 4
    return Levels(
        levels=levels.reshape(len(blocks), -1, GROUP),
        scales=_halves(blocks, 0),
        minimums=_halves(blocks, 2),
        whole_scales=whole_scales.reshape(len(blocks), -1, 1),
        whole_minimums=whole_minimums.reshape(len(blocks), -1),
    )


def _of_sixteen_inputs(blocks: Octets) -> Levels:
    """Q6_K, of 128 inputs: four bits in 64 bytes, of the first half in the low halves; two bits in 32
    bytes."""
    size = blocks.shape[:2]
    low, high = blocks[..., :128].reshape(*size, 2, 64), blocks[..., 128:192].reshape(*size, 2, 1, GROUP)
    fours = np.concatenate([low & 15, low >> 4], 3).reshape(*size, 2, 4, GROUP)
    twos = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return Levels(
        levels=(fours | twos << 4).reshape(len(blocks), -1, GROUP),
        scales=_halves(blocks, 208),
        whole_scales=np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1, 2),
    )


def _halves(blocks: Octets, at: int) -> npt.NDArray[np.float16]:
    """A float16 of each block, `[out, units]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(blocks: Octets) -> Octets:
    """Levels of four bits of 32 inputs, `[out, groups, 32]`: low halves of 16 bytes, then high ones."""
    return np.concatenate([blocks & 15, blocks >> 4], 2)


def _six_bits(twelve: Octets) -> tuple[Octets, Octets]:
    """Scales and minimums of eight groups, each `[out, units, 8]`: the first four in the low bits of eight
    bytes, the others in four bytes' halves and what is above those bits."""
    first, second, third = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 2)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 2)
