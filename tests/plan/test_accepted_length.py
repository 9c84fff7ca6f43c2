"""Published accepted lengths as shares of right guesses, held to drafters that are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from flowspec.plan.accepted_length import EAGLE_2_LENGTHS, EAGLE_2_TREE, chain_length, share_right

CONCENTRATION = 2.0
"""As `bench.synthetic`: the sum of the Beta distribution's parameters."""


@pytest.mark.parametrize("guesses", [1, 2, 3, 7])
@pytest.mark.parametrize("share", [0.2, 0.635, 0.9])
def test_a_share_is_that_of_the_chain_that_accepts_so_much(share: float, guesses: int) -> None:
    """Rounds are drawn: each guess is right by chance, and a wrong one ends its round."""
    assert share_right(chain_length(share, guesses), guesses) == pytest.approx(share, abs=1e-9)
    right = np.random.default_rng(guesses).random((40_000, guesses)) < share
    accepted = 1 + np.logical_and.accumulate(right, axis=1).sum(axis=1)
    assert share_right(float(accepted.mean()), guesses) == pytest.approx(share, abs=0.01)


def test_what_cannot_be_told_is_none() -> None:
    assert share_right(2.0, None) is None
    assert share_right(2.0, "a tree of some other kind") is None
    for length, guesses in ((1.0, 3), (4.0, 3), (4.5, 3)):
        assert share_right(length, guesses) is None, "no chain of three accepts that"
    assert share_right(7.0, EAGLE_2_TREE) is None
    assert share_right(1.5, EAGLE_2_TREE) is None


def tree_length(chance: np.random.Generator, share: float) -> float:
    """What EAGLE-2's tree of a synthetic drafter accepts: the values of its nodes, and the target's token."""
    beam, values = np.ones(1), []
    for _ in range(6):
        sure = chance.beta(CONCENTRATION * share, CONCENTRATION * (1 - share), len(beam)).clip(0.005, 0.995)
        children = (beam * sure)[:, None] * (1 - sure)[:, None] ** np.arange(10)
        values.append(children.ravel())
        beam = np.sort(children.ravel())[-10:]
    return 1 + float(np.sort(np.concatenate(values))[-59:].sum())


@pytest.mark.parametrize(("share", "length"), EAGLE_2_LENGTHS)
def test_the_lengths_of_eagle_2s_tree_are_those_of_trees_that_are_drawn(share: float, length: float) -> None:
    chance = np.random.default_rng(7)
    drawn = [tree_length(chance, share) for _ in range(3000)]
    assert length == pytest.approx(np.mean(drawn), abs=0.01 + 4 * np.std(drawn) / len(drawn) ** 0.5)
    assert share_right(length, EAGLE_2_TREE) == pytest.approx(share)


def test_what_eagle_2_publishes_gives_the_share_that_its_testbed_was_set_to() -> None:
    """Of Llama-2-chat-7B; see configs/experiments/paper.toml."""
    assert share_right(4.6, EAGLE_2_TREE) == pytest.approx(0.635, abs=0.01)
