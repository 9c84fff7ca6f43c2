"""Which devices to use, in which order, with which layers, and where the head runs: the plan that is
predicted to be fastest.

Layers for a given order are found exactly (`plan.partition`). Orders are all tried where they are few,
devices that are alike counting once; else a local search inserts, removes, replaces, moves and swaps devices
from several beginnings. The same request gives the same plan.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice

from flowspec.core.head.prompt_chunks import chunk_rows
from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.plan.cost import head_curve, layers_curve, row_bytes
from flowspec.plan.forecast import HEAD_S, Forecast
from flowspec.plan.memory import SliceMemory
from flowspec.plan.partition import HEADER_BYTES, NODE_BYTES, Arrangement, Partition, Split
from flowspec.plan.sites import PlanRequest, Site
from flowspec.plan.timing import slowest

ORDERS_MAX = 300
"""Orders times places of the head up to which all are tried."""
TRIES = 400
"""States that a local search tries at most."""
TOGETHER = 32
"""States that are rated together."""
FINAL_SHARE, FINALISTS = 0.97, 8
"""Of the best state's rate that another must have to be rated with every number of nodes in the end, and how
many may be."""
PLACES_OF_SIZE = 6
"""Stages up to which a neighbour is tried with all places of the head; else with the first, the last and the
present one."""
SEED = 5
WINDOW_SLACK = 0.5
"""As `core.methods.continuous`."""
ALIKE_MARGIN = 1e-9
NEARLY = 0.99
"""A plan of fewer stages that has such a share of the best one's rate is taken: what more bring is less than
the forecast is off."""

Order = tuple[int, ...]
"""Kinds of devices in pipeline order."""
State = tuple[Order, int]
"""An order, and the place of the head: a kind of which a device is left over, or `-1 - i` for the device of
stage i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A device, its layers `[first, end)`, its slice's memory, what else of ours is there, and its time for a
    slot's nodes; it need not fit."""

    site: Site
    first: int
    end: int
    need: SliceMemory
    other_bytes: int
    slot_s: float = 0.0

    @property
    def layers(self) -> int:
        return self.end - self.first

    @property
    def total_bytes(self) -> int:
        return self.need.total_bytes + self.other_bytes

    @property
    def short_bytes(self) -> int:
        return max(0, self.total_bytes - self.site.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Split):
    """What runs where, and what is predicted of it; it guesses where that pays. `plain` is the forecast of
    the fastest plan that does not guess, `guessed` that of the fastest that does, None where the drafter has
    no room."""

    stages: tuple[PlannedStage, ...]
    head_bytes: int
    plain: Forecast
    guessed: Forecast | None
    link_s: float

    @property
    def window(self) -> int:
        """Segments in flight that keep the slowest stage fed."""
        slots = int(self.forecast.trip_s / self.forecast.slot_s + WINDOW_SLACK)
        return max(1, min(2 * len(self.stages) + 2, slots))

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


def make_plan(request: PlanRequest, *, guesses: bool | None = None) -> Plan:
    """The plan that is predicted to be fastest; one that `guesses`, or does not, where that is said. Raises
    `DoesNotFit`."""
    most = min(request.shape.layers, limits.STAGES_MAX)
    if request.all_devices and len(request.stage_sites) > most:
        raise InputError(
            f"--all-devices: expected at most {most} devices for the {request.shape.layers} layers of "
            f"{request.shape.name}, got {len(request.stage_sites)}"
        )
    partition = Partition(request)
    plain = _fastest(partition, guesses=False)
    guessing = None if request.drafter is None else _fastest(partition, guesses=True)
    best = None if guesses else plain
    if guesses is not False and _is_better(guessing, best):
        best = guessing
    if best is None:
        precisions = " or ".join(request.precisions)
        raise DoesNotFit(f"{request.shape.name} does not fit the devices in {precisions}")
    return describe(partition, best, plain, guessing)


def rate_split(request: PlanRequest, order: Sequence[Site], head: Site, layers: Sequence[int]) -> Plan:
    """The forecast of a split made by hand, in the first of the request's precisions, with or without guesses
    as is faster; it need not fit."""
    partition = Partition(request)
    arrangement = Arrangement(order=tuple(order), head=head, precision=request.precisions[0], guesses=False)
    best = plain = partition.rated(arrangement, layers)
    guessing = None
    if request.drafter is not None:
        guessing = partition.rated(replace(arrangement, guesses=True), layers)
        best = max(plain, guessing, key=lambda split: split.forecast.tokens_per_s)
    return describe(partition, best, plain, guessing)


def describe(partition: Partition, split: Split, plain: Split | None, guessed: Split | None = None) -> Plan:
    """A split with its memory and the times of its stages."""
    times = partition.times(split)
    row = list(times.nodes).index(split.forecast.nodes)
    ends = list(accumulate(split.layers))
    return Plan(
        order=split.order,
        head=split.head,
        precision=split.precision,
        guesses=split.guesses,
        layers=split.layers,
        forecast=split.forecast,
        stages=tuple(
            PlannedStage(
                site=place,
                first=end - layers,
                end=end,
                need=partition.stage_need(split, index, layers, end - layers),
                other_bytes=partition.other_bytes(split, place),
                slot_s=float(times.fixed_s[row, index] + layers * times.layer_s[row, index]),
            )
            for index, (place, layers, end) in enumerate(zip(split.order, split.layers, ends, strict=True))
        ),
        head_bytes=partition.other_bytes(split, split.head),
        plain=(plain or split).forecast,
        guessed=None if guessed is None else guessed.forecast,
        link_s=float(times.link_s[row]),
    )


def first_token_s(request: PlanRequest, plan: Plan, prompt: int) -> float:
    """Seconds from a prompt of so many tokens to its answer's first token, where nothing else is asked.

    A prompt's way is known in advance: its chunks follow one another through links and stages, each as soon
    as it and its place are free. The simulator, which takes a minute for long prompts, says the same, and
    some percent more where links are so slow that the head waits with chunks.
    """
    partition, shape = Partition(request), request.shape
    row, (*links, back) = row_bytes(shape, plan.precision), partition.hops(plan)
    devices = [site.profile.slowed(partition.slowdown(plan, site)) for site in plan.order]
    stages = [
        layers_curve(device, shape, plan.precision, layers)
        for device, layers in zip(devices, plan.layers, strict=True)
    ]
    link_free_s, stage_free_s, at_s = [0.0] * len(links), [0.0] * len(stages), 0.0
    chunk = chunk_rows(prompt, limits.PREFILL_CHUNK, len(stages), slowest(stages))
    for first in range(0, prompt, chunk):
        rows, at_s = min(chunk, prompt - first), HEAD_S
        for index, (link, stage) in enumerate(zip(links, stages, strict=True)):
            size = HEADER_BYTES + rows * (NODE_BYTES + row * (index > 0))
            link_free_s[index] = max(at_s, link_free_s[index]) + link.transfer_s(size)
            at_s = max(link_free_s[index] + link.delay_s, stage_free_s[index]) + stage.seconds(rows, first)
            stage_free_s[index] = at_s
    back_s = back.delay_s + back.transfer_s(HEADER_BYTES) + HEAD_S
    return at_s + head_curve(devices[-1], shape, plan.precision).seconds(1) + back_s


def _fastest(partition: Partition, *, guesses: bool) -> Split | None:
    """The best split over all precisions; of those that are nearly as fast the one of fewest stages, and of
    equal ones the first, in the user's order."""
    found: list[Split] = []
    for precision in partition.request.precisions:
        for state in _Search(partition, precision, guesses).finalists():
            split = partition.best_of([state])[0]
            assert split is not None, "a state that was found fits"
            found.append(split)
    best = _best(found)
    if best is None:
        return None
    enough = NEARLY * best.forecast.tokens_per_s
    few = min(len(split.layers) for split in found if split.forecast.tokens_per_s >= enough)
    if few == len(best.layers):
        return best
    return max((split for split in found if len(split.layers) == few), key=_rate)


class _Search:
    """The orders of one precision, with or without guesses."""

    def __init__(self, partition: Partition, precision: str, guesses: bool) -> None:
        self._partition, self._precision, self._guesses = partition, precision, guesses
        self._kinds = kinds_of(partition.request)
        request = partition.request
        self._stages_max = min(request.shape.layers, limits.STAGES_MAX, len(request.stage_sites))
        self._stages_min = self._stages_max if request.all_devices else 1
        self._for_stages = [kind for kind, sites in enumerate(self._kinds) if sites[0].runs_stages]
        self._heads = {site.name for site in request.heads}
        self._found: dict[State, Split | None] = {}

    def finalists(self) -> list[Split]:
        """The best states that are tried, and the best of each number of stages; the best first."""
        if sum(1 for _ in islice(self._states(), ORDERS_MAX + 1)) <= ORDERS_MAX:
            self._rate([*self._states()])
        else:
            self._search()
        found = sorted(filter(None, self._found.values()), key=_rate, reverse=True)
        enough = FINAL_SHARE * _rate(found[0]) if found else 0.0
        best_of = {len(split.layers): split for split in reversed(found)}
        kept = [*found[:FINALISTS], *(split for split in best_of.values() if split not in found[:FINALISTS])]
        return [split for split in kept if _rate(split) >= enough]

    def _states(self) -> Iterator[State]:
        """All of them, those of few stages first."""
        counts = Counter({kind: len(self._kinds[kind]) for kind in self._for_stages})
        for length in range(self._stages_min, self._stages_max + 1):
            for order in self._longer((), counts, length):
                yield from ((order, place) for place in self._places(order))

    def _search(self) -> None:
        """From the fastest devices, as many as are needed and more: goes to better neighbours until there
        are none."""
        chance = random.Random(SEED)
        for order in self._beginnings():
            state: State | None = (order, self._places(order)[0])
            while state is not None and len(self._found) < TRIES:
                neighbours = self._neighbours(*state)
                chance.shuffle(neighbours)
                state = self._better(neighbours, self._found[state])

    def _better(self, states: Sequence[State], than: Split | None) -> State | None:
        """The best of the first few of which one is better; None where none is."""
        for at in range(0, len(states), TOGETHER):
            some = states[at : at + TOGETHER]
            self._rate(some)
            best = max(some, key=lambda state: _rate(self._found[state]))
            if _is_better(self._found[best], than):
                return best
            if len(self._found) >= TRIES:
                break
        return None

    def _rate(self, states: Sequence[State]) -> None:
        """Finds the splits of those of which none is known yet."""
        fresh = [state for state in dict.fromkeys(states) if state not in self._found]
        for _, alike in groupby(sorted(fresh, key=lambda state: len(state[0])), lambda state: len(state[0])):
            together = list(alike)
            for at in range(0, len(together), TOGETHER):
                some = together[at : at + TOGETHER]
                found = self._partition.best_of([self._arrangement(*state) for state in some], quickly=True)
                self._found.update(zip(some, found, strict=True))

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
        used = Counter(order)  # a kind has devices that may all be the head, or none that may
        may_head = [sites[0].name in self._heads for sites in self._kinds]
        free = [kind for kind, sites in enumerate(self._kinds) if used[kind] < len(sites) and may_head[kind]]
        return [*free, *(-1 - at for at, kind in enumerate(order) if may_head[kind])]

    def _arrangement(self, order: Order, place: int) -> Arrangement:
        left = [list(sites) for sites in self._kinds]
        chosen = tuple(left[kind].pop(0) for kind in order)
        head = chosen[-1 - place] if place < 0 else left[place][0]
        return Arrangement(order=chosen, head=head, precision=self._precision, guesses=self._guesses)

    def _beginnings(self) -> Iterator[Order]:
        """The fastest devices first, the most memory first; for each the fewest that hold the model, twice as
        many, ..., all."""
        speeds = [-sites[0].profile.bytes_per_s() for sites in self._kinds]
        sizes = [-sites[0].memory_bytes for sites in self._kinds]
        for worth in (speeds, sizes):
            kinds = sorted(self._for_stages, key=worth.__getitem__)
            ranked = [kind for kind in kinds for _ in self._kinds[kind]]
            length = self._stages_min
            while length <= self._stages_max:
                order = tuple(ranked[:length])
                states = [(order, place) for place in self._places(order)[:2]]
                self._rate(states)
                if all(self._found[state] is None for state in states):
                    length += 1
                    continue
                yield order
                is_last = length == self._stages_max
                length = 2 * length if is_last else min(2 * length, self._stages_max)

    def _neighbours(self, order: Order, place: int) -> list[State]:
        """Orders that differ in one device, or in the places of two; and other places of the head."""
        used = Counter(order)
        spare = [kind for kind in self._for_stages if used[kind] < len(self._kinds[kind])]
        size = len(order)
        orders = {order[:at] + order[at + 1 :] for at in range(size)} if size > self._stages_min else set()
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
            places = set(self._places(each))
            if each != order and size > PLACES_OF_SIZE:
                first, *_, last = [*self._places(each)] * 2
                places &= {first, last, place}
            found += [(each, at) for at in sorted(places) if (each, at) != (order, place)]
        return found


def _rate(split: Split | None) -> float:
    return 0.0 if split is None else split.forecast.tokens_per_s


def _best(splits: Sequence[Split]) -> Split | None:
    best: Split | None = None
    for split in splits:
        if _is_better(split, best):
            best = split
    return best


def _is_better(found: Split | None, than: Split | None) -> bool:
    """By more than rounding, so that of equal plans the first, with the fewest devices, stays."""
    if found is None or than is None:
        return found is not None
    return _rate(found) > _rate(than) * (1 + ALIKE_MARGIN)


def kinds_of(request: PlanRequest) -> list[list[Site]]:
    """Devices that can stand for each other: same profile, memory, links to all others, machine where it is
    shared, and leave to be the head."""
    network, kinds = request.network, list[list[Site]]()
    heads = {site.name for site in request.heads}
    hosts = Counter(site.shared.host for site in request.sites if site.shared is not None)

    def nameless(site: Site) -> tuple[Site, bool]:
        shared = site.shared
        if shared is not None and hosts[shared.host] == 1:
            shared = replace(shared, host="")  # one that is alone on its machine shares nothing with others
        return replace(site, name="", shared=shared), site.name in heads

    for site in request.sites:
        for kind in kinds:
            pair = site.name, kind[0].name
            others = [other.name for other in request.sites if other.name not in pair]
            if nameless(site) == nameless(kind[0]) and (
                not network.pairs
                or all(network.between(pair[0], name) == network.between(pair[1], name) for name in others)
            ):
                kind.append(site)
                break
        else:
            kinds.append([site])
    return kinds
