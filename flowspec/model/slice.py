"""A consecutive slice of a model: loaded alone, run on tree segments, sampled from if it is the last.

The first slice also holds the embedding, the last the final norm, `lm_head` (the embedding again when tied)
and the samplers. *Captures* are hidden states on the way that a drafter wants: capture c is the input of
layer c, or with c the number of layers the output after the final norm. They travel behind the hidden states,
`[rows, hidden * (1 + captured so far)]`; what else layers need of a row (`carried_places`) between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from flowspec.core.protocol.messages import Logprobs
from flowspec.core.protocol.model_spec import STATE_BYTES, STATES_HELD, DeltaRule, Heads, ModelSpec, holders
from flowspec.core.protocol.precision import CACHE_AUTO, PRECISION_BYTES, cached_as, cached_bytes
from flowspec.core.stage.events import ClearSlots, Copied, JobPart, RunLayers
from flowspec.core.text_before import TextBefore
from flowspec.errors import ClusterError
from flowspec.model.ahead import Ahead
from flowspec.model.arithmetic.arrays import F32, I64, Array
from flowspec.model.attention import BASE, SNAPSHOT, Angles, TreeBatch, TreeCache, TreeRows
from flowspec.model.engines import Engine, engine_of
from flowspec.model.files import ModelFiles
from flowspec.model.grammar import GrammarVocabulary, Mask
from flowspec.model.layer import Matrix, Place
from flowspec.model.sampler import Sampler, are_masks_beside, logprobs
from flowspec.model.weights import EMBEDDING, LM_HEAD, NORM, SliceParts, Span, Store, held_bytes, load_parts

_CURES = {
    "float16": "try --dtype bfloat16 or float32",
    "bfloat16": "its weights are damaged (fetch them again), or its keys are too large for float16: use "
    "--dtype float32",
    "float32": "its weights are damaged; fetch them again",
}

Masked = tuple[TextBefore, Mask | None]  # the text before a token, and which tokens a grammar allows there
Caches = tuple[TreeCache, ...]
"""Of a request: of all layers, or where layers with a window have fewer slots, of all others and of these."""
SNAPSHOTS = {"take": (BASE, SNAPSHOT), "restore": (SNAPSHOT, BASE)}  # by what `ClearSlots` says
EMBEDDED = -1  # what comes with hidden states beside keys and values of layers, which have numbers


class Slice:
    """Layers `[first, end)` on one device, with the caches of all its requests. Not thread-safe: one thread
    runs it.

    `captures` (none at first) may be set between jobs: the hidden states wanted, in growing order. So may
    `cache_bytes_max`, which the caches of all requests together stay below (None: no bound).
    """

    def __init__(self, spec: ModelSpec, span: Span, parts: SliceParts, engine: Engine, cache: str) -> None:
        """Keys and values are held as `cache` says (`precision.cached_as`)."""
        self.spec, self.span, self.parts, self.engine = spec, span, parts, engine
        self.cache, self.weight_bytes = cache, held_bytes(parts)
        self.device, self.dtype = engine.device, engine.dtype
        self.captures: tuple[int, ...] = ()
        self.grammars: GrammarVocabulary | None = None
        self.cache_bytes_max: int | None = None
        self._caches: dict[int, Caches] = {}
        self._samplers: dict[int, Sampler] = {}
        first, own = span.first, spec.layers[span.first : span.end]
        held = holders(spec.sources, first, span.end)
        self._held = {layer - first: spec.inputs[layer] or spec.heads[layer] for layer in held}
        self._windowed = {place: each for place, each in self._held.items() if spec.windows[first + place]}
        self.slot_bytes = sum(map(self._bytes_of, self._held.values()))  # of a node in all layers
        self.windowed_slot_bytes = sum(map(self._bytes_of, self._windowed.values()))  # with a window
        mixers = [layer.dense.mixer for layer in own if layer.dense is not None]
        rules = [mixer for mixer in mixers if isinstance(mixer, DeltaRule)]
        self._state = (rules[0].heads, rules[0].key_width, rules[0].value_width) if rules else ()
        self.state_bytes = STATES_HELD * STATE_BYTES * sum(layer.state for layer in own)
        self._coming, self._going = carried_places(spec, first), carried_places(spec, span.end)
        self.carried_width = spec.carried_width(first)  # numbers that come with a row
        self.layers = []
        sources = {source for layer, source in enumerate(spec.sources) if source != layer}
        for number, layer in enumerate(own, first):
            going = self._going[number].start if number in self._going else None
            place = Place(layer.source - first, going, number in sources)
            self.layers.append(engine.layer(parts[number], layer, place))
        if span.is_last:
            self._norm = engine.rows(norm=parts[NORM])
            self._lm_head = engine.rows(norm=parts[NORM], linear=parts[LM_HEAD], are_logits=True)

    @staticmethod
    def load(
        files: ModelFiles,
        span: Span,
        dtype: str,
        device: str = "cpu",
        progress: Callable[[float], None] = lambda share: None,
        store: Store | None = None,
        kept: SliceParts | None = None,
        arithmetic: str = "",
        cache: str = CACHE_AUTO,
    ) -> Slice:
        """Reads just this slice's tensors, of quantised matrices what `store` lacks; what is `kept` of
        another slice is taken over. `arithmetic` and `cache` as for `engine_of` and `precision.cached_as`.
        Raises `InputError` for a model that is incomplete, and where the device lacks the arithmetic."""
        spec = files.spec
        engine = engine_of(dtype, device, spec.norm, arithmetic)
        parts = load_parts(spec, span, files.tensors(), dtype, engine, progress, store, kept)
        return Slice(spec, span, parts, engine, cached_as(cache, dtype))

    def kept_for(self, span: Span) -> SliceParts:
        """Its parts that a slice of these layers has, too.

        A tied matrix is another one where a slice has both of its ends: then none is taken over.
        """
        own, both = self.span, {*self.span.owners} & {*span.owners}
        if self.spec.is_tied and (own.is_first, own.is_last) != (span.is_first, span.is_last):
            both -= {EMBEDDING, NORM, LM_HEAD}
        return {owner: part for owner, part in self.parts.items() if owner in both}

    # ------------------------------------------------------------------------------------------- caches

    def _bytes_of(self, held: Heads | int) -> int:
        if isinstance(held, int):
            return held * int(PRECISION_BYTES[self.dtype])
        return 2 * held.count * cached_bytes(held.width, self.cache)

    def request_bytes(self, slots: int, window_slots: int = 0) -> int:
        """What the caches of a request may take that is opened with so many slots (as `OpenCache` says)."""
        windowed_bytes = self.windowed_slot_bytes if window_slots else 0
        of_slots = (self.slot_bytes - windowed_bytes) * slots + windowed_bytes * window_slots
        return of_slots + self.state_bytes

    @property
    def cache_bytes(self) -> int:
        """What all caches take now."""
        return sum(cache.bytes for caches in tuple(self._caches.values()) for cache in caches)

    @property
    def opened_bytes(self) -> int:
        """What all caches may take."""
        opened = tuple(self._caches.values())
        return sum(self.request_bytes(*(cache.slots_max for cache in caches)) for caches in opened)

    def open_cache(
        self, request: int, slots: int, window_slots: int = 0, copied: Copied | None = None
    ) -> None:
        """Layers with a window get `window_slots` (0: `slots`, as all others). What is `copied` is there at
        once: raises `ClusterError` where that is more than there is memory for."""
        windowed = self._windowed if window_slots else {}
        whole = {place: held for place, held in self._held.items() if place not in windowed}
        caches = self._caches[request] = tuple(
            TreeCache(layers, self.engine, most, self.cache, self._state)
            for layers, most in ((whole, slots), (windowed, window_slots))
            if layers or layers is whole
        )
        if copied is not None:
            slots_there = copied.slots, copied.window_slots
            self._reserve(caches, *map(len, slots_there))
            for cache, source, there in zip(caches, self._caches[copied.source], slots_there, strict=False):
                cache.copy(source, there)

    def clear_slots(self, command: ClearSlots) -> None:
        if (caches := self._caches.get(command.request)) is None:
            return
        whole, *others = caches
        whole.clear(command.slots)
        for windowed in others:
            for place in windowed.states:
                if command.snapshot:
                    windowed.copy_state(place, *SNAPSHOTS[command.snapshot])
                if command.passed:
                    self.engine.pass_by(self.layers[place], windowed, command.passed)
            windowed.clear(command.window_slots)

    def close_cache(self, request: int) -> None:
        self._caches.pop(request, None)
        self._samplers.pop(request, None)

    def close_all(self) -> None:
        self._caches.clear()
        self._samplers.clear()

    # ---------------------------------------------------------------------------------------------- run

    def run(
        self, job: RunLayers, payload: Array | None, dead_rows: Callable[[], frozenset[int]] = frozenset
    ) -> tuple[tuple[int, ...], Array, tuple[int, ...], tuple[Logprobs | None, ...]]:
        """Runs a job's rows; `payload` is `[rows, hidden * (1 + captured so far) + carried_width]` (None on
        the first slice). Between layers rows that `dead_rows` names by then are dropped.

        Returns the surviving rows, the payload of the next slice or on the last one their features `[rows,
        hidden * captures]`, and on the last their next tokens (-1 where none was asked for) and
        log-probabilities, as in `LayersDone`. Payloads and features are numpy's.
        """
        if not self.span.is_last:
            rows, states = self.forward(job, payload, dead_rows)
            return rows, self.engine.numpy(states), (), ()
        with self._masks_of(job) as masks:

            def dead_of_masks() -> frozenset[int]:
                masks.drop(dead := dead_rows())
                return dead

            rows, states = self.forward(job, payload, dead_of_masks)
            size = self.spec.hidden
            hidden, features = states[:, :size], states[:, size:]  # [rows, hidden * captured]
            if self.span.count in self.captures:
                features = self.engine.joined([features, self._norm(hidden)])
            return rows, self.engine.numpy(features), *self._sample(job, rows, hidden, masks)

    def forward(
        self, job: RunLayers, payload: Array | None, dead_rows: Callable[[], frozenset[int]] = frozenset
    ) -> tuple[tuple[int, ...], Array]:
        """`run` without what the last slice does on top: the surviving rows, and as the engine has them
        their hidden states before the final norm, what else the next slice needs, and captures by layer."""
        engine, batch = self.engine, self._batch(job.parts)
        rows = tuple(range(len(batch.positions)))
        captured: list[Array] = []  # each [rows, hidden * captures]
        came: Array | None = None
        if self.span.is_first:
            assert batch.tokens is not None
            hidden = embedded(engine, self.spec, self.parts[EMBEDDING], batch.tokens)
        else:
            assert payload is not None, "only the first slice does without a payload"
            states, size = engine.array(payload), self.spec.hidden
            hidden, came = states[:, :size], states[:, size : size + self.carried_width]
            if states.shape[1] > size + self.carried_width:
                captured.append(states[:, size + self.carried_width :])
        self._carry(batch, hidden, came)
        moving = engine.begin(hidden if came is None else engine.copied(hidden), batch)
        angles = self._angles(batch)
        for number, layer in enumerate(self.layers, self.span.first):
            dead = dead_rows()
            if not dead.isdisjoint(rows):
                kept = [index for index, row in enumerate(rows) if row not in dead]
                rows = tuple(rows[index] for index in kept)
                captured = [states[kept] for states in captured]
                batch = batch.select(kept)
                moving = engine.begin(moving.hidden[kept], batch)
                if not rows:
                    break
                angles = self._angles(batch)
            if number in self.captures:
                captured.append(engine.copied(moving.hidden))
            moving.run(layer, angles[self.spec.layers[number].rotary])
        going = [] if batch.going is None else [batch.going]
        return rows, engine.joined([moving.hidden, *going, *captured])

    def _carry(self, batch: TreeBatch, hidden: Array, came: Array | None) -> None:
        """Takes what `came` with rows, `[rows, width]` (None: to the first slice, whose `hidden` are
        embeddings), and has it go on: embeddings, of which layers make inputs of their own, and keys and
        values of layers before (Gemma 4), which go to caches as if they had been made here."""
        engine, rows = self.engine, len(hidden)
        given = {} if came is None else {name: came[:, where] for name, where in self._coming.items()}
        if self.spec.layer_inputs and came is None:
            given[EMBEDDED] = engine.copied(hidden)
        batch.embedding = given.get(EMBEDDED)
        if self._going:
            width = self.spec.carried_width(self.span.end)
            batch.going = engine.zeros((rows, width), engine.dtype)
        for name, part in given.items():
            if batch.going is not None and name in self._going:
                batch.going[:, self._going[name]] = part
            heads = self._held.get(place := name - self.span.first)
            if isinstance(heads, Heads):
                both = part.reshape(rows, 2, heads.count, heads.width)
                for own, which in batch.of(place):
                    engine.store(own.slots, both[which, 0], both[which, 1], own.cache.of(place))

    def _angles(self, batch: TreeBatch) -> list[Angles]:
        """By each of the model's position embeddings."""
        positions = batch.positions
        return [self.engine.angles(positions, rotary) for rotary in self.spec.rotaries]

    def logits(self, hidden: Array) -> F32:
        """`[rows, vocabulary]` of `[rows, hidden]` before the final norm. Raises `ClusterError` on an
        overflow."""
        logits = finished(self.engine, self.spec, self._lm_head(hidden))
        highest = logits.max(axis=1)
        if not np.isfinite(highest).all():
            worst = highest[~np.isfinite(highest)][0]
            raise ClusterError(f"the model computed {worst} in {self.dtype}; {_CURES[self.dtype]}")
        return logits

    def _batch(self, parts: tuple[JobPart, ...]) -> TreeBatch:
        requests, first = [], 0
        for part in parts:
            whole, *others = caches = self._caches[part.request]
            window_slots = 0 if part.window is None else len(part.window.held)
            self._reserve(caches, len(part.key_positions), window_slots)
            seen = part.slots, part.positions, part.key_positions, part.visible
            rows = TreeRows(whole, first, *seen, committed=part.committed)
            for windowed in others:  # what that evicted nobody sees
                assert part.window is not None, "layers with a window have slots of their own"
                is_held, of = part.window.held >= 0, part.window.held.clip(0)  # [window high]
                own = np.where(is_held, part.key_positions[of], -1), part.visible[:, of] & is_held
                of_rows = part.window.slots, part.positions
                rows.windowed = TreeRows(windowed, first, *of_rows, *own, committed=part.committed)
            requests.append(rows)
            first += len(part.slots)
        return TreeBatch(requests, np.concatenate([part.tokens for part in parts]))

    def _reserve(self, caches: Caches, *slots: int) -> None:
        """Room for so many slots in each of a request's caches; raises `ClusterError` before all of them
        together take more than was free when the slice was loaded."""
        wanted, most = [*zip(caches, slots, strict=False)], self.cache_bytes_max
        growth = sum(cache.growth_bytes(count) for cache, count in wanted)
        if growth and most is not None and (needed := growth + self.cache_bytes) > most:
            raise ClusterError(
                f"the caches of {len(self._caches)} conversations need {needed >> 20} MiB, but {most >> 20} "
                "MiB are free for them here; ask for fewer at once, or use a smaller --context"
            )
        for cache, count in wanted:
            cache.reserve(count)

    def _masks_of(self, job: RunLayers) -> Ahead[int, Masked]:
        """What grammars allow behind rows that are asked for and bound by one, by row of the job."""
        wanted: dict[int, Callable[[], Masked]] = {}
        for number, (part, row) in enumerate(_rows_of(job)):
            if part.sampling.grammar is not None and part.sampled[row]:
                wanted[number] = partial(_masked, self._sampler(part), part, row)
        return Ahead(wanted, beside=are_masks_beside(self.grammars))

    def _sample(
        self, job: RunLayers, rows: tuple[int, ...], hidden: Array, masks: Ahead[int, Masked]
    ) -> tuple[tuple[int, ...], tuple[Logprobs | None, ...]]:
        """Next tokens of the surviving rows, and log-probabilities; `lm_head` runs for those asked for."""
        asked, places, tokens = job.sampled, _rows_of(job), [-1] * len(rows)
        wanted = [index for index, row in enumerate(rows) if asked[row]]
        are_told = any(part.top_logprobs >= 0 for part in job.parts)
        found: list[Logprobs | None] = [None] * (len(rows) * are_told)
        for row_logits, index in zip(self.logits(hidden[wanted]) if wanted else (), wanted, strict=True):
            part, row = places[rows[index]]
            masked = None if part.sampling.grammar is None else masks.take(rows[index])
            text, mask = masked or (part.text(row), None)
            position = int(part.positions[row]) + 1
            tokens[index] = self._sampler(part).draw(row_logits, position, text, mask)
            if part.top_logprobs >= 0:
                found[index] = logprobs(row_logits, tokens[index], part.top_logprobs)
        return tuple(tokens), tuple(found)

    def _sampler(self, part: JobPart) -> Sampler:
        sampler = self._samplers.get(part.request)
        if sampler is None or sampler.sampling != part.sampling:
            sampler = Sampler(part.sampling, self.spec.vocabulary, self.grammars)
            self._samplers[part.request] = sampler
        return sampler


def _rows_of(job: RunLayers) -> list[tuple[JobPart, int]]:
    """Each row's request, and its place there."""
    return [(part, row) for part in job.parts for row in range(len(part.slots))]


def carried_places(spec: ModelSpec, begin: int) -> dict[int, slice]:
    """Which numbers of what comes to a layer with a row are keys and values of which source, and its
    `EMBEDDED`."""
    (embedding, sources), found, at = spec.carried_at(begin), dict[int, slice](), 0
    for name in (EMBEDDED, *sources):
        size = embedding if name == EMBEDDED else spec.layers[name].kv.numbers
        if size:
            found[name] = slice(at, at + size)
        at += size
    return found


def _masked(sampler: Sampler, part: JobPart, row: int) -> Masked:
    text = part.text(row)
    assert text is not None, "a grammar needs the text"
    return text, sampler.mask(text)


def embedded(engine: Engine, spec: ModelSpec, table: Matrix, tokens: I64) -> Array:
    """`[rows, hidden]` of tokens `[rows]`."""
    found = engine.take(table, tokens)
    return found if spec.embedding_scale == 1 else engine.scaled(found, spec.embedding_scale)


def finished(engine: Engine, spec: ModelSpec, found: Array) -> F32:
    """Logits from what `lm_head` gives."""
    if spec.logit_divisor != 1:
        found = found / spec.logit_divisor
    if spec.logit_cap:
        found = engine.function(found / spec.logit_cap, "tanh") * spec.logit_cap
    here: F32 = engine.numpy(found)
    return here
