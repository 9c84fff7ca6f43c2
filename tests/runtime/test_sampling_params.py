"""What is asked of sampling, what the model recommends, and that every field can be asked for everywhere."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowspec.cli.answer import FIXED
from flowspec.cli.options import add_sampling_arguments, sampling_params
from flowspec.core.protocol.messages import SAMPLING_FIELDS, Sampling
from flowspec.errors import InputError
from flowspec.model.text import Recommended
from flowspec.runtime.sampling_params import SamplingParams
from flowspec.serve.completion_request import completion_wanted

ROOT = Path(__file__).resolve().parents[2]
NOTHING = Recommended(stop_ids=frozenset())
ADVICE = Recommended(stop_ids=frozenset(), sampling={"temperature": 0.6, "top_k": 20})
ASKED: dict[str, Any] = {name: kind(1) for name, kind in SAMPLING_FIELDS.items()} | {"min_p": 0.25}


def test_a_recommendation_holds_as_a_whole_unless_a_temperature_is_given_and_a_seed_is_drawn() -> None:
    assert SamplingParams(seed=3).sampling(ADVICE) == Sampling(temperature=0.6, top_k=20, seed=3)
    assert SamplingParams(top_k=0, top_p=0.5, seed=3).sampling(ADVICE) == Sampling(
        temperature=0.6, top_p=0.5, seed=3
    )
    assert SamplingParams(temperature=1, seed=3).sampling(ADVICE) == Sampling(temperature=1.0, seed=3)
    assert SamplingParams(temperature=0).sampling(ADVICE) == Sampling()
    assert SamplingParams().sampling(NOTHING) == Sampling()
    assert len({SamplingParams().sampling(ADVICE).seed for _ in range(3)}) > 1
    assert SamplingParams(seed=5).sampling(NOTHING).seed == 5
    advice = Recommended(stop_ids=frozenset(), unsupported=("guidance_scale",))
    with pytest.raises(InputError, match=r"recommends guidance_scale, .* give a temperature"):
        SamplingParams().sampling(advice)
    assert SamplingParams(temperature=0.0).sampling(advice) == Sampling()


def test_what_the_models_files_suppress_is_never_drawn_whatever_is_asked() -> None:
    advice = replace(ADVICE, suppress_tokens=(5, 7))
    for asked in (SamplingParams(seed=3), SamplingParams(temperature=0), SamplingParams(logit_bias={5: 100})):
        assert asked.sampling(advice).suppress_tokens == (5, 7)


def test_biases_are_given_by_token_id_in_any_order() -> None:
    asked = SamplingParams(logit_bias={9: 1, np.int64(3): np.float32(-2.5)})
    assert asked.sampling(NOTHING) == Sampling(logit_bias=((3, -2.5), (9, 1.0)))
    body = {"model": "m", "prompt": "p", "logit_bias": {"9": 1, "3": -2.5}}
    assert completion_wanted(json.dumps(body).encode()).params.logit_bias == ((3, -2.5), (9, 1.0))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"top_k": 2.5}, "top_k"),
        ({"seed": True}, "seed"),
        ({"temperature": "0.7"}, "temperature"),
        ({"min_p": 1.0}, "min_p"),
        ({"top_p": float("nan")}, "top_p"),
        *(({"logit_bias": each}, "logit_bias") for each in (5, {"5": 1}, {5: True}, {5: 100.5}, {-5: 1})),
        ({"logit_bias": dict.fromkeys(range(513), 0)}, "logit_bias"),
    ],
)
def test_what_cannot_be_is_one_line(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^(sampling: )?{field}: expected .*, got .*") as caught:
        SamplingParams(**wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_every_field_can_be_asked_for_by_a_program_a_flag_and_a_request(name: str) -> None:
    """And is in the documents."""
    expected = SamplingParams(**{name: ASKED[name]})
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    flag = f"--{name.replace('_', '-')}"
    assert sampling_params(parser.parse_args([flag, str(ASKED[name])])) == expected
    body = {"model": "m", "prompt": "p", "max_tokens": 5, name: ASKED[name]}
    assert completion_wanted(json.dumps(body).encode()).params == replace(expected, max_new_tokens=5)
    assert FIXED[name] is None
    assert flag in (ROOT / "docs/cli.md").read_text()
    for document in ("docs/api.md", "docs/serving.md"):
        assert f"`{name}`" in (ROOT / document).read_text(), document
