"""What the canonical arithmetic is: each operation written in steps that IEEE 754 fixes bit by bit.

A multiplication, an addition, a division or a root of one number has one right result, on any processor. What
differs between processors, threads and batches is the order of sums, and functions such as `exp`, which
libraries compute in more than one way. So sums are written out here (in halves, or one after another in
blocks of positions), and functions as polynomials. These are the definitions; `canonical.c` and
`canonical.cu` give the same bits in less time. Those of products of matrices, which nothing computes by, are
in `tests/model/defined_products.py`.

All is in float32, whatever the dtype of what is given: float16 and bfloat16 are widened without a rounding.
Arrays are numpy's, or torch's tensors.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, Dense, LayerSpec, Mixture, Norm
from flowspec.model.arithmetic.arrays import Array, cast, fill_up, indices, namespace, order, repeat, zeros
from flowspec.model.arithmetic.packed import GROUP, PANEL, Form, numbers_of

LANES = 16
"""Slots whose keys lie side by side in a cache."""
BLOCK = 64
"""Positions whose values are summed one after another, before their sum is added to those of the blocks
before."""
EXP_LEAST, EXP_MOST = -86.0, 88.0
UNIT_EPS = 1e-6
"""Of queries and keys of linear attention that are made one long, as transformers' code has it."""
DIGIT, TINY = 63, 1e-30
"""Of rows that are multiplied as digits: the largest digit, and the least that a row's largest number counts
as."""
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


def halves_sum(terms: Array) -> Array:
    """Sums over the last dimension, filled up with zeros to a power of two: the two halves, then the halves
    of that, ..."""
    room = 1 << (terms.shape[-1] - 1).bit_length()
    terms = fill_up(terms, room)
    while room > 1:
        room //= 2
        terms = terms[..., :room] + terms[..., room:]
    return terms[..., 0]


def exp(x: Array) -> Array:
    """e^x of float32; 0 below -86, and above 88 as for 88. Within 2 units in the last place."""
    xp = namespace(x)
    bounded = xp.clip(x, EXP_LEAST, EXP_MOST)
    shifted = bounded * 1.44269504088896341 + _SHIFT
    whole = shifted - _SHIFT
    rest = (bounded - whole * 0.693359375) - whole * -2.12194440e-4
    found = xp.full_like(x, _EXP[0])
    for term in _EXP[1:]:
        found = found * rest + term
    found = found * (rest * rest) + rest + 1.0
    power = (shifted.view(xp.int32) - _SHIFT_BITS) << 23
    found = (found.view(xp.int32) + power).view(xp.float32)
    return xp.where(xp.isnan(x), x, xp.where(x < EXP_LEAST, 0.0, found))


def tanh(x: Array) -> Array:
    xp = namespace(x)
    size = xp.abs(x)
    return xp.copysign(1.0 - 2.0 * (1.0 / (1.0 + exp(size + size))), x)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + e^x) of float32: the larger of x and 0, and log(1 + y) of y = e^-|x|, by the series of 2
    artanh(y / (2 + y)). Within 3 units in the last place."""
    xp = namespace(x)
    small = exp(-xp.abs(x))
    ratio = small / (2.0 + small)  # at most a third
    square = ratio * ratio
    series = xp.full_like(x, 1 / _SOFTPLUS[0])
    for odd in _SOFTPLUS[1:]:
        series = series * square + 1 / odd
    return xp.clip(x, 0.0, None) + 2.0 * (ratio + ratio * (square * series))


def relu(x: Array) -> Array:
    return namespace(x).where(x < 0, 0.0, x)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + tanh((x + 0.044715 * (x * x * x)) * 0.79788456080286536))


def cosine_and_sine(x: Array) -> tuple[Array, Array]:
    """Of float32, in float32; computed in float64, for numbers up to 2^20."""
    xp = namespace(x)
    wide = cast(x, "float64")
    quarters = xp.round(wide * (2 / math.pi))
    rest = (wide - quarters * _QUARTER_HIGH) - quarters * _QUARTER_LOW
    square = rest * rest
    sine, cosine = xp.full_like(rest, _SIN[0]), xp.full_like(rest, _COS[0])
    for term in _SIN[1:]:
        sine = sine * square + term
    for term in _COS[1:]:
        cosine = cosine * square + term
    sine = rest + rest * square * sine
    cosine = (1.0 - 0.5 * square) + square * square * cosine
    place = cast(quarters, "int64") & 3
    swapped = place & 1 == 1
    cosine, sine = xp.where(swapped, sine, cosine), xp.where(swapped, cosine, sine)
    cosine = xp.where((place == 1) | (place == 2), -cosine, cosine)
    return cast(cosine, "float32"), cast(xp.where(place >= 2, -sine, sine), "float32")


def angles(positions: Array, frequencies: Array, scale: float, dtype: Any) -> tuple[Array, Array]:
    """Cosine and sine, each `[1, rows, 2 * frequencies]`, of positions `[1, rows]` int64: a turn by each
    frequency, float32, for both halves of a head."""
    turns = cast(positions, "float32")[..., None] * frequencies
    found = (namespace(turns).concatenate([each, each], -1) * scale for each in cosine_and_sine(turns))
    cosine, sine = (cast(each, dtype) for each in found)
    return cosine, sine


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "relu": relu,
}
"""Each of float32, number by number."""


def normal(x: Array, eps: float) -> Array:
    """Float32 rows over the root of their mean square; any shape, by the last dimension."""
    return _over_root(x, halves_sum(x * x) * (1 / x.shape[-1]) + eps)


def unit(x: Array, eps: float) -> Array:
    """Float32 rows over the root of the sum of their squares; any shape, by the last dimension."""
    return _over_root(x, halves_sum(x * x) + eps)


def _over_root(x: Array, squares: Array) -> Array:
    # Libraries that torch calls round roots of float32 in more than one way. A root in float64, right but for
    # its last place, rounds right.
    roots = cast(namespace(x).sqrt(cast(squares, "float64")), "float32")
    return x * (1.0 / roots)[..., None]


def norm(x: Array, weights: Array, eps: float, how: Norm) -> Array:
    """Rows `[..., width]` over the root of their mean square, times weights `[width]`, in the dtype of x."""
    found = normal(cast(x, "float32"), eps)
    if how == "cast, scale":
        return weights * cast(found, x.dtype)
    wide = cast(weights, "float32")
    return cast(found * (wide if how == "scale, cast" else 1.0 + wide), x.dtype)


def turned(x: Array, cosine: Array, sine: Array) -> Array:
    """`[1, heads, rows, width]` of that shape, each number turned with the one that is half of `turned` away,
    from `cosine` and `sine` `[1, rows, turned]`; what is wider than that stays. Each step is rounded to the
    dtype."""
    xp, width = namespace(x), cosine.shape[-1]
    own, first, second = x[..., :width], x[..., : width // 2], x[..., width // 2 : width]
    found = (own * cosine[:, None]) + (xp.concatenate([-second, first], -1) * sine[:, None])
    return xp.concatenate([found, x[..., width:]], -1)


def convolution(inputs: Array, weight: Array, bias: Array | None) -> Array:
    """A causal convolution of each channel alone: `[rows, width]` from a row's inputs, the oldest first,
    `[rows, length, width]`, and `weight` `[width, length]`; all float32. Products are added one after
    another, from the oldest to the row's own, and then the `bias` `[width]`."""
    total = inputs[:, 0] * weight[:, 0]
    for place in range(1, inputs.shape[1]):
        total = total + inputs[:, place] * weight[:, place]
    return total if bias is None else total + bias


class DeltaRows(NamedTuple):
    """What rows bring to steps of linear attention, float32: `queries`, `keys` `[rows, key_heads,
    key_width]`, `values` `[rows, heads, value_width]`, `decays` and `shares` `[rows, heads]`. A key head is
    that of `heads / key_heads` heads in a row."""

    queries: Array
    keys: Array
    values: Array
    decays: Array
    shares: Array


def delta_rule(rows: DeltaRows, states: Array, steps: Array) -> Array:
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
    queries, keys = (repeat(each, heads // each.shape[1], 1) for each in (rows.queries, rows.keys))
    outputs = 1 + max(steps[:, 3].tolist(), default=-1)
    found = zeros(values, outputs, *values.shape[1:])
    for row, source, target, output in steps.tolist():
        decayed = states[source] * rows.decays[row][:, None, None]
        key, query = keys[row][:, :, None], queries[row][:, :, None]
        recalled = halves_sum((decayed * key).swapaxes(1, 2))
        change = (values[row] - recalled) * rows.shares[row][:, None]
        states[target] = state = decayed + key * change[:, None]
        if output >= 0:
            found[output] = halves_sum((state * query).swapaxes(1, 2))
    return found


def product(x: Array, weight: Array) -> Array:
    """`x W^T`, `[rows, out]`, of float32 `[rows, in]` and `[out, in]`: for small matrices, such as a
    router's."""
    if not len(x):
        return zeros(x, 0, len(weight))
    return namespace(x).stack([halves_sum(row * weight) for row in x])


def packed_rows(form: Form, panels: Array, ids: Array) -> Array:
    """Rows of a packed matrix as numbers, float32 `[ids, in]`."""
    blocks = [ids[first : first + PANELS] for first in range(0, max(1, len(ids)), PANELS)]
    found = [numbers_of(form, panels[some // PANEL]) for some in blocks]
    return namespace(panels).concatenate(found)[indices(ids, len(ids)) * PANEL + ids % PANEL]


def rounded_groups(x: Array) -> tuple[Array, Array]:
    """The levels `[rows, groups, 32]` of float32 `[rows, in]`, and the step between levels `[rows, groups]`.

    A group with what is no number, or infinite, has a step that is no number, so that it shows.
    """
    xp = namespace(x)
    groups = fill_up(x, GROUP).reshape(len(x), -(-x.shape[1] // GROUP), GROUP)
    peak = xp.amax(xp.abs(groups), 2)
    is_number = (peak > PEAK_LEAST) & (peak < math.inf)
    bounded, most = xp.where(is_number, peak, 1.0), xp.full_like(peak, LEVEL)
    factor = most / bounded  # `LEVEL / bounded` would be a product with a reciprocal, of two roundings
    levels = xp.round(xp.where(is_number[..., None], groups, 0.0) * factor[..., None])
    steps = xp.where(peak <= PEAK_LEAST, 0.0, xp.where(is_number, bounded / most, math.nan))
    return levels, steps


def levels(x: Array) -> tuple[Array, Array]:
    """Float32 rows `[rows, width]` as levels of `rounded_groups`, int8 `[rows, width]`, and their steps."""
    found, steps = rounded_groups(x)
    return cast(found.reshape(len(x), -1)[:, : x.shape[1]], "int8"), steps


def of_levels(found: Array, steps: Array, dimension: int) -> Array:
    """Numbers, float32, from int8 levels and the float16 step of each 32 along a dimension: no product is
    rounded."""
    each = repeat(cast(steps, "float32"), GROUP, dimension).swapaxes(0, dimension)
    return cast(found, "float32") * each[: found.shape[dimension]].swapaxes(0, dimension)


def store(
    places: Array,
    keys: Array,
    values: Array,
    to_keys: Array,
    to_values: Array,
    steps: tuple[Array, Array] | None,
) -> None:
    """Keys and values `[kv_heads, rows, width]` of whatever dtype to slots `places` `[rows]`.

    `to_keys` `[kv_heads, slots / 16, width, 16]`, `to_values` `[kv_heads, slots, width or more]`. In int8
    they are levels, and `steps` has those between them, in float16: `[kv_heads, slots / 16, width / 32, 16]`
    and `[kv_heads, slots, width / 32]`.
    """
    width = keys.shape[2]
    if steps is not None:
        (keys, of_keys), (values, of_values) = _cached_levels(keys), _cached_levels(values)
        steps[0][:, places // LANES, :, places % LANES] = of_keys.swapaxes(0, 1)
        steps[1][:, places] = of_values
    to_keys[:, places // LANES, :, places % LANES] = cast(keys, to_keys.dtype).swapaxes(0, 1)
    to_values[:, places, :width] = cast(values, to_values.dtype)


def _cached_levels(numbers: Array) -> tuple[Array, Array]:
    """Levels `[kv_heads, rows, width]`, and steps `[kv_heads, rows, width / 32]` in float16."""
    heads, rows, width = numbers.shape
    found, steps = levels(cast(numbers.reshape(heads * rows, width), "float32"))
    return found.reshape(heads, rows, width), cast(steps.reshape(heads, rows, -1), "float16")


def softmax(x: Array) -> Array:
    """By the last dimension, of float32."""
    return over_their_sum(exp(x - namespace(x).amax(x, -1, keepdims=True)))


def over_their_sum(x: Array) -> Array:
    """Numbers over their sum by the last dimension, of float32."""
    return x / halves_sum(x)[..., None]


def attention(
    queries: Array,
    keys: Array,
    values: Array,
    paths: Array,
    scale: float,
    cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """`[rows, heads, width]` float32 from queries of that shape and dtype.

    `keys` `[kv_heads, slots / 16, width, 16]`, `values` `[kv_heads, slots, width]`. `paths` `[rows,
    positions]` int64: the slot of the key that a row sees at a position, -1 where it sees none. Scores are
    bounded by `cap`. `sinks` `[heads]` float32: a score of each head that takes part in the greatest and in
    what is divided by, where its share is added last; it has no value.
    """
    count = max(1, _SHARES_MAX // max(1, paths.shape[1] * values.shape[2]))
    parts = [slice(first, first + count) for first in range(0, len(queries), count)]
    found = [_attention(queries[rows], keys, values, paths[rows], scale, cap, sinks) for rows in parts]
    return namespace(queries).concatenate(found)


def _attention(
    queries: Array,
    keys: Array,
    values: Array,
    paths: Array,
    scale: float,
    cap: float | None,
    sinks: Array | None,
) -> Array:
    xp, (rows, heads, width) = namespace(queries), queries.shape
    kv_heads, group = len(keys), heads // len(keys)
    paths = fill_up(paths, BLOCK, -1)
    is_seen, slots = paths >= 0, xp.clip(paths, 0, None)
    grouped = queries.swapaxes(0, 1).reshape(kv_heads, group, rows, width)
    scores = zeros(queries, kv_heads, group, rows, paths.shape[1])
    for number in range(width):
        lanes = cast(keys[:, :, number].reshape(kv_heads, -1), "float32")[:, slots]  # by row and position
        scores += grouped[..., number, None] * lanes[:, None]
    scores *= scale
    if cap is not None:
        scores = tanh(scores * (1 / cap)) * cap
    highest = xp.amax(xp.where(is_seen, scores, -math.inf), -1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, group, 1, 1)
        highest = xp.maximum(highest, sinks)
    shares = xp.where(is_seen, exp(scores - highest), 0.0).reshape(*scores.shape[:-1], -1, BLOCK)
    seen_values = xp.where(is_seen[None, ..., None], cast(values[:, slots], "float32"), 0.0)
    seen_values = seen_values.reshape(kv_heads, 1, rows, -1, BLOCK, width)
    sums, weights = zeros(queries, *shares.shape[:-1], width), zeros(queries, *shares.shape[:-1])
    for place in range(BLOCK):
        weights += shares[..., place]
        sums += shares[..., place, None] * seen_values[..., place, :]
    total, weight = zeros(sums, *sums.shape[:3], width), zeros(weights, *weights.shape[:3])
    for block in range(sums.shape[3]):
        total += sums[:, :, :, block]
        weight += weights[..., block]
    if sinks is not None:
        weight += exp(sinks - highest)[..., 0]
    return xp.stack([*(total / weight[..., None]).reshape(heads, rows, width)], 1)


def function(x: Array, name: str) -> Array:
    """One of `FUNCTIONS`, number by number, in the dtype of x."""
    return cast(FUNCTIONS[name](cast(x, "float32")), x.dtype)


def gated(gate: Array, up: Array, name: str) -> Array:
    """A function of `gate`, rounded to the dtype, times `up`, number by number."""
    return function(gate, name) * up


Products = Mapping[str, Callable[[Array], Array]]


@dataclass(slots=True, kw_only=True)
class Parts:
    """Of a layer, by the last part of their names: what matrices and norms make of rows, vectors in float32,
    and products of each expert. `ops` has functions of rows, by the names that they have here."""

    products: Products
    norms: Products
    vectors: Mapping[str, Any]
    experts: Sequence[Products] = ()
    ops: Any = None

    def __post_init__(self) -> None:
        self.ops = self.ops or sys.modules[__name__]

    def normed(self, rows: Array, name: str) -> Array:
        return self.norms[name](rows) if name else rows


def choose(how: Mixture, logits: Array, bias: Array | None = None, ops: Any = None) -> tuple[Array, Array]:
    """Of each row the experts, the likeliest first and of two alike the first, and their shares, each `[rows,
    chosen]`, from the router's logits `[rows, experts]`, which are in float32 for "sigmoid". There `bias` is
    added in choosing, among the experts of the groups whose two best are best."""
    ops = ops or sys.modules[__name__]
    is_apart, is_of_chosen = how.router == "sigmoid", how.router == "softmax of chosen"
    choice = scores = cast(logits, "float32")
    if is_apart:
        assert bias is not None, "this router has one"
        scores = 1.0 / (1.0 + exp(-scores))
        choice = scores + bias
    elif not is_of_chosen:
        choice = scores = ops.softmax(scores)
    experts = order(-_open(choice, how))[:, : how.chosen]
    shares = scores[indices(experts, len(experts))[:, None], experts]
    if is_apart:
        sums = (halves_sum(shares) + 1e-20)[:, None] if how.is_normed else 1.0
        return experts, shares / sums * how.factor
    if is_of_chosen:
        shares = ops.softmax(shares)
    elif how.is_normed or how.router.endswith("softmax to 1"):
        shares = ops.over_their_sum(shares)
    return experts, shares if how.router.endswith("softmax to 1") else cast(shares, logits.dtype)


def _open(choice: Array, how: Mixture) -> Array:
    """What experts count for, `[rows, experts]`, less those of groups whose two best are not best."""
    if how.groups == 1:
        return choice
    groups = choice.reshape(len(choice), how.groups, -1)
    best = order(-groups)[..., :2]
    rows, every = indices(best, len(best))[:, None], indices(best, how.groups)
    sums = groups[rows, every, best[..., 0]] + groups[rows, every, best[..., 1]]
    is_open = zeros(choice, len(choice), how.groups)
    is_open[rows, order(-sums)[:, : how.open]] = 1.0
    return namespace(choice).where(is_open[..., None] > 0, groups, -math.inf).reshape(choice.shape)


def clamped(gate: Array, up: Array, slope: float, limit: float, ops: Any) -> Array:
    """`gate * sigmoid(slope * gate) * (up + 1)`, rounded once; `gate` counts as the limit where it is above,
    `up` where it is farther from 0 (GPT-OSS)."""
    clip = namespace(gate).clip
    wide_gate, wide_up = clip(cast(gate, "float32"), None, limit), clip(cast(up, "float32"), -limit, limit)
    return cast(ops.function(wide_gate * slope, "silu") / slope * (wide_up + 1), gate.dtype)


def mlp(products: Products, dense: Dense, rows: Array, ops: Any, limited: Mixture | None = None) -> Array:
    """Of a layer, or of an expert: gate and values are two products or one (`gate_up_proj`)."""
    if "gate_up_proj" in products:
        joined = products["gate_up_proj"](rows)
        gate, up = joined[:, : joined.shape[1] // 2], joined[:, joined.shape[1] // 2 :]
    else:
        gate, up = products["gate_proj"](rows), products["up_proj"](rows)
    if limited is not None and limited.limit:
        return products["down_proj"](clamped(gate, up, limited.slope, limited.limit, ops))
    return products["down_proj"](ops.gated(gate, up, dense.activation))


def mixture(parts: Parts, dense: Dense, rows: Array, of: Array) -> Array:
    """What the experts that rows choose, by what they are `of`, make of them, each times its share, added in
    ascending order, then what an MLP for all makes; the router's product is `gate`."""
    assert dense.mixture is not None, "there are experts"
    ops, products = parts.ops, parts.products
    bias, scales = (parts.vectors.get(name) for name in ("e_score_correction_bias", "per_expert_scale"))
    chosen, shares = choose(dense.mixture, products["gate"](of), bias, ops)
    if scales is not None:
        shares = shares * scales[chosen]
    total = zeros(rows, *rows.shape)
    for number in sorted({*chosen.reshape(-1).tolist()}):
        own, place = namespace(rows).where(chosen == number)
        made = mlp(parts.experts[number], dense, rows[own], ops, dense.mixture)
        found = cast(made, "float32") * cast(shares[own, place], "float32")[:, None]
        total[own] = total[own] + cast(found, rows.dtype)
    if not dense.mixture.has_shared:
        return total
    shared = mlp(products, dense, rows, ops)
    if dense.mixture.is_shared_gated:
        shared = ops.function(products["shared_expert_gate"](rows), "sigmoid") * shared
    return total + shared


class Holder(Protocol):
    """What a layer holds of its rows' requests."""

    def attend(self, queries: Array, keys: Array | None, values: Array | None, sinks: Array | None) -> Array:
        """`[rows, heads, width]` from queries of that shape, and new keys and values `[rows, kv_heads,
        width]`, if the layer has its own."""

    def convolve(self, inputs: Array, taps: Array, bias: Array | None) -> Array:
        """`convolution` of inputs `[rows, width]` and those before them, which are held."""

    def sum_up(self, inputs: Array, mixer: DeltaRule, vectors: Mapping[str, Any]) -> Array:
        """What rows read from their states, float32 `[rows, heads, value_width]`, after steps of inputs
        `[rows, width]`, which are held."""


def seen_inputs(held: Array, lines: Array) -> Array:
    """Inputs `[rows, length, width]` float32 that lie in slots `lines` `[rows, length]` of those that are
    `held` `[slots, width]`; zeros for -1, where the text has not begun."""
    xp = namespace(held)
    return xp.where(lines[..., None] < 0, 0.0, cast(held[xp.clip(lines, 0, None)], "float32"))


def delta_rows(mixer: DeltaRule, held: Array, lines: Array, vectors: Mapping[str, Any]) -> DeltaRows:
    """Of nodes whose inputs, and those before them, are `held` `[slots, width]` in `lines` `[nodes,
    length]`. `fading` is how fast each head's state fades, `dt_bias` what is added to its rate."""
    keys, dtype = mixer.key_heads * mixer.key_width, held.dtype
    width = 2 * keys + mixer.heads * mixer.value_width
    mixed = cast(convolution(seen_inputs(held[:, :width], lines), vectors["conv"], None), dtype)
    mixed = cast(function(mixed, "silu"), "float32")
    gates = cast(held[lines[:, -1], width:], "float32")
    queries, own_keys = (
        unit(mixed[:, first : first + keys].reshape(len(lines), -1, mixer.key_width), UNIT_EPS)
        for first in (0, keys)
    )
    rates = vectors["fading"] * softplus(gates[:, mixer.heads :] + vectors["dt_bias"])
    return DeltaRows(
        queries=queries * mixer.key_width**-0.5,
        keys=own_keys,
        values=mixed[:, 2 * keys :].reshape(len(lines), mixer.heads, -1),
        decays=exp(-rates),
        shares=sigmoid(gates[:, : mixer.heads]),
    )


class Token(NamedTuple):
    """Of a job's tokens their embeddings `[rows, hidden]`, and what is looked up of them in a layer's table,
    `[rows, width]`, which is multiplied by a `factor`."""

    embedding: Array
    looked_up: Array | None = None
    factor: float = 1.0


def layer(
    spec: LayerSpec,
    parts: Parts,
    hidden: Array,
    angles: tuple[Array, Array],
    held: Holder,
    token: Token | None = None,
) -> Array:
    """What a layer computes: `[rows, width]` from hidden states of that shape and angles, each `[1, rows,
    turned width]`. Queries, keys and values are three products or one (`qkv_proj`), or queries alone where
    the layer attends to another's."""
    dense = spec.dense
    assert dense is not None, "there is a definition of everything"

    def added(rows: Array, name: str) -> Array:
        more = cast(parts.normed(rows, name), "float32") * dense.added_scale  # a scale has float32's digits
        return hidden + cast(more, hidden.dtype)

    rows = parts.normed(hidden, dense.norm_before_attention)
    hidden = rows if dense.is_residual_normed else hidden
    if dense.embedding_norm:
        assert token is not None, "heads of EAGLE are given it"
        rows = namespace(rows).concatenate([parts.norms[dense.embedding_norm](token.embedding), rows], 1)
    if isinstance(dense.mixer, Convolution):
        found = _short_convolution(parts, rows, held)
    elif dense.mixer is not None:
        found = _linear_attention(dense.mixer, parts, rows, held)
    else:
        found = _attended(spec, dense, parts, rows, angles, held)
    hidden = added(found, dense.norm_after_attention)
    rows = parts.normed(hidden, dense.norm_before_mlp)
    if dense.mixture is None:
        found = mlp(parts.products, dense, rows, parts.ops)
    elif dense.mixture.is_parallel:
        own = mlp(parts.products, dense, rows, parts.ops)
        rows = parts.normed(hidden, "pre_feedforward_layernorm_2")
        mixed = parts.normed(mixture(parts, dense, rows, hidden), "post_feedforward_layernorm_2")
        found = parts.normed(own, "post_feedforward_layernorm_1") + mixed
    else:
        found = mixture(parts, dense, rows, rows)
    hidden = added(found, dense.norm_after_mlp)
    if dense.input_width:
        assert token is not None, "it is of the rows' tokens"
        hidden = hidden + _layer_input(parts, dense, token, hidden)
    if dense.has_factor:
        hidden = cast(cast(hidden, "float32") * parts.vectors["layer_scalar"], hidden.dtype)
    return hidden


def _attended(
    spec: LayerSpec, dense: Dense, parts: Parts, rows: Array, angles: tuple[Array, Array], held: Holder
) -> Array:
    products, norms = parts.products, parts.norms
    count, width, gates = len(rows), spec.kv.width, None
    if "qkv_proj" in products:
        joined, most = products["qkv_proj"](rows), spec.heads * width
        ends = 0, most, most + spec.kv.count * width, joined.shape[1]
        found = [joined[:, first:end] for first, end in itertools.pairwise(ends)]
    else:
        found = [products[name](rows) for name in ("q_proj", "k_proj", "v_proj") if name in products]
        found += found[1:] * (len(found) == 2)  # keys are values, too
    if dense.is_gated:
        both = found[0].reshape(count, -1, 2, width)
        found[0], gates = (both[:, :, place].reshape(count, -1) for place in (0, 1))
    names = ("q_norm", "k_norm")[: len(found)]
    if dense.query_norm == "width":
        found[:2] = [norms[name](each) for name, each in zip(names, found, strict=False)]
    found = [each.reshape(1, count, -1, width) for each in found]
    if dense.query_norm == "head":
        found[:2] = [norms[name](each) for name, each in zip(names, found, strict=False)]
    if dense.has_value_norm:
        found[2:] = [norms["v_norm"](each) for each in found[2:]]
    if dense.clip:
        found = [namespace(each).clip(each, -dense.clip, dense.clip) for each in found]
    if dense.is_turned:
        turn = parts.ops.turned
        found[:2] = [turn(each.swapaxes(1, 2), *angles).swapaxes(1, 2) for each in found[:2]]
    keys, values = (found[1][0], found[2][0]) if len(found) > 1 else (None, None)
    sinks = parts.vectors["sinks"] if dense.has_sinks else None
    attended = held.attend(found[0][0], keys, values, sinks)
    attended = cast(attended.reshape(count, -1), rows.dtype)
    return products["o_proj"](attended if gates is None else parts.ops.gated(gates, attended, "sigmoid"))


def _short_convolution(parts: Parts, rows: Array, held: Holder) -> Array:
    """What a layer of LFM2 does that does not attend: `[rows, hidden]`."""
    joined, width = parts.products["in_proj"](rows), rows.shape[1]
    inputs = joined[:, :width] * joined[:, 2 * width :]
    found = held.convolve(inputs, parts.vectors["conv"], parts.vectors.get("conv.bias"))
    return parts.products["out_proj"](joined[:, width : 2 * width] * cast(found, rows.dtype))


def _linear_attention(mixer: DeltaRule, parts: Parts, rows: Array, held: Holder) -> Array:
    """What a layer of Qwen3.5 does that does not attend: `[rows, hidden]`."""
    products, dtype = parts.products, rows.dtype
    inputs = namespace(rows).concatenate(
        [products[name](rows) for name in ("in_proj_qkv", "in_proj_b", "in_proj_a")], 1
    )
    normal = parts.norms["norm"](cast(held.sum_up(inputs, mixer, parts.vectors), dtype))
    gates = cast(products["in_proj_z"](rows), "float32").reshape(normal.shape)
    found = cast(cast(normal, "float32") * parts.ops.function(gates, "silu"), dtype)
    return products["out_proj"](found.reshape(len(rows), -1))


def _layer_input(parts: Parts, dense: Dense, token: Token, rows: Array) -> Array:
    """What a layer of Gemma 4 makes of its hidden states `rows` with what it takes of tokens."""
    dtype, hidden, products, norms = rows.dtype, token.embedding.shape[1], parts.products, parts.norms

    def scaled(x: Array, factor: float) -> Array:
        return cast(cast(x, "float32") * factor, dtype)

    assert token.looked_up is not None
    projected = norms["layer_input.norm"](scaled(products["projection"](token.embedding), hidden**-0.5))
    inputs = scaled(projected + scaled(token.looked_up, token.factor), 2.0**-0.5)
    gated = parts.ops.gated(products["per_layer_input_gate"](rows), inputs, dense.activation)
    return norms["post_per_layer_input_norm"](products["per_layer_projection"](gated))
