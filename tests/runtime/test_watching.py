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
    """Real processes: a watcher that comes in mid-answer, one from the beginning, and answers that are the
    same as without."""
    with Head(plan_for(folder, cluster.wait())) as head:
        unwatched = tokens_of(submit(head, count=30))
        about = About(world="cluster", model="made", method="ar", drafters=(), stages=[])
        watch = Watch(head, about, as_numbers, keeps=True)
        early = watch.join()
        answer = submit(head, count=30)
        tokens: list[int] = []
        late = None
        for batch in answer:
            tokens += batch.tokens
            if len(tokens) >= 10 and late is None:
                late = watch.join()
        watch.settle()
        assert late is not None
        assert tokens == unwatched
        for watcher in (early, late):
            frames = frames_of(watcher)
            assert [frame["kind"] for frame in frames if frame["kind"] in ("begin", "end")] == [
                "begin",
                "end",
            ]
            text = "".join(
                text for frame in frames if frame["kind"] == "tokens" for _, text in frame["nodes"]
            )
            assert as_numbers(tokens).endswith(text)
            if watcher is early:
                assert text == as_numbers(tokens)
        end = (
            frames[-1]
            if frames[-1]["kind"] == "end"
            else next(frame for frame in frames if frame["kind"] == "end")
        )
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
                devices.extend(f for f in frames_of(early) if f["kind"] == "devices")
                or any(d["devices"][0]["done"] for d in devices)
            ),
            "a Pong tells of segments that were run",
        )
        assert [row["name"] for row in devices[-1]["devices"]] == [stage.name for stage in head.plan.stages]
        assert all(row["memory_bytes"] > 1 << 20 and row["present"] for row in devices[-1]["devices"])
        watch.close()
        assert head._observers == ()
