"""An EAGLE drafter equals its head run over each node's path, with the target's features where they are known
by then."""

from __future__ import annotations

import pytest
import torch

from flowspec.core.protocol.messages import Release
from tests.draft.mirrors import WIDTH, Case, check, make_case
from tests.draft.trees import segment


@pytest.fixture(scope="module", params=["eagle", "eagle3", "two layers"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("case"))


def test_a_chain_of_guesses_that_grew_too_long_is_made_again_from_the_truth(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.draft.eagle.SLACK", 3)
    drafter, mirror = case.new_drafter(), case.new_mirror()
    teller = mirror.teller
    teller.begin([5, 6, 7])
    mirror.tell(drafter, teller.path[:2])
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:2])), WIDTH)
    mirror.expected(teller.path[1:])
    guesses = [teller.root]
    for token in range(20, 27):
        guesses.append(teller.add(guesses[-1], token))
        drafter.draft(segment(teller.part([guesses[-1]])), WIDTH)
        mirror.expected([guesses[-1]])
    beside = teller.add(guesses[5], 40)
    for number, node in enumerate(guesses[1:4], 1):
        mirror.tell(drafter, [teller.root])
        teller.commit(node)
        new = [teller.add(guesses[-1], 30 + number), *([beside] if number == 2 else [])]
        guesses.append(new[0])
        found = drafter.draft(segment(teller.part(sorted(new))), WIDTH)
        again = sorted([*guesses[4:-1], beside]) if number == 3 else []
        expected = mirror.expected([*again, *sorted(new)])
        if again or not mirror.head.config.num_hidden_layers > 1:  # else as in the test of random trees
            check(mirror, found, expected)
        assert {each.node for each in found} == {node, *again, *new}


def test_a_turn_that_keeps_less_than_the_target_does_still_knows_its_features(case: Case) -> None:
    drafter, mirror = case.new_drafter(), case.new_mirror()
    teller = mirror.teller
    teller.begin([5, 6, 7, 8])
    mirror.tell_path(drafter)
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:-1])), WIDTH)
    for token in (9, 10, 11):  # the end of an answer, of which the drafter was never told
        mirror.tell(drafter, [teller.root])
        teller.commit(teller.add(teller.root, token))
    old = list(teller.path)
    teller.begin([5, 6, 7, 8, 9, 10, 1], keep=4)
    # The target keeps two tokens more than the drafter: nodes of the last turn are brought to it in this one.
    for position in (4, 5):
        teller.path[position] = old[position]
    last = teller.path[6]
    teller.parents[last] = old[5]
    found = drafter.draft(segment(teller.part([last], committed=old[4:6])), WIDTH)
    check(mirror, found, mirror.expected([*teller.path[1:4], *old[4:6], last]))
    assert sorted(drafter._truths[1]) == old[:6]


def test_nothing_is_kept_that_is_not_needed(case: Case) -> None:
    drafter, mirror = case.new_drafter(), case.new_mirror()
    teller = mirror.teller
    teller.begin(list(range(1, 101)))
    mirror.tell(drafter, teller.path)
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:-1])), WIDTH)
    known = drafter._requests[1]
    assert known.runs == {}  # all their features are the target's
    for _ in range(20):
        guesses = [teller.add(teller.root, token) for token in (3, 4)]
        drafter.draft(segment(teller.part(guesses)), WIDTH)
        assert len(known.runs) <= 4
        teller.commit(guesses[0])
        mirror.tell_path(drafter)
    assert known.node_at.keys() == {run.slot for run in known.runs.values()}
    assert len(drafter._truths[1]) == len(teller.path) - 1
    teller.begin([1, 2, 3, 4], keep=3)
    new = teller.root
    mirror.tell(drafter, [new])  # a feature of the new turn, before the drafter knows of it
    drafter.draft(segment(teller.part([new])), WIDTH)
    assert sorted(drafter._truths[1]) == [*teller.path[:3], new]
    drafter.take_features(1, 0, [999], torch.zeros(1, mirror.head.feature_width))  # of the turn before
    assert 999 not in drafter._truths[1]
    drafter.release(Release(request=1))
    drafter.take_features(1, 1, [999], torch.zeros(1, mirror.head.feature_width))
    assert (drafter._requests, drafter._truths) == ({}, {})
    many = drafter._truths_max + 50
    drafter.take_features(2, 0, range(many), torch.zeros(many, mirror.head.feature_width))
    assert list(drafter._truths[2]) == list(range(50, many))
