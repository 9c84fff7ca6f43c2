"""Watchers come and go while a head runs; nobody who is slow holds up the head or the others, and nothing is
done for nobody."""

from __future__ import annotations

import json
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from flowspec.core.protocol.cluster_messages import Pong
from flowspec.errors import ClusterError
from flowspec.runtime import watching
from flowspec.runtime.watching import (
    BATCHES_MAX,
    MISSES_MAX,
    WATCHERS_MAX,
    FrameBatch,
    TooManyError,
    Watch,
    Watcher,
)
from flowspec.watch.figures import Frame
from flowspec.watch.recorder import Recorder
from flowspec.watch.recording import as_text, rebased
from flowspec.watch.state import WatchState
from tests.runtime.clusters import wait_until
from tests.watch.heads import VirtualHead, watched

ANSWERS = 12
"""A schedule with several answers."""


def frames_of(watcher: Watcher) -> list[Frame]:
    return [frame for batch in watcher.take() for frame in batch.frames]


def kinds_of(frames: list[Frame]) -> list[str]:
    return [frame["kind"] for frame in frames]


def turn(watch: Watch) -> None:
    """What the watch's thread does ten times a second, now."""
    with watch._lock:
        assert watch._recorder is not None
        watch._turn(watch._recorder)


def shown(present: WatchState) -> dict[int, tuple[int, list[int]]]:
    return {
        number: (answer.root["node"] if answer.root else -1, sorted(answer.nodes))
        for number, answer in present.answers.items()
    }


def test_a_slow_watcher_misses_what_waits_and_goes_on_with_the_present() -> None:
    present, slow = WatchState(), Watcher()
    frames: list[Frame] = [{"t": 1.0, "kind": "stages", "stages": [{"name": "a", "layers": [0, 1]}]}]
    frames.append({"t": 1.0, "kind": "begin", "request": 1, "prompt_tokens": 3, "reused": 0, "text": ""})
    frames.append({"t": 1.0, "kind": "root", "request": 1, "node": 2, "token": "x", "position": 2})
    for node in range(3, 3 + 3 * BATCHES_MAX):
        frames.append({"t": 1.0, "kind": "nodes", "request": 1, "nodes": [[node, 2, "y", 0.5]]})
    for frame in frames:
        present.take(frame)
        slow.give(FrameBatch([frame]), present)
        assert len(slow._batches) <= BATCHES_MAX
    found, waiting = WatchState(), frames_of(slow)
    for frame in waiting:
        found.take(frame)
    assert waiting[0]["kind"] == "missed"
    assert shown(found) == shown(present)
    assert found.stages == present.stages


def test_a_watcher_that_never_looks_is_taken_off_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BATCHES_MAX", 2)
    head = VirtualHead(1)
    watch = watched(head)
    gone, there = watch.join(), watch.join()
    for _ in range(2 * MISSES_MAX + 3):
        watch._devices_due_s = 0.0
        turn(watch)
        assert there.take()
    assert (watch.has(gone), watch.has(there)) == (False, True)
    watch.leave(there)
    assert head.observers == []
    looker = watch.join(reads=False)
    for _ in range(2 * MISSES_MAX + 3):
        watch._devices_due_s = 0.0
        turn(watch)
    assert (watch.has(looker), looker.take()) == (True, []), "who only looks need not read"
    watch.close()


def test_only_so_many_may_watch() -> None:
    head = VirtualHead(1)
    watch = watched(head)
    assert head.observers == []
    there = [watch.join() for _ in range(WATCHERS_MAX)]
    assert len(head.observers) == 1
    with pytest.raises(TooManyError):
        watch.join()
    watch.leave(there.pop())
    there.append(watch.join())
    for each in there:
        assert len(head.observers) == 1
        watch.leave(each)
    watch.leave(there[0])
    assert (head.observers, watch.present) == ([], None), "nothing is done while nobody watches"
    wait_until(
        lambda: not any(thread.name == "watch" for thread in threading.enumerate()), "its thread has ended"
    )


def all_watched() -> Watch:
    """A watch that has seen answers come and go."""
    head = VirtualHead(ANSWERS)
    watch = watched(head, keeps=True)
    assert watch.recording() is None
    watch.join()
    head.run()
    turn(watch)
    return watch


def test_the_last_answer_is_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = all_watched()
    document = watch.recording()
    watch.close()
    assert document is not None
    frames = document["frames"]
    assert frames[0]["t"] == 0.0
    kinds = kinds_of(frames)
    assert (kinds[:3], kinds[-1]) == (["stages", "devices", "begin"], "end")
    open_now = 0
    for kind in kinds:
        open_now += (kind == "begin") - (kind == "end")
        assert open_now > 0 or kind in ("stages", "devices", "end"), "an answer before the last one"
    monkeypatch.setattr(watching, "KEPT_CHARS_MAX", 500)
    watch = all_watched()
    assert watch.recording() is None, "an answer that is too long is given up"
    watch.close()


def test_who_leaves_in_mid_answer_leaves_no_recording_open() -> None:
    head = VirtualHead(ANSWERS)
    watch = watched(head, keeps=True)
    watcher = watch.join()
    until_s = 0.0
    while not (watch._recorder and watch._recorder.present.answers):
        until_s += 0.02
        assert until_s < 60
        head.run(until_s=until_s)
        turn(watch)
    assert watch._kept is not None
    other = {"t": 1.0, "kind": "begin", "request": 99, "prompt_tokens": 1, "reused": 0, "text": ""}
    with watch._lock:
        # another one, whose number does not come again
        watch._kept.take(FrameBatch([other]), watch._recorder.present)
    watch.leave(watcher)
    head.run()
    first = watch.recording()
    assert first is not None
    assert "end" not in kinds_of(first["frames"])
    head = VirtualHead(ANSWERS)
    watch._head = head  # type: ignore[assignment]
    watch.join()
    head.run()
    turn(watch)
    second = watch.recording()
    assert second is not None
    kinds = kinds_of(second["frames"])
    assert kinds.count("begin") == kinds.count("end") > 0, "of answers that came later, all of them"
    watch.close()


def test_the_recordings_text_is_made_without_holding_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = all_watched()
    whole = watch.recording()
    asked: list[bool] = []

    def free(text: str, origin_s: float) -> str:
        def take() -> None:
            asked.append(watch._lock.acquire(blocking=False))
            watch._lock.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()
        return rebased(text, origin_s)

    monkeypatch.setattr(watching, "rebased", free)
    again = watch.recording()
    assert again is not None
    assert again == {**(whole or {}), "created": again["created"]}
    assert asked
    assert all(asked)
    watch.close()


def test_each_frame_becomes_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def count(frame: Frame) -> str:
        made.append(frame["kind"])
        return as_text(frame)

    monkeypatch.setattr(watching, "as_text", count)
    head = VirtualHead(ANSWERS)
    watch = watched(head, keeps=True)
    with watch._lock:  # its thread waits
        first, second = watch.join(), watch.join()
        made.clear()
        head.run()
        turn(watch)
    (batch,) = first.take()
    assert second.take()[-1] is batch
    assert json.loads(batch.text) == batch.frames
    kinds = kinds_of(batch.frames)
    but_for_a_recordings_beginning = Counter(made) - Counter(["stages", "devices"] * kinds.count("begin"))
    assert but_for_a_recordings_beginning <= Counter(kinds)
    watch.close()


@pytest.mark.parametrize("place", ["the head's thread", "the watch's thread"])
def test_a_watch_that_fails_is_told_and_closed(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = VirtualHead(1)
    watch = watched(head)

    def fail(*_: object) -> list[Frame]:
        raise RuntimeError("made to fail")

    if place == "the watch's thread":
        monkeypatch.setattr(Recorder, "frames", fail)
    watcher = watch.join()
    if place == "the head's thread":
        head.unobserve(watch._recorder)  # type: ignore[arg-type]  # as a head does with one that raises
    wait_until(lambda: not watch.has(watcher), "nobody watches any more")
    assert watch.present is None
    assert head.observers == []
    assert ("made to fail" in caplog.text) == (place == "the watch's thread")
    monkeypatch.undo()
    again = watch.join()
    assert watch.has(again)
    watch.close()


def test_devices_are_told_with_what_they_said_last() -> None:
    head = VirtualHead(2)
    watch = watched(head)
    said = {"queued": 1, "done": 2, "memory_bytes": 3, "running_s": 0.5}
    head.stages[0].pong = Pong(**said, temperature_c=61.26, is_throttled=True)  # type: ignore[arg-type]
    first, *_ = watch._look_at_devices()
    known = {"name": "board-0", "temperature_c": 61.3, "throttled": True}
    assert first == {**said, **known, "present": True, "loading": None}
    head.lost, head.loading = ["board-0", "never-seen"], {"other": ("loading weights", 0.25)}
    ready = SimpleNamespace(memory_bytes=7)
    head.stages = [SimpleNamespace(plan=SimpleNamespace(name="other"), pong=None, ready=ready)]
    rows = {row["name"]: row for row in watch._look_at_devices()}
    assert rows["board-0"] == {**first, "present": False}
    other = rows["other"]
    assert (other["present"], other["memory_bytes"], other["temperature_c"]) == (True, 7, None)
    assert other["loading"] == {"doing": "loading weights", "share": 0.25}
    assert (rows["never-seen"]["present"], rows["never-seen"]["memory_bytes"]) == (False, 0)
    head.lost, head.loading = [], {}
    assert all(row["present"] and row["loading"] is None for row in watch._look_at_devices())


def test_that_the_head_has_failed_is_told_once_and_notes_are_frames() -> None:
    head = VirtualHead(2)
    watch = watched(head)
    watcher = watch.join()
    head.failure = ClusterError("no device is left")
    for _ in range(2):
        watch.settle()
    found = [frame["text"] for frame in frames_of(watcher) if frame["kind"] == "failed"]
    assert found == ["no device is left"]
    assert "failed" in kinds_of(frames_of(watch.join()))
    watch.close()
    watch = watched(VirtualHead(2))
    watch.note("told to nobody")
    watcher = watch.join()
    watch.note("device board-0 is lost (silent)")
    watch.settle()
    wait_until(lambda: bool(watcher._batches), "it is told")
    notes = [frame["text"] for frame in frames_of(watcher) if frame["kind"] == "note"]
    assert notes == ["device board-0 is lost (silent)"]
    watch.close()
