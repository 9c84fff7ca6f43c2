"""The check of all families: what it covers, that its checkpoints have their families' features at work, and
what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec.bench.checkpoints import VARIANTS, make_variant
from flowspec.core.methods import METHODS
from tests.checks import families as families_check
from tests.checks.families import (
    FAMILIES,
    LONG_PROMPT,
    PACKED_METHODS,
    Job,
    Outcome,
    cases,
    kept,
    main,
)

FULL = "full_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("llama-rope3", {"rope_parameters": DEFAULT_ROPE}),
    ("qwen2-sliding", {"layer_types": [FULL] * 8}),
    ("mistral-sliding", {"sliding_window": None}),
    ("gemma2", {"layer_types": [FULL] * 4}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 24}),
    ("gemma3-text", {"layer_types": [FULL] * 4}),
    ("gemma3-text", {"rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": DEFAULT_ROPE}}),
    ("phi3", {"sliding_window": None}),
    ("smollm3", {"no_rope_layers": [1] * 4}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"attention_multiplier": 0.25}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"logits_scaling": 1.0}),
    ("olmoe", {"clip_qkv": None}),
    ("olmoe", {"num_experts_per_tok": 1}),
    ("qwen3-moe", {"num_experts_per_tok": 1}),
    ("qwen3-moe-fused", {"norm_topk_prob": False}),
    ("qwen3-moe-fused", {"sliding_window": None}),
]
"""Single features of variants, each switched off."""


def logits(folder: Path, changes: dict[str, Any], prompt: tuple[int, ...]) -> torch.Tensor:
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager"
    ).eval()  # SDPA has no cap
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return found


@pytest.mark.parametrize(
    ("variant", "changes"), WITHOUT, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_the_long_prompt_shows_whether_a_feature_is_on(
    variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_variant(tmp_path, variant)
    prompt = cases((0.0,))[1].prompt
    assert len(prompt) == LONG_PROMPT
    assert (logits(folder, {}, prompt) - logits(folder, changes, prompt)).abs().max() > 0.01


def test_every_checkpoint_stands_for_one_family() -> None:
    assert sorted(variant for variants in FAMILIES.values() for variant in variants) == sorted(VARIANTS)


def test_two_families_are_checked_and_an_earlier_run_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        str(tmp_path),
        "--stages",
        "1,3",
        "--methods",
        "continuous",
        "--temperatures",
        "1",
        "--new-tokens",
        "6",
        "--json",
    ]
    assert main([*asked, "--families", "olmo2"]) == 0
    (olmo,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert (olmo["answers"], olmo["tokens"], olmo["kinds"], olmo["refused"]) == (4, 24, {"exact": 4}, "")
    assert (olmo["faithful"]["is_faithful"], olmo["faithful"]["tokens"]) == (True, 2000)
    with (tmp_path / "families.jsonl").open("a") as file:
        file.write('{"job":')
    monkeypatch.setattr(
        families_check,
        "checked",
        lambda job, folder, daemons: Outcome(
            job=job, kinds={"exact": 3, "wrong": 1}, faithful=olmo["faithful"]
        ),
    )
    assert main([*asked[:-1], "--families", "olmo2,qwen3"]) == 1, "a wrong token"
    text = capsys.readouterr().out
    assert "Qwen3 (qwen3)" in text
    assert "1 of these are from an earlier run" in text
    assert len(kept(tmp_path / "families.jsonl")) == 2


def test_what_is_refused_is_said_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        families_check,
        "answers",
        lambda *given: (_ for _ in ()).throw(families_check.FlowSpecError("not this one")),
    )
    assert main([str(tmp_path), "--families", "olmo2,qwen3", "--dtypes", "float32,int8"]) == 1
    text = capsys.readouterr().out
    assert text.count("refused") == 8, "each in the table, and with its reason"
    assert "qwen3 in int8 is refused: not this one" in text


def test_what_is_exact_but_not_faithful_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "perplexity is 9.1, where transformers has 9"
    faithful = {
        "largest": 1.0,
        "limit": 2.0,
        "change": 0.01,
        "matrix": {"share": 0.1},
        "matrix_limit": 0.2,
        "faults": [fault],
    }
    outcome = partial(Outcome, kinds={"exact": 4}, faithful=faithful)
    monkeypatch.setattr(families_check, "checked", lambda job, folder, daemons: outcome(job=job))
    assert main([str(tmp_path), "--families", "olmo2"]) == 1
    assert f"olmo2 in float32 is not faithful: {fault}" in capsys.readouterr().out


def test_packed_weights_are_checked_with_fewer_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []
    monkeypatch.setattr(
        families_check, "checked", lambda job, folder, daemons: asked.append(job) or Outcome(job=job)
    )
    main([str(tmp_path), "--families", "olmo2", "--dtypes", "float32,int4"])
    assert [job.methods for job in asked] == [METHODS, PACKED_METHODS]
    assert asked[1] == replace(asked[0], dtype="int4", methods=PACKED_METHODS)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--families", "gpt2"], "expected all, or some of llama-grouped,"),
        (["--dtypes", "int2"], "expected all, or some of float32,"),
    ],
)
def test_wrong_usage_is_one_line(
    flags: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), *flags])
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1
    (tmp_path / "families.jsonl").write_text("[]\n")
    assert main([str(tmp_path)]) == 2
    assert "expected results of an earlier run" in capsys.readouterr().err
