"""How a core is driven, by whoever has the sockets, threads and clock that it knows nothing of.

*A turn* of a daemon's loop takes what was computed first, then some of what came, and looks at the time last:
with all that came read, or a hold would end while its head's pings wait to be read.

*Run to completion*: an event is over when all that it led to is done. What doing it brings about (a
connection that takes no more, a name that cannot be dialled, a plan) is the core's next event, and waits
until then. So whoever drives a core never has commands at hand that a later event has made void.

Used by the runtime's head, drafters and daemon, and by those of the fault simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Event = TypeVar("Event")
Command = TypeVar("Command")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A line for the log of whoever drives a core; `level` is `info`, `warning` or `error`."""

    text: str
    level: str = "info"


class Driver(Generic[Event, Command]):
    """Gives one core its events. `handle` is the core's, with what has to be said of it afterwards; `do`
    carries out a command."""

    def __init__(self, handle: Callable[[Event], Iterable[Command]], do: Callable[[Command], None]) -> None:
        self._handle = handle
        self._do = do
        self._waiting: deque[Event] = deque()
        self._is_busy = False

    def give(self, event: Event) -> None:
        """The core's next event; within a command it waits until all commands are done.

        What `handle` or `do` raises comes out of the outermost call. The rest of that event's commands is
        left out then; what waits comes with the next event.
        """
        self._waiting.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._waiting:
                for command in self._handle(self._waiting.popleft()):
                    self._do(command)
        finally:
            self._is_busy = False


Take = Callable[[], bool]
"""Takes one thing, and says whether there was one."""


def turn(take_result: Take, take_message: Take, look: Callable[[bool], None], messages_max: int) -> bool:
    """One turn: all results, at most `messages_max` messages, and a look at the time.

    Returns whether all that came was read; `look` is told.
    """
    while take_result():
        pass
    is_read = any(not take_message() for _ in range(messages_max))
    look(is_read)
    return is_read
