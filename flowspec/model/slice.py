"""A consecutive slice of a transformers model: loaded alone, run on tree segments, sampled from if it is the
last.

The modules are transformers' own (`pieces.py`), filled tensor by tensor (`weights.py`). The first slice also
holds the embedding, the last the final norm, `lm_head` (the embedding again when tied) and the samplers.

*Captures* are hidden states on the way that a drafter wants: capture c is the input of layer c, or with c the
number of layers the output after the final norm. They travel behind the hidden states, `[rows, hidden * (1 +
captured so far)]`. What layers need beside hidden states (`beside.py`) travels between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from flowspec.core.protocol.messages import Logprobs
from flowspec.core.protocol.model_spec import holders
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, cached_as, cached_bytes
from flowspec.core.protocol.sliding_window import STATE_BYTES, STATES_HELD
from flowspec.core.stage.events import ClearSlots, Copied, JobPart, RunLayers, WindowPart
from flowspec.core.text_before import TextBefore
from flowspec.errors import ClusterError
from flowspec.model import passes
from flowspec.model.ahead import Ahead
from flowspec.model.arithmetic import compiled
from flowspec.model.attention import BASE, SNAPSHOT, TreeBatch, TreeCache, TreeRows
from flowspec.model.beside import Beside, Needs
from flowspec.model.files import ModelFiles
from flowspec.model.grammar import GrammarVocabulary, Mask
from flowspec.model.kernels import CACHE_DTYPES, DTYPES, kernel_of
from flowspec.model.linear_attention import copy_state, state_shape
from flowspec.model.pieces import KeptModules, Pieces, Span
from flowspec.model.program import Room
from flowspec.model.sampler import F32, Sampler, logprobs
from flowspec.model.shaping import are_masks_beside
from flowspec.model.spec import spec_of
from flowspec.model.support import family_of
from flowspec.model.torch_layers import TorchLayer
from flowspec.model.weights import RoundedStore, fill

_CURES = {
    torch.float16: "try --dtype bfloat16 or float32",
    torch.bfloat16: "its weights are damaged (fetch them again), or need --dtype float32",
    torch.float32: "its weights are damaged; fetch them again",
}

Masked = tuple[TextBefore, Mask | None]
"""The text before a token, and which tokens a grammar allows there."""


@dataclass(frozen=True, slots=True)
class RequestCaches:
    """What is held of a request: by layers with a window in a cache of its own where that has fewer slots,
    and by all others."""

    whole: TreeCache
    windowed: TreeCache | None

    @property
    def bytes(self) -> int:
        return self.whole.bytes + (0 if self.windowed is None else self.windowed.bytes)

    def growth_bytes(self, slots: int, window_slots: int = 0) -> int:
        """What room for so many slots would add."""
        windowed = 0 if self.windowed is None else self.windowed.growth_bytes(window_slots)
        return self.whole.growth_bytes(slots) + windowed


class Slice:
    """Layers `[first, end)` on one device, with the caches of all its requests. Not thread-safe: one thread
    runs it.

    `captures` (none at first) may be set between jobs: the hidden states wanted, in growing order. So may
    `cache_bytes_max`, which the caches of all requests together stay below (None: no bound).
    """

    def __init__(self, pieces: Pieces, dtype: str, device: torch.device, cache: str = CACHE_AUTO) -> None:
        self.config = pieces.config
        self.span = pieces.span
        self.dtype = DTYPES[ACTIVATIONS[dtype]]
        self.cache = cached_as(cache, dtype)
        self.device = device
        self.pieces = pieces
        self.captures: tuple[int, ...] = ()
        self.grammars: GrammarVocabulary | None = None
        self.cache_bytes_max: int | None = None
        self.weight_bytes = pieces.weight_bytes
        first, end = pieces.span.first, pieces.span.end
        self.spec = spec = spec_of(pieces.config)
        windows, sources = spec.windows, spec.sources
        self._heads = spec.heads
        self._needs = Needs(pieces.config, pieces.span)
        self._held = [layer - first for layer in holders(sources, first, end)]
        self._windowed = [place for place in self._held if windows[place + first]]
        widths = spec.inputs[first:end]
        self._with_inputs = [place for place, width in enumerate(widths) if width]
        self._input_width = max(widths, default=0)
        self.carried_width = spec.carried_width(first)
        states = spec.states[first:end]
        self._with_states = [place for place, size in enumerate(states) if size]
        self.state_bytes = STATES_HELD * STATE_BYTES * sum(states)
        self._caches: dict[int, RequestCaches] = {}
        self._samplers: dict[int, Sampler] = {}
        self.room = Room(compiled.library())
        self.layers = passes.layers_of(pieces, spec, self.dtype)

    @staticmethod
    def load(
        files: ModelFiles,
        span: Span,
        dtype: str,
        device: torch.device,
        progress: Callable[[float], None] = lambda share: None,
        store: RoundedStore | None = None,
        kept: KeptModules | None = None,
        arithmetic: str = "",
        cache: str = CACHE_AUTO,
    ) -> Slice:
        """Reads just this slice's tensors, of quantised matrices what `store` lacks; what is `kept` of
        another slice is taken over.

        Its linear layers compute this `arithmetic` (empty: the best that the device has), and keys and values
        are held as `cache` says (`precision.CACHES`). Raises `InputError`
        when the model cannot be used or is incomplete, and where the device lacks the arithmetic.
        """
        config = files.config()
        pieces = Pieces.build(config, family_of(config, files.model), span)
        activations = DTYPES[ACTIVATIONS[dtype]]
        kernel = kernel_of(dtype, device, arithmetic)
        fill(pieces, files.tensors(), activations, device, progress, kernel.linear, store, kept)
        pieces.rotary.to(device)
        pieces.call_directly(kernel.product)
        if kept is not None:
            pieces.take_over(kept)
        return Slice(pieces, dtype, device, cache)

    # ------------------------------------------------------------------------------------------- caches

    @property
    def slot_bytes(self) -> int:
        """What is held of one node in all layers."""
        return self._slot_bytes(self._held)

    @property
    def windowed_slot_bytes(self) -> int:
        """What is held of one node in layers with a window."""
        return self._slot_bytes(self._windowed)

    def _slot_bytes(self, layers: Sequence[int]) -> int:
        heads = [self._heads[self.span.first + place] for place in layers if place not in self._with_inputs]
        of_attention = sum(2 * each.count * cached_bytes(each.width, self.cache) for each in heads)
        of_input = self._input_width * self.dtype.itemsize
        return of_attention + (len(layers) - len(heads)) * of_input

    def request_bytes(self, slots: int, window_slots: int = 0) -> int:
        """What the caches of a request may take that is opened with so many slots (as `OpenCache` says)."""
        windowed_bytes = self.windowed_slot_bytes if window_slots else 0
        of_slots = (self.slot_bytes - windowed_bytes) * slots + windowed_bytes * window_slots
        return of_slots + self.state_bytes

    @property
    def cache_bytes(self) -> int:
        """What all caches take now."""
        return sum(cache.bytes for cache in tuple(self._caches.values()))

    @property
    def opened_bytes(self) -> int:
        """What all caches may take."""
        return sum(
            self.request_bytes(
                caches.whole.slots_max, 0 if caches.windowed is None else caches.windowed.slots_max
            )
            for caches in tuple(self._caches.values())
        )

    def open_cache(
        self, request: int, slots: int, window_slots: int = 0, copied: Copied | None = None
    ) -> None:
        """Layers with a window get `window_slots` (0: `slots`, as all others). What is `copied` is there at
        once: raises `ClusterError` where that is more than there is memory for."""
        windowed = self._windowed if window_slots else []
        whole = [place for place in self._held if place not in windowed]
        self._caches[request] = RequestCaches(
            self._new_cache(whole, slots), self._new_cache(windowed, window_slots) if windowed else None
        )
        if copied is not None:
            self._copy(self._caches[copied.source], self._caches[request], copied)

    def _copy(self, source: RequestCaches, into: RequestCaches, copied: Copied) -> None:
        self._reserve(into, len(copied.slots), len(copied.window_slots))
        into.whole.copy(source.whole, torch.from_numpy(copied.slots).to(self.device))
        if into.windowed is not None and source.windowed is not None:
            into.windowed.copy(source.windowed, torch.from_numpy(copied.window_slots).to(self.device))

    def _new_cache(self, layers: list[int], slots: int) -> TreeCache:
        return TreeCache(
            heads={
                place: self._heads[self.span.first + place]
                for place in layers
                if place not in self._with_inputs
            },
            with_inputs=[place for place in layers if place in self._with_inputs],
            width=self._input_width,
            input_dtype=self.dtype,
            state=state_shape(self.config) if self._with_states else (),
            slots_max=slots,
            dtype=CACHE_DTYPES[self.cache],
            device=self.device,
        )

    @torch.inference_mode()
    def clear_slots(self, command: ClearSlots) -> None:
        if (caches := self._caches.get(command.request)) is None:
            return
        caches.whole.clear(command.slots)
        if caches.windowed is None:
            return
        for place in self._with_states:
            if command.snapshot == "take":
                copy_state(place, caches.windowed, BASE, SNAPSHOT)
            elif command.snapshot == "restore":
                copy_state(place, caches.windowed, SNAPSHOT, BASE)
            if command.passed:
                passes.pass_by(self.room, self.layers[place], caches.windowed, command.passed)
        caches.windowed.clear(command.window_slots)

    def close_cache(self, request: int) -> None:
        self._caches.pop(request, None)
        self._samplers.pop(request, None)

    def close_all(self) -> None:
        self._caches.clear()
        self._samplers.clear()

    # ---------------------------------------------------------------------------------------------- run

    @torch.inference_mode()
    def run(
        self,
        job: RunLayers,
        payload: torch.Tensor | None,
        dead_rows: Callable[[], frozenset[int]] = frozenset,
    ) -> tuple[tuple[int, ...], torch.Tensor, tuple[int, ...], tuple[Logprobs | None, ...]]:
        """Runs a job's rows; `payload` is `[rows, hidden * (1 + captured so far) + carried_width]` (None on
        the first slice).

        Between layers rows that `dead_rows` names by then are dropped. Returns the surviving rows, the
        payload of the next slice or on the last one their features `[rows, hidden * captures]` (of no width
        without captures), and on the last slice their next tokens (-1 where none was asked for) and
        log-probabilities, as in `LayersDone`.
        """
        if not self.span.is_last:
            return *self.forward(job, payload, dead_rows), (), ()
        with self._masks_of(job) as masks:

            def dead_of_masks() -> frozenset[int]:
                masks.drop(dead := dead_rows())
                return dead

            rows, states = self.forward(job, payload, dead_of_masks)
            size = self.spec.hidden
            features = states[:, size:]  # [rows, hidden * captured]
            if self.span.count in self.captures:
                features = torch.cat([features, self.pieces.norm(states[:, :size])], dim=1)
            return rows, features, *self._sample(job, rows, states[:, :size], masks)

    @torch.inference_mode()
    def forward(
        self,
        job: RunLayers,
        payload: torch.Tensor | None,
        dead_rows: Callable[[], frozenset[int]] = frozenset,
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        """`run` without what the last slice does on top: the surviving rows, and what the layers made of
        them.

        That is `[rows, hidden * (1 + captured so far)]`: hidden states before the final norm, then captures
        by layer; in between what the next slice needs beside them.
        """
        rows = tuple(range(sum(len(part.slots) for part in job.parts)))
        batch, positions = self._batch(job.parts)
        captured: list[torch.Tensor] = []  # each [1, rows, hidden * captures]
        tokens = torch.from_numpy(np.concatenate([part.tokens for part in job.parts])).to(self.device)
        if self.pieces.embedding is not None:
            hidden = self.pieces.embed(tokens)[None]  # [1, rows, hidden]
            beside = Beside(self._needs, tokens, hidden)
        else:
            assert payload is not None, "only the first slice does without a payload"
            states = payload.to(self.device)[None]  # [1, rows, hidden * (1 + captured) + carried]
            hidden = states[:, :, : self.spec.hidden]
            rest = states[:, :, self.spec.hidden :]
            beside = Beside(self._needs, tokens, rest[:, :, : self.carried_width])
            if rest.shape[2] > self.carried_width:
                captured.append(rest[:, :, self.carried_width :])
        beside.write(batch)
        hidden = hidden.clone(memory_format=torch.contiguous_format)  # programs add to it in place
        moving = _Rows(self, hidden, positions, batch, beside)
        for place in range(len(self.pieces.layers)):
            dead = dead_rows()
            if not dead.isdisjoint(rows):
                kept = [index for index, row in enumerate(rows) if row not in dead]
                rows = tuple(rows[index] for index in kept)
                captured = [states[:, kept] for states in captured]
                moving = moving.select(kept)
                if not rows:
                    break
            if self.span.first + place in self.captures:
                captured.append(moving.hidden.clone())
            moving.run_layer(place)
        going = beside.going[None] if rows else beside.going[None, :0]
        return rows, torch.cat([moving.hidden, going, *captured], dim=2)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> F32:
        """`[rows, vocabulary]` in float32 from hidden states `[rows, hidden]` of the last slice, final norm
        included.

        Raises `ClusterError` when the model overflows in its dtype.
        """
        logits: F32 = self.pieces.logits(hidden).float().cpu().numpy()
        highest = logits.max(axis=1)
        if not np.isfinite(highest).all():
            worst = highest[~np.isfinite(highest)][0]
            raise ClusterError(f"the model computed {worst} in {str(self.dtype)[6:]}; {_CURES[self.dtype]}")
        return logits

    def _batch(self, parts: tuple[JobPart, ...]) -> tuple[TreeBatch, torch.Tensor]:
        requests, first = [], 0
        for part in parts:
            caches = self._caches[part.request]
            window_slots = 0 if part.window is None else len(part.window.held)
            self._reserve(caches, len(part.key_positions), window_slots)
            rows = TreeRows(
                caches.whole,
                first,
                torch.from_numpy(part.slots).to(self.device),
                torch.from_numpy(part.positions).to(self.device),
                torch.from_numpy(part.key_positions).to(self.device),
                torch.from_numpy(part.visible).to(self.device),
                committed=part.committed,
            )
            if caches.windowed is not None:
                assert part.window is not None, "layers with a window have slots of their own"
                rows.windowed = _through_window(rows, part.window, caches.windowed)
            requests.append(rows)
            first += len(part.slots)
        positions = torch.cat([rows.positions for rows in requests])[None]  # [1, rows]
        return TreeBatch(requests, self.span.first), positions

    def _reserve(self, caches: RequestCaches, slots: int, window_slots: int) -> None:
        """Room in the caches of a request; raises `ClusterError` before all of them together take more than
        was free when the slice was loaded."""
        growth = caches.growth_bytes(slots, window_slots)
        if growth and self.cache_bytes_max is not None:
            needed = growth + self.cache_bytes
            if needed > self.cache_bytes_max:
                raise ClusterError(
                    f"the caches of {len(self._caches)} conversations need {needed >> 20} MiB, but "
                    f"{self.cache_bytes_max >> 20} MiB are free "
                    "for them here; ask for fewer at once, or use a smaller --context"
                )
        caches.whole.reserve(slots)
        if caches.windowed is not None:
            caches.windowed.reserve(window_slots)

    def _masks_of(self, job: RunLayers) -> Ahead[int, Masked]:
        """What grammars allow behind the job's rows that are asked for and bound by one; by row of the
        job."""
        wanted: dict[int, Callable[[], Masked]] = {}
        first = 0
        for part in job.parts:
            if part.sampling.grammar is not None and part.sampled.any():
                sampler = self._sampler(part)
                for row in np.flatnonzero(part.sampled).tolist():
                    wanted[first + row] = partial(_masked, sampler, part, row)
            first += len(part.slots)
        return Ahead(wanted, beside=are_masks_beside(self.grammars))

    def _sample(
        self, job: RunLayers, rows: tuple[int, ...], hidden: torch.Tensor, masks: Ahead[int, Masked]
    ) -> tuple[tuple[int, ...], tuple[Logprobs | None, ...]]:
        """Next tokens of the surviving rows `[rows, hidden]`, and their log-probabilities; `lm_head` runs
        only for those asked for."""
        asked = job.sampled
        places = [(part, row) for part in job.parts for row in range(len(part.slots))]
        wanted = [index for index, row in enumerate(rows) if asked[row]]
        tokens = [-1] * len(rows)
        found: list[Logprobs | None] = (
            [None] * len(rows) if any(part.top_logprobs >= 0 for part in job.parts) else []
        )
        if wanted:
            for row_logits, index in zip(self.logits(hidden[wanted]), wanted, strict=True):
                part, row = places[rows[index]]
                is_bound = part.sampling.grammar is not None
                masked = masks.take(rows[index]) if is_bound else None
                text, mask = masked or (part.text(row), None)
                position = int(part.positions[row]) + 1
                tokens[index] = self._sampler(part).draw(row_logits, position, text, mask)
                if part.top_logprobs >= 0:
                    found[index] = logprobs(row_logits, tokens[index], part.top_logprobs)
        return tuple(tokens), tuple(found)

    def _sampler(self, part: JobPart) -> Sampler:
        sampler = self._samplers.get(part.request)
        if sampler is None or sampler.sampling != part.sampling:
            sampler = self._samplers[part.request] = Sampler(
                part.sampling, self.spec.vocabulary, self.grammars
            )
        return sampler


def _masked(sampler: Sampler, part: JobPart, row: int) -> Masked:
    text = part.text(row)
    assert text is not None, "a grammar needs the text"
    return text, sampler.mask(text)


def _through_window(rows: TreeRows, window: WindowPart, cache: TreeCache) -> TreeRows:
    """The rows of a request in the cache of layers with a window; what that gave back nobody sees."""
    held = torch.from_numpy(window.held).to(rows.visible.device)  # [window high]
    is_held, of = held >= 0, held.clamp(min=0)
    return TreeRows(
        cache,
        rows.first,
        torch.from_numpy(window.slots).to(rows.visible.device),
        rows.positions,
        torch.where(is_held, rows.key_positions[of], -1),
        rows.visible[:, of] & is_held,
        committed=rows.committed,
    )


class _Rows:
    """A job's rows on their way through the layers: `hidden` `[1, rows, width]`, `positions` `[1, rows]`."""

    def __init__(
        self, part: Slice, hidden: torch.Tensor, positions: torch.Tensor, batch: TreeBatch, beside: Beside
    ) -> None:
        self.hidden = hidden
        self._part, self._positions, self._batch, self._beside = part, positions, batch, beside
        self._angles = part.pieces.angles(hidden, positions)
        self._pass = passes.Pass(part.room, hidden, batch, beside)

    def run_layer(self, place: int) -> None:
        """`place` counts from the slice's first layer."""
        layer, angles = self._part.layers[place], self._angles[place]
        if isinstance(layer, TorchLayer):
            self.hidden = layer.run(self.hidden[0], angles, self._batch, self._beside)[None]
        else:
            self._pass.run(layer, angles)

    def select(self, kept: list[int]) -> _Rows:
        """Only these rows, in order."""
        requests, first, batch = [], 0, self._batch
        for rows in batch.requests:
            own = [index - rows.first for index in kept if rows.first <= index < rows.first + len(rows.slots)]
            if own:
                requests.append(rows.select(torch.tensor(own, device=self.hidden.device), first))
                first += len(own)
        index = torch.tensor(kept, dtype=torch.int64, device=self.hidden.device)
        self._beside.select(kept)
        left = TreeBatch(requests, batch.first_layer)
        return _Rows(self._part, self.hidden[:, index], self._positions[:, index], left, self._beside)
