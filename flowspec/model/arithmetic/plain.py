"""What the canonical arithmetic is: each operation written in steps that IEEE 754 fixes bit by bit.

A multiplication, an addition, a division or a root of one number has one right result, on any processor. What
differs between processors, threads and batches is the order of sums, and functions such as `exp`, which
libraries compute in more than one way. So sums are written out here (in halves, or one after another in
blocks of positions), and functions as polynomials. These are the definitions; `canonical.c` and
`canonical.cu` give the same bits in less time, and `operations.py` says where they are used.

All is in float32, whatever the dtype of what is given: float16 and bfloat16 are widened without a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from flowspec.model.arithmetic.delta import DeltaRows
from flowspec.model.arithmetic.norms import Norm
from flowspec.model.arithmetic.packed import GROUP, PANEL, Form, groups_of, numbers_of

LANES = 16
"""Slots whose keys lie side by side in a cache."""
BLOCK = 64
"""Positions whose values are summed one after another, before their sum is added to those of the blocks
before."""
_NORMAL_LEAST = 2.0**-126
"""Of float32; half a last place below it rounds to it."""
EXP_LEAST, EXP_MOST = -86.0, 88.0
_SHIFT = 12582912.0
"""1.5 * 2^23: a float32 that was added to it has lost its fraction, rounded to even."""
_SHIFT_BITS = 0x4B400000
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of the Cephes library's expf, the highest power first."""
_QUARTER_HIGH, _QUARTER_LOW = 1.57079632673412561417e00, 6.07710050650619224932e-11
"""Half of pi: 33 bits, and the next 53."""
_SIN = (
    *(1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06),
    *(-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01),
)
_COS = (
    *(-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07),
    *(2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02),
)
"""Coefficients of fdlibm's sine and cosine between -pi/4 and pi/4, the highest power first."""
_SOFTPLUS = (15, 13, 11, 9, 7, 5, 3)
"""By what the powers of a series are divided, the highest first. One more would add less than 2^-28 of the
sum."""
LEVEL = 127
"""The largest level of a row that is rounded, group by group."""
PEAK_LEAST = 1e-30
"""A group whose largest number is not above counts as zeros."""
PANELS = 64
"""Panels of a packed matrix that are unpacked at once."""
_SHARES_MAX = 1 << 22
"""Numbers of rows, keys and widths that are held at once, so that a long prompt's values are not all copied
at once."""


def halves_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, filled up with zeros to a power of two: the two halves, then the halves
    of that, ..."""
    width = terms.shape[-1]
    room = 1 << (width - 1).bit_length()
    terms = F.pad(terms, (0, room - width))
    while room > 1:
        room //= 2
        terms = terms[..., :room] + terms[..., room:]
    return terms[..., 0]


def pairs_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Float32 `[rows, out]` from bfloat16 `[rows, in]` and `[out, in]`, as x86 multiplies pairs (VDPBF16PS).

    Of every 32 inputs lane i adds the products of inputs 2 i + 1 and 2 i, in this order, each by a fused step
    (`_flushed_step`); the last inputs are filled up with zeros. Then the lanes are summed in halves.
    """
    (rows, inputs), outputs = x.shape, len(weights)
    missing = -inputs % (2 * LANES)
    left, right = (_flushed(F.pad(each, (0, missing)).double()) for each in (x, weights))
    left, right = left.view(rows, 1, -1, LANES, 2), right.view(1, outputs, -1, LANES, 2)
    lanes = torch.zeros((rows, outputs, LANES), dtype=torch.float64)
    for step in range(left.shape[2]):
        for place in (1, 0):
            lanes = _flushed_step(left[:, :, step, :, place], right[:, :, step, :, place], lanes)
    return halves_sum(lanes.float())


def _flushed_step(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """x * y + total of numbers of bfloat16 and float32, rounded once to float32; zero where that is below the
    smallest normal number. All are held in float64, in which products of such numbers are exact."""
    product = x * y
    found = product + total
    part = found - product
    lost = (product - (found - part)) + (total - part)  # what the sum in float64 lost, exactly
    # Where it lost something its last digit becomes odd, so that what is rounded to float32 is on the side of
    # a tie, or of a bound, on which the right sum is.
    bits = found.view(torch.int64)
    away = (lost > 0) == (found > 0)
    odd = torch.where(away, bits + 1, bits - 1).view(torch.float64)
    is_even = (bits & 1 == 0) & (lost != 0) & found.isfinite()
    return _flushed(torch.where(is_even, odd, found)).float().double()


def _flushed(x: torch.Tensor) -> torch.Tensor:
    """Float64, but what float32 would round to less than its smallest normal number is a zero of that
    sign."""
    return torch.where(x.abs() < _NORMAL_LEAST * (1 - 2.0**-25), x * 0.0, x)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x of float32; 0 below -86, and above 88 as for 88. Within 2 units in the last place."""
    bounded = x.clamp(EXP_LEAST, EXP_MOST)
    shifted = bounded * 1.44269504088896341 + _SHIFT
    whole = shifted - _SHIFT
    rest = (bounded - whole * 0.693359375) - whole * -2.12194440e-4
    found = torch.full_like(x, _EXP[0])
    for term in _EXP[1:]:
        found = found * rest + term
    found = found * (rest * rest) + rest + 1.0
    power = (shifted.view(torch.int32) - _SHIFT_BITS) << 23
    found = (found.view(torch.int32) + power).view(torch.float32)
    return torch.where(x.isnan(), x, found.masked_fill(x < EXP_LEAST, 0.0))


def tanh(x: torch.Tensor) -> torch.Tensor:
    size = x.abs()
    return (1.0 - 2.0 * (1.0 + exp(size + size)).reciprocal()).copysign(x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (1.0 + exp(-x)).reciprocal()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) of float32: the larger of x and 0, and log(1 + y) of y = e^-|x|, by the series of 2
    artanh(y / (2 + y)). Within 3 units in the last place."""
    small = exp(-x.abs())
    ratio = small / (2.0 + small)  # at most a third
    square = ratio * ratio
    series = torch.full_like(x, 1 / _SOFTPLUS[0])
    for odd in _SOFTPLUS[1:]:
        series = series * square + 1 / odd
    return x.clamp(min=0.0) + 2.0 * (ratio + ratio * (square * series))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + tanh((x + 0.044715 * (x * x * x)) * 0.79788456080286536))


def cosine_and_sine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32, in float32; computed in float64, for numbers up to 2^20."""
    wide = x.double()
    quarters = (wide * (2 / math.pi)).round()
    rest = (wide - quarters * _QUARTER_HIGH) - quarters * _QUARTER_LOW
    square = rest * rest
    sine, cosine = torch.full_like(rest, _SIN[0]), torch.full_like(rest, _COS[0])
    for term in _SIN[1:]:
        sine = sine * square + term
    for term in _COS[1:]:
        cosine = cosine * square + term
    sine = rest + rest * square * sine
    cosine = (1.0 - 0.5 * square) + square * square * cosine
    place = quarters.long() & 3
    swapped = (place & 1).bool()
    cosine, sine = torch.where(swapped, sine, cosine), torch.where(swapped, cosine, sine)
    cosine = torch.where((place == 1) | (place == 2), -cosine, cosine)
    return cosine.float(), torch.where(place >= 2, -sine, sine).float()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "tanh": tanh,
    "sigmoid": sigmoid,
}
"""Each of float32, number by number."""


def normal(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32 rows over the root of their mean square; any shape, by the last dimension."""
    return _over_root(x, halves_sum(x * x) * (1 / x.shape[-1]) + eps)


def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32 rows over the root of the sum of their squares; any shape, by the last dimension."""
    return _over_root(x, halves_sum(x * x) + eps)


def _over_root(x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    # Libraries that torch calls round roots of float32 in more than one way. A root in float64, right but for
    # its last place, rounds right.
    return x * squares.double().sqrt().float().reciprocal()[..., None]


def norm(x: torch.Tensor, weights: torch.Tensor, eps: float, how: Norm) -> torch.Tensor:
    """Rows `[..., width]` over the root of their mean square, times weights `[width]`, in the dtype of x."""
    found = normal(x.float(), eps)
    if how == "cast, scale":
        return weights * found.to(x.dtype)
    wide = weights.float()
    return (found * (wide if how == "scale, cast" else 1.0 + wide)).to(x.dtype)


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """`[1, heads, rows, width]` of that shape, each number turned with the one that is half of `turned` away,
    from `cosine` and `sine` `[1, rows, turned]`; what is wider than that stays. Each step is rounded to the
    dtype."""
    width = cosine.shape[-1]
    own, rest = x[..., :width], x[..., width:]
    first, second = own.chunk(2, dim=-1)
    found = (own * cosine[:, None]) + (torch.cat([-second, first], dim=-1) * sine[:, None])
    return torch.cat([found, rest], dim=-1)


def convolution(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A causal convolution of each channel alone: `[rows, width]` from a row's inputs, the oldest first,
    `[rows, length, width]`, and `weight` `[width, length]`; all float32. Products are added one after
    another, from the oldest to the row's own, and then the `bias` `[width]`."""
    total = inputs[:, 0] * weight[:, 0]
    for place in range(1, inputs.shape[1]):
        total = total + inputs[:, place] * weight[:, place]
    return total if bias is None else total + bias


def delta_rule(rows: DeltaRows, states: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Steps of linear attention by the gated delta rule (arXiv 2412.06464), and what is read after them:
    float32 `[1 + the largest output, heads, value_width]`, zeros where no step has that output.

    `states` `[places, heads, key_width, value_width]` float32 are changed in place. `steps` `[count, 4]`
    int32, on the CPU, are done one after another: a row, the place of the state before, the place of the
    state after (which may be the same), and the output, -1 for none.

    A step lets the state decay and looks up its key there. What it finds is taken from the value, and that
    difference's share is added where the key points. Then the query is looked up. To look up is to sum over
    the key's width, in halves.
    """
    values, heads = rows.values, rows.values.shape[1]
    queries, keys = (
        each.repeat_interleave(heads // each.shape[1], dim=1) for each in (rows.queries, rows.keys)
    )
    outputs = 1 + max(steps[:, 3].tolist(), default=-1)
    found = values.new_zeros((outputs, *values.shape[1:]))
    for row, source, target, output in steps.tolist():
        decayed = states[source] * rows.decays[row][:, None, None]
        key, query = keys[row][:, :, None], queries[row][:, :, None]
        recalled = halves_sum((decayed * key).transpose(1, 2))
        change = (values[row] - recalled) * rows.shares[row][:, None]
        states[target] = state = decayed + key * change[:, None]
        if output >= 0:
            found[output] = halves_sum((state * query).transpose(1, 2))
    return found


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x W^T`, `[rows, out]`, of float32 `[rows, in]` and `[out, in]`: for small matrices, such as a
    router's."""
    return torch.stack([halves_sum(row * weight) for row in x]) if len(x) else x.new_empty((0, len(weight)))


def packed_product(x: torch.Tensor, form: Form, panels: torch.Tensor, outputs: int) -> torch.Tensor:
    """`x W^T`, `[rows, outputs]`, of float32 `[rows, in]` and the panels of W (`packed.py`).

    Rows are rounded to levels, group by group; a group's products and their sum are integers, which float32
    holds, of each half where these have scales of their own. The groups' sums are added one after another;
    after each its minimum is taken off, times the sum of the row's levels.
    """
    levels, steps = rounded_groups(x)
    moments = steps * levels.sum(dim=2)
    halves = levels.view(*levels.shape[:2], form.halves, -1)
    found = x.new_empty((len(x), outputs))
    for first in range(0, outputs, PANELS * PANEL):
        count = min(outputs - first, PANELS * PANEL)
        block = panels[first // PANEL : first // PANEL + PANELS]
        weights, scales, minimums = groups_of(form, block)
        numbers = weights[:count].float().view(count, -1, form.halves, GROUP // form.halves)
        total = x.new_zeros((len(x), count))
        for group in range(levels.shape[1]):
            for half in range(form.halves):
                sums = F.linear(halves[:, group, half], numbers[:, group, half])  # exact: below 2^24
                total += (scales[:count, group, half] * steps[:, group, None]) * sums
            if minimums is not None:
                total -= minimums[:count, group] * moments[:, group, None]
        found[:, first : first + count] = total
    return found


def packed_rows(form: Form, panels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed matrix as numbers, float32 `[ids, in]`."""
    found = [numbers_of(form, panels[some // PANEL]) for some in torch.split(ids, PANELS)]
    places = torch.arange(len(ids), device=ids.device) * PANEL + ids % PANEL
    return torch.cat(found)[places]


def rounded_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels `[rows, groups, 32]` of float32 `[rows, in]`, and the step between levels `[rows, groups]`.

    A group with what is no number, or infinite, has a step that is no number, so that it shows.
    """
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -(-x.shape[1] // GROUP), GROUP)
    peak = groups.abs().amax(dim=2)
    is_number = (peak > PEAK_LEAST) & (peak < math.inf)
    most = torch.full_like(peak, LEVEL)
    factor = most / peak  # `LEVEL / peak` would be a product with a reciprocal, of two roundings
    levels = (groups * factor[..., None]).round().masked_fill(~is_number[..., None], 0.0)
    steps = (peak / most).masked_fill(~is_number, math.nan).masked_fill(peak <= PEAK_LEAST, 0.0)
    return levels, steps


def levels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows `[rows, width]` as levels of `rounded_groups`, int8 `[rows, width]`, and their steps."""
    found, steps = rounded_groups(x)
    return found.flatten(1)[:, : x.shape[1]].to(torch.int8), steps


def of_levels(found: torch.Tensor, steps: torch.Tensor, dimension: int) -> torch.Tensor:
    """Numbers, float32, from int8 levels and the float16 step of each 32 along a dimension: no product is
    rounded."""
    each = steps.float().repeat_interleave(GROUP, dim=dimension)
    return found.float() * each.narrow(dimension, 0, found.shape[dimension])


def store(
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    to_keys: torch.Tensor,
    to_values: torch.Tensor,
    steps: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Keys and values `[kv_heads, rows, width]` of whatever dtype to slots `places` `[rows]`.

    `to_keys` `[kv_heads, slots / 16, width, 16]`, `to_values` `[kv_heads, slots, width or more]`. In int8
    they are levels, and `steps` has those between them, in float16: `[kv_heads, slots / 16, width / 32, 16]`
    and `[kv_heads, slots, width / 32]`.
    """
    width = keys.shape[2]
    if steps is not None:
        (keys, of_keys), (values, of_values) = _cached_levels(keys), _cached_levels(values)
        steps[0].permute(1, 3, 0, 2)[places // LANES, places % LANES] = of_keys.transpose(0, 1)
        steps[1].index_copy_(1, places, of_values)
    keys, values = keys.to(to_keys.dtype), values.to(to_values.dtype)
    to_keys.permute(1, 3, 0, 2)[places // LANES, places % LANES] = keys.transpose(0, 1)
    to_values[:, :, :width].index_copy_(1, places, values)


def _cached_levels(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels `[kv_heads, rows, width]`, and steps `[kv_heads, rows, width / 32]` in float16."""
    heads, rows, width = numbers.shape
    found, steps = levels(numbers.reshape(heads * rows, width).float())
    return found.view(heads, rows, width), steps.view(heads, rows, -1).half()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """By the last dimension, of float32."""
    return over_their_sum(exp(x - x.amax(dim=-1, keepdim=True)))


def over_their_sum(x: torch.Tensor) -> torch.Tensor:
    """Numbers over their sum by the last dimension, of float32."""
    return x / halves_sum(x)[..., None]


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paths: torch.Tensor,
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[rows, heads, width]` float32 from queries of that shape and dtype.

    `keys` `[kv_heads, slots / 16, width, 16]`, `values` `[kv_heads, slots, width]`. `paths` `[rows,
    positions]` int64: the slot of the key that a row sees at a position, -1 where it sees none. Scores are
    bounded by `cap`. `sinks` `[heads]` float32: a score of each head that takes part in the greatest and in
    what is divided by, where its share is added last; it has no value.
    """
    rows = max(1, _SHARES_MAX // max(1, paths.shape[1] * values.shape[2]))
    found = [
        _attention(
            queries[first : first + rows], keys, values, paths[first : first + rows], scale, cap, sinks
        )
        for first in range(0, len(queries), rows)
    ]
    return torch.cat(found)


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paths: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, width = queries.shape
    kv_heads, group = len(keys), heads // len(keys)
    paths = F.pad(paths, (0, -paths.shape[1] % BLOCK), value=-1)
    is_seen = paths >= 0
    slots = paths.clamp_min(0)
    grouped = queries.transpose(0, 1).reshape(kv_heads, group, rows, width)
    scores = queries.new_zeros((kv_heads, group, rows, paths.shape[1]))
    for number in range(width):
        lanes = keys[:, :, number].flatten(1).float()[:, slots]  # [kv_heads, rows, positions]
        scores += grouped[..., number, None] * lanes[:, None]
    scores *= scale
    if cap is not None:
        scores = tanh(scores * (1 / cap)) * cap
    highest = scores.masked_fill(~is_seen, float("-inf")).amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(kv_heads, group, 1, 1)
        highest = torch.maximum(highest, sinks)
    shares = exp(scores - highest).masked_fill(~is_seen, 0.0).view(*scores.shape[:-1], -1, BLOCK)
    seen_values = (
        values[:, slots].masked_fill(~is_seen[None, ..., None], 0.0).view(kv_heads, rows, -1, BLOCK, width)
    )
    sums = queries.new_zeros((*shares.shape[:-1], width))
    weights = queries.new_zeros(shares.shape[:-1])
    for place in range(BLOCK):
        weights += shares[..., place]
        sums += shares[..., place, None] * seen_values[:, None, :, :, place].float()
    total, weight = sums.new_zeros(sums.shape[:3] + sums.shape[4:]), weights.new_zeros(weights.shape[:3])
    for block in range(sums.shape[3]):
        total += sums[:, :, :, block]
        weight += weights[..., block]
    if sinks is not None:
        weight += exp(sinks - highest)[..., 0]
    return (total / weight[..., None]).flatten(0, 1).transpose(0, 1).contiguous()
