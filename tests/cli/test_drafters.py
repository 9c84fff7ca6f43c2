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
from flowspec.draft.choosing import BOARD
from flowspec.model.files import BUNDLED, DEMO_FOLDER
from flowspec.plan.memory import mib
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.default_drafter import taken_for
from tests.cli.running import Run
from tests.draft.test_choosing import HEAD, SMALL, TARGET, content, put

PIS = ("--devices", "2x", "raspberry-pi-5")


def test_a_list_for_people_and_the_same_for_programs(hub_cache: Path, known_model: str, run: Run) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    text = run("drafters", known_model).out
    assert max(map(len, text.splitlines())) <= 80
    assert f"{TARGET}: 3 published drafters, 1 in the Hugging Face cache\n" in text
    assert f"for 4 {BOARD}" in text
    (line,) = (line for line in text.splitlines() if line.endswith(", here, taken"))
    size = sum(path.stat().st_size for path in (DEMO_FOLDER / "eagle").iterdir())
    assert f", {mib(size)}, " in line, "no card says how large it is; its files do"
    told = run("drafters", known_model, "--json").json
    assert (told["model"], told["taken"]) == (TARGET, HEAD)
    first = told["drafters"][0]
    assert (first["drafter"], first["is_here"], first["refusal"]) == (HEAD, True, None)
    assert first["tokens_per_s"] == pytest.approx((1 + first["gain"]) * told["without_tokens_per_s"])
    assert f"{first['gain']:+.0%}  {HEAD}\n" in text
    assert first["accepted"][0]["source"].startswith("https://")
    (small,) = (each for each in told["drafters"] if each["name"] == SMALL)
    assert not small["is_here"]
    assert not small["is_acceptance_published"]


@pytest.mark.usefixtures("hub_cache")
def test_devices_that_are_named_are_those_that_are_foretold_and_the_best_comes_first(run: Run) -> None:
    asked = ("drafters", "Qwen/Qwen3-4B", "--json")
    here, boards = run(*asked).json, run(*asked, *PIS, "--dtype", "int4").json
    assert boards["without_tokens_per_s"] < here["without_tokens_per_s"]
    gains = [each["gain"] for each in boards["drafters"] if each["gain"] is not None]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.usefixtures("hub_cache")
def test_drafters_are_listed_where_nothing_is_foretold(run: Run) -> None:
    board = ("--devices", "raspberry-pi-5")
    for asked, why in (
        (("Qwen/Qwen3-4B", *board), "not fit the devices in float16; --dtype int4"),
        (("Qwen/Qwen3.5-9B",), "the model is not here"),
    ):
        ended = run("drafters", *asked)
        assert why in ended.words
        report = run("drafters", *asked, "--json").json
        assert report["why_not_foretold"]
        unrated = [line for line in ended.out.splitlines() if line.startswith("      -  ")]
        assert len(report["drafters"]) == len(unrated) > 0


def test_a_plan_takes_what_is_here_and_tells_which_download_would_help(
    hub_cache: Path, known_model: str, run: Run
) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    args = ("plan", "--model", known_model, *PIS)
    text = run(*args).out
    assert f"drafter {HEAD}, the best one that is here" in text
    assert max(map(len, text.splitlines()[1:])) <= 80, "but for the model's path"
    told = run(*args, "--json").json
    assert told["drafters"] == [HEAD, "ngram"]
    assert told["acceptance"] == pytest.approx(0.63, abs=0.01)
    assert told["would_download"] is None, "nothing else that runs is published for it with figures"
    given = run(*args, "--drafter", "ngram", "--json").json
    assert given["drafters"] == ["ngram"]
    assert given["tokens_per_s"] < told["tokens_per_s"]
    shutil.move(known_model, known := str(Path(known_model).with_name("Qwen3-4B")))
    told = run("plan", "--model", known, *PIS, "--json").json
    assert told["drafters"] == ["ngram"]
    assert told["would_download"]["drafter"] == "AngelSlim/Qwen3-4B_eagle3"
    assert "--drafter AngelSlim/Qwen3-4B_eagle3 downloads it" in run("plan", "--model", known, *PIS).words


def test_a_download_is_told_of_on_a_terminal_only(
    hub_cache: Path, known_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(known_model, known := str(Path(known_model).with_name("Qwen3-4B")))
    told: list[str] = []
    monkeypatch.setattr(answer, "note", told.append)
    taken = taken_for(Decoding(), known, None)
    answer.note_drafters(taken, known)
    assert told == []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    answer.note_drafters(taken, known)
    (line,) = told
    assert "--drafter AngelSlim/Qwen3-4B_eagle3 downloads it; " in line
    assert f"flowspec drafters {known} tells more" in line


def test_named_drafters_that_are_not_used_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(answer, "note", told.append)
    for drafters, method in ((("bundled", "ngram"), "ar"), (("none",), "ar"), (("bundled",), "continuous")):
        taken = taken_for(Decoding(method=method, drafters=drafters), BUNDLED, None)
        answer.note_drafters(taken, BUNDLED)
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
    files["model.safetensors"] = save({**load(files["model.safetensors"]), "unheard.of": torch.zeros(1)})
    shutil.rmtree(hub_cache)
    put(hub_cache, HEAD, files)
    without = run(*args)
    assert without.out == right.out
    assert f"(drafter {HEAD} is left out: " in without.err
    assert "unheard.of" in without.err
    assert "drafter ngram\n" in without.err
