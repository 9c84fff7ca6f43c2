"""How packed weights lie in memory: in panels of sixteen outputs, unit of inputs by unit of inputs.

A *form* is one of ggml's types, by its name: 32 inputs are a group, which has a scale, and in some forms a
minimum; a weight is its level times the scale, less the minimum. A panel takes the bytes that its sixteen
rows take in a GGUF file, in the order in which a processor's vectors multiply them, and `canonical.c` reads
it from its beginning to its end. Of each unit (the inputs of one of ggml's blocks) it has

- for each group of 32 inputs: the low four bits of levels in 256 bytes, of which byte 64 v + 4 o + k has of
  output o input 4 v + k in its low half, and input 16 + 4 v + k in its high half; the bits above, of output o
  and input 4 v + k in byte 4 o + k: in bit v where there is one more bit, and in bits 2 (v // 2) and the next
  of byte 64 (v % 2) + 4 o + k where there are two; levels of eight bits lie in 512 bytes, byte 64 v + 4 o +
  k;
- where a unit has 256 inputs, for each group its scale and minimum as whole numbers: of six bits in 24 bytes
  (the low halves of both in byte o; above it two bits of each, of outputs o and o + 8 in the halves of byte
  16 + o), or two scales of sixteen inputs each, byte o and byte 16 + o;
- at its end sixteen float16: scales, or what the whole numbers are multiplied by; then those of minimums. Of
  MXFP4 sixteen bytes: byte b stands for the scale 2^(b - 128).

What is no output or input of the matrix has a scale of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.model.arithmetic.arrays import Array, cast, contiguous, namespace, repeat, zeros

PANEL = 16  # outputs of a panel
GROUP = 32  # inputs that are rounded together, where rows are
LEVELS_4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL
LEVELS_FLOAT = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1, in halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One of ggml's types: `number` as `canonical.c` counts them; `bits` of a level, from which `offset` is
    taken; `unit` inputs in a block of `block_bytes` in a GGUF file.

    `table`: what levels stand for, where it is not themselves. `halves`: how many scales a group has, each of
    a part of its inputs. `has_exponents`: whether scales are powers of two, of which a byte has the exponent.
    `has_minimum`: whether it has a minimum. In a unit of several groups scales are whole numbers times the
    unit's own.
    """

    number: int
    bits: int
    offset: int
    block_bytes: int
    unit: int = GROUP
    halves: int = 1
    has_minimum: bool = False
    table: tuple[int, ...] = ()
    has_exponents: bool = False

    @property
    def groups(self) -> int:
        """In a unit."""
        return self.unit // GROUP

    @property
    def level_bytes(self) -> int:
        """Of a panel, for each group."""
        return PANEL * GROUP * self.bits // 8

    @property
    def unit_bytes(self) -> int:
        """Of a panel, for each unit."""
        return PANEL * self.block_bytes

    @property
    def body_bytes(self) -> int:
        """Of a unit, without what is at its end."""
        return self.unit_bytes - (PANEL if self.has_exponents else 2 * PANEL * (1 + self.has_minimum))

    def panel_bytes(self, inputs: int, outputs: int) -> int:
        """Of a matrix."""
        return -(-outputs // PANEL) * -(-inputs // self.unit) * self.unit_bytes


FORMS: Mapping[str, Form] = {
    "Q4_0": Form(number=0, bits=4, offset=8, block_bytes=18),
    "Q4_1": Form(number=1, bits=4, offset=0, block_bytes=20, has_minimum=True),
    "Q5_0": Form(number=2, bits=5, offset=16, block_bytes=22),
    "Q5_1": Form(number=3, bits=5, offset=0, block_bytes=24, has_minimum=True),
    "Q8_0": Form(number=4, bits=8, offset=128, block_bytes=34),
    "Q4_K": Form(number=5, bits=4, offset=0, unit=256, block_bytes=144, has_minimum=True),
    "Q5_K": Form(number=6, bits=5, offset=0, unit=256, block_bytes=176, has_minimum=True),
    "Q6_K": Form(number=7, bits=6, offset=32, unit=256, block_bytes=210, halves=2),
    "IQ4_NL": Form(number=8, bits=4, offset=0, block_bytes=18, table=LEVELS_4NL),
    "MXFP4": Form(number=9, bits=4, offset=0, block_bytes=17, table=LEVELS_FLOAT, has_exponents=True),
}
"""By the names of ggml's types."""


Panels = npt.NDArray[np.uint8]  # `[panels, units, unit_bytes]`


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A packed matrix, spread out: `levels` from 0 on, uint8 `[out, groups, 32]`.

    `scales` and `minimums` are float16 `[out, units]`, or scales exponents in uint8; `whole_scales` `[out,
    groups, halves]` and `whole_minimums` `[out, groups]`, both uint8 (scales of two halves int8), are there
    in units of several groups.
    """

    levels: Array
    scales: Array
    minimums: Array | None = None
    whole_scales: Array | None = None
    whole_minimums: Array | None = None


def packed(form: Form, given: Levels) -> Array:
    """Panels, uint8 `[panels, units, unit_bytes]`."""
    xp, groups = namespace(given.levels), given.levels.shape[1]
    parts = [_level_bytes(form, _vectors(given.levels, form.offset))]
    if given.whole_scales is not None:
        parts.append(_scale_bytes(_in_panels(given.whole_scales), given.whole_minimums))
    body = xp.concatenate(parts, 2)
    ends = [_in_panels(each) for each in (given.scales, given.minimums) if each is not None]
    units = body.reshape(len(body), groups // form.groups, -1)
    return xp.concatenate([units, *(each.view(xp.uint8) for each in ends)], 2)


def _filled(numbers: Array, value: int = 0) -> Array:
    """With more rows, of a value, up to whole panels."""
    more = zeros(numbers, -len(numbers) % PANEL, *numbers.shape[1:])
    return namespace(numbers).concatenate([numbers, more + value])


def _in_panels(numbers: Array) -> Array:
    """`[panels, ..., 16]` of `[out, ...]`."""
    filled = _filled(numbers).reshape(-1, PANEL, *numbers.shape[1:])
    return contiguous(namespace(numbers).moveaxis(filled, 1, -1))


def _vectors(levels: Array, filled_with: int) -> Array:
    """`[panels, groups, 8, 64]` from `[out, groups, 32]`: by v, then output by output, then k."""
    parts = _filled(levels, filled_with).reshape(-1, PANEL, levels.shape[1], 8, 4)
    return namespace(levels).moveaxis(parts, 1, 3).reshape(len(parts), -1, 8, 4 * PANEL)


def _level_bytes(form: Form, vectors: Array) -> Array:
    """`[panels, groups, level_bytes]`."""
    if form.bits == 8:
        return vectors.reshape(*vectors.shape[:2], -1)
    low, high, more = vectors & 15, vectors >> 4, form.bits - 4
    found = [(low[:, :, :4] | low[:, :, 4:] << 4).reshape(*vectors.shape[:2], -1)]
    for first in range(more):
        found.append(sum(high[:, :, v] << more * (v // more) for v in range(first, 8, more)))
    return namespace(vectors).concatenate(found, 2)


def _scale_bytes(scales: Array, minimums: Array | None) -> Array:
    """Bytes `[panels, groups, 24 or 32]` from scales `[panels, groups, halves, 16]`."""
    xp = namespace(scales)
    if minimums is None:
        return scales.view(xp.uint8).reshape(*scales.shape[:2], -1)
    first, second = scales[:, :, 0], _in_panels(minimums)
    above = first >> 4 | second >> 4 << 2
    return xp.concatenate([first & 15 | (second & 15) << 4, above[..., :8] | above[..., 8:] << 4], 2)


def _levels(form: Form, given: Array) -> Array:
    """`[out, groups, 32]` from `[panels, groups, level_bytes]`."""
    xp, (count, groups, _), more = namespace(given), given.shape, form.bits - 4
    vectors = given
    if form.bits < 8:
        pairs = given[..., : PANEL * GROUP // 2]
        vectors = xp.concatenate([pairs & 15, pairs >> 4], 2)
    vectors = vectors.reshape(count, groups, 8, 4 * PANEL)
    if more in (1, 2):
        above = given[..., PANEL * GROUP // 2 :].reshape(count, groups, more, 4 * PANEL)
        high = [above[:, :, v % more] >> more * (v // more) & 2**more - 1 for v in range(8)]
        vectors = vectors | xp.stack(high, 2) << 4
    parts = vectors.reshape(count, groups, 8, PANEL, 4)
    return xp.moveaxis(parts, 3, 1).reshape(count * PANEL, groups, GROUP)


def _by_output(numbers: Array) -> Array:
    """`_in_panels`, backwards."""
    moved = namespace(numbers).moveaxis(numbers, -1, 1)
    return moved.reshape(-1, *moved.shape[2:])


def groups_of(form: Form, panels: Array) -> tuple[Array, Array, Array | None]:
    """Weights as whole numbers, int16 `[out, groups, 32]`; float32 scales `[out, groups, halves]` and
    minimums `[out, groups]`, both exact; of whole panels."""
    xp, (count, units, _) = namespace(panels), panels.shape
    body = panels[..., : form.body_bytes].reshape(count, units * form.groups, -1)
    levels, whole = _levels(form, body[..., : form.level_bytes]), body[..., form.level_bytes :]
    weights = cast(levels, "int16") - form.offset
    for level, means in enumerate(form.table):
        weights[levels == level] = means
    ends = panels[..., form.body_bytes :].reshape(count * units, -1)
    if form.has_exponents:
        ends = xp.ldexp(cast(xp.ones_like(ends), "float32"), cast(ends, "int32") - 128)
    found = cast(ends if form.has_exponents else ends.view(xp.float16), "float32")
    found = repeat(_by_output(found.reshape(count, units, -1, PANEL)), form.groups, 1)
    if form.halves == 2:
        found = found * _by_output(whole.reshape(count, -1, 2, PANEL).view(xp.int8))
    elif form.groups > 1:
        low, above = whole[..., :PANEL], whole[..., PANEL:]
        above = xp.concatenate([above & 15, above >> 4], 2)
        both = xp.stack([low & 15 | (above & 3) << 4, low >> 4 | above >> 2 << 4], 2)
        found = found * _by_output(both)
    return weights, found[..., : form.halves], found[..., 1] if form.has_minimum else None


def numbers_of(form: Form, panels: Array) -> Array:
    """Weights as float32 `[out, in]`, of whole panels: each level times its scale, less the minimum."""
    weights, scales, minimums = groups_of(form, panels)
    halves = cast(weights, "float32").reshape(*weights.shape[:2], form.halves, -1)
    found = (halves * scales[..., None]).reshape(weights.shape)
    return (found if minimums is None else found - minimums[..., None]).reshape(len(weights), -1)
