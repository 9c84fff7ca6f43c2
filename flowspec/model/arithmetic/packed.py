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

from flowspec.model.arithmetic.arrays import Array, cast, contiguous, fill_up, namespace, repeat, zeros

PANEL = 16
"""Outputs of a panel."""
GROUP = 32
"""Inputs that are rounded together, where rows are."""
LEVELS_4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen levels of IQ4_NL stand for."""
LEVELS_FLOAT = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the floats of 4 bits (E2M1) are, in halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One of ggml's types: `number` as `canonical.c` counts them; `bits` of a level, from which `offset` is
    taken; `unit` inputs in a block.

    `table`: what levels stand for, where it is not themselves. `halves`: how many scales a group has, each of
    a part of its inputs. `has_exponents`: whether scales are powers of two, of which a byte has the exponent.
    `has_minimum`: whether it has a minimum. In a unit of several groups scales are whole numbers times the
    unit's own.
    """

    number: int
    bits: int
    offset: int
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
    def scale_bytes(self) -> int:
        """Of a panel, for each group of a unit that has several."""
        return 0 if self.groups == 1 else PANEL * 2 if self.halves == 2 else PANEL * 3 // 2

    @property
    def unit_bytes(self) -> int:
        """Of a panel, for each unit."""
        ends = PANEL if self.has_exponents else 2 * PANEL * (1 + self.has_minimum)
        return self.groups * (self.level_bytes + self.scale_bytes) + ends

    def panel_bytes(self, inputs: int, outputs: int) -> int:
        """Of a matrix."""
        return -(-outputs // PANEL) * -(-inputs // self.unit) * self.unit_bytes


FORMS: Mapping[str, Form] = {
    "Q4_0": Form(number=0, bits=4, offset=8),
    "Q4_1": Form(number=1, bits=4, offset=0, has_minimum=True),
    "Q5_0": Form(number=2, bits=5, offset=16),
    "Q5_1": Form(number=3, bits=5, offset=0, has_minimum=True),
    "Q8_0": Form(number=4, bits=8, offset=128),
    "Q4_K": Form(number=5, bits=4, offset=0, unit=256, has_minimum=True),
    "Q5_K": Form(number=6, bits=5, offset=0, unit=256, has_minimum=True),
    "Q6_K": Form(number=7, bits=6, offset=32, unit=256, halves=2),
    "IQ4_NL": Form(number=8, bits=4, offset=0, table=LEVELS_4NL),
    "MXFP4": Form(number=9, bits=4, offset=0, table=LEVELS_FLOAT, has_exponents=True),
}
"""By the names of ggml's types."""
Q4_0 = FORMS["Q4_0"]


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
    xp, more = namespace(given.levels), -len(given.levels) % PANEL
    groups = given.levels.shape[1]
    levels = _filled(given.levels, more, form.offset)
    vectors = xp.moveaxis(levels.reshape(-1, PANEL, groups, 8, 4), 1, 3)  # panel, group, v, output, k
    parts = [_level_bytes(form, vectors.reshape(-1, groups, 8, 4 * PANEL))]
    if form.groups > 1:
        assert given.whole_scales is not None
        parts.append(_scale_bytes(_in_panels(given.whole_scales, more), given.whole_minimums, more))
    body = xp.concatenate(parts, 2).reshape(len(vectors), groups // form.groups, -1)
    ends = [given.scales] if given.minimums is None else [given.scales, given.minimums]
    return xp.concatenate([body, *(_in_panels(each, more).view(xp.uint8) for each in ends)], 2)


def _filled(numbers: Array, more: int, value: int = 0) -> Array:
    """With so many rows more, of a value."""
    return namespace(numbers).concatenate([numbers, zeros(numbers, more, *numbers.shape[1:]) + value])


def _in_panels(numbers: Array, more: int) -> Array:
    """`[panels, units, 16]` from `[out, units]`, and `[panels, groups, halves, 16]` from `[out, groups,
    halves]`."""
    xp, numbers = namespace(numbers), _filled(numbers, more)
    panels = xp.moveaxis(numbers.reshape(-1, PANEL, *numbers.shape[1:]), 1, -1)
    return contiguous(panels)


def _level_bytes(form: Form, vectors: Array) -> Array:
    """`[panels, groups, level_bytes]` from levels `[panels, groups, 8, 64]`."""
    count, groups = vectors.shape[:2]
    if form.bits == 8:
        return vectors.reshape(count, groups, -1)
    low, high = vectors & 15, vectors >> 4
    found = [(low[:, :, :4] | low[:, :, 4:] << 4).reshape(count, groups, -1)]
    if form.bits == 5:
        found.append(_joined([high[:, :, v] << v for v in range(8)]))
    if form.bits == 6:
        found += [_joined([high[:, :, v + j] << v for v in range(0, 8, 2)]) for j in range(2)]
    return namespace(vectors).concatenate(found, 2)


def _joined(parts: list[Array]) -> Array:
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found


def _scale_bytes(scales: Array, minimums: Array | None, more: int) -> Array:
    """`[panels, groups, scale_bytes]` from scales `[panels, groups, halves, 16]`."""
    xp = namespace(scales)
    if minimums is None:
        return scales.view(xp.uint8).reshape(*scales.shape[:2], -1)
    first, second = scales[:, :, 0], _in_panels(minimums, more)
    above = first >> 4 | second >> 4 << 2
    return xp.concatenate([first & 15 | (second & 15) << 4, above[..., :8] | above[..., 8:] << 4], 2)


def unpacked(form: Form, panels: Array) -> Levels:
    """What was packed, of whole panels."""
    xp, (count, units, _) = namespace(panels), panels.shape
    size = form.level_bytes + form.scale_bytes
    body = panels[..., : form.groups * size].reshape(count, units * form.groups, size)
    vectors = _vectors(form, body[..., : form.level_bytes])  # [panels, groups, 8, 64]
    levels = xp.moveaxis(vectors.reshape(count, -1, 8, PANEL, 4), 3, 1).reshape(count * PANEL, -1, GROUP)
    ends = panels[..., form.groups * size :].reshape(count * units, -1)
    ends = ends.view(xp.uint8 if form.has_exponents else xp.float16).reshape(count, units, -1, PANEL)
    scales = _by_output(ends[:, :, 0])
    minimums = _by_output(ends[:, :, 1]) if form.has_minimum else None
    if form.groups == 1:
        return Levels(levels=levels, scales=scales, minimums=minimums)
    whole = body[..., form.level_bytes :]
    if form.halves == 2:
        pairs = whole.reshape(count, -1, 2, PANEL).view(xp.int8)
        return Levels(levels=levels, scales=scales, whole_scales=_by_output(pairs))
    low, above = whole[..., :PANEL], whole[..., PANEL:]
    above = xp.concatenate([above & 15, above >> 4], 2)
    first, second = low & 15 | (above & 3) << 4, low >> 4 | above >> 2 << 4
    return Levels(
        levels=levels,
        scales=scales,
        minimums=minimums,
        whole_scales=_by_output(first)[..., None],
        whole_minimums=_by_output(second),
    )


def _vectors(form: Form, given: Array) -> Array:
    xp, (count, groups, _) = namespace(given), given.shape
    if form.bits == 8:
        return given.reshape(count, groups, 8, 4 * PANEL)
    pairs = given[..., : PANEL * GROUP // 2].reshape(count, groups, 4, 4 * PANEL)
    low, above = xp.concatenate([pairs & 15, pairs >> 4], 2), given[..., PANEL * GROUP // 2 :]
    if form.bits == 5:
        return xp.stack([low[:, :, v] | (above >> v & 1) << 4 for v in range(8)], 2)
    if form.bits == 6:
        two = above.reshape(count, groups, 2, 4 * PANEL)
        return xp.stack([low[:, :, v] | (two[:, :, v % 2] >> v // 2 * 2 & 3) << 4 for v in range(8)], 2)
    return low


def _by_output(numbers: Array) -> Array:
    """`_in_panels`, backwards."""
    moved = namespace(numbers).moveaxis(numbers, -1, 1)
    return moved.reshape(-1, *moved.shape[2:])


def groups_of(form: Form, panels: Array) -> tuple[Array, Array, Array | None]:
    """Weights as whole numbers, int16 `[out, groups, 32]`; float32 scales `[out, groups, halves]` and
    minimums `[out, groups]`, both exact; of whole panels."""
    found, xp = unpacked(form, panels), namespace(panels)
    weights = cast(found.levels, "int16") - form.offset
    if form.table:
        levels, weights = found.levels, zeros(weights, *weights.shape)
        for level, means in enumerate(form.table):
            weights[levels == level] = means
    scales = cast(found.scales, "float32")
    if form.has_exponents:
        scales = xp.ldexp(xp.ones_like(scales), cast(found.scales, "int32") - 128)
    scales = scales[..., None]
    minimums = None if found.minimums is None else cast(found.minimums, "float32")
    if found.whole_scales is not None:
        scales = repeat(scales, form.groups, 1) * cast(found.whole_scales, "float32")
    if minimums is not None and found.whole_minimums is not None:
        minimums = repeat(minimums, form.groups, 1) * cast(found.whole_minimums, "float32")
    return weights, scales, minimums


def numbers_of(form: Form, panels: Array) -> Array:
    """Weights as numbers, float32 `[out, in]`, of whole panels: each level times its scale, less the
    minimum."""
    weights, scales, minimums = groups_of(form, panels)
    halves = cast(weights, "float32").reshape(*weights.shape[:2], form.halves, -1)
    found = (halves * scales[..., None]).reshape(weights.shape)
    return (found if minimums is None else found - minimums[..., None]).reshape(len(weights), -1)


def int8_panels(levels: Array) -> Array:
    """Panels of int8 `[out, in]`, as levels of Q8_0 lie, without their scales; what fills them up is 0."""
    xp, filled = namespace(levels), fill_up(_filled(levels, -len(levels) % PANEL), GROUP)
    blocks = filled.reshape(-1, PANEL, filled.shape[1] // GROUP, GROUP // 4, 4)
    moved = contiguous(xp.moveaxis(blocks, 1, 3))
    return (moved.view(xp.uint8) ^ 128).reshape(len(moved), -1)
