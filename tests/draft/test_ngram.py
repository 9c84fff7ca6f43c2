"""Prompt look-up proposes what followed the last tokens before, keeps up with commits and rewinds, and is
quick."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from flowspec.core.protocol.messages import Proposal, Release, Sampling
from flowspec.draft.ngram import MATCH_MAX, PLACES_MAX, NgramDrafter, Text
from flowspec.errors import PeerError
from tests.draft.trees import Teller, segment


def text_of(tokens: list[int]) -> Text:
    text = Text()
    for token in tokens:
        text.append(token)
    return text


def follower_tokens(text: Text, end: list[int], width: int = 10) -> list[int]:
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
    text = Text()
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


# ------------------------------------------------------------------------------------------------ as a
# drafter


def drafted(
    drafter: NgramDrafter, *tellers_nodes: tuple[Teller, list[int]]
) -> dict[tuple[int, int], Proposal]:
    found = drafter.draft(
        segment(*(teller.part(nodes, committed=teller.missing()) for teller, nodes in tellers_nodes)), 4
    )
    return {(proposal.request, proposal.node): proposal for proposal in found}


def test_a_node_is_looked_up_by_its_branch() -> None:
    drafter, teller = NgramDrafter(), Teller(3, Sampling(temperature=1.0))
    teller.begin([1, 2, 3, 4, 5, 1, 2])
    found = drafted(drafter, (teller, [teller.root]))
    assert found[3, teller.root].tokens[0] == 3
    child = teller.add(teller.root, 3)
    other = teller.add(teller.root, 5)
    grandchild = teller.add(child, 4)
    found = drafted(drafter, (teller, [child, other, grandchild]))
    assert [found[3, node].tokens[0] for node in (child, other, grandchild)] == [4, 1, 5]
    # The deeper the branch goes along, the longer the agreement.
    assert (
        found[3, grandchild].confidences[0] > found[3, child].confidences[0] > found[3, other].confidences[0]
    )


def test_committed_tokens_are_learnt_and_dead_branches_are_not() -> None:
    drafter, teller = NgramDrafter(), Teller(1, Sampling())
    teller.begin([1, 2, 3])
    right, wrong = teller.add(teller.root, 7), teller.add(teller.root, 8)
    below = teller.add(wrong, 9)
    assert len(drafted(drafter, (teller, [teller.root, right, wrong]))) == 3
    teller.commit(right)
    assert drafted(drafter, (teller, [below])) == {}  # its parent is dead
    miss = teller.add(right, 2)
    teller.commit(miss)
    assert drafted(drafter, (teller, [miss]))[1, miss].tokens == (3,)
    seven = teller.add(miss, 3)
    assert drafted(drafter, (teller, [seven]))[1, seven].tokens == (7,)


def test_a_path_node_that_was_skipped_is_waited_for() -> None:
    drafter, teller = NgramDrafter(), Teller(1, Sampling())
    teller.begin([1, 2, 3, 1])
    drafted(drafter, (teller, [teller.root]))
    for token in (2, 3, 1):  # three tokens at once, none of them drafted
        teller.commit(teller.add(teller.root, token))
    part = teller.part([teller.root])  # the two before it come later
    (proposal,) = drafter.draft(segment(part), 4)
    assert (proposal.node, proposal.tokens) == (teller.root, ())
    child = teller.add(teller.root, 2)
    found = drafted(drafter, (teller, [child]))
    assert found[1, child].tokens[0] == 3


def test_turns_requests_and_releases_are_kept_apart() -> None:
    drafter = NgramDrafter(context=500)
    first, second = Teller(1, Sampling()), Teller(2, Sampling())
    first.begin([1, 2, 3, 1])
    second.begin([1, 5, 3, 1])
    found = drafted(drafter, (first, [first.root]), (second, [second.root]))
    assert (found[1, first.root].tokens, found[2, second.root].tokens) == ((2,), (5,))
    stale = first.part([first.add(first.root, 3)])
    first.begin([1, 2, 9, 1], keep=2)
    found = drafted(drafter, (first, [first.root]))
    assert found[1, first.root].tokens == (2,)
    two = first.add(first.root, 2)
    assert drafted(drafter, (first, [two]))[1, two].tokens == (9,)
    assert drafter.draft(segment(stale), 4) == ()
    drafter.release(Release(request=1))
    assert list(drafter._requests) == [2]
    assert (drafter.context, drafter.captures, drafter.weight_bytes) == (500, (), 0)


def test_what_no_head_sends_is_refused() -> None:
    drafter, teller = NgramDrafter(), Teller(1, Sampling())
    teller.begin([1, 2])
    teller.given.update(teller.path)
    teller.begin([1, 2, 3], keep=1)
    with pytest.raises(PeerError, match="nothing of it is held"):
        drafted(drafter, (teller, [teller.root]))
    other = Teller(2, Sampling())
    other.begin([1, 2])
    drafted(drafter, (other, [other.root]))
    for _ in range(2):
        other.commit(other.add(other.root, 3))
    other.told = 3
    with pytest.raises(PeerError, match="gap"):
        drafted(drafter, (other, [other.root]))


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
