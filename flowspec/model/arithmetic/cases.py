"""The fixed cases by which a build of `canonical.c` is tried: small layers with numbers that follow from a
seed.

Each is a program as slices have them, with what a request holds. The numbers come from bits of a generator
that numpy promises never to change. What comes out was computed by the definition (`plain.py`); `golden.json`
has its hashes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import (
    NORMS,
    Convolution,
    DeltaRule,
    Dense,
    Heads,
    LayerSpec,
    Mixture,
    Norm,
)
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import FUNCTIONS, Cache, Call, Library, Part, address
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL, int8_panels
from flowspec.model.arithmetic.plain import BLOCK, LANES
from flowspec.model.parts import (
    Digits,
    Linear,
    Matrix,
    NormPart,
    Packed,
    Plain,
    RouterPart,
    Stack,
    Table,
)
from flowspec.model.program import HOW_CHOSEN, Arithmetic, Room, program_of

Array = npt.NDArray[Any]
KINDS = ("float32", "bfloat16", "float16")
ROW_COUNTS = (1, 2, 3, 5, 17, 32)
"""How many run at once: kernels were seen that are right for some counts only."""
CACHED = 70
"""Positions that all rows see, more than a block of them."""
HEADS, KV_HEADS, EXPERTS, TOKENS = 4, 2, 6, 40
CONVOLUTION = Convolution(length=3)
_PLAIN = LayerSpec(heads=HEADS, kv=Heads(count=KV_HEADS, width=24), source=0)
DELTA = DeltaRule(key_heads=2, heads=4, key_width=16, value_width=20, length=4)


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


def stored(x: Array, kind: str) -> Array:
    """Float32 as numbers of a kind; those of bfloat16 are their bits, cut off."""
    if kind == "bfloat16":
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(kind)


@dataclass(slots=True, kw_only=True)
class Case:
    """`cached`: the kind of keys and values. `parts` are of a layer of so many `hidden` numbers a row."""

    name: str
    spec: LayerSpec
    how: Norm
    kind: str
    cached: str
    hidden: int
    parts: dict[str, Any] = field(default_factory=dict)


class _Layer:
    """Fills in the parts of a case's layer."""

    def __init__(self, case: Case, matrices: str) -> None:
        self._case, self._matrices, self._source = case, matrices, Source(len(case.name) + case.hidden)

    def fill(self, neurons: int) -> None:
        case, dense, hidden = self._case, self._case.spec.dense, self._case.hidden
        assert dense is not None
        parts, width = case.parts, case.spec.kv.width
        queries, keys = HEADS * width, KV_HEADS * width
        around = dense.norm_before_attention, dense.norm_after_attention
        norms = *around, dense.norm_before_mlp, dense.norm_after_mlp
        parts |= {name: self._norm(hidden) for name in norms if name}
        if dense.mixer == CONVOLUTION:
            parts["conv.in_proj"] = self._linear(hidden, 3 * hidden)
            parts["conv.out_proj"] = self._linear(hidden, hidden)
            parts["conv.taps"] = self._plain(CONVOLUTION.length, hidden)
            parts["conv.bias"] = self._plain(hidden)
        elif dense.mixer == DELTA:
            values, heads = DELTA.heads * DELTA.value_width, DELTA.heads
            mixed = 2 * DELTA.key_heads * DELTA.key_width + values
            sizes = {"in_proj_qkv": mixed, "in_proj_b": heads, "in_proj_a": heads, "in_proj_z": values}
            parts |= {f"linear_attn.{name}": self._linear(hidden, size) for name, size in sizes.items()}
            parts["linear_attn.out_proj"] = self._linear(values, hidden)
            parts["linear_attn.norm"] = self._norm(DELTA.value_width)
            parts["linear_attn.taps"] = self._plain(DELTA.length, mixed)
            parts["linear_attn.rates"] = self._plain(2 * heads)
        elif self._matrices == "digits":
            parts["self_attn.qkv_proj"] = self._linear(hidden, queries + 2 * keys)
            parts["self_attn.sinks"] = self._plain(HEADS, scale=3.0)
        else:
            sizes = {"q_proj": queries * (1 + dense.is_gated), "k_proj": keys, "v_proj": keys}
            parts |= {f"self_attn.{name}": self._linear(hidden, size) for name, size in sizes.items()}
        parts["self_attn.o_proj"] = self._linear(queries, hidden)
        for name, size in (("q", queries), ("k", keys)):
            parts[f"self_attn.{name}_norm"] = self._norm(width if dense.query_norm == "head" else size)
        parts["self_attn.v_norm"] = self._norm(width)
        if dense.mixture is None or dense.mixture.is_parallel:
            parts |= self._mlp("mlp", neurons)
        if dense.mixture is not None:
            self._fill_mixture(dense.mixture, neurons)
        if dense.input_width:
            width = dense.input_width
            table = self._source.numbers(case.kind, TOKENS, width)
            parts |= {
                "layer_input.table": Table(matrix=Plain(table), factor=1.5),
                "layer_input.projection": self._linear(hidden, width),
                "layer_input.norm": self._norm(width),
                "per_layer_input_gate": self._linear(hidden, width),
                "per_layer_projection": self._linear(width, hidden),
                "post_per_layer_input_norm": self._norm(hidden),
                "layer_scalar": 0.75,
            }

    def _mlp(self, name: str, neurons: int) -> dict[str, Any]:
        hidden = self._case.hidden
        down = {f"{name}.down_proj": self._linear(neurons, hidden)}
        if self._matrices == "digits":
            return {f"{name}.gate_up_proj": self._linear(hidden, 2 * neurons), **down}
        sizes = {f"{name}.{each}_proj": self._linear(hidden, neurons) for each in ("gate", "up")}
        return {**sizes, **down}

    def _fill_mixture(self, mixture: Mixture, neurons: int) -> None:
        hidden, parts, name = self._case.hidden, self._case.parts, "" if mixture.is_parallel else "mlp."
        is_scaled = mixture.router == "scaled softmax to 1"
        parts[f"{name}router"] = RouterPart(
            weights=self._source.numbers(self._case.kind, EXPERTS, hidden),
            bias=self._own(EXPERTS) if mixture.router == "softmax of chosen" else None,
            correction=self._plain(EXPERTS) if mixture.router == "sigmoid" else None,
            norm=self._norm(hidden) if is_scaled else None,
            factor=0.25,
            scales=self._plain(EXPERTS) if is_scaled else None,
        )
        sizes = {"gate_up_proj": (hidden, 2 * neurons), "down_proj": (neurons, hidden)}
        for each, (inputs, outputs) in sizes.items():
            linears = tuple(self._linear(inputs, outputs, has_bias=False) for _ in range(EXPERTS))
            parts[f"{name}experts.{each}"] = Stack(linears=linears, bias=self._own(EXPERTS, outputs))
        if mixture.is_shared_gated:
            parts |= self._mlp("mlp.shared_expert", neurons)
            parts["mlp.shared_expert_gate"] = self._linear(hidden, 1)
        elif mixture.has_shared:
            parts |= self._mlp("mlp.shared_experts", neurons)
        if mixture.is_parallel:
            inner = (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
            parts |= {each: self._norm(hidden) for each in inner}

    def _plain(self, *shape: int, scale: float = 1.0) -> Any:
        return self._source.numbers("float32", *shape, scale=scale)

    def _own(self, *shape: int) -> Any:
        return self._source.numbers(self._case.kind, *shape)

    def _norm(self, width: int) -> NormPart:
        return NormPart(weights=self._own(width), eps=1e-6)

    def _linear(self, inputs: int, outputs: int, has_bias: bool = True) -> Linear:
        matrix = self.matrix(inputs, outputs)
        return Linear(inputs=inputs, matrices=(matrix,), bias=self._own(outputs) if has_bias else None)

    def matrix(self, inputs: int, outputs: int) -> Matrix:
        source, kind, how = self._source, self._case.kind, self._matrices
        scale = 2 * inputs**-0.5
        if how in FORMS:
            form = FORMS[how]
            shape = -(-outputs // PANEL), -(-inputs // form.unit), form.unit_bytes
            panels = source.whole(256, *shape).astype(np.uint8)
            ends = panels[..., form.groups * (form.level_bytes + form.scale_bytes) :]
            if form.has_exponents:
                ends[:] = 120 + ends % 4
            else:
                shape = *ends.shape[:2], ends.shape[2] // 2
                ends[:] = source.numbers("float16", *shape, scale=scale / 2**form.bits).view(np.uint8)
            return Packed(how, panels, outputs)
        if how == "digits":
            levels = (source.whole(255, outputs, inputs) - 127).astype(np.int8)
            scales = source.numbers("float32", -(-outputs // PANEL) * PANEL, scale=scale / 127)
            return Digits(int8_panels(levels), scales, outputs)
        return Plain(source.numbers(kind, outputs, inputs, scale=scale))


def cases(has_pairs: bool) -> Iterator[Case]:
    others = {"norm_before_attention": "first", "norm_before_mlp": "second"}
    for number, kind in enumerate(KINDS):
        yield _case("linear", kind, "linear", {**others, "query_norm": "head", "clip": 1.5})
        after = {"norm_before_attention": "first", "norm_after_attention": "second", "norm_before_mlp": ""}
        more = {"cap": 5.0, "has_sinks": True, "added_scale": 0.75, "activation": "gelu_tanh"}
        yield _case("digits", kind, "digits", {**after, **more})
        gated = {"query_norm": "width", "is_gated": True}
        yield _case("gated", kind, "linear", {**others, **gated}, cached="int8")
        yield _case("convolution", kind, "Q8_0", {**others, "mixer": CONVOLUTION})
        yield _case("delta", kind, "linear", {**others, "mixer": DELTA})
        for place, routers in enumerate(HOW_CHOSEN):
            mixture = Mixture(
                router=routers[-1] if place != 1 else routers[0],
                experts=EXPERTS,
                chosen=2,
                is_normed=number != 2,
                factor=1.5,
                groups=2 if place == 3 else 1,
                has_shared=place in (0, 3),
                is_shared_gated=place == 0,
                limit=0.7 if place == 2 else 0.0,
                slope=1.7,
            )
            stacks = ("linear", "digits", "Q4_0", "MXFP4")[(place + number) % 4]
            yield _case(f"experts by {routers[0]}", kind, stacks, {**others, "mixture": mixture})
        parallel = Mixture(router="scaled softmax to 1", experts=EXPERTS, chosen=3, is_parallel=True)
        inner = {"query_norm": "head", "has_value_norm": True, "input_width": 24, "has_factor": True}
        yield _case("parallel", kind, "Q4_0", {**others, **inner, "mixture": parallel})
        for form in FORMS:
            yield _case(form, kind, form, {**others, "is_turned": False}, width=64)
    if has_pairs:
        yield _case("pairs", "bfloat16", "pairs", others)


def _case(
    name: str, kind: str, matrices: str, dense: dict[str, Any], cached: str = "", width: int = 24
) -> Case:
    given = Dense(**{"scale": 0.25, "activation": "silu", **dense})
    held = {"window": given.mixer.length} if given.mixer is not None else {}
    if given.mixer is not None:
        hidden = 2 * DELTA.key_heads * DELTA.key_width + DELTA.heads * (DELTA.value_width + 2)
        held["inputs"] = hidden if given.mixer == DELTA else HEADS * width
        if given.mixer == DELTA:
            held["state"] = DELTA.heads * DELTA.key_width * DELTA.value_width
    spec = LayerSpec(heads=HEADS, kv=Heads(count=KV_HEADS, width=width), source=0, dense=given, **held)
    how = NORMS[(KINDS.index(kind) + len(name)) % len(NORMS)]
    made = Case(
        name=f"{name} {kind}", spec=spec, how=how, kind=kind, cached=cached or kind, hidden=HEADS * width
    )
    _Layer(made, matrices).fill(neurons=256 if width == 64 else 90)
    return made


@dataclass(slots=True, kw_only=True)
class Given:
    """What rows are run with. Row r stands behind row r - 2, and behind what is cached; each row sees its
    path. `hidden` `[rows, numbers]`; keys, values and the steps between their levels as caches have them."""

    hidden: Array
    angles: tuple[Array, Array]
    slots: Array
    seen: Array
    order: Array
    ends: Array
    paths: Array
    keys: Array
    values: Array
    key_steps: Array
    value_steps: Array
    inputs: Array
    lines: Array
    states: Array
    steps: Array
    tokens: Array
    embedding: Array

    @property
    def changed(self) -> tuple[Array, ...]:
        held = self.keys, self.values, self.key_steps, self.value_steps
        return (self.hidden, *held, self.inputs, self.states[0])

    def addresses(self, *names: str) -> dict[str, int]:
        return {name: address(getattr(self, name)) for name in names}


def given_to(case: Case, rows: int) -> Given:
    """The same rows' numbers whatever their count."""
    source, spec = Source(7), case.spec
    width, most, high = spec.kv.width, max(ROW_COUNTS), CACHED + max(ROW_COUNTS)
    room = -(-high // LANES) * LANES
    slots = np.argsort(source.whole(1 << 20, high), kind="stable").astype(np.int64)
    hidden = source.numbers(case.kind, most, case.hidden, scale=3.0)
    angles = tuple(source.numbers(case.kind, 1, most, width // 4 * 2) for _ in range(2))
    is_levels = case.cached == "int8"
    held, scale = ("float32", 100.0) if is_levels else (case.cached, 1.0)
    keys = source.numbers(held, KV_HEADS, room // LANES, width, LANES, scale=scale)
    values = source.numbers(held, KV_HEADS, room, -(-width // LANES) * LANES, scale=scale)
    groups = -(-width // GROUP)
    paths = np.full((rows, high), -1, np.int64)
    for row in range(rows):
        paths[row, :CACHED] = slots[:CACHED]
        own = slice(CACHED + row % 2, CACHED + row + 1, 2)
        paths[row, own] = slots[own]
    seen = np.zeros((rows, high), np.uint8)
    for row in range(rows):
        seen[row, paths[row][paths[row] >= 0]] = 1
    ends = np.append(np.arange(BLOCK, CACHED + rows, BLOCK), CACHED + rows).astype(np.int32)
    length = spec.window or 1
    lines = np.stack([path[path >= 0][-length:] for path in paths])
    places = np.arange(rows)  # the first row's state is where they begin from then on
    steps = np.stack([places, np.maximum(places - 2, 0), places, places], 1).astype(np.int32)
    return Given(
        hidden=hidden[:rows].copy(),
        angles=(angles[0][:, :rows].copy(), angles[1][:, :rows].copy()),
        slots=slots[CACHED : CACHED + rows].copy(),
        seen=seen,
        order=slots[: CACHED + rows].astype(np.int32),
        ends=ends,
        paths=paths,
        keys=keys.astype(np.int8) if is_levels else keys,
        values=values.astype(np.int8) if is_levels else values,
        key_steps=source.numbers("float16", KV_HEADS, room // LANES, groups, LANES, scale=0.01),
        value_steps=source.numbers("float16", KV_HEADS, room, groups, scale=0.01),
        inputs=source.numbers(case.kind, room, max(1, spec.inputs)),
        lines=np.ascontiguousarray(lines),
        states=source.numbers("float32", rows, DELTA.heads, DELTA.key_width, DELTA.value_width),
        steps=steps,
        tokens=source.whole(TOKENS, most)[:rows].copy(),
        embedding=source.numbers(case.kind, most, case.hidden)[:rows].copy(),
    )


class Runner:
    """Runs cases by a library."""

    def __init__(self, library: Library) -> None:
        self._library, self._room = library, Room(library)

    def run(self, case: Case, rows: int, threads: int) -> str:
        """The digest of all that changes."""
        given, kind, is_levels = given_to(case, rows), KINDS.index(case.kind), case.cached == "int8"
        how = Arithmetic(kind, case.how, "pairs" if case.name.startswith("pairs") else "linear")
        program = program_of(case.parts, case.spec, how)
        cache = Cache(
            **given.addresses("keys", "values", "inputs", *("key_steps", "value_steps") * is_levels),
            state=address(given.states),
            slots=given.values.shape[1],
            inputs_width=given.inputs.shape[1],
            kind=compiled.KINDS[case.cached],
        )
        part = Part(
            **given.addresses("slots", "seen", "order", "ends", "lines", "steps"),
            **dict.fromkeys(("rows", "nodes", "steps_count", "places"), rows),
            cache=ctypes.addressof(cache),
            high=given.seen.shape[1],
            blocks=len(given.ends),
        )
        cosine, sine = given.angles
        call = Call(
            **given.addresses("hidden", "tokens", "embedding"),
            cosine=address(cosine),
            sine=address(sine),
            angles=cosine.shape[2],
            parts=ctypes.addressof(part),
            parts_count=1,
            rows=rows,
            between_embeddings=case.hidden,
            threads=threads,
        )
        self._room.run(program.pointer, call)
        return digest(given.changed)

    def functions(self) -> Iterator[tuple[str, str]]:
        """The names and digests of what is called beside layers."""
        for kind in KINDS:
            given = special(kind)
            for number, name in enumerate(FUNCTIONS):
                found = np.empty_like(given)
                where = address(given), KINDS.index(kind), given.size, number, None, address(found)
                self._library.function(*where)
                yield f"{name} {kind}", digest((found,))
            positions, frequencies = turns()
            cosine, sine = (np.empty((positions.size, 2 * frequencies.size), given.dtype) for _ in range(2))
            of_rows = address(positions), positions.size, address(frequencies), frequencies.size
            self._library.angles(*of_rows, 1.25, KINDS.index(kind), address(cosine), address(sine))
            yield f"angles {kind}", digest((cosine, sine))
        for name, form in FORMS.items():
            panels, ids = rows_of(name)
            rows = np.empty((ids.size, panels.shape[1] * form.unit), np.float32)
            matrix = address(panels), form.number, rows.shape[1]
            self._library.packed_rows(*matrix, address(ids), ids.size, address(rows))
            yield f"rows of {name}", digest((rows,))


def special(kind: str) -> Array:
    """Numbers with those at which functions change: in front, where several vectors are computed together,
    and at the end."""
    edges = np.array(
        [0.0, -0.0, 1e-40, -86.0, -86.1, 88.0, 89.0, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32
    )
    with np.errstate(over="ignore"):
        return stored(np.concatenate([edges, Source(3).numbers("float32", 10007, scale=40.0), edges]), kind)


def turns() -> tuple[Array, Array]:
    """Positions, and frequencies."""
    source = Source(5)
    positions, some = source.whole(1 << 20, 50), np.abs(source.numbers("float32", 31))
    return positions, some * some * some * some  # a power has other bits on other machines


def rows_of(form: str) -> tuple[Array, Array]:
    """Panels of a form, of 40 outputs, and ids of rows."""
    case = Case(name=form, spec=_PLAIN, how=NORMS[0], kind="float32", cached="float32", hidden=1)
    return _Layer(case, form).matrix(512, 40).panels, Source(9).whole(40, 7)


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
