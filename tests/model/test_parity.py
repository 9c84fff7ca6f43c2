"""Slices of every supported family compute what transformers computes with the whole model, and so does plain
decoding by one; small checkpoints have each feature of their family at work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import METHODS, make_method
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.language import LanguageModelDrafter
from flowspec.errors import InputError
from flowspec.model.engines import Trial
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep, device_with
from lab.plain_model import PlainModel
from tests.checkpoints import VARIANTS, VOCABULARY_SIZE
from tests.model.fake_gpu import pretend_cuda
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
    reference = PlainModel(files, "float32")
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
    folder, tokens = variant(name), np.arange(60) * 7 % VOCABULARY_SIZE
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
        assert {*middle.parts} == {2, 3, 4, 5}
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


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in WITHOUT))
def test_each_feature_changes_logits(name: str, variant: Callable[[str], Path]) -> None:
    rng = random.Random(5)
    prompt = tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(LONG_PROMPT))
    whole = logits(variant(name), {}, prompt)
    for changes in (changes for own, changes in WITHOUT if own == name):
        assert (logits(variant(name), changes, prompt) - whole).abs().max() > 0.01, changes


PROMPT = tuple(range(3, 30))
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3))


@pytest.fixture(scope="module", params=nightly(["mistral-sliding"], ["mistral-sliding", "qwen3-moe"]))
def files(request: pytest.FixtureRequest, variant: Callable[[str], Path]) -> ModelFiles:
    return ModelFiles(str(variant(request.param)))


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> StepByStep:
    return StepByStep.load(files, "float32")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_it_says_what_transformers_says(files: ModelFiles, plain: StepByStep, sampling: Sampling) -> None:
    expected = PlainModel(files, "float32").generate(PROMPT, sampling, 12, frozenset())
    assert plain.generate(PROMPT, sampling, 12, frozenset()) == tuple(expected)
    stop = expected[4]
    until = expected[: expected.index(stop) + 1]
    assert plain.generate(PROMPT, sampling, 12, frozenset([stop])) == tuple(until), (
        "the stop token is the last one"
    )


def test_a_repetition_penalty_is_that_of_transformers(files: ModelFiles, plain: StepByStep) -> None:
    model = AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPT])
    found = []
    for penalty in (1.0, 1.3, 0.5):
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            repetition_penalty=penalty,
            max_new_tokens=16,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected = tuple(whole[0, len(PROMPT) :].tolist())
        answer = plain.generate(PROMPT, Sampling(repetition_penalty=penalty), 16, frozenset())
        assert answer == expected
        found.append(answer)
    assert len(set(found)) > 1


def test_every_pass_is_of_one_token_and_an_answer_is_made_once(
    plain: StepByStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = Slice.forward

    def counted(self: Slice, job: object, payload: object) -> object:
        rows.append(len(job.rows))  # type: ignore[attr-defined]
        return forward(self, job, payload)  # type: ignore[arg-type]

    monkeypatch.setattr(Slice, "forward", counted)
    sampling = Sampling(temperature=1.0, seed=77)
    first = plain.generate(PROMPT, sampling, 5, frozenset())
    assert rows == [1] * (len(PROMPT) + 4), "the last token needs no pass"
    assert plain.generate(PROMPT, sampling, 5, frozenset()) == first
    assert len(rows) == len(PROMPT) + 4


def test_a_text_that_is_read_in_portions_has_the_same_logits(files: ModelFiles, plain: StepByStep) -> None:
    together = np.concatenate(list(plain.logits(PROMPT, [5, 1, 20, 1])))
    alone = np.concatenate(list(plain.logits(PROMPT)))
    assert together.shape == alone.shape == (len(PROMPT), plain.vocabulary_size)
    np.testing.assert_allclose(together, alone, atol=1e-4)
    expected = PlainModel(files, "float32").forced_logits(PROMPT[:1], list(PROMPT[1:]))
    np.testing.assert_allclose(alone, expected, atol=1e-4)


def test_it_computes_where_this_machine_has_the_devices_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a head with a GPU beside daemons with the same one, for a precision whose bits are a GPU's own."""
    arithmetics = {"cpu": "lanes16", "cuda:0": "blocks-sm87"}

    def known(dtype: str, device: str) -> Trial:
        return Trial(arithmetics=(arithmetics[device],))

    monkeypatch.setattr("flowspec.model.step_by_step.run_trial", known)
    assert device_with("bfloat16", "lanes16") == "cpu"
    with pytest.raises(InputError, match="compute bfloat16 as blocks-sm87, this machine as lanes16: what"):
        device_with("bfloat16", "blocks-sm87")
    pretend_cuda(monkeypatch)
    assert device_with("bfloat16", "blocks-sm87") == "cuda:0"
    assert device_with("bfloat16", "lanes16") == "cpu", "the CPU where both can"
    with pytest.raises(InputError, match="as blocks-sm90, this machine as lanes16, blocks-sm87: what"):
        device_with("bfloat16", "blocks-sm90")
