"""A compute thread that makes ready for another slice beside the one that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowspec.core.cluster.daemon import Loaded, SliceRoom
from flowspec.core.protocol import limits
from flowspec.core.stage.events import OpenCache
from flowspec.model.slice import Slice
from flowspec.model.weights import Span, arrays_of
from flowspec.runtime import loading
from flowspec.runtime.compute import WorkFailed
from flowspec.runtime.machine import Machine
from tests.runtime.compute_bench import CONTEXT, Bench

COUNT = 8
FIRST, NEXT = (0, 4), (2, 6)


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    found = Bench(folder)
    found.load(1, FIRST)
    yield found
    found.close()


def prepare(bench: Bench, assignment_id: int = 2) -> Any:
    bench.compute.prepare(assignment_id, bench.assign(NEXT, is_beside=True))
    return bench.result(assignment_id)


def is_right(bench: Bench, bounds: tuple[int, int]) -> bool:
    """Whether the slice that it runs is the one that would be loaded afresh."""
    span = Span(first=bounds[0], end=bounds[1], count=COUNT)
    fresh, own = Slice.load(bench.files, span, "float32"), bench.slice()
    assert fresh.parts.keys() == own.parts.keys()
    pairs = zip(*(arrays_of(part.parts) for part in (fresh, own)), strict=True)
    return own.span == span and all(np.array_equal(weight, ours) for weight, ours in pairs)


def test_what_is_made_ready_is_there_when_it_is_assigned_and_the_other_runs_until_then(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(loading.os, "setpriority", lambda which, who, niceness: seen.append(niceness))
    before = bench.slice()
    made = prepare(bench)
    assert isinstance(made, Loaded)
    assert made.load_s == 0
    assert seen == [loading.NICENESS], "the thread that loads has a low priority"
    assert bench.slice() is before
    shared = [before.parts[number] for number in (2, 3)]
    bench.progress.clear()
    assert bench.load(3, NEXT).reused
    assert bench.progress == ["asking for weights"], "nothing is loaded"
    found = bench.slice().parts
    assert all(found[number] is layer for number, layer in zip((2, 3), shared, strict=True))
    assert is_right(bench, NEXT)


def test_without_memory_for_both_it_is_checked_and_told_how_long_loading_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "room_beside", lambda *args: SliceRoom.AFTER)
    made = prepare(bench)
    assert isinstance(made, Loaded)
    assert made.load_s > 0
    bench.progress.clear()
    assert not bench.load(3, NEXT).reused
    assert bench.progress[-1] == "loading"
    assert is_right(bench, NEXT)


def test_what_fits_nowhere_is_refused_and_the_slice_that_runs_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "room_beside", lambda *args: SliceRoom.NONE)
    fetches: list[object] = []
    monkeypatch.setattr(loading.SliceLoad, "fetch", fetches.append)
    made = prepare(bench)
    assert isinstance(made, WorkFailed)
    assert str(made.error).startswith("layers 2 to 5 need")
    assert fetches == [], "only what fits is fetched"
    assert is_right(bench, FIRST)


def test_conversations_that_need_the_memory_take_it(bench: Bench) -> None:
    prepare(bench)
    part = bench.slice()
    slots = CONTEXT + limits.TREE_NODES_MAX
    part.cache_bytes_max = bench.compute._beside._taken_bytes + slots * part.slot_bytes
    bench.compute.post(1, OpenCache(request=1, slots=slots))
    bench.compute.post(1, OpenCache(request=2, slots=slots))
    assert not bench.load(3, NEXT).reused, "the second one needed it"
    assert is_right(bench, NEXT)


def test_what_is_made_ready_for_nobody_any_more_ends_soon(bench: Bench) -> None:
    bench.compute.prepare(2, bench.assign(NEXT, is_beside=True))
    bench.compute.hang_up(2)
    found = bench.result(2)
    assert isinstance(found, WorkFailed)
    assert str(found.error) == "the head let go before all weights were there"
    prepare(bench, 3)
    assert bench.load(4, NEXT).reused


def test_memory_that_is_left_is_for_layers_and_for_caches_that_are_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, free_bytes = bench.slice(), 1 << 20

    class Here:
        def free_bytes(self) -> int:
            return free_bytes

    monkeypatch.setattr(loading, "accelerator_of", lambda device: Here())
    need = loading.SliceMemory(weight_bytes=1 << 20, cache_bytes=10)
    machine = Machine(device="cpu")
    assert loading.room_beside(need, 0, part, machine) is SliceRoom.BESIDE
    part.open_cache(1, CONTEXT)
    assert loading.room_beside(need, 0, part, machine) is SliceRoom.AFTER
    free_bytes = 0
    assert loading.room_beside(need, part.weight_bytes, part, machine) is SliceRoom.NONE
