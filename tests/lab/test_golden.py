"""The recordings of `lab/golden`: a difference is told with its place, and nothing passes unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.golden import __main__ as golden
from lab.golden import recording, timed
from lab.golden.parts import PARTS, Part
from lab.golden.place import Place
from lab.golden.recording import Absent, Comparison, Difference, Observation, Origin, Recording, differences
from tests import warm
from tests.nightly import at_night

ORIGIN = Origin(commit="0" * 40, date="2026-01-01", machine="a board", versions="Python 3")
SEEN = {"a/text": ["one line", "another line"], "a/ids": [5, 6, 7], "b": {"x": 1.5, "y": None}}
PLAIN, TIMED = (
    Part(name="plain", about=""),
    Part(name="timed", about="", rounds=3),
)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recording, of `PLAIN`."""
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    Recording(origin=ORIGIN, entries=SEEN).write(PLAIN.name)
    return tmp_path


def see(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], absent: Sequence[Absent] = ()) -> None:
    """Parts see this from now on."""

    def observe(part: Part, place: Place, pattern: str) -> Iterator[Observation | Absent]:
        yield from absent
        for key, value in values.items():
            yield Observation(key=key, value=value)

    monkeypatch.setattr(golden, "observe", observe)


def run(part: Part) -> golden.Verdict:
    return golden.run(part, Recording.read(part.name), "*")[0]


@pytest.mark.parametrize(
    ("expected", "got", "told"),
    [
        ({"a": 1}, {"a": 2}, ["k > a: expected 1, got 2"]),
        ({"a": 1}, {"b": 1}, ["k > a: expected 1, got nothing", "k > b: expected nothing, got 1"]),
        ([1, 2, 3], [1, 5, 3], ["k > 1: expected 2, got 5"]),
        ([1, 2, 3], [1, 5, 6], ["k > 1: expected 2, got 5 (2 of 3 differ)"]),
        ([1, 2], [1, 2, 3], ["k > 2: expected the end of 2, got 3 of 3"]),
        (["ab12", "cd34"], ["ab12", "cd35"], ['k > 1: expected "cd34", got "cd35"']),
        (["a b", "c d", "e f"], ["a b", "e f"], ['k > line 2: expected "c d", got nothing']),
        (["a b", "c d"], ["a b", "c e"], ['k > line 2: expected "c d", got "c e"']),
        (1, 1.0, ["k: expected 1, got 1.0"]),
        (True, 1, ["k: expected true, got 1"]),
        ({"a": [{"b": None}]}, {"a": [{"b": None}]}, []),
    ],
)
def test_a_difference_is_told_with_its_place(expected: Any, got: Any, told: list[str]) -> None:
    assert [str(each) for each in differences(expected, got, "k")] == told


def test_of_long_texts_the_part_that_differs_is_told() -> None:
    (found,) = differences("x" * 1000 + "old" + "y" * 1000, "x" * 1000 + "new" + "y" * 1000, "k")
    assert "old" in found.expected
    assert "new" in found.got
    assert len(found.expected) <= recording.SHOWN_CHARS


def test_a_recording_is_read_as_it_was_written(recorded: Path) -> None:
    assert Recording.read(PLAIN.name) == Recording(origin=ORIGIN, entries=SEEN)
    assert "[ 5, 6, 7 ]" in (recorded / "plain.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("changed", "places"),
    [
        (SEEN, []),
        ({**SEEN, "a/ids": [5, 6, 8]}, ["a/ids > 2"]),
        ({key: value for key, value in SEEN.items() if key != "b"}, ["b"]),
        ({**SEEN, "c": 1}, ["c"]),
    ],
)
def test_what_is_other_missing_or_new_is_a_difference(
    changed: dict[str, Any], places: list[str], recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, changed)
    verdict = run(PLAIN)
    assert verdict.observations == len(changed)
    assert [each.place for each in verdict.differences] == places


def test_what_cannot_be_seen_here_is_told_and_is_no_difference(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, {"b": SEEN["b"]}, [Absent(key="a", why="there is no network")])
    verdict = run(PLAIN)
    assert verdict.differences == []
    assert [each.why for each in verdict.absent] == ["there is no network"]


def test_one_question_has_one_answer() -> None:
    comparison = Comparison(None)
    assert comparison.take(Observation(key="k", value=[1, 2], at="ar")) == []
    (found,) = comparison.take(Observation(key="k", value=[1, 3], at="continuous, 3 stages"))
    assert found == Difference(place="k [continuous, 3 stages] > 1", expected="2", got="3")


def test_a_part_that_is_not_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    assert golden.main(["check", "logits"]) == 2
    assert "lab.golden make logits" in capsys.readouterr().err


def test_a_changed_tree_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden, "git", lambda *words: " M flowspec/tree.py")
    assert golden.main(["make", "logits"]) == 2
    assert "such as flowspec/tree.py; commit or stash" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["check", "nothing"], ["make", "--only", "x"], ["observe"]])
def test_wrong_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        golden.main(words)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "factors", "is_worse"),
    [
        ("ready s", (1.3, 1.2, 1.25), True),
        ("ready s", (0.5, 0.6, 0.7), False),
        ("ready s", (1.3, 0.9, 1.25), False),
        ("ready s", (1.05, 1.06, 1.07), False),
        ("ar tokens/s", (0.7, 0.8, 0.7), True),
        ("ar tokens/s", (1.5, 1.4, 1.6), False),
    ],
)
def test_seconds_are_compared_as_ratios_of_turns(
    key: str, factors: tuple[float, ...], is_worse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines get slower meanwhile: only what is measured in the same round counts."""
    turns: dict[str, int] = {}

    def observe(part: Part, place: Place, pattern: str) -> Iterator[Observation | Absent]:
        turn = turns[place.tree.name] = turns.get(place.tree.name, -1) + 1
        factor = factors[turn] if place.tree.name == "now" else 1.0
        yield Observation(key=key, value=(turn + 1) * factor)

    monkeypatch.setattr(timed, "ROOT", tmp_path / "now")
    monkeypatch.setattr(timed, "checkout", lambda commit: tmp_path / "before")
    recorded = Recording(origin=ORIGIN, entries={key: {"median": 99.0}})
    (found,) = timed.run(TIMED, recorded, "*", observe, lambda count, text: None)
    assert isinstance(found, timed.Measured)
    assert bool(found.differences) == is_worse
    assert sorted(found.value["ratios"]) == pytest.approx(sorted(factors), abs=1e-4)


def test_each_part_has_its_module_and_each_recording_its_part() -> None:
    for part in PARTS.values():
        assert (golden.ROOT / part.module.replace(".", "/")).with_suffix(".py").is_file()
    paths = list(recording.FOLDER.iterdir())
    for path in paths:
        found = Recording.read(PARTS[path.stem].name)
        assert found is not None
        assert found.entries
    assert sum(path.stat().st_size for path in paths) < 3e6


@at_night
def test_the_smallest_part_is_as_it_was_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its command: the other parts take minutes."""
    monkeypatch.setattr(golden, "COMMAND", (sys.executable, "-m", "lab.golden.__main__"))
    starts = SimpleNamespace(Popen=warm.Popen, run=subprocess.run, PIPE=subprocess.PIPE)
    monkeypatch.setattr(golden, "subprocess", starts)
    status = golden.main(["check", "logits", "--only", "llama-tied/*", "--json"])
    (verdict,) = json.loads(capsys.readouterr().out)["parts"]
    assert (status, verdict["differences"]) == (0, [])
    assert verdict["observations"] >= 20
