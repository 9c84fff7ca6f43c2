"""llama.cpp beside us: it is optional and heavy, so tests see to the files that it gets and to what is
refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from flowspec.bench.checkpoints import make_checkpoint
from flowspec.model.files import ModelFiles
from tests import ggufs
from tests.perf import llama_cpp

HAS_LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


def test_files_hold_the_sharded_checkpoint_and_are_written_once(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", ggufs.WIDE, dtype=torch.bfloat16, shard="1MB")
    assert len(list(model.glob("*.safetensors"))) > 2
    paths = llama_cpp.write_files(str(model), ["bfloat16", "int8"], tmp_path / "files")
    name, shape = "model.layers.3.mlp.down_proj.weight", (256, 512)
    expected = ModelFiles(str(model)).tensors().load(name, shape).float()
    found = {dtype: ModelFiles(str(path)).tensors().load(name, shape) for dtype, path in paths.items()}
    assert torch.equal(found["bfloat16"], expected)
    assert 0 < (found["int8"] - expected).norm() < 0.01 * expected.norm()
    before = paths["int8"].stat()
    assert llama_cpp.write_files(str(model), ["int8"], tmp_path / "files") == {"int8": paths["int8"]}
    assert paths["int8"].stat() == before


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="llama-cpp-python is not installed")
def test_both_are_loaded_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", ggufs.WIDE, dtype=torch.bfloat16)
    assert llama_cpp.main(["--model", str(model), "--rows", "1,3", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["bfloat16", "int8"]
    assert all(min(seconds) > 0 for each in found.values() for seconds in each["pass_s"].values())


@pytest.mark.parametrize(
    ("args", "missing", "expected"),
    [
        (["--dtypes", "int3"], None, "--dtypes: expected some of bfloat16, int8, int4, got 'int3'"),
        ([], "llama_cpp", "llama.cpp's Python package is not here"),
        ([], "gguf", "GGUF files need the gguf package"),
        ([], None, "--model: expected a folder with a Llama"),
    ],
)
def test_wrong_input_is_one_line(
    args: list[str],
    missing: str | None,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert llama_cpp.main(["--model", "bundled", *args]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
