"""Tokens per second of `continuous` and of plain decoding, foretold from what a slot and a trip of a pipeline
take.

The formula is that of `docs/methods.md`: a token takes `m (L(n) - tau(n)) + tau(n) / S`, where n nodes
go into a slot that takes tau(n), S tokens come of it, and m = 1 - rho is the share of tokens that were not in
flight when they were known. What n, S and m are is the method's doing. It is taken to choose n, and by how
many levels y a slot takes the tree further, as well as it can. Then S is the mean number of levels until one
is missed, `(1 - (1 - m)^y) / m`, and m follows from how wide the tree is (n / y nodes a level) and how many
levels D it is ahead of what is known (some for each further slot in flight):

    m = (1 - a) exp(-c a^p ln(w n/y)^q D^-r)        with the drafter's acceptance a

The form is that of the trees of `bench.synthetic` (computed apart, by beam search); the constants were
fitted to answers of the simulator. `docs/architecture.md` tells how, and how far off the formula is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Nodes of a slot that are tried."""
LEVELS: F64 = np.geomspace(0.15, 12, 20)
"""Levels of the tree that a slot adds (y)."""
HEAD_S = 0.0005
"""What the head spends on an event, as in `bench.config`."""

SHARPNESS = 1.956
ACCEPTANCE_POWER = 1.436
WIDTH_POWER = 1.392
WIDTH_FACTOR = 3.574
DEPTH_POWER = 2.037
FLIGHT_DEPTH = 0.2368
SLOT_DEPTH = 0.7018
LEAST = 0.04708
PASS_LEVELS = 1.151
MISSED_PASS = 0.653
MISSED_TRIP = 1.141
BUSY_S = 0.001084
"""Fitted to simulations; `_missed` and `seconds_per_token` say what each is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessing:
    """A drafter: the share of its best guesses that are right, and the seconds of a pass over a few nodes.

    Arrays are of many drafters, and broadcast against `[..., levels]`.
    """

    acceptance: float | F64
    pass_s: float | F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is foretold for some users together: `nodes` in a slot, and what explains the rate."""

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
    return np.asarray((1 - acceptance) * np.maximum(np.exp(-sharp * bits * depth**-DEPTH_POWER), LEAST))


def seconds_per_token(
    slot_s: F64,
    trip_s: F64,
    nodes: F64,
    guessing: Guessing,
    share: float | F64 = 1.0,
) -> tuple[F64, F64, F64]:
    """One user's seconds per token, with the levels and the misses they come of; all of the shape of the
    arguments, which broadcast.

    A slot of `nodes` of this user takes `slot_s`, a trip `trip_s`; the user has one in every `share` slots. A
    level costs the drafter most of a pass, and a miss a part of one.
    """
    slot_s, trip_s, nodes, share = (
        np.asarray(each, dtype=np.float64)[..., None] for each in (slot_s, trip_s, nodes, share)
    )
    every_s = np.maximum(np.maximum(slot_s * share, PASS_LEVELS * LEVELS * guessing.pass_s), BUSY_S)
    ahead = FLIGHT_DEPTH * LEVELS * np.maximum(trip_s / every_s - 1, 0) + SLOT_DEPTH * np.maximum(
        LEVELS - 1, 0
    )
    missed = _missed(guessing.acceptance, nodes / LEVELS, 1 + ahead)
    tokens = (1 - (1 - missed) ** LEVELS) / missed
    waiting_s = np.maximum(MISSED_TRIP * trip_s - every_s, 0) + MISSED_PASS * guessing.pass_s
    time_s = np.where(nodes < LEVELS, np.inf, missed * waiting_s + every_s / tokens)
    at: Any = time_s.argmin(axis=-1)[..., None]
    found = [np.take_along_axis(each, at, -1)[..., 0] for each in np.broadcast_arrays(time_s, LEVELS, missed)]
    return found[0], found[1], found[2]


def guessing_rates(
    slot_s: F64, trip_s: F64, nodes: F64, guessing: Guessing, users: int
) -> tuple[F64, F64, F64]:
    """Tokens per second of all users together, levels and misses; a slot's nodes are of one user or shared by
    several."""
    found: tuple[F64, F64, F64] | None = None
    # A pass takes nodes of several users, but a level of each wants about half of its batch.
    guessing = Guessing(acceptance=guessing.acceptance, pass_s=guessing.pass_s * max(1, users / 2))
    # With several users each has some nodes in every so many slots: all of a slot's now and then, or a few in
    # each.
    for own in sorted({1.0, 2.0, 4.0, 8.0, 16.0, 32.0}) if users > 1 else (None,):
        mine = nodes if own is None else np.minimum(nodes, own)
        share = mine * users / nodes
        time_s, levels, missed = seconds_per_token(slot_s, trip_s, mine, guessing, np.maximum(share, 1))
        rate = np.where(share < 1, 0, users / time_s)
        if found is None:
            found = (rate, levels, missed)
        else:
            better = rate > found[0]
            found = tuple(
                np.where(better, new, old) for new, old in zip((rate, levels, missed), found, strict=True)
            )  # type: ignore[assignment]
    assert found is not None
    return found


def plain_rates(slot_s: F64, trip_s: F64, nodes: F64, users: int) -> F64:
    """Tokens per second of all users together without guesses: one node of each user is under way, `nodes`
    share a slot."""
    return np.asarray(
        np.where(nodes > users, 0, np.minimum(users / (trip_s + HEAD_S), nodes / np.maximum(slot_s, HEAD_S)))
    )
