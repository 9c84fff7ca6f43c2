"""What `flowspec profile` measures, with models of no size: every precision, a file that reads back. No time
is asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.bench.profile import (
    TINY_MIXTURE,
    Effort,
    MeasuredMachine,
    RandomModel,
    fit,
    made_shape,
    measure,
    report,
)
from flowspec.cli.profile import profile_text
from flowspec.plan.profile import read_profile

EFFORT = Effort(rows=(1, 3), widths=((256, 2),), tiny=(1, 2), rounds=1)


def test_packed_precisions_are_measured_beside_the_machines_own(tmp_path: Path) -> None:
    machine = MeasuredMachine(device="cpu", dtype="float32", packed=("int4", "gguf"))
    steps: list[str] = []
    measured = measure(machine, EFFORT, steps.append)
    assert len(steps) == EFFORT.step_count(machine)
    for dtype in ("float32", "int4", "gguf"):
        assert [task.rows for task in measured[dtype]] == [1, 3]
    assert 4.5 / 8 < measured["gguf"][0].shape.filed_bytes < 8.5 / 8, "between Q4_K and Q8_0"
    profile = fit(measured, machine, "here", "measured here")
    assert profile.packed.keys() == {"int4", "gguf"}
    assert [task.shape.experts_per_row for task in measured[TINY_MIXTURE]] == [2, 14]
    few, many = (
        replace(task, spent=[1e-3 + 2 * (1e-3 + 25e-6 * task.shape.experts_per_row)])
        for task in measured[TINY_MIXTURE]
    )
    profile = fit({**measured, TINY_MIXTURE: [many, few]}, machine, "here", "measured here")
    assert profile.expert_us == pytest.approx(25), "two layers, twelve experts more in each"
    (tmp_path / "here.toml").write_text(profile_text(profile, "h", "s", report(machine, measured, {})))
    read = read_profile(tmp_path / "here.toml")
    for dtype in machine.packed:
        assert read.basis(dtype) == "measured here"
        for name in ("gb_per_s", "tflops", "serial"):
            expected = getattr(profile.rates(dtype), name)
            assert getattr(read.rates(dtype), name) == pytest.approx(expected, rel=1e-3)
    assert read.expert_us == pytest.approx(25)


def test_the_mix_is_q4_k_with_finer_values_in_every_second_layer(tmp_path: Path) -> None:
    tensors = RandomModel(tmp_path, made_shape(256, 2, 256))
    forms = {name.removeprefix("model.").removesuffix(".weight"): tensors.form(name) for name in tensors}
    assert forms["layers.0.self_attn.v_proj"] == "Q4_K"
    assert forms["layers.1.self_attn.v_proj"] == "Q6_K"
    assert forms["layers.0.mlp.down_proj"] == "Q5_0", "704 inputs are no whole blocks of 256"
    assert forms["layers.1.mlp.down_proj"] == "Q8_0"
    assert forms["embed_tokens"] == "Q6_K"
    assert forms["norm"] == forms["layers.0.input_layernorm"] == ""
