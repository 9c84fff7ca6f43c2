"""The recipes of drafters that read the target's hidden states: what they write is what FlowSpec loads, a run
goes on where it was stopped, and the shipped ones are right as far ahead as their page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flowspec.bench.drafting import open_drafting
from flowspec.bench.feature_guesses import FeatureReaders
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.text import Tokenizer
from tests.recipe import block, eagle3
from tests.recipe.own import BEST, Answer, stream

RECIPES = {"eagle3": eagle3, "block": block}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight short dialogues as the target might have written them."""
    tokenizer = Tokenizer(ModelFiles(BUNDLED))
    prompts = [
        list(tokenizer.encode_chat([{"role": "user", "content": f"What is {number} + 25?"}]))
        for number in range(8)
    ]
    answers = [
        Answer(
            tokens=np.arange(300 + number, 320 + number).astype(np.uint16),
            best=np.zeros((20, BEST), np.uint16),
            chances=np.full((20, BEST), 0.5, np.float16),
        )
        for number in range(8)
    ]
    folder = tmp_path_factory.mktemp("own")
    np.savez(folder / "0000-talk.npz", **stream(prompts, answers))  # type: ignore[arg-type]
    return folder


def run(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    threads = torch.get_num_threads()
    try:
        RECIPES[name].main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_writes_what_is_loaded_and_goes_on(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(block, "PLACES", 4)
    flags = (
        f"--own={text}",
        f"--out={tmp_path}",
        "--rows=2",
        "--length=64",
        "--dtype=float32",
        "--threads=1",
    )
    run(name, monkeypatch, *flags, "--steps=2")
    assert isinstance(open_drafting(str(tmp_path), ModelFiles(BUNDLED)), FeatureReaders)
    first = (tmp_path / "model.safetensors").read_bytes()
    run(name, monkeypatch, *flags, "--steps=4", "--rate=1e-2")
    shown = capsys.readouterr().out
    assert "resumed at step 2" in shown
    assert re.search(r"^step 4/4 loss [\d.]+ hits [\d./]+ ", shown, re.M)
    assert (tmp_path / "model.safetensors").read_bytes() != first


@pytest.mark.parametrize("name", RECIPES)
def test_the_shipped_one_is_right_far_ahead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 1, "category": "sums", "turns": ["What is 17 + 25?"]}\n')
    run(name, monkeypatch, f"--measure={bundled_folder(name)}", f"--prompts={prompts}")
    (line,) = re.findall(r"^sums +(.*)$", capsys.readouterr().out, re.M)
    firsts = [float(shares.split("/")[0]) for shares in line.split()]
    assert len(firsts) == {"eagle3": eagle3.DEPTH, "block": block.SIZE}[name]
    assert min(firsts[:5]) > 0.85
