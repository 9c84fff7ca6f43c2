"""Drafters in virtual time: the memo proposes what a drafter does, computes it once, and what cannot be had
is refused. A synthetic one is as often right as it claims, and always says the same.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from flowspec.bench.cases import PROMPT_TOKENS, VOCABULARY, PlainCase, synthetic_cases
from flowspec.bench.drafters import (
    RANDOM,
    RANDOM_SHARPNESS,
    Guesses,
    MemoDrafter,
    Models,
    PathReader,
    Randoms,
    Synthetic,
    VirtualDrafter,
    open_drafter,
)
from flowspec.bench.experiment import WIDTH_MAX, Setup
from flowspec.bench.records import EXACT, Record
from flowspec.bench.simulated import run
from flowspec.core.head.domains import Domains
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Sampling, Segment
from flowspec.draft.base import Drafter
from flowspec.draft.lookup import LookUpDrafter
from flowspec.draft.ranking import Ranker
from flowspec.draft.registry import find_drafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.text import Tokenizer
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from lab.plain_model import PlainModel
from tests.bench.benches import boards, synthetic
from tests.bench.cases import STOP, made
from tests.nightly import nightly

ANSWER = (*range(20, 40), STOP)


class Both:
    """Two drafters that must propose the same."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, memo: Drafter | None, plain: Drafter | None) -> None:
        assert memo is not None
        assert plain is not None
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


def drafter_of(name: str, model: str = BUNDLED) -> VirtualDrafter:
    return open_drafter(synthetic(model=model), name, coupled=True)


def answer(setup: Setup, case: PlainCase, drafter: Drafter | None) -> Record:
    return run(synthetic(), boards(4), setup, case, {} if drafter is None else {"a": drafter}).record


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("setup", METHODS, ids=lambda setup: setup.name)
def test_a_memo_of_made_logits_proposes_what_a_drafter_with_a_view_of_its_own_does(
    setup: Setup, sampling: Sampling
) -> None:
    case = replace(made("a", ANSWER[:8], sampling=sampling), new_tokens_max=8)
    plain = FakeDrafter(HashLanguage(50, 0, RANDOM_SHARPNESS), 1.0, seed=0, context=1024)
    both = Both(Randoms(case, 1024, Ranker(50), 50).drafter(), plain)
    answer(setup, case, both)
    assert both.proposals > 20


def test_a_memo_of_the_bundled_drafter_proposes_what_the_drafter_does() -> None:
    case = replace(made("a", range(400, 408), sampling=HOT, prompt=range(300, 320)), new_tokens_max=8)
    make = drafter_of(BUNDLED)(case)
    passes = []
    for setup in METHODS:
        memo = make()
        assert isinstance(memo, MemoDrafter)
        plain = find_drafter(BUNDLED).open(ModelFiles(BUNDLED), "float32", "cpu", context=1024, coupled=True)
        answer(setup, case, Both(memo, plain))
        passes.append(memo._guesses.passes)
        answer(setup, case, make())
        assert memo._guesses.passes == passes[-1], "the second world finds all of it"
    assert passes[0] < passes[1] < 2 * passes[0] + 20


def test_many_cases_at_once_are_guessed_for_as_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.bench.drafters.HELD_MAX", 2)
    cases = [
        replace(made("a", range(400, 404), prompt=range(300 + number, 316)), new_tokens_max=4)
        for number in range(3)
    ]
    drafter = drafter_of("draft")
    makers = [drafter(case) for case in cases]
    for round_number in range(2):
        for case, make in zip(cases, makers, strict=True):
            answer(METHODS[round_number], case, Both(make(), drafter_of("draft")(case)()))
    assert isinstance(drafter, Models)
    assert sorted(drafter.held.values()) == [0, 1]


@pytest.mark.parametrize("name", nightly(["eagle3", "block"], ["eagle", "eagle3", "block"]))
def test_features_of_a_path_are_those_that_the_publisher_s_code_has(name: str) -> None:
    """And each is given with its node: with those of other nodes guesses are worse."""
    files = ModelFiles(BUNDLED)
    tokenizer, reference = Tokenizer(files), PlainModel(files, "float32")
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": "What is 17 + 25?"}]))
    answered = reference.generate(prompt, Sampling(), 40, frozenset({STOP}))
    case = replace(made("a", answered, prompt=prompt), new_tokens_max=len(answered))
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([[*prompt, *answered]]), output_hidden_states=True).hidden_states
    accepted = []
    for shift in (0, 7):
        reader = drafter_of(name)(case)()
        assert isinstance(reader, PathReader)
        assert reader.depths == tuple(each / 8 for each in reader.captures)
        expected = torch.cat([states[each][0] for each in reader.captures], dim=1).numpy()
        assert np.abs(reader._features - expected).max() < 1e-3
        reader._features = np.roll(reader._features, shift, 0)
        record = answer(METHODS[0], case, reader)
        assert record.agreement == EXACT
        accepted.append(record.acceptance)
    assert accepted[0] > 1.2 * accepted[1]


def test_drafters_that_cannot_be_used_in_virtual_time_are_refused() -> None:
    for name, model, reason in (
        (str(bundled_folder("eagle")), str(bundled_folder("mid")), "is for another model"),
        ("/no/such/folder", BUNDLED, "there is no folder"),
    ):
        with pytest.raises(InputError, match=reason):
            drafter_of(name, model)
    assert isinstance(drafter_of(RANDOM)(made("a", ANSWER))(), MemoDrafter)
    assert isinstance(drafter_of("ngram")(made("a", ANSWER))(), LookUpDrafter)


WARM = Sampling(temperature=1.0, seed=4)


def synthetic_guesses(case: PlainCase, acceptance: float = 0.6, *, balanced: bool = False) -> Guesses:
    drafter = Synthetic(case, 100_000, acceptance, balanced=balanced).drafter()
    assert isinstance(drafter, MemoDrafter)
    return drafter._guesses


def test_synthetic_cases_are_told_apart_by_number_and_sampling_and_are_always_the_same() -> None:
    samplings = [Sampling(), WARM, structs.replace(WARM, seed=5)]
    found = synthetic_cases(3, samplings, 20)
    assert found == synthetic_cases(3, samplings, 20)
    assert [(case.prompt_id, case.sampling) for case in found] == [
        (str(n), sampling) for sampling in samplings for n in (1, 2, 3)
    ]
    assert len({case.prompt for case in found}) == len({case.answer for case in found}) == 9
    assert all((len(case.prompt), len(case.answer)) == (PROMPT_TOKENS, 20) for case in found)
    assert all(0 <= token < VOCABULARY for case in found for token in (*case.prompt, *case.answer))
    assert synthetic_cases(2, samplings[:1], 20, first=1) == found[1:3]
    for have_words in (True, False):  # by which a domain's prompts can be known
        cases = synthetic_cases(12, [Sampling()], 8, domains=("a", "b", "c"), have_words=have_words)
        domains = Domains()
        assert ([domains.find(case.prompt) for case in cases] == [0, 1, 2] * 4) == have_words


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_guesses_are_right_as_often_as_they_claim(acceptance: float) -> None:
    """Hits lie within four standard errors of the sum of the confidences: of each rank, and of the best guess
    where it is unsure and where it is sure."""
    said: list[tuple[tuple[float, ...], list[bool]]] = []
    for case in synthetic_cases(2, [Sampling()], 3000):
        guesses = synthetic_guesses(case, acceptance)
        path = guesses.prefixes.chain((*case.prompt, *case.answer))
        for true, children in zip(case.answer, guesses.children(path[PROMPT_TOKENS - 1 : -1]), strict=True):
            assert len(set(children.tokens)) == WIDTH_MAX
            assert list(children.confidences) == sorted(children.confidences, reverse=True)
            assert 0 < sum(children.confidences) <= 1 + 1e-9
            said.append((children.confidences, [token == true for token in children.tokens]))
    said.sort(key=lambda each: each[0][0])
    claimed, hits = (np.array(each, dtype=float) for each in zip(*said, strict=True))
    fifths = [np.s_[at * len(said) // 5 : (at + 1) * len(said) // 5, 0] for at in range(5)]
    for some in (*(np.s_[:, rank] for rank in range(WIDTH_MAX)), *fifths):
        error = (claimed[some] * (1 - claimed[some])).sum() ** 0.5
        assert abs(hits[some].sum() - claimed[some].sum()) <= 4 * error + 1
    assert hits[:, 0].mean() == pytest.approx(acceptance, abs=0.03)


def test_balanced_answers_have_their_share_of_right_guesses_each_in_no_order() -> None:
    """Of 96 tokens as many first guesses are right as there should be, within four; by chance ten more or
    fewer may be. Whether a token is guessed says little of whether the next one is."""
    orders = []
    for case in synthetic_cases(20, [Sampling()], 96):
        guesses = synthetic_guesses(case, 0.635, balanced=True)
        path = guesses.prefixes.chain((*case.prompt, *case.answer))
        found = guesses.children(path[PROMPT_TOKENS - 1 : -1])
        orders.append([true == children.tokens[0] for true, children in zip(case.answer, found, strict=True)])
        assert sum(orders[-1]) == pytest.approx(96 * 0.635, abs=4)
        assert sum(children.confidences[0] for children in found) == pytest.approx(96 * 0.635, abs=1)
    hits = np.array(orders, dtype=float)
    assert abs(np.corrcoef(hits[:, :-1].ravel(), hits[:, 1:].ravel())[0, 1]) < 0.1
    assert len({tuple(order) for order in orders}) == 20


def test_what_is_said_after_a_prefix_depends_on_nothing_but_it() -> None:
    """On the answer's path, off it, and behind its end."""
    (case,) = synthetic_cases(1, [WARM], 60)
    texts = [(*case.prompt, *case.answer[:n]) for n in range(61)]
    texts += [(*text, 11, 12) for text in texts]
    found = []
    for order in (texts, random.Random(1).sample(texts, len(texts))):
        guesses = synthetic_guesses(case)
        said = {text: guesses.children([guesses.prefixes.chain(text)[-1]])[0] for text in order}
        found.append([said[text] for text in texts])
        assert all(len(set(children.tokens)) == WIDTH_MAX for children in found[-1])
    together = synthetic_guesses(case)
    assert found[0] == found[1] == together.children([together.prefixes.chain(text)[-1] for text in texts])
    other = synthetic_guesses(synthetic_cases(1, [structs.replace(WARM, seed=5)], 60)[0])
    assert other.children([other.prefixes.chain(text)[-1] for text in texts]) != found[0]
