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

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol.model_spec import Heads, LayerSpec, ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, PRECISION_BYTES
from flowspec.draft.assistant_files import assistant_config
from flowspec.draft.reading import Shapes, built_config, embedding_rows, parameters_of, read_parts
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.attention import Angles, TreeBatch, TreeCache
from flowspec.model.engine import Engine
from flowspec.model.engines import engine_of
from flowspec.model.families import FAMILIES
from flowspec.model.files import ModelFiles
from flowspec.model.imports import IMPORTING
from flowspec.model.parts import LayerShape, Linear, Matrix, Plain, linear_shape, norm_shape
from flowspec.model.program import Place
from flowspec.model.safetensors_file import LEVELS, NUMBERS, SafetensorsTensors
from flowspec.model.sampler import F32
from flowspec.model.spec import spec_of
from flowspec.model.support import family_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import family_named, held_bytes

TYPES = ("sliding_attention", "full_attention")
PLACE = {kind: place - len(TYPES) for place, kind in enumerate(TYPES)}
"""Which layer of a cache holds keys and values for the assistant's layers of a type."""
_WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
"""What an assistant's layers have not, by its publisher's own check."""
MORE_SEEN = 2
"""Its publisher's mask counts back from the last key, both ends included; ours from the row."""
_OF_KEYS = ("k_proj", "k_norm", "v_proj", "v_norm")
_SOURCE = ("input_layernorm", *(f"self_attn.{name}" for name in _OF_KEYS))
"""The parts of a target's layer that make its keys and values."""
_ORDERING = "masked_embedding.token_ordering"


class _Source:
    """The part of a target's layer that makes its keys and values, which has these `parts`."""

    def __init__(
        self, engine: Engine, target: ModelSpec, layer: LayerSpec, kind: str, parts: Mapping[str, Any]
    ) -> None:
        self.kind, self.heads, self.rotary = kind, layer.kv, target.rotaries[layer.rotary]
        self._engine = engine

        def linear(name: str) -> Any:
            return engine.rows(norm=parts["input_layernorm"], linear=parts[name])

        self._keys = linear("self_attn.k_proj")
        self._values = linear("self_attn.v_proj") if "self_attn.v_proj" in parts else self._keys
        self._of_keys, self._of_values = (
            engine.rows(norm=parts[f"self_attn.{name}_norm"]) for name in ("k", "v")
        )

    def keys_and_values(self, hidden: Array, angles: Angles) -> tuple[Array, Array]:
        """Each `[rows, kv_heads, head_dim]`, of what comes into the layer, `[rows, hidden]`."""
        shape, width = (len(hidden), self.heads.count, self.heads.width), self.heads.width
        keys = self._of_keys(self._keys(hidden).reshape(-1, width)).reshape(shape)
        values = self._of_values(self._values(hidden).reshape(-1, width)).reshape(shape)
        return self._engine.turn(keys, angles), values


class _MaskedEmbedding:
    """Which tokens an assistant scores: those of the clusters whose centroids are nearest, in files with an
    embedding in such an order; `chosen` clusters, and the tokens in the clusters' `ordering`."""

    def __init__(
        self, engine: Engine, centroids: Linear, ordering: I64, chosen: int, weights: Matrix
    ) -> None:
        self._engine, self._weights, self._chosen = engine, weights, chosen
        self._centroids = engine.rows(linear=centroids, are_logits=True)
        self._tokens = ordering.reshape(centroids.outputs, -1)

    def logits(self, hidden: Array) -> F32:
        """`[rows, vocabulary]`. Tokens of other clusters have the least number: they are not scored, so none
        of them is ever proposed (the published code gives each a little less than the least)."""
        engine = self._engine
        near = engine.numpy(self._centroids(hidden))
        found = np.full((len(near), self._tokens.size), np.finfo(np.float32).min, np.float32)
        for row, clusters in enumerate(np.argsort(-near, axis=1, kind="stable")[:, : self._chosen]):
            tokens = self._tokens[clusters].reshape(-1)
            own = Plain(self._weights.weights[tokens])
            scores = engine.rows(linear=Linear(inputs=hidden.shape[1], matrices=(own,)), are_logits=True)
            found[row, tokens] = engine.numpy(scores(hidden[row : row + 1]))[0]
        return found


def _shapes(raw: Mapping[str, Any], spec: ModelSpec, family: str, backbone: int) -> Shapes:
    """Of every part, under the published files' names."""
    hidden = spec.hidden
    layers = {
        f"model.layers.{index}": LayerShape(spec=layer, family=FAMILIES[family], hidden=hidden, is_own=False)
        for index, layer in enumerate(spec.layers)
    }
    found: dict[str, Any] = {
        **layers,
        "model.norm": norm_shape(hidden),
        "pre_projection": linear_shape(hidden, 2 * backbone),
        "post_projection": linear_shape(backbone, hidden),
        "lm_head": linear_shape(spec.vocabulary, hidden),
    }
    if raw.get("use_ordered_embeddings"):
        found["masked_embedding.centroids"] = linear_shape(raw["num_centroids"], hidden)
    return found


class AssistantHead:
    """An assistant on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    See `featured.Head`; a feature is kept as the two layers' inputs, in the order of `sources`, and the
    output of the final norm, `[3 * hidden]` of the target, until its keys and values are written. `table` has
    the target's embedding, on the CPU; `types` are those of its layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        types: Sequence[str],
        target: ModelSpec,
        engine: Engine,
        parts: dict[str, Any],
        sources: tuple[_Source, _Source],
        table: Matrix,
        layers: tuple[int, int],
        masked: _MaskedEmbedding | None,
    ) -> None:
        self.capture = (*layers, len(target.layers))
        self.context_max, self.hidden_size = spec.context_max, spec.hidden
        self.feature_width = target.hidden
        self.engine = engine
        self.weight_bytes = held_bytes(parts)
        self._spec, self._target, self._sources, self._table = spec, target, sources, table
        self._masked, self._types = masked, types
        self._norm = engine.rows(norm=parts["model.norm"])
        self._pre = engine.rows(linear=parts["pre_projection"])
        self._post = engine.rows(linear=parts["post_projection"])
        self._lm_head = engine.rows(linear=parts["lm_head"], are_logits=True)
        held = {source.kind: source.heads for source in sources}
        self._layers = []
        for place, (layer, kind) in enumerate(zip(spec.layers, types, strict=True)):
            own = structs.replace(layer, kv=held[kind], window=layer.window and layer.window + MORE_SEEN)
            self._layers.append(engine.layer(parts[f"model.layers.{place}"], own, Place(PLACE[kind])))

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: str) -> AssistantHead:
        """The assistant of `files` for the model of `target`, whose embedding and two layers are read as far
        as it needs them.

        Raises `InputError` for files that are no assistant, are incomplete, or belong to another target.
        """
        raw, whole = assistant_config(files), target.spec
        config = _decoder_config(raw, files.model)
        target_config = target.config()
        family = family_named(whole)
        if family.module not in ("gemma4", "gemma4_unified"):
            raise InputError(
                f"drafter {files.model!r} is an assistant of Gemma 4, which reads its keys and values; "
                f"expected --model to be one, got a model of {target_config.model_type}"
            )
        spec, backbone = spec_of(config), raw.get("backbone_hidden_size")
        for name, expected, got in (
            ("backbone_hidden_size", whole.hidden, backbone),
            ("vocab_size", whole.vocabulary, spec.vocabulary),
        ):
            if got != expected:
                raise InputError(
                    f"assistant {files.model!r} is for another model: expected {name} {expected} as of "
                    f"{target.model!r}, got {got!r:.40}; give the one that was published with this model"
                )
        types = target_config.layer_types
        layers = _layers_read(whole, types)
        held = {types[layer]: whole.layers[layer].kv for layer in layers}
        _check_heads(spec, config.layer_types, held, files.model, target.model)
        shapes = _shapes(raw, spec, config.model_type, whole.hidden)
        engine = engine_of(ACTIVATIONS[dtype], device, spec.norm)
        own = SafetensorsTensors(files.model, files.file_map(), files.path, (*NUMBERS, *LEVELS))
        is_masked = "masked_embedding.centroids" in shapes
        known = (*parameters_of(shapes), *([_ORDERING] if is_masked else []))
        _check_known(own, known, len(spec.layers), files.model)
        embedding = "model.embed_tokens.weight"

        def read(name: str, array: npt.NDArray[Any]) -> None:
            is_tied = name == "lm_head.weight" and embedding in own
            own.copy_into(embedding if is_tied else name, array)

        parts = read_parts(shapes, engine, spec.eps, read)
        masked = None
        if is_masked:
            ordering = own.load(_ORDERING, (spec.vocabulary,)).astype(np.int64)
            if not np.array_equal(np.sort(ordering), np.arange(len(ordering))):
                raise InputError(
                    f"assistant {files.model!r}: token_ordering: expected each token once; copy it again"
                )
            (weights,) = parts["lm_head"].matrices
            given = ordering, raw["centroid_intermediate_top_k"], weights
            masked = _MaskedEmbedding(engine, parts["masked_embedding.centroids"], *given)
        tensors = target.tensors()
        prefix = family.root(tensors).prefix
        sources = []
        for layer in layers:
            shape = LayerShape(spec=whole.layers[layer], family=family, hidden=whole.hidden)
            own_shapes = {
                f"{prefix}layers.{layer}.{name}": shape.places[name][1]
                for name in _SOURCE
                if name in shape.places
            }
            made = read_parts(own_shapes, engine, whole.eps, tensors.copy_into)
            of_layer = {name.removeprefix(f"{prefix}layers.{layer}."): part for name, part in made.items()}
            parts |= {f"source.{name}": part for name, part in made.items()}
            sources.append(_Source(engine, whole, whole.layers[layer], types[layer], of_layer))
        table = embedding_rows(target, tensors, engine.dtype)
        both = sources[0], sources[1]
        return AssistantHead(spec, config.layer_types, whole, engine, parts, both, table, layers, masked)

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature."""
        numbers = sum(source.heads.numbers for source in self._sources)
        return (numbers + self.feature_width) * int(PRECISION_BYTES[self.engine.dtype])

    def new_cache(self, positions: int) -> TreeCache:
        """An empty cache of one request, in which each position has its slot."""
        heads = {PLACE[source.kind]: source.heads for source in self._sources}
        return TreeCache(heads, self.engine, slots_max=positions)

    def project(self, target_features: npt.NDArray[Any]) -> Array:
        """The target's features as they come, `[rows, 3 * hidden]`."""
        return self.engine.cast(target_features)

    def write(self, inputs: Array, positions: I64, cache: TreeCache) -> None:
        """Keys and values of committed nodes at `positions` `[rows]`, from what came into the two layers,
        `[rows, 2 * hidden]`."""
        width = self.feature_width
        for place, source in enumerate(self._sources):
            hidden = inputs[:, place * width : (place + 1) * width]
            angles = self.engine.angles(positions, source.rotary)
            made = source.keys_and_values(hidden, angles)
            self.engine.store(positions, *made, cache.of(PLACE[source.kind]))

    def run(self, tokens: I64, features: Array, positions: I64, batch: TreeBatch) -> tuple[Array, Array]:
        """What `logits` takes, `[rows, hidden_size]`, and predicted features `[rows, feature_width]`.

        `tokens` and `positions` `[rows]`, the latter of the first row that no longer reads what the target
        computed; `features` `[rows, feature_width]`.
        """
        engine, scale = self.engine, self._target.embedding_scale
        embedded = engine.scaled(engine.cast(self._table.weights[tokens]), scale)
        run = engine.begin(self._pre(engine.joined([embedded, features])), batch)
        angles = [engine.angles(positions, rotary) for rotary in self._spec.rotaries]
        for layer, spec in zip(self._layers, self._spec.layers, strict=True):
            run.run(layer, angles[spec.rotary])
        hidden = self._norm(run.hidden)
        return hidden, self._post(hidden)

    def logits(self, hidden: Array) -> F32:
        """`[rows, vocabulary]` from `[rows, hidden_size]`; the published code caps none."""
        if self._masked is not None:
            return self._masked.logits(hidden)
        found: F32 = self.engine.numpy(self._lm_head(hidden))
        return found

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


def _layers_read(target: ModelSpec, types: Sequence[str]) -> tuple[int, int]:
    """The target's layers whose keys and values an assistant reads, in growing order: of each type the last
    one with keys of its own."""
    own = [layer for layer, source in enumerate(target.sources) if source == layer]
    last = {types[layer]: layer for layer in own}
    first, second = sorted(last[kind] for kind in TYPES)
    return first, second


def _check_heads(
    spec: ModelSpec, types: Sequence[str], held: Mapping[str, Heads], model: str, target: str
) -> None:
    """Raises `InputError` unless the assistant's heads are those of the target's two layers."""
    for layer, kind in zip(spec.layers, types, strict=True):
        if layer.kv.width != held[kind].width or layer.heads % held[kind].count:
            raise InputError(
                f"assistant {model!r} is for another model: expected heads in {kind} that read "
                f"{held[kind].count} of {held[kind].width} as of {target!r}, got "
                f"{layer.heads} of {layer.kv.width}"
            )


def _check_known(tensors: Tensors, known: Iterable[str], layers: int, model: str) -> None:
    """Refuses tensors that an assistant has no place for."""
    idle = {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(layers) for name in _OF_KEYS
    }  # as published with layers that have no use for them
    unknown = sorted({*tensors} - {*known, "model.embed_tokens.weight", *idle})
    if unknown:
        raise InputError(
            f"assistant {model!r} has tensors that no published one has, {', '.join(unknown[:3])}: not "
            "supported"
        )
