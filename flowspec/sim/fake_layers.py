"""Layers without tensors: a row's payload is its token, and a cache holds the tokens by slot.

The last stage reads each row's prefix through the mask alone and asks the language what comes next. So a
wrong mask, slot or order anywhere gives a wrong token or fails at once, and so does a cache that is not
cleared, or cleared twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Logprobs
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.core.stage.events import ClearSlots, CloseCache, Copied, JobPart, OpenCache, RunLayers
from flowspec.core.stage.slots import SlotMap
from flowspec.core.stage.stage import StageCore
from flowspec.sim.language import Language, Prefix
from flowspec.wire.codec import Tensor

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class FakeCache:
    """Per slot the token it holds and its position (-1: nothing). `windowed` is that of layers with a window,
    where they have slots of their own; of those `base` are the tokens that a state behind what was given back
    sums up, `snapshot` those of its snapshot."""

    tokens: I32
    positions: I32
    windowed: FakeCache | None = None
    base: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    snapshot: I32 = field(default_factory=lambda: np.zeros(0, np.int32))

    @staticmethod
    def of(slots: int) -> FakeCache:
        empty = np.full(slots, -1, dtype=np.int32)
        return FakeCache(tokens=empty, positions=empty.copy())

    def copy(self, source: FakeCache, slots: I64) -> None:
        """Into the first slots what those of another request hold, and what its states sum up."""
        assert (source.positions[slots] >= 0).all(), "slots are copied that hold nothing"
        self.positions[: len(slots)] = source.positions[slots]
        self.tokens[: len(slots)] = source.tokens[slots]
        self.base, self.snapshot = source.base, source.snapshot

    def clear(self, slots: Sequence[int]) -> None:
        assert (self.positions[[*slots]] >= 0).all(), "slots are cleared that hold nothing"
        self.positions[[*slots]] = -1

    def write(self, slots: I64, tokens: I64, at: I64) -> None:
        assert (self.positions[slots] < 0).all(), "slots are overwritten"
        assert len(set(slots.tolist())) == len(slots), "one slot is given to two rows"
        self.positions[slots] = at
        self.tokens[slots] = tokens


class FakeLayers:
    """The layers of all `stages`; `caches[stage][request]` is open to tests.

    Where the head or another stage may not be honest, rows may see anything, and payloads hold anything. With
    a `sliding_window` some of the layers look no further back.
    """

    def __init__(
        self,
        stages: int,
        language: Language,
        *,
        sliding_window: SlidingWindow | None = None,
        is_honest: bool = True,
    ) -> None:
        self.caches: list[dict[int, FakeCache]] = [{} for _ in range(stages)]
        self._language = language
        self._window = sliding_window
        self._is_honest = is_honest

    def validate(self, stage: int, core: StageCore) -> None:
        """A stage that runs nothing has in its caches what its core believes; raises `AssertionError`."""
        caches, maps = self.caches[stage], core.slot_maps()
        assert caches.keys() == maps.keys(), (
            f"stage {stage} has caches of {sorted(caches)}, its core of {sorted(maps)}"
        )
        for number, slots in maps.items():
            cached, used = caches[number].positions, len(slots.position)  # a map is as long as was ever used
            is_same = np.array_equal(cached[:used], slots.position) and bool((cached[used:] < 0).all())
            assert is_same, f"stage {stage}: slots and cache of request {number} differ"

    def committed_tokens(self, stage: int, request: int, slots: SlotMap) -> dict[int, int]:
        """By position, the tokens that a stage's cache holds in slots that its core knows to be committed."""
        cache, committed = self.caches[stage][request], np.flatnonzero(slots.committed[: slots.high])
        return dict(zip(cache.positions[committed].tolist(), cache.tokens[committed].tolist(), strict=True))

    def change_cache(self, stage: int, command: OpenCache | ClearSlots | CloseCache) -> None:
        caches = self.caches[stage]
        if isinstance(command, OpenCache):
            assert command.request not in caches, f"stage {stage} opens request {command.request} twice"
            opened = caches[command.request] = FakeCache.of(command.slots)
            opened.windowed = FakeCache.of(command.window_slots) if command.window_slots else None
            if command.copied is not None:
                self._copy(stage, opened, command.copied)
            return
        cache = caches.get(command.request)
        assert cache is not None, f"stage {stage} has no cache for request {command.request}"
        if isinstance(command, ClearSlots):
            cache.clear(command.slots)
            if cache.windowed is not None:
                self._keep_states(cache.windowed, command)
                cache.windowed.clear(command.window_slots)
        else:
            del caches[command.request]

    def _copy(self, stage: int, opened: FakeCache, copied: Copied) -> None:
        source = self.caches[stage].get(copied.source)
        assert source is not None, f"stage {stage} copies from request {copied.source}, which has no cache"
        at = source.positions[copied.slots]
        assert at.tolist() == list(range(len(at))), (
            f"stage {stage} copies another path than from the first on"
        )
        opened.copy(source, copied.slots)
        if opened.windowed is not None:
            assert source.windowed is not None, f"stage {stage} copies windows from a request without any"
            opened.windowed.copy(source.windowed, copied.window_slots)

    def _keep_states(self, cache: FakeCache, command: ClearSlots) -> None:
        assert self._window is not None, "there are slots for layers with a window"
        if command.snapshot == "take":
            cache.snapshot = cache.base
        elif command.snapshot == "restore":
            cache.base = cache.snapshot
        if command.passed:
            places, seen_again = list(command.passed), self._window.tokens - 1 if len(cache.base) else 0
            first = len(cache.base) - seen_again
            assert cache.positions[places].tolist() == list(range(first, first + len(places))), (
                f"what layers with a window sum up of request {command.request} does not go on"
            )
            cache.base = np.concatenate([cache.base, cache.tokens[places[seen_again:]]])

    def run(
        self, stage: int, job: RunLayers, payload: Tensor | None, rows: tuple[int, ...]
    ) -> tuple[Tensor | None, tuple[int, ...], tuple[Logprobs | None, ...]]:
        """The payload of the surviving `rows` of a job, and on the last stage their next tokens (-1: not
        asked for) and log-probabilities. `payload` `[rows, 1]` holds the tokens of all rows of the job (None
        on the first stage)."""
        sent = np.concatenate([part.tokens for part in job.parts]).astype("<i4")
        assert (payload is None) == (stage == 0), "all stages but the first are given a payload"
        if payload is not None and self._is_honest:
            assert bytes(payload.data) == sent.tobytes(), f"stage {stage}: rows and payload went apart"
        is_last = stage == len(self.caches) - 1
        alive = np.zeros(len(sent), dtype=bool)
        alive[list(rows)] = True
        next_tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        first = 0
        for part in job.parts:
            end = first + len(part.slots)
            seen = self._write_and_read(stage, part, alive[first:end])
            for row, prefix in seen if is_last else ():
                token, said = -1, None
                if part.sampled[row]:
                    token = self._language.next_token(prefix, part.sampling, part.answer_start)
                    if part.top_logprobs >= 0:
                        said = self._language.logprobs(prefix, token, part.top_logprobs)
                if part.sampling.needs_text and self._is_honest:
                    text = part.text(row)
                    assert text is not None, f"request {part.request} is drawn without its text"
                    assert text.tokens.tolist() == prefix.tolist(), (
                        f"a row of request {part.request} is drawn by another text than it sees"
                    )
                next_tokens.append(token)
                logprobs.append(said)
            first = end
        outgoing = Tensor(rows=len(rows), width=1, dtype="float32", data=sent[list(rows)].tobytes())
        return outgoing if rows else None, tuple(next_tokens), tuple(logprobs)

    def _write_and_read(
        self, stage: int, part: JobPart, alive: npt.NDArray[np.bool_]
    ) -> list[tuple[int, Prefix]]:
        """Put a part's rows into the cache; what each living one then sees, in order of position."""
        cache = self.caches[stage][part.request]
        cache.write(part.slots, part.tokens, part.positions)
        if cache.windowed is not None:
            self._write_and_read_windowed(stage, part, cache, cache.windowed)
        wanted = np.flatnonzero(alive)
        row, slot = np.nonzero(part.visible[wanted])
        at = cache.positions[slot]
        assert (at == part.key_positions[slot]).all(), (
            f"stage {stage}: the core and the cache of request {part.request} differ"
        )
        # By row and position: what a row at position p sees must be 0, 1, ..., p, one node at each position.
        order, counts = np.lexsort((at, row)), np.bincount(row, minlength=len(wanted))
        ends = np.cumsum(counts)
        if self._is_honest:
            expected = np.arange(len(order)) - np.repeat(ends - counts, counts)
            is_path = (counts == part.positions[wanted] + 1).all() and (at[order] == expected).all()
            assert is_path, (
                f"stage {stage}: a row of request {part.request} does not see exactly one node at each "
                "position up to its own"
            )
        seen = cache.tokens[slot[order]]
        return [
            (int(index), seen[end - count : end])
            for index, end, count in zip(wanted, ends, counts, strict=True)
        ]

    def _write_and_read_windowed(self, stage: int, part: JobPart, whole: FakeCache, cache: FakeCache) -> None:
        """Put a part's rows into the cache of layers with a window, where each must find the end of what it
        sees in the whole one."""
        assert part.window is not None, f"stage {stage}: rows come without slots for layers with a window"
        assert self._window is not None, f"stage {stage}: there are slots for layers with a window"
        cache.write(part.window.slots, part.tokens, part.positions)
        if part.positions.min() == 0:  # the text is read from its beginning
            cache.base = cache.snapshot = np.zeros(0, np.int32)
        if not self._is_honest:
            return
        of = part.window.held  # [window high]
        for position, visible in zip(part.positions.tolist(), part.visible, strict=True):
            first = max(0, position + 1 - self._window.tokens)
            places = in_order((of >= 0) & visible[of] & (part.key_positions[of] >= first), cache.positions)
            found = list(zip(cache.positions[places].tolist(), cache.tokens[places].tolist(), strict=True))
            slots = in_order(visible & (part.key_positions >= first), part.key_positions)
            assert part.key_positions[slots].tolist() == list(range(first, position + 1)), (
                f"stage {stage}: a row of request {part.request} does not see one node at each position of "
                "its window"
            )
            path = in_order(visible & (part.key_positions < len(cache.base)), part.key_positions)
            assert np.array_equal(whole.tokens[path], cache.base), (
                f"stage {stage}: a row of request {part.request} does not follow what was summed up"
            )
            expected = list(zip(range(first, position + 1), whole.tokens[slots].tolist(), strict=True))
            assert found == expected, (
                f"stage {stage}: a row of request {part.request} does not see what it saw within its window"
            )


def in_order(wanted: npt.NDArray[np.bool_], positions: I32) -> I64:
    """The slots that are wanted, by their positions."""
    (slots,) = np.nonzero(wanted)
    return slots[np.argsort(positions[slots])]
