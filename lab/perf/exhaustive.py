"""Small mixes of devices, planned and tried exhaustively: is the plan the best of all that could have been
chosen?

All orders of all subsets, all places of the head, all splits that fit, with and without guesses, in all
allowed precisions, are rated by the planner's own formula. So this says of the search that it misses nothing,
and of the formula nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from flowspec.plan.memory import weights_of
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.planner import DoesNotFit, make_plan
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import eagle_shape, find_shape
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, site
from flowspec.plan.timing import LinkSpec

BOARDS = ("jetson-orin-nano", "raspberry-pi-5", "old-laptop", "raspberry-pi-4")
SHAPE = "llama-2-7b"
LAYERS = 6
NEARLY = 0.98
"""A plan that has such a share of the best rate is good: of those within 1% it takes the one of fewest
devices, and among the splits of an order it chooses by the formula alone, uncorrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A small mix: how many splits there are, the best one's rate and the plan's (0 where nothing fits)."""

    mix: int
    devices: int
    splits: int
    best_tokens_per_s: float
    tokens_per_s: float

    @property
    def is_best(self) -> bool:
        return self.tokens_per_s >= NEARLY * self.best_tokens_per_s


def small_request(number: int) -> PlanRequest:
    """Two or three devices of any kind, of which some hold few layers, with any links, and a model of six
    layers."""
    chance = random.Random(number)
    shape = replace(find_shape(SHAPE), name="six", layers=LAYERS)
    boards = chance.choices(BOARDS, k=chance.choice((2, 3)))
    sites = tuple(
        site(f"{at}-{board}", find_profile(board), int(chance.uniform(2, 9) * 1e9))
        for at, board in enumerate(boards)
    )
    links = {
        frozenset(pair): LinkSpec(
            bandwidth_mbps=chance.choice((20, 100, 1000)), delay_s=chance.choice((0.0005, 0.02))
        )
        for pair in combinations([each.name for each in sites], 2)
    }
    return PlanRequest(
        sites=sites,
        network=Network(default=LinkSpec(bandwidth_mbps=1000, delay_s=0.0005), pairs=links),
        shape=shape,
        weights=weights_of(shape),
        precisions=("float16",),
        drafter=PlannedDrafter(
            name="eagle", shape=eagle_shape(shape), acceptance=chance.choice((0.3, 0.635, 0.8))
        ),
        users=chance.choice((1, 1, 3)),
    )


def all_rates(request: PlanRequest) -> Iterator[float]:
    """The rate of everything that could be chosen."""
    partition = Partition(request)
    for count in range(1, min(len(request.sites), request.shape.layers) + 1):
        for order in permutations(request.sites, count):
            for head in request.heads:
                for precision in request.precisions:
                    for guesses in (False, request.drafter is not None):
                        yield from _splits(
                            partition,
                            Arrangement(order=order, head=head, precision=precision, guesses=guesses),
                        )


def _splits(partition: Partition, arrangement: Arrangement) -> Iterator[float]:
    if not partition.head_fits(arrangement):
        return
    room = partition.room(arrangement)
    for layers in compositions(partition.request.shape.layers, len(room)):
        if all(some <= most for some, most in zip(layers, room, strict=True)):
            yield partition.rated(arrangement, layers).forecast.tokens_per_s


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share `total` out to so many places, at least one to each."""
    for bars in combinations(range(1, total), parts - 1):
        yield tuple(end - start for start, end in zip((0, *bars), (*bars, total), strict=True))


def compare(number: int) -> Compared:
    """Plans a small mix, and tries all."""
    request = small_request(number)
    rates = list(all_rates(request))
    try:
        planned = make_plan(request).forecast.tokens_per_s
    except DoesNotFit:
        planned = 0.0
    return Compared(
        mix=number,
        devices=len(request.sites),
        splits=len(rates),
        best_tokens_per_s=max(rates, default=0.0),
        tokens_per_s=planned,
    )
