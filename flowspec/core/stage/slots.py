"""The slot map of one request at one stage: which cache slot holds which node, who may see it, and how many
there is memory for.

Integers only; the tensors that the slots index live with the executor. Freed slots are reused lowest first,
so the part of the cache in use stays dense without ever being copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import PeerError

WORK_BYTES = 64 << 20
"""Activations of one prefill chunk, queued frames and allocator slack."""


def slots_in(free_bytes: int, slot_bytes: int) -> int:
    """Cache slots that there is memory for once the weights are loaded, with room left to work."""
    return max(0, free_bytes - WORK_BYTES) // slot_bytes


def cache_size(used: int, capacity: int) -> int:
    """Slots that a cache takes memory for where `used` are in use: whole blocks, but no more than were
    reserved."""
    return min(capacity, -(-used // limits.CACHE_BLOCK_SLOTS) * limits.CACHE_BLOCK_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """A stage has memory for so many `slots`. One takes `slot_bytes` in all its layers, `windowed_bytes` of
    these in layers that hold no more of a request than their window. The states of a request take
    `state_bytes`."""

    slots: int
    slot_bytes: int = 1
    windowed_bytes: int = 0
    state_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes

    def need(self, slots: int, window_slots: int) -> int:
        """Bytes that a request takes with so many slots, and so many in layers with a window."""
        of_slots = (self.slot_bytes - self.windowed_bytes) * slots + self.windowed_bytes * window_slots
        return of_slots + self.state_bytes

    def in_slots(self, size_bytes: int) -> int:
        """As many slots of all layers, rounded up."""
        return -(-size_bytes // self.slot_bytes)


UNBOUNDED = CacheRoom(slots=limits.ID_MAX)


class SlotTable:
    """Slots `0..capacity-1` with a number that each holds (-1: free).

    Takes memory for those that were used, not for all that are reserved: a head may reserve far more than it
    uses.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = np.full(0, -1, dtype=np.int32)
        self._freed: list[int] = []
        self._high = 0

    @property
    def high(self) -> int:
        """One above the highest slot in use; attention reads no further."""
        return self._high

    def take(self, number: int) -> int:
        """The lowest free slot, which holds this from now on; raises `PeerError` when the head sends more
        than it reserved."""
        if self._freed:
            slot = heapq.heappop(self._freed)
        elif self._high < self.capacity:
            slot, self._high = self._high, self._high + 1
        else:
            raise PeerError(
                f"expected at most {self.capacity} nodes at once, as reserved by the head; one more came"
            )
        if slot == len(self.held):
            self._grow(min(self.capacity, max(limits.CACHE_BLOCK_SLOTS, 2 * slot)) - slot)
        self.held[slot] = number
        return slot

    def _grow(self, more: int) -> None:
        self.held = np.concatenate([self.held, np.full(more, -1, dtype=np.int32)])

    def fill(self, numbers: npt.NDArray[np.int32]) -> None:
        """The first slots of an empty table hold these numbers."""
        assert not len(self.held), "only what is empty is filled"
        assert len(numbers) <= self.capacity, f"{len(numbers)} are held, {self.capacity} may be"
        self._grow(cache_size(len(numbers), self.capacity))
        self.held[: len(numbers)] = numbers
        self._high = len(numbers)

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert self.held[slot] >= 0, f"slot {slot} is free already"
            self.held[slot] = -1
            heapq.heappush(self._freed, slot)
        used = np.flatnonzero(self.held[: self._high] >= 0)
        high = int(used[-1]) + 1 if len(used) else 0
        if high < self._high:
            self._high = high
            self._freed = [slot for slot in self._freed if slot < high]
            heapq.heapify(self._freed)

    def validate(self) -> None:
        assert self._high <= min(self.capacity, len(self.held)), (
            f"slot {self._high} is in use of {self.capacity}"
        )
        assert self.held[self._high :].max(initial=-1) < 0, "slots above the highest are in use"
        free = np.flatnonzero(self.held[: self._high] < 0)
        assert sorted(self._freed) == free.tolist(), (
            "the slots that are free and those that may be taken differ"
        )


class SlotMap(SlotTable):
    """The slots of a request: of each the position and token of the node that it holds, and whether it is
    committed."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.committed = np.zeros(0, dtype=bool)
        self.tokens = np.zeros(0, dtype=np.int32)

    @property
    def position(self) -> npt.NDArray[np.int32]:
        """Of the node in each slot, -1 where it is free."""
        return self.held

    def allocate(self, position: int, *, committed: bool, token: int = 0) -> int:
        """Takes a slot for a node; raises `PeerError` when the head sends more than it reserved."""
        slot = self.take(position)
        self.committed[slot] = committed
        self.tokens[slot] = token
        return slot

    def _grow(self, more: int) -> None:
        super()._grow(more)
        self.committed = np.concatenate([self.committed, np.zeros(more, dtype=bool)])
        self.tokens = np.concatenate([self.tokens, np.zeros(more, dtype=np.int32)])

    def free(self, slots: Sequence[int]) -> None:
        super().free(slots)
        self.committed[list(slots)] = False

    def validate(self) -> None:
        super().validate()
        free = self.held[: self._high] < 0
        assert not self.committed[: self._high][free].any(), "a free slot is committed"

    def is_committed_at(self, position: int) -> bool:
        return bool((self.committed[: self._high] & (self.position[: self._high] == position)).any())

    def path(self, length: int) -> npt.NDArray[np.int64]:
        """The slots of the committed nodes at the first `length` positions, in their order, `[length]`."""
        held = self.position[: self._high]
        slots = np.flatnonzero(self.committed[: self._high] & (held < length))
        slots = slots[np.argsort(held[slots], kind="stable")]
        assert np.array_equal(held[slots], np.arange(length)), "each row stands behind its parent"
        return slots

    def copy_path(self, length: int, capacity: int) -> tuple[SlotMap, npt.NDArray[np.int64]]:
        """A map of this capacity whose first slots hold these nodes, and which slots they have here."""
        of = self.path(length)
        copy = SlotMap(capacity)
        copy.fill(np.arange(length, dtype=np.int32))
        copy.committed[:length] = True
        copy.tokens[:length] = self.tokens[of]
        return copy, of

    def from_position(self, position: int) -> list[int]:
        """Slots whose nodes stand at `position` or later."""
        return [int(slot) for slot in np.flatnonzero(self.position[: self._high] >= position)]

    def visible(self, positions: Sequence[int], branches: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
        """The attention mask `[rows, high]`: committed slots before each row's position, and the slots of its
        branch.

        `branches[row]` holds the row's own slot and those of its ancestors that are not committed.
        """
        high = self._high
        own = np.asarray(positions, dtype=np.int32)[:, None]  # [rows, 1]
        mask = self.committed[:high] & (self.position[:high] < own)  # [rows, high]
        for row, branch in enumerate(branches):
            mask[row, list(branch)] = True
        return mask


class WindowSlots(SlotTable):
    """The slots of layers with a window: `held` `[slots]` is the slot of the request's `SlotMap` whose node
    each holds."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._places: dict[int, int] = {}

    def give(self, slots: Sequence[int]) -> list[int]:
        """Takes a slot for the node of each slot of the whole map; raises `PeerError` when too many come."""
        for slot in slots:
            self._places[slot] = self.take(slot)
        return [self._places[slot] for slot in slots]

    def copy_path(
        self, of: npt.NDArray[np.int64], capacity: int
    ) -> tuple[WindowSlots, npt.NDArray[np.int64]]:
        """The slots, of this capacity, of a copy whose whole map has in slot i what is in slot `of[i]` of the
        whole map here, and which places they have here."""
        slots = np.array(
            [slot for slot, own in enumerate(of.tolist()) if own in self._places], dtype=np.int32
        )
        copy = WindowSlots(capacity)
        copy.fill(slots)
        copy._places = {slot: place for place, slot in enumerate(slots.tolist())}
        return copy, np.array([self._places[own] for own in of[slots].tolist()], dtype=np.int64)

    def free_of(self, slots: Sequence[int]) -> list[int]:
        """Frees those that hold nodes of these slots of the whole map, as far as there are any."""
        freed = [place for slot in slots if (place := self._places.pop(slot, -1)) >= 0]
        self.free(freed)
        return freed

    def path_in(self, positions: range, slots: SlotMap) -> list[int]:
        """Where the committed nodes at these positions are, in their order."""
        held = np.flatnonzero(self.held[: self.high] >= 0)
        of = self.held[held]
        at = slots.position[of]
        on_path = slots.committed[of] & (at >= positions.start) & (at < positions.stop)
        held, at = held[on_path], at[on_path]
        order = np.argsort(at)
        assert np.array_equal(at[order], positions), "each row stands behind its parent"
        return [int(place) for place in held[order]]

    def free_below(
        self, position: int, positions: npt.NDArray[np.int32], spared: range = range(0)
    ) -> list[int]:
        """Frees what stands before a position and is not `spared`; `positions` are those of the whole map's
        slots."""
        held = self.held[: self.high]
        old = held[(held >= 0) & (positions[held] < position)]
        return self.free_of([slot for slot in old.tolist() if positions[slot] not in spared])

    def validate(self) -> None:
        super().validate()
        held = {slot: place for place, slot in enumerate(self.held[: self.high].tolist()) if slot >= 0}
        assert held == self._places, "a window's slots and where they are differ"
