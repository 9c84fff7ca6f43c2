"""The small checkpoints of each family have its features at work: each one, switched off, changes logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec.bench.checkpoints import VOCABULARY_SIZE

LONG_PROMPT = 70
"""Tokens; more than any window of a variant, and than Llama 3's and Phi-3's scaled positions begin at."""
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


@pytest.mark.parametrize(("name", "changes"), WITHOUT, ids=str)
def test_a_feature_changes_logits(name: str, changes: dict[str, Any], variant: Callable[[str], Path]) -> None:
    rng = random.Random(5)
    prompt = tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(LONG_PROMPT))
    with_it, without = (logits(variant(name), each, prompt) for each in ({}, changes))
    assert (with_it - without).abs().max() > 0.01
