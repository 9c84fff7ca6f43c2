"""What heads learnt, from run to run: files that are bounded, private and never trusted."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.head.calibration import Calibrator
from flowspec.core.head.head import HeadState
from flowspec.llm import LLM
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.learnt import BYTES_MAX, FILES_MAX, LearntFile

PLAN = ClusterPlan(
    model="some/model",
    fingerprint="f",
    dtype="bfloat16",
    context=100,
    stages=(StagePlan(name="a", address="a:1", first=0, end=4),),
)
QUESTION = "What is 17 + 25?"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "flowspec" / "learnt"


def file(method: str = "cosine", drafters: tuple[str, ...] = ("draft",)) -> LearntFile:
    return LearntFile(PLAN, method, drafters)


def learnt(*turnaround_s: float) -> HeadState:
    fused = Calibrator.empty()
    return HeadState(turnaround_s=list(turnaround_s), calibrators=[], fused=fused, method=None)


def test_a_file_is_of_one_model_method_and_set_of_drafters(state: Path) -> None:
    assert file(drafters=("x  [y]",)).read() is None
    file(drafters=("x  [y]",)).write(learnt(1.5, 2))
    assert file(drafters=("x  [y]",)).read() == learnt(1.5, 2)
    file().write(learnt())
    assert file().read() == learnt()
    assert b'"turnaround_s": []' in file().path.read_bytes()
    assert file("specrouter").read() is file(drafters=("mid",)).read() is None
    assert file().path.name.startswith("model-cosine-")
    assert stat.S_IMODE(file().path.stat().st_mode) == 0o600


def test_the_files_that_were_not_used_for_longest_go(state: Path) -> None:
    for number in range(FILES_MAX + 3):
        one = file(drafters=(str(number),))
        one.write(learnt(number))
        os.utime(one.path, (number, number))
    file().write(learnt(0))
    assert len(list(state.iterdir())) == FILES_MAX
    assert file().read() == learnt(0)
    assert [file(drafters=(str(number),)).read() for number in (2, 3, 4)] == [None, None, learnt(4)]


def test_what_another_version_wrote_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    file().write(learnt(1))
    file().path.write_bytes(b'{"version": 7, "learnt": {}, "more": 1}')
    with caplog.at_level(logging.INFO):
        assert file().read() is None
    (line,) = caplog.messages
    assert line.endswith("is of version 7, not 2, and is not used")


def test_what_is_no_such_file_is_told_in_a_line() -> None:
    file(drafters=("mid",)).write(learnt())
    others = file(drafters=("mid",)).path.read_bytes()
    file().write(learnt())
    own = file().path.read_bytes()
    for data, told in (
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"version": NaN}', "expected JSON"),
        (b"[]", r"expected an object, got \[\]"),
        (b'{"format": 1, "learnt": {}}', "version: expected a whole number, got nothing"),
        (others, r"of.drafters: expected \['draft'\], got \['mid'\]"),
        (own.replace(b'"fused"', b'"fuzed"'), "learnt: unknown key 'fuzed'; .* did you mean fused?"),
        (own.replace(b"0.0", b"1e999", 1), "expected JSON"),
        (
            own.replace(b"0.0", b"-1", 1),
            r"learnt.fused.trials\[0\]: expected a number from 0 to 400",
        ),
        (b" " * (BYTES_MAX + 1), "more than 4194304 bytes"),
    ):
        file().path.write_bytes(data)
        with pytest.raises(ValueError, match=told):
            file().read()
    os.mkfifo(file("other").path)
    with pytest.raises(ValueError, match="it is no regular file"):
        file("other").read()


def answered(notes: list[str] | None = None, **options: Any) -> str:
    with LLM(
        local=1, context=200, drafter="draft", method="cosine", on_note=(notes or []).append, **options
    ) as llm:
        return llm.generate(QUESTION, temperature=0, max_new_tokens=12).text


@pytest.mark.usefixtures("lent")
def test_a_run_begins_with_what_the_last_one_learnt_and_answers_alike(state: Path) -> None:
    def kept() -> Any:
        (path,) = state.iterdir()
        return json.loads(path.read_text("utf-8"))["learnt"]

    first = answered()
    once = kept()
    assert answered() == first
    twice = kept()
    for method, prompts in ((once["method"], 1), (twice["method"], 2)):
        assert method["domains"]["prompts"] == prompts
        (domain,) = method["expertise"]["domains"]
        assert domain["answers"] == prompts
    assert "example" not in json.dumps(twice), "no text is kept"
    (path,) = state.iterdir()
    whole = json.loads(path.read_text("utf-8"))
    whole["learnt"]["method"]["chance"] = "much"
    path.write_text(json.dumps(whole), "utf-8")
    notes: list[str] = ["so that it is kept"]
    assert answered(notes) == first, "a damaged one costs nothing"
    told = "learnt.method.chance: expected a number from 0 to 1, got 'much'"
    assert notes[1:] == [f"{path} is not used, and will be written anew: {told}"]
    assert kept()["method"]["chance"] != "much"


@pytest.mark.usefixtures("lent")
def test_nothing_is_kept_where_that_is_not_wanted_or_cannot_be(state: Path) -> None:
    answered(keep_learnt=False)
    assert not state.exists()
    state.parent.mkdir(parents=True)
    state.write_text("a file where a folder should be", "utf-8")
    notes: list[str] = ["so that it is kept"]
    answered(notes)
    assert [note for note in notes if "is not kept" in note or "is not used" in note]
