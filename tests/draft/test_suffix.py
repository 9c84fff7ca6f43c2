"""A look-up proposes what followed the end of the text before, and what is shared is remembered."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.draft.suffix import STRENGTHS, SuffixProposer, new_index, ranked
from flowspec.draft.suffix_index import Match, SuffixIndex

MATCHES = st.lists(st.builds(Match, st.integers(1, 12), st.integers(0, 4)), max_size=12).map(
    lambda found: sorted(found, key=lambda match: -match.length)
)


def text_of(tokens: list[int], shared: SuffixIndex | None = None) -> SuffixProposer:
    text = SuffixProposer(shared)
    for token in tokens:
        text.append(token)
    return text


def tokens_after(tokens: list[int], branch: list[int], width: int = 10) -> list[int]:
    return [token for token, _ in text_of(tokens).propose(branch, width)]


def blended(matches: list[Match]) -> dict[int, Fraction]:
    """By the definition, one length after the other."""
    shares: dict[int, Fraction] = {}
    for length in range(1, max((match.length for match in matches), default=0) + 1):
        strength = Fraction(STRENGTHS[min(length, len(STRENGTHS)) - 1])
        tokens = [match.token for match in matches if match.length >= length]
        shares = {
            token: (tokens.count(token) + strength * shares.get(token, Fraction(0)))
            / (len(tokens) + strength)
            for token in {*tokens, *shares}
        }
    return shares


@given(MATCHES)
def test_the_confidence_is_the_blend_of_frequencies_at_all_lengths(matches: list[Match]) -> None:
    found = ranked(matches)
    assert dict(found) == pytest.approx({token: float(share) for token, share in blended(matches).items()})
    shares = [share for _, share in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) < 1 + 1e-9


def test_the_longest_agreement_wins_and_is_trusted_more() -> None:
    tokens = [1, 2, 3, 10, 9, 2, 3, 11, 8, 3, 12]
    assert tokens_after(tokens, [1, 2, 3])[0] == 10
    assert tokens_after(tokens, [9, 2, 3])[0] == 11
    assert tokens_after(tokens, [8, 3], 1) == [12]
    sure, unsure = (text_of(tokens).propose(branch, 1)[0][1] for branch in ([1, 2, 3], [7, 3]))
    assert 0 < unsure < sure < 1
    assert tokens_after(tokens, []) == [], "nothing follows the end yet"
    assert tokens_after(tokens, [99]) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_was_cut_and_goes_on_is_as_good_as_a_new_one(seed: int) -> None:
    rng = random.Random(seed)
    text = SuffixProposer()
    for _ in range(300):
        if rng.random() < 0.1:
            text.cut(rng.randint(0, len(text.tokens)))
        text.append(rng.randrange(6))
        branch = [rng.randrange(6) for _ in range(3)]
        fresh = dict(text_of(text.tokens).propose(branch, 9))
        assert dict(text.propose(branch, 9)) == pytest.approx(fresh)


def test_what_is_shared_is_remembered_and_nothing_else_is() -> None:
    index = new_index()
    first = text_of([1, 2, 3, 4, 5], index)
    assert [token for token, _ in text_of([9, 2, 3], index).propose([], 4)] == [4]
    assert text_of([9, 2, 3]).propose([], 4) == []
    first.cut(2)
    first.append(7)
    found = text_of([1, 2], index).propose([], 4)
    assert {token for token, _ in found} == {3, 7}, "what was cut off and what came in its place"
    own = text_of([1, 2, 3, 4, 5])
    own.cut(2)
    own.append(7)
    assert own.propose([2], 4) == text_of([1, 2, 7]).propose([2], 4)
    assert [token for token, _ in own.propose([2], 4)] == [7]
