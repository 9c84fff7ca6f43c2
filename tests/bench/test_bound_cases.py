"""Which cases of `verify` are bound by a schema, and why none are where none can be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

pytest.importorskip("llguidance")

from flowspec.bench import bound_cases
from flowspec.bench.bound_cases import SCHEMA, BoundCases
from flowspec.bench.exactness import Case
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.grammar import check_grammar
from flowspec.model.text import Tokenizer, recommended
from tests.checkpoints import make_variant


def test_the_first_prompt_is_asked_again_with_each_sampling_bound() -> None:
    files = ModelFiles(BUNDLED)
    found = BoundCases(files, files.config())
    assert found.why == ""
    cases = [
        Case(prompt_id=name, prompt=prompt, sampling=sampling)
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=3))
        for name, prompt in (("first", (5, 6)), ("second", (7,)))
    ]
    bound = found.of(cases)
    assert [(case.prompt_id, case.prompt) for case in bound] == [("first as JSON", (5, 6))] * 2
    assert [structs.replace(case.sampling, grammar=None) for case in bound] == [Sampling(), cases[2].sampling]
    grammar = bound[0].sampling.grammar
    assert grammar is not None
    check_grammar(grammar.kind, grammar.text)
    assert json.loads(grammar.text) == SCHEMA
    assert set(grammar.ends) == recommended(files, files.config()).stop_ids


def test_why_answers_cannot_be_bound_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = ModelFiles(str(make_variant(tmp_path / "model", "llama-grouped")))
    assert BoundCases(bare, bare.config()).why == "the model has no tokenizer"
    files = ModelFiles(BUNDLED)
    advice = replace(recommended(files, files.config()), stop_ids=frozenset())
    for target, name, value, why in (
        (Tokenizer, "is_in_channels", True, "channels"),
        (bound_cases, "recommended", lambda files, config: advice, "no token that ends answers"),
        (bound_cases, "library_version", lambda: "", "llguidance is not here"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            assert why in BoundCases(files, files.config()).why
