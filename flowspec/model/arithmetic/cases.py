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

from flowspec.core.protocol.model_spec import NORMS, Convolution, DeltaRule, Dense, Heads, LayerSpec, Mixture
from flowspec.errors import first_line
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import FUNCTIONS, Cache, Call, Library, Part, address
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL
from flowspec.model.arithmetic.plain import BLOCK, LANES
from flowspec.model.operations import HOW_CHOSEN, Room, Rows, operations_of
from flowspec.model.parts import Linear, Matrix, NormPart, Packed, Plain, RouterPart, Stack, Table
from flowspec.model.program import Arithmetic, Place, program_of, rows_program

Array = npt.NDArray[Any]
GOLDEN = Path(__file__).with_name("golden.json")
ORPHAN_S = 240
"""After so long without a word a child ends: what hangs was given up long before."""
KINDS = ("float32", "bfloat16", "float16")
ROW_COUNTS = (1, 2, 3, 5, 17, 33)
"""How many run at once: kernels were seen that are right for some counts only, and many are divided."""
CACHED = 70
"""Positions that all rows see, more than a block of them."""
HEADS, KV_HEADS, EXPERTS, TOKENS = 4, 2, 6, 40
CONVOLUTION = Convolution(length=3)
DELTA = DeltaRule(key_heads=2, heads=4, key_width=16, value_width=20, length=4)
HELD: dict[Any, dict[str, Any]] = {
    None: {},
    CONVOLUTION: {"window": CONVOLUTION.length, "inputs": HEADS * 24},
    DELTA: {"window": DELTA.length, "inputs": DELTA.inputs, "state": DELTA.value_numbers * DELTA.key_width},
}
"""By what is in the place of attention, what a layer of rows of 96 numbers holds of tokens."""
MIXTURES: tuple[dict[str, Any], ...] = (
    {"has_shared": True, "is_shared_gated": True},
    {},
    {"limit": 0.7},
    {"has_shared": True, "groups": 2},
)
"""What is otherwise where experts are chosen in each way."""
FINE = ("qkv_proj", "v_proj", "in_proj", "in_proj_qkv")
Size = int | tuple[int, int] | list[int]
"""The width of a norm, the inputs and outputs of a linear layer, or the shape of numbers in float32."""


def main() -> None:
    try:
        library = Library(Path(sys.argv[1]))
    except (OSError, AttributeError) as error:
        say(fault=f"cannot be loaded: {first_line(error)}", may_pass=True)
        return
    golden = json.loads(GOLDEN.read_text("utf-8"))
    for place, (name, found, threads) in enumerate(results(library)):
        say(share=round(min(1.0, place / (2 * len(golden))), 3))
        if golden[name] != found:
            say(fault=f"differs from its definition in {name}, with {threads} threads")
            return
    say(fault="")


def say(**word: object) -> None:
    """A line for the parent."""
    signal.alarm(ORPHAN_S)
    print(json.dumps(word), flush=True)


def results(library: Library) -> Iterator[tuple[str, str, int]]:
    """The names of cases, the digests of what a library makes of them, and by how many threads."""
    for name, found in functions(library):
        yield name, digest(found), 1
    room = Room(library)
    for case in cases():
        for rows in ROW_COUNTS:
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                yield f"{case.name} {rows}", digest(layer(case, rows, threads, room)), threads


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

    def matrix(self, how: str, kind: str, inputs: int, outputs: int) -> Matrix:
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
        own = Dense(**{"scale": 0.25, "activation": "silu", **dense})
        kv = Heads(count=KV_HEADS, width=width)
        self.spec = LayerSpec(heads=HEADS, kv=kv, source=0, dense=own, **HELD[own.mixer])
        self.name, self.kind, self.cached = f"{name} {kind}", kind, cached or kind
        self.how, self.hidden = NORMS[(KINDS.index(kind) + len(name)) % len(NORMS)], HEADS * width
        self.is_source = name == "parallel"
        self.parts: dict[str, Any] = {}
        self._matrices, self._source = matrices, Source(len(self.name) + self.hidden)
        self._fill(own, width, neurons=256 if width == 64 else 90)

    def _fill(self, dense: Dense, width: int, neurons: int) -> None:
        """Numbers are drawn in this order."""
        hidden, queries, keys = self.hidden, HEADS * width, KV_HEADS * width
        around = dense.norm_before_attention, dense.norm_after_attention
        norms = *around, dense.norm_before_mlp, dense.norm_after_mlp
        self._add("", **dict.fromkeys(filter(None, norms), hidden))
        if dense.mixer == CONVOLUTION:
            self._add("conv.", in_proj=(hidden, 3 * hidden), out_proj=(hidden, hidden))
            self._add("conv.", taps=[CONVOLUTION.length, hidden], bias=[hidden])
        elif dense.mixer == DELTA:
            mixed, heads, values = DELTA.inputs - 2 * DELTA.heads, DELTA.heads, DELTA.value_numbers
            self._add("linear_attn.", in_proj_qkv=(hidden, mixed), in_proj_b=(hidden, heads))
            self._add("linear_attn.", in_proj_a=(hidden, heads), in_proj_z=(hidden, values))
            self._add("linear_attn.", out_proj=(values, hidden), norm=DELTA.value_width)
            self._add("linear_attn.", taps=[DELTA.length, mixed], rates=[2 * heads])
        elif dense.is_joined:
            self._add("self_attn.", qkv_proj=(hidden, queries + 2 * keys))
            self.parts["self_attn.sinks"] = self._source.numbers("float32", HEADS, scale=3.0)
        else:
            self._add("self_attn.", q_proj=(hidden, queries * (1 + dense.is_gated)))
            self._add("self_attn.", k_proj=(hidden, keys), v_proj=(hidden, keys))
        normed = (width, width) if dense.query_norm == "head" else (queries, keys)
        self._add("self_attn.", o_proj=(queries, hidden), q_norm=normed[0], k_norm=normed[1], v_norm=width)
        if dense.mixture is None or dense.mixture.is_parallel:
            self._add_mlp("mlp.", neurons, dense.is_joined)
        if dense.mixture is not None:
            self._add_mixture(dense.mixture, neurons, dense.is_joined)
        if size := dense.input_width:
            how = "Q8_0" if self.kind == "bfloat16" else "linear"
            table = self._source.matrix(how, self.kind, size, TOKENS)
            self.parts |= {"layer_input.table": Table(matrix=table, factor=1.5), "layer_scalar": 0.75}
            self._add("layer_input.", projection=(hidden, size), norm=size)
            self._add("per_layer_", input_gate=(hidden, size), projection=(size, hidden))
            self._add("", post_per_layer_input_norm=hidden)

    def _add_mlp(self, name: str, neurons: int, is_joined: bool) -> None:
        self._add(name, down_proj=(neurons, self.hidden))
        if is_joined:
            self._add(name, gate_up_proj=(self.hidden, 2 * neurons))
        else:
            self._add(name, gate_proj=(self.hidden, neurons), up_proj=(self.hidden, neurons))

    def _add_mixture(self, mixture: Mixture, neurons: int, is_joined: bool) -> None:
        hidden, name = self.hidden, "" if mixture.is_parallel else "mlp."
        is_scaled = mixture.router == "scaled softmax to 1"
        self.parts[f"{name}router"] = RouterPart(
            weights=self._source.numbers("float32", EXPERTS, hidden),
            bias=self._source.numbers("float32", EXPERTS) if mixture.router == "softmax of chosen" else None,
            correction=self._source.numbers("float32", EXPERTS) if mixture.router == "sigmoid" else None,
            norm=self._part(hidden) if is_scaled else None,
            factor=0.25,
            scales=self._source.numbers("float32", EXPERTS) if is_scaled else None,
        )
        for leaf, inputs, outputs in (("gate_up", hidden, 2 * neurons), ("down", neurons, hidden)):
            matrices = [self._matrix(inputs, outputs) for _ in range(EXPERTS)]
            linears = tuple(Linear(inputs=inputs, matrices=(matrix,)) for matrix in matrices)
            bias = self._source.numbers("float32", EXPERTS, outputs)
            self.parts[f"{name}experts.{leaf}_proj"] = Stack(linears=linears, bias=bias)
        if mixture.has_shared:
            name = "mlp.shared_expert." if mixture.is_shared_gated else "mlp.shared_experts."
            self._add_mlp(name, neurons, is_joined)
        if mixture.is_shared_gated:
            self._add("mlp.", shared_expert_gate=(hidden, 1))
        if mixture.is_parallel:
            self._add("", post_feedforward_layernorm_1=hidden)
            self._add("", pre_feedforward_layernorm_2=hidden, post_feedforward_layernorm_2=hidden)

    def _add(self, stem: str, **sizes: Size) -> None:
        self.parts |= {stem + name: self._part(size, name in FINE) for name, size in sizes.items()}

    def _part(self, size: Size, is_fine: bool = False) -> Any:
        if isinstance(size, list):
            return self._source.numbers("float32", *size)
        if isinstance(size, int):
            return NormPart(weights=self._source.numbers("float32", size), eps=1e-6)
        inputs, outputs = size
        matrix, bias = self._matrix(*size), self._source.numbers("float32", outputs)
        return Linear(inputs=inputs, matrices=(matrix,), bias=bias, is_fine=is_fine)

    def _matrix(self, inputs: int, outputs: int) -> Matrix:
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
        yield Case("convolution", kind, "Q8_0", {**others, "mixer": CONVOLUTION})
        yield Case("delta", kind, "linear", {**others, "mixer": DELTA})
        for place, ((router, *_), more) in enumerate(zip(HOW_CHOSEN, MIXTURES, strict=True)):
            own: dict[str, Any] = {"router": router, "is_normed": number != 2, **more}
            mixture = Mixture(experts=EXPERTS, chosen=2, factor=1.5, slope=1.7, **own)
            stacks = ("linear", "Q8_0", "Q4_0", "MXFP4")[(place + number) % 4]
            joined = {"mixture": mixture, "is_joined": stacks == "Q8_0"}
            yield Case(f"experts by {router}", kind, stacks, {**others, **joined})
        parallel = Mixture(router="scaled softmax to 1", experts=EXPERTS, chosen=3, is_parallel=True)
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


def layer(case: Case, rows: int, threads: int, room: Room) -> tuple[Array, ...]:
    """All that changes where a case's layer runs."""
    given, how = given_to(case, rows), Arithmetic(case.kind, case.how)
    program = program_of(case.parts, case.spec, how, Place(is_source=case.is_source))

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
    room.run(operations_of(program), call)
    held = given.keys, given.values, given.key_steps, given.value_steps
    return given.hidden, *held, given.inputs, given.states[0]


# ---------------------------------------------------------------------------- what is called beside them


def functions(library: Library) -> Iterator[tuple[str, tuple[Array, ...]]]:
    """The names of cases, and what a library makes of them."""
    given = special()
    for function, name in enumerate(FUNCTIONS):
        found = np.empty_like(given)
        library.function(address(given), given.size, function, None, address(found))
        yield name, (found,)
    positions, frequencies = turns()
    cosine, sine = (np.empty((positions.size, 2 * frequencies.size), np.float32) for _ in range(2))
    of_rows = address(positions), positions.size, address(frequencies), frequencies.size
    library.angles(*of_rows, 1.25, address(cosine), address(sine))
    yield "angles", (cosine, sine)
    x, small_one = small()
    linear = Linear(inputs=x.shape[1], matrices=(small_one,))
    program = rows_program(Arithmetic("float32", NORMS[0]), None, linear)
    yield "small pairs", (Rows(Room(library), program)(x),)
    for name, form in FORMS.items():
        panels, ids = rows_of(name)
        rows = np.empty((ids.size, panels.shape[1] * form.unit), np.float32)
        matrix = address(panels), form.number, rows.shape[1]
        library.packed_rows(*matrix, address(ids), ids.size, address(rows))
        yield f"rows of {name}", (rows,)


def special() -> Array:
    """Numbers with those at which functions change: in front, where several vectors are computed together,
    and at the end."""
    edges = np.array(
        [0.0, -0.0, 1e-40, -86.0, -86.1, 88.0, 89.0, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32
    )
    return np.concatenate([edges, Source(3).numbers("float32", 10007, scale=40.0), edges])


def turns() -> tuple[Array, Array]:
    """Positions, and frequencies."""
    source = Source(5)
    positions, some = source.whole(1 << 20, 50), np.abs(source.numbers("float32", 31))
    return positions, some * some * some * some  # a power has other bits on other machines


def small() -> tuple[Array, Plain]:
    """Rows, and a matrix of bfloat16, whose products and sums are around the smallest normal number."""
    source, scale = Source(13), 2.0**-62
    rows, weights = (
        source.numbers("float32", 9, 75, scale=scale),
        source.numbers("bfloat16", 21, 75, scale=scale),
    )
    return rows, Plain(weights)


def rows_of(form: str) -> tuple[Array, Array]:
    """Panels of a form, of 40 outputs, and ids of rows."""
    return Source(len(form) + 1).matrix(form, "float32", 512, 40).panels, Source(9).whole(40, 7)


if __name__ == "__main__":
    main()
