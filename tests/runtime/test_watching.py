"""A head of real processes is watched: its answers stay the same, and every watcher sees the whole of what it
is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.watching import Watch, Watcher
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.figures import Frame
from flowspec.watch.recording import About, wrong_document
from tests.runtime.clusters import plan_for, submit, tokens_of, wait_until


def frames_of(watcher: Watcher) -> list[Frame]:
    return [frame for batch in watcher.take() for frame in batch.frames]


def test_an_observer_that_fails_is_told_no_more(
    folder: Path, cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    told = 0

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    def count(*_: object) -> None:
        nonlocal told
        told += 1

    with Head(plan_for(folder, cluster.wait()), on_event=fail) as head:
        head.observe(count)
        assert len(tokens_of(submit(head, count=5))) == 5
        assert head.failure is None
        assert (head.observes(fail), head.observes(count)) == (False, True)
    assert told > 5
    assert caplog.text.count("Traceback") == caplog.text.count("RuntimeError: made to fail") == 1


def test_a_running_head_is_watched_from_any_moment_on(folder: Path, cluster: LocalCluster) -> None:
    """That a watcher sees the whole of an answer is for tests/watch; here are real devices."""
    with Head(plan_for(folder, cluster.wait())) as head:
        unwatched = tokens_of(submit(head, count=30))
        about = About(world="cluster", model="made", method="ar", drafters=(), stages=[])
        watch = Watch(head, about, as_numbers, keeps=True)
        watcher = watch.join()
        answer = submit(head, count=30)
        assert tokens_of(answer) == unwatched
        watch.settle()
        frames = frames_of(watcher)
        (end,) = [frame for frame in frames if frame["kind"] == "end"]
        assert answer.end is not None
        assert end["statistics"] == {
            name: value for name, value in answer.end.statistics.items() if name != "head_s"
        }
        document = watch.recording()
        assert document is not None
        assert wrong_document(document) == ""
        devices: list[Frame] = []
        wait_until(
            lambda: (
                devices.extend(frame for frame in frames_of(watcher) if frame["kind"] == "devices")
                or any(frame["devices"][0]["done"] for frame in devices)
            ),
            "a Pong tells of segments that were run",
        )
        assert [row["name"] for row in devices[-1]["devices"]] == [stage.name for stage in head.plan.stages]
        assert all(row["memory_bytes"] > 1 << 20 and row["present"] for row in devices[-1]["devices"])
        watch.close()
        assert head._observers == ()
