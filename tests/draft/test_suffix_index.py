"""The index finds what a search of all texts finds, whatever was written, cut off and given up before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.draft import suffix_index
from flowspec.draft.suffix_index import Match, SuffixIndex, Text

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
        patch.setattr(suffix_index, "BLOCK_TOKENS", BLOCK_TOKENS)
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
