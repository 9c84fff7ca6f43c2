"""Drafters in virtual time: the memo proposes what a drafter does, computes it once, and what cannot be had
is refused.

Those that are made up are each as often right as they claim or as their profile or declaration says, always
the same, and answers stay exact.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from flowspec.bench.config import DeclaredDrafter, Setup
from flowspec.bench.declared import Declared
from flowspec.bench.drafting import RANDOM, open_drafting
from flowspec.bench.feature_guesses import PathReader
from flowspec.bench.guesses import WIDTH_MAX, Guesses, MemoDrafter
from flowspec.bench.model_guesses import Models
from flowspec.bench.plain import PlainCase
from flowspec.bench.profiled import BlockOfProfile, ChainOfProfile, Profiled
from flowspec.bench.profiles import BLOCK, CHAIN, MEASURED, TEXT, Profile, Shares
from flowspec.bench.random_guesses import RANDOM_SHARPNESS, Randoms
from flowspec.bench.synthetic import PROMPT_TOKENS, VOCABULARY, Synthetic, synthetic_cases
from msgspec import structs
from transformers import AutoModelForCausalLM

from flowspec.bench.records import EXACT
from flowspec.bench.simulated import run
from flowspec.core.head.domains import Domains
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Sampling, Segment
from flowspec.draft.kinds import open_drafter
from flowspec.draft.protocol import Drafter
from flowspec.draft.ranking import Ranker
from flowspec.draft.text import TextDrafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.text import Tokenizer
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from lab.perf.acceptance import count_hits
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
        plain = open_drafter(BUNDLED, target, "float32", "cpu", context=1024, coupled=True)
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
    tokenizer, reference = Tokenizer(files), PlainModel(files, "float32")
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": "What is 17 + 25?"}]))
    answered = reference.generate(prompt, Sampling(), 40, frozenset({STOP}))
    case = replace(made("a", answered, prompt=prompt), new_tokens_max=len(answered))
    reader = open_drafting(name, files).begin(case)()
    assert isinstance(reader, PathReader)
    assert reader.depths == tuple(each / 8 for each in reader.captures)
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([[*prompt, *answered]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[each][0] for each in reader.captures], dim=1).numpy()
    assert np.abs(reader._features - expected).max() < 1e-3
    assert run(synthetic(), boards(4), METHODS[0], case, {"a": reader}).record.agreement == EXACT
    shares = []
    for shift in (0, 7):
        again = open_drafting(name, files).begin(case)()
        assert isinstance(again, PathReader)
        again._features = np.roll(again._features, shift, 0)
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


WARM = Sampling(temperature=1.0, seed=4)


def synthetic_guesses(case: PlainCase, acceptance: float = 0.6, *, balanced: bool = False) -> Guesses:
    drafter = Synthetic(acceptance, 100_000, balanced=balanced).begin(case)()
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


FALLING = ((0.9, 0.97), (0.8, 0.93), (0.6, 0.8), (0.5, 0.7), (0.4, 0.6), (0.3, 0.5))


def profile(reads: str) -> Profile:
    rows = FALLING if reads != TEXT else FALLING[:1]
    return Profile(
        name="some",
        basis=MEASURED,
        source="nobody",
        reads=reads,
        depths=() if reads == TEXT else (0.25, 0.5),
        within=(1, 4),
        shares=(Shares(domain="code", temperature=0.0, shares=rows),),
    )


@pytest.mark.parametrize(
    ("reads", "kind"), [(CHAIN, ChainOfProfile), (BLOCK, BlockOfProfile), (TEXT, MemoDrafter)]
)
def test_a_profiled_drafter_is_right_as_often_as_its_profile_says_at_each_distance(
    reads: str, kind: type
) -> None:
    """Within four standard errors, among the best one and the best four; a block says nothing beyond its
    last place."""
    rows = profile(reads).shares[0].shares
    (case,) = synthetic_cases(1, [Sampling()], 400, domains=("code",))
    drafter = Profiled(profile(reads), 100_000).begin(case)()
    assert isinstance(drafter, kind)
    hits = count_hits(drafter, case, 0, ahead=len(rows) + (reads == BLOCK), stride=1)
    assert all(row[WIDTH_MAX] >= 390 for row in hits[: len(rows)])
    for expected, counted in zip(rows, hits, strict=False):
        for within, share in zip((1, 4), expected, strict=True):
            error = (share * (1 - share) / counted[WIDTH_MAX]) ** 0.5
            assert sum(counted[:within]) / counted[WIDTH_MAX] == pytest.approx(share, abs=4 * error + 0.01)
    assert [row[WIDTH_MAX] for row in hits[len(rows) :]] == [0] * (reads == BLOCK)


def test_answers_with_a_profile_are_exact_and_features_travel() -> None:
    (case,) = synthetic_cases(1, [Sampling()], 24, domains=("code",))
    setup = Setup(name="continuous", method="continuous")
    sent = {}
    for reads in (TEXT, CHAIN, BLOCK):
        drafter = Profiled(profile(reads), 1024).begin(case)()
        assert drafter is not None
        bench = structs.replace(synthetic(), profile=profile(reads))
        record = run(bench, boards(4), setup, case, {"some": drafter}).record
        assert record.agreement == EXACT
        assert 0 < (record.oracle_s or 0.0) <= record.decode_s * (1 + 1e-9)
        sent[reads] = record.network_bytes / record.rows
    assert min(sent[CHAIN], sent[BLOCK]) > 1.1 * sent[TEXT], "states of the middle travel, too"


STRONG = DeclaredDrafter(name="strong", acceptance={"code": 0.8, "plays": 0.4})
WEAK = DeclaredDrafter(name="weak", acceptance={"code": 0.5, "plays": 0.5})
TOKENS = 2_000


def declared_guesses(case: PlainCase, drafter: DeclaredDrafter, number: int, correlation: float) -> Guesses:
    made = Declared(drafter, number, correlation, 100_000).begin(case)()
    assert isinstance(made, MemoDrafter)
    return made._guesses


def test_declared_drafters_are_right_as_declared_and_miss_the_same_as_the_correlation_says() -> None:
    phi = []
    cases = synthetic_cases(2, [Sampling()], TOKENS, domains=("code", "plays"), have_words=True)
    for correlation in (0.0, 0.5, 1.0):
        found = {}
        for case, shares in zip(cases, ((0.8, 0.5), (0.4, 0.5)), strict=True):
            for number, (drafter, share) in enumerate(zip((STRONG, WEAK), shares, strict=True)):
                guesses = declared_guesses(case, drafter, number, correlation)
                path = guesses.prefixes.chain((*case.prompt, *case.answer))[len(case.prompt) - 1 : -1]
                said = zip(guesses.children(path), case.answer, strict=True)
                right = np.array([each.tokens[0] == token for each, token in said])
                assert abs(right.mean() - share) < 4 * np.sqrt(share * (1 - share) / TOKENS) + 0.005
                found[case.domain, drafter.name] = right
        strong, weak = found["code", "strong"], found["code", "weak"]
        phi.append(float(np.corrcoef(strong, weak)[0, 1]))
    assert abs(phi[0]) < 4 / np.sqrt(TOKENS)
    assert all(later > earlier + 0.1 for earlier, later in pairwise(phi))
    assert not (weak & ~strong).any(), "the weaker one knows nothing that the stronger one does not"


def test_prompts_of_a_domain_are_known_by_their_words() -> None:
    for have_words in (True, False):
        prompts = synthetic_cases(12, [Sampling()], 8, domains=("a", "b", "c"), have_words=have_words)
        domains = Domains()
        found = [domains.find(case.prompt) for case in prompts]
        assert (found == [0, 1, 2] * 4) == have_words
