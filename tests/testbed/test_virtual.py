"""Worlds for comparing methods: what plain decoding takes, that wrong answers are found, and that the memo proposes what a drafter does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowspec.core.events import Proposal
from flowspec.core.messages import Release, Sampling, Segment
from flowspec.draft.choose import open_drafter
from flowspec.draft.protocol import Drafter
from flowspec.draft.ranking import Ranker
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from flowspec.testbed.guesses import RANDOM_SHARPNESS, MemoDrafter, Randoms, open_drafting
from flowspec.testbed.virtual import OVERALL, Pipeline, Run, Setup, WrongAnswer, rates, run
from tests.testbed.cases import STOP, made

ANSWER = (*range(20, 40), STOP)
AR = Setup(name="ar", method="ar")


@pytest.mark.parametrize(("stages", "board"), [(4, "jetson"), (8, "pi"), (1, "pi")])
def test_plain_decoding_takes_one_trip_for_each_token(stages: int, board: str) -> None:
    pipeline = Pipeline(stages=stages, board=board)
    found = run(pipeline, AR, made("a", ANSWER), None)
    assert found.tokens == 20, "those after the first, and the stop token"
    trip = stages * 1.004 + (stages + 1) * 0.02 + (stages - 1) * 0.008
    assert found.time == pytest.approx(20 * trip, rel=1e-4)
    assert rates([found])[OVERALL] == pytest.approx(pipeline.plain_rate, rel=1e-4)
    assert found.statistics.tokens == 20


def test_a_domains_rate_is_its_tokens_by_its_time_and_the_mean_is_harmonic() -> None:
    short = run(Pipeline(), AR, made("a", ANSWER), None)

    def one(domain: str, tokens: int, time: float) -> Run:
        return replace(short, case=replace(short.case, domain=domain), tokens=tokens, time=time)

    found = rates([one("x", 10, 5.0), one("x", 2, 1.0), one("y", 8, 1.0), one("z", 0, 0.0)])
    assert found == {"x": 2.0, "y": 8.0, OVERALL: pytest.approx(2 / (1 / 2 + 1 / 8))}


def test_an_answer_that_is_not_the_plain_one_is_an_error_that_names_method_and_prompt() -> None:
    wrong = made("seventeen", (20, STOP, 22, 23))  # a world stops at the stop token
    with pytest.raises(WrongAnswer, match=r"ar .*seventeen.*made.*expected 4; the first 1 are equal"):
        run(Pipeline(), AR, wrong, None)


class Both:
    """Two drafters that must propose the same."""

    kind = "model"
    captures: tuple[int, ...] = ()
    weight_bytes = 0

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
    Setup(name="flowspec-paper", method="flowspec-paper"),
    Setup(name="pipedec", method="pipedec"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setup", METHODS, ids=lambda setup: setup.name)
def test_a_memo_of_made_logits_proposes_what_a_drafter_with_a_view_of_its_own_does(setup: Setup, temperature: float) -> None:
    case = replace(made("a", ANSWER[:8], sampling=Sampling(temperature=temperature, seed=3)), new_tokens_max=8)
    memo = Randoms(Ranker(50), 50, 1024).begin(case)()
    assert memo is not None
    both = Both(memo, FakeDrafter(HashLanguage(50, 0, RANDOM_SHARPNESS), 1.0, seed=0, context=1024))
    run(Pipeline(), setup, case, both)
    assert both.proposals > 20


@pytest.mark.parametrize(("temperature", "coupled"), [(0.0, True), (1.0, True), (1.0, False)])
def test_a_memo_of_the_bundled_drafter_proposes_what_the_drafter_does(temperature: float, coupled: bool) -> None:
    target = ModelFiles(BUNDLED)
    drafting = open_drafting(BUNDLED, target, coupled=coupled)
    case = made("a", range(400, 408), sampling=Sampling(temperature=temperature, seed=3), prompt=range(300, 320))
    case = replace(case, new_tokens_max=8)
    make = drafting.begin(case)
    passes = []
    for setup in METHODS[:2]:
        memo = make()
        assert isinstance(memo, MemoDrafter)
        plain = open_drafter(BUNDLED, target, "float32", torch.device("cpu"), context=1024, coupled=coupled)
        assert plain is not None
        run(Pipeline(), setup, case, Both(memo, plain))
        passes.append(memo._guesses.passes)
        run(Pipeline(), setup, case, make())
        assert memo._guesses.passes == passes[-1], "the second world finds all of it"
    assert passes[0] < passes[1] < 2 * passes[0] + 20


def test_drafters_that_cannot_be_used_in_virtual_time_are_refused() -> None:
    with pytest.raises(InputError, match="needs the target's features"):
        open_drafting(str(bundled_folder("eagle")), ModelFiles(BUNDLED))
    with pytest.raises(InputError, match="there is no folder"):
        open_drafting("/no/such/folder", ModelFiles(BUNDLED))
    assert open_drafting("none", ModelFiles(BUNDLED)).begin(made("a", ANSWER))() is None
    ngram = open_drafting("ngram", ModelFiles(BUNDLED)).begin(made("a", ANSWER))()
    assert ngram is not None
    assert ngram.kind == "ngram"
