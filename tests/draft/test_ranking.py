"""The children a drafter proposes are the best of the whole vocabulary, with their exact share, however they
are found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.draft.ranking import F32, I64, Ranker
from flowspec.model.sampler import Sampler
from flowspec.noise import F64, draw_bits, gumbel
from tests.nightly import nightly

POSITION = 17


def rows_of(count: int, vocabulary: int, spread: float, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(0, spread, (count, vocabulary)).astype(np.float32)


def naive(
    logits: F32, sampling: Sampling, position: int, *, ids: I64 | None = None, coupled: bool = True
) -> tuple[I64, F64]:
    """All ids, best first, and the confidence in each: everything in double precision, everything sorted."""
    ids = np.arange(len(logits)) if ids is None else ids
    scores = logits.astype(np.float64)
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
        if coupled:
            scores = scores + gumbel(draw_bits(sampling.seed, position, ids))
    shares = np.exp(scores - scores.max())
    order = np.argsort(-scores, kind="stable")
    return ids[order], (shares / shares.sum())[order]


@pytest.mark.parametrize("vocabulary", nightly([5, 4096], [5, 300, 4096, 50_000]))
@pytest.mark.parametrize("temperature", nightly([0.0, 0.3, 5.0], [0.0, 0.05, 0.3, 1.0, 5.0]))
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_the_children_are_those_of_a_full_sort(
    vocabulary: int, temperature: float, coupled: bool, spread: float
) -> None:
    ranker = Ranker(vocabulary, coupled=coupled)
    sampling = Sampling(temperature=temperature, seed=9)
    logits = rows_of(6, vocabulary, spread)
    asked = [(sampling, POSITION + row // 3) for row in range(6)]
    for width in (1, 10, 64):
        for row, children in enumerate(ranker.best(logits, asked, width)):
            tokens, confidences = naive(logits[row], sampling, asked[row][1], coupled=coupled)
            assert children.tokens == tuple(tokens[:width])
            np.testing.assert_allclose(children.confidences, confidences[:width], rtol=1e-3, atol=1e-12)
            assert all(0 <= confidence <= 1 for confidence in children.confidences)


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.7, 1.0, 1.5])
def test_a_drafter_that_equals_the_target_proposes_first_what_the_target_draws(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=31)
    ranker, sampler = Ranker(2000), Sampler(sampling, 2000)
    logits = rows_of(40, 2000, 3)
    children = ranker.best(logits, [(sampling, row) for row in range(40)], 1)
    assert [each.tokens[0] for each in children] == [sampler.draw(row, at) for at, row in enumerate(logits)]


SUPPRESSED = tuple(range(1, 1000, 2))
BIASES = tuple((token, float(token % 7 - 3)) for token in range(0, 1200, 5))


@pytest.mark.parametrize("temperature", [0.0, 0.02, 1.0, 5.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_logits_are_biased_as_the_targets_and_what_may_not_be_drawn_is_not_proposed(
    temperature: float, reduced: bool
) -> None:
    ids = np.sort(np.random.default_rng(2).choice(1000, 200, replace=False)) if reduced else np.arange(1000)
    ranker = Ranker(1000, ids=ids if reduced else None)
    logits = rows_of(2, len(ids), 2)
    for suppressed, bias in ((SUPPRESSED, ()), ((), BIASES), (SUPPRESSED, BIASES)):
        sampling = Sampling(temperature=temperature, seed=8, suppress_tokens=suppressed, logit_bias=bias)
        moved = logits + np.array([dict(bias).get(int(token), 0.0) for token in ids], dtype=np.float32)
        for row, width in itertools.product(range(2), (1, 7, 64)):
            tokens, confidences = naive(moved[row], sampling, 5, ids=ids)
            allowed = ~np.isin(tokens, suppressed)
            expected = tokens[allowed][:width]
            shares = (confidences[allowed] / confidences[allowed].sum())[:width]
            (children,) = ranker.best(logits[row : row + 1], [(sampling, 5)], width)
            assert children.tokens == tuple(expected)
            np.testing.assert_allclose(children.confidences, shares, rtol=1e-3, atol=1e-12)


def test_only_tokens_that_may_be_drawn_are_proposed_and_none_of_padding() -> None:
    for left in ((), (7,), (3, 180, 299)):
        suppressed = tuple(token for token in range(300) if token not in left)
        sampling = Sampling(temperature=1.0, suppress_tokens=suppressed)
        for width in (1, 64):
            (children,) = Ranker(300).best(rows_of(1, 300, 9), [(sampling, 2)], width)
            assert len(children.tokens) == len(children.confidences) == min(width, len(left))
            assert set(children.tokens) <= set(left)
    logits = rows_of(1, 400, 2)
    sampling = Sampling(temperature=1.0, seed=8)
    padded = np.concatenate([logits, np.full((1, 24), 50, dtype=np.float32)], axis=1)
    assert Ranker(400).best(padded, [(sampling, 5)], 7) == Ranker(400).best(logits, [(sampling, 5)], 7)
    assert Ranker(1000).best(logits, [(sampling, 5)], 7) == Ranker(400).best(logits, [(sampling, 5)], 7)
    logits = rows_of(1, 300, 2)
    logits[0, 100:] = np.finfo(np.float32).min
    for temperature in (0.0, 0.01, 0.5):
        (children,) = Ranker(300).best(logits, [(Sampling(temperature=temperature, seed=1), 2)], 20)
        assert max(children.tokens) < 100


def test_requests_share_a_batch_and_the_noise_kept_is_bounded() -> None:
    logits = rows_of(3, 300, 2)
    ranker = Ranker(300, bytes_max=12 * 300 * 4)
    samplings = [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=0.6, seed=2)]
    for position in range(20):
        together = ranker.best(logits, [(sampling, position) for sampling in samplings], 5)
        for row, sampling in enumerate(samplings):
            assert together[row].tokens == tuple(naive(logits[row], sampling, position)[0][:5])
    assert ranker._noise.cache_info().currsize == 4
