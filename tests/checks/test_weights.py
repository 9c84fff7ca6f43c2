"""The check of what a head sends: the hub cache that it makes, and what it prints. Its steps are tested in
`tests/runtime/weights`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from flowspec.bench.checkpoints import make_variant
from flowspec.model.files import ModelFiles
from tests.checks import weights as weights_check
from tests.checks.weights import Check, main
from tests.ggufs import convert, make
from tests.model.test_hub import look_up


def test_a_head_finds_the_model_under_a_name_that_daemons_do_not(tmp_path: Path) -> None:
    folder = make_variant(tmp_path / "model", "olmo2")
    name, size = weights_check._make_hub(ModelFiles(str(folder)), tmp_path / "hub")
    assert size == (folder / "model.safetensors").stat().st_size
    script = (
        "import json, sys\nfrom flowspec.model.files import "
        "ModelFiles\nprint(json.dumps(sorted(ModelFiles(sys.argv[1]).weight_map())))"
    )
    assert look_up(tmp_path / "hub", name, script=script) == [sorted(ModelFiles(str(folder)).weight_map())]


def test_a_gguf_file_is_offered_in_all_its_parts(tmp_path: Path) -> None:
    path = convert(
        make(tmp_path / "checkpoint", "llama"),
        tmp_path / "m.gguf",
        GGMLQuantizationType.Q8_0,
        part_tensors=20,
    )
    name, size = weights_check._make_hub(ModelFiles(str(path)), tmp_path / "hub")
    assert name == f"weights-check/model/{path.name}"
    assert size == sum(part.stat().st_size for part in tmp_path.glob("m-*.gguf"))


def test_it_fails_when_a_step_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_variant(tmp_path / "model", "olmo2")
    steps: list[Any] = [("one", lambda: ("went well", True)), ("two", lambda: ("went wrong", False))]
    monkeypatch.setattr(Check, "steps", lambda self: steps[:1])
    assert main([str(folder), "--scratch", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["steps"]
    assert (found["step"], found["sent_bytes"], found["seen"], found["is_right"]) == (
        "one",
        [0, 0, 0, 0],
        "went well",
        True,
    )
    monkeypatch.setattr(Check, "steps", lambda self: steps)
    assert main([str(folder), "--scratch", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "two: went wrong" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(("one ", "two "))] == [
        "yes",
        "NO",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "nothing is left behind"


def test_what_it_cannot_check_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["owner/name"]) == 2
    assert capsys.readouterr().err.endswith("expected a model folder or a GGUF file, got 'owner/name'\n")
