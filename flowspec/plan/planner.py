"""Which devices to use, in which order, with which layers, and where the head runs: the plan that is foretold
to be fastest.

Layers for a given order are found exactly (`plan.partition`). Orders are all tried where they are few,
devices that are alike counting once; else a local search inserts, removes, replaces, moves and swaps devices
from several beginnings. The same request gives the same plan.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.plan.forecast import Forecast
from flowspec.plan.memory import SliceMemory
from flowspec.plan.partition import Arrangement, Partition, Split
from flowspec.plan.sites import PlanRequest, Site

ORDERS_MAX = 1500
"""Orders times places of the head up to which all are tried."""
TRIES = 1000
"""States that a local search tries at most."""
FINAL_SPLITS = 4000
"""Splits that are looked at without short cuts in the end, of the states that were best."""
PLACES_OF_SIZE = 6
"""Stages up to which a neighbour is tried with all places of the head; else with the first, the last and the
present one."""
SEED = 5
WINDOW_SLACK = 0.5
"""As `core.methods.continuous`."""
ALIKE_MARGIN = 1e-9

Order = tuple[int, ...]
"""Kinds of devices in pipeline order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A device, its layers `[first, end)`, its slice's memory, what else of ours is there, and its time for a
    slot's nodes."""

    site: Site
    first: int
    end: int
    need: SliceMemory
    other_bytes: int
    slot_s: float

    @property
    def total_bytes(self) -> int:
        return self.need.total_bytes + self.other_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What runs where, and what is foretold of it. `plain` is the forecast of the fastest plan that does not
    guess."""

    split: Split
    stages: tuple[PlannedStage, ...]
    head_bytes: int
    plain: Forecast
    link_s: float

    @property
    def forecast(self) -> Forecast:
        return self.split.forecast

    @property
    def head(self) -> Site:
        return self.split.arrangement.head

    @property
    def precision(self) -> str:
        return self.split.arrangement.precision

    @property
    def guesses(self) -> bool:
        """Whether guessing pays."""
        return self.split.arrangement.guesses

    @property
    def window(self) -> int:
        """Segments in flight that keep the slowest stage fed."""
        return max(
            1, min(2 * len(self.stages) + 2, int(self.forecast.trip_s / self.forecast.slot_s + WINDOW_SLACK))
        )

    @property
    def bases(self) -> list[str]:
        """What the times of packed weights stand on, for people; boards of which the same is known
        together."""
        boards: dict[str, list[str]] = {}
        for profile in (stage.site.profile for stage in self.stages):
            if (text := profile.basis(self.precision)) and profile.name not in boards.setdefault(text, []):
                boards[text].append(profile.name)
        return [f"{self.precision} on {', '.join(names)}: {text}" for text, names in boards.items()]

    @property
    def is_head_free(self) -> bool:
        """Whether the head's device runs no stage."""
        return all(stage.site.name != self.head.name for stage in self.stages)


class DoesNotFit(InputError):
    """The model does not fit the devices in any of the request's precisions."""


def make_plan(request: PlanRequest) -> Plan:
    """The plan that is foretold to be fastest; raises `DoesNotFit`."""
    return make_plans(request, 1)[0]


def make_plans(request: PlanRequest, count: int) -> list[Plan]:
    """Up to `count` plans, those that are foretold to be fastest first, no two with the same devices and
    head; raises `DoesNotFit`."""
    most = min(request.shape.layers, limits.STAGES_MAX)
    if request.all_devices and len(request.stage_sites) > most:
        raise InputError(
            f"--all-devices: expected at most {most} devices for the {request.shape.layers} layers of "
            f"{request.shape.name}, got {len(request.stage_sites)}"
        )
    partition = Partition(request)
    plain = _fastest(partition, guesses=False)
    guessing = [] if request.drafter is None else _fastest(partition, guesses=True)
    if not plain and not guessing:
        raise DoesNotFit(
            f"{request.shape.name} does not fit the devices in {' or '.join(request.precisions)}"
        )
    found: dict[tuple[frozenset[str], str, bool], Split] = {}
    for split in sorted((*plain, *guessing), key=lambda split: -split.forecast.tokens_per_s):
        arrangement = split.arrangement
        found.setdefault(
            (frozenset(each.name for each in arrangement.order), arrangement.head.name, arrangement.guesses),
            split,
        )
    return [
        described(partition, split, plain[0] if plain else None) for split in list(found.values())[:count]
    ]


def rate_split(request: PlanRequest, order: Sequence[Site], head: Site, layers: Sequence[int]) -> Plan:
    """The forecast of a split made by hand, in the first of the request's precisions, with or without guesses
    as is faster; it need not fit."""
    partition = Partition(request)
    found = [
        partition.rated(
            Arrangement(order=tuple(order), head=head, precision=request.precisions[0], guesses=guesses),
            layers,
        )
        for guesses in (False, *(True,) * (request.drafter is not None))
    ]
    return described(partition, max(found, key=lambda split: split.forecast.tokens_per_s), found[0])


def described(partition: Partition, split: Split, plain: Split | None) -> Plan:
    """A split with its memory and the times of its stages."""
    arrangement = split.arrangement
    times = partition.times(arrangement)
    row = list(times.nodes).index(split.forecast.nodes)
    stages, end = [], 0
    for index, (place, layers) in enumerate(zip(arrangement.order, split.layers, strict=True)):
        end += layers
        stages.append(
            PlannedStage(
                site=place,
                first=end - layers,
                end=end,
                need=partition.stage_need(arrangement, index, layers, end - layers),
                other_bytes=partition.other_bytes(arrangement, place),
                slot_s=float(times.fixed_s[row, index] + layers * times.layer_s[row, index]),
            )
        )
    return Plan(
        split=split,
        stages=tuple(stages),
        head_bytes=partition.other_bytes(arrangement, arrangement.head),
        plain=(plain or split).forecast,
        link_s=float(times.link_s[row]),
    )


def _fastest(partition: Partition, *, guesses: bool) -> list[Split]:
    """The best splits over all precisions, the fastest first; of equal ones the first, in the user's
    order."""
    found: list[Split] = []
    best: Split | None = None
    for precision in partition.request.precisions:
        search = _Search(partition, precision, guesses)
        if search.count(ORDERS_MAX) <= ORDERS_MAX:
            search.all()
        else:
            search.local()
        for state in search.finalists():
            split = partition.best(state.arrangement)
            assert split is not None, "a state that was found fits"
            found.append(split)
            if _is_better(split, best):
                best = split
    return (
        []
        if best is None
        else [
            best,
            *sorted(
                (each for each in found if each is not best), key=lambda each: -each.forecast.tokens_per_s
            ),
        ]
    )


class _Search:
    """The orders of one precision, with or without guesses. A state is an order of kinds and the place of the
    head.

    The place of the head is a kind of which a device is left over, or `-1 - i` for the device of stage i.
    """

    def __init__(self, partition: Partition, precision: str, guesses: bool) -> None:
        self._partition = partition
        self._precision = precision
        self._guesses = guesses
        self._kinds = kinds_of(partition.request)
        self._stages_max = min(
            partition.request.shape.layers, limits.STAGES_MAX, len(partition.request.stage_sites)
        )
        self._stages_min = self._stages_max if partition.request.all_devices else 1
        self._for_stages = [kind for kind, sites in enumerate(self._kinds) if sites[0].runs_stages]
        self._heads = {site.name for site in partition.request.heads}
        self._found: dict[tuple[Order, int], Split | None] = {}

    def count(self, most: int) -> int:
        """States, counted up to a little more than `most`."""
        total = 0
        for order in self._orders():
            total += len(self._places(order))
            if total > most:
                break
        return total

    def finalists(self) -> list[Split]:
        """The best states that were tried, the best first."""
        found = [split for split in self._found.values() if split is not None]
        found.sort(key=lambda split: -split.forecast.tokens_per_s)
        request = self._partition.request
        work = list(accumulate(request.users * request.shape.layers * len(split.layers) for split in found))
        return [
            split for split, so_far in zip(found, work, strict=True) if so_far <= max(FINAL_SPLITS, work[0])
        ]

    def all(self) -> None:
        for order in self._orders():
            for place in self._places(order):
                self._split(order, place)

    def local(self) -> None:
        """From the fastest devices, as many as are needed and more: takes each better neighbour until there
        is none."""
        chance = random.Random(SEED)
        for order in self._beginnings():
            place = self._places(order)[0]
            here = self._split(order, place)
            while len(self._found) < TRIES:
                neighbours = self._neighbours(order, place)
                chance.shuffle(neighbours)
                better = None
                for state in neighbours:
                    found = self._split(*state)
                    if _is_better(found, here):
                        better, here, (order, place) = found, found, state
                        break
                    if len(self._found) >= TRIES:
                        break
                if better is None:
                    break

    def _orders(self) -> Iterator[Order]:
        """All orders of kinds, short ones first."""
        for length in range(self._stages_min, self._stages_max + 1):
            yield from self._longer(
                (), Counter({kind: len(self._kinds[kind]) for kind in self._for_stages}), length
            )

    def _longer(self, begun: Order, left: Counter[int], length: int) -> Iterator[Order]:
        if len(begun) == length:
            yield begun
            return
        for kind in sorted(left):
            if left[kind]:
                left[kind] -= 1
                yield from self._longer((*begun, kind), left, length)
                left[kind] += 1

    def _places(self, order: Order) -> list[int]:
        """Where the head may run: on a device that is left over, or beside a stage."""
        used = Counter(order)
        free = [
            kind
            for kind, sites in enumerate(self._kinds)
            if used[kind] < len(sites) and sites[0].name in self._heads
        ]
        # A kind has devices that may all be the head, or none that may.
        return [
            *free,
            *(-1 - at for at, kind in enumerate(order) if self._kinds[kind][0].name in self._heads),
        ]

    def _sites(self, order: Order, place: int) -> tuple[tuple[Site, ...], Site]:
        left = [list(sites) for sites in self._kinds]
        chosen = tuple(left[kind].pop(0) for kind in order)
        return chosen, (chosen[-1 - place] if place < 0 else left[place][0])

    def _split(self, order: Order, place: int) -> Split | None:
        key = (order, place)
        if len(order) < self._stages_min:
            return None
        if key not in self._found:
            chosen, head = self._sites(order, place)
            arrangement = Arrangement(
                order=chosen, head=head, precision=self._precision, guesses=self._guesses
            )
            self._found[key] = self._partition.best(arrangement, quickly=True)
        return self._found[key]

    def _beginnings(self) -> Iterator[Order]:
        """The fastest devices first, the most memory first; for each the fewest that hold the model, twice as
        many, ..., all."""
        ranked_by = (
            [-sites[0].profile.bytes_per_s() for sites in self._kinds],
            [-sites[0].memory_bytes for sites in self._kinds],
        )
        for worth in ranked_by:
            ranked = [
                kind for kind in sorted(self._for_stages, key=worth.__getitem__) for _ in self._kinds[kind]
            ]
            length = self._stages_min
            while length <= self._stages_max:
                order = tuple(ranked[:length])
                if any(self._split(order, place) is not None for place in self._places(order)[:2]):
                    yield order
                    length = (
                        2 * length
                        if 2 * length <= self._stages_max or length == self._stages_max
                        else self._stages_max
                    )
                else:
                    length += 1

    def _neighbours(self, order: Order, place: int) -> list[tuple[Order, int]]:
        """Orders that differ in one device, or in the places of two; and other places of the head."""
        used = Counter(order)
        spare = [kind for kind in self._for_stages if used[kind] < len(self._kinds[kind])]
        size = len(order)
        orders = {order[:at] + order[at + 1 :] for at in range(size)} if size > 1 else set()
        orders |= {(*order[:at], kind, *order[at + 1 :]) for at in range(size) for kind in spare}
        if size < self._stages_max:
            orders |= {(*order[:at], kind, *order[at:]) for at in range(size + 1) for kind in spare}
        for one in range(size):
            rest = order[:one] + order[one + 1 :]
            orders |= {(*rest[:at], order[one], *rest[at:]) for at in range(size)}
            for other in range(one + 1, size):
                swapped = list(order)
                swapped[one], swapped[other] = order[other], order[one]
                orders.add(tuple(swapped))
        found = []
        for each in sorted(orders):
            places = self._places(each)
            kept = (
                places
                if each == order or size <= PLACES_OF_SIZE
                else {*places[:1], *places[-1:], place} & set(places)
            )
            found += [(each, at) for at in sorted(kept) if (each, at) != (order, place)]
        return found


def _is_better(found: Split | None, than: Split | None) -> bool:
    """By more than rounding, so that of equal plans the first, with the fewest devices, stays."""
    if found is None or than is None:
        return found is not None
    return found.forecast.tokens_per_s > than.forecast.tokens_per_s * (1 + ALIKE_MARGIN)


def _placed(request: PlanRequest, site: Site) -> Site:
    """The site; one that is alone on its machine shares nothing with others, whichever machine it is."""
    shared = site.shared
    if shared is None or any(
        each.shared is not None and each.shared.host == shared.host and each.name != site.name
        for each in request.sites
    ):
        return site
    return replace(site, shared=replace(shared, host=""))


def kinds_of(request: PlanRequest) -> list[list[Site]]:
    """Devices that can stand for each other: same profile, memory, links to all others, machine where it is
    shared, and leave to be the head."""
    network, kinds = request.network, list[list[Site]]()
    heads = {site.name for site in request.heads}
    for site in request.sites:
        for kind in kinds:
            one = kind[0]
            alike = replace(_placed(request, site), name=one.name) == _placed(request, one)
            alike = alike and (site.name in heads) == (one.name in heads)
            others = [other.name for other in request.sites if other.name not in (site.name, one.name)]
            if alike and (
                network.is_uniform
                or all(network.between(site.name, name) == network.between(one.name, name) for name in others)
            ):
                kind.append(site)
                break
        else:
            kinds.append([site])
    return kinds
