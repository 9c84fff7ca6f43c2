"""The MTP layer ("multi-token prediction") that comes in a model's own checkpoint: Qwen3.5's, Qwen3.6's and
GLM-4.5's. An `eagle.CachedHead`.

Row i reads token i + 1 and feature i. The norm of the token's embedding, then that of the feature, side by
side, are projected to the input of one layer of the model's own family, which attends; the layer's output,
through the layer's last norm, is the predicted feature i + 1, and the model's `lm_head` makes logits of token
i + 2 of it. A feature is the model's hidden state behind its final norm: so in vLLM (`qwen3_5_mtp`,
`glm4_moe_mtp`, `deepseek_mtp`), in SGLang (`qwen3_5_mtp`, `glm4_moe_nextn`) and in llama.cpp for Qwen3.5,
where acceptance was higher so than with states before that norm. What further guesses read is the predicted
feature, behind the last norm.

vLLM alone has the embedding of a text's second token be zero in GLM-4.5's layer; here it is what it is, as in
SGLang.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.mtp_files import MtpTensors, find_layout
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.engine import Engine
from flowspec.model.engines import engine_of
from flowspec.model.families import config_of_mtp
from flowspec.model.files import ModelFiles
from flowspec.model.program import Place
from flowspec.model.sampler import F32
from flowspec.model.slice import embedded, finished
from flowspec.model.spec import spec_of
from flowspec.model.weights import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    SliceParts,
    Span,
    end_names,
    family_named,
    held_bytes,
    load_parts,
)


class MtpHead:
    """The layer on one device, loaded as a model of one layer; the caches belong to the caller. Not
    thread-safe: one thread runs it.

    `capture`: the hidden state of the target that is its feature, which is that behind the final norm.
    """

    def __init__(self, spec: ModelSpec, parts: SliceParts, engine: Engine, capture: tuple[int, ...]) -> None:
        self.spec, self.engine, self.capture = spec, engine, capture
        self.context_max, self.hidden_size = spec.context_max, spec.hidden
        self.weight_bytes = held_bytes(parts)
        self._parts, layer = parts, parts[0]
        entry: Any = (layer[f"entry.{name}"] for name in ("embedding", "feature", "projection"))
        of_embedding, of_feature, projection = entry
        self._of_embedding = engine.rows(norm=of_embedding)
        self._of_feature = engine.rows(norm=of_feature)
        self._projection = engine.rows(linear=projection)
        self._layer = engine.layer(layer, spec.layers[0], Place())
        self._norm = engine.rows(norm=parts[NORM])
        self._lm_head = engine.rows(linear=parts[LM_HEAD], are_logits=True)

    @staticmethod
    def load(target: ModelFiles, dtype: str, device: str) -> MtpHead:
        """The MTP layer of a model, in the model's own precision; raises `InputError` where its checkpoint
        has none, or not all of it."""
        whole, spec = target.config(), target.spec
        layout = find_layout(target, whole, family_named(spec))
        tensors = target.tensors()
        own = MtpTensors(tensors, layout, len(spec.layers), end_names(spec, tensors))
        of_layer = spec_of(config_of_mtp(whole))
        (layer,) = of_layer.layers
        assert layer.dense is not None, "there is an operation for everything"
        with_entry = structs.replace(layer, dense=structs.replace(layer.dense, has_entry=True))
        of_layer = structs.replace(of_layer, layers=(with_entry,))
        engine = engine_of(dtype, device, spec.norm)
        parts = load_parts(of_layer, Span(first=0, end=1, count=1), own, dtype, engine)
        return MtpHead(of_layer, parts, engine, (len(spec.layers),))

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature."""
        numbers = self.spec.heads[0].numbers + self.hidden_size
        return numbers * int(PRECISION_BYTES[self.engine.dtype])

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty cache for one request; a `TreeBatch` over it begins at layer 0."""
        return TreeCache({0: self.spec.heads[0]}, self.engine, slots_max=slots_max)

    def target_ids(self) -> None:
        """Its ids are the target's."""

    def project(self, target_features: npt.NDArray[Any]) -> Array:
        """The target's features `[rows, hidden_size]` as `run` takes them."""
        return self.engine.cast(target_features)

    def run(self, tokens: I64, features: Array, positions: I64, batch: TreeBatch) -> Array:
        """As `EagleHead.run`."""
        for rows in batch.requests:
            rows.cache.reserve(len(rows.key_positions))
        of_token = self._of_embedding(embedded(self.engine, self.spec, self._parts[EMBEDDING], tokens))
        mixed = self._projection(self.engine.joined([of_token, self._of_feature(features)]))
        run = self.engine.begin(mixed, batch)
        run.run(self._layer, self.engine.angles(positions, self.spec.rotaries[0]))
        return self._norm(run.hidden)

    def logits(self, hidden: Array) -> F32:
        """`[rows, vocabulary]` from predicted features `[rows, hidden_size]`."""
        return finished(self.engine, self.spec, self._lm_head(hidden))
