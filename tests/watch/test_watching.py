"""Watchers come and go while a head runs; nobody who is slow holds up the head or the others, and nothing is done for nobody."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from flowspec.core.cluster_messages import Pong
from flowspec.runtime import watching
from flowspec.runtime.watching import BATCHES_MAX, MISSES_MAX, WATCHERS_MAX, Batch, TooManyError, Watcher
from flowspec.watch.figures import Frame
from flowspec.watch.present import Present
from flowspec.watch.recording import wrong_document
from tests.runtime.clusters import wait_until
from tests.watch.heads import VirtualHead, watched


def frames_of(watcher: Watcher) -> list[Frame]:
    return [frame for batch in watcher.take() for frame in batch.frames]


def shown(present: Present) -> dict[int, tuple[int, list[int]]]:
    return {number: (answer.root["node"] if answer.root else -1, sorted(answer.nodes)) for number, answer in present.answers.items()}


def test_nothing_is_done_while_nobody_watches() -> None:
    head = VirtualHead(3)
    watch = watched(head)
    assert head.observers == []
    first, second = watch.join(), watch.join()
    assert len(head.observers) == 1
    watch.leave(first)
    assert len(head.observers) == 1
    watch.leave(second)
    watch.leave(second)
    assert head.observers == []
    assert watch.present is None
    wait_until(lambda: not any(thread.name == "watch" for thread in threading.enumerate()), "its thread has ended")


def test_whoever_comes_later_has_the_same_picture() -> None:
    compared = 0
    for seed in range(6):
        head = VirtualHead(seed)
        watch = watched(head)
        early, late = Present(), Present()
        first = watch.join()
        head.run(until_s=0.4)
        watch._turn(watch._recorder)  # type: ignore[arg-type]
        second = watch.join()
        head.run()
        watch._turn(watch._recorder)  # type: ignore[arg-type]
        for watcher, present in ((first, early), (second, late)):
            for frame in frames_of(watcher):
                present.take(frame)
                compared += bool(present.answers)
        assert shown(early) == shown(late) == {}
        assert early.stages == late.stages
        watch.close()
    assert compared > 20


def test_a_slow_watcher_misses_what_waits_and_goes_on_with_the_present() -> None:
    present, slow = Present(), Watcher()
    frames: list[Frame] = [{"t": 1.0, "kind": "stages", "stages": [{"name": "a", "layers": [0, 1]}]}]
    frames.append({"t": 1.0, "kind": "begin", "request": 1, "prompt_tokens": 3, "reused": 0, "text": ""})
    frames.append({"t": 1.0, "kind": "root", "request": 1, "node": 2, "token": "x", "position": 2})
    for node in range(3, 3 + 3 * BATCHES_MAX):
        frames.append({"t": 1.0, "kind": "nodes", "request": 1, "nodes": [[node, 2, "y", 0.5]]})
    for frame in frames:
        present.take(frame)
        slow.give(Batch([frame]), present)
        assert len(slow._batches) <= BATCHES_MAX
    found = Present()
    kinds = []
    for frame in frames_of(slow):
        kinds.append(frame["kind"])
        found.take(frame)
    assert kinds[0] == "missed"
    assert shown(found) == shown(present)
    assert found.stages == present.stages


def test_a_watcher_that_never_looks_is_taken_off_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BATCHES_MAX", 2)
    head = VirtualHead(1)
    watch = watched(head)
    gone, there = watch.join(), watch.join()
    for _ in range(2 * MISSES_MAX + 3):
        assert watch._recorder is not None
        watch._devices_due_s = 0.0
        watch._turn(watch._recorder)
        assert there.take()
    assert (watch.has(gone), watch.has(there)) == (False, True)
    watch.leave(there)
    assert head.observers == []


def test_only_so_many_may_watch() -> None:
    watch = watched(VirtualHead(1))
    for _ in range(WATCHERS_MAX):
        last = watch.join()
    with pytest.raises(TooManyError, match="16 watch already"):
        watch.join()
    watch.leave(last)
    watch.join()
    watch.close()


def test_the_last_answer_is_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    head = VirtualHead(12)
    watch = watched(head, keeps=True)
    assert watch.recording() is None
    watch.join()
    head.run()
    watch._turn(watch._recorder)  # type: ignore[arg-type]
    document = watch.recording()
    assert document is not None
    assert wrong_document(document) == ""
    frames = document["frames"]
    assert frames[0]["t"] == 0.0
    assert [frame["kind"] for frame in frames][:3] == ["stages", "devices", "begin"]
    assert frames[-1]["kind"] == "end"
    begun, open_now = 0, 0
    for frame in frames:
        open_now += (frame["kind"] == "begin") - (frame["kind"] == "end")
        begun += frame["kind"] == "begin"
        assert open_now > 0 or frame["kind"] in ("stages", "devices", "end"), "an answer before the last one"
    watch.close()

    monkeypatch.setattr(watching, "KEPT_CHARS_MAX", 500)
    head = VirtualHead(12)
    watch = watched(head, keeps=True)
    watch.join()
    head.run()
    watch._turn(watch._recorder)  # type: ignore[arg-type]
    assert watch.recording() is None, "an answer that is too long is given up"
    watch.close()


def test_devices_are_told_with_what_they_said_last() -> None:
    head = VirtualHead(2)
    watch = watched(head)
    head.stages[0].pong = Pong(queued=1, done=2, memory_bytes=3, running_s=0.5, temperature_c=61.26)
    first, *_ = watch._look_at_devices()
    assert first == {
        "name": "board-0",
        "memory_bytes": 3,
        "temperature_c": 61.3,
        "queued": 1,
        "done": 2,
        "running_s": 0.5,
        "present": True,
    }
    head.stages = [SimpleNamespace(plan=SimpleNamespace(name="other"), pong=None, ready=SimpleNamespace(memory_bytes=7))]
    rows = {row["name"]: row for row in watch._look_at_devices()}
    assert (rows["board-0"]["present"], rows["board-0"]["memory_bytes"]) == (False, 3)
    assert (rows["other"]["present"], rows["other"]["memory_bytes"], rows["other"]["temperature_c"]) == (True, 7, None)
    head.is_formed = False
    assert not any(row["present"] for row in watch._look_at_devices())
