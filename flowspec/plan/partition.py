"""The best layers for devices in a given order: exact, by what the slowest stage and a whole trip take.

A stage's time grows with its layers in a straight line. So if one stage with some layers is to be the
slowest, the fastest trip gives each other device one layer and the rest to those that are quickest with a
layer, as far as the slowest and memory allow. Trying every stage with every number of layers as the slowest
finds the best of all splits, for any objective that grows with the trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flowspec.plan.cost import drafter_curve, head_curve, layers_curve, row_bytes
from flowspec.plan.forecast import F64, MANY_ROWS, NODES, Forecast, Rated, guessing_rates, plain_rates
from flowspec.plan.memory import PROCESS_BYTES, SliceMemory
from flowspec.plan.sites import PlanRequest, Site
from flowspec.plan.timing import LinkSpec

Ints = npt.NDArray[np.int64]

NODES_STEP, SPLITS_QUICK = 3, 384
"""A quick look takes every so manieth number of nodes, and so many splits."""
ALIKE = 1e-6
"""Rates that differ by no more than this share are the same."""
HEADER_BYTES, NODE_BYTES = 200, 40
"""Of a segment's message beside hidden states, about."""
SHARED_SLOWDOWN = 2.0
"""A stage beside the drafter: in simulations a drafter computes nearly always, and both get half of the
device."""
TYPICAL_PASS_NODES = 8
"""Nodes of a drafter's pass, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Devices in pipeline order, where the head runs (with the drafter, if there are `guesses`), and the
    precision."""

    order: tuple[Site, ...]
    head: Site
    precision: str
    guesses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Arrangement):
    """With the layers of each stage, and what it gives."""

    layers: tuple[int, ...]
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Times:
    """Of an arrangement, for each number of nodes: stage i with k layers takes `fixed_s[:, i] + k *
    layer_s[:, i]`.

    `links_s` is what all links of a trip take, `link_s` how long the slowest is busy. Arrays are `[nodes]` or
    `[nodes, stages]`; of several arrangements they have an axis more in front.
    """

    nodes: F64
    fixed_s: F64
    layer_s: F64
    links_s: F64
    link_s: F64

    def slots_s(self, layers: Ints) -> tuple[F64, F64]:
        """The slowest stage or link, and a trip, for layers `[..., nodes, splits, stages]`; both `[...,
        nodes, splits]`."""
        stages_s = self.fixed_s[..., None, :] + layers * self.layer_s[..., None, :]
        slots_s = np.maximum(stages_s.max(axis=-1), self.link_s[..., None])
        return slots_s, stages_s.sum(axis=-1) + self.links_s[..., None]


class Partition:
    """Splits of one request. Keeps what was computed for single devices and links."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._stages_s: dict[tuple[str, str, bool], F64] = {}
        self._need, self._drafter_bytes = cache(request.stage_memory), cache(request.drafter_bytes)
        self._room = cache(self._room_of)

    # ------------------------------------------------------------------------------------------------ memory

    def stage_need(
        self, arrangement: Arrangement, index: int, layers: int, begin: int | None = None
    ) -> SliceMemory:
        """What a slice of so many layers takes at a place of the order, from `begin` on (None: any)."""
        last = len(arrangement.order) - 1
        return self._need(arrangement.precision, layers, first=index == 0, last=index == last, begin=begin)

    def other_bytes(self, arrangement: Arrangement, place: Site) -> int:
        """What of ours is on a device beside a slice: processes, and at the head the drafter."""
        is_head = place.name == arrangement.head.name
        is_stage = any(place.name == each.name for each in arrangement.order)
        drafter_bytes = self._drafter_bytes(arrangement.precision) if is_head and arrangement.guesses else 0
        return (is_stage + is_head) * PROCESS_BYTES + drafter_bytes

    def room(self, arrangement: Arrangement) -> list[int]:
        """The most layers that the memory of each stage's device holds; negative or 0: not even one."""
        last = len(arrangement.order) - 1
        return [
            self._room(
                arrangement.precision,
                index == 0,
                index == last,
                place.memory_bytes - self.other_bytes(arrangement, place),
            )
            for index, place in enumerate(arrangement.order)
        ]

    def _room_of(self, precision: str, first: bool, last: bool, free: int) -> int:
        """The most layers of a slice that fit into so many bytes."""

        def need(layers: int) -> int:
            return self._need(precision, layers, first=first, last=last).total_bytes

        count = max(0, free - need(0)) // max(need(2) - need(1), 1)
        while count > 0 and need(count) > free:
            count -= 1  # bytes are rounded
        while count < self.request.shape.layers and need(count + 1) <= free:
            count += 1  # layers with a window take less
        return count

    def head_fits(self, arrangement: Arrangement) -> bool:
        """Whether the head's device holds what is not a slice."""
        return self.other_bytes(arrangement, arrangement.head) <= arrangement.head.memory_bytes

    # ------------------------------------------------------------------------------------------------- times

    def _stage_times(self, place: Site, precision: str, guesses: bool) -> F64:
        """Fixed seconds, those of a layer, and those of `lm_head`, by nodes: `[3, nodes]`."""
        key = (place.name, precision, guesses)
        if key not in self._stages_s:
            shape, context, profile = self.request.shape, self.request.typical_context, place.profile
            one, two = (
                layers_curve(profile, shape, precision, count, self.request.cache) for count in (1, 2)
            )
            head, nodes = head_curve(profile, shape, precision), self._nodes(guesses)
            rows = np.array([[curve.seconds(int(n), context) for n in nodes] for curve in (one, two)])
            layer_s, head_s = rows[1] - rows[0], [head.seconds(int(n)) for n in nodes]
            self._stages_s[key] = np.stack([rows[0] - layer_s, layer_s, head_s])
        return self._stages_s[key]

    def _nodes(self, guesses: bool) -> F64:
        """Nodes of a slot that are tried: without guesses no more than users."""
        users = self.request.users
        few = [*(count for count in NODES if count < users), users]
        return np.array(NODES if guesses else few, dtype=np.float64)

    def hops(self, arrangement: Arrangement) -> list[LinkSpec]:
        """Head to first stage, between stages, last stage to head."""
        names = [arrangement.head.name, *(place.name for place in arrangement.order), arrangement.head.name]
        return [self.request.network.between(first, second) for first, second in pairwise(names)]

    def times(self, arrangement: Arrangement) -> Times:
        found = self._times_of([arrangement])
        return Times(found.nodes, found.fixed_s[0], found.layer_s[0], found.links_s[0], found.link_s[0])

    def _times_of(self, arrangements: Sequence[Arrangement], step: int = 1) -> Times:
        """Of several arrangements that have as many stages, and all guesses or none; for every so manieth
        number of nodes."""
        guesses = arrangements[0].guesses
        by_stage = [
            [self._stage_times(place, each.precision, guesses)[:, ::step] for place in each.order]
            for each in arrangements
        ]
        # [arrangements, stages, 3, nodes] to three of [arrangements, nodes, stages]
        fixed_s, layer_s, head_s = np.array(by_stage).transpose(2, 0, 3, 1)
        fixed_s[..., -1] += head_s[..., -1]
        slowdowns = np.array([[self.slowdown(each, place) for place in each.order] for each in arrangements])
        nodes = self._nodes(guesses)[::step]
        hops = [self.hops(each) for each in arrangements]
        sizes = np.array([row_bytes(self.request.shape, each.precision) for each in arrangements])
        has_states = np.arange(len(hops[0])) % (len(hops[0]) - 1) > 0  # not from and to the head
        node_bytes = NODE_BYTES + sizes[:, None, None] * has_states
        transfers_s = np.array([[link.transfer_s(1.0) for link in each] for each in hops])
        busy_s = transfers_s[:, None] * (HEADER_BYTES + nodes[:, None] * node_bytes)
        delays_s = np.array([sum(link.delay_s + link.jitter_s / 2 for link in each) for each in hops])
        return Times(
            nodes=nodes,
            fixed_s=fixed_s * slowdowns[:, None],
            layer_s=layer_s * slowdowns[:, None],
            links_s=busy_s.sum(axis=-1) + delays_s[:, None],
            link_s=busy_s.max(axis=-1),
        )

    def slowdown(self, arrangement: Arrangement, place: Site) -> float:
        """How many times as long a stage or the drafter takes there for what else of ours computes at the
        same time."""
        drafts = arrangement.guesses and self.drafts_on_cores
        if place.shared is None:
            head = arrangement.head.name
            is_both = place.name == head and any(each.name == head for each in arrangement.order)
            return SHARED_SLOWDOWN if drafts and is_both else 1.0
        host, cores = place.shared.host, place.shared.cores
        sharing = [each.shared for each in arrangement.order if each.shared and each.shared.host == host]
        threads = sorted((shared.threads for shared in sharing), reverse=True)
        if not arrangement.guesses:  # each user has a token on its way
            threads = threads[: self.request.users]
        beside = arrangement.head.shared
        drafting = cores if drafts and beside is not None and beside.host == host else 0
        return max(1.0, (sum(threads) + drafting) / cores)

    def _without_drafter(self, arrangement: Arrangement) -> list[float]:
        """By what to multiply each stage's times while nobody guesses."""
        plain = replace(arrangement, guesses=False)
        return [self.slowdown(plain, each) / self.slowdown(arrangement, each) for each in arrangement.order]

    @property
    def drafts_on_cores(self) -> bool:
        """Whether drafting takes noticeable time of the head's device."""
        return self.request.drafter is not None and self.request.drafter.shape is not None

    def pass_s(self, arrangement: Arrangement) -> float:
        """Seconds of the drafter's pass on the head's device, alone there or beside a stage."""
        drafter = self.request.drafter
        if drafter is None or drafter.shape is None:
            return 0.0
        curve = drafter_curve(arrangement.head.profile, drafter.shape, arrangement.precision)
        pass_s = curve.seconds(TYPICAL_PASS_NODES, self.request.typical_context)
        return pass_s * self.slowdown(arrangement, arrangement.head)

    # ------------------------------------------------------------------------------------------------ splits

    def rated(self, arrangement: Arrangement, layers: Sequence[int]) -> Split:
        """A given split, whether or not it fits."""
        times = self._times_of([arrangement])
        counts = np.broadcast_to(np.array(layers, dtype=np.int64), (len(times.nodes), 1, len(layers)))
        (found,) = self._best([arrangement], times, counts)
        assert found is not None, "a given split has a rate"
        return found

    def best_of(self, arrangements: Sequence[Arrangement], *, quickly: bool = False) -> list[Split | None]:
        """The splits that are predicted to be fastest, of arrangements that have as many stages, and all
        guesses or none; None where the model does not fit. `quickly`: nearly, with fewer numbers of nodes
        and fewer splits."""
        count = self.request.shape.layers
        rooms = np.array([self.room(each) for each in arrangements], dtype=np.int64)
        fits = [
            at
            for at, each in enumerate(arrangements)
            if rooms[at].min() >= 1 and rooms[at].sum() >= count and self.head_fits(each)
        ]
        found: list[Split | None] = [None] * len(arrangements)
        if fits and len(arrangements[0].order) <= count:
            fitting = [arrangements[at] for at in fits]
            step = NODES_STEP if quickly and fitting[0].guesses else 1
            times = self._times_of(fitting, step)
            most = SPLITS_QUICK if quickly else count * len(arrangements[0].order)
            layers = _fastest_trips(times.fixed_s, times.layer_s, rooms[fits][:, None], count, most)
            for at, split in zip(fits, self._best(fitting, times, layers), strict=True):
                found[at] = split
        return found

    def _best(self, arrangements: Sequence[Arrangement], times: Times, layers: Ints) -> list[Split | None]:
        """The best of layers `[arrangements, nodes, splits, stages]`, each rated for its number of nodes;
        rows of zeros are no split."""
        layers = layers.reshape(-1, *layers.shape[-2:])
        slots_s, trips_s = (
            each.reshape(len(layers), -1)
            for each in times.slots_s(layers.reshape(*times.fixed_s.shape[:-1], *layers.shape[-2:]))
        )
        # Of the splits for a number of nodes only those count than which none is as good in both.
        slots_s = np.where(layers[..., 0] > 0, slots_s, np.inf)
        by_slot = np.lexsort((trips_s, slots_s))
        slots_s, trips_s = (np.take_along_axis(each, by_slot, 1) for each in (slots_s, trips_s))
        is_kept = np.isfinite(slots_s)
        is_kept[:, 1:] &= trips_s[:, 1:] < np.minimum.accumulate(trips_s, axis=1)[:, :-1]
        row, column = np.nonzero(is_kept)
        of, node = np.divmod(row, len(times.nodes))
        slot_s, trip_s, nodes = slots_s[row, column], trips_s[row, column], times.nodes[node]
        levels, missed = np.ones_like(slot_s), np.ones_like(slot_s)
        users, drafter = self.request.users, self.request.drafter if arrangements[0].guesses else None
        if drafter is None:
            rates = plain_rates(slot_s, trip_s, nodes, users)
        else:
            pass_s = np.array([self.pass_s(each) for each in arrangements])[of, None]
            rates, levels, missed = guessing_rates(slot_s, trip_s, nodes, drafter.acceptance, pass_s, users)
        chosen = []
        for begin, end in pairwise(np.searchsorted(of, np.arange(len(arrangements) + 1))):
            if begin < end:
                # Of those alike in this, as all splits are for plain decoding over boards of one kind, the
                # one whose slots are short: a prompt is through soonest.
                own, least = rates[begin:end], slot_s[begin:end]
                alike = np.where(own >= (1 - ALIKE) * own.max(initial=0), least, np.inf)
                chosen.append(begin + int(alike.argmin()))
        at = np.array(chosen, dtype=np.int64)
        counts = layers[row[at], by_slot[row[at], column[at]]]
        best = rates[at]
        if drafter is not None and users == 1:
            owner = of[at]
            many = list(times.nodes).index(MANY_ROWS)
            one_s, many_s = (
                times.fixed_s[owner, row] + counts * times.layer_s[owner, row] for row in (0, many)
            )
            without_drafter = np.array([self._without_drafter(each) for each in arrangements])
            alone_s = (one_s * without_drafter[owner]).sum(axis=-1)
            best = Rated(
                rates=best,
                levels=levels[at],
                missed=missed[at],
                nodes=nodes[at],
                slot_s=slot_s[at],
                trip_s=trip_s[at],
                slot_of_one_s=np.maximum(one_s.max(axis=-1), times.link_s[owner, 0]),
                slot_of_many_s=np.maximum(many_s.max(axis=-1), times.link_s[owner, many]),
                plain=plain_rates(alone_s, alone_s + times.links_s[owner, 0], np.ones_like(best), 1),
                acceptance=drafter.acceptance,
                pass_s=pass_s[at, 0],
            ).corrected()
        found: list[Split | None] = [None] * len(arrangements)
        for pair, its_layers, rate in zip(at, counts, best, strict=True):
            forecast = Forecast(
                tokens_per_s=float(rate),
                nodes=int(nodes[pair]),
                slot_s=float(slot_s[pair]),
                trip_s=float(trip_s[pair]),
                missed=float(missed[pair]),
                levels=float(levels[pair]),
            )
            arrangement = arrangements[of[pair]]
            found[of[pair]] = Split(
                order=arrangement.order,
                head=arrangement.head,
                precision=arrangement.precision,
                guesses=arrangement.guesses,
                layers=tuple(map(int, its_layers)),
                forecast=forecast,
            )
        return found


def _fastest_trips(fixed_s: F64, layer_s: F64, room: Ints, count: int, splits_max: int) -> Ints:
    """Layers `[..., splits, stages]` of the fastest trips, one for each stage and number of layers that can
    be the slowest, of times `[..., stages]`; zeros where they cannot. Where these are more than `splits_max`,
    some of the numbers, small ones closer together."""
    stages = fixed_s.shape[-1]
    tried = np.arange(1, count + 1)
    if stages * count > splits_max:
        tried = np.unique(np.geomspace(1, count, max(2, splits_max // stages)).round().astype(np.int64))
    slowest, its_layers = np.tile(np.arange(stages), len(tried)), np.repeat(tried, stages)
    splits = np.arange(len(slowest))
    bound_s = fixed_s[..., slowest] + its_layers * layer_s[..., slowest]  # [..., splits]
    within = (bound_s[..., None] * (1 + 1e-12) - fixed_s[..., None, :]) // layer_s[..., None, :]
    most = np.minimum(within, room[..., None, :]).astype(np.int64)  # [..., splits, stages]
    is_possible = (its_layers <= room[..., slowest]) & (most.min(axis=-1) >= 1)
    most[..., splits, slowest] = its_layers
    least = np.ones_like(most)
    least[..., splits, slowest] = its_layers
    left = count - least.sum(axis=-1, keepdims=True)
    quickest = np.argsort(layer_s, axis=-1, kind="stable")[..., None, :]
    more = np.take_along_axis(most - least, quickest, -1)
    given = np.clip(left - (np.cumsum(more, axis=-1) - more), 0, more)
    found = least + np.take_along_axis(given, np.argsort(quickest, axis=-1), -1)
    is_split = is_possible & (found.sum(axis=-1) == count)  # else more layers than there are had to be given
    return np.where(is_split[..., None], found, 0)
