"""What the canonical arithmetic is: each operation written in steps that IEEE 754 fixes bit by bit.

What differs between processors, threads and batches is the order of sums, and functions such as `exp`. So
sums are written out here (in halves, or one after another in blocks of positions), and functions as
polynomials; `canonical.c` and `canonical.cu` give the same bits in less time. Definitions of products of
matrices are in `tests/model/defined_products.py`.

All numbers are float32, but for what is held and what comes to layers and leaves them. Arrays are numpy's, or
torch's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flowspec.core.protocol.model_spec import DeltaRule, Mixture, Norm
from flowspec.model.arithmetic.arrays import Array, cast, fill_up, indices, namespace, order, repeat, zeros
from flowspec.model.arithmetic.packed import GROUP, PANEL, Form, numbers_of

LANES = 16  # slots whose keys lie side by side in a cache
BLOCK = 64  # positions whose values are summed, before their sum is added to the blocks' before
UNIT_EPS = 1e-6  # of queries and keys of linear attention, as transformers' code has it
PANELS = 64  # panels of a packed matrix that are unpacked at once
FINER = 128.0  # by how much the steps between levels of what first levels leave are smaller
_LEVEL, _PEAK_LEAST = 127, 1e-30  # a group counts as zeros unless its largest number is above the least
_SHARES_MAX = 1 << 22  # numbers of rows, keys and widths that are held at once
_EXP_LEAST, _EXP_MOST = -86.0, 88.0
_SHIFT, _SHIFT_BITS = 12582912.0, 0x4B400000  # 1.5 * 2^23, which takes a float32's fraction off
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of the Cephes library's expf, the highest power first, as all are."""
_SOFTPLUS = tuple(1 / odd for odd in (15, 13, 11, 9, 7, 5, 3))  # of artanh, up to 2^-28
_QUARTER_HIGH, _QUARTER_LOW = 1.57079632673412561417e00, 6.07710050650619224932e-11  # pi / 2
_SIN = (
    *(1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06),
    *(-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01),
)
_COS = (
    *(-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07),
    *(2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02),
)
"""Of fdlibm's sine and cosine between -pi/4 and pi/4."""


# ------------------------------------------------------------------------------------------ functions


def halves_sum(terms: Array) -> Array:
    """Of the last dimension, filled up with zeros to a power of two: of the halves, then of that sum's."""
    room = 1 << (terms.shape[-1] - 1).bit_length()
    terms = fill_up(terms, room)
    while room > 1:
        room //= 2
        terms = terms[..., :room] + terms[..., room:]
    return terms[..., 0]


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    found = namespace(x).full_like(x, coefficients[0])
    for term in coefficients[1:]:
        found = found * x + term
    return found


def exp(x: Array) -> Array:
    """e^x of float32; 0 below -86, and above 88 as for 88. Within 2 units in the last place."""
    xp = namespace(x)
    bounded = xp.clip(x, _EXP_LEAST, _EXP_MOST)
    shifted = bounded * 1.44269504088896341 + _SHIFT
    whole = shifted - _SHIFT
    rest = (bounded - whole * 0.693359375) - whole * -2.12194440e-4
    found = _polynomial(rest, _EXP) * (rest * rest) + rest + 1.0
    power = (shifted.view(xp.int32) - _SHIFT_BITS) << 23
    found = (found.view(xp.int32) + power).view(xp.float32)
    return xp.where(xp.isnan(x), x, xp.where(x < _EXP_LEAST, 0.0, found))


def tanh(x: Array) -> Array:
    xp = namespace(x)
    size = xp.abs(x)
    return xp.copysign(1.0 - 2.0 * (1.0 / (1.0 + exp(size + size))), x)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def relu(x: Array) -> Array:
    return namespace(x).where(x < 0, 0.0, x)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + tanh((x + 0.044715 * (x * x * x)) * 0.79788456080286536))


FUNCTIONS = {each.__name__: each for each in (silu, gelu_tanh, tanh, sigmoid, relu)}
"""Each of float32, number by number; in the order of `canonical.c` and `canonical.cu`."""


def function(x: Array, name: str) -> Array:
    """One of `FUNCTIONS`, number by number."""
    return FUNCTIONS[name](x)


def gated(gate: Array, up: Array, name: str) -> Array:
    """A function of `gate` times `up`, number by number."""
    return function(gate, name) * up


def softplus(x: Array) -> Array:
    """log(1 + e^x) of float32, by the series of 2 artanh(y / (2 + y)) of y = e^-|x|; within 3 last places."""
    xp = namespace(x)
    small = exp(-xp.abs(x))
    ratio = small / (2.0 + small)  # at most a third
    square = ratio * ratio
    return xp.clip(x, 0.0, None) + 2.0 * (ratio + ratio * (square * _polynomial(square, _SOFTPLUS)))


def softmax(x: Array) -> Array:
    """By the last dimension, of float32."""
    return over_their_sum(exp(x - namespace(x).amax(x, -1, keepdims=True)))


def over_their_sum(x: Array) -> Array:
    """Numbers over their sum by the last dimension, of float32."""
    return x / halves_sum(x)[..., None]


def unit(x: Array, eps: float) -> Array:
    """Float32 rows over the root of the sum of their squares; any shape, by the last dimension."""
    return _over_root(x, halves_sum(x * x) + eps)


def _over_root(x: Array, squares: Array) -> Array:
    # Libraries that torch calls round roots of float32 in more than one way. A root in float64, right but for
    # its last place, rounds right.
    roots = cast(namespace(x).sqrt(cast(squares, "float64")), "float32")
    return x * (1.0 / roots)[..., None]


def norm(x: Array, weights: Array, eps: float, how: Norm) -> Array:
    """Rows `[..., width]` over the root of their mean square, times weights `[width]`."""
    found = _over_root(x, halves_sum(x * x) * (1 / x.shape[-1]) + eps)
    return found * (weights if how == "weights" else 1.0 + weights)


def angles(positions: Array, frequencies: Array, scale: float) -> tuple[Array, Array]:
    """Cosine and sine, each `[1, rows, 2 * frequencies]`, of positions `[1, rows]` int64: a turn by each
    frequency, float32, for both halves of a head. Computed in float64, for turns up to 2^20."""
    xp = namespace(positions)
    wide = cast(cast(positions, "float32")[..., None] * frequencies, "float64")
    quarters = xp.round(wide * (2 / math.pi))
    rest = (wide - quarters * _QUARTER_HIGH) - quarters * _QUARTER_LOW
    square = rest * rest
    sine = rest + rest * square * _polynomial(square, _SIN)
    cosine = (1.0 - 0.5 * square) + square * square * _polynomial(square, _COS)
    place = cast(quarters, "int64") & 3
    swapped = place & 1 == 1
    cosine, sine = xp.where(swapped, sine, cosine), xp.where(swapped, cosine, sine)
    cosine = xp.where((place == 1) | (place == 2), -cosine, cosine)
    sine = xp.where(place >= 2, -sine, sine)
    cosine, sine = (xp.concatenate([cast(each, "float32")] * 2, -1) * scale for each in (cosine, sine))
    return cosine, sine


def turned(x: Array, cosine: Array, sine: Array) -> Array:
    """`[rows, heads, width]`, each number turned with the one half of `turned` away, by `cosine` and `sine`
    `[1, rows, turned]`; what is wider than that stays."""
    xp, width = namespace(x), cosine.shape[-1]
    own, first, second = x[..., :width], x[..., : width // 2], x[..., width // 2 : width]
    across = xp.concatenate([-second, first], -1) * sine[0][:, None]
    return xp.concatenate([own * cosine[0][:, None] + across, x[..., width:]], -1)


def product(x: Array, weight: Array) -> Array:
    """`x W^T` of float32 `[rows, in]` and `[out, in]`, for small matrices, such as a router's."""
    if not len(x):
        return zeros(x, 0, len(weight))
    return namespace(x).stack([halves_sum(row * weight) for row in x])


# ---------------------------------------------------------------------------------- rounded numbers


def packed_rows(form: Form, panels: Array, ids: Array) -> Array:
    """Rows of a packed matrix as numbers, float32 `[ids, in]`."""
    blocks = [ids[first : first + PANELS] for first in range(0, max(1, len(ids)), PANELS)]
    found = [numbers_of(form, panels[some // PANEL]) for some in blocks]
    return namespace(panels).concatenate(found)[indices(ids, len(ids)) * PANEL + ids % PANEL]


def levels(x: Array) -> tuple[Array, Array]:
    """Float32 `[..., width]` as int8 levels of that shape, and for each 32 the step between them, float32
    `[..., width / 32]`: no number for a group that has one that is none or infinite."""
    found, _, steps = finer_levels(x)
    return found, steps


def finer_levels(x: Array) -> tuple[Array, Array, Array]:
    """`levels`, then levels of what these leave, between which steps are smaller by FINER."""
    xp, shape = namespace(x), x.shape[:-1]
    groups = fill_up(x, GROUP).reshape(*shape, -(-x.shape[-1] // GROUP), GROUP)
    peak = xp.amax(xp.abs(groups), -1)
    is_number = (peak > _PEAK_LEAST) & (peak < math.inf)
    bounded, most = xp.where(is_number, peak, 1.0), xp.full_like(peak, _LEVEL)
    factor = most / bounded  # `_LEVEL / bounded` would be a product with a reciprocal, of two roundings
    scaled = xp.where(is_number[..., None], groups, 0.0) * factor[..., None]
    first = xp.round(scaled)
    finer = xp.round((scaled - first) * FINER)
    steps = xp.where(peak <= _PEAK_LEAST, 0.0, xp.where(is_number, bounded / most, math.nan))
    whole = *shape, GROUP * groups.shape[-2]
    found = (cast(each.reshape(whole)[..., : x.shape[-1]], "int8") for each in (first, finer))
    return *found, steps


def of_levels(found: Array, steps: Array) -> Array:
    """Float32 numbers of int8 levels and the float16 step of each 32 along dimension 2, unrounded."""
    each = repeat(cast(steps, "float32"), GROUP, 2)
    return cast(found, "float32") * each[:, :, : found.shape[2]]


# ------------------------------------------------------------------------------------------ attention

Held = tuple[Array, Array, tuple[Array, Array] | None]
"""What a layer holds of a request: keys `[kv_heads, slots / 16, width, 16]` and values `[kv_heads, slots,
width or more]`. In int8 they are levels, and then there are the steps between them, in float16: `[kv_heads,
slots / 16, width / 32, 16]` and `[kv_heads, slots, width / 32]`."""


def store(places: Array, keys: Array, values: Array, held: Held) -> None:
    """Keys and values `[kv_heads, rows, width]` to slots `places` `[rows]`."""
    to_keys, to_values, steps = held
    if steps is not None:
        keys, of_keys = levels(keys)
        values, of_values = levels(values)
        steps[0][:, places // LANES, :, places % LANES] = cast(of_keys, "float16").swapaxes(0, 1)
        steps[1][:, places] = cast(of_values, "float16")
    to_keys[:, places // LANES, :, places % LANES] = cast(keys, to_keys.dtype).swapaxes(0, 1)
    to_values[:, places, : keys.shape[2]] = cast(values, to_values.dtype)


def attention(
    queries: Array, held: Held, paths: Array, scale: float, cap: float = 0.0, sinks: Array | None = None
) -> Array:
    """`[rows, heads, width]` from queries of that shape. `paths` `[rows, positions]` int64:
    the slot of the key that a row sees at a position, or -1. Scores are bounded by a `cap`. `sinks` `[heads]`
    float32: a score of each head without a value, whose share is added last to what is divided by."""
    xp, (rows, heads, width), (keys, values, steps) = namespace(queries), queries.shape, held
    if steps is not None:
        keys, values = of_levels(keys, steps[0]), of_levels(values, steps[1])
    count = max(1, _SHARES_MAX // max(1, paths.shape[1] * width))
    if rows > count:
        parts = [slice(first, first + count) for first in range(0, rows, count)]
        held = keys, values, None
        return xp.concatenate([attention(queries[own], held, paths[own], scale, cap, sinks) for own in parts])
    kv_heads, group = len(keys), heads // len(keys)
    paths = fill_up(paths, BLOCK, -1)
    is_seen, slots = paths >= 0, xp.clip(paths, 0, None)
    grouped = queries.swapaxes(0, 1).reshape(kv_heads, group, rows, width)
    scores = zeros(grouped, kv_heads, group, rows, paths.shape[1])
    for number in range(width):
        lanes = cast(keys[:, :, number].reshape(kv_heads, -1), "float32")[:, slots]  # by row and position
        scores += grouped[..., number, None] * lanes[:, None]
    scores *= scale
    if cap:
        scores = tanh(scores * (1 / cap)) * cap
    highest = xp.amax(xp.where(is_seen, scores, -math.inf), -1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, group, 1, 1)
        highest = xp.maximum(highest, sinks)
    shares = xp.where(is_seen, exp(scores - highest), 0.0).reshape(*scores.shape[:-1], -1, BLOCK)
    seen = xp.where(is_seen[None, ..., None], cast(values[:, slots, :width], "float32"), 0.0)
    seen = seen.reshape(kv_heads, 1, rows, -1, BLOCK, width)
    sums, weights = zeros(shares, *shares.shape[:-1], width), zeros(shares, *shares.shape[:-1])
    for place in range(BLOCK):
        weights += shares[..., place]
        sums += shares[..., place, None] * seen[..., place, :]
    total, weight = zeros(sums, *sums.shape[:3], width), zeros(weights, *weights.shape[:3])
    for block in range(sums.shape[3]):
        total += sums[:, :, :, block]
        weight += weights[..., block]
    if sinks is not None:
        weight += exp(sinks - highest)[..., 0]
    return xp.stack([*(total / weight[..., None]).reshape(heads, rows, width)], 1)


# ---------------------------------------------------------------- convolutions and linear attention


def convolution(held: Array, lines: Array, taps: Array, bias: Array | None = None) -> Array:
    """A causal convolution of each channel alone, float32 `[rows, width]`: of inputs `held` `[slots, width]`
    in a row's slots `lines` `[rows, length]`, its own last, zeros for -1. Their products with `taps`
    `[length, width]` are added one after another, then the `bias` `[width]`, both float32."""
    xp = namespace(held)
    inputs = xp.where(lines[..., None] < 0, 0.0, cast(held[xp.clip(lines, 0, None)], "float32"))
    total = inputs[:, 0] * taps[0]
    for place in range(1, len(taps)):
        total = total + inputs[:, place] * taps[place]
    return total if bias is None else total + bias


def delta_rows(mixer: DeltaRule, held: Array, lines: Array, taps: Array, rates: Array) -> tuple[Array, ...]:
    """Queries, keys, values, decays and shares of `delta_rule`, of inputs as `convolution` takes them.
    `rates`: how fast each head's state fades, then what is added to its rate."""
    keys, heads = mixer.key_numbers, mixer.heads
    width = 2 * keys + mixer.value_numbers
    mixed = function(convolution(held[:, :width], lines, taps), "silu")
    gates = cast(held[lines[:, -1], width:], "float32")
    both = mixed[:, : 2 * keys].reshape(len(lines), 2, -1, mixer.key_width)
    queries, own_keys = (unit(both[:, place], UNIT_EPS) for place in (0, 1))
    values = mixed[:, 2 * keys :].reshape(len(lines), heads, -1)
    decays = exp(-(rates[:heads] * softplus(gates[:, heads:] + rates[heads:])))
    return queries * mixer.key_width**-0.5, own_keys, values, decays, sigmoid(gates[:, :heads])


def delta_rule(of_rows: Sequence[Array], states: Array, steps: Array) -> Array:
    """Steps of linear attention by the gated delta rule (arXiv 2412.06464), and what is read after them:
    float32 `[1 + the largest output, heads, value_width]`, zeros where no step has that output.

    Of rows, float32: queries and keys `[rows, key_heads, key_width]`, values `[rows, heads, value_width]`,
    decays and shares `[rows, heads]`; a key head is that of `heads / key_heads` heads in a row. `states`
    `[places, heads, key_width, value_width]` float32 are changed in place. `steps` `[count, 4]` int32, on the
    CPU, are done one after another: a row, the places of the state before and after, and the output or -1.
    """
    queries, keys, values, decays, shares = of_rows
    queries, keys = (repeat(each, values.shape[1] // each.shape[1], 1) for each in (queries, keys))
    found = zeros(values, 1 + max(steps[:, 3].tolist(), default=-1), *values.shape[1:])
    for row, source, target, output in steps.tolist():
        decayed = states[source] * decays[row][:, None, None]
        key, query = keys[row][:, :, None], queries[row][:, :, None]
        recalled = halves_sum((decayed * key).swapaxes(1, 2))
        change = (values[row] - recalled) * shares[row][:, None]
        states[target] = state = decayed + key * change[:, None]
        if output >= 0:
            found[output] = halves_sum((state * query).swapaxes(1, 2))
    return found


# ------------------------------------------------------------------------------------------- experts


def choose(how: Mixture, router: Any, x: Array, ops: Any) -> tuple[Array, Array]:
    """Of each row `[rows, hidden]` the experts, the likeliest first and of two alike the first, and their
    shares, each `[rows, chosen]`, by a `layer.RouterPart`, whose norm rows went through. Its correction is
    added in choosing, among the experts of the groups whose two best are best."""
    scores = ops.product(x, router.weights)
    scores = scores if router.bias is None else scores + router.bias
    if how.router == "sigmoid":
        scores = sigmoid(scores)
    elif how.router != "softmax of chosen":
        scores = ops.softmax(scores)
    choice = scores if router.correction is None else scores + router.correction
    experts = order(-_of_open_groups(choice, how))[:, : how.chosen]
    shares = scores[indices(experts, len(experts))[:, None], experts]
    if how.router == "sigmoid":
        sums = (halves_sum(shares) + 1e-20)[:, None] if how.is_normed else 1.0
        shares = shares / sums * how.factor
    elif how.router == "softmax of chosen":
        shares = ops.softmax(shares)
    elif how.is_normed or how.router.endswith("softmax to 1"):
        shares = ops.over_their_sum(shares)
    return experts, shares if router.scales is None else shares * router.scales[experts]


def _of_open_groups(choice: Array, how: Mixture) -> Array:
    """What experts count for, `[rows, experts]`, less those of groups whose two best are not best."""
    if how.groups == 1:
        return choice

    def ranks(x: Array) -> Array:  # from 0 for the largest; of two alike the first one is before
        return order(order(-x))

    xp, groups = namespace(choice), choice.reshape(len(choice), how.groups, -1)
    sums = halves_sum(xp.where(ranks(groups) < 2, groups, 0.0))  # of two numbers: zeros change nothing
    is_open = ranks(sums) < how.open
    return xp.where(is_open[..., None], groups, -math.inf).reshape(choice.shape)


def clamped(gate: Array, up: Array, limit: float, slope: float, ops: Any) -> Array:
    """`gate * sigmoid(slope * gate) * (up + 1)`; `gate` counts as the limit where it is above, `up` where it
    is farther from 0 (GPT-OSS)."""
    clip = namespace(gate).clip
    gate, up = clip(gate, None, limit), clip(up, -limit, limit)
    return ops.function(gate * slope, "silu") / slope * (up + 1)
