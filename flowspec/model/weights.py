"""Which tensors of a checkpoint make up a slice's parameters, and reading just those, one by one, each to its
place.

A parameter is one tensor, or several that are joined in it (a mixture's experts, which checkpoints hold
apart). It is allocated once and filled in place from the memory-mapped files, so a device never holds its
slice twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from flowspec.errors import InputError
from flowspec.model import rounding
from flowspec.model.bridge import array_of, read_into, tensor_of
from flowspec.model.experts import pack_experts, stay_packed_experts
from flowspec.model.families import Family
from flowspec.model.gguf.names import STORED_FADING
from flowspec.model.gguf_layers import GgufLinear, Part, stay_packed
from flowspec.model.kernels import Packing
from flowspec.model.layer_by_layer import TABLE
from flowspec.model.linear_attention import take_stored_fading
from flowspec.model.pieces import KeptModules, Pieces
from flowspec.model.quantised import QuantisedLinear, Rounded, pack
from flowspec.model.spec import spec_of
from flowspec.model.tensors import Tensors


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor in the checkpoint, and the part of its parameter that it is."""

    tensor: str
    part: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a slice and the tensors that it is made of."""

    module: nn.Module
    name: str
    sources: tuple[TensorSource, ...]

    @property
    def owner(self) -> tuple[Any, str]:
        """The module that has the parameter itself, and the parameter's name there."""
        path, _, leaf = self.name.rpartition(".")
        return self.module.get_submodule(path), leaf

    @property
    def value(self) -> torch.Tensor:
        """Before it is packed."""
        owner, leaf = self.owner
        return getattr(owner, leaf)

    @property
    def shape(self) -> torch.Size:
        """Before it is packed."""
        return self.value.shape

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which it is held by a slice of that dtype: a buffer, such as a router's bias, in its own."""
        return dtype if isinstance(self.value, nn.Parameter) else self.value.dtype

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a linear layer, and not a router's."""
        owner, leaf = self.owner
        return isinstance(owner, nn.Linear) and leaf == "weight" and not is_of_router(self.name)

    def part_shape(self, source: TensorSource) -> torch.Size:
        """Of what one source fills."""
        return torch.empty(self.shape, device="meta")[source.part].shape

    @property
    def is_experts(self) -> bool:
        """Whether it is the matrices of a mixture's experts, `[experts, out, in]`."""
        return len(self.shape) == 3 and not isinstance(self.owner[0], nn.Conv1d)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors it is made of; two parameters that are tied have the same."""
        return tuple(source.tensor for source in self.sources)


def is_of_router(name: str) -> bool:
    """Whether a parameter or a module, by its name, belongs to a router: these are never packed."""
    return ".router." in f".{name}."


@dataclass(frozen=True, slots=True)
class SliceWeights:
    """The parameters of a slice: those that are packed, and those that are kept as they are."""

    packed: tuple[Weight, ...]
    plain: tuple[Weight, ...]

    def within(self, modules: Iterable[nn.Module]) -> SliceWeights:
        """Those of these modules alone."""
        wanted = {id(module) for module in modules}
        packed = tuple(each for each in self.packed if id(each.module) in wanted)
        return SliceWeights(packed, tuple(each for each in self.plain if id(each.module) in wanted))


class RoundedStore(Protocol):
    """Keeps rounded matrices from one load to the next."""

    def find(self, weight: Weight) -> rounding.Rounded | None:
        """What `keep` was given for a parameter of the same content, unchanged."""

    def keep(self, weight: Weight, rounded: rounding.Rounded) -> None:
        """Keeps it if there is room."""


def weights_of(pieces: Pieces, tensors: Tensors) -> Iterator[Weight]:
    """Every parameter of a slice; two that are tied have the same sources."""
    prefix = pieces.family.root(tensors).prefix
    if pieces.embedding is not None:
        yield Weight(
            pieces.embedding, "weight", (TensorSource(embedding_name(pieces.config, pieces.family, tensors)),)
        )
    for index, layer in zip(range(pieces.span.first, pieces.span.end), pieces.layers, strict=True):
        if f"{prefix}layers.{index}.{STORED_FADING}" in tensors and hasattr(layer.linear_attn, "A_log"):
            take_stored_fading(layer)
        for name, value in layer.state_dict(keep_vars=True).items():
            yield Weight(
                layer, name, _sources(pieces.family, tensors, f"{prefix}layers.{index}.", name, value)
            )
    if pieces.norm is not None and pieces.lm_head is not None:
        yield Weight(pieces.norm, "weight", (TensorSource(f"{prefix}{pieces.family.last_norm}.weight"),))
        yield Weight(
            pieces.lm_head, "weight", (TensorSource(lm_head_name(pieces.config, pieces.family, tensors)),)
        )


def embedding_name(config: Any, family: Family, tensors: Tensors) -> str:
    """The tensor that embeds tokens: `lm_head`'s where the two are tied and the checkpoint has that one
    only."""
    root = family.root(tensors)
    own = root.prefix + "embed_tokens.weight"
    return (
        root.lm_head if config.tie_word_embeddings and own not in tensors and root.lm_head in tensors else own
    )


def lm_head_name(config: Any, family: Family, tensors: Tensors) -> str:
    """The tensor of `lm_head`: its own if there is one, as transformers does even where the config says that
    it is tied."""
    root = family.root(tensors)
    return (
        embedding_name(config, family, tensors)
        if config.tie_word_embeddings and root.lm_head not in tensors
        else root.lm_head
    )


def fill(
    pieces: Pieces,
    tensors: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    packing: Packing | None = None,
    store: RoundedStore | None = None,
    kept: KeptModules | None = None,
) -> None:
    """Gives every parameter its values, converted to `dtype`; with `packing`, matrices are packed as they
    come.

    What `store` has of these is not read from the checkpoint, and modules that are `kept` get no values.
    Raises `InputError` for a tensor that is missing or of another shape, or before anything is read for one
    that nothing uses, and for what cannot be packed.
    """
    weights = sorted_weights(pieces, tensors, packing)
    _check_all_used(pieces, (*weights.plain, *weights.packed), tensors)
    weights = weights.within(pieces.lacking(kept))
    count = sum(len(weight.sources) for weight in (*weights.plain, *weights.packed))
    done = 0

    def read(weight: Weight, device: torch.device = device) -> torch.Tensor:
        values = torch.empty(
            weight.shape, dtype=weight.dtype(dtype), device=device
        )  # aligned, unlike the file's
        for number, source in enumerate(weight.sources, done + 1):
            read_into(tensors, source.tensor, values[source.part])
            progress(number / count)
        return values

    loaded: dict[tuple[str, ...], nn.Parameter] = {}
    tables = [weight for weight in weights.plain if weight.tensors[0].endswith(TABLE)]
    values = {weight.tensors[0]: torch.empty(weight.shape, dtype=weight.dtype(dtype)) for weight in tables}
    tensors.copy_together({name: array_of(value) for name, value in values.items()})
    for name, value in values.items():
        loaded[(name,)] = nn.Parameter(value.to(device), requires_grad=False)
    for weight in weights.plain:
        if weight.tensors not in loaded:
            loaded[weight.tensors] = nn.Parameter(read(weight), requires_grad=False)
        owner, leaf = weight.owner
        setattr(owner, leaf, loaded[weight.tensors])
        done += len(weight.sources)
    parts: dict[tuple[str, ...], tuple[Part, ...]] = {}
    tables = [weight for weight in weights.packed if weight.tensors[0].endswith(TABLE)]
    panels = tensors.panels_together({weight.tensors[0]: tuple(weight.shape) for weight in tables})
    for name in list(panels):
        part = tensor_of(panels.pop(name)).to(device)
        parts[(name,)] = (Part(tensors.form(name), part, tensors.shape(name)[0]),)
    for weight in weights.packed:
        assert packing is not None, "nothing is packed otherwise"
        if issubclass(packing, GgufLinear):
            if weight.tensors not in parts:  # two that are tied share theirs
                parts[weight.tensors] = _parts(weight, tensors, device)
            order = tensors.input_order(weight.tensors[0])
            given = None if order is None else tensor_of(order)
            _give_parts(weight, parts[weight.tensors], packing, dtype, given)
        else:
            rounded = None if store is None else store.find(weight)
            if rounded is None:
                values_here = read(weight, torch.device("cpu")).flatten(0, -2)
                rounded = packing.rounding.round(array_of(values_here))
                if store is not None:
                    store.keep(weight, rounded)
            there = {name: tensor_of(part).to(device) for name, part in rounded.items()}
            _give_rounded(weight, there, packing)
        progress((done := done + len(weight.sources)) / count)


def _parts(weight: Weight, tensors: Tensors, device: torch.device) -> tuple[Part, ...]:
    """What a file packs of a parameter, source by source."""
    found = []
    for source in weight.sources:
        shape = weight.part_shape(source)
        panels = tensor_of(tensors.panels(source.tensor, tuple(shape))).to(device)
        found.append(Part(tensors.form(source.tensor), panels, shape[0]))
    return tuple(found)


def _give_parts(
    weight: Weight,
    parts: tuple[Part, ...],
    kind: type[GgufLinear],
    dtype: torch.dtype,
    order: torch.Tensor | None,
) -> None:
    owner, leaf = weight.owner
    if not weight.is_experts:
        stay_packed(owner, parts, kind, dtype, order)
        return
    each = len(parts) // weight.shape[0]
    by_expert = [parts[first : first + each] for first in range(0, len(parts), each)]
    stay_packed_experts(owner, leaf, by_expert, kind, dtype)


def _give_rounded(weight: Weight, rounded: Rounded, kind: type[QuantisedLinear]) -> None:
    owner, leaf = weight.owner
    if weight.is_experts:
        pack_experts(owner, leaf, rounded, kind)
    else:
        pack(owner, rounded, kind)


def sorted_weights(pieces: Pieces, tensors: Tensors, packing: Packing | None) -> SliceWeights:
    """Every parameter of a slice, by what `fill` does with it."""
    packed: list[Weight] = []
    plain: list[Weight] = []
    for weight in weights_of(pieces, tensors):
        if packing is not None and _is_packed(weight, packing, tensors):
            packed.append(weight)
        else:
            plain.append(weight)
    return SliceWeights(tuple(packed), tuple(plain))


def _is_packed(weight: Weight, packing: Packing, tensors: Tensors) -> bool:
    """Whether a parameter is packed.

    Raises `InputError` for a matrix that is to stay as its file packs it, and is not packed there, or in a
    form that layers do not compute with.
    """
    if issubclass(packing, GgufLinear):
        loose = [source.tensor for source in weight.sources if not tensors.form(source.tensor)]
        is_multiplied = weight.is_linear or weight.is_experts
        if loose and is_multiplied:
            raise InputError(
                f"{tensors.files_of(loose[0])[0]} is not packed in a form that layers compute with; "
                "use --dtype bfloat16, int8 or int4"
            )
        return is_multiplied or (not loose and isinstance(weight.owner[0], nn.Embedding))
    return weight.is_linear or weight.is_experts


def weight_bytes(pieces: Pieces, tensors: Tensors, dtype: torch.dtype, packing: Packing | None) -> int:
    """What the parameters will take once they are filled; tied ones count once, unless one of them is
    packed."""
    weights = sorted_weights(pieces, tensors, packing)
    plain = {weight.tensors: weight.shape.numel() * weight.dtype(dtype).itemsize for weight in weights.plain}
    if packing is None:
        return sum(plain.values())
    if issubclass(packing, GgufLinear):
        names = {source.tensor for weight in weights.packed for source in weight.sources}
        return sum(plain.values()) + sum(map(tensors.packed_bytes, names))
    return sum(plain.values()) + sum(stack_bytes(weight.shape, packing) for weight in weights.packed)


def stack_bytes(shape: torch.Size, packing: type[QuantisedLinear]) -> int:
    """What a packed matrix `[out, in]` takes, or a stack of them."""
    *stack, outputs, inputs = shape
    return math.prod(stack) * packing.rounding.packed_bytes(inputs, outputs)


def _check_all_used(pieces: Pieces, weights: tuple[Weight, ...], tensors: Tensors) -> None:
    """Refuses tensors among a slice's own that its modules have no place for (biases, sinks, scales): they
    belong to another model."""
    root = pieces.family.root(tensors)
    own = [f"{root.prefix}layers.{index}." for index in range(pieces.span.first, pieces.span.end)]
    if pieces.span.is_last:
        own += [f"{root.prefix}{pieces.family.last_norm}.", root.lm_head.removesuffix("weight")]
    idle = [
        f"{root.prefix}layers.{layer}.self_attn.{part}"
        for layer, source in enumerate(spec_of(pieces.config).sources)
        for part in _OF_KEYS_AND_VALUES
        if source != layer  # published with them all the same
    ]
    unused = set(tensors) - {tensor for weight in weights for tensor in weight.tensors}
    strange = sorted(
        name
        for name in unused
        if name.startswith(tuple(own))
        and not name.endswith("rotary_emb.inv_freq")
        and not name.startswith(tuple(idle))
    )
    if strange:
        raise InputError(
            f"the checkpoint holds {tensors.files_of(strange[0])[0]}, for which transformers' "
            f"{pieces.family.prefix} has no place: it is of another architecture"
        )


_OF_KEYS_AND_VALUES = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


def _sources(
    family: Family, tensors: Tensors, prefix: str, name: str, value: torch.Tensor
) -> tuple[TensorSource, ...]:
    """The tensors of a layer's parameter: itself, or expert by expert those that are stacked in it `[experts,
    rows, columns]`."""
    ways = family.ways_to_stack(name)
    if prefix + name in tensors:
        return (TensorSource(prefix + name),)
    if not ways:
        return (TensorSource(prefix + family.renamed.get(name, name)),)
    joined = next((way for way in ways if prefix + way[0].format(0) in tensors), ways[0])
    rows = value.shape[1] // len(joined)
    return tuple(
        TensorSource(prefix + each.format(expert), (expert, slice(place * rows, (place + 1) * rows)))
        for expert in range(value.shape[0])
        for place, each in enumerate(joined)
    )
