"""Tokens per second of `continuous` and of plain decoding, predicted from what a slot and a trip of a
pipeline take.

The formula is that of `docs/methods.md`, and a drafter: a token takes `m (L(n) - tau(n) + k d) + tau(n) / S`,
where n nodes go into a slot that takes tau(n), S tokens come of it, and m = 1 - rho is the share of tokens
that were not in flight when they were known. The drafter gets such a token at once, and what follows
from it waits for k passes of d seconds: for some as many as a slot has levels, since a correction has
patience (`core.methods.patience`) where a slot of its own would be longer. What n, S and m are is the
method's doing. It is taken to choose n, and by how many levels y a slot takes the tree further, as well as it
can. Then S is the mean number of levels until one is missed, `(1 - (1 - m)^y) / m`, and m follows from how
wide the tree is (n / y nodes a level) and how many levels D it is ahead of what is known (some for each
further slot in flight):

    m = (1 - a) exp(-c a^p ln(w n/y)^q D^-r)        with the drafter's acceptance a

The form is that of the trees of `bench.drafters` (computed apart, by beam search); the constants were
fitted to answers of the simulator. What the formula then lacks is taken from `simulated_cases.csv`: the
logarithm of simulated by predicted rates of some hundred pipelines, from which it is interpolated (kriging:
Gaussian process regression, Rasmussen and Williams 2006, eq. 2.25). `docs/design/planning.md` tells how far
off the forecast is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Nodes of a slot that are tried."""
LEVELS: F64 = 2.0 ** (np.arange(-8, 12) / 3)
"""Levels of the tree that a slot adds (y), one among them: all that a single row can add."""
HEAD_S = 0.0005
"""What the head spends on an event, as in `bench.experiment`."""
CASES = Path(__file__).with_name("simulated_cases.csv")
"""A row for each simulated pipeline: its `Rated.features`, and what the formula's logarithm lacked."""
MANY_ROWS = 12
"""What so many rows cost in relation to one tells boards apart that pay for rows."""
GAINS = (-0.7, 1.5)
"""Logarithms of what guessing gains between which gains differ."""
SPREAD_MIN = 0.05
"""Features that differ by less among the cases count as if they did by so much."""
REACH, NOISE = 1.5, 0.3
"""How far cases tell of each other, in standard deviations of the features; and the variance of what chance
and the features do not say, as a share of what they say."""


# Fitted to simulations.
SHARPNESS, ACCEPTANCE_POWER, LEAST_MISSED = 1.0435, 0.3863, 0.0237
WIDTH_POWER, WIDTH_FACTOR, DEPTH_POWER = 0.5625, 1.0061, 0.4898
FLIGHT_DEPTH, SLOT_DEPTH = 0.1427, 0.6658
"""Levels that a tree is ahead, for each level of a slot in flight and of a slot itself."""
PASS_LEVELS, MISSED_PASS = 0.8851, 0.4801
"""Passes of the drafter for a level, and of those that a correction waits for."""
BUSY_S = 0.0015
"""Of the head, for each slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted for some users together: `nodes` in a slot, and what explains the rate."""

    tokens_per_s: float
    nodes: int
    slot_s: float
    trip_s: float
    missed: float
    levels: float


def _missed(acceptance: float | F64, width: F64, depth: F64) -> F64:
    """The chance that a token is none of `width` nodes at its level, `depth` levels below the last that is
    known."""
    sharp = SHARPNESS * acceptance**ACCEPTANCE_POWER
    bits = np.log(np.maximum(WIDTH_FACTOR * width, 1)) ** WIDTH_POWER
    return np.asarray(
        (1 - acceptance) * np.maximum(np.exp(-sharp * bits * depth**-DEPTH_POWER), LEAST_MISSED)
    )


def seconds_per_token(
    slot_s: F64,
    trip_s: F64,
    nodes: F64,
    acceptance: float | F64,
    pass_s: float | F64,
    share: float | F64 = 1.0,
) -> tuple[F64, F64, F64]:
    """One user's seconds per token, with the levels and the misses they come of; all of the shape of the
    arguments, which broadcast, those of the drafter against `[..., levels]`.

    A slot of `nodes` of this user takes `slot_s`, a trip `trip_s`; the user has one in every `share` slots. A
    level costs the drafter about a pass of `pass_s`. After a miss the tree begins anew: the correction, or
    what follows it, waits for a part of the passes that a slot's levels take. The head is busy with each
    slot, too.
    """
    slot_s, trip_s, nodes, share = (
        np.asarray(each, dtype=np.float64)[..., None] for each in (slot_s, trip_s, nodes, share)
    )
    every_s = np.maximum(slot_s * share, PASS_LEVELS * LEVELS * pass_s) + BUSY_S
    trip_s = trip_s + BUSY_S
    flight, slot = np.maximum(trip_s / every_s - 1, 0), np.maximum(LEVELS - 1, 0)
    ahead = FLIGHT_DEPTH * LEVELS * flight + SLOT_DEPTH * slot
    missed = _missed(acceptance, nodes / LEVELS, 1 + ahead)
    tokens = (1 - (1 - missed) ** LEVELS) / missed
    drafting_s = MISSED_PASS * pass_s * np.maximum(LEVELS, 1)
    waiting_s = np.maximum(trip_s - every_s, 0) + drafting_s
    time_s = np.where(nodes < LEVELS, np.inf, missed * waiting_s + every_s / tokens)
    at: Any = time_s.argmin(axis=-1)[..., None]
    found = [np.take_along_axis(each, at, -1)[..., 0] for each in np.broadcast_arrays(time_s, LEVELS, missed)]
    return found[0], found[1], found[2]


def guessing_rates(
    slot_s: F64, trip_s: F64, nodes: F64, acceptance: float | F64, pass_s: float | F64, users: int
) -> tuple[F64, F64, F64]:
    """Tokens per second of all users together, levels and misses; a slot's nodes are of one user or shared by
    several."""
    pass_s = pass_s * max(1, users / 2)  # takes several users' nodes, but a level of each wants half a batch
    found = np.full((3, len(nodes)), -1.0)
    # With several users each has some nodes in every so many slots: all of a slot's now and then, or a few in
    # each.
    for own in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0) if users > 1 else (np.inf,):
        mine = np.minimum(nodes, own)
        share = mine * users / nodes
        time_s, levels, missed = seconds_per_token(
            slot_s, trip_s, mine, acceptance, pass_s, np.maximum(share, 1)
        )
        rate = np.where(share < 1, 0, users / time_s)
        found = np.where(rate > found[0], (rate, levels, missed), found)
    return found[0], found[1], found[2]


def plain_rates(slot_s: F64, trip_s: F64, nodes: F64, users: int) -> F64:
    """Tokens per second of all users together without guesses: one node of each user is under way, `nodes`
    share a slot."""
    return np.asarray(
        np.where(nodes > users, 0, np.minimum(users / (trip_s + HEAD_S), nodes / np.maximum(slot_s, HEAD_S)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """Pipelines that guess, and what the formula says of them; arrays are `[pipelines]`.

    A slot and a trip of the `nodes` that the formula takes; slots of one row and of `MANY_ROWS`; and the
    rates of `plain` decoding there, for which no drafter is in a stage's way.
    """

    rates: F64
    levels: F64
    missed: F64
    nodes: F64
    slot_s: F64
    trip_s: F64
    slot_of_one_s: F64
    slot_of_many_s: F64
    plain: F64
    acceptance: float | F64
    pass_s: F64

    @property
    def best_rates(self) -> F64:
        """The formula's rates, or those of plain decoding where that is faster: `continuous` does so, too."""
        return np.maximum(self.rates, self.plain)

    @property
    def features(self) -> F64:
        """What decides how far off the formula is, `[pipelines, features]`."""
        acceptance = np.broadcast_to(np.asarray(self.acceptance, dtype=np.float64), self.rates.shape)
        features = (
            np.log(acceptance / (1 - acceptance)),
            np.log(self.trip_s / self.slot_s),
            np.log(self.slot_of_many_s / self.slot_of_one_s),
            np.log1p(self.pass_s / self.slot_s),
            np.log(self.nodes),
            np.log(self.levels),
            np.log(self.missed),
            np.log(self.slot_s),
            np.clip(np.log(self.rates / self.plain), *GAINS),
        )
        return np.stack(features, axis=-1)

    def corrected(self) -> F64:
        """Rates with what simulated cases say; guessing that loses by the formula wins nothing by them."""
        rates = self.best_rates * correction().factors(self.features)
        return np.where(self.rates > self.plain, rates, np.minimum(rates, self.plain))


@dataclass(frozen=True, slots=True)
class Correction:
    """What simulated cases say of a pipeline that the formula predicts."""

    middle: F64
    spread: F64
    cases: F64
    weights: F64
    mean: float

    @classmethod
    def of(cls, features: F64, lacked: F64) -> Correction:
        """From features `[cases, features]` and what the formula's logarithm lacked `[cases]`."""
        middle, spread = features.mean(axis=0), np.maximum(features.std(axis=0), SPREAD_MIN)
        cases, mean = (features - middle) / spread, float(lacked.mean())
        alike = _alike(cases, cases) + NOISE * np.eye(len(cases))
        return cls(middle, spread, cases, np.asarray(np.linalg.solve(alike, lacked - mean)), mean)

    def factors(self, features: F64) -> F64:
        """By what to multiply the formula's rates `[pipelines]`."""
        alike = _alike((features - self.middle) / self.spread, self.cases)
        return np.asarray(np.exp(self.mean + alike @ self.weights))


def _alike(some: F64, others: F64) -> F64:
    squared = (some**2).sum(-1)[:, None] + (others**2).sum(-1) - 2 * some @ others.T
    return np.asarray(np.exp(-np.maximum(squared, 0) / (2 * REACH**2)))


@cache
def correction() -> Correction:
    table = np.loadtxt(CASES, delimiter=",", skiprows=1, dtype=np.float64)
    return Correction.of(table[:, :-1], table[:, -1])
