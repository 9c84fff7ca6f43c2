"""Frames tell the whole story: whoever takes them one by one has, after each event, the head's own trees and
answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from flowspec.core.head.events import HeadCommand, HeadEvent, PipelineLost, PipelineReformed
from flowspec.core.head.head import HeadCore
from flowspec.sim.world import Handled
from flowspec.watch import recorder as recorders
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.figures import Frame
from flowspec.watch.recorder import Recorder
from flowspec.watch.recording import About, as_text, record_document, wrong_document
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
        assert wrong_document(record_document(ABOUT, mirror.frames)) == ""
        seen.update(mirror.seen)
    kinds = ("stages", "begin", "root", "nodes", "sent", "trip", "draft", "tokens", "dead", "end", "figures")
    assert [kind for kind in kinds if not seen[kind]] == []


def test_a_reader_that_comes_now_and_then_sees_the_same() -> None:
    for seed in range(nightly(6, 40)):
        often, seldom = watch_schedule(seed)[0], watch_schedule(seed, lag=7)[0]
        assert as_text(often.frames) == as_text(seldom.frames), f"seed {seed}"


def test_recoveries_are_followed_too() -> None:
    seen: Counter[str] = Counter()
    for seed in range(nightly(15, 40)):
        try:
            mirror = watch_faults(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(mirror.seen)
        seen["roots again"] += mirror.seen["root"] - mirror.seen["begin"]
    assert all(seen[kind] > nightly(2, 10) for kind in ("lost", "stages", "dead", "roots again", "end")), seen


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


def test_what_is_lost_and_formed_again_is_told() -> None:
    mirror = Mirror(HeadCore(context=20, stage_count=2))
    for event in (PipelineLost(silent_s=1.5), PipelineReformed(stage_count=3)):
        mirror.take(event, mirror.head.handle(event, 5.0), 5.0)
    assert [frame["kind"] for frame in mirror.frames] == ["stages", "lost", "stages"]
    assert mirror.frames[1]["silent_s"] == 1.5
    assert [len(frame["stages"]) for frame in mirror.frames if frame["kind"] == "stages"] == [2, 3]
