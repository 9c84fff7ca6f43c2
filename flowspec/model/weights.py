"""Which tensors of a checkpoint make up a slice's parameters, and reading just those, one by one, each to its place.

A parameter is one tensor, or several that are joined in it (a mixture's experts, which checkpoints hold apart). It is allocated once
and filled in place from the memory-mapped files, so a device never holds its slice twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flowspec.errors import InputError
from flowspec.model.families import Family, Root
from flowspec.model.files import TensorIndex
from flowspec.model.pieces import Pieces
from flowspec.model.quantised import QuantisedLinear, quantise


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in the checkpoint, and the part of its parameter that it is."""

    tensor: str
    part: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a slice and the tensors that it is made of."""

    module: nn.Module
    name: str
    sources: tuple[Source, ...]

    @property
    def owner(self) -> tuple[Any, str]:
        """The module that has the parameter itself, and the parameter's name there."""
        path, _, leaf = self.name.rpartition(".")
        return self.module.get_submodule(path), leaf

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a linear layer."""
        owner, leaf = self.owner
        return isinstance(owner, nn.Linear) and leaf == "weight"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors it is made of; two parameters that are tied have the same."""
        return tuple(source.tensor for source in self.sources)


def weights_of(pieces: Pieces, tensors: TensorIndex) -> Iterator[Weight]:
    """Every parameter of a slice; two that are tied have the same sources."""
    prefix = _root(pieces.family, tensors).prefix
    if pieces.embedding is not None:
        yield Weight(pieces.embedding, "weight", (Source(embedding_name(pieces.config, pieces.family, tensors)),))
    for index, layer in zip(range(pieces.span.first, pieces.span.end), pieces.layers, strict=True):
        for name, parameter in layer.named_parameters():
            yield Weight(layer, name, _sources(pieces.family, tensors, f"{prefix}layers.{index}.", name, parameter))
    if pieces.norm is not None and pieces.lm_head is not None:
        yield Weight(pieces.norm, "weight", (Source(f"{prefix}norm.weight"),))
        yield Weight(pieces.lm_head, "weight", (Source(lm_head_name(pieces.config, pieces.family, tensors)),))


def embedding_name(config: Any, family: Family, tensors: TensorIndex) -> str:
    """The tensor that embeds tokens: `lm_head`'s where the two are tied and the checkpoint has that one only."""
    root = _root(family, tensors)
    own = root.prefix + "embed_tokens.weight"
    return root.lm_head if config.tie_word_embeddings and own not in tensors and root.lm_head in tensors else own


def lm_head_name(config: Any, family: Family, tensors: TensorIndex) -> str:
    """The tensor of `lm_head`: its own if there is one, as transformers does even where the config says that it is tied."""
    root = _root(family, tensors)
    return embedding_name(config, family, tensors) if config.tie_word_embeddings and root.lm_head not in tensors else root.lm_head


def fill(
    pieces: Pieces,
    tensors: TensorIndex,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    packing: type[QuantisedLinear] | None = None,
) -> None:
    """Gives every parameter its values, converted to `dtype`; with `packing`, weights of linear layers are packed as they come.

    Raises `InputError` for a tensor that is missing or of another shape, or before anything is read for one that nothing uses, and for
    what cannot be packed.
    """
    _check_packable(pieces, packing, device)
    weights = list(weights_of(pieces, tensors))
    _check_all_used(pieces, weights, tensors)
    count = sum(len(weight.sources) for weight in weights)
    done = 0
    loaded: dict[tuple[str, ...], nn.Parameter] = {}
    for weight in weights:
        owner, leaf = weight.owner
        parameter = loaded.get(weight.tensors)
        if parameter is None:
            values = torch.empty(owner.get_parameter(leaf).shape, dtype=dtype, device=device)  # aligned, unlike the file's
            for source in weight.sources:
                tensors.copy_into(source.tensor, values[source.part])
                progress((done := done + 1) / count)
            parameter = nn.Parameter(values, requires_grad=False)
        if packing is not None and weight.is_linear:
            quantise(owner, parameter, packing)
        else:
            loaded[weight.tensors] = parameter
            setattr(owner, leaf, parameter)
    tensors.close()


def weight_bytes(pieces: Pieces, tensors: TensorIndex, dtype: torch.dtype, packing: type[QuantisedLinear] | None) -> int:
    """What the parameters will take once they are filled; tied ones count once, unless one of them is packed."""
    found: dict[tuple[bool, tuple[str, ...]], int] = {}
    for weight in weights_of(pieces, tensors):
        owner, leaf = weight.owner
        if packing is not None and weight.is_linear:
            found[True, weight.tensors] = packing.bytes_of(owner.in_features, owner.out_features)
        else:
            found[False, weight.tensors] = owner.get_parameter(leaf).numel() * dtype.itemsize
    return sum(found.values())


def _check_packable(pieces: Pieces, packing: type[QuantisedLinear] | None, device: torch.device) -> None:
    """Refuses what packed weights do not do yet."""
    if packing is not None and pieces.family.stacked:
        raise InputError("mixtures of experts do not run in int8 or int4 yet; use --dtype bfloat16")
    if packing is not None and device.type != "cpu":
        raise InputError(f"int8 and int4 run on CPUs, not on {device.type} yet; use --dtype float16 or bfloat16, or --device cpu")


def _check_all_used(pieces: Pieces, weights: list[Weight], tensors: TensorIndex) -> None:
    """Refuses tensors among a slice's own that its modules have no place for (biases, sinks, scales): they belong to another model."""
    root = _root(pieces.family, tensors)
    own = [f"{root.prefix}layers.{index}." for index in range(pieces.span.first, pieces.span.end)]
    if pieces.span.is_last:
        own += [f"{root.prefix}norm.", root.lm_head.removesuffix("weight")]
    unused = set(tensors) - {tensor for weight in weights for tensor in weight.tensors}
    strange = sorted(name for name in unused if name.startswith(tuple(own)) and not name.endswith("rotary_emb.inv_freq"))
    if strange:
        raise InputError(
            f"the checkpoint holds {strange[0]}, for which transformers' {pieces.family.prefix} has no place: it is of another architecture"
        )


def _root(family: Family, tensors: TensorIndex) -> Root:
    """Where this checkpoint keeps its decoder; the family's first place when it is in none."""
    return next((root for root in family.roots if root.prefix + "norm.weight" in tensors), family.roots[0])


def _sources(family: Family, tensors: TensorIndex, prefix: str, name: str, parameter: nn.Parameter) -> tuple[Source, ...]:
    """The tensors of a layer's parameter: itself, or expert by expert those that are stacked in it `[experts, rows, columns]`."""
    joined = family.stacked.get(name)
    if joined is None or prefix + name in tensors:
        return (Source(prefix + name),)
    rows = parameter.shape[1] // len(joined)
    return tuple(
        Source(prefix + each.format(expert), (expert, slice(place * rows, (place + 1) * rows)))
        for expert in range(parameter.shape[0])
        for place, each in enumerate(joined)
    )
