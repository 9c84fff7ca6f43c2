"""The modules of a slice, and what its family does between and around them: embedding, position embeddings,
logits.

Built on the meta device; `weights.py` fills them. The modules are transformers' own; what they compute beside
their matrices is computed by `arithmetic/`, so that a row's bits follow from the row.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flowspec.errors import InputError
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.operations import angles, function, norm, turned, turned_alone
from flowspec.model.attention import tree_attention
from flowspec.model.convolution import convolving_layer, tree_convolution
from flowspec.model.experts import EXPERTS_NAME, outputs_first
from flowspec.model.families import Family
from flowspec.model.imports import IMPORTING
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.layer_inputs import LayerInput
from flowspec.model.linear_attention import tree_delta_rule
from flowspec.model.products import Product
from flowspec.model.quantised import packed_bytes
from flowspec.model.routers import ROUTERS

with IMPORTING:
    from transformers import AttentionInterface

ATTENTION_NAME = "flowspec_tree"
AttentionInterface.register(ATTENTION_NAME, tree_attention)
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

    @staticmethod
    def build(config: Any, family: Family, span: Span) -> Pieces:
        """All of them on the meta device but the position embeddings, which are computed and not loaded.

        Raises `InputError` when the config does not describe layers that transformers can build.
        """
        config = slice_config(config)
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

    def call_directly(self, product: Product | None) -> None:
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


def slice_config(config: Any) -> Any:
    """The config with the tree attention and the row-wise experts switched on."""
    config = copy.deepcopy(config)
    config._attn_implementation = ATTENTION_NAME
    config._experts_implementation = EXPERTS_NAME
    return config


def call_directly(module: nn.Module, family: Family, product: Product | None = None) -> None:
    """Has a module compute canonically, and spares each call its search for hooks, and each submodule its
    look-up by name.

    Norms, functions of one number and routers are computed by `arithmetic/`, linear layers that are not
    packed by `product` (None: by torch). Nothing here uses hooks, and with one row these detours are a tenth
    of a small model's time.
    """
    norm_class = family.piece("RMSNorm")
    for part in list(module.modules()):
        kind = type(part)
        call = _with_own_functions(kind.forward, family.rotary_is_partial, family.rotary_is_half)
        if isinstance(part, norm_class):
            call = _normed if "weight" in part._parameters else _normed_alone
            part.__dict__["how"] = family.norm
            part.__dict__.setdefault("eps", getattr(part, "variance_epsilon", None))
        elif kind is nn.Linear and product is not None:
            call = _linear
            part.__dict__["product"] = product
        elif kind.__name__.endswith("ShortConv"):
            call = tree_convolution
        elif kind.__name__.endswith("DecoderLayer") and hasattr(part, "conv"):
            call = convolving_layer
        elif kind.__name__.endswith("GatedDeltaNet"):
            call = tree_delta_rule
        elif kind.__name__.endswith("Router"):
            call = ROUTERS[family.router]
        if isinstance(getattr(part, "gate_up_proj", None), nn.Parameter) and kind.__name__.endswith(
            "Experts"
        ):
            part.__dict__["product"] = F.linear if product is None else product
        part.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        part.__dict__.update(part._modules)
        part.__dict__.update(part._parameters)
        for name in _FUNCTION_NAMES & part._modules.keys():
            part.__dict__[name] = _functions(part.get_submodule(name))


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2:
        product: torch.Tensor = layer.product(x, layer.weight, layer.bias)
        return product
    found: torch.Tensor = layer.product(x.reshape(-1, layer.in_features), layer.weight, layer.bias)
    return found.view(*x.shape[:-1], layer.out_features)


def _functions(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer's activation. Raises `InputError` for one that has no canonical form."""
    name = _FUNCTIONS.get(type(module).__name__)
    if name is None:
        raise InputError(
            f"the model's layers apply {type(module).__name__}, but FlowSpec computes silu, "
            "gelu_pytorch_tanh and relu"
        )
    return torch.relu if name == "relu" else partial(function, name=name)


def _normed(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return norm(hidden, module.weight, module.eps, module.how)


def _normed_alone(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """By a norm without weights."""
    return norm(hidden, _ones(hidden.shape[-1], hidden.dtype, hidden.device), module.eps, module.how)


@functools.cache
def _ones(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(width, dtype=dtype, device=device)


@functools.cache
def _with_own_functions(forward: Any, is_partial: bool, is_half: bool) -> Any:
    """A layer's function, calling ours to turn queries and keys, and in the place of torch's silu and
    sigmoid; as it is where it turns in another way, and where it does none of it."""
    inner = inspect.unwrap(forward)  # in some versions it stands in one that renames arguments
    names, used = inner.__globals__, inner.__code__.co_names
    own: dict[str, Any] = {}
    if "apply_rotary_pos_emb" in used:
        turns = names["apply_rotary_pos_emb"]
        if _is_of_one(turns):
            own |= {"apply_rotary_pos_emb": turned_alone} if _turns_one(turns) else {}
        elif _turns_halves(turns, is_partial, is_half):
            own["apply_rotary_pos_emb"] = turned
    if "F" in used and not _OF_F.isdisjoint(used) and names.get("F") is F:
        own["F"] = _FUNCTIONAL
    if {"torch", "sigmoid"} <= set(used) and names.get("torch") is torch:
        own["torch"] = _TORCH
    if not own:
        return forward
    made = FunctionType(
        inner.__code__, {**names, **own}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


def _turns_halves(function: Any, is_partial: bool, is_half: bool) -> bool:
    """Whether a family turns as `turned` does: tried, since its code may change with transformers. One that
    takes angles once is given `turned`'s, of which each is there twice."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn((1, heads, 3, 8), generator=generator) for heads in (4, 2)]
    angles = [torch.randn((1, 3, 4 if is_partial or is_half else 8), generator=generator) for _ in range(2)]
    twice = [torch.cat([angle, angle], dim=-1) for angle in angles] if is_half else angles
    expected = (plain.turned(each, *twice) for each in given)
    return all(map(torch.equal, function(*given, *angles), expected))


def _is_of_one(function: Any) -> bool:
    """Whether a family turns queries and keys in a call each (Gemma 4)."""
    return "k" not in inspect.signature(function).parameters


def _turns_one(function: Any) -> bool:
    """As `_turns_halves`, of one that turns `[1, rows, heads, width]` alone."""
    generator = torch.Generator().manual_seed(1)
    given = torch.randn((1, 3, 4, 8), generator=generator)
    angles = [torch.randn((1, 3, 8), generator=generator) for _ in range(2)]
    expected = plain.turned(given.transpose(1, 2), *angles).transpose(1, 2)
    return torch.equal(function(given, *angles, unsqueeze_dim=2), expected)


_FUNCTION_NAMES = {"act_fn", "activation_fn"}
_OF_F = {"silu", "sigmoid"}
_FUNCTIONAL = SimpleNamespace(**{name: partial(function, name=name) for name in _OF_F})
"""In the place of torch.nn.functional for a layer's function that calls one of these; it lacks all else."""
_TORCH = SimpleNamespace(chunk=torch.chunk, sigmoid=partial(function, name="sigmoid"))
"""As that, of torch's sigmoid."""
_FUNCTIONS = {
    **dict.fromkeys(("SiLUActivation", "SiLU"), "silu"),
    **dict.fromkeys(("GELUTanh", "NewGELUActivation"), "gelu_tanh"),
    "ReLU": "relu",
}
"""By the class that transformers takes for a name in a config."""
