"""A compute thread that makes ready for another slice beside the one that it runs."""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowspec.bench.checkpoints import make_variant
from flowspec.core.cluster.daemon import Loaded, SliceRoom
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.weight_messages import AskModel
from flowspec.core.stage.events import OpenCache
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.runtime import background_loader as beside
from flowspec.runtime import loading
from flowspec.runtime.compute import ComputeThread, WorkFailed
from flowspec.runtime.machine import Machine
from flowspec.runtime.transport import Wake
from flowspec.runtime.weights.head_channel import HeadQuestion, LoadProgress
from flowspec.runtime.weights.offer import Offer
from tests.model.slices import CPU
from tests.runtime.clusters import whole_model

WAIT_S = 30.0
COUNT, CONTEXT = 8, 60
FIRST, NEXT = (0, 4), (2, 6)


class Bench:
    """A compute thread, and what a head answers it."""

    def __init__(self, folder: Path) -> None:
        self.files = ModelFiles(str(folder))
        self.wake = Wake()
        self.compute = ComputeThread(Machine(device="cpu", threads=1), self.wake)
        self.offer = Offer(self.files, self.files.fingerprint())
        self.progress: list[str] = []

    def close(self) -> None:
        self.compute.stop(WAIT_S)
        self.offer.close()
        self.wake.close()

    def assign(self, bounds: tuple[int, int], *, is_beside: bool = False) -> Assign:
        first, end = bounds
        return replace(
            whole_model(self.files.model, self.files.fingerprint()),
            stages=2,
            first_layer=first,
            end_layer=end,
            next_hop="127.0.0.1:1",
            next_name="next",
            context=CONTEXT,
            is_beside=is_beside,
        )

    def result(self, assignment_id: int) -> Loaded | WorkFailed:
        """How it went for an assignment; questions are answered on the way."""
        while True:
            while not self.compute.results:
                assert select.select([self.wake.read_fd], [], [], WAIT_S)[0], "nothing came of it"
                self.wake.clear()
            of, found = self.compute.results.popleft()
            assert of == assignment_id
            if isinstance(found, HeadQuestion):
                is_first = isinstance(found.question, AskModel)
                answer = self.offer.begin() if is_first else self.offer.answer(found.question)[0]
                self.compute.deliver(assignment_id, answer, b"")
            elif isinstance(found, LoadProgress):
                self.progress.append(found.doing)
            else:
                assert isinstance(found, Loaded | WorkFailed)
                return found

    def load(self, assignment_id: int, bounds: tuple[int, int]) -> Loaded:
        self.compute.post(assignment_id, self.assign(bounds))
        found = self.result(assignment_id)
        assert isinstance(found, Loaded), found
        return found

    def prepare(self, assignment_id: int, bounds: tuple[int, int]) -> Loaded | WorkFailed:
        self.compute.prepare(assignment_id, self.assign(bounds, is_beside=True))
        return self.result(assignment_id)

    def slice(self) -> Slice:
        assert self.compute._held is not None
        return self.compute._held.part


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(make_variant(tmp_path / "model", "llama-grouped"))
    yield found
    found.close()


def is_right(bench: Bench, bounds: tuple[int, int]) -> bool:
    """Whether the slice that it runs is the one that would be loaded afresh."""
    span = Span(first=bounds[0], end=bounds[1], count=COUNT)
    fresh = Slice.load(bench.files, span, "float32", CPU).pieces.loaded
    pairs = zip(fresh, bench.slice().pieces.loaded, strict=True)
    return bench.slice().span == span and all(
        torch.equal(weight, own)
        for module, ours in pairs
        for weight, own in zip(module.state_dict().values(), ours.state_dict().values(), strict=True)
    )


def test_what_is_made_ready_is_there_when_it_is_assigned_and_the_other_runs_until_then(bench: Bench) -> None:
    bench.load(1, FIRST)
    before = bench.slice()
    made = bench.prepare(2, NEXT)
    assert isinstance(made, Loaded)
    assert made.load_s == 0
    assert bench.slice() is before
    shared = before.pieces.layers[2:]
    bench.progress.clear()
    assert bench.load(3, NEXT).reused
    assert bench.progress == ["asking for weights"], "nothing is loaded"
    assert bench.slice().pieces.layers[:2] == shared
    assert is_right(bench, NEXT)


def test_without_memory_for_both_it_is_checked_and_told_how_long_loading_takes(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.load(1, FIRST)
    monkeypatch.setattr(loading, "room_beside", lambda *args: SliceRoom.AFTER)
    made = bench.prepare(2, NEXT)
    assert isinstance(made, Loaded)
    assert made.load_s > 0
    bench.progress.clear()
    assert not bench.load(3, NEXT).reused
    assert bench.progress[-1] == "loading"
    assert is_right(bench, NEXT)


def test_what_fits_nowhere_is_refused_and_the_slice_that_runs_goes_on(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.load(1, FIRST)
    monkeypatch.setattr(loading, "room_beside", lambda *args: SliceRoom.NONE)
    fetches: list[object] = []
    monkeypatch.setattr(loading.SliceLoad, "fetch", fetches.append)
    made = bench.prepare(2, NEXT)
    assert isinstance(made, WorkFailed)
    assert str(made.error).startswith("layers 2 to 5 need")
    assert fetches == [], "only what fits is fetched"
    assert is_right(bench, FIRST)


def test_conversations_that_need_the_memory_take_it(bench: Bench) -> None:
    bench.load(1, FIRST)
    bench.prepare(2, NEXT)
    part = bench.slice()
    slots = CONTEXT + limits.TREE_NODES_MAX
    part.cache_bytes_max = bench.compute._beside._taken_bytes + slots * part.slot_bytes
    bench.compute.post(1, OpenCache(request=1, slots=slots))
    bench.compute.post(1, OpenCache(request=2, slots=slots))
    bench.progress.clear()
    assert not bench.load(3, NEXT).reused, "the second one needed it"
    assert is_right(bench, NEXT)


def test_what_is_made_ready_for_nobody_any_more_ends_soon(bench: Bench) -> None:
    bench.load(1, FIRST)
    bench.compute.prepare(2, bench.assign(NEXT, is_beside=True))
    bench.compute.end_preparation(2)
    found = bench.result(2)
    assert isinstance(found, WorkFailed)
    assert str(found.error) == "the head let go before all weights were there"
    assert bench.prepare(3, NEXT) is not None
    assert bench.load(4, NEXT).reused


def test_memory_that_is_left_is_for_layers_and_for_caches_that_are_open(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.load(1, FIRST)
    part, free_bytes = bench.slice(), 1 << 20

    class Here:
        def free_bytes(self) -> int:
            return free_bytes

    monkeypatch.setattr(loading, "accelerator_of", lambda device: Here())
    need = loading.SliceMemory(weight_bytes=1 << 20, cache_bytes=10)
    machine = Machine(device="cpu")
    assert loading.room_beside(need, None, part, machine) is SliceRoom.BESIDE
    part.open_cache(1, CONTEXT)
    assert loading.room_beside(need, None, part, machine) is SliceRoom.AFTER
    free_bytes = 0
    kept = part.pieces.kept_for(part.span)
    assert loading.room_beside(need, kept, part, machine) is SliceRoom.NONE


def test_the_thread_that_loads_has_a_low_priority(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(beside.os, "setpriority", lambda which, who, niceness: seen.append(niceness))
    bench.load(1, FIRST)
    bench.prepare(2, NEXT)
    assert seen == [beside.NICENESS]
