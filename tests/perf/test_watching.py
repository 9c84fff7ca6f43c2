"""What watching costs is measured on real processes, in pairs whose answers must be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec.errors import InputError
from tests.perf import watching


def pair(watched: float, unwatched: float, tokens: int = 50) -> dict[str, Any]:
    return {
        "prompt": "a",
        "tokens": tokens,
        "watched": watched,
        "unwatched": unwatched,
        "frames": 500,
        "chars": 5000,
    }


def test_the_ratio_and_its_interval_by_hand() -> None:
    said = watching.report([pair(8.0, 10.0), pair(10.0, 10.0), pair(12.5, 10.0), pair(0.0, 10.0)])
    assert said["pairs"] == 3
    assert said["ratio"] == pytest.approx(1.0)
    assert said["low"] == pytest.approx(1 / said["high"])
    assert said["high"] == pytest.approx(1.7404, rel=1e-3), "4.303 standard errors"
    assert (said["frames_per_token"], said["bytes_per_token"]) == (10.0, 100.0)
    with pytest.raises(InputError, match="fewer than two pairs"):
        watching.report([pair(8.0, 10.0)])


def test_points_of_students_t() -> None:
    for freedom, point in ((1, 12.706), (5, 2.571), (6, 2.447), (10, 2.228), (29, 2.045), (1000, 1.962)):
        assert watching.student(freedom) == pytest.approx(point, rel=0.01)


def test_pairs_of_answers_on_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.jsonl").write_text(
        json.dumps({"category": "plays", "turns": ["Continue the play:\nDUKE:\nWho comes so late?"]})
    )
    flags = [
        "--prompts",
        str(tmp_path / "few.jsonl"),
        "--pairs",
        "2",
        "--tokens",
        "12",
        "--local",
        "2",
        "--json",
    ]
    assert watching.main(flags) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["pairs"], said["stages"], said["method"], len(said["each"])) == (2, 2, "continuous", 2)
    assert said["low"] <= said["ratio"] <= said["high"]
    assert all(each["frames"] > each["tokens"] > 4 and each["chars"] > 1000 for each in said["each"]), (
        "the page has read them all"
    )


def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        watching.main(["--pairs", "0"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
