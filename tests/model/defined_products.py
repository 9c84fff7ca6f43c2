"""The definition of what only `canonical.c` computes: products of rows and matrices, and of what a request
holds of a layer. Layers are `defined_layer.Layer`, the rest is `flowspec.model.arithmetic.plain`."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.protocol.model_spec import DeltaRule, Dense
from flowspec.model.arithmetic.arrays import Array, cast, fill_up, namespace, zeros
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL, Form, groups_of
from flowspec.model.arithmetic.plain import (
    FINER,
    LANES,
    PANELS,
    Held,
    attention,
    convolution,
    delta_rows,
    delta_rule,
    finer_levels,
    halves_sum,
    packed_rows,
    store,
)
from flowspec.model.layer import Packed, Table

_NORMAL_LEAST = 2.0**-126
"""Of float32; half a last place below it rounds to it."""


def lanes_product(x: Array, weights: Array) -> Array:
    """Float32 `[rows, out]` from `[rows, in]` and `[out, in]` of whatever dtype.

    Of every 16 inputs lane i adds the product of input i, each by a fused step; the last inputs are filled up
    with zeros. Then the lanes are summed in halves.
    """
    rows, outputs = len(x), len(weights)
    left, right = (cast(fill_up(each, LANES), "float64") for each in (x, weights))
    left, right = left.reshape(rows, 1, -1, LANES), right.reshape(1, outputs, -1, LANES)
    lanes = zeros(left, rows, outputs, LANES)
    for step in range(left.shape[2]):
        lanes = cast(cast(_fused(left[:, :, step], right[:, :, step], lanes), "float32"), "float64")
    return halves_sum(cast(lanes, "float32"))


def pairs_product(x: Array, weights: Array) -> Array:
    """Float32 `[rows, out]` from `[rows, in]`, rounded to bfloat16, and bfloat16 `[out, in]`, as x86
    multiplies pairs (VDPBF16PS).

    Of every 32 inputs lane i adds the products of inputs 2 i + 1 and 2 i, in this order, each by a fused step
    (`_flushed_step`); the last inputs are filled up with zeros. Then the lanes are summed in halves.
    """
    rows, outputs = len(x), len(weights)
    given = cast(x, weights.dtype), weights
    left, right = (_flushed(cast(fill_up(each, 2 * LANES), "float64")) for each in given)
    left, right = left.reshape(rows, 1, -1, LANES, 2), right.reshape(1, outputs, -1, LANES, 2)
    lanes = zeros(left, rows, outputs, LANES)
    for step in range(left.shape[2]):
        for place in (1, 0):
            lanes = _flushed_step(left[:, :, step, :, place], right[:, :, step, :, place], lanes)
    return halves_sum(cast(lanes, "float32"))


def _flushed_step(x: Array, y: Array, total: Array) -> Array:
    """x * y + total, rounded once to float32; zero where that is below the smallest normal number."""
    return cast(cast(_flushed(_fused(x, y, total)), "float32"), "float64")


def _fused(x: Array, y: Array, total: Array) -> Array:
    """x * y + total of numbers of float32, which rounds to float32 as the exact sum does. All are held in
    float64, in which products of such numbers are exact."""
    xp = namespace(x)
    product = x * y
    found = product + total
    part = found - product
    lost = (product - (found - part)) + (total - part)  # what the sum in float64 lost, exactly
    # Where it lost something its last digit becomes odd, so that what is rounded to float32 is on the side of
    # a tie, or of a bound, on which the right sum is.
    bits = found.view(xp.int64)
    away = (lost > 0) == (found > 0)
    odd = xp.where(away, bits + 1, bits - 1).view(xp.float64)
    is_even = (bits & 1 == 0) & (lost != 0) & xp.isfinite(found)
    return xp.where(is_even, odd, found)


def _flushed(x: Array) -> Array:
    """Float64, but what float32 would round to less than its smallest normal number is a zero of that
    sign."""
    xp = namespace(x)
    return xp.where(xp.abs(x) < _NORMAL_LEAST * (1 - 2.0**-25), x * 0.0, x)


def packed_product(x: Array, form: Form, panels: Array, outputs: int, is_fine: bool = False) -> Array:
    """`x W^T`, `[rows, outputs]`, of float32 `[rows, in]` and the panels of W (`packed.py`).

    Rows are rounded to levels, group by group, and if that `is_fine` to levels of what these leave. A group's
    products and their sum are integers, which are rounded to float32, of each half where these have scales of
    their own. The groups' sums are added one after another; after each its minimum is taken off, times the
    sum of the row's levels.
    """
    first, finer, steps = finer_levels(x)
    rounded = cast(first, "float64")
    if is_fine:
        rounded, steps = rounded * FINER + cast(finer, "float64"), steps * (1 / FINER)
    groups = fill_up(rounded, GROUP).reshape(*steps.shape, GROUP)
    moments = steps * cast(groups.sum(2), "float32")
    halves = groups.reshape(*steps.shape, form.halves, -1)
    found = zeros(x, len(x), outputs)
    for first in range(0, outputs, PANELS * PANEL):
        count = min(outputs - first, PANELS * PANEL)
        block = panels[first // PANEL : first // PANEL + PANELS]
        weights, scales, minimums = groups_of(form, block)
        numbers = cast(weights[:count], "float64").reshape(count, -1, form.halves, GROUP // form.halves)
        total = zeros(x, len(x), count)
        for group in range(groups.shape[1]):
            for half in range(form.halves):
                sums = cast(halves[:, group, half] @ numbers[:, group, half].T, "float32")
                total += (scales[:count, group, half] * steps[:, group, None]) * sums
            if minimums is not None:
                total -= minimums[:count, group] * moments[:, group, None]
        found[:, first : first + count] = total
    return found


@dataclass(slots=True, kw_only=True)
class DefinedRows:
    """Rows of one request (`defined_layer.Rows`), in `slots` `[rows]` int64, and what they see: `paths`
    `[rows, positions]` int64. `held` are keys and values. Of a layer that does not attend `inputs` `[slots,
    width]`, the slots of each row's last ones, `lines` `[rows, length]`, the oldest first and -1 where the
    text has not begun, and `states` and `steps` as in `delta_rule`."""

    dense: Dense
    angles: tuple[Array, Array]
    held: Held
    slots: Array
    paths: Array
    inputs: Array
    lines: Array
    states: Array
    steps: Array
    embedding: Array
    tokens: Array

    def look_up(self, table: Table) -> Array:
        matrix = table.matrix
        if isinstance(matrix, Packed):
            return packed_rows(FORMS[matrix.form], matrix.panels, self.tokens)
        return matrix.weights[self.tokens]

    def attend(self, queries: Array, keys: Array | None, values: Array | None, sinks: Array | None) -> Array:
        if keys is not None and values is not None:
            store(self.slots, keys.swapaxes(0, 1), values.swapaxes(0, 1), self.held)
        return attention(queries, self.held, self.paths, self.dense.scale, self.dense.cap, sinks)

    def convolve(self, inputs: Array, taps: Array, bias: Array | None) -> Array:
        self.inputs[self.slots] = cast(inputs, self.inputs.dtype)
        return convolution(self.inputs, self.lines, taps, bias)

    def sum_up(self, inputs: Array, mixer: DeltaRule, taps: Array, rates: Array) -> Array:
        self.inputs[self.slots] = cast(inputs, self.inputs.dtype)
        rows = delta_rows(mixer, self.inputs, self.lines, taps, rates)
        return delta_rule(rows, self.states, self.steps)
