"""A look-up is asked with the whole text of a node, through commits, misses and rewinds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Sampling
from flowspec.draft.lookup import LookUp, LookUpDrafter
from flowspec.errors import PeerError
from tests.draft.trees import Teller, segment

VOCABULARY = 50


class Last(LookUp):
    """Proposes what tells the whole text that it was asked with, and the token after the last one."""

    def propose(self, branch: Sequence[int], width: int) -> list[tuple[int, float]]:
        whole = (*self.tokens, *branch)
        return [(told(whole), 0.75), (whole[-1] + 1, 0.25)][:width]


def told(text: Sequence[int]) -> int:
    """A number for a text."""
    return hash(tuple(text)) % limits.VOCABULARY_MAX


def drafted(
    drafter: LookUpDrafter, *tellers_nodes: tuple[Teller, list[int]]
) -> dict[tuple[int, int], Proposal]:
    found = drafter.draft(
        segment(*(teller.part(nodes, committed=teller.missing()) for teller, nodes in tellers_nodes)), 4
    )
    return {(proposal.request, proposal.node): proposal for proposal in found}


def check(drafter: LookUpDrafter, teller: Teller, nodes: list[int]) -> None:
    found = drafted(drafter, (teller, nodes))
    assert list(found) == [(teller.request, node) for node in nodes]
    for (_, node), proposal in found.items():
        text = teller.text(node)
        assert proposal.tokens == (told(text), text[-1] + 1)
        assert proposal.confidences == (0.75, 0.25)


@pytest.mark.parametrize("seed", range(5))
def test_every_node_is_asked_about_with_its_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    drafter, teller = LookUpDrafter(Last), Teller(1, Sampling())
    teller.begin([rng.randrange(VOCABULARY) for _ in range(20)])
    living = [teller.root]
    check(drafter, teller, living)
    for _ in range(60):
        if rng.random() < 0.1:
            keep = rng.randint(1, teller.filled)
            kept = [teller.tokens[node] for node in teller.path[:keep]]
            teller.begin([*kept, *(rng.randrange(VOCABULARY) for _ in range(5))], keep)
            living = [teller.root]
            check(drafter, teller, living)
        grown = [teller.add(rng.choice(living), rng.randrange(VOCABULARY)) for _ in range(rng.randint(1, 4))]
        check(drafter, teller, grown)
        living += grown
        if rng.random() < 0.5:
            below = [node for node in living if teller.parents[node] == teller.root]
            is_known = bool(below) and rng.random() < 0.7
            teller.commit(
                rng.choice(below) if is_known else teller.add(teller.root, rng.randrange(VOCABULARY))
            )
            living = [node for node in living if teller.is_living(node)]
            if teller.root not in living:
                living = [teller.root]
                check(drafter, teller, living)


def test_what_may_not_be_drawn_is_not_proposed_and_skipped_nodes_are_waited_for() -> None:
    drafter = LookUpDrafter(Last)
    for request, (suppressed, left) in enumerate([((8,), 1), ((told((1, 7)),), 1), ((9,), 2)], 1):
        teller = Teller(request, Sampling(suppress_tokens=suppressed))
        teller.begin([1, 7])
        proposal = drafted(drafter, (teller, [teller.root]))[request, teller.root]
        assert len(proposal.tokens) == len(proposal.confidences) == left
        assert not set(proposal.tokens).intersection(suppressed)
    drafter, teller = LookUpDrafter(Last), Teller(1, Sampling())
    teller.begin([1, 2, 3, 1])
    drafted(drafter, (teller, [teller.root]))
    for token in (2, 3, 1):  # three tokens at once, none of them drafted
        teller.commit(teller.add(teller.root, token))
    part = teller.part([teller.root])  # the two before it come later
    (proposal,) = drafter.draft(segment(part), 4)
    assert (proposal.node, proposal.tokens) == (teller.root, ())
    check(drafter, teller, [teller.add(teller.root, 2)])


def test_turns_requests_and_releases_are_kept_apart() -> None:
    drafter = LookUpDrafter(Last, context=500)
    first, second = Teller(1, Sampling()), Teller(2, Sampling())
    first.begin([1, 2, 3, 1])
    second.begin([1, 5, 3, 1])
    found = drafted(drafter, (first, [first.root]), (second, [second.root]))
    assert [found[1, first.root].tokens[0], found[2, second.root].tokens[0]] == [
        told([1, 2, 3, 1]),
        told([1, 5, 3, 1]),
    ]
    stale = first.part([first.add(first.root, 3)])
    first.begin([1, 2, 9, 1], keep=2)
    check(drafter, first, [first.root])
    assert drafter.draft(segment(stale), 4) == ()
    drafter.release(Release(request=1))
    assert list(drafter._requests) == [2]
    assert (drafter.context, drafter.captures, drafter.weight_bytes) == (500, (), 0)


def test_what_no_head_sends_is_refused() -> None:
    drafter, teller = LookUpDrafter(Last), Teller(1, Sampling())
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
