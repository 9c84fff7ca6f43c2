"""The network of a block drafter, from its published files: DFlash (arXiv 2602.06036) and DSpark.

A pass runs a block: the token whose successors are wanted, and masks behind it. In each layer its rows
attend to each other, and to keys and values that the layer makes of the features of all tokens before the
block. A feature is several hidden states of the target, projected; so nothing of a text runs through the
layers but blocks. The layers are Qwen3's; embedding and `lm_head` are the target's where the files have none.
DSpark's logits depend on the token right before, too: a product of low rank (its "Markov head") is added, so
guesses are a node's and not a place's.

After `DFlashDraftModel` and `Qwen3DSparkModel` of the authors' code. DSpark's other head, which foretells how
often a guess is right, is not read: here that is learnt from what comes true.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, PRECISION_BYTES
from flowspec.draft.block_files import FIELDS, BlockConfig
from flowspec.draft.reading import Shapes, built_config, embedding_rows, parameters_of, read_parts, rows_of
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows
from flowspec.model.engine import Engine
from flowspec.model.engines import engine_of
from flowspec.model.families import FAMILIES
from flowspec.model.files import ModelFiles
from flowspec.model.imports import IMPORTING
from flowspec.model.parts import LayerShape, Matrix, linear_shape, norm_shape, table_shape
from flowspec.model.program import Place
from flowspec.model.safetensors_file import SafetensorsTensors
from flowspec.model.sampler import F32
from flowspec.model.spec import spec_of
from flowspec.model.support import family_of
from flowspec.model.weights import end_names, held_bytes

_FAMILY = FAMILIES["qwen3"]
_OF_BLOCKS = ("architectures", "auto_map", "is_causal", "model_type", FIELDS)
"""Fields of a config that are not of its layers."""
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_UNUSED = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def _shapes(spec: ModelSpec, block: BlockConfig) -> Shapes:
    """Of every part, under the published files' names."""
    hidden = spec.hidden
    layers = {
        f"layers.{index}": LayerShape(spec=layer, family=_FAMILY, hidden=hidden)
        for index, layer in enumerate(spec.layers)
    }
    found: dict[str, Any] = {
        **layers,
        "norm": norm_shape(hidden),
        "fc": linear_shape(hidden, len(block.captures) * hidden),
        "hidden_norm": norm_shape(hidden),
        "lm_head": linear_shape(spec.vocabulary, hidden),
    }
    if block.rank:
        found["markov_head.markov_w1"] = table_shape(spec.vocabulary, block.rank)
        found["markov_head.markov_w2"] = linear_shape(spec.vocabulary, block.rank)
    if block.is_gated:
        found["markov_head.gate_proj"] = linear_shape(block.rank, hidden + block.rank, has_bias=True)
    return found


class BlockHead:
    """A block drafter on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    See `featured.Head`. `table` has the embedding's rows, on the CPU.
    """

    def __init__(
        self,
        spec: ModelSpec,
        block: BlockConfig,
        engine: Engine,
        parts: dict[str, Any],
        table: Matrix,
    ) -> None:
        self.capture, self.context_max = block.captures, spec.context_max
        self.width = spec.hidden
        self.hidden_size = self.width + block.rank
        self.block, self.engine = block, engine
        self.weight_bytes = held_bytes(parts)
        self._spec, self._table = spec, table
        self._fc = engine.rows(linear=parts["fc"])
        self._hidden_norm = engine.rows(norm=parts["hidden_norm"])
        self._norm = engine.rows(norm=parts["norm"])
        self._lm_head = engine.rows(linear=parts["lm_head"], are_logits=True)
        if block.rank:
            self._latent = parts["markov_head.markov_w1"].matrix
            self._markov = engine.rows(linear=parts["markov_head.markov_w2"], are_logits=True)
        if block.is_gated:
            self._gate = engine.rows(linear=parts["markov_head.gate_proj"])
        self._layers, self._writers = [], []
        for index, layer in enumerate(spec.layers):
            own = parts[f"layers.{index}"]
            self._layers.append(engine.layer(own, layer, Place(index)))
            keys, values = (own[f"self_attn.{name}_proj"] for name in ("k", "v"))
            norm = engine.rows(norm=own["self_attn.k_norm"])
            made = (engine.rows(linear=each) for each in (keys, values))
            self._writers.append((*made, norm))
        self._causal = [
            layer.window > 0 if block.is_causal is None else block.is_causal for layer in spec.layers
        ]

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: str) -> BlockHead:
        """The block drafter of `files` for the model of `target`, whose embedding and `lm_head` it uses.

        Raises `InputError` for files that are none, are incomplete, or belong to another target.
        """
        raw, whole = files.raw_config(), target.spec
        if files.scheme is not None:
            raise InputError(
                f"block drafter {files.model!r} is quantised; expected float32, bfloat16 or float16"
            )
        block = BlockConfig.read(raw, files.model, len(whole.layers), whole.vocabulary)
        spec = spec_of(_layers_config(raw, files.model))
        for name, expected, got in (
            ("hidden_size", whole.hidden, spec.hidden),
            ("vocab_size", whole.vocabulary, spec.vocabulary),
        ):
            if got != expected:
                raise InputError(
                    f"block drafter {files.model!r} is for another model: expected {name} {expected} as of "
                    f"{target.model!r}, got {got}; give the one that was trained for this model"
                )
        engine, shapes = engine_of(ACTIVATIONS[dtype], device, spec.norm), _shapes(spec, block)
        own = SafetensorsTensors(files.model, files.file_map(), files.path)
        known = {*parameters_of(shapes), _EMBEDDING, *_UNUSED}
        unknown = sorted(name for name in own if name not in known)
        if unknown:
            raise InputError(
                f"block drafter {files.model!r} has tensors that no published one has, "
                f"{', '.join(unknown[:3])}: not supported"
            )
        tensors = target.tensors()
        _, lm_head = end_names(whole, tensors)

        def read(name: str, array: npt.NDArray[Any]) -> None:
            if name == _LM_HEAD and name not in own:
                tensors.copy_into(lm_head, array)
            else:
                own.copy_into(name, array)

        parts = read_parts(shapes, engine, spec.eps, read)
        if _EMBEDDING in own:
            table = rows_of(own, _EMBEDDING, (spec.vocabulary, spec.hidden), engine.dtype)
        else:
            table = embedding_rows(target, tensors, engine.dtype)
        return BlockHead(spec, block, engine, parts, table)

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values of all layers."""
        return sum(heads.numbers for heads in self._spec.heads) * int(PRECISION_BYTES[self.engine.dtype])

    def new_cache(self, positions: int) -> TreeCache:
        """An empty cache of one request, in which each position has its slot; a block needs its own."""
        heads = dict(enumerate(self._spec.heads))
        return TreeCache(heads, self.engine, slots_max=positions + self.block.size)

    def project(self, target_features: npt.NDArray[Any]) -> Array:
        """The target's features `[rows, hidden * len(capture)]` as layers read them, `[rows, hidden]`."""
        return self._hidden_norm(self._fc(self.engine.cast(target_features)))

    def write(self, features: Array, positions: I64, cache: TreeCache) -> None:
        """Keys and values of committed nodes at `positions` `[rows]`, of `project`'s `[rows, hidden]`."""
        engine, rows = self.engine, len(positions)
        angles = [engine.angles(positions, rotary) for rotary in self._spec.rotaries]
        for index, (keys_of, values_of, norm) in enumerate(self._writers):
            layer = self._spec.layers[index]
            shape = rows, layer.kv.count, layer.kv.width
            keys = norm(keys_of(features).reshape(-1, layer.kv.width)).reshape(shape)
            values = values_of(features).reshape(shape)
            engine.store(positions, engine.turn(keys, angles[layer.rotary]), values, cache.of(index))

    def run(self, tokens: Sequence[int], begins: Sequence[int], caches: Sequence[TreeCache]) -> Array:
        """Of each block what is guessed of the places after its first, `[blocks, guesses, width]`.

        Each block begins at a position of its own with a token that is known; its cache holds keys of all
        positions before. What it writes from there on is the next writer's.
        """
        size, engine = self.block.size, self.engine
        ids = np.full((len(tokens), size), self.block.mask)
        ids[:, 0] = tokens
        embedded = engine.cast(self._table.weights[ids.reshape(-1)])
        hidden = engine.scaled(embedded, self.block.embedding_scale)
        everywhere, causal, places = [], [], []
        for first, (begin, cache) in enumerate(zip(begins, caches, strict=True)):
            cache.reserve(begin + size)
            own = np.arange(begin, begin + size)
            keys = np.arange(begin + size, dtype=np.int32)
            before = keys[None] <= own[:, None]
            everywhere.append(TreeRows(cache, first * size, own, own, keys, np.ones_like(before)))
            causal.append(TreeRows(cache, first * size, own, own, keys, before))
            places.append(own)
        positions = np.concatenate(places)
        angles = [engine.angles(positions, rotary) for rotary in self._spec.rotaries]
        batches = TreeBatch(everywhere), TreeBatch(causal)
        for layer, spec, is_causal in zip(self._layers, self._spec.layers, self._causal, strict=True):
            run = engine.begin(hidden, batches[is_causal])
            run.run(layer, angles[spec.rotary])
            hidden = run.hidden
        found = self._norm(hidden).reshape(len(tokens), size, -1)
        return found[:, size - self.block.guesses :]

    def after(self, guesses: Array, tokens: Sequence[int]) -> Array:
        """What `logits` takes, `[rows, hidden_size]`: guesses `[rows, width]`, and the tokens that stand
        before them."""
        if not self.block.rank:
            return guesses
        engine = self.engine
        latent = engine.take(self._latent, np.array(tokens, np.int64))
        if self.block.is_gated:
            gates = engine.function(engine.wide(self._gate(engine.joined([guesses, latent]))), "sigmoid")
            latent = engine.narrow(gates * engine.wide(latent))
        return engine.joined([guesses, latent])

    def logits(self, hidden: Array) -> F32:
        """`[rows, vocabulary]` from `[rows, hidden_size]`."""
        engine = self.engine
        logits = self._lm_head(hidden[:, : self.width]) * self.block.logits_scale
        cap = self.block.logits_cap
        if cap is not None:
            logits = engine.function(logits / cap, "tanh") * cap
        if self.block.rank:
            logits = logits + self._markov(hidden[:, self.width :])
        found: F32 = engine.numpy(logits)
        return found

    def target_ids(self) -> None:
        """A block drafter has its target's vocabulary."""


def _layers_config(raw: dict[str, Any], model: str) -> Any:
    """As of a Qwen3, whose layers these are."""
    with IMPORTING:
        from transformers import Qwen3Config

    own = {name: value for name, value in raw.items() if name not in _OF_BLOCKS}
    config = built_config(partial(Qwen3Config.from_dict, own), f"block drafter {model!r}")
    family_of(config, model)
    return config
