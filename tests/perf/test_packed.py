"""Precisions beside each other: real processes and a small model; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import make_variant
from tests.perf import packed


def test_each_precision_is_loaded_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_variant(tmp_path, "qwen3")
    assert (
        packed.main(
            ["--model", str(folder), "--dtypes", "bfloat16,int8", "--rows", "1,3", "--rounds", "1", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["bfloat16", "int8"]
    assert found["bfloat16"]["rows_per_s_ratio"] == {"1": 1, "3": 1}
    assert found["int8"]["weight_bytes"] < found["bfloat16"]["weight_bytes"]
    assert all(seconds > 0 for each in found.values() for seconds in each["pass_s"].values())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--model", "there", "--dtypes", "int3"],
            "--dtypes: expected some of float32, bfloat16, float16, int8, int4, got 'int3'",
        ),
        (["--model", "no/folder/of/mine"], "no/folder/of/mine"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert packed.main(args) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
