"""Plain answers: made once, kept in a file, and nothing else is taken for such a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.bench.plain import PlainCase, make_samplings, plain_cases
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.prompts import Prompt
from flowspec.model.step_by_step import StepByStep

PROMPTS = [
    Prompt(prompt_id=str(number), domain=domain, turns=(text,))
    for number, (domain, text) in enumerate([("a", "1 2"), ("b", "3")])
]


def cases(cache: Path | None, new_tokens: int = 6) -> list[PlainCase]:
    return plain_cases(ModelFiles(BUNDLED), PROMPTS, make_samplings((0.0, 1.0), (3,)), new_tokens, cache)


def test_answers_that_are_kept_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "answers.json"
    found = cases(cache)
    found_as = [f"{case.prompt_id} {case.sampling.temperature}" for case in found]
    assert found_as == ["0 0.0", "1 0.0", "0 1.0", "1 1.0"]
    assert all(len(case.answer) == 6 or case.is_stopped for case in found)
    kept = cache.read_text()
    assert len(json.loads(kept)) == 4
    monkeypatch.setattr(StepByStep, "generate", lambda *_: pytest.fail("an answer was made again"))
    assert cases(cache) == found
    assert cache.read_text() == kept
    with pytest.raises(pytest.fail.Exception, match="made again"):
        cases(cache, new_tokens=7)


def test_an_interruption_keeps_the_answers_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    generate = StepByStep.generate

    def twice(*args: object) -> tuple[int, ...]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return generate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepByStep, "generate", twice)
    with pytest.raises(KeyboardInterrupt):
        cases(tmp_path / "answers.json")
    assert len(json.loads((tmp_path / "answers.json").read_text())) == 2
    made.clear()
    assert len(cases(tmp_path / "answers.json")) == 4
    assert len(made) == 2


@pytest.mark.parametrize("text", ['{"a": [1.5]}', "[]", "{"])
def test_a_file_that_holds_no_answers_is_no_cache(tmp_path: Path, text: str) -> None:
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises(InputError, match=r"answers\.json:"):
        cases(tmp_path / "answers.json")
    assert (tmp_path / "answers.json").read_text() == text
