"""A consecutive slice of a transformers model: loaded alone, run on tree segments, sampled from if it is the last.

Built on the meta device and filled tensor by tensor from the memory-mapped files, so a device never holds more than its
slice. The first slice also holds the embedding, the last the final norm, `lm_head` (the embedding again when tied)
and the samplers.

*Captures* are hidden states on the way that a drafter wants: capture c is the input of layer c, or with c the number of
layers the output after the final norm. They travel behind the hidden states, `[rows, hidden * (1 + captured so far)]`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flowspec.core.events import JobPart, RunLayers
from flowspec.errors import ClusterError, InputError
from flowspec.model.attention import ATTENTION_NAME, TreeBatch, TreeCache, TreeRows
from flowspec.model.families import Family, family_of
from flowspec.model.files import ModelFiles, TensorIndex
from flowspec.model.sampler import F32, Sampler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def weight_names(config: Any, span: Span, pieces: Pieces) -> Iterator[tuple[str, nn.Module, str]]:
    """Every tensor of a slice as (name in the checkpoint, module, parameter name in it)."""
    if pieces.embedding is not None:
        yield "model.embed_tokens.weight", pieces.embedding, "weight"
    for index, layer in zip(range(span.first, span.end), pieces.layers, strict=True):
        for name in layer.state_dict():
            yield f"model.layers.{index}.{name}", layer, name
    if pieces.norm is not None and pieces.lm_head is not None:
        yield "model.norm.weight", pieces.norm, "weight"
        yield "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight", pieces.lm_head, "weight"


@dataclass(slots=True)
class Pieces:
    """The modules of a slice."""

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
        try:
            with torch.device("meta"):
                layers = [family.piece("DecoderLayer")(config, index) for index in range(span.first, span.end)]
                embedding = nn.Embedding(config.vocab_size, config.hidden_size) if span.is_first else None
                norm = family.piece("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps) if span.is_last else None
                lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if span.is_last else None
            return Pieces(embedding, layers, family.piece("RotaryEmbedding")(config=config), norm, lm_head)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever it meets in an odd config
            raise InputError(f"cannot build the model's layers from its config.json: {type(error).__name__}: {error}") from None


def slice_config(config: Any) -> Any:
    """The config with the tree attention switched on."""
    config = copy.deepcopy(config)
    config._attn_implementation = ATTENTION_NAME
    return config


class Slice:
    """Layers `[first, end)` on one device, with the caches of all its requests. Not thread-safe: one thread runs it.

    `captures` (none at first) may be set between jobs: the hidden states wanted, in growing order.
    """

    def __init__(self, config: Any, span: Span, pieces: Pieces, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.span = span
        self.dtype = dtype
        self.device = device
        self.pieces = pieces
        self.captures: tuple[int, ...] = ()
        self.weight_bytes = sum(p.numel() * p.element_size() for p in _parameters(pieces))
        if span.is_first and span.is_last and config.tie_word_embeddings:
            assert pieces.embedding is not None
            self.weight_bytes -= pieces.embedding.weight.numel() * pieces.embedding.weight.element_size()
        self._caches: dict[int, TreeCache] = {}
        self._samplers: dict[int, Sampler] = {}

    @staticmethod
    def load(
        files: ModelFiles, span: Span, dtype: str, device: torch.device, progress: Callable[[float], None] = lambda share: None
    ) -> Slice:
        """Reads just this slice's tensors. Raises `InputError` when the model cannot be used or is incomplete."""
        config = files.config()
        family = family_of(config, files.model)
        config = slice_config(config)
        pieces = Pieces.build(config, family, span)
        tensors = files.tensors()
        names = list(weight_names(config, span, pieces))
        loaded: dict[str, nn.Parameter] = {}
        for number, (name, module, parameter) in enumerate(names):
            if name not in loaded:
                loaded[name] = _load_parameter(tensors, name, module.get_parameter(parameter), DTYPES[dtype], device)
            owner, _, leaf = parameter.rpartition(".")
            setattr(module.get_submodule(owner), leaf, loaded[name])
            progress((number + 1) / len(names))
        tensors.close()
        pieces.rotary.to(device)
        for module in (pieces.embedding, *pieces.layers, pieces.norm, pieces.lm_head):
            if module is not None:
                _call_directly(module.eval())
        _call_directly(pieces.rotary)
        return Slice(config, span, pieces, DTYPES[dtype], device)

    # ------------------------------------------------------------------------------------------- caches

    def open_cache(self, request: int, slots: int) -> None:
        self._caches[request] = TreeCache(
            layers=self.span.end - self.span.first,
            kv_heads=self.config.num_key_value_heads,
            head_dim=head_dim(self.config),
            slots_max=slots,
            dtype=self.dtype,
            device=self.device,
        )

    def clear_slots(self, request: int, slots: tuple[int, ...]) -> None:
        if request in self._caches:
            self._caches[request].clear(slots)

    def close_cache(self, request: int) -> None:
        self._caches.pop(request, None)
        self._samplers.pop(request, None)

    def close_all(self) -> None:
        self._caches.clear()
        self._samplers.clear()

    # ---------------------------------------------------------------------------------------------- run

    @torch.inference_mode()
    def run(
        self, job: RunLayers, payload: torch.Tensor | None, dead_rows: Callable[[], frozenset[int]] = frozenset
    ) -> tuple[tuple[int, ...], torch.Tensor, tuple[int, ...]]:
        """Runs a job's rows; `payload` is `[rows, hidden * (1 + captured so far)]` (None on the first slice).

        Between layers rows that `dead_rows` names by then are dropped. Returns the surviving rows, the payload of the next
        slice or on the last one their features `[rows, hidden * captures]` (of no width without captures), and on the last
        slice their next tokens (-1 where none was asked for).
        """
        rows, states = self.forward(job, payload, dead_rows)
        if not self.span.is_last:
            return rows, states, ()
        size = self.config.hidden_size
        features = states[:, size:]  # [rows, hidden * captured]
        if self.span.count in self.captures:
            features = torch.cat([features, self.pieces.norm(states[:, :size])], dim=1)
        return rows, features, self._sample(job, rows, states[:, :size])

    @torch.inference_mode()
    def forward(
        self, job: RunLayers, payload: torch.Tensor | None, dead_rows: Callable[[], frozenset[int]] = frozenset
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        """`run` without what the last slice does on top: the surviving rows, and what the layers made of them.

        That is `[rows, hidden * (1 + captured so far)]`: hidden states before the final norm, then captures by layer.
        """
        rows = tuple(range(sum(len(part.slots) for part in job.parts)))
        batch, positions = self._batch(job.parts)
        captured: list[torch.Tensor] = []  # each [1, rows, hidden * captures]
        if self.pieces.embedding is not None:
            tokens = torch.from_numpy(np.concatenate([part.tokens for part in job.parts])).to(self.device)
            hidden = self.pieces.embedding(tokens)[None]  # [1, rows, hidden]
        else:
            assert payload is not None, "only the first slice does without a payload"
            hidden = payload.to(self.device)[None]  # [1, rows, hidden * (1 + captured)]
            if hidden.shape[2] > self.config.hidden_size:
                captured.append(hidden[:, :, self.config.hidden_size :])
                hidden = hidden[:, :, : self.config.hidden_size]
        angles = self.pieces.rotary(hidden, position_ids=positions)
        for index, layer in enumerate(self.pieces.layers, self.span.first):
            dead = dead_rows()
            if not dead.isdisjoint(rows):
                kept = [place for place, row in enumerate(rows) if row not in dead]
                rows = tuple(rows[place] for place in kept)
                batch, hidden, positions = _select(batch, hidden, positions, kept)
                captured = [states[:, kept] for states in captured]
                angles = self.pieces.rotary(hidden, position_ids=positions)
            if not rows:
                break
            if index in self.captures:
                captured.append(hidden)
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                past_key_values=None,
                use_cache=False,
                position_embeddings=angles,
                tree=batch,
            )
        return rows, torch.cat([hidden, *captured], dim=2)[0] if captured else hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> F32:
        """`[rows, vocabulary]` in float32 from hidden states `[rows, hidden]` of the last slice, final norm included.

        Raises `ClusterError` when the model overflows in its dtype.
        """
        assert self.pieces.lm_head is not None, "only the last slice has logits"
        logits: F32 = self.pieces.lm_head(self.pieces.norm(hidden)).float().cpu().numpy()
        highest = logits.max(axis=1)
        if not np.isfinite(highest).all():
            worst = highest[~np.isfinite(highest)][0]
            raise ClusterError(f"the model computed {worst} in {str(self.dtype)[6:]}; try --dtype bfloat16 or float32")
        return logits

    def _batch(self, parts: tuple[JobPart, ...]) -> tuple[TreeBatch, torch.Tensor]:
        requests, first = [], 0
        for part in parts:
            cache = self._caches[part.request]
            cache.reserve(len(part.key_positions))
            requests.append(
                TreeRows(
                    cache,
                    first,
                    torch.from_numpy(part.slots).to(self.device),
                    torch.from_numpy(part.positions).to(self.device),
                    torch.from_numpy(part.key_positions).to(self.device),
                    torch.from_numpy(part.visible).to(self.device),
                )
            )
            first += len(part.slots)
        positions = torch.cat([rows.positions for rows in requests])[None]  # [1, rows]
        return TreeBatch(requests, self.span.first), positions

    def _sample(self, job: RunLayers, rows: tuple[int, ...], hidden: torch.Tensor) -> tuple[int, ...]:
        """Next tokens of the surviving rows `[rows, hidden]`; `lm_head` runs only for those asked for."""
        asked = np.concatenate([part.sampled for part in job.parts])
        positions = np.concatenate([part.positions for part in job.parts])
        requests = [part for part in job.parts for _ in part.slots]
        wanted = [index for index, row in enumerate(rows) if asked[row]]
        tokens = [-1] * len(rows)
        if wanted:
            for row_logits, index in zip(self.logits(hidden[wanted]), wanted, strict=True):
                part = requests[rows[index]]
                tokens[index] = self._sampler(part).draw(row_logits, int(positions[rows[index]]) + 1)
        return tuple(tokens)

    def _sampler(self, part: JobPart) -> Sampler:
        sampler = self._samplers.get(part.request)
        if sampler is None or sampler.sampling != part.sampling:
            sampler = self._samplers[part.request] = Sampler(part.sampling, self.config.vocab_size)
        return sampler


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _call_directly(module: nn.Module) -> None:
    """Spares every call of a module its search for hooks, and every submodule its look-up by name.

    Nothing here uses hooks, and with one row these detours are a tenth of a small model's time. Norms are computed by
    torch's own function, which gives the same bits in half the calls.
    """
    for part in list(module.modules()):
        kind = type(part)
        is_norm = kind.__name__.endswith("RMSNorm")
        part.__class__ = type(kind.__name__, (kind,), {"__call__": _rms_norm if is_norm else kind.forward})
        part.__dict__.update(part._modules)
        part.__dict__.update(part._parameters)


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the families' RMSNorm does: normalise in float32, then scale in the dtype of `hidden` `[..., width]`."""
    normal = F.rms_norm(hidden.float(), hidden.shape[-1:], None, norm.variance_epsilon)
    scaled: torch.Tensor = norm.weight * normal.to(hidden.dtype)
    return scaled


def _parameters(pieces: Pieces) -> Iterator[nn.Parameter]:
    for module in (pieces.embedding, *pieces.layers, pieces.norm, pieces.lm_head):
        if module is not None:
            yield from module.parameters()


def _load_parameter(tensors: TensorIndex, name: str, like: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A private copy of one tensor: aligned, of the wanted type, and independent of the file."""
    mapped = tensors.load(name, tuple(like.shape))
    copied = torch.empty(like.shape, dtype=dtype, device=device)
    copied.copy_(mapped)
    return nn.Parameter(copied, requires_grad=False)


def _select(
    batch: TreeBatch, hidden: torch.Tensor, positions: torch.Tensor, kept: list[int]
) -> tuple[TreeBatch, torch.Tensor, torch.Tensor]:
    """A job's tensors with only the rows `kept`, in order."""
    requests, first = [], 0
    for rows in batch.requests:
        own = [index - rows.first for index in kept if rows.first <= index < rows.first + len(rows.slots)]
        if own:
            requests.append(rows.select(torch.tensor(own, device=hidden.device), first))
            first += len(own)
    index = torch.tensor(kept, dtype=torch.int64, device=hidden.device)
    return TreeBatch(requests, batch.first_layer), hidden[:, index], positions[:, index]
