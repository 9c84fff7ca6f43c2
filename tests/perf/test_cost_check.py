"""That the check of the cost model counts what routers choose. No time is asserted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowspec.bench.measure import Effort, MeasuredMachine, made_model, pass_task
from tests.perf.cost_check import MIXTURE, check, choices_of, distinct, main, shared, stage_of

SMALL = replace(
    MIXTURE, layers=8, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=8 * 16, vocabulary=64
)
MACHINE = MeasuredMachine(device=torch.device("cpu"), dtype="float32")


def test_experts_in_common_are_counted() -> None:
    choices = [[{1, 2}, {2, 3}, {2, 3}], [{0, 1}, {4, 5}, {0, 5}]]
    assert distinct(choices) == (3 + 4) / 2
    assert shared([choices]) == (0.5 + 1 + 0 + 0.5) / 4
    assert shared([[[{1, 2}]]]) == 0


def test_a_passs_choices_are_those_of_its_routers(tmp_path: Path) -> None:
    """With routers that prefer the same experts for whatever row."""
    part = stage_of(MACHINE, made_model(tmp_path, SMALL), "float32")
    found = choices_of({("mixture", 5): pass_task(MACHINE, part, 5)})["mixture", 5]
    assert [[len(row) for row in rows] for rows in found] == [[8] * 5] * 2, "two layers"
    assert 8 < distinct(found) <= 40
    for layer in part.pieces.layers:
        layer.mlp.gate.weight.zero_()
    alike = choices_of({("mixture", 5): pass_task(MACHINE, part, 5)})["mixture", 5]
    assert alike == [[set(range(8))] * 5] * 2, "of experts alike the lower numbers"
    assert (distinct(alike), shared([alike])) == (8, 1)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_mixture_is_foretold_beside_its_passes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clock that ticks with each look: every pass takes one second."""
    monkeypatch.setattr("tests.perf.cost_check.MIXTURE", SMALL)
    machine = replace(MACHINE, packed=("int4",) if dtype == "int4" else ())
    effort = Effort(rows=(1, 3), widths=((128, 2),), tiny=(1, 2), rounds=1)
    found = check(machine, effort, (1, 4), ("mixture",), dtype, itertools.count().__next__)
    one, four = found["stages"]
    assert [row["measured_ms"] for row in (one, four)] == [1000, 1000]
    assert (one["experts_counted"], one["experts_predicted"]) == (8, 8)
    assert 8 < four["experts_counted"] <= 32
    assert four["experts_predicted"] == pytest.approx(four["experts_counted"], rel=0.25)
    assert found["dtype"] == dtype


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--models=bundled,huge", "expected names among bundled, made, mixture, got 'bundled,huge'"),
        ("--cpu-time --device=cpu --threads=2", "--cpu-time: expected one thread on a CPU"),
    ],
)
def test_wrong_options_get_a_line(option: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(option.split())
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code != 0
    assert line in capsys.readouterr().err
