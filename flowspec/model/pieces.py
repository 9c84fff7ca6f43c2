"""The modules of a slice, and what its family does between and around them: embedding, position embeddings,
logits.

Built on the meta device; `weights.py` fills them. The modules are transformers' own; what they compute beside
their matrices is computed by `arithmetic/`, so that a row's bits follow from the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from flowspec.errors import InputError
from flowspec.model.arithmetic.operations import angles, function, norm
from flowspec.model.experts import outputs_first
from flowspec.model.families import Family
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.products import Product, lanes16
from flowspec.model.quantised import packed_bytes

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of the position embeddings, each `[1, rows, rotated width]`."""


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


@dataclass(slots=True, kw_only=True)
class KeptModules:
    """Modules of a slice that another slice of the same model, in the same precision, takes over as they are:
    layers by their number, and what the first and the last slice have beside theirs."""

    layers: dict[int, Any]
    embedding: nn.Embedding | None = None
    norm: Any = None
    lm_head: nn.Linear | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of their weights, a tied one once."""
        return _bytes_of([*self.layers.values(), *_there(self.embedding, self.norm, self.lm_head)])


class LayerInput(nn.Module):
    """What a layer of Gemma 4 takes of a token besides, after `project_per_layer_inputs` of transformers'
    Gemma4TextModel: looked up in a table, plus a projection of the token's embedding. Transformers makes that
    of all layers at once; here each layer has its own, so a slice holds no more than its layers need."""

    def __init__(self, config: Any, norm: Any) -> None:
        super().__init__()
        width = config.hidden_size_per_layer_input
        self.table = nn.Embedding(config.vocab_size_per_layer_input, width)
        self.projection = nn.Linear(config.hidden_size, width, bias=False)
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.table_scale = width**0.5


@dataclass(slots=True)
class Pieces:
    """The modules of a slice: the first one has the embedding, the last one the final norm and `lm_head`."""

    config: Any
    family: Family
    span: Span
    embedding: nn.Embedding | None
    layers: list[Any]
    rotary: Any
    norm: Any
    lm_head: nn.Linear | None
    product: Product = lanes16
    """What multiplies by matrices that are not packed."""

    @staticmethod
    def build(config: Any, family: Family, span: Span) -> Pieces:
        """All of them on the meta device but the position embeddings, which are computed and not loaded.

        Raises `InputError` when the config does not describe layers that transformers can build.
        """
        try:
            with torch.device("meta"):
                layers = [
                    family.piece("DecoderLayer")(config, index) for index in range(span.first, span.end)
                ]
                for layer in layers:
                    if family.joins_experts:
                        outputs_first(layer)
                    if getattr(config, "hidden_size_per_layer_input", None):
                        layer.add_module(LAYER_INPUT, LayerInput(config, family.piece("RMSNorm")))
                embedding = nn.Embedding(config.vocab_size, config.hidden_size) if span.is_first else None
                norm = (
                    family.piece("RMSNorm")(config.hidden_size, eps=getattr(config, family.norm_eps))
                    if span.is_last
                    else None
                )
                lm_head = (
                    nn.Linear(config.hidden_size, config.vocab_size, bias=False) if span.is_last else None
                )
            rotary = family.piece("RotaryEmbedding")(config=config)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever it meets in an odd config
            text = " ".join(str(error).split())
            raise InputError(
                f"cannot build the model's layers from its config.json: {type(error).__name__}: {text:.200}"
            ) from None
        return Pieces(config, family, span, embedding, layers, rotary, norm, lm_head)

    @property
    def loaded(self) -> Iterator[nn.Module]:
        """Those that hold weights."""
        for module in (self.embedding, *self.layers, self.norm, self.lm_head):
            if module is not None:
                yield module

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, a tied one once."""
        return _bytes_of(list(self.loaded))

    def kept_for(self, span: Span) -> KeptModules:
        """What of this slice one of the same model with these layers has, too.

        A tied matrix is another parameter where a slice has both of its ends: then none is taken over.
        """
        own = self.span
        both = range(max(own.first, span.first), min(own.end, span.end))
        kept = KeptModules(layers={index: self.layers[index - own.first] for index in both})
        has_same_ends = (own.is_first, own.is_last) == (span.is_first, span.is_last)
        if has_same_ends or not self.config.tie_word_embeddings:
            if span.is_first:
                kept.embedding = self.embedding
            if span.is_last:
                kept.norm, kept.lm_head = self.norm, self.lm_head
        return kept

    def lacking(self, kept: KeptModules | None) -> list[nn.Module]:
        """The modules that hold weights and are not taken over."""
        if kept is None:
            return list(self.loaded)
        numbered = enumerate(self.layers, self.span.first)
        layers = [layer for index, layer in numbered if index not in kept.layers]
        ends = ((self.embedding, kept.embedding), (self.norm, kept.norm), (self.lm_head, kept.lm_head))
        return [*layers, *_there(*(own for own, other in ends if other is None))]

    def take_over(self, kept: KeptModules) -> None:
        """Has the modules of another slice in the place of its own."""
        numbered = enumerate(self.layers, self.span.first)
        self.layers = [kept.layers.get(index, layer) for index, layer in numbered]
        self.embedding = kept.embedding or self.embedding
        self.norm, self.lm_head = kept.norm or self.norm, kept.lm_head or self.lm_head

    def call_directly(self, product: Product) -> None:
        self.product = product
        for module in self.loaded:
            call_directly(module.eval(), self.family, product)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` from token ids `[rows]`."""
        assert self.embedding is not None, "only the first slice has the embedding"
        embedded: torch.Tensor = self.embedding(tokens)
        scale = self.family.embedding_scale(
            self.config, lambda value: torch.tensor(value, dtype=embedded.dtype).item()
        )
        return embedded if scale == 1 else embedded * scale

    def angles(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[Angles]:
        """The position embeddings of each layer, for `positions` `[1, rows]` int64, in the dtype that goes
        with `hidden`."""
        if not self.family.rotary_by_layer_type:
            return [angles_of(self.rotary, hidden, positions)] * len(self.layers)
        types = self.config.layer_types[self.span.first : self.span.end]
        by_type = {
            kind: angles_of(self.rotary, hidden, positions, f"{kind}_") for kind in dict.fromkeys(types)
        }
        return [by_type[kind] for kind in types]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` in the model's dtype from the last layer's hidden states `[rows, hidden]`."""
        assert self.lm_head is not None, "only the last slice has logits"
        logits: torch.Tensor = self.family.finish(
            self.config, self.lm_head(self.norm(hidden)), partial(function, name="tanh")
        )
        return logits


def _there(*modules: nn.Module | None) -> list[nn.Module]:
    return [module for module in modules if module is not None]


def _bytes_of(modules: list[nn.Module]) -> int:
    """Bytes of all weights of modules, a tied one once."""
    distinct = {id(weight): weight for module in modules for weight in module.parameters()}
    plain = sum(weight.numel() * weight.element_size() for weight in distinct.values())
    return plain + packed_bytes(modules)


def angles_of(rotary: Any, hidden: torch.Tensor, positions: torch.Tensor, kind: str = "") -> Angles:
    """What a family's RotaryEmbedding gives for `positions` `[1, rows]`; `kind` begins the names of a type of
    layers."""
    frequencies = getattr(rotary, f"{kind}inv_freq").float()
    return angles(positions, frequencies, getattr(rotary, f"{kind}attention_scaling"), hidden.dtype)


def call_directly(module: nn.Module, family: Family, product: Product) -> None:
    """Has a module's norms compute canonically, and its linear layers that are not packed by a product."""
    norm_class = family.piece("RMSNorm")
    for part in list(module.modules()):
        kind = type(part)
        if isinstance(part, norm_class):
            part.__dict__["how"] = family.norm
            part.__dict__.setdefault("eps", getattr(part, "variance_epsilon", None))
            call: Any = _normed
        elif kind is nn.Linear:
            part.__dict__["product"] = product
            call = _linear
        else:
            continue
        part.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = layer.product(x.reshape(-1, layer.in_features), layer.weight, layer.bias)
    return found.view(*x.shape[:-1], layer.out_features)


def _normed(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    weight = module._parameters.get("weight")
    weight = hidden.new_ones(hidden.shape[-1]) if weight is None else weight
    return norm(hidden, weight, module.eps, module.how)
