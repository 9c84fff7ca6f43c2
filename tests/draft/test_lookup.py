"""A look-up proposes what followed the end of the text before, what is shared is remembered, and its index
finds what a search of all texts finds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.draft import lookup
from flowspec.draft.lookup import STRENGTHS, LookUp, Match, SuffixIndex, Text, rank

MATCHES = st.lists(st.builds(Match, st.integers(1, 12), st.integers(0, 4)), max_size=12).map(
    lambda found: sorted(found, key=lambda match: -match.length)
)


def text_of(tokens: list[int], shared: SuffixIndex | None = None) -> LookUp:
    text = LookUp(shared)
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
    found = rank(matches)
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
    text = LookUp()
    for _ in range(300):
        if rng.random() < 0.1:
            text.cut(rng.randint(0, len(text.tokens)))
        text.append(rng.randrange(6))
        branch = [rng.randrange(6) for _ in range(3)]
        fresh = dict(text_of(text.tokens).propose(branch, 9))
        assert dict(text.propose(branch, 9)) == pytest.approx(fresh)


def test_what_is_shared_is_remembered_and_nothing_else_is() -> None:
    index = SuffixIndex()
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


# -------------------------------------------------------------------------------------------------- the index

DEPTH = 4
BLOCK_TOKENS = 8
MANY = 1 << 20
TOKENS = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.lists(TOKENS, min_size=1, max_size=12)),
        st.tuples(st.just("cut"), st.integers(0, 2), st.floats(0, 1)),
        st.tuples(st.just("begin"), st.integers(0, 2), st.floats(0, 1)),
    ),
    max_size=30,
)


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    """Texts here have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "BLOCK_TOKENS", BLOCK_TOKENS)
        yield


def agreement(text: Sequence[int], place: int, end: Sequence[int]) -> int:
    length = 0
    while length < min(len(end), place + 1, DEPTH) and text[place - length] == end[-1 - length]:
        length += 1
    return length


def searched(texts: Sequence[tuple[Sequence[int], int]], end: Sequence[int]) -> list[tuple[int, int]]:
    """Length and follower of every place of these texts, each with how many of its tokens are before it."""
    found = [
        (agreement(text, place, end), text[place + 1])
        for text, before in texts
        for place in range(max(0, before - 1), len(text) - 1)
    ]
    return sorted(each for each in found if each[0])


def plain(matches: Sequence[Match]) -> list[tuple[int, int]]:
    return sorted((match.length, match.token) for match in matches)


@given(STEPS, st.lists(st.lists(TOKENS, max_size=6), min_size=1, max_size=4))
def test_what_agrees_is_what_a_search_finds(
    steps: list[tuple[str, int, object]], ends: list[list[int]]
) -> None:
    index = SuffixIndex(DEPTH, MANY)
    texts: list[tuple[list[int], int]] = [([], 0)] * 3
    written = [index.begin() for _ in texts]
    left: list[tuple[list[int], int]] = []  # what goes on being known of texts that others took the place of
    for step, at, told in steps:
        tokens, before = texts[at]
        if step == "append":
            assert isinstance(told, list)
            for token in told:
                index.append(written[at], token)
            texts[at] = ([*tokens, *told], before)
        elif step == "cut":
            assert isinstance(told, float)
            length = before + round(told * (len(tokens) - before))
            index.cut(written[at], length)
            texts[at] = (tokens[:length], before)
        else:
            assert isinstance(told, float)
            length = round(told * len(tokens))
            left.append((tokens, before))
            written[at] = index.begin(tokens[:length])
            # Only the last tokens before it are there for its first places.
            texts[at] = (tokens[:length], length)
        assert [text.length for text in written] == [len(tokens) for tokens, _ in texts]
    everything = [*texts, *left]
    assert len(index) == sum(max(0, len(text) - max(1, before)) for text, before in everything)
    for end in (*ends, *(tokens[:9] for tokens, _ in texts)):
        found = index.matches(end, MANY)
        assert plain(found) == searched(everything, end)
        lengths = [match.length for match in found]
        assert lengths == sorted(lengths, reverse=True)
        few = [match.length for match in index.matches(end, 3)]
        assert few == lengths[:3], "the longest come first, however few are wanted"


@settings(max_examples=20)
@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=14))
def test_no_more_is_held_than_the_bound_and_the_coldest_goes_first(steps: list[int | None]) -> None:
    """Texts of one block, each with a name that no other has, are written, or looked up by number."""
    held = 3
    index = SuffixIndex(DEPTH, held * BLOCK_TOKENS)
    count, expected = 0, []  # numbers of texts, the one used longest ago first
    for step in steps:
        if step is None:
            text = index.begin()
            for token in (10 + count, *[2] * (BLOCK_TOKENS - 1)):
                index.append(text, token)
                assert len(index) <= held * BLOCK_TOKENS
            expected = [*expected, count][-held:]
            count += 1
        elif step in expected:
            assert index.matches([10 + step], 4) == [Match(1, 2)]
            expected.remove(step)
            expected.append(step)
    assert [number for number in range(count) if index.matches([10 + number], 1)] == sorted(expected)


def test_a_text_goes_on_where_its_blocks_were_given_up() -> None:
    index, text, other = SuffixIndex(DEPTH, 2 * BLOCK_TOKENS), Text(), Text()
    for token in range(10, 10 + BLOCK_TOKENS + 5):
        index.append(text, token)
    for _ in range(2 * BLOCK_TOKENS):
        index.append(other, 1)
    assert index.matches([10], 1) == index.matches([10 + BLOCK_TOKENS + 1], 1) == []
    for token in (3, 4, 5):
        index.append(text, token)
    assert index.matches([3], 1) == [Match(1, 4)]
    index.cut(text, BLOCK_TOKENS + 6)  # what is left of the first 3
    assert (index.matches([3], 1), text.length) == ([], BLOCK_TOKENS + 6)
    index.append(text, 9)
    assert index.matches([3], 1) == [Match(1, 9)]
