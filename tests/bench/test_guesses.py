"""Drafters in virtual time: the memo proposes what a drafter does, computes it once, and what cannot be had
is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.bench.config import Setup
from flowspec.bench.drafting import RANDOM, open_drafting
from flowspec.bench.feature_guesses import PathReader
from flowspec.bench.guesses import WIDTH_MAX, MemoDrafter
from flowspec.bench.model_guesses import Models
from flowspec.bench.outcome import EXACT
from flowspec.bench.plain import PlainCase
from flowspec.bench.random_guesses import RANDOM_SHARPNESS, Randoms
from flowspec.bench.simulated import run
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Sampling, Segment
from flowspec.draft.kinds import open_drafter
from flowspec.draft.protocol import Drafter
from flowspec.draft.ranking import Ranker
from flowspec.draft.text import TextDrafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from lab.perf.acceptance import count_hits
from tests.bench.benches import boards, synthetic
from tests.bench.cases import STOP, made
from tests.nightly import nightly

ANSWER = (*range(20, 40), STOP)


class Both:
    """Two drafters that must propose the same."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, memo: Drafter, plain: Drafter) -> None:
        self.memo, self.plain = memo, plain
        self.context = memo.context
        self.proposals = 0

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        found, expected = self.memo.draft(segment, width), self.plain.draft(segment, width)
        assert [(each.node, each.tokens) for each in found] == [(each.node, each.tokens) for each in expected]
        for each, other in zip(found, expected, strict=True):
            assert each.confidences == pytest.approx(other.confidences, abs=1e-3)
        self.proposals += len(found)
        return found

    def release(self, message: Release) -> None:
        self.memo.release(message)
        self.plain.release(message)

    def take_features(self, *_: object) -> None:
        raise AssertionError


METHODS = [
    Setup(name="continuous", method="continuous"),
    Setup(name="tree-sd", method="tree-sd", options={"nodes": 16, "depth": 3}),
]
HOT = Sampling(temperature=1.0, seed=3, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)


def answer(setup: Setup, case: PlainCase, drafter: Drafter | None) -> None:
    run(synthetic(), boards(4), setup, case, {} if drafter is None else {"a": drafter})


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("setup", METHODS, ids=lambda setup: setup.name)
def test_a_memo_of_made_logits_proposes_what_a_drafter_with_a_view_of_its_own_does(
    setup: Setup, sampling: Sampling
) -> None:
    case = replace(made("a", ANSWER[:8], sampling=sampling), new_tokens_max=8)
    memo = Randoms(Ranker(50), 50, 1024).begin(case)()
    assert memo is not None
    both = Both(memo, FakeDrafter(HashLanguage(50, 0, RANDOM_SHARPNESS), 1.0, seed=0, context=1024))
    answer(setup, case, both)
    assert both.proposals > 20


def test_a_memo_of_the_bundled_drafter_proposes_what_the_drafter_does() -> None:
    target = ModelFiles(BUNDLED)
    case = replace(made("a", range(400, 408), sampling=HOT, prompt=range(300, 320)), new_tokens_max=8)
    make = open_drafting(BUNDLED, target).begin(case)
    passes = []
    for setup in METHODS:
        memo = make()
        assert isinstance(memo, MemoDrafter)
        plain = open_drafter(BUNDLED, target, "float32", torch.device("cpu"), context=1024, coupled=True)
        assert plain is not None
        answer(setup, case, Both(memo, plain))
        passes.append(memo._guesses.passes)
        answer(setup, case, make())
        assert memo._guesses.passes == passes[-1], "the second world finds all of it"
    assert passes[0] < passes[1] < 2 * passes[0] + 20


def test_many_cases_at_once_are_guessed_for_as_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.bench.model_guesses.HELD_MAX", 2)
    cases = [
        replace(made("a", range(400, 404), prompt=range(300 + number, 316)), new_tokens_max=4)
        for number in range(3)
    ]
    drafting = open_drafting("draft", ModelFiles(BUNDLED))
    makers = [drafting.begin(case) for case in cases]
    for round_number in range(2):
        for case, make in zip(cases, makers, strict=True):
            memo, alone = make(), open_drafting("draft", ModelFiles(BUNDLED)).begin(case)()
            assert memo is not None
            assert alone is not None
            answer(METHODS[round_number], case, Both(memo, alone))
    assert isinstance(drafting, Models)
    assert sorted(drafting.held.values()) == [0, 1]


@pytest.mark.parametrize("name", nightly(["eagle3", "block"], ["eagle", "eagle3", "block"]))
def test_features_of_a_path_are_those_that_the_publisher_s_code_has(name: str) -> None:
    """And each is given with its node: with those of other nodes guesses are worse."""
    files = ModelFiles(BUNDLED)
    tokenizer, reference = Tokenizer(files), Reference(files, "float32")
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": "What is 17 + 25?"}]))
    answered = reference.generate(prompt, Sampling(), 40, frozenset({STOP}))
    case = replace(made("a", answered, prompt=prompt), new_tokens_max=len(answered))
    reader = open_drafting(name, files).begin(case)()
    assert isinstance(reader, PathReader)
    assert reader.depths == tuple(each / 8 for each in reader.captures)
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([[*prompt, *answered]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[each][0] for each in reader.captures], dim=1)
    assert (reader._features - expected).abs().max() < 1e-3
    assert run(synthetic(), boards(4), METHODS[0], case, {"a": reader}).record.agreement == EXACT
    shares = []
    for shift in (0, 7):
        again = open_drafting(name, files).begin(case)()
        assert isinstance(again, PathReader)
        again._features = again._features.roll(shift, 0)
        hits, _ = count_hits(again, case, 0, ahead=2, stride=1)
        shares.append(hits[0] / hits[WIDTH_MAX])
    assert shares[0] > 0.8 > shares[1] + 0.1


def test_drafters_that_cannot_be_used_in_virtual_time_are_refused() -> None:
    with pytest.raises(InputError, match="is for another model"):
        open_drafting(str(bundled_folder("eagle")), ModelFiles(str(bundled_folder("mid"))))
    with pytest.raises(InputError, match="there is no folder"):
        open_drafting("/no/such/folder", ModelFiles(BUNDLED))
    assert open_drafting("none", ModelFiles(BUNDLED)).begin(made("a", ANSWER))() is None
    assert isinstance(open_drafting(RANDOM, ModelFiles(BUNDLED)), Randoms)
    ngram = open_drafting("ngram", ModelFiles(BUNDLED)).begin(made("a", ANSWER))()
    assert ngram is not None
    assert isinstance(ngram, TextDrafter)
