"""Whose caches there is memory for: answers are admitted while theirs fit beside those that are held, and
else wait in order of arrival.

A ledger of numbers; the head carries out what it says. A conversation holds room from its admission until its
caches are released: also between its answers, for the next one begins with what is cached. Where room is
short such idle caches are given up, for a prefill brings them back. Whoever waits longest goes first,
whatever would fit behind it, so nobody starves.

Room is held for what an answer has come to and some more, not for all that it may become: most end long
before. So it grows, and where there is no room to grow in, an answer waits as the others do, with caches that
may be given up: whatever happens it goes on where it stood, and says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, le

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Submit
from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.core.stage.slots import UNBOUNDED, CacheRoom, cache_size
from flowspec.errors import InputError, counted

RESERVED_TOKENS = 1024
"""An answer holds room for so many tokens more than it has, if it may become so long. One that has to wait
for room to grow in may be read again afterwards: so seldom that it is no matter."""


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
        self.reserved_tokens = RESERVED_TOKENS
        self._held: dict[int, Room] = {}
        self._most: dict[int, int] = {}  # tokens that an answer may come to, with its prompt
        self._tokens: dict[int, int] = {}  # and those that it holds room for, or waits for room for
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
        return self._need(most := self._most_of(submit), most)

    def _most_of(self, submit: Submit) -> int:
        return min(len(submit.prompt) + submit.new_tokens_max, self._context)

    def _need(self, tokens: int, most: int) -> Room:
        """What the caches of so many tokens take, of an answer that may come to `most`."""
        drafters = []
        for context, room in zip(self._draft_contexts, self.room.drafters, strict=True):
            fits = _need_of_drafter(context, most) <= room
            drafters.append(_need_of_drafter(context, tokens) if fits else 0)
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
        number, most = submit.request, self._most_of(submit)
        assert number not in self._needs, f"request {number} is being answered"
        for room, of_stage in zip(self._rooms, self._need_of_stages(most), strict=True):
            if of_stage > room.bytes:
                raise InputError(
                    f"{counted(len(submit.prompt), 'token')} of prompt and {most - len(submit.prompt)} of "
                    f"answer take {room.in_slots(of_stage)} cache slots with their guesses, "
                    f"but the devices have memory for {room.slots}; ask for fewer new tokens, shorten the "
                    "prompt, or use more devices"
                )
        self._most[number] = most
        tokens = self._reserve(number, len(submit.prompt) + len(submit.answered))
        self._needs[number] = self._need(tokens, most)

    def _reserve(self, number: int, tokens: int) -> int:
        """How many tokens an answer that has so many is to hold room for."""
        self._tokens[number] = min(self._most[number], tokens + self.reserved_tokens)
        return self._tokens[number]

    def holds(self, number: int, tokens: int) -> bool:
        """Whether an answer that was admitted holds room for so many tokens."""
        return tokens <= self._tokens[number]

    def grow(self, number: int, tokens: int, idle: Sequence[int]) -> list[int] | None:
        """An answer that was admitted has come to so many tokens, and goes on: it holds room for more.

        Returns whose caches it takes for that, as `admit` does; None where there is no room: then it waits as
        if it had not been admitted.
        """
        need = self._need(self._reserve(number, tokens), self._most[number])
        had = self._needs[number].drafters  # 0: it is not asked about this answer
        drafters = tuple(new if old else 0 for new, old in zip(need.drafters, had, strict=True))
        self._needs[number] = replace(need, drafters=drafters)
        given_up = self._take(number, idle)
        if given_up is None:
            self._admitted.discard(number)
        return given_up

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
        if number is None or (given_up := self._take(number, idle)) is None:
            return None
        self._admitted.add(number)
        return number, given_up

    def _take(self, number: int, idle: Sequence[int]) -> list[int] | None:
        """Has an answer hold what it needs, if there is room; returns who gives up theirs for it."""
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
        return given_up

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
            whole = _need_of_drafter(self._draft_contexts[drafter], self._most[number])
            if need.drafters[drafter] > most or whole > cache_slots:
                self._needs[number] = with_room(need, 0)

    def end(self, number: int) -> None:
        """An answer is over, or nobody waits for it any more; what it holds stays."""
        del self._needs[number], self._tokens[number], self._most[number]
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


def _need_of_drafter(context: int, tokens: int) -> int:
    """Slots that a drafter with this context takes for so many tokens, with guesses."""
    return cache_size(min(tokens, context) + limits.DRAFT_NODES_MAX, context + limits.DRAFT_NODES_MAX)
