"""Figures of the last seconds are those of the answer's own statistics, where the last seconds are the whole
answer."""

from __future__ import annotations

import pytest

from flowspec.watch import figures
from flowspec.watch.figures import Figures, Frame
from tests.nightly import nightly
from tests.watch.test_recorder import watch_schedule


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


def test_what_is_long_past_does_not_count() -> None:
    found = begun()
    found.take(tokens(1.5, 5))
    found.take(tokens(2.0, 6, 7, 8))
    found.take(trip(2.0, stay(0, 1.0, 2.0, dead=5)))
    found.take(tokens(9.0, 9))
    told = found.frame(10.0)
    assert told is not None
    assert (told["S"], told["dropped_rows"], told["busy"]) == (1.0, 0, [0.0, 0.0])
    assert told["tokens_per_s"] == pytest.approx(1 / figures.WINDOW_S)


def test_nothing_is_told_while_no_answer_is_under_way_and_the_next_one_begins_anew() -> None:
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
