"""Slices of every supported family compute what transformers computes with the whole model; and small
checkpoints have each feature of their family at work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec.bench.checkpoints import VARIANTS, VOCABULARY_SIZE
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import METHODS, make_method
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.language import LanguageModelDrafter
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from tests.model.slices import CPU, assert_faithful, load, load_stages, logits_of, pipeline, plain_logits
from tests.nightly import nightly
from tests.pipeline import ask

MECHANISMS = {
    "llama-grouped": 3,
    "mistral-sliding": 4,
    "lfm2": 3,
    "qwen3.5-text": 4,
    "gemma4": 1,
    "qwen3-moe": 3,
}
"""Variants that differ in what a slice keeps of the text, and how many stages each is cut into. A method
knows of no family."""
FAITHFUL = ("gemma2", "gemma3", "gemma4", "granite", "lfm2", "olmoe", "qwen3.5-moe", "glm4-moe", "gpt-oss")
"""Variants that differ in how they compute; at night all."""


@pytest.mark.parametrize(("name", "stages"), nightly({"llama-grouped": 3}, MECHANISMS).items())
def test_every_method_equals_the_plain_model(name: str, stages: int, variant: Callable[[str], Path]) -> None:
    """Two requests at once; a drafter of the same weights in bfloat16 that is now right and now wrong, beside
    wrong siblings."""
    folder = variant(name)
    files = ModelFiles(str(folder))
    reference = Reference(files, "float32")
    drafter = LanguageModelDrafter.load(files, "bfloat16", CPU, context=200, coupled=False)
    slices = load_stages(folder, stages)
    asked = [
        (tuple(range(7, 29)), Sampling()),
        (tuple(range(90, 112)), Sampling(temperature=0.8, top_p=0.95, seed=4)),
    ]
    for number, method in enumerate(METHODS):
        is_drafted = method != "ar"
        made = make_method(method, nodes=6, depth=2, **({"width": 2} if is_drafted else {}))
        drafters = [drafter] if is_drafted else []
        traits = [DrafterTraits(context=each.context) for each in drafters]
        run = pipeline(
            slices, HeadCore(context=200, stage_count=stages, method=made, drafters=traits), drafters
        )
        cases = {2 * number + place: case for place, case in enumerate(asked)}
        for request, (prompt, sampling) in cases.items():
            run.give(ask(request, prompt, 6, sampling=sampling))
        run.settle()
        for request, (prompt, sampling) in cases.items():
            expected = reference.generate(prompt, sampling, 6, frozenset())
            assert run.answers[request] == expected, method
        sent = sum(end.statistics.nodes_sent for end in run.ends.values())
        assert sent >= 10 + 6 * (is_drafted and stages > 1), f"guesses took part in {method}: {sent} nodes"


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_family_has_the_logits_of_the_plain_model(name: str, variant: Callable[[str], Path]) -> None:
    """Of a chain. That a row has the bits of its path in any tree is shown in `test_canonical`."""
    folder, tokens = variant(name), torch.arange(60) * 7 % VOCABULARY_SIZE
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    expected = plain_logits(folder, tokens, torch.float64, **options)
    np.testing.assert_allclose(logits_of(load_stages(folder, 3), tokens), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", nightly(FAITHFUL, tuple(VARIANTS)))
def test_in_bfloat16_slices_are_faithful_to_the_plain_model(
    name: str, variant: Callable[[str], Path]
) -> None:
    assert_faithful(variant(name), "bfloat16")


@pytest.mark.arm
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_slices_are_faithful_to_the_plain_model(
    dtype: str, variant: Callable[[str], Path]
) -> None:
    assert_faithful(variant("llama-grouped"), dtype)


def test_slices_hold_their_own_tensors_only_and_count_them(variant: Callable[[str], Path]) -> None:
    matrix = VOCABULARY_SIZE * 64 * 4
    for name, doubled in (("llama-tied", matrix), ("llama-grouped", 0)):
        whole = load(variant(name), [0, 8])[0]
        first, middle, last = load(variant(name), [0, 2, 6, 8])
        assert middle.pieces.embedding is None
        assert middle.pieces.lm_head is None
        held = first.weight_bytes + middle.weight_bytes + last.weight_bytes
        assert held == whole.weight_bytes + doubled, "a tied embedding is on the first slice and on the last"


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
