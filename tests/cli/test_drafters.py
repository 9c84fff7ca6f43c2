"""`flowspec drafters`, and what commands take where nobody names a drafter, with a cache as the hub lays it
out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save

from flowspec.cli import answer
from flowspec.model.files import BUNDLED, DEMO_FOLDER
from flowspec.plan.memory import mib
from flowspec.runtime.decoding import Decoding
from tests.cli.running import Run
from tests.draft.test_catalogue import HEAD, SMALL, TARGET, content, put


def test_a_list_for_people_and_the_same_for_programs(
    hub_cache: Path, known_model: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    text = run("drafters", known_model).out
    assert max(map(len, text.splitlines())) <= 80
    assert f"{TARGET}: 3 published drafters, 1 in the Hugging Face" in text
    assert text.index(f"\n{HEAD}\n") < text.index(f"\n{SMALL}\n")
    (line,) = (line for line in text.splitlines() if line.endswith(", here, taken"))
    size = sum(path.stat().st_size for path in (DEMO_FOLDER / "eagle").iterdir())
    assert f", {mib(size)}, " in line, "no card says how large it is; its files do"
    told = run("drafters", known_model, "--json").json
    assert (told["model"], told["taken"]) == (TARGET, HEAD)
    first = told["drafters"][0]
    assert (first["drafter"], first["is_here"], first["refusal"]) == (HEAD, True, None)
    assert first["accepted"][0]["source"].startswith("https://")
    assert first["acceptance"] == first["accepted"][0]["share_right"] == pytest.approx(0.63, abs=0.01)
    (small,) = (each for each in told["drafters"] if each["name"] == SMALL)
    assert (small["is_here"], small["acceptance"]) == (False, None)


def test_a_plan_takes_what_is_here(
    hub_cache: Path, known_model: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    args = ("plan", "--model", known_model, "--devices", "2x", "raspberry-pi-5")
    text = run(*args).out
    assert f"drafter {HEAD}, the best one that is here" in text
    assert max(map(len, text.splitlines()[1:])) <= 80, "but for the model's path"
    told = run(*args, "--json").json
    assert told["drafters"] == [HEAD, "ngram"]
    assert told["acceptance"] == pytest.approx(0.63, abs=0.01)
    given = run(*args, "--drafter", "ngram", "--json").json
    assert given["drafters"] == ["ngram"]
    assert given["tokens_per_s"] < told["tokens_per_s"]


def test_the_list_is_told_of_on_a_terminal_only(
    hub_cache: Path, known_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(answer, "note", told.append)
    answer.note_drafters(Decoding(), known_model, None)
    assert told == []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    for model in (known_model, BUNDLED):
        answer.note_drafters(Decoding(), model, None)
    answer.note_drafters(Decoding(drafters=("ngram",)), known_model, None)
    (line,) = told
    assert f"flowspec drafters {known_model} lists them" in line


def test_named_drafters_that_are_not_used_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(answer, "note", told.append)
    for drafters, method in ((("bundled", "ngram"), "ar"), (("none",), "ar"), (("bundled",), "continuous")):
        answer.note_drafters(Decoding(method=method, drafters=drafters), BUNDLED, None)
    assert told == ["(--drafter bundled,ngram is not used: method ar guesses nothing)"]


def test_an_answer_is_guessed_with_what_is_here_and_goes_on_without_what_cannot_be_opened(
    hub_cache: Path, known_model: str, run: Run
) -> None:
    files = content(DEMO_FOLDER / "eagle")
    put(hub_cache, HEAD, files)
    args = ("generate", "--local", "1", "--model", known_model, "--max-new-tokens", "8", "What is 1 + 2?")
    right = run(*args)
    assert f"(drafter {HEAD}, the best one that is here" in right.err
    assert f"drafter {HEAD}, ngram\n" in right.err, "it has drafted"
    tensors = load(files["model.safetensors"])
    name = max(tensors)
    files["model.safetensors"] = save(
        {**tensors, name: tensors[name].to(torch.int32)}
    )  # seen when it is read
    shutil.rmtree(hub_cache)
    put(hub_cache, HEAD, files)
    without = run(*args)
    assert without.out == right.out
    assert f"(drafter {HEAD} is left out: " in without.err
    assert "is int32; expected " in without.err
    assert "drafter ngram\n" in without.err
