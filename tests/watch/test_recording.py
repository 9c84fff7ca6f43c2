"""Recordings come back as they were written, and a file that somebody else wrote is refused in one line,
whatever is in it."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from flowspec.errors import InputError
from flowspec.watch import recording
from flowspec.watch.recording import (
    FRAMES_MAX,
    as_text,
    document_text,
    read_recording,
    rebased,
    record_document,
    write_recording,
    wrong_document,
)
from tests.watch.test_recorder import ABOUT, watch_schedule

SEED = 4


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return record_document(ABOUT, watch_schedule(SEED)[0].frames)


def frame(document: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in document["frames"] if each["kind"] == kind)
    return found


def test_a_recording_comes_back_as_it_was_written(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    write_recording(path, document)
    assert read_recording(path) == document
    assert [each.name for each in tmp_path.iterdir()] == ["answer.json"], "nothing half-written is left"


def test_a_recording_that_cannot_be_written_is_one_line(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("none/answer.json", "folder.json"):
        with pytest.raises(InputError, match="cannot write the recording"):
            write_recording(tmp_path / name, document)
    assert [each.name for each in tmp_path.iterdir()] == ["folder.json"], "no part of it is left"
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
    assert wrong_document({**document, "frames": frames}) == ""
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


BROKEN_FILES = (
    b"{",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"[]",
    b'{"format": "else"}',
    b'{"format": "flowspec-recording", "version": 2}',
    b'{"format": "flowspec-recording", "version": true}',
    b'{"format": "flowspec-recording", "version": 1, "world": ' + b"1" * 10_000 + b"}",
    b" " * ((1 << 20) + 1),
)


def test_files_that_are_no_recordings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", 1 << 20)
    path = tmp_path / "broken.json"
    for content in BROKEN_FILES:
        path.write_bytes(content)
        with pytest.raises(InputError) as refused:
            read_recording(path)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 400
    assert "at most 1 MiB" in str(refused.value)
    for name, told in ((tmp_path / "none.json", "No such file"), (tmp_path, "directory")):
        with pytest.raises(InputError, match=told):
            read_recording(name)


WRONG: dict[str, Any] = {
    "an unknown kind": lambda d: frame(d, "sent").update(kind="else"),
    "no instant": lambda d: frame(d, "sent").pop("t"),
    "an instant that is none": lambda d: frame(d, "sent").update(t=float("nan")),
    "frames out of order": lambda d: d["frames"][0].update(t=1e6),
    "too many frames": lambda d: d.update(frames=[{}] * (FRAMES_MAX + 1)),
    "a value above 1": lambda d: frame(d, "nodes")["nodes"][0].__setitem__(3, 1.5),
    "a row that is short": lambda d: frame(d, "nodes")["nodes"][0].pop(),
    "a stage out of range": lambda d: frame(d, "trip")["stays"][0].update(stage=1000),
    "a share above 1": lambda d: frame(d, "figures").update(busy=[2.0]),
    "layers without any": lambda d: frame(d, "stages")["stages"][0].update(layers=[3, 3]),
    "another world": lambda d: d.update(world="moon"),
    "no frames": lambda d: d.pop("frames"),
    "a frame that is none": lambda d: d["frames"].insert(0, 7),
    "statistics that are none": lambda d: frame(d, "end").update(statistics=[]),
}


def test_every_field_is_checked(document: dict[str, Any]) -> None:
    assert wrong_document(document) == ""
    for what, spoil in WRONG.items():
        spoilt = copy.deepcopy(document)
        spoil(spoilt)
        assert wrong_document(spoilt) != "", what


def test_values_of_any_other_type_are_refused_and_never_raise(document: dict[str, Any]) -> None:
    """Each field of each kind of frame, replaced by what it must not be."""
    kinds = {each["kind"]: each for each in document["frames"]}
    refused = 0
    for kind, one in kinds.items():
        for name in one:
            for value in (None, True, -1, 1e400, "x" * 5000, [[[]]], {"a": {}}, [None]):
                frames = [{**one, name: value}]
                wrong = wrong_document({**document, "frames": frames})
                assert wrong != "" or (kind == "end" and name == "statistics"), (
                    f"{kind}: {name} as {value!r:.40}"
                )
                assert "\n" not in wrong
                refused += 1
    assert refused > 100


def test_mutated_recordings_are_valid_or_refused(document: dict[str, Any]) -> None:
    """What passes can be shown: nothing in the terminal's view breaks on it."""
    from flowspec.cli.screen import report, screen
    from flowspec.watch.state import WatchState

    chances, passed = random.Random(1), 0
    texts = [as_text(each) for each in document["frames"]]
    for _ in range(400):
        frames = [json.loads(text) for text in chances.sample(texts, 12)]
        frames.sort(key=lambda each: each["t"])
        one = chances.choice(frames)
        one[chances.choice(list(one))] = chances.choice([0, 1, 7, [], [[0, 1]], "x", None, {}])
        whole = {**document, "frames": frames}
        if wrong_document(whole):
            continue
        passed += 1
        present = WatchState()
        for each in frames:
            present.take(each)
        report(present, whole)
        screen(present, whole)
    assert passed > 40
