"""The network of an assistant of Gemma 4, from its published files, and what it reads of its target.

An assistant has no keys and values of its own. Its layers attend to those that the target's last layers with
keys of their own hold of the text so far, one with a window and one without (`core.protocol.model_spec`).
These two layers may be on any device, so the head does not fetch what they hold: it captures what comes into
them, and makes keys and values of it with the target's own weights. A row reads its token, embedded as the
target does it, and the feature of its parent: what comes out of the target's final norm, or for a guess what
the assistant predicts of that.

After transformers' Gemma4AssistantForCausalLM, whose layers are Gemma 4's; transformers 5.20 to 5.23 cannot
build it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flowspec.core.protocol.model_spec import Heads
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.draft.assistant_files import assistant_config
from flowspec.draft.reading import built_config, embedding_rows, fill
from flowspec.errors import InputError
from flowspec.model.arithmetic.operations import turned
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.families import FAMILIES, Family
from flowspec.model.files import ModelFiles
from flowspec.model.imports import IMPORTING
from flowspec.model.kernels import DTYPES, kernel_of
from flowspec.model.passes import Layers
from flowspec.model.pieces import angles_of, call_directly
from flowspec.model.products import Product
from flowspec.model.safetensors_file import ELEMENT_BYTES, WHOLE_BYTES, SafetensorsTensors
from flowspec.model.spec import spec_of
from flowspec.model.support import family_of
from flowspec.model.tensors import Tensors

TYPES = ("sliding_attention", "full_attention")
PLACE = {kind: place - len(TYPES) for place, kind in enumerate(TYPES)}
"""Which layer of a cache holds keys and values for the assistant's layers of a type."""
_WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
"""What an assistant's layers have not, by its publisher's own check."""
MORE_SEEN = 2
"""Its publisher's mask counts back from the last key, both ends included; ours from the row."""
_OF_KEYS = ("k_proj", "k_norm", "v_proj", "v_norm")


class _Source(nn.Module):
    """The part of a target's layer that makes its keys and values."""

    def __init__(self, config: Any, family: Family, layer: int) -> None:
        super().__init__()
        attention = family.piece("Attention")(config, layer)
        self.input_layernorm: Any = family.piece("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = nn.Module()
        for name in _OF_KEYS:
            self.self_attn.add_module(name, getattr(attention, name))
        self.heads: Heads = spec_of(config).heads[layer]
        self.kind: str = config.layer_types[layer]

    def keys_and_values(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each `[kv_heads, rows, head_dim]`, of what comes into the layer, `[1, rows, hidden]`."""
        own: Any = self.self_attn
        normed = self.input_layernorm(hidden)
        shape = (*normed.shape[:2], self.heads.count, self.heads.width)
        keys = own.k_proj(normed).view(shape)
        values = keys if own.v_proj is None else own.v_proj(normed).view(shape)
        keys = turned(own.k_norm(keys).transpose(1, 2), *angles)
        return keys[0], own.v_norm(values)[0].transpose(0, 1)


class _MaskedEmbedding(nn.Module):
    """Which tokens an assistant scores: those of the clusters whose centroids are nearest, in files with an
    embedding in such an order."""

    def __init__(self, raw: Mapping[str, Any], hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.chosen: int = raw["centroid_intermediate_top_k"]
        self.centroids: Any = nn.Linear(hidden, raw["num_centroids"], bias=False)
        self.register_buffer("token_ordering", torch.empty(vocabulary, dtype=torch.int64))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` float32. Tokens of other clusters have the least number: they are not scored,
        so none of them is ever proposed (the published code gives each a little less than the least)."""
        ordering: Any = self.token_ordering
        tokens = ordering.view(self.centroids.out_features, -1)[
            torch.topk(self.centroids(hidden), self.chosen, dim=-1).indices
        ].flatten(1)  # [rows, tokens]
        found = torch.full((len(hidden), len(ordering)), torch.finfo(torch.float32).min, device=hidden.device)
        for row, own in enumerate(tokens):  # at once, their weights would be copied for all rows
            found[row, own] = (weight[own] @ hidden[row]).float()
        return found


class _Network(nn.Module):
    """Every weight of an assistant; its parameter names are the published files'."""

    def __init__(self, raw: Mapping[str, Any], config: Any, family: Family, backbone: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            [family.piece("DecoderLayer")(config, layer) for layer in range(config.num_hidden_layers)]
        )
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            attention.is_kv_shared_layer, attention.store_full_length_kv = True, False
            for name in _OF_KEYS:
                delattr(attention, name)
            if attention.sliding_window is not None:
                attention.sliding_window += MORE_SEEN
        self.model.norm = family.piece("RMSNorm")(hidden, eps=config.rms_norm_eps)
        self.pre_projection: Any = nn.Linear(2 * backbone, hidden, bias=False)
        self.post_projection: Any = nn.Linear(hidden, backbone, bias=False)
        self.lm_head: Any = nn.Linear(hidden, config.vocab_size, bias=False)
        self.masked_embedding: Any = None
        if raw.get("use_ordered_embeddings"):
            self.masked_embedding = _MaskedEmbedding(raw, hidden, config.vocab_size)


class AssistantHead:
    """An assistant on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    See `featured.Head`; a feature is kept as the two layers' inputs, in the order of `sources`, and the
    output of the final norm, `[3 * hidden]` of the target, until its keys and values are written.
    """

    def __init__(
        self,
        config: Any,
        target_config: Any,
        family: Family,
        network: _Network,
        sources: tuple[_Source, _Source],
        table: torch.Tensor,
        layers: tuple[int, int],
        device: torch.device,
        product: Product,
    ) -> None:
        self.capture = (*layers, target_config.num_hidden_layers)
        self.context_max = spec_of(config).context_max
        self.hidden_size: int = config.hidden_size
        self.feature_width: int = target_config.hidden_size
        self.dtype: torch.dtype = network.pre_projection.weight.dtype
        self.device = device
        modules = (network, *sources)
        distinct = {id(each): each for module in modules for each in module.parameters()}
        self.weight_bytes = sum(each.numel() * each.element_size() for each in distinct.values())
        self._config, self._network, self._sources, self._table = config, network, sources, table
        self._types: list[str] = config.layer_types
        rotary = family.piece("RotaryEmbedding")
        self._rotary = rotary(config=config).to(device)
        self._target_rotary = rotary(config=target_config).to(device)
        self._scale = family.embedding_scale(
            target_config, lambda value: torch.tensor(value, dtype=self.dtype).item()
        )
        for part in modules:
            call_directly(part, family, product)
        held = {source.kind: source.heads for source in sources}
        specs = [
            replace(spec, source=PLACE[kind], kv=held[kind], window=spec.window and spec.window + MORE_SEEN)
            for spec, kind in zip(spec_of(config).layers, self._types, strict=True)
        ]
        own: Any = network.model.layers
        self._layers = Layers(own, specs, family, self.dtype, product)

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: torch.device) -> AssistantHead:
        """The assistant of `files` for the model of `target`, whose embedding and two layers are read as far
        as it needs them.

        Raises `InputError` for files that are no assistant, are incomplete, or belong to another target.
        """
        raw, target_config = assistant_config(files), target.config()
        config = _decoder_config(raw, files.model)
        target_family = family_of(target_config, target.model)
        if target_family.module not in ("gemma4", "gemma4_unified"):
            raise InputError(
                f"drafter {files.model!r} is an assistant of Gemma 4, which reads its keys and values; "
                f"expected --model to be one, got a model of {target_config.model_type}"
            )
        backbone = raw.get("backbone_hidden_size")
        for name, expected, got in (
            ("backbone_hidden_size", target_config.hidden_size, backbone),
            ("vocab_size", target_config.vocab_size, config.vocab_size),
        ):
            if got != expected:
                raise InputError(
                    f"assistant {files.model!r} is for another model: expected {name} {expected} as of "
                    f"{target.model!r}, got {got!r:.40}; give the one that was published with this model"
                )
        layers = _layers_read(target_config)
        _check_heads(config, target_config, layers, files.model, target.model)
        family = FAMILIES[config.model_type]
        with torch.device("meta"):
            network = _Network(raw, config, family, target_config.hidden_size).eval()
            sources = tuple(_Source(target_config, target_family, layer).eval() for layer in layers)
        compute = DTYPES[ACTIVATIONS[dtype]]
        product = kernel_of(ACTIVATIONS[dtype], device).product
        own = SafetensorsTensors(files.model, files.file_map(), files.path, {**ELEMENT_BYTES, **WHOLE_BYTES})
        _check_known(own, network, config, files.model)
        embedded = "model.embed_tokens.weight"
        fill(network, own, compute, device, renamed={"lm_head.weight": embedded} if embedded in own else {})
        _check_ordering(network, files.model)
        tensors = target.tensors()
        prefix = target_family.root(tensors).prefix
        for source, layer in zip(sources, layers, strict=True):
            fill(source, tensors, compute, device, prefix=f"{prefix}layers.{layer}.")
        table = embedding_rows(target, tensors, compute)
        return AssistantHead(
            config, target_config, family, network, (sources[0], sources[1]), table, layers, device, product
        )

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature."""
        numbers = sum(source.heads.numbers for source in self._sources)
        return (numbers + self.feature_width) * self.dtype.itemsize

    def new_cache(self, positions: int) -> TreeCache:
        """An empty cache of one request, in which each position has its slot."""
        return TreeCache(
            heads={PLACE[source.kind]: source.heads for source in self._sources},
            slots_max=positions,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def project(self, target_features: torch.Tensor) -> torch.Tensor:
        """The target's features as they come, `[rows, 3 * hidden]`."""
        return target_features.to(self.device, self.dtype)

    @torch.inference_mode()
    def write(self, inputs: torch.Tensor, positions: torch.Tensor, cache: TreeCache) -> None:
        """Keys and values of committed nodes at `positions` `[rows]` int64, from what came into the two
        layers, `[rows, 2 * hidden]`."""
        for source, hidden in zip(self._sources, inputs.chunk(len(TYPES), dim=1), strict=True):
            angles = angles_of(self._target_rotary, hidden, positions[None], f"{source.kind}_")
            cache.write(PLACE[source.kind], positions, *source.keys_and_values(hidden[None], angles))

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, batch: TreeBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `logits` takes, `[rows, hidden_size]`, and predicted features `[rows, feature_width]`.

        `tokens` and `positions` `[rows]` int64, the latter of the first row that no longer reads what the
        target computed; `features` `[rows, feature_width]`.
        """
        network: Any = self._network
        embedded = self._table[tokens].to(self.device, self.dtype) * self._scale
        hidden = network.pre_projection(torch.cat((embedded, features), dim=-1))[None]
        angles = {
            kind: angles_of(self._rotary, hidden, positions[None], f"{kind}_") for kind in {*self._types}
        }
        by_layer = [angles[kind] for kind in self._types]
        hidden = self._layers.run(hidden, by_layer, [batch] * len(by_layer))
        hidden = network.model.norm(hidden)[0]
        return hidden, network.post_projection(hidden)

    def batch(self, requests: list[Any]) -> TreeBatch:
        """Of rows that attend to what `write` wrote."""
        return TreeBatch(requests, 0)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` in float32 from `[rows, hidden_size]`; the published code caps none."""
        network = self._network
        if network.masked_embedding is not None:
            found: torch.Tensor = network.masked_embedding.logits(hidden, network.lm_head.weight)
            return found
        logits: torch.Tensor = network.lm_head(hidden)
        return logits.float()

    def target_ids(self) -> None:
        """An assistant has its target's vocabulary."""


def _decoder_config(raw: Mapping[str, Any], model: str) -> Any:
    """Of the decoder within, as of a model whose layers have keys of their own: what is said of keys is the
    target's."""
    with IMPORTING:
        from transformers import AutoConfig

    fields = {name: value for name, value in raw["text_config"].items() if name != "model_type"}
    layers = fields.get("num_hidden_layers")
    if fields.get("num_kv_shared_layers") not in (None, 0, layers):
        raise InputError(
            f"assistant {model!r}: num_kv_shared_layers: expected all of its {layers!r:.40} layers, got "
            f"{fields['num_kv_shared_layers']!r:.40}"
        )
    for name, expected in _WITHOUT.items():
        if fields.get(name, expected) != expected:
            raise InputError(f"assistant {model!r}: {name}: expected {expected}, got {fields[name]!r:.40}")
    own = {**fields, **_WITHOUT, "num_kv_shared_layers": 0}
    build = partial(AutoConfig.for_model, raw["text_config"]["model_type"], **own)
    config = built_config(build, f"assistant {model!r}")
    family_of(config, model)
    if raw.get("use_ordered_embeddings"):
        clusters, chosen = raw.get("num_centroids"), raw.get("centroid_intermediate_top_k")
        is_whole = type(clusters) is type(chosen) is int and 1 <= chosen <= clusters
        if not is_whole or config.vocab_size % clusters:
            raise InputError(
                f"assistant {model!r}: expected num_centroids that divide its vocabulary of "
                f"{config.vocab_size}, and at most as many as centroid_intermediate_top_k, got "
                f"{clusters!r:.40} and {chosen!r:.40}"
            )
    return config


def _layers_read(target_config: Any) -> tuple[int, int]:
    """The target's layers whose keys and values an assistant reads, in growing order: of each type the last
    one with keys of its own."""
    sources = spec_of(target_config).sources
    own = [layer for layer, source in enumerate(sources) if source == layer]
    last = {target_config.layer_types[layer]: layer for layer in own}
    first, second = sorted(last[kind] for kind in TYPES)
    return first, second


def _check_heads(config: Any, target_config: Any, layers: tuple[int, int], model: str, target: str) -> None:
    """Raises `InputError` unless the assistant's heads are those of the target's two layers."""
    theirs = spec_of(target_config).heads
    expected = {target_config.layer_types[layer]: theirs[layer] for layer in layers}
    for layer, own in enumerate(spec_of(config).heads):
        kind = config.layer_types[layer]
        if own.width != expected[kind].width or config.num_attention_heads % expected[kind].count:
            raise InputError(
                f"assistant {model!r} is for another model: expected heads in {kind} that read "
                f"{expected[kind].count} of {expected[kind].width} as of {target!r}, got "
                f"{config.num_attention_heads} of {own.width}"
            )


def _check_known(tensors: Tensors, network: _Network, config: Any, model: str) -> None:
    """Refuses tensors that an assistant has no place for."""
    idle = {
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in range(config.num_hidden_layers)
        for name in _OF_KEYS
    }  # as published with layers that have no use for them
    known = {*network.state_dict(), "model.embed_tokens.weight", *idle}
    unknown = sorted(name for name in tensors if name not in known)
    if unknown:
        raise InputError(
            f"assistant {model!r} has tensors that no published one has, {', '.join(unknown[:3])}: not "
            "supported"
        )


def _check_ordering(network: _Network, model: str) -> None:
    if network.masked_embedding is None:
        return
    ordering: torch.Tensor = network.masked_embedding.token_ordering
    if not torch.equal(ordering.sort().values.cpu(), torch.arange(len(ordering))):
        raise InputError(f"assistant {model!r}: token_ordering: expected each token once; copy it again")
