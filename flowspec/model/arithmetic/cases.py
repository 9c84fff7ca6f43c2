"""Tries a build of `canonical.c` by fixed cases: `python -m flowspec.model.arithmetic.cases LIBRARY`.

In a process of its own, which may die of it. Says in JSON lines how far it is, and in the end that all cases
have the bits of the definition, or which has not. A case is a small layer as slices have them, with what a
request holds; its numbers follow from a seed, by bits of a generator that numpy promises never to change.
`golden.json` has hashes of what the definition (`plain.py`) made of them. Imports no torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol.model_spec import (
    NORMS,
    Convolution,
    DeltaRule,
    Dense,
    Heads,
    LayerSpec,
    Mixture,
    Rotary,
)
from flowspec.errors import first_line
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import FUNCTIONS, Cache, Call, Library, Part, address
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL
from flowspec.model.arithmetic.plain import BLOCK, LANES
from flowspec.model.cpu import HOW_CHOSEN, Cpu
from flowspec.model.layer import Layer, Linear, NormPart, Packed, Place, Plain, RouterPart, Shape, Table

Array = npt.NDArray[Any]
GOLDEN = Path(__file__).with_name("golden.json")
ORPHAN_S = 240  # after so long without a word a child ends: what hangs was given up long before
KINDS = ("float32", "bfloat16", "float16")
ROW_COUNTS = (1, 2, 3, 5, 17, 33)  # kernels were seen that are right for some counts only
CACHED = 70  # positions that all rows see, more than a block of them
HEADS, KV_HEADS, EXPERTS, TOKENS, NEURONS = 4, 2, 6, 40, 90
CONVOLUTION = Convolution(length=3)
DELTA = DeltaRule(key_heads=2, heads=4, key_width=16, value_width=20, length=4)
HELD: dict[Any, dict[str, Any]] = {
    None: {},
    CONVOLUTION: {"window": CONVOLUTION.length, "inputs": HEADS * 24},
    DELTA: {"window": DELTA.length, "inputs": DELTA.inputs, "state": DELTA.value_numbers * DELTA.key_width},
}
"""By what is in the place of attention, what a layer of rows of 96 numbers holds of tokens."""
EXPERT_SIZES: dict[str, Any] = {"experts": EXPERTS, "neurons": NEURONS, "shared_neurons": NEURONS}
MIXTURES: tuple[dict[str, Any], ...] = (
    {"has_shared": True, "is_shared_gated": True},
    {},
    {"limit": 0.7},
    {"has_shared": True, "groups": 2},
)
"""What is otherwise where experts are chosen in each way."""
DRAWN_ALWAYS = ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.v_norm")
_OF_MLP = ("down_proj", "gate_up_proj", "gate_proj", "up_proj")
_OF_MIXTURE = ("router", "experts.gate_up_proj", "experts.down_proj")
DRAWN = (
    *("first", "second", "conv.in_proj", "conv.out_proj", "conv.taps", "conv.bias"),
    *(f"linear_attn.in_proj_{each}" for each in ("qkv", "b", "a", "z")),
    *(f"linear_attn.{each}" for each in ("out_proj", "norm", "taps", "rates")),
    *(f"self_attn.{each}" for each in ("qkv_proj", "sinks", "q_proj", "k_proj", "v_proj")),
    *DRAWN_ALWAYS,
    *(f"mlp.{each}" for each in (*_OF_MLP, *_OF_MIXTURE)),
    *_OF_MIXTURE,
    *(f"mlp.shared_expert{s}.{each}" for s in ("", "s") for each in _OF_MLP),
    "mlp.shared_expert_gate",
    *(f"{name}_feedforward_layernorm_{n}" for name, n in (("post", 1), ("pre", 2), ("post", 2))),
    *("layer_input.table", "layer_input.projection", "layer_input.norm", "per_layer_input_gate"),
    *("per_layer_projection", "post_per_layer_input_norm", "layer_scalar"),
)
"""In which order numbers of parts are drawn; of some parts also where a layer lacks them."""


def main() -> None:
    try:
        compiled.use(Library(Path(sys.argv[1])))
    except (OSError, AttributeError) as error:
        say(fault=f"cannot be loaded: {first_line(error)}", may_pass=True)
        return
    golden = json.loads(GOLDEN.read_text("utf-8"))
    for place, (name, found, threads) in enumerate(results()):
        say(share=round(min(1.0, place / (2 * len(golden))), 3))
        if golden[name] != found:
            say(fault=f"differs from its definition in {name}, with {threads} threads")
            return
    say(fault="")


def say(**word: object) -> None:
    """A line for the parent."""
    signal.alarm(ORPHAN_S)
    print(json.dumps(word), flush=True)


def results() -> Iterator[tuple[str, str, int]]:
    """The names of cases, the digests of what the library makes of them, and by how many threads."""
    for name, found in functions():
        yield name, digest(found), 1
    for case in cases():
        for rows in ROW_COUNTS:
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                yield f"{case.name} {rows}", digest(layer(case, rows, threads)), threads


def digest(found: tuple[Array, ...]) -> str:
    """What is no number counts as one."""
    whole = hashlib.sha256()
    for each in found:
        bits = np.ascontiguousarray(each)
        if bits.dtype.kind == "f":
            bits = np.where(np.isnan(bits), bits.dtype.type(1e4), bits)
        elif bits.dtype == np.uint16:
            bits = np.where(bits & 0x7FFF > 0x7F80, np.uint16(0x7FC0), bits)
        whole.update(bits.tobytes())
    return whole.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- numbers


class Source:
    """Of numbers that are the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def whole(self, below: int, *shape: int) -> Array:
        raw = self._bits.random_raw(int(np.prod(shape)))
        return ((raw >> np.uint64(32)) % np.uint64(below)).astype(np.int64).reshape(shape)

    def numbers(self, kind: str, *shape: int, scale: float = 1.0) -> Array:
        """Between -scale and scale."""
        exact = (self.whole(1 << 24, *shape) - (1 << 23)).astype(np.float32) / np.float32(1 << 23)
        return stored(exact * np.float32(scale), kind)

    def matrix(self, how: str, kind: str, inputs: int, outputs: int) -> Any:
        """In a form, or of numbers of a kind."""
        scale = 2 * inputs**-0.5
        if how not in FORMS:
            return Plain(self.numbers(kind, outputs, inputs, scale=scale))
        form = FORMS[how]
        shape = -(-outputs // PANEL), -(-inputs // form.unit), form.unit_bytes
        panels = self.whole(256, *shape).astype(np.uint8)
        ends = panels[..., form.body_bytes :]
        if form.has_exponents:
            ends[:] = 120 + ends % 4
        else:
            scales = self.numbers("float16", *shape[:2], ends.shape[2] // 2, scale=scale / 2**form.bits)
            ends[:] = scales.view(np.uint8)
        return Packed(how, panels, outputs)


def stored(x: Array, kind: str) -> Array:
    """Float32 as numbers of a kind; those of bfloat16 are their bits, cut off."""
    if kind == "bfloat16":
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(kind)


# ----------------------------------------------------------------------------------------------- layers


class Case:
    """A layer of `parts` for rows of a `kind`, with `matrices` of a form or another sort; `cached`: the kind
    of its keys and values, of this `width`. `dense`: what of its spec is not as in most."""

    def __init__(
        self, name: str, kind: str, matrices: str, dense: dict[str, Any], cached: str = "", width: int = 24
    ) -> None:
        neurons = 256 if width == 64 else NEURONS
        own = Dense(**{"scale": 0.25, "activation": "silu", "neurons": neurons, **dense})
        heads: dict[str, Any] = {"heads": HEADS, "kv": Heads(count=KV_HEADS, width=width), "source": 0}
        self.spec = LayerSpec(dense=own, **heads, **HELD[own.mixer])
        self.name, self.kind, self.cached = f"{name} {kind}", kind, cached or kind
        self.how, self.hidden = NORMS[(KINDS.index(kind) + len(name)) % len(NORMS)], HEADS * width
        self.is_source = name == "parallel"
        self._matrices, self._source = matrices, Source(len(self.name) + self.hidden)
        attends = structs.replace(own, mixer=None, query_norm=own.query_norm or "width", has_value_norm=True)
        attends = structs.replace(attends, has_sinks=own.is_joined)
        of_attention = Layer(spec=LayerSpec(dense=attends, **heads), hidden=self.hidden).places
        always = DRAWN_ALWAYS + ("self_attn.sinks",) * own.is_joined
        drawn = {name: of_attention[name] for name in always}
        drawn |= Layer(spec=self.spec, hidden=self.hidden, table_rows=TOKENS).places
        self.parts = {name: self._part(name, drawn[name][1]) for name in sorted(drawn, key=DRAWN.index)}

    def _part(self, name: str, shape: Shape) -> Any:
        numbers, sizes = self._source.numbers, [each.shape for each in shape.parameters.values()]
        match shape.kind:
            case "norm":
                return NormPart(weights=numbers("float32", shape.width), eps=1e-6)
            case "linear":
                matrix, bias = self._matrix(*sizes[0]), numbers("float32", sizes[0][0])
                return Linear(inputs=shape.width, matrices=(matrix,), bias=bias, is_fine=shape.is_fine)
            case "stack":
                experts, *size = sizes[0]
                matrices = [self._matrix(*size) for _ in range(experts)]
                both = zip(matrices, numbers("float32", experts, size[0]), strict=True)
                return tuple(Linear(inputs=shape.width, matrices=(own,), bias=bias) for own, bias in both)
            case "router":
                return self._router(is_normed=".scale" in shape.parameters)
            case "table":
                how = "Q8_0" if self.kind == "bfloat16" else "linear"
                return Table(matrix=self._source.matrix(how, self.kind, *sizes[0][::-1]), factor=1.5)
            case "number":
                return 0.75
            case "rates":
                return numbers("float32", 2 * DELTA.heads)
            case "wide":  # whose first dimension becomes the last
                return numbers("float32", *sizes[0][::-2], scale=3.0 if name.endswith("sinks") else 1.0)

    def _router(self, *, is_normed: bool) -> RouterPart:
        dense: Any = self.spec.dense
        numbers, router = self._source.numbers, dense.mixture.router
        return RouterPart(
            weights=numbers("float32", EXPERTS, self.hidden),
            bias=numbers("float32", EXPERTS) if router == "softmax of chosen" else None,
            correction=numbers("float32", EXPERTS) if router == "sigmoid" else None,
            norm=NormPart(weights=numbers("float32", self.hidden), eps=1e-6) if is_normed else None,
            factor=0.25,
            scales=numbers("float32", EXPERTS) if is_normed else None,
        )

    def _matrix(self, outputs: int, inputs: int) -> Any:
        return self._source.matrix(self._matrices, self.kind, inputs, outputs)


def cases() -> Iterator[Case]:
    others = {"norm_before_attention": "first", "norm_before_mlp": "second"}
    for number, kind in enumerate(KINDS):
        yield Case("linear", kind, "linear", {**others, "query_norm": "head", "clip": 1.5})
        after = {"norm_before_attention": "first", "norm_after_attention": "second", "norm_before_mlp": ""}
        bound = {"cap": 5.0, "has_sinks": True, "added_scale": 0.75, "activation": "gelu_tanh"}
        yield Case("joined", kind, "Q8_0", {**after, **bound, "is_joined": True})
        gated = {"query_norm": "width", "is_gated": True}
        yield Case("gated", kind, "linear", {**others, **gated}, cached="int8")
        yield Case("convolution", kind, "Q8_0", {**others, "mixer": CONVOLUTION, "biases": ("conv",)})
        yield Case("delta", kind, "linear", {**others, "mixer": DELTA})
        for place, ((router, *_), more) in enumerate(zip(HOW_CHOSEN, MIXTURES, strict=True)):
            own: dict[str, Any] = {"router": router, "is_normed": number != 2, **more}
            mixture = Mixture(**EXPERT_SIZES, chosen=2, factor=1.5, slope=1.7, **own)
            stacks = ("linear", "Q8_0", "Q4_0", "MXFP4")[(place + number) % 4]
            joined = {"mixture": mixture, "is_joined": stacks == "Q8_0"}
            yield Case(f"experts by {router}", kind, stacks, {**others, **joined})
        parallel = Mixture(router="scaled softmax to 1", **EXPERT_SIZES, chosen=3, is_parallel=True)
        inner = {"query_norm": "head", "has_value_norm": True, "input_width": 32, "has_factor": True}
        yield Case("parallel", kind, "Q4_0", {**others, **inner, "mixture": parallel})
        for form in FORMS:
            yield Case(form, kind, form, {**others, "is_turned": False}, width=64)


def given_to(case: Case, rows: int) -> SimpleNamespace:
    """What rows are run with, the same numbers whatever their count. Row r stands behind row r - 2, and
    behind what is cached; each row sees its path. `hidden` `[rows, numbers]`; keys, values and the steps
    between their levels as caches have them."""
    source, spec = Source(7), case.spec
    width, most, high = spec.kv.width, max(ROW_COUNTS), CACHED + max(ROW_COUNTS)
    room, groups = -(-high // LANES) * LANES, -(-width // GROUP)
    slots = np.argsort(source.whole(1 << 20, high), kind="stable").astype(np.int64)
    hidden = source.numbers(case.kind, most, case.hidden, scale=3.0)
    angles = [source.numbers("float32", 1, most, width // 4 * 2)[:, :rows].copy() for _ in range(2)]
    is_levels = case.cached == "int8"
    held, scale = ("float32", 100.0) if is_levels else (case.cached, 1.0)
    keys = source.numbers(held, KV_HEADS, room // LANES, width, LANES, scale=scale)
    values = source.numbers(held, KV_HEADS, room, -(-width // LANES) * LANES, scale=scale)
    paths, seen, lines = np.full((rows, high), -1, np.int64), np.zeros((rows, high), np.uint8), []
    for row in range(rows):
        own = [*range(CACHED), *range(CACHED + row % 2, CACHED + row + 1, 2)]
        paths[row, own], seen[row, slots[own]] = slots[own], 1
        lines.append(slots[own][-(spec.window or 1) :])
    places = np.arange(rows)  # the first row's state is where they begin from then on
    return SimpleNamespace(
        hidden=hidden[:rows].copy(),
        angles=tuple(angles),
        slots=slots[CACHED : CACHED + rows].copy(),
        seen=seen,
        order=slots[: CACHED + rows].astype(np.int32),
        ends=np.append(np.arange(BLOCK, CACHED + rows, BLOCK), CACHED + rows).astype(np.int32),
        paths=paths,
        keys=keys.astype(np.int8) if is_levels else keys,
        values=values.astype(np.int8) if is_levels else values,
        key_steps=source.numbers("float16", KV_HEADS, room // LANES, groups, LANES, scale=0.01),
        value_steps=source.numbers("float16", KV_HEADS, room, groups, scale=0.01),
        inputs=source.numbers(case.kind, room, max(1, spec.inputs)),
        lines=np.stack(lines),
        states=source.numbers("float32", rows, DELTA.heads, DELTA.key_width, DELTA.value_width),
        steps=np.stack([places, np.maximum(places - 2, 0), places, places], 1).astype(np.int32),
        tokens=source.whole(TOKENS, most)[:rows].copy(),
        embedding=source.numbers(case.kind, most, case.hidden)[:rows].copy(),
    )


def layer(case: Case, rows: int, threads: int) -> tuple[Array, ...]:
    """All that changes where a case's layer runs."""
    given, engine = given_to(case, rows), Cpu(case.kind, case.how)
    operations = engine.layer(case.parts, case.spec, Place(is_source=case.is_source))

    def filled(structure: Any, **more: Any) -> Any:
        """With where that lies of what is given which has the name of a field."""
        arrays = {name: each for name, each in vars(given).items() if isinstance(each, np.ndarray)}
        own = {name: address(arrays[name]) for name, _ in structure._fields_ if name in arrays}
        return structure(**own | more)

    (cosine, sine), (slots, width) = given.angles, (given.values.shape[1], given.inputs.shape[1])
    state, cached = address(given.states), compiled.KINDS[case.cached]
    cache = filled(Cache, state=state, slots=slots, inputs_width=width, kind=cached)
    counts = dict.fromkeys(("rows", "nodes", "steps_count", "places"), rows)
    shape = {"high": given.seen.shape[1], "blocks": len(given.ends)}
    part = filled(Part, cache=ctypes.addressof(cache), **counts, **shape)
    turned = {"cosine": address(cosine), "sine": address(sine), "angles": cosine.shape[2]}
    shape = {"rows": rows, "parts_count": 1, "between_embeddings": case.hidden, "threads": threads}
    call = filled(Call, parts=ctypes.addressof(part), **turned, **shape)
    engine.room.run(operations, call)
    held = given.keys, given.values, given.key_steps, given.value_steps
    return given.hidden, *held, given.inputs, given.states[0]


# ---------------------------------------------------------------------------- what is called beside them


def functions() -> Iterator[tuple[str, tuple[Array, ...]]]:
    """The names of cases, and what comes of them."""
    engine = Cpu("float32", NORMS[0])
    for name in FUNCTIONS:
        yield name, (engine.function(special(), name),)
    positions, frequencies = turns()
    yield "angles", engine.angles(positions, Rotary(frequencies=tuple(frequencies.tolist()), scale=1.25))
    x, matrix = small()
    yield "small pairs", (engine.rows(linear=Linear(inputs=x.shape[1], matrices=(matrix,)))(x),)
    for name in FORMS:
        panels, ids = rows_of(name)
        yield f"rows of {name}", (engine.take(Packed(name, panels, 40), ids),)


def special() -> Array:
    """Numbers at which functions change, in front and at the end, and others."""
    ends = [0.0, -0.0, 1e-40, -86.0, -86.1, 88.0, 89.0, 1e30, -1e30, np.inf, -np.inf, np.nan]
    edges = np.array(ends, np.float32)
    return np.concatenate([edges, Source(3).numbers("float32", 10007, scale=40.0), edges])


def turns() -> tuple[Array, Array]:
    """Positions, and frequencies."""
    source = Source(5)
    positions, some = source.whole(1 << 20, 50), np.abs(source.numbers("float32", 31))
    return positions, some * some * some * some  # a power has other bits on other machines


def small() -> tuple[Array, Plain]:
    """Rows, and a matrix of bfloat16, whose products and sums are around the smallest normal number."""
    source, scale = Source(13), 2.0**-62
    rows = source.numbers("float32", 9, 75, scale=scale)
    return rows, Plain(source.numbers("bfloat16", 21, 75, scale=scale))


def rows_of(form: str) -> tuple[Array, Array]:
    """Panels of a form, of 40 outputs, and ids of rows."""
    return Source(len(form) + 1).matrix(form, "float32", 512, 40).panels, Source(9).whole(40, 7)


if __name__ == "__main__":
    main()
