"""`flowspec drafters`, and what commands take where nobody names a drafter, with a cache as the hub lays it
out."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from flowspec.cli import opening, plan
from flowspec.cli.main import main
from flowspec.draft.choosing import BOARD
from flowspec.model.files import BUNDLED, DEMO_FOLDER
from flowspec.plan.memory import mib
from flowspec.plan.planner import DoesNotFit
from flowspec.plan.sites import PlanRequest
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.default_drafter import taken_for
from tests.draft.test_choosing import HEAD, SMALL, TARGET, content, put

PIS = ("--devices", "2x", "raspberry-pi-5")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(list(args))
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_list_for_people_and_the_same_for_programs(
    hub_cache: Path, known_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    status, text, _ = run(capsys, "drafters", known_model)
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    assert f"{TARGET}: 3 published drafters, 1 in the Hugging Face cache\n" in text
    assert f"foretold by formula for 4 {BOARD}" in text
    assert "here, taken\n" in text
    told = json.loads(run(capsys, "drafters", known_model, "--json")[1])
    assert (told["model"], told["taken"]) == (TARGET, HEAD)
    first = told["drafters"][0]
    assert (first["drafter"], first["is_here"], first["refusal"]) == (HEAD, True, None)
    assert first["tokens_per_s"] == pytest.approx((1 + first["gain"]) * told["without_tokens_per_s"])
    assert f"{first['gain']:+.0%}  {HEAD}\n" in text
    assert f"{first['acceptance']:.1%} right" in text
    (accepted,) = first["accepted"]
    assert accepted["source"].startswith("https://")
    (small,) = (each for each in told["drafters"] if each["name"] == SMALL)
    assert not small["is_here"]
    assert not small["is_acceptance_published"]
    assert "acceptance not published" in text


def test_devices_that_are_named_are_those_that_are_foretold(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "Qwen/Qwen3-4B"
    here, boards = (
        json.loads(run(capsys, "drafters", model, "--json", *args)[1])
        for args in ((), (*PIS, "--dtype", "int4"))
    )
    assert boards["without_tokens_per_s"] < here["without_tokens_per_s"]
    gains = [each["gain"] for each in boards["drafters"] if each["gain"] is not None]
    assert gains == sorted(gains, reverse=True)


def test_drafters_are_listed_for_devices_that_the_model_does_not_fit(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("drafters", "Qwen/Qwen3-4B", "--devices", "raspberry-pi-5")
    status, text, _ = run(capsys, *asked)
    assert status == 0
    why = "qwen3-4b does not fit the devices in float16; --dtype int4 takes less memory"
    assert f"what they would bring is not known: {why}" in " ".join(text.split())
    report = json.loads(run(capsys, *asked, "--json")[1])
    assert "does not fit" in report["why_not_foretold"]
    assert len(report["drafters"]) == len(
        [line for line in text.splitlines() if line.startswith("      -  ")]
    )


def test_the_order_is_told_and_why_a_drafter_has_no_rate(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, _ = run(capsys, "drafters", "Qwen/Qwen3-8B")
    words = " ".join(text.split())
    assert "tokens/s with n-grams; the best first: +" in words
    _, _, unknown = words.partition(" - Qwen/Qwen3-1.7B ")
    assert "what it would bring cannot be forecast: its layers are not known - " in unknown


def test_a_model_whose_shape_is_not_known_is_listed_without_rates(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = run(capsys, "drafters", "Qwen/Qwen3.5-9B")
    assert status == 0
    assert "what they would bring is not known: the model is not here" in text
    assert "      -  " in text


def test_the_bundled_model_s_drafters_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, error = run(capsys, "drafters", "bundled")
    assert (status, text, len(error.splitlines())) == (2, "", 1)
    assert "--drafter block, draft, " in error
    assert "eagle3" in error


@pytest.mark.parametrize(
    ("model", "part"),
    [("owner/unknown", "there are some for "), ("Qwen/Qwen3-4BB", "did you mean Qwen/Qwen3-4B?")],
)
def test_an_unknown_model_is_told_in_a_line(
    hub_cache: Path, capsys: pytest.CaptureFixture[str], model: str, part: str
) -> None:
    status, text, error = run(capsys, "drafters", model)
    assert (status, text) == (2, "")
    assert len(error.splitlines()) == 1
    assert f"no published drafter is known for {model!r}" in error
    assert part in error
    assert "--drafter FOLDER-OR-HUB-ID" in error


def test_a_plan_takes_what_is_here_and_tells_which_download_would_help(
    hub_cache: Path, known_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    args = ("plan", "--model", known_model, *PIS)
    _, text, _ = run(capsys, *args)
    assert f"drafter {HEAD}, the best one that is here" in text
    _, listed, _ = run(capsys, "drafters", known_model)
    (told,) = (line for line in listed.splitlines() if line.endswith(", here, taken"))
    size = sum(path.stat().st_size for path in (DEMO_FOLDER / "eagle").iterdir())
    assert f", {mib(size)}, " in told, "no card says how large it is; its files do"
    assert "size not known" not in listed
    assert "licence not known" not in listed
    assert "as is published of it" in " ".join(text.split())
    assert max(map(len, text.splitlines()[1:])) <= 80, "but for the model's path"
    told = json.loads(run(capsys, *args, "--json")[1])
    assert told["drafters"] == [HEAD, "ngram"]
    assert told["acceptance"] == pytest.approx(0.63, abs=0.01)
    assert told["would_download"] is None, "nothing else that runs is published for it with figures"
    given = json.loads(run(capsys, *args, "--drafter", "ngram", "--json")[1])
    assert given["drafters"] == ["ngram"]
    assert given["tokens_per_s"] < told["tokens_per_s"]
    shutil.move(known_model, known := str(Path(known_model).with_name("Qwen3-4B")))
    told = json.loads(run(capsys, "plan", "--model", known, *PIS, "--json")[1])
    assert told["drafters"] == ["ngram"]
    assert told["would_download"]["drafter"] == "AngelSlim/Qwen3-4B_eagle3"
    _, text, _ = run(capsys, "plan", "--model", known, *PIS)
    assert "--drafter AngelSlim/Qwen3-4B_eagle3 downloads it" in " ".join(text.split())
    assert max(map(len, text.splitlines()[1:])) <= 80


def test_a_plan_does_without_what_the_model_does_not_fit_beside(
    hub_cache: Path, known_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    planned = plan.make_plan

    def tight(request: PlanRequest) -> plan.Plan:
        if request.drafter is not None and request.drafter.shape is not None:
            raise DoesNotFit("no room for it")
        return planned(request)

    monkeypatch.setattr(plan, "make_plan", tight)
    args = ("plan", "--model", known_model, *PIS)
    told = json.loads(run(capsys, *args, "--json")[1])
    assert told["drafters"] == ["ngram"]
    _, text, _ = run(capsys, *args)
    assert f"drafter ngram: beside {HEAD}, which is here, the model does not fit" in " ".join(text.split())


class Terminal:
    def isatty(self) -> bool:
        return True


def test_a_download_is_told_of_on_a_terminal_only(
    hub_cache: Path, known_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(known_model, known := str(Path(known_model).with_name("Qwen3-4B")))
    told: list[str] = []
    monkeypatch.setattr(opening, "note", told.append)
    taken = taken_for(Decoding(), known, None)
    opening.tell_of_drafters(taken, known)
    assert told == []
    monkeypatch.setattr(sys, "stderr", Terminal())
    opening.tell_of_drafters(taken, known)
    (line,) = told
    assert "--drafter AngelSlim/Qwen3-4B_eagle3 downloads it; " in line
    assert f"flowspec drafters {known} tells more" in line


@pytest.mark.parametrize(
    ("drafters", "method", "line"),
    [
        (("bundled", "ngram"), "ar", ["(--drafter bundled,ngram is not used: method ar guesses nothing)"]),
        (("none",), "ar", []),
        (("bundled",), "continuous", []),
    ],
)
def test_named_drafters_that_are_not_used_are_told_of(
    drafters: tuple[str, ...], method: str, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(opening, "note", told.append)
    opening.tell_of_drafters(taken_for(Decoding(method=method, drafters=drafters), BUNDLED, None), BUNDLED)
    assert told == line


def test_an_answer_is_guessed_with_what_is_here_and_goes_on_without_what_cannot_be_opened(
    hub_cache: Path, known_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = content(DEMO_FOLDER / "eagle")
    put(hub_cache, HEAD, files)
    args = ("generate", "--local", "1", "--model", known_model, "--max-new-tokens", "8", "What is 1 + 2?")
    status, right, error = run(capsys, *args)
    assert status == 0
    assert f"(drafter {HEAD}, the best one that is here; --drafter ngram does without)\n" in error
    assert f"drafter {HEAD}, ngram\n" in error, "it has drafted"
    files["model.safetensors"] = save({**load(files["model.safetensors"]), "unheard.of": torch.zeros(1)})
    shutil.rmtree(hub_cache)
    put(hub_cache, HEAD, files)
    status, text, error = run(capsys, *args)
    assert status == 0
    assert text == right
    assert f"(drafter {HEAD} is left out: " in error
    assert "unheard.of" in error
    assert "drafter ngram\n" in error
