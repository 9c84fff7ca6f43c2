"""The best layers for devices in a given order: exact, by what the slowest stage and a whole trip take.

A stage's time grows with its layers in a straight line. So if one stage with some layers is to be the
slowest, the fastest trip gives each other device one layer and the rest to those that are quickest with a
layer, as far as the slowest and memory allow. Trying every stage with every number of layers as the slowest
finds the best of all splits, for any objective that grows with the trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.plan.cost import drafter_curve, head_curve, layers_curve, row_bytes
from flowspec.plan.forecast import NODES, Forecast, Guessing, guessing_rates, plain_rates
from flowspec.plan.memory import SliceMemory, drafter_memory, stage_memory
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.sites import PlanRequest, Site, process_bytes
from flowspec.plan.timing import LinkSpec

F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SPLITS_MAX = 512
"""Splits of an order that are looked at: all of eight devices with 64 layers, say."""
SPLITS_QUICK, NODES_STEP = 24, 2
"""Splits that a quick look takes, and of the numbers of nodes every second."""
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
class Split:
    """An arrangement with the layers of each stage, and what it gives."""

    arrangement: Arrangement
    layers: tuple[int, ...]
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of an arrangement, for each number of nodes: stage i with k layers takes `fixed_s[:, i] + k *
    layer_s[:, i]`.

    `links_s` is what all links of a trip take, `link_s` how long the slowest is busy. Arrays are `[nodes]` or
    `[nodes, stages]`.
    """

    nodes: F64
    fixed_s: F64
    layer_s: F64
    links_s: F64
    link_s: F64

    def some(self, step: int) -> Times:
        """Of every so many numbers of nodes."""
        return Times(
            nodes=self.nodes[::step],
            fixed_s=self.fixed_s[::step],
            layer_s=self.layer_s[::step],
            links_s=self.links_s[::step],
            link_s=self.link_s[::step],
        )

    def slots_s(self, layers: Ints) -> tuple[F64, F64]:
        """The slowest stage or link, and a trip, for layers `[nodes, ..., stages]`; both `[nodes, ...]`."""
        shape = (len(self.nodes), *(1,) * (layers.ndim - 2), layers.shape[-1])
        stages_s = self.fixed_s.reshape(shape) + layers * self.layer_s.reshape(shape)
        flat = shape[:-1]
        return np.maximum(stages_s.max(axis=-1), self.link_s.reshape(flat)), stages_s.sum(
            axis=-1
        ) + self.links_s.reshape(flat)


class Partition:
    """Splits of one request. Keeps what was computed for single devices and links."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._guess_nodes = np.array(NODES, dtype=np.float64)
        self._plain_nodes = np.array(
            sorted({*(n for n in NODES if n < request.users), request.users}), dtype=np.float64
        )
        self._times: dict[tuple[str, str, bool], tuple[F64, F64, F64]] = {}

    # ------------------------------------------------------------------------------------------------ memory

    def stage_need(
        self, arrangement: Arrangement, index: int, layers: int, begin: int | None = None
    ) -> SliceMemory:
        """What a slice of so many layers takes at a place of the order, from `begin` on (None: any)."""
        last = len(arrangement.order) - 1
        request = self.request
        return stage_memory(
            request.shape,
            request.weights,
            arrangement.precision,
            layers,
            first=index == 0,
            last=index == last,
            context=request.context,
            users=request.users,
            cache=request.cache,
            begin=begin,
        )

    def drafter_need(self, arrangement: Arrangement) -> SliceMemory | None:
        """What the drafter takes at the head; None where none is loaded."""
        drafter = self.request.drafter
        if not arrangement.guesses or drafter is None or drafter.shape is None:
            return None
        return drafter_memory(
            drafter.shape, arrangement.precision, context=self.request.context, users=self.request.users
        )

    def other_bytes(self, arrangement: Arrangement, place: Site) -> int:
        """What of ours is on a device beside a slice: processes, and at the head the drafter."""
        is_head = place.name == arrangement.head.name
        drafter = self.drafter_need(arrangement) if is_head else None
        is_stage = any(place.name == each.name for each in arrangement.order)
        return process_bytes(is_stage + is_head) + (0 if drafter is None else drafter.total_bytes)

    def room(self, arrangement: Arrangement) -> list[int]:
        """The most layers that the memory of each stage's device holds; negative or 0: not even one."""
        found = []
        for index, place in enumerate(arrangement.order):
            none, one = (self.stage_need(arrangement, index, layers).total_bytes for layers in (0, 1))
            two = self.stage_need(arrangement, index, 2).total_bytes
            free = place.memory_bytes - self.other_bytes(arrangement, place)
            count = max(0, free - none) // max(two - one, 1)
            while count > 0 and self.stage_need(arrangement, index, count).total_bytes > free:
                count -= 1  # bytes are rounded
            while count < self.request.shape.layers and (
                self.stage_need(arrangement, index, count + 1).total_bytes <= free
            ):
                count += 1  # layers with a window take less
            found.append(count)
        return found

    def head_fits(self, arrangement: Arrangement) -> bool:
        """Whether the head's device holds what is not a slice."""
        return self.other_bytes(arrangement, arrangement.head) <= arrangement.head.memory_bytes

    # ------------------------------------------------------------------------------------------------- times

    def _stage_times(self, place: Site, precision: str, guesses: bool) -> tuple[F64, F64, F64]:
        """Fixed seconds, those of a layer, and those of `lm_head`, by nodes."""
        key = (place.name, precision, guesses)
        if key not in self._times:
            self._times[key] = self._computed(place.profile, precision, guesses)
        return self._times[key]

    def _computed(self, profile: DeviceProfile, precision: str, guesses: bool) -> tuple[F64, F64, F64]:
        shape, context = self.request.shape, self.request.typical_context
        one, two = (layers_curve(profile, shape, precision, layers, self.request.cache) for layers in (1, 2))
        head = head_curve(profile, shape, precision)
        nodes = self._guess_nodes if guesses else self._plain_nodes
        rows = np.array([[curve.seconds(int(n), context) for n in nodes] for curve in (one, two)])
        layer_s = rows[1] - rows[0]
        return rows[0] - layer_s, layer_s, np.array([head.seconds(int(n)) for n in nodes])

    def hops(self, arrangement: Arrangement) -> list[LinkSpec]:
        """Head to first stage, between stages, last stage to head."""
        names = [arrangement.head.name, *(place.name for place in arrangement.order), arrangement.head.name]
        return [self.request.network.between(first, second) for first, second in pairwise(names)]

    def times(self, arrangement: Arrangement) -> Times:
        found = [
            self._stage_times(place, arrangement.precision, arrangement.guesses)
            for place in arrangement.order
        ]
        fixed_s = np.stack([each[0] for each in found], axis=-1)
        layer_s = np.stack([each[1] for each in found], axis=-1)
        fixed_s[:, -1] += found[-1][2]
        slowdowns = np.array([self.slowdown(arrangement, place) for place in arrangement.order])
        fixed_s, layer_s = fixed_s * slowdowns, layer_s * slowdowns
        nodes = self._guess_nodes if arrangement.guesses else self._plain_nodes
        hops = self.hops(arrangement)
        size = row_bytes(self.request.shape, arrangement.precision)
        busy_s = np.array(
            [
                [
                    link.transfer_s(HEADER_BYTES + n * (NODE_BYTES + size * (0 < index < len(hops) - 1)))
                    for index, link in enumerate(hops)
                ]
                for n in nodes
            ]
        )
        delay_s = sum(link.delay_s + link.jitter_s / 2 for link in hops)
        return Times(
            nodes=nodes,
            fixed_s=fixed_s,
            layer_s=layer_s,
            links_s=busy_s.sum(axis=1) + delay_s,
            link_s=busy_s.max(axis=1),
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
        threads = sorted(
            (each.shared.threads for each in arrangement.order if each.shared and each.shared.host == host),
            reverse=True,
        )
        if not arrangement.guesses:  # each user has a token on its way
            threads = threads[: self.request.users]
        beside = arrangement.head.shared
        drafting = cores if drafts and beside is not None and beside.host == host else 0
        return max(1.0, (sum(threads) + drafting) / cores)

    @property
    def drafts_on_cores(self) -> bool:
        """Whether drafting takes noticeable time of the head's device."""
        return self.request.drafter is not None and self.request.drafter.shape is not None

    def guessing(self, arrangement: Arrangement) -> Guessing:
        """The drafter as it is on the head's device, alone there or beside a stage."""
        drafter = self.request.drafter
        assert drafter is not None, "guesses without a drafter"
        if drafter.shape is None:
            return Guessing(acceptance=drafter.acceptance, pass_s=0.0)
        curve = drafter_curve(arrangement.head.profile, drafter.shape, arrangement.precision)
        pass_s = curve.seconds(TYPICAL_PASS_NODES, self.request.typical_context)
        slowdown = self.slowdown(arrangement, arrangement.head)
        return Guessing(acceptance=drafter.acceptance, pass_s=pass_s * slowdown)

    # ------------------------------------------------------------------------------------------------ splits

    def rated(self, arrangement: Arrangement, layers: Sequence[int]) -> Split:
        """A given split, whether or not it fits."""
        counts = np.broadcast_to(
            np.array(layers, dtype=np.int64), (len(self._nodes(arrangement)), 1, len(layers))
        )
        found = self._best(arrangement, self.times(arrangement), counts)
        assert found is not None, "a given split has a rate"
        return found

    def best(self, arrangement: Arrangement, *, quickly: bool = False) -> Split | None:
        """The split that is foretold to be fastest; None where the model does not fit.

        `quickly`: nearly; with fewer numbers of nodes, and fewer splits.
        """
        count = self.request.shape.layers
        room = np.array(self.room(arrangement), dtype=np.int64)
        if not self.head_fits(arrangement) or len(room) > count or (room < 1).any() or room.sum() < count:
            return None
        times = self.times(arrangement)
        times = times.some(NODES_STEP) if quickly else times
        kept = SPLITS_QUICK if quickly else SPLITS_MAX
        layers = np.stack(
            [
                _fastest_trips(*each, room, count, kept)
                for each in zip(times.fixed_s, times.layer_s, strict=True)
            ]
        )
        return self._best(arrangement, times, layers)

    def _nodes(self, arrangement: Arrangement) -> F64:
        return self._guess_nodes if arrangement.guesses else self._plain_nodes

    def _best(self, arrangement: Arrangement, times: Times, layers: Ints) -> Split | None:
        """The best of layers `[nodes, splits, stages]`, each rated for its number of nodes; rows of zeros are
        no split."""
        slot_s, trip_s = times.slots_s(layers)  # [nodes, splits]
        nodes = np.broadcast_to(times.nodes[:, None], slot_s.shape)
        valid = layers[..., 0] > 0
        if not valid.any():
            return None
        levels, missed = np.ones_like(slot_s), np.ones_like(slot_s)
        if arrangement.guesses:
            rates, levels, missed = guessing_rates(
                slot_s, trip_s, nodes, self.guessing(arrangement), self.request.users
            )
        else:
            rates = plain_rates(slot_s, trip_s, nodes, self.request.users)
        rates = np.where(valid, rates, -1.0)
        # Of those alike in this, as all splits are for plain decoding over boards of one kind, the one whose
        # slots are short: a prompt is through soonest.
        slots_s = np.where(rates >= (1 - ALIKE) * rates.max(), slot_s, np.inf)
        row, column = np.unravel_index(int(slots_s.argmin()), rates.shape)
        at: Any = (row, column)
        forecast = Forecast(
            tokens_per_s=float(rates[at]),
            nodes=int(times.nodes[row]),
            slot_s=float(slot_s[at]),
            trip_s=float(trip_s[at]),
            missed=float(missed[at]),
            levels=float(levels[at]),
        )
        return Split(
            arrangement=arrangement, layers=tuple(int(each) for each in layers[at]), forecast=forecast
        )


def _fastest_trips(fixed_s: F64, layer_s: F64, room: Ints, count: int, splits_max: int) -> Ints:
    """Layers `[splits, stages]` of the fastest trips, one for each stage and number of layers that can be the
    slowest; then zeros.

    Where these are more than `splits_max`, evenly some of them.
    """
    stages = len(room)
    slowest = np.tile(np.arange(stages), count)  # [splits]
    its_layers = np.repeat(np.arange(1, count + 1), stages)
    bound_s = fixed_s[slowest] + its_layers * layer_s[slowest]
    most = np.minimum((bound_s[:, None] * (1 + 1e-12) - fixed_s) // layer_s, room).astype(
        np.int64
    )  # [splits, stages]
    possible = np.flatnonzero(
        (its_layers <= room[slowest]) & (most.min(axis=1) >= 1) & (most.sum(axis=1) >= count)
    )
    if len(possible) > splits_max:
        possible = possible[np.argsort(bound_s[possible], kind="stable")]
        possible = possible[np.linspace(0, len(possible) - 1, splits_max).astype(int)]
    most, rows = most[possible], np.arange(len(possible))
    least = np.ones_like(most)
    least[rows, slowest[possible]] = most[rows, slowest[possible]] = its_layers[possible]
    quickest = np.argsort(layer_s, kind="stable")
    more = (most - least)[:, quickest]
    left = count - least.sum(axis=1, keepdims=True)
    found = np.zeros((min(splits_max, len(slowest)), stages), dtype=np.int64)
    found[: len(rows)] = least
    found[: len(rows), quickest] += np.clip(left - (np.cumsum(more, axis=1) - more), 0, more)
    found[found.sum(axis=1) != count] = 0  # more layers than there are had to be given
    return found
