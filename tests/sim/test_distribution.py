"""Drafting moves no probability: over many seeds, drafted answers have the model's own distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from msgspec import structs

from flowspec.core.head.events import Finished
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Sampling
from flowspec.model.sampler import Sampler
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage, as_prefix
from flowspec.sim.world import Cluster, Handled, World
from tests.nightly import NIGHT, nightly
from tests.pipeline import ask

VOCABULARY = 6
LANGUAGE = HashLanguage(VOCABULARY, seed=3, sharpness=0.8)
PROMPT = (4, 2)
PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=1.0, top_k=4, top_p=0.85)
QUALITY = 0.7
CHANCE_MIN = 1e-4
"""A true distribution fails with this probability; the seeds of a day are fixed, so that a run of it passes
always or never."""


def answers(sampling: Sampling, first_seed: int, count: int) -> tuple[Counter[tuple[int, ...]], int]:
    """Two drafted tokens for each of `count` seeds, one answer after another in one world; and how many were
    drafted right.

    Each answer is a new turn of one dialogue, so the prompt's last token is all that is run again.
    """
    stage = DeviceSpec(curve=Curve(base_s=0.01))
    method = partial(Continuous, width=2, batch=1, segment_nodes=2)
    cluster = Cluster(devices=(stage,), method=method, context=16, drafting=Curve(base_s=0.002))
    world = World(cluster, LANGUAGE, [FakeDrafter(LANGUAGE, QUALITY, seed=1)])
    found: Counter[tuple[int, ...]] = Counter()
    followed = 0

    def go_on(handled: Handled) -> None:
        nonlocal followed
        if any(isinstance(command, Finished) for command in handled.commands):
            (answer,) = world.answers.pop(0)
            found[tuple(answer.tokens)] += 1
            # Sooner than a trip: it was under way already.
            followed += answer.times_s[1] - answer.times_s[0] < 0.01
            seed = answer.submit.sampling.seed + 1
            if seed < first_seed + count:
                world.at(
                    world.clock.now_s, replace(answer.submit, sampling=structs.replace(sampling, seed=seed))
                )

    world.on_event, world.checks = go_on, False
    world.at(0.0, ask(0, PROMPT, 2, sampling=structs.replace(sampling, seed=first_seed)))
    world.run()
    return found, followed


def probabilities(prefix: tuple[int, ...], sampling: Sampling) -> np.ndarray:
    """The exact distribution of the next token, `[vocabulary]`."""
    logits = LANGUAGE.logits(as_prefix(prefix))
    sampler = Sampler(sampling, VOCABULARY)
    kept = sampler.filtered(sampler.shaped(logits))
    weights = np.zeros(VOCABULARY)
    weights[kept] = np.exp(logits[kept].astype(np.float64) / sampling.temperature)
    return weights / weights.sum()


def chi_square(counts: Mapping[int, int], expected: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare tokens count as one, and what has probability 0 must
    not occur at all."""
    total = sum(counts.values())
    seen = np.array([counts.get(token, 0) for token in range(len(expected))])
    assert not seen[expected == 0].any(), "a token that the filters leave out"
    is_rare = expected * total < 5
    seen = np.array([*seen[~is_rare], seen[is_rare].sum()])
    wanted = total * np.array([*expected[~is_rare], expected[is_rare].sum()])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def chance(statistic: float, freedom: int) -> float:
    """The probability that chi-square is larger."""
    if freedom == 0:
        return float(statistic == 0)
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sampling", "count"),
    [(PLAIN, nightly(2_000, 8_000)), (FILTERED, nightly(500, 2_000))],
    ids=["plain", "filtered"],
)
def test_drafted_answers_have_the_models_distribution(sampling: Sampling, count: int) -> None:
    found, followed = answers(sampling, NIGHT * 10**4, count)
    assert sum(found.values()) == count
    assert followed > 0.3 * count, "the drafts were of use"
    first: Counter[int] = Counter()
    for tokens, times in found.items():
        first[tokens[0]] += times
    assert chance(*chi_square(first, probabilities(PROMPT, sampling))) > CHANCE_MIN
    for token in first:
        after = {tokens[1]: times for tokens, times in found.items() if tokens[0] == token}
        assert chance(*chi_square(after, probabilities((*PROMPT, token), sampling))) > CHANCE_MIN
    if sampling == PLAIN:
        other = np.exp(FakeDrafter(LANGUAGE, QUALITY, seed=1).logits(as_prefix(PROMPT)).astype(np.float64))
        assert chance(*chi_square(first, other / other.sum())) < CHANCE_MIN / 1000, (
            "the test would see the drafter's distribution"
        )
