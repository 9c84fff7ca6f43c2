"""Whether a root that nobody has guessed should wait for the drafter, or go out alone.

Alone it takes a slot, and what the drafter says meanwhile of the tokens after it follows one slot later. If
it waits for a pass, root and guesses share a slot, and a longer trip. Which of the two is faster follows from
when the last right node of an answer's next run departs: from then on both ways know the same tokens after
the same trip. Let `ready_j` be when the drafter has told the j-th level below what is known now, L how many
of these levels turn out right, `t0` and `T0` the slot and the trip of the rows at hand, `t` and `T` those of
usual ones. Having waited for W, slots begin at W:

    D_0(0) = 0              D_0(j) = t0 + t * ceil(max(0, ready_j - t0) / t)
    D_W(0) = W + T - T0     D_W(j) = W + t * ceil(max(0, ready_j - W) / t)

and waiting saves `E[D_0(L) - D_W(L)]`: where the walk ends before the pass's nodes it costs W, where it ends
among them it saves `t0 - W`. The number of stages cancels out, so one rule holds for one device and for many;
in a long pipeline what is saved is a small part of a cycle, and T - T0 is large where a row takes long. Far
levels come at any time within a slot alike, so there the two are equal on average: these are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PASSES_MAX = 12
"""Passes that a root may be foreseen to wait for."""
LEVELS_MAX = 24
ROUNDING = 1e-9
SURE = 0.1
"""What waiting must save, as a share of the time waited: the chances and times are estimates."""
LATE = 1.5
"""A pass that takes so many times as long as usual is waited for no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hope:
    """What a drafter promises for one answer: its next pass is done in `first_s` seconds, each further one
    takes `pass_s`. `reach` is the chance that the walk gets to what that pass is about, `chance` that the
    token after a right node is then among what is said of it."""

    first_s: float
    pass_s: float
    reach: float
    chance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Seconds: the slot of the rows at hand, the slot of usual rows, and how much longer their trip is."""

    alone_s: float
    usual_s: float
    longer_s: float


def gain_s(hopes: Sequence[Hope], others: int, slots: Slots) -> float:
    """The most that waiting for some passes saves, summed over answers, in seconds; 0 where it is not clear
    that it does.

    Roots of the `hopes` would go together, with nodes of `others` that wait for nothing. All of them are as
    late as the segment.
    """
    best = 0.0
    first = min(hopes, key=lambda hope: hope.first_s)
    for passes in range(PASSES_MAX):
        wait_s = first.first_s + passes * first.pass_s
        if wait_s >= slots.alone_s:
            break
        late_s = others * (wait_s + slots.longer_s)
        saved_s = sum(_saved_s(hope, wait_s, slots) for hope in hopes) - late_s
        if saved_s > SURE * wait_s * len(hopes):
            best = max(best, saved_s)
    return best


def _saved_s(hope: Hope, wait_s: float, slots: Slots) -> float:
    """`E[D_0(L) - D_W(L)]`."""
    saved_s = -(wait_s + slots.longer_s) * (1 - hope.reach * hope.chance)
    ends = hope.reach * (1 - hope.chance)
    for level in range(LEVELS_MAX):
        ends *= hope.chance
        ready_s = hope.first_s + level * hope.pass_s
        alone_s = slots.alone_s + _until_s(ready_s - slots.alone_s, slots.usual_s)
        saved_s += ends * (alone_s - wait_s - _until_s(ready_s - wait_s, slots.usual_s))
    return saved_s


def _until_s(ready_s: float, slot_s: float) -> float:
    """When the first slot from 0 on begins that is not before `ready_s`."""
    return slot_s * math.ceil(max(0.0, ready_s) / slot_s - ROUNDING)
