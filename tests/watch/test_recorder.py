"""Frames tell the whole story: whoever takes them one by one has, after each event, the head's own trees and
answers; figures of the last seconds; and recordings that come back."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.head.events import HeadCommand, HeadEvent, PipelineLost, PipelineReformed
from flowspec.core.head.head import HeadCore
from flowspec.errors import InputError
from flowspec.sim.world import Handled
from flowspec.watch import figures, recording
from flowspec.watch import recorder as recorders
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.figures import Figures, Frame
from flowspec.watch.recorder import Recorder
from flowspec.watch.recording import (
    About,
    as_text,
    document_text,
    rebased,
    record_document,
    write_recording,
)
from flowspec.watch.state import WatchState
from lab.faults import play as faults
from lab.faults import schedule as fault_schedules
from tests.nightly import nightly
from tests.sim.swarm import Play
from tests.watch.heads import play

ABOUT = About(world="simulated", model="made", method="any", drafters=(), stages=[])


class Mirror:
    """A recorder at a head, and a reader of its frames who believes nothing else; compares the two after
    every event."""

    def __init__(self, head: HeadCore, *, lag: int = 1) -> None:
        self.head = head
        self.recorder = Recorder(head.requests, self.stages, as_numbers)
        self.reader = WatchState()
        self.frames: list[Frame] = []
        self.seen: Counter[str] = Counter()
        self.texts: dict[int, str] = {}
        self._lag = lag
        self._events = 0

    def stages(self) -> list[dict[str, Any]]:
        return [
            {"name": f"stage-{index}", "layers": [index, index + 1]} for index in range(self.head.stage_count)
        ]

    def take(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        self.recorder(event, commands, now_s)
        self._events += 1
        if self._lag and self._events % self._lag == 0:
            self.read()
            self.compare()

    def hear(self, handled: Handled) -> None:
        self.take(handled.event, handled.commands, handled.now_s)  # type: ignore[arg-type]

    def read(self) -> None:
        for frame in self.recorder.frames():
            self.seen[frame["kind"]] += 1
            self.frames.append(frame)
            self._check_nodes(frame)
            self.reader.take(frame)
            if frame["kind"] == "root":
                self.texts.setdefault(frame["request"], "")
            elif frame["kind"] == "tokens":
                self.texts[frame["request"]] += "".join(text for _, text in frame["nodes"])
            elif frame["kind"] == "begin":
                self.texts[frame["request"]] = ""

    def _check_nodes(self, frame: Frame) -> None:
        """What a frame refers to is there: parents before children, guesses that die or are sent alive."""
        answer = self.reader.answers.get(frame.get("request", -1))
        if frame["kind"] == "nodes":
            assert answer is not None
            assert answer.root is not None
            known = {answer.root["node"], *answer.nodes}
            for node, parent, _, value in frame["nodes"]:
                assert parent in known, f"node {node} comes before its parent {parent}"
                assert 0 <= value <= 1
                known.add(node)
        elif frame["kind"] == "tokens":
            assert answer is not None
            assert answer.root is not None
            path = [answer.root["node"], *(node for node, _ in frame["nodes"])]
            for above, node in itertools.pairwise(path):
                assert answer.nodes[node][1] == above, f"node {node} is committed, and is no child of {above}"
        elif frame["kind"] == "dead":
            assert answer is not None
            assert set(frame["nodes"]) <= answer.nodes.keys(), "what dies was not alive"

    def compare(self) -> None:
        asked = {request.number: request for request in self.head.requests() if request.submit is not None}
        assert self.reader.answers.keys() == asked.keys()
        for number, request in asked.items():
            answer, tree = self.reader.answers[number], request.tree
            assert answer.root is not None
            assert (answer.root["node"], answer.root["position"]) == (tree.root, tree.position(tree.root))
            assert set(answer.nodes) == set(tree.living()), (
                f"request {number}: {sorted(answer.nodes)} are shown alive"
            )
            assert all(
                row[1] == tree.parent(node) and row[2] == as_numbers([tree.token(node)])
                for node, row in answer.nodes.items()
            )
            assert request.submit is not None
            assert self.texts[number] == as_numbers(request.new_tokens[len(request.submit.answered) :])

    def shown(self) -> dict[int, set[int]]:
        """The nodes that are alive, of each answer."""
        return {number: set(answer.nodes) for number, answer in self.reader.answers.items()}


def living(head: HeadCore) -> dict[int, set[int]]:
    return {
        request.number: set(request.tree.living())
        for request in head.requests()
        if request.submit is not None
    }


def watch_schedule(seed: int, lag: int = 1) -> tuple[Mirror, Play]:
    run = play(seed, lambda _, handled: mirror.hear(handled))
    mirror = Mirror(run.world.head, lag=lag)
    run.run()
    mirror.read()
    mirror.compare()
    return mirror, run


def watch_faults(seed: int) -> Mirror:
    run = faults.Play(fault_schedules.draw(seed))
    mirror = Mirror(run.cluster.head)
    handle = run.cluster.head.handle

    def handled(event: HeadEvent, now_s: float) -> list[HeadCommand]:
        commands = handle(event, now_s)
        mirror.take(event, commands, now_s)
        return commands

    run.cluster.head.handle = handled  # type: ignore[method-assign]
    run.run()
    return mirror


def test_the_frames_of_any_schedule_give_the_heads_trees_after_every_event() -> None:
    seen: Counter[str] = Counter()
    for seed in range(nightly(25, 120)):
        try:
            mirror, run = watch_schedule(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        ended = sum(
            bool(answer.end and answer.end.statistics.segments)
            for answers in run.world.answers.values()
            for answer in answers
        )
        assert mirror.seen["begin"] == mirror.seen["end"] >= ended
        assert mirror.seen["trip"] == len(run.world.timings)
        seen.update(mirror.seen)
    kinds = ("stages", "begin", "root", "nodes", "sent", "trip", "draft", "tokens", "dead", "end", "figures")
    assert [kind for kind in kinds if not seen[kind]] == []


def test_a_reader_that_comes_now_and_then_sees_the_same() -> None:
    for seed in range(nightly(6, 40)):
        often, seldom = watch_schedule(seed)[0], watch_schedule(seed, lag=7)[0]
        assert as_text(often.frames) == as_text(seldom.frames), f"seed {seed}"


def test_recoveries_are_followed_and_told() -> None:
    seen: Counter[str] = Counter()
    for seed in range(nightly(15, 40)):
        try:
            mirror = watch_faults(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(mirror.seen)
        seen["roots again"] += mirror.seen["root"] - mirror.seen["begin"]
    assert all(seen[kind] > nightly(2, 10) for kind in ("lost", "stages", "dead", "roots again", "end")), seen
    mirror = Mirror(HeadCore(context=20, stage_count=2))
    for event in (PipelineLost(silent_s=1.5), PipelineReformed(stage_count=3)):
        mirror.take(event, mirror.head.handle(event, 5.0), 5.0)
    assert [frame["kind"] for frame in mirror.frames] == ["stages", "lost", "stages"]
    assert mirror.frames[1]["silent_s"] == 1.5
    assert [len(frame["stages"]) for frame in mirror.frames if frame["kind"] == "stages"] == [2, 3]


def test_whoever_begins_in_mid_answer_is_told_the_present_first() -> None:
    """A recorder that is put in after each number of events tells, with its first look, what the other has
    gathered since the beginning."""
    met = 0
    for seed in range(nightly(3, 12)):
        late: list[Mirror] = []

        def look(head: HeadCore, handled: Handled, late: list[Mirror] = late) -> None:
            if len(late) < 40:
                late.append(Mirror(head, lag=0))
            for mirror in late:
                mirror.hear(handled)
                mirror.read()
                assert mirror.shown() == living(head)

        play(seed, look).run()
        met += len(late)
    assert met > nightly(60, 300)


def test_the_present_begins_another_watcher() -> None:
    for seed in range(nightly(4, 20)):
        mirror, _ = watch_schedule(seed)
        for upto in range(0, len(mirror.frames), 9):
            first, second = WatchState(), WatchState()
            for frame in mirror.frames[:upto]:
                first.take(frame)
            for frame in first.frames():
                second.take(frame)
            for frame in mirror.frames[upto:]:
                first.take(frame)
                second.take(frame)
                assert {n: (a.root and a.root["node"], a.nodes) for n, a in first.answers.items()} == {
                    n: (a.root and a.root["node"], a.nodes) for n, a in second.answers.items()
                }


def watch_seldom(seed: int) -> Mirror:
    """A reader that looks every 33 events, of a recorder that keeps fewer."""
    count = itertools.count(1)

    def look(head: HeadCore, handled: Handled) -> None:
        mirror.hear(handled)
        assert len(mirror.recorder._moments) <= 20
        if next(count) % 33 == 0:
            mirror.read()
            assert mirror.shown() == living(head)

    run = play(seed, look)
    mirror = Mirror(run.world.head, lag=0)
    run.run()
    mirror.read()
    return mirror


def test_a_reader_that_is_too_slow_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MOMENTS_MAX", 20)
    mirrors = [watch_seldom(seed) for seed in range(6)]
    assert sum(mirror.seen["missed"] for mirror in mirrors) > 3
    for mirror in mirrors:
        assert mirror.recorder._running == {}, "of answers whose end was missed nothing is kept"
        assert mirror.recorder._figures.frame(1e6) is None


# ---------------------------------------------------------------------------------------------------- figures


def stay(stage: int, started_s: float, ended_s: float, dead: int = 0, dropped: int = 0) -> Frame:
    return {
        "stage": stage,
        "started_s": started_s,
        "ended_s": ended_s,
        "alive": 1,
        "dead": dead,
        "dropped": dropped,
    }


def trip(t: float, *stays: Frame) -> Frame:
    return {"t": t, "kind": "trip", "segment": 0, "sent_s": 0.0, "back_s": t, "stays": list(stays)}


def tokens(t: float, *nodes: int) -> Frame:
    return {"t": t, "kind": "tokens", "request": 1, "nodes": [[node, "x"] for node in nodes]}


def begun() -> Figures:
    found = Figures()
    found.take({"t": 0.0, "kind": "stages", "stages": [{}, {}]})
    found.take({"t": 1.0, "kind": "begin", "request": 1})
    return found


def test_by_hand() -> None:
    found = begun()
    found.take({"t": 1.0, "kind": "sent", "segment": 0, "parts": [[1, []]], "prompt_rows": 9})
    found.take({"t": 1.5, "kind": "sent", "segment": 1, "parts": [[1, [10, 11, 12]]], "prompt_rows": 0})
    found.take(tokens(2.0, 10))
    found.take(trip(2.0, stay(0, 1.0, 1.5), stay(1, 1.5, 2.0, dropped=3)))
    found.take({"t": 2.5, "kind": "sent", "segment": 2, "parts": [[1, [13]]], "prompt_rows": 0})
    found.take(tokens(3.0, 12, 14))
    found.take(trip(3.0, stay(0, 2.5, 3.0, dead=1), stay(1, 3.0, 3.0)))
    told = found.frame(4.0)
    assert told is not None
    assert told["tokens_per_s"] == 1.0, "two tokens in the two seconds since the first"
    assert told["S"] == 2.0, "of the prompt's segment came the first"
    assert told["rho"] == 0.5
    assert told["acceptance"] == 1.0
    assert told["busy"] == [pytest.approx(1 / 3, abs=1e-4), pytest.approx(0.5 / 3, abs=1e-4)]
    assert told["dropped_rows"] == 4


def test_figures_forget_what_is_long_past_and_begin_anew_with_each_answer() -> None:
    found = begun()
    found.take(tokens(1.5, 5))
    found.take(tokens(2.0, 6, 7, 8))
    found.take(trip(2.0, stay(0, 1.0, 2.0, dead=5)))
    found.take(tokens(9.0, 9))
    told = found.frame(10.0)
    assert told is not None
    assert (told["S"], told["dropped_rows"], told["busy"]) == (1.0, 0, [0.0, 0.0])
    assert told["tokens_per_s"] == pytest.approx(1 / figures.WINDOW_S)
    assert Figures().frame(1.0) is None
    found = begun()
    found.take(tokens(1.5, 5, 6, 7, 8))
    assert found.frame(1.8) is not None
    found.take({"t": 2.0, "kind": "end", "request": 1})
    assert found.frame(2.5) is None
    found.take({"t": 3.0, "kind": "begin", "request": 1})
    told = found.frame(3.5)
    assert told is not None
    assert (told["tokens_per_s"], told["S"]) == (0.0, 0.0)


def test_of_a_whole_answer_they_are_those_of_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "WINDOW_S", 1e6)
    compared = 0
    for seed in range(nightly(20, 160)):
        mirror, run = watch_schedule(seed)
        if len(run.world.answers) != 1 or len(run.world.answers[0]) != 1 or not mirror.seen["begin"]:
            continue
        frames = mirror.frames
        end = next(at for at, frame in enumerate(frames) if frame["kind"] == "end")
        told, report = frames[end - 1], frames[end]["statistics"]
        count = sum(len(frame["nodes"]) for frame in frames[:end] if frame["kind"] == "tokens")
        assert told["kind"] == "figures"
        assert told["S"] == report["tokens_per_commit"]
        assert report["committing_segments"] <= report["segments"]
        assert told["acceptance"] == report["acceptance_length"]
        if count > 1 and frames[end]["reason"] != "cancelled":
            assert abs(told["rho"] * count - report["share_in_flight"] * (count - 1)) < 1.01, (
                "but for the last token"
            )
        compared += 1
    assert compared > nightly(1, 20)


# ------------------------------------------------------------------------------------------------- recordings

SEED = 4


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return record_document(ABOUT, watch_schedule(SEED)[0].frames)


def frame(document: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in document["frames"] if each["kind"] == kind)
    return found


def test_a_recording_comes_back_as_it_was_written_or_is_refused(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answer.json"
    write_recording(path, document)
    assert json.loads(path.read_text()) == document
    assert [each.name for each in tmp_path.iterdir()] == ["answer.json"], "nothing half-written is left"
    (tmp_path / "folder.json").mkdir()
    for name in ("none/answer.json", "folder.json"):
        with pytest.raises(InputError, match="cannot write the recording"):
            write_recording(tmp_path / name, document)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["answer.json", "folder.json"], (
        "no part is left"
    )
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", 1000)
    with pytest.raises(InputError, match="record a shorter answer"):
        write_recording(tmp_path / "answer.json", document)


def test_a_clock_can_begin_elsewhere(document: dict[str, Any]) -> None:
    trip = frame(document, "trip")
    frames = [json.loads(rebased(as_text(each), trip["sent_s"])) for each in document["frames"]]
    moved = next(each for each in frames if each["kind"] == "trip")
    assert moved["sent_s"] == 0.0
    assert moved["back_s"] == pytest.approx(trip["back_s"] - trip["sent_s"], abs=2e-6)
    assert moved["stays"][-1]["left_s"] == pytest.approx(
        trip["stays"][-1]["left_s"] - trip["sent_s"], abs=2e-6
    )
    texts = [as_text(each) for each in document["frames"]]
    assert json.loads(document_text(ABOUT, (rebased(text, 0.0) for text in texts))) == document
    hostile = as_text(
        {
            "t": 5.5,
            "kind": "tokens",
            "request": 1,
            "nodes": [[1, '"t":5.5,"sent_s":1'], [2, "\\"], [3, ',"t":7']],
        }
    )
    assert rebased(hostile, 5.0) == hostile.replace('{"t":5.5', '{"t":0.5', 1), "text of tokens stays"
    assert (
        rebased('{"t":1e-06,"kind":"lost","silent_s":2.0}', 1.0) == '{"t":0.0,"kind":"lost","silent_s":2.0}'
    )
