"""Whose caches there is memory for: answers are admitted while theirs fit beside those that are held, and
else wait in order of arrival.

A ledger of numbers; the head carries out what it says. A conversation holds room from its admission until its
caches are released: also between its answers, for the next one begins with what is cached. Where room is
short such idle caches are given up, for a prefill brings them back. Whoever waits longest goes first,
whatever would fit behind it, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, le

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Submit
from flowspec.core.protocol import limits
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.core.stage.slots import UNBOUNDED, CacheRoom, cache_size
from flowspec.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of caches at each stage, and cache slots at each drafter."""

    stages: tuple[int, ...]
    drafters: tuple[int, ...]

    def __add__(self, other: Room) -> Room:
        return Room(
            stages=tuple(map(add, self.stages, other.stages)),
            drafters=tuple(map(add, self.drafters, other.drafters)),
        )

    def has(self, need: Room) -> bool:
        """Whether as much as `need` is in here."""
        return all(map(le, need.stages, self.stages)) and all(map(le, need.drafters, self.drafters))

    def at_least(self, other: Room) -> Room:
        """The larger of each."""
        return Room(
            stages=tuple(map(max, self.stages, other.stages)),
            drafters=tuple(map(max, self.drafters, other.drafters)),
        )


class Admission:
    """What is held of the `room`, and who waits for some, at stages of this `context` and `sliding_window`
    and at the drafters."""

    def __init__(
        self, context: int, drafters: Sequence[DrafterTraits], sliding_window: SlidingWindow | None = None
    ) -> None:
        self._context = context
        self._window = sliding_window
        self._draft_contexts = [drafter.context for drafter in drafters]
        self._rooms: tuple[CacheRoom, ...] = (UNBOUNDED,)
        self.room = Room(
            stages=(UNBOUNDED.bytes,), drafters=tuple(drafter.cache_slots for drafter in drafters)
        )
        self._held: dict[int, Room] = {}
        self._tokens: dict[int, int] = {}
        self._needs: dict[int, Room] = {}
        self._admitted: set[int] = set()

    @property
    def is_awaited(self) -> bool:
        return len(self._needs) > len(self._admitted)

    @property
    def waiting(self) -> list[int]:
        return [number for number in self._needs if number not in self._admitted]

    @property
    def _nothing(self) -> Room:
        return Room(stages=(0,) * len(self._rooms), drafters=(0,) * len(self._draft_contexts))

    @property
    def held(self) -> Room:
        """What all hold together; never more than the room."""
        return sum(self._held.values(), self._nothing)

    def validate(self) -> None:
        assert self._admitted <= self._needs.keys(), "an answer is admitted that nobody asks for"
        assert self._admitted <= self._held.keys(), "an answer is admitted, and holds nothing"
        assert self.room.has(self.held), f"{self.held} is held of {self.room}"

    def holding(self, number: int) -> Room:
        """What one conversation holds."""
        return self._held.get(number, self._nothing)

    def need_of(self, submit: Submit) -> Room:
        """What an answer's caches may come to take, with its guesses; nothing of a drafter that has no memory
        for it even alone."""
        tokens = _tokens(submit)
        drafters = []
        for context, room in zip(self._draft_contexts, self.room.drafters, strict=True):
            need = cache_size(min(tokens, context) + limits.DRAFT_NODES_MAX, context + limits.DRAFT_NODES_MAX)
            drafters.append(need if need <= room else 0)
        return Room(stages=self._need_of_stages(tokens), drafters=tuple(drafters))

    def _need_of_stages(self, tokens: int) -> tuple[int, ...]:
        most = self._context + limits.TREE_NODES_MAX
        used = min(tokens, self._context) + limits.TREE_NODES_MAX
        window_most = most if self._window is None else min(most, self._window.slots)
        slots, window_slots = cache_size(used, most), cache_size(min(used, window_most), window_most)
        return tuple(room.need(slots, window_slots) for room in self._rooms)

    def has_room_beside(self, tokens: int) -> bool:
        """Whether an answer of so many tokens, its prompt included, fits at the stages beside all that is
        held now. Any thread may ask; what changes meanwhile may be seen or not."""
        held = sum(tuple(self._held.values()), self._nothing).stages
        return all(
            room >= used + need
            for room, used, need in zip(self.room.stages, held, self._need_of_stages(tokens), strict=False)
        )

    def ask(self, submit: Submit) -> None:
        """An answer is wanted; raises `InputError` for one that there is no room for even alone."""
        assert submit.request not in self._needs, f"request {submit.request} is being answered"
        need = self.need_of(submit)
        for room, of_stage in zip(self._rooms, need.stages, strict=True):
            if of_stage > room.bytes:
                raise InputError(
                    f"{len(submit.prompt)} tokens of prompt and {submit.new_tokens_max} of answer take "
                    f"{room.in_slots(of_stage)} cache slots with their guesses, "
                    f"but the devices have memory for {room.slots}; ask for fewer new tokens, shorten the "
                    "prompt, or use more devices"
                )
        self._tokens[submit.request] = _tokens(submit)
        self._needs[submit.request] = need

    def may_draft(self, number: int, drafter: int) -> bool:
        """Whether a drafter has memory for an answer that was asked for, or for what a conversation has
        between its answers."""
        return self._needs.get(number, self.holding(number)).drafters[drafter] > 0

    def admit(self, idle: Sequence[int]) -> tuple[int, list[int]] | None:
        """Lets in who waits longest, if there is room with the caches of some of the `idle`, the first of
        them first.

        Returns whom, and whose caches it takes for that, which are to be released before it sends anything.
        """
        number = next((number for number in self._needs if number not in self._admitted), None)
        if number is None:
            return None
        wanted = self._needs[number].at_least(self.holding(number))  # a cache does not shrink
        held = sum((held for other, held in self._held.items() if other != number), self._nothing)
        given_up: list[int] = []
        for other in idle:
            if self.room.has(held + wanted):
                break
            if other != number and other in self._held:
                given_up.append(other)
                held = sum(
                    (held for each, held in self._held.items() if each not in (number, *given_up)),
                    self._nothing,
                )
        if not self.room.has(held + wanted):
            return None
        for other in given_up:
            del self._held[other]
        self._held[number] = wanted
        self._admitted.add(number)
        return number, given_up

    def drafter_back(self, drafter: int, cache_slots: int) -> None:
        """A drafter that was lost holds nothing, and has so many slots: those who came first get what they
        held of it, as far as there is room."""

        def with_room(room: Room, slots: int) -> Room:
            return replace(room, drafters=(*room.drafters[:drafter], slots, *room.drafters[drafter + 1 :]))

        self.room = with_room(self.room, cache_slots)
        left = cache_slots
        for number, held in self._held.items():
            slots = held.drafters[drafter] if held.drafters[drafter] <= left else 0
            left -= slots
            self._held[number] = with_room(held, slots)
        for number, need in self._needs.items():
            is_in = number in self._admitted
            most = self._held[number].drafters[drafter] if is_in else cache_slots
            if need.drafters[drafter] > most:
                self._needs[number] = with_room(need, 0)

    def end(self, number: int) -> None:
        """An answer is over, or nobody waits for it any more; what it holds stays."""
        del self._needs[number], self._tokens[number]
        self._admitted.discard(number)

    def release(self, number: int) -> None:
        self._held.pop(number, None)

    def move_to(self, rooms: Sequence[CacheRoom]) -> None:
        """Other stages with this room hold nothing yet: everybody waits again, whoever came first before all
        others."""
        self._rooms = tuple(rooms)
        self.room = replace(self.room, stages=tuple(room.bytes for room in rooms))
        self._admitted.clear()
        nothing = self._nothing.stages
        self._held = {number: replace(held, stages=nothing) for number, held in self._held.items()}
        self._needs = {
            number: replace(need, stages=self._need_of_stages(self._tokens[number]))
            for number, need in self._needs.items()
        }


def _tokens(submit: Submit) -> int:
    """Of the prompt and a whole answer."""
    return len(submit.prompt) + submit.new_tokens_max
