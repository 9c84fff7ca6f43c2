"""Plain decoding by one slice, a token a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep, device_with
from flowspec.model.trials import Trial, TrialVerdict
from tests.model.fake_gpu import pretend_cuda

PROMPT = tuple(range(3, 30))
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3))


@pytest.fixture(scope="module", params=["mistral-sliding", "qwen3-moe"])
def files(request: pytest.FixtureRequest, variant: Callable[[str], Path]) -> ModelFiles:
    return ModelFiles(str(variant(request.param)))


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> StepByStep:
    return StepByStep.load(files, "float32")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_it_says_what_transformers_says(files: ModelFiles, plain: StepByStep, sampling: Sampling) -> None:
    expected = Reference(files, "float32").generate(PROMPT, sampling, 12, frozenset())
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
    expected = Reference(files, "float32").forced_logits(PROMPT[:1], list(PROMPT[1:]))
    np.testing.assert_allclose(alone, expected, atol=1e-4)


def test_it_computes_where_this_machine_has_the_devices_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a head with a GPU beside daemons with the same one, for a precision whose bits are a GPU's own."""
    arithmetics = {"cpu": "lanes16", "cuda:0": "blocks-sm87"}

    def known(dtype: str, device: str) -> Trial:
        right = TrialVerdict(kernel="best", fault="", arithmetic=arithmetics[device])
        return Trial(dtype=dtype, device=device, verdicts=(right,))

    monkeypatch.setattr("flowspec.model.step_by_step.tried", known)
    assert device_with("bfloat16", "lanes16") == torch.device("cpu")
    with pytest.raises(InputError, match="compute bfloat16 as blocks-sm87, this machine as lanes16: what"):
        device_with("bfloat16", "blocks-sm87")
    pretend_cuda(monkeypatch)
    assert device_with("bfloat16", "blocks-sm87") == torch.device("cuda:0")
    assert device_with("bfloat16", "lanes16") == torch.device("cpu"), "the CPU where both can"
    with pytest.raises(InputError, match="as blocks-sm90, this machine as lanes16, blocks-sm87: what"):
        device_with("bfloat16", "blocks-sm90")
