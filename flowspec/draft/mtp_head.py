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

from functools import partial
from typing import Any

import torch
from torch import nn

from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.draft.mtp_files import ENTRY, MtpTensors, find_layout
from flowspec.model.arithmetic.operations import function
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.families import Family, config_of_mtp
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import DTYPES, kernel_of
from flowspec.model.passes import Layers
from flowspec.model.pieces import Pieces, Span
from flowspec.model.spec import spec_of
from flowspec.model.support import family_of
from flowspec.model.weights import embedding_name, fill, lm_head_name


class _Entry(nn.Module):
    """Makes the layer's input: `[1, rows, hidden]` from embeddings and features of that shape."""

    def __init__(self, config: Any, family: Family) -> None:
        super().__init__()
        norm, width, eps = family.piece("RMSNorm"), config.hidden_size, getattr(config, family.norm_eps)
        self.embedding: Any = norm(width, eps=eps)
        self.feature: Any = norm(width, eps=eps)
        self.projection: Any = nn.Linear(2 * width, width, bias=False)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.embedding(embedded), self.feature(features)), dim=-1)
        projected: torch.Tensor = self.projection(both)
        return projected


class MtpHead:
    """The layer on one device, loaded as a model of one layer; the caches belong to the caller. Not
    thread-safe: one thread runs it.

    `capture`: the hidden state of the target that is its feature, which is that behind the final norm.
    """

    def __init__(self, pieces: Pieces, capture: tuple[int, ...], dtype: str, device: torch.device) -> None:
        self.config = pieces.config
        self.capture = capture
        self.context_max = spec_of(pieces.config).context_max
        self.hidden_size: int = pieces.config.hidden_size
        self.dtype = DTYPES[ACTIVATIONS[dtype]]
        self.device = device
        self.weight_bytes = pieces.weight_bytes
        self._pieces = pieces
        self._layers = Layers(
            pieces.layers, spec_of(pieces.config).layers, pieces.family, self.dtype, pieces.product
        )

    @staticmethod
    def load(target: ModelFiles, dtype: str, device: torch.device) -> MtpHead:
        """The MTP layer of a model, in the model's own precision; raises `InputError` where its checkpoint
        has none, or not all of it."""
        whole = target.config()
        family = family_of(whole, target.model)
        layout = find_layout(target, whole, family)
        tensors = target.tensors()
        shared = (embedding_name(whole, family, tensors), lm_head_name(whole, family, tensors))
        own = MtpTensors(tensors, layout, whole.num_hidden_layers, shared)
        config = config_of_mtp(whole)
        pieces = Pieces.build(config, family, Span(first=0, end=1, count=1))
        with torch.device("meta"):
            pieces.layers[0].add_module(ENTRY, _Entry(config, family))
        kernel = kernel_of(dtype, device)
        fill(pieces, own, DTYPES[ACTIVATIONS[dtype]], device, packing=kernel.linear)
        pieces.rotary.to(device)
        pieces.call_directly(kernel.product)
        return MtpHead(pieces, (whole.num_hidden_layers,), dtype, device)

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature."""
        return (spec_of(self.config).heads[0].numbers + self.hidden_size) * self.dtype.itemsize

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty cache for one request; a `TreeBatch` over it begins at layer 0."""
        heads = {0: spec_of(self.config).heads[0]}
        return TreeCache(heads=heads, slots_max=slots_max, dtype=self.dtype, device=self.device)

    def target_ids(self) -> None:
        """Its ids are the target's."""

    def project(self, target_features: torch.Tensor) -> torch.Tensor:
        """The target's features `[rows, hidden_size]` as `run` takes them."""
        return target_features.to(self.device, self.dtype)

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, batch: TreeBatch
    ) -> torch.Tensor:
        """As `EagleHead.run`."""
        for rows in batch.requests:
            rows.cache.reserve(len(rows.key_positions))
        (layer,), places = self._pieces.layers, positions.to(self.device)[None]
        embedded = self._pieces.embed(tokens.to(self.device))[None]  # [1, rows, hidden]
        mixed = layer.entry(embedded, self.project(features)[None])
        hidden = self._layers.run(mixed, self._pieces.angles(mixed, places), [batch])
        predicted: torch.Tensor = self._pieces.norm(hidden)
        return predicted[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` in float32 from predicted features `[rows, hidden_size]`."""
        assert self._pieces.lm_head is not None, "it is loaded with both ends"
        family, config = self._pieces.family, self._pieces.config
        found: torch.Tensor = family.finish(
            config, self._pieces.lm_head(hidden), partial(function, name="tanh")
        )
        return found.float()
