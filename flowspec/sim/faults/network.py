"""Who is connected with whom in a cluster that fails, and what becomes of it when a connection breaks.

A `Connection` is what a ZeroMQ socket pair is: two directions, each in order. Places are the head and the devices, by name.
Knows no message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowspec.core.messages import Message
from flowspec.plan.timing import LinkSpec
from flowspec.sim.clock import Clock
from flowspec.sim.link import Frames, Link
from flowspec.wire.codec import Envelope, Tensor

STALLED_S = 1.5
"""When both ends of a connection that stalls close it: no sign of life passes."""
NOTICED_S_MAX = 0.05
"""How long the closing of a connection may take to show at its other end."""

Take = Callable[["Connection", Envelope, Frames], None]


@dataclass(slots=True)
class Connection:
    """From the place that dialled to the one that listens; `lost` is called at either end when it breaks."""

    dialler: str
    listener: str
    incarnation: int
    role: str
    forth: Link
    back: Link
    lost: Mapping[str, Callable[[], None]]
    is_open: bool = True

    def send(self, place: str, message: Message, tensor: Tensor | None = None) -> None:
        """Sends from one of the two places to the other; into a broken connection, in vain."""
        if self.is_open:
            (self.forth if place == self.dialler else self.back).send(message, tensor)


class Network:
    """Makes connections and breaks them; `chance` decides what is lost and what comes late."""

    def __init__(self, clock: Clock, chance: random.Random, specs: tuple[LinkSpec, ...], late_s: float) -> None:
        self.clock = clock
        self._chance = chance
        self._specs = specs
        self._late_s = late_s
        self._connections: list[Connection] = []
        self._severed: set[frozenset[str]] = set()
        self._one_way: set[tuple[str, str]] = set()

    def connect(
        self, dialler: str, listener: str, role: str, incarnation: int, take: Mapping[str, Take], lost: Mapping[str, Callable[[], None]]
    ) -> Connection:
        """A new connection; `take` receives what arrives at each place."""

        def link(sender: str, receiver: str) -> Link:
            return Link(
                self.clock,
                self._chance.choice(self._specs),
                sender,
                lambda envelope, frames: take[receiver](connection, envelope, frames),
                chance=random.Random(self._chance.getrandbits(64)),
                incarnation=incarnation,
            )

        connection = Connection(dialler, listener, incarnation, role, link(dialler, listener), link(listener, dialler), lost)
        connection.forth.stalls = lambda frames: self._stalls(connection, dialler, listener, frames)
        connection.back.stalls = lambda frames: self._stalls(connection, listener, dialler, frames)
        if frozenset((dialler, listener)) in self._severed:
            connection.forth.hold()
            connection.back.hold()
        self._connections = [known for known in self._connections if known.is_open]
        self._connections.append(connection)
        return connection

    def close(self, connection: Connection, *, by: str | None) -> None:
        """One place closes a connection (None: it breaks); whoever else is there is told soon, unless the way is severed."""
        if not connection.is_open:
            return
        connection.is_open = False
        for link in (connection.forth, connection.back):
            link.cut(self._chance.random(), self._chance.choice((0.0, 0.0, self._late_s)))
        for place, tell in connection.lost.items():
            if place != by and frozenset((connection.dialler, connection.listener)) not in self._severed:
                self.clock.at(self.clock.now_s + self._chance.uniform(0, NOTICED_S_MAX), tell)

    def close_all(self, place: str) -> None:
        """A place is gone, with all its connections; nothing of what was on its way to it arrives."""
        for connection in [known for known in self._connections if known.is_open and place in (known.dialler, known.listener)]:
            (connection.forth if place == connection.listener else connection.back).cut()
            self.close(connection, by=place)

    def break_between(self, first: str, second: str) -> None:
        """The connections between two places break; both ends notice."""
        for connection in [known for known in self._connections if known.is_open and {known.dialler, known.listener} == {first, second}]:
            self.close(connection, by=None)

    def block(self, sender: str, receiver: str) -> None:
        """Payloads do not pass one way; the connection on which one is sent stalls, and breaks for want of signs of life."""
        self._one_way.add((sender, receiver))

    def _stalls(self, connection: Connection, sender: str, receiver: str, frames: Frames) -> bool:
        if (sender, receiver) not in self._one_way or len(frames) == 1:
            return False
        self.clock.at(self.clock.now_s + STALLED_S, lambda: self.close(connection, by=None))
        return True

    def sever(self, first: str, second: str) -> None:
        """Nothing passes between two places until `mend`; neither notices but by silence."""
        self._severed.add(frozenset((first, second)))
        for connection in self._between(first, second):
            connection.forth.hold()
            connection.back.hold()

    def mend(self, first: str, second: str) -> None:
        """What was held up goes on."""
        self._severed.discard(frozenset((first, second)))
        for connection in self._between(first, second):
            connection.forth.let_go()
            connection.back.let_go()

    def is_severed(self, first: str, second: str) -> bool:
        return frozenset((first, second)) in self._severed

    def mend_all(self) -> None:
        self._one_way.clear()
        for first, second in sorted(map(sorted, self._severed)):
            self.mend(first, second)

    def _between(self, first: str, second: str) -> list[Connection]:
        return [known for known in self._connections if {known.dialler, known.listener} == {first, second}]
