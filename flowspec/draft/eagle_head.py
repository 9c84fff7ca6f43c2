"""The network of an EAGLE head: EAGLE-1/2 (`eagle`) and EAGLE-3 (`eagle3`), of any published layout.

Row i of a head reads token i + 1 and feature i, and predicts feature i + 1, from which comes token i + 2. A
feature is what the target computed (`capture`), or for guesses what the head predicted. What there is of
norms and layers is in `HeadConfig`. The layers are Llama's or Qwen3's; embedding and `lm_head` are the
target's where the head has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol.model_spec import Dense, LayerSpec, ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, PRECISION_BYTES
from flowspec.draft.eagle_config import HeadConfig, head_config
from flowspec.draft.eagle_files import HeadTensors
from flowspec.draft.reading import Shapes, parameters_of, read_parts
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.engine import Engine
from flowspec.model.engines import engine_of
from flowspec.model.files import ModelFiles
from flowspec.model.parts import LayerShape, Linear, Shape, linear_shape, norm_shape, table_shape
from flowspec.model.program import Place
from flowspec.model.sampler import F32
from flowspec.model.slice import finished
from flowspec.model.spec import spec_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import end_names, held_bytes
from flowspec.validation import checked

_UNUSED = {"eagle": {"lm_head.weight"}, "eagle3": {"d2t", "t2d"}}
"""Tensors that published files hold beside the network; EAGLE-1/2 always answers through the target's
`lm_head`."""
_EMBEDDING, _LM_HEAD = "embed_tokens", "lm_head"


def _shapes(config: HeadConfig, spec: ModelSpec, biases: frozenset[str]) -> Shapes:
    """Of every part of a head, under the names of `eagle_files`; a linear layer adds a bias that is among
    these names."""
    width, captured = spec.hidden, config.target_width * len(config.capture)

    def linear(name: str, outputs: int, inputs: int) -> Shape:
        return linear_shape(outputs, inputs, f"{name}.bias" in biases)

    found: dict[str, Any] = {_EMBEDDING: table_shape(config.vocabulary, width)}
    if config.feature_norm == "each":
        norms = range(len(config.capture))
        found |= {f"fc_norm.{place}": norm_shape(config.target_width) for place in norms}
    elif config.feature_norm == "joined":
        found["input_norm"] = norm_shape(captured)
    if config.has_fc:
        found["fc"] = linear("fc", width, width + captured if config.kind == "eagle" else captured)
    for index, layer in enumerate(spec.layers):
        assert layer.dense is not None
        both = 2 * width if layer.dense.embedding_norm else 0
        found[f"layers.{index}"] = LayerShape(spec=layer, family=config.family, hidden=width, read=both)
    if config.has_norm:
        found["norm"] = norm_shape(width)
    if not config.is_tied or config.has_lm_head:
        found[_LM_HEAD] = linear(_LM_HEAD, config.draft_vocabulary, width)
    return found


class EagleHead:
    """A head on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    `capture`: the hidden states of the target that make up a feature: c is the input of layer c, and the
    number of layers is the output after the final norm. A feature is `feature_width` wide, a predicted one
    `hidden_size`. `target`: as whose logits are finished, where `lm_head` is the target's.
    """

    def __init__(
        self,
        config: HeadConfig,
        spec: ModelSpec,
        engine: Engine,
        parts: dict[str, Any],
        target_ids: I64 | None,
        target: ModelSpec | None,
    ) -> None:
        self.kind, self.capture, self.spec = config.kind, config.capture, spec
        self.hidden_size = spec.hidden
        self.feature_width = config.target_width * len(config.capture)
        self.engine = engine
        self.weight_bytes = held_bytes(parts)
        self._form, self._target_ids, self._target = config, target_ids, target
        self._embedding = parts[_EMBEDDING].matrix
        self._feature_norms = [
            engine.rows(norm=part)
            for name, part in parts.items()
            if name.startswith(("fc_norm.", "input_norm"))
        ]
        fc, norm = parts.get("fc"), parts.get("norm")
        self._fc = None if fc is None else engine.rows(linear=fc)
        self._norm = None if norm is None else engine.rows(norm=norm)
        lm_head = parts.get(_LM_HEAD) or Linear(inputs=spec.hidden, matrices=(self._embedding,))
        is_before = norm is not None and not config.is_output_normed
        self._lm_head = engine.rows(norm=norm if is_before else None, linear=lm_head, are_logits=True)
        self._layers = [
            engine.layer(parts[f"layers.{place}"], own, Place(place)) for place, own in enumerate(spec.layers)
        ]

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: str) -> EagleHead:
        """The head of `files` for the model of `target`, whose embedding and `lm_head` are read as the head
        needs them.

        Raises `InputError` for files that are no EAGLE head, are incomplete, or belong to another target.
        """
        tensors, target_spec = HeadTensors(files), target.spec
        config = head_config(files, tensors, target)
        try:
            own = spec_of(config.layer)
            spec = checked(structs.replace(own, layers=tuple(_layers(config, own, tensors.names))))
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"cannot build EAGLE head {files.model!r} from its config.json: {error}"
            ) from None
        engine = engine_of(ACTIVATIONS[files.precision_beside(dtype)], device, spec.norm)
        index = target.tensors()
        shared = _shared(config, spec, tensors, target_spec, index)
        parts = _read(config, spec, tensors, index, shared, engine)
        target_ids = _target_ids(config, tensors)
        is_shared = f"{_LM_HEAD}.weight" in shared
        return EagleHead(config, spec, engine, parts, target_ids, target_spec if is_shared else None)

    @property
    def context_max(self) -> int:
        return self.spec.context_max

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature as it is run."""
        kept = sum(heads.numbers for heads in self.spec.heads)
        return (kept + self.hidden_size) * int(PRECISION_BYTES[self.engine.dtype])

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty cache for one request; a `TreeBatch` over it begins at layer 0."""
        heads = dict(enumerate(self.spec.heads))
        return TreeCache(heads, self.engine, slots_max=slots_max)

    def project(self, target_features: npt.NDArray[Any]) -> Array:
        """The target's features `[rows, feature_width]` as `run` takes them, `[rows, hidden_size]`."""
        features = self.engine.cast(target_features)
        if self._feature_norms:
            width = features.shape[1] // len(self._feature_norms)
            parts = [features[:, at : at + width] for at in range(0, features.shape[1], width)]
            norms = zip(self._feature_norms, parts, strict=True)
            features = self.engine.joined([norm(part) for norm, part in norms])
        if self.kind == "eagle3" and self._fc is not None:
            features = self._fc(features)
        return features

    def run(self, tokens: I64, features: Array, positions: I64, batch: TreeBatch) -> Array:
        """Predicted features `[rows, hidden_size]`, which may be `features` of further rows.

        `tokens` and `positions` `[rows]`, `features` `[rows, hidden_size]`; keys and values go to the batch's
        caches. Only distances between positions matter, so a row may have its token's position or its
        feature's.
        """
        for rows in batch.requests:
            rows.cache.reserve(len(rows.key_positions))
        embedded = self.engine.take(self._embedding, tokens)  # [rows, hidden]
        if self.kind == "eagle":
            assert self._fc is not None
            hidden = self._fc(self.engine.joined([embedded, features]))
        else:
            hidden = self.engine.copied(features)
        angles = [self.engine.angles(positions, rotary) for rotary in self.spec.rotaries]
        batch.embedding = embedded
        run = self.engine.begin(hidden, batch)
        for layer, own in zip(self._layers, self.spec.layers, strict=True):
            run.run(layer, angles[own.rotary])
        predicted = run.hidden
        return self._norm(predicted) if self._norm and self._form.is_output_normed else predicted

    def logits(self, hidden: Array) -> F32:
        """`[rows, draft vocabulary]` from predicted features `[rows, hidden_size]`."""
        return finished(self.engine, self._target or self.spec, self._lm_head(hidden))

    def target_ids(self) -> I64 | None:
        """The target's id of every draft id, `[draft vocabulary]`; None when they are the same."""
        return self._target_ids


def _layers(config: HeadConfig, own: ModelSpec, names: frozenset[str]) -> list[LayerSpec]:
    """Of its layers, by what each reads; each bias is there if its tensor is. Experts that a
    config has left of its target are not theirs."""
    found = []
    for index, (form, spec) in enumerate(zip(config.layers, own.layers, strict=True)):
        assert spec.dense is not None, "its layers are of a dense family"
        prefix = f"layers.{index}."
        of_layer = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        dense = Dense(
            scale=spec.kv.width**-0.5,
            activation=spec.dense.activation,
            neurons=config.layer.intermediate_size,
            biases=tuple(sorted(name.removesuffix(".bias") for name in of_layer if name.endswith(".bias"))),
            norm_before_attention="" if form.reads == "feature as it is" else form.norm,
            embedding_norm="input_layernorm" if form.reads.startswith("normed embedding") else "",
            is_residual_normed=index == 0 and config.is_residual_normed,
            query_norm="head" if config.family.module == "qwen3" else "",
        )
        found.append(structs.replace(spec, dense=dense))
    return found


def _shared(
    config: HeadConfig, spec: ModelSpec, tensors: HeadTensors, target: ModelSpec, index: Tensors
) -> dict[str, str]:
    """The parameters that are the target's, each with the tensor's name there: maybe the embedding, and
    `lm_head` where the head has none of its own."""
    shared, (embedding, lm_head) = {}, end_names(target, index)
    if f"{_EMBEDDING}.weight" not in tensors:
        shared[f"{_EMBEDDING}.weight"] = embedding
    if not config.has_lm_head and not config.is_tied:
        shared[f"{_LM_HEAD}.weight"] = lm_head
    for name in shared:
        if spec.hidden != target.hidden:
            raise InputError(
                f"EAGLE head {tensors.model!r} has no {name}, and its hidden_size is not the target's; "
                "expected one in its files"
            )
    return shared


def _read(
    config: HeadConfig,
    spec: ModelSpec,
    tensors: HeadTensors,
    index: Tensors,
    shared: dict[str, str],
    engine: Engine,
) -> dict[str, Any]:
    """Every part, from the head's files or if it is shared from the target's."""
    shapes = dict(_shapes(config, spec, tensors.names))
    unknown = sorted(
        tensors.published(name)
        for name in tensors.names - set(parameters_of(shapes)) - _UNUSED[config.kind]
        if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise InputError(
            f"EAGLE head {tensors.model!r} has tensors that its config.json gives no use for, "
            f"{', '.join(unknown[:3])}: not supported"
        )
    names = list(shared.values())
    if len(names) == 2 and names[0] == names[1]:  # the target's are tied: one copy is enough
        del shapes[_LM_HEAD]

    def read(name: str, array: npt.NDArray[Any]) -> None:
        if name in shared:
            index.copy_into(shared[name], array)
        else:
            tensors.copy_into(name, array)

    found = read_parts(shapes, engine, spec.eps, read)
    return found


def _target_ids(config: HeadConfig, tensors: HeadTensors) -> I64 | None:
    """`d2t` holds the distance of every draft id from its target id."""
    is_whole = config.draft_vocabulary == config.vocabulary
    if config.kind == "eagle" or (is_whole and "d2t" not in tensors):
        return None
    distances = tensors.load("d2t", (config.draft_vocabulary,))
    if distances.dtype.kind != "i":
        raise InputError(f"EAGLE head {tensors.model!r}: expected d2t to hold whole numbers")
    if is_whole:
        if distances.any():  # SafeAILab's code does not read it then, vLLM's does
            raise InputError(f"EAGLE head {tensors.model!r}: expected a d2t of zeros for a whole vocabulary")
        return None
    ids = np.arange(config.draft_vocabulary) + distances.astype(np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary:
        raise InputError(
            f"EAGLE head {tensors.model!r}: expected d2t to lead to ids below {config.vocabulary}, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )
    return ids
