"""Prompt look-up proposes what followed the last tokens before, and is quick."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from flowspec.draft.ngram import MATCH_MAX, PLACES_MAX, NgramProposer


def text_of(tokens: list[int]) -> NgramProposer:
    text = NgramProposer()
    for token in tokens:
        text.append(token)
    return text


def follower_tokens(text: NgramProposer, end: list[int], width: int = 10) -> list[int]:
    return [token for token, _ in text.followers(end, width)]


def test_the_longest_agreement_wins_and_is_trusted_more() -> None:
    text = text_of([1, 2, 3, 10, 9, 2, 3, 11, 8, 3, 12])
    assert follower_tokens(text, [1, 2, 3]) == [10, 11, 12]
    assert follower_tokens(text, [9, 2, 3]) == [11, 10, 12]
    assert follower_tokens(text, [8, 3]) == [12, 11, 10]  # below the longest agreement, the newest first
    assert follower_tokens(text, [3], 1) == [12]
    sure, unsure = text.followers([1, 2, 3], 1)[0][1], text.followers([7, 3], 1)[0][1]
    assert 0 < unsure < sure < 1
    assert follower_tokens(text, [12]) == []  # nothing follows the end yet
    assert follower_tokens(text, [99]) == []


def test_agreement_among_places_counts() -> None:
    often = text_of([5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 8, 3])
    (first, most), (second, least) = often.followers([5, 6], 2)
    assert (first, second) == (7, 8)
    assert most > least
    once = text_of([5, 6, 7, 1]).followers([5, 6], 1)[0][1]
    twice = text_of([5, 6, 7, 1, 5, 6, 7, 2]).followers([5, 6], 1)[0][1]
    assert twice > once


@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_was_cut_and_goes_on_is_as_good_as_a_new_one(seed: int) -> None:
    rng = random.Random(seed)
    text = NgramProposer()
    for _ in range(300):
        if rng.random() < 0.1:
            text.cut(rng.randint(0, len(text.tokens)))
        text.append(rng.randrange(6))
    fresh = text_of(text.tokens)
    assert (text._newest, text._older_pair, text._older_token) == (
        fresh._newest,
        fresh._older_pair,
        fresh._older_token,
    )
    text.cut(0)
    assert (text.tokens, text._newest) == ([], {})


@pytest.mark.parametrize("seed", range(3))
def test_followers_are_those_of_a_plain_search(seed: int) -> None:
    """Where few places agree, all of them count: the tokens are what a search of the whole text finds,
    longest agreement first."""
    rng = random.Random(seed)
    tokens = [rng.randrange(40) for _ in range(400)]
    text = text_of(tokens)
    for at in rng.sample(range(10, 400), 50):
        end = tokens[at - MATCH_MAX : at]
        places = [place for place in range(1, 400) if tokens[place - 1] == end[-1]]
        assert set(follower_tokens(text, end, 400)) == {tokens[place] for place in places}
        longest = max(places, key=lambda place: _agreement(tokens, place, end))
        best = max(_agreement(tokens, place, end) for place in places)
        if sum(_agreement(tokens, place, end) == best for place in places) == 1 and best > 3:
            assert follower_tokens(text, end, 1) == [tokens[longest]]


def _agreement(tokens: list[int], place: int, end: list[int]) -> int:
    count = 0
    while count < min(len(end), place) and tokens[place - 1 - count] == end[-1 - count]:
        count += 1
    return count


def test_a_node_is_looked_up_by_its_branch() -> None:
    text = text_of([1, 2, 3, 4, 5, 1, 2])
    found = [text.propose(branch, 4)[0] for branch in ([], [3], [5], [3, 4])]
    assert [token for token, _ in found] == [3, 4, 1, 5]
    # The deeper the branch goes along, the longer the agreement.
    sure = [confidence for _, confidence in found]
    assert sure[3] > sure[1] > sure[2]


def test_the_end_of_a_short_text_is_all_of_it() -> None:
    text = text_of([1])
    assert text.propose([], 4) == []
    assert [token for token, _ in text.propose([2] * MATCH_MAX + [1], 4)] == []
    text.append(7)
    assert text.propose([2] * MATCH_MAX + [1], 4) == text.followers([2, 1], 4)


def test_a_long_context_costs_no_more_than_a_short_one() -> None:
    """Counted, not timed: a look-up visits a bounded number of places however long the text is."""
    text = text_of([token for n in range(20_000) for token in (1, 2, n % 50 + 3)])
    assert len(text._places(1, text._older_token)) == PLACES_MAX
    assert follower_tokens(text, [1, 2], 100) == [token % 50 + 3 for token in range(19_999, 19_949, -1)]


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, flowspec.draft.ngram; print(sorted({'torch', 'transformers', 'zmq'} & "
        "sys.modules.keys()))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
