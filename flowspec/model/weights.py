"""Which tensors of a checkpoint make up a slice's parameters, and reading just those, one by one, each to its
place.

A parameter is one tensor, or several that are joined in it (a mixture's experts). It is allocated once and
filled in place from the memory-mapped files, so a device never holds its slice twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, FILED, is_packed
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import DTYPES, in_room, room
from flowspec.model.arithmetic.packed import PANEL, Panels
from flowspec.model.engines import Engine
from flowspec.model.families import FAMILIES, Family
from flowspec.model.gguf.tensors import STORED_FADING
from flowspec.model.joined_tensors import TABLE
from flowspec.model.layer import (
    MATRICES,
    Layer,
    Linear,
    Matrix,
    NormPart,
    Parameter,
    Plain,
    Role,
)
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.tensors import Tensors

Owner = int | str
"""A layer, by its number in the model, or one of these."""
EMBEDDING, NORM, LM_HEAD = "embedding", "norm", "lm_head"
SliceParts = dict[Owner, Any]
"""What a slice is computed by, by owner: the parts of its layers, the embedding's matrix, the final norm and
`lm_head`."""
_OF_KEYS_AND_VALUES = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Layers `[first, end)` of `count`."""

    first: int
    end: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.count

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Of weights: the first slice has the embedding, the last one the final norm and `lm_head`."""
        ends = (NORM, LM_HEAD) if self.is_last else ()
        return (*((EMBEDDING,) if self.is_first else ()), *range(self.first, self.end), *ends)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a slice, and by the `tensors` of the checkpoint that it is made of the part of it that
    each fills; two that are tied have the same. One that `is_packed` is held in levels, not as numbers."""

    owner: Owner
    name: str
    shape: tuple[int, ...]
    role: Role
    parts: Mapping[str, tuple[int | slice, ...]]
    is_packed: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self.parts)


Store = Callable[[Weight, Callable[[], Panels]], Panels]
"""Gives the rounded matrix that is kept of a parameter of the same content; else what the function makes,
which is kept if there is room."""


def held_bytes(part: Any) -> int:
    """Of all arrays of a part, or of several; one that is in several places counts once."""
    distinct = {id(each): each for each in arrays_of(part)}
    return sum(int(each.nbytes) for each in distinct.values())


def arrays_of(part: Any) -> Iterator[Any]:
    """Those that a part, a matrix, or several of them, hold."""
    if hasattr(part, "nbytes"):
        yield part
    elif not isinstance(part, NormPart) or part.has_weights:
        inner = part.values() if isinstance(part, Mapping) else part
        if not isinstance(part, Mapping | tuple):
            inner = (getattr(part, name) for name in getattr(part, "__slots__", ()))
        for each in inner:
            yield from arrays_of(each)


# ------------------------------------------------------------------------------------------- names


def family_named(spec: ModelSpec) -> Family:
    """Raises `InputError` where this version knows none of that name."""
    family = FAMILIES.get(spec.family)
    if family is None:
        raise InputError(f"expected a model of {', '.join(FAMILIES)}, got the family {spec.family!r:.40}")
    return family


def layer_shape(spec: ModelSpec, layer: int, tensors: Tensors) -> Layer:
    """The parts of a layer of a model whose checkpoint has these tensors."""
    family, own = family_named(spec), spec.layers[layer]
    prefix = f"{family.root(tensors).prefix}layers.{layer}."
    return Layer(
        spec=own,
        family=family,
        hidden=spec.hidden,
        is_own=own.source == layer,
        has_fading=prefix + STORED_FADING in tensors,
        table_rows=spec.layer_input_tokens,
    )


def weights_of(spec: ModelSpec, span: Span, tensors: Tensors) -> Iterator[Weight]:
    """Every parameter of a slice; two that are tied have the same sources."""
    family = family_named(spec)
    prefix, table = family.root(tensors).prefix, (spec.vocabulary, spec.hidden)
    embedding, lm_head = end_names(spec, tensors)
    if span.is_first:
        yield Weight(EMBEDDING, "weight", table, "table", {embedding: ()})
    for layer in range(span.first, span.end):
        for name, parameter in layer_shape(spec, layer, tensors).parameters().items():
            parts = _parts(family, tensors, f"{prefix}layers.{layer}.", name, parameter)
            yield Weight(layer, name, parameter.shape, parameter.role, parts)
    if span.is_last:
        yield Weight(NORM, "weight", (spec.hidden,), "vector", {f"{prefix}{family.last_norm}.weight": ()})
        yield Weight(LM_HEAD, "weight", table, "matrix", {lm_head: ()})


def end_names(spec: ModelSpec, tensors: Tensors) -> tuple[str, str]:
    """The tensors that embed tokens and of `lm_head`; where the two are tied and the checkpoint has but one,
    that for both. `lm_head`'s own counts if there is one, as for transformers, whatever the config says."""
    root = family_named(spec).root(tensors)
    names = root.prefix + "embed_tokens.weight", root.lm_head
    there = [name for name in names if name in tensors]
    if len(there) == 2 or not spec.is_tied:
        return names
    only = there[0] if there else names[0]
    return only, only


def _parts(
    family: Family, tensors: Tensors, prefix: str, name: str, parameter: Parameter
) -> Mapping[str, tuple[int | slice, ...]]:
    """Of a layer's parameter: itself, or expert by expert those that are stacked in it `[experts, rows,
    columns]`."""
    ways = family.ways_to_stack(name)
    if prefix + name in tensors or not ways:
        own = name if prefix + name in tensors else family.renamed.get(name, name)
        return {prefix + own: ()}
    joined = next((way for way in ways if prefix + way[0].format(0) in tensors), ways[0])
    rows = parameter.shape[1] // len(joined)
    return {
        prefix + each.format(expert): (expert, slice(place * rows, (place + 1) * rows))
        for expert in range(parameter.shape[0])
        for place, each in enumerate(joined)
    }


def weights_in(spec: ModelSpec, span: Span, tensors: Tensors, dtype: str) -> list[Weight]:
    """Every parameter of a slice, as it is held in this precision.

    Raises `InputError` for a matrix that is to stay as its file packs it, and is not packed there, or in a
    form that layers do not compute with.
    """
    found = []
    for weight in weights_of(spec, span, tensors):
        is_multiplied, loose = weight.role in ("matrix", "experts"), ""
        may_be_packed = is_multiplied or (dtype == FILED and weight.role == "table")
        if dtype == FILED and may_be_packed:
            loose = next((name for name in weight.tensors if not tensors.form(name)), "")
        if loose and is_multiplied:
            raise InputError(
                f"{tensors.files_of(loose)[0]} is not packed in a form that layers compute with; "
                "use --dtype bfloat16, int8 or int4"
            )
        found.append(replace(weight, is_packed=is_packed(dtype) and may_be_packed and not loose))
    return found


def weight_bytes(weights: Sequence[Weight], tensors: Tensors, dtype: str) -> int:
    """What the parameters will take once they are loaded; tied ones count once, unless one of them is
    packed."""
    sizes: dict[tuple[Any, ...], int] = {}
    for weight in weights:
        kind = ACTIVATIONS[dtype] if weight.role in MATRICES else "float32"
        if weight.is_packed and dtype == FILED:
            sizes |= {(name,): tensors.packed_bytes(name) for name in weight.tensors}
        elif weight.is_packed:
            sizes[weight.owner, weight.name] = stack_bytes(weight.shape, dtype)
        elif weight.role != "number":
            sizes[weight.tensors] = math.prod(weight.shape) * DTYPES[kind].itemsize
    return sum(sizes.values())


def stack_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """What a rounded matrix `[out, in]` takes, or a stack of them."""
    *stack, outputs, inputs = shape
    return math.prod(stack) * ROUNDINGS[dtype].packed_bytes(inputs, outputs)


# ----------------------------------------------------------------------------------------- reading


def load_parts(
    spec: ModelSpec,
    span: Span,
    tensors: Tensors,
    dtype: str,
    engine: Engine,
    progress: Callable[[float], None] = lambda share: None,
    store: Store | None = None,
    kept: SliceParts | None = None,
) -> SliceParts:
    """Reads every parameter: vectors in float32, matrices rounded to the precision and packed as they come.

    What `store` has of these is not read from the checkpoint, and what is `kept` is taken over. Raises
    `InputError` for a tensor that is missing or of another shape, or before anything is read for one that
    nothing uses, and for what cannot be packed.
    """
    weights = weights_in(spec, span, tensors, dtype)
    check_all_used(spec, span, weights, tensors)
    known, found = kept or {}, SliceParts()
    weights = [weight for weight in weights if weight.owner not in known]
    values: dict[Owner, dict[str, Any]] = {owner: {} for owner in span.owners}
    for weight, value in _Reader(tensors, dtype, engine, store, progress).read(weights):
        own = values[weight.owner]
        own[weight.name] = value
        order = tensors.input_order(weight.tensors[0]) if weight.is_packed and dtype == FILED else None
        if order is not None:
            own[f"{weight.name.removesuffix('.weight')}.order"] = engine.array(order)
    for owner, own in values.items():
        if owner in known:
            found[owner] = known[owner]
        elif isinstance(owner, int):
            found[owner] = layer_shape(spec, owner, tensors).parts(own, spec.eps, engine)
        elif owner == NORM:
            found[owner] = NormPart(weights=own["weight"], eps=spec.eps)
        elif owner == LM_HEAD:
            found[owner] = Linear(inputs=spec.hidden, matrices=own["weight"])
        else:
            (found[owner],) = own["weight"]
    return found


@dataclass(slots=True)
class _Reader:
    """Reads the parameters of a slice, each one that several share once."""

    tensors: Tensors
    dtype: str
    engine: Engine
    store: Store | None
    progress: Callable[[float], None]
    done: int = 0
    count: int = 0

    def read(self, weights: Sequence[Weight]) -> Iterator[tuple[Weight, Any]]:
        """Arrays; of matrices and tables tuples of matrices, one below another, of experts one for each."""
        self.count = sum(len(weight.parts) for weight in weights)
        held = self._tables([weight for weight in weights if weight.tensors[0].endswith(TABLE)])
        for weight in weights:
            key, end = (weight.tensors, weight.is_packed), self.done + len(weight.parts)
            if key not in held:
                held[key] = self._value(weight)
            self.done = end - 1
            self._step()
            yield weight, held[key]

    def _tables(self, tables: list[Weight]) -> dict[tuple[tuple[str, ...], bool], Any]:
        """Those of all layers together: what files have of them lies side by side."""
        shapes = {each.tensors[0]: each.shape for each in tables if each.is_packed}
        panels = self.tensors.panels_together(shapes)
        plain = {each.tensors[0]: self._room(each) for each in tables if not each.is_packed}
        self.tensors.copy_together(plain)
        held: dict[tuple[tuple[str, ...], bool], Any] = {}
        while panels:
            name, own = panels.popitem()
            held[(name,), True] = (self._filed(name, own, shapes[name][0]),)
        while plain:
            name, numbers = plain.popitem()
            held[(name,), False] = (Plain(self.engine.array(numbers)),)
        return held

    def _value(self, weight: Weight) -> Any:
        if weight.role not in MATRICES:
            return self.engine.array(self._numbers(weight))
        if not weight.is_packed:
            array = self.engine.array(self._numbers(weight))
            matrices: list[Matrix] = [*map(Plain, array if weight.role == "experts" else [array])]
        elif self.dtype == FILED:
            matrices = []
            for name, part in weight.parts.items():
                shape = np.broadcast_to(np.uint8(0), weight.shape)[part].shape
                matrices.append(self._filed(name, self.tensors.panels(name, shape), shape[0]))
                self._step()
        else:
            matrices = self._rounded(weight)
        if weight.role != "experts":
            return tuple(matrices)
        each = len(matrices) // weight.shape[0]
        return tuple(tuple(matrices[first : first + each]) for first in range(0, len(matrices), each))

    def _filed(self, name: str, panels: Panels, outputs: int) -> Matrix:
        return self.engine.packed_matrix(self.tensors.form(name), panels, outputs)

    def _rounded(self, weight: Weight) -> list[Matrix]:
        how, outputs, each = ROUNDINGS[self.dtype], weight.shape[-2], -(-weight.shape[-2] // PANEL)

        def make() -> Panels:
            made = [*map(how.round, self._numbers(weight).reshape(-1, *weight.shape[-2:]))]
            return np.concatenate(made) if len(made) > 1 else made[0]

        panels = make() if self.store is None else self.store(weight, make)
        parts = [in_room(panels[first : first + each]) for first in range(0, len(panels), each)]
        return [self.engine.packed_matrix(how.form, part, outputs) for part in parts]

    def _numbers(self, weight: Weight) -> Any:
        values = self._room(weight)
        for name, part in weight.parts.items():
            self.tensors.copy_into(name, values[part])
            self._step()
        return values

    def _room(self, weight: Weight) -> Any:
        kind = ACTIVATIONS[self.dtype] if weight.role in MATRICES else "float32"
        return room(weight.shape, DTYPES[kind])  # aligned, unlike the file's

    def _step(self) -> None:
        self.done += 1
        self.progress(self.done / self.count)


def check_all_used(spec: ModelSpec, span: Span, weights: Sequence[Weight], tensors: Tensors) -> None:
    """Refuses tensors among a slice's own that its layers have no place for (biases, sinks, scales), and at
    the end layers that are none of the model: they belong to another."""
    family = family_named(spec)
    root = family.root(tensors)
    layer_of = re.compile(rf"{re.escape(root.prefix)}layers\.(\d+)\.")
    layers = {int(found[1]) for name in tensors if span.is_last and (found := layer_of.match(name))}
    mtp = "" if family.mtp is None else f"{family.mtp.projection}.weight"  # some count it after their own
    for layer in sorted(layers - {*range(len(spec.layers))}):
        if f"{root.prefix}layers.{layer}.{mtp}" not in tensors:
            raise InputError(
                f"config.json: num_hidden_layers: expected {1 + max(layers)}, since the checkpoint holds "
                f"layers 0 to {max(layers)}, got {len(spec.layers)}"
            )
    own = [f"{root.prefix}layers.{index}." for index in range(span.first, span.end)]
    if span.is_last:
        own += [f"{root.prefix}{family.last_norm}.", root.lm_head.removesuffix("weight")]
    idle = tuple(
        f"{root.prefix}layers.{layer}.self_attn.{part}"
        for layer, source in enumerate(spec.sources)
        for part in _OF_KEYS_AND_VALUES
        if source != layer  # published with them all the same
    )
    unused = set(tensors) - {tensor for weight in weights for tensor in weight.tensors}
    strange = sorted(
        name
        for name in unused
        if name.startswith(tuple(own)) and not (name.startswith(idle) or name.endswith("rotary_emb.inv_freq"))
    )
    if strange:
        raise InputError(
            f"the checkpoint holds {tensors.files_of(strange[0])[0]}, for which transformers' "
            f"{family.prefix} has no place: it is of another architecture"
        )
