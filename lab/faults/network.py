"""Who is connected with whom in a cluster that fails, and what becomes of it when a connection breaks.

A `Connection` is what a ZeroMQ socket pair is: two directions, each in order. Places are the head and the
devices, by name. Knows no message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flowspec.core.protocol.types import Message
from flowspec.plan.timing import LinkSpec
from flowspec.sim.clock import Clock
from flowspec.sim.link import Frames, SharedInterface, SimulatedLink
from flowspec.wire.codec import Envelope, Tensor

STALLED_S = 1.5
"""When both ends of a connection that stalls close it: no sign of life passes."""
NOTICED_S_MAX = 0.05
"""How long the closing of a connection may take to show at its other end."""

SLOW_LINK = LinkSpec(delay_s=0.3, bandwidth_mbps=0.01)
"""A link that has become slow: a frame of 200 bytes takes .46 s."""

NARROW_MBPS = 1.0
NARROW_ROW_BYTES = 25000
"""Of a device whose ways out and in are slow: a row takes a fifth of a second, and what has no rows next to
nothing."""

Take = Callable[["Connection", Envelope, Frames], None]
Refuse = Callable[["Connection", str], None]


@dataclass(slots=True)
class Connection:
    """From the place that dialled to the one that listens; `lost` is called at either end when it breaks."""

    dialler: str
    listener: str
    incarnation: int
    role: str
    forth: SimulatedLink
    back: SimulatedLink
    lost: Mapping[str, Callable[[], None]]
    is_open: bool = True

    def send(self, place: str, message: Message, tensor: Tensor | None = None) -> None:
        """Sends from one of the two places to the other; into a broken connection, in vain."""
        if self.is_open:
            self.link_of(place).send(message, tensor)

    def link_of(self, sender: str) -> SimulatedLink:
        return self.forth if sender == self.dialler else self.back


class Network:
    """Makes connections and breaks them; `chance` decides what is lost and what comes late."""

    def __init__(
        self, clock: Clock, chance: random.Random, specs: tuple[LinkSpec, ...], late_s: float
    ) -> None:
        self.clock = clock
        self._chance = chance
        self._specs = specs
        self._late_s = late_s
        self._connections: list[Connection] = []
        self._severed: set[frozenset[str]] = set()
        self._one_way: set[tuple[str, str]] = set()
        self._mute: set[tuple[str, str]] = set()
        self._slow: set[frozenset[str]] = set()
        self._unresolved: set[tuple[str, str]] = set()
        self._narrow: dict[str, tuple[SharedInterface, SharedInterface]] = {}
        self.tamper: Callable[[Connection, str, Frames], Sequence[Frames]] | None = None
        """What somebody makes of the frames that a place sends on any connection."""

    def connect(
        self,
        dialler: str,
        listener: str,
        role: str,
        incarnation: int,
        take: Mapping[str, Take],
        lost: Mapping[str, Callable[[], None]],
        refuse: Mapping[str, Refuse],
    ) -> Connection:
        """A new connection; `take` receives what arrives at each place, `refuse` hears there of what came and
        is no message."""

        def link(sender: str, receiver: str) -> SimulatedLink:
            return SimulatedLink(
                self.clock,
                self._chance.choice(self._specs),
                sender,
                lambda envelope, frames: take[receiver](connection, envelope, frames),
                chance=random.Random(self._chance.getrandbits(64)),
                incarnation=incarnation,
            )

        connection = Connection(
            dialler, listener, incarnation, role, link(dialler, listener), link(listener, dialler), lost
        )
        connection.forth.stalls = lambda frames: self._stalls(connection, dialler, listener, frames)
        connection.back.stalls = lambda frames: self._stalls(connection, listener, dialler, frames)
        for sender, receiver in ((dialler, listener), (listener, dialler)):
            way = connection.link_of(sender)
            way.refuse = partial(refuse.get(receiver, _ignore), connection)
            if self.tamper is not None:
                way.tamper = partial(self._tampered, connection, sender)
            if self._is_held_up(sender, receiver) or (dialler, listener) in self._unresolved:
                way.hold()
            if frozenset((dialler, listener)) in self._slow:
                way.spec = SLOW_LINK
            way.interfaces = self._ways(sender, receiver)
        self._connections = [known for known in self._connections if known.is_open]
        self._connections.append(connection)
        return connection

    def close(self, connection: Connection, *, by: str | None) -> None:
        """One place closes a connection (None: it breaks); whoever else is there is told soon, unless the way
        is severed."""
        if not connection.is_open:
            return
        connection.is_open = False
        for link in (connection.forth, connection.back):
            link.cut(self._chance.random(), self._chance.choice((0.0, 0.0, self._late_s)))
        for place, tell in connection.lost.items():
            other = connection.listener if place == connection.dialler else connection.dialler
            if place != by and not self._is_held_up(other, place):
                self.clock.at(self.clock.now_s + self._chance.uniform(0, NOTICED_S_MAX), tell)

    def close_all(self, place: str) -> None:
        """A place is gone, with all its connections; nothing of what was on its way to it arrives."""
        own = [each for each in self._connections if each.is_open and place in (each.dialler, each.listener)]
        for connection in own:
            (connection.forth if place == connection.listener else connection.back).cut()
            self.close(connection, by=place)

    def break_between(self, first: str, second: str) -> None:
        """The connections between two places break; both ends notice."""
        for connection in self._between(first, second):
            self.close(connection, by=None)  # nothing where it is closed already

    def block(self, sender: str, receiver: str) -> None:
        """Payloads do not pass one way; the connection on which one is sent stalls, and breaks for want of
        signs of life."""
        self._one_way.add((sender, receiver))

    def _stalls(self, connection: Connection, sender: str, receiver: str, frames: Frames) -> bool:
        if (sender, receiver) not in self._one_way or len(frames) == 1:
            return False
        self.clock.at(self.clock.now_s + STALLED_S, lambda: self.close(connection, by=None))
        return True

    def _tampered(self, connection: Connection, sender: str, frames: Frames) -> Sequence[Frames]:
        return [frames] if self.tamper is None else self.tamper(connection, sender, frames)

    def garble(self, first: str, second: str) -> None:
        """The next frames between two places come damaged, on each connection and in each direction."""

        def damaged(
            link: SimulatedLink, before: Callable[[Frames], Sequence[Frames]] | None
        ) -> Callable[[Frames], Sequence[Frames]]:
            def once(frames: Frames) -> Sequence[Frames]:
                link.tamper = before
                return [[bytes(frames[0])[:-1], *frames[1:]]]

            return once

        for connection in self._between(first, second):
            for link in (connection.forth, connection.back):
                link.tamper = damaged(link, link.tamper)

    def mute(self, sender: str, receiver: str) -> None:
        """Nothing passes one way until `unmute`: what is said the other way does."""
        self._mute.add((sender, receiver))
        for connection in self._between(sender, receiver):
            connection.link_of(sender).hold()

    def unmute(self, sender: str, receiver: str) -> None:
        self._mute.discard((sender, receiver))
        self._let_go(sender, receiver)

    def slow_down(self, first: str, second: str) -> None:
        """All connections between two places are slow until `speed_up`."""
        self._slow.add(frozenset((first, second)))
        for connection in self._between(first, second):
            connection.forth.spec = connection.back.spec = SLOW_LINK

    def speed_up(self, first: str, second: str) -> None:
        self._slow.discard(frozenset((first, second)))
        for connection in self._between(first, second):
            connection.forth.spec = connection.back.spec = self._specs[0]

    def narrow(self, place: str) -> None:
        """All that a place sends takes one slow way until `mend_all`, and all that it receives another one:
        signs of life wait behind data."""
        out, back = (SharedInterface(NARROW_MBPS, NARROW_ROW_BYTES) for _ in range(2))
        self._narrow[place] = out, back
        self._lay()

    def _ways(self, sender: str, receiver: str) -> list[SharedInterface]:
        out = [self._narrow[sender][0]] if sender in self._narrow else []
        return out + ([self._narrow[receiver][1]] if receiver in self._narrow else [])

    def _lay(self) -> None:
        for known in self._connections:
            known.forth.interfaces = self._ways(known.dialler, known.listener)
            known.back.interfaces = self._ways(known.listener, known.dialler)

    def lose_name(self, dialler: str, listener: str) -> None:
        """A place cannot find out where another one is until `find_name`: what it dials opens no sooner."""
        self._unresolved.add((dialler, listener))

    def find_name(self, dialler: str, listener: str) -> None:
        self._unresolved.discard((dialler, listener))
        self._let_go(dialler, listener)
        self._let_go(listener, dialler)

    def is_resolved(self, dialler: str, listener: str) -> bool:
        return (dialler, listener) not in self._unresolved

    def is_reached(self, sender: str, receiver: str) -> bool:
        """Whether what one place says arrives at the other on connections that are there."""
        return not self._is_held_up(sender, receiver)

    def _is_held_up(self, sender: str, receiver: str) -> bool:
        return frozenset((sender, receiver)) in self._severed or (sender, receiver) in self._mute

    def _let_go(self, sender: str, receiver: str) -> None:
        """What was held up on the way goes on, if nothing else holds it up."""
        for connection in self._between(sender, receiver):
            is_resolved = self.is_resolved(connection.dialler, connection.listener)
            if is_resolved and not self._is_held_up(sender, receiver):
                connection.link_of(sender).let_go()

    def sever(self, first: str, second: str) -> None:
        """Nothing passes between two places until `mend`; neither notices but by silence."""
        self._severed.add(frozenset((first, second)))
        for connection in self._between(first, second):
            connection.forth.hold()
            connection.back.hold()

    def mend(self, first: str, second: str) -> None:
        """What was held up goes on."""
        self._severed.discard(frozenset((first, second)))
        self._let_go(first, second)
        self._let_go(second, first)

    def mend_all(self) -> None:
        self._one_way.clear()
        self._narrow.clear()
        self._lay()
        for first, second in sorted(map(sorted, self._severed)):
            self.mend(first, second)
        for sender, receiver in sorted(self._mute):
            self.unmute(sender, receiver)
        for first, second in sorted(map(sorted, self._slow)):
            self.speed_up(first, second)
        for dialler, listener in sorted(self._unresolved):
            self.find_name(dialler, listener)

    def _between(self, first: str, second: str) -> list[Connection]:
        return [known for known in self._connections if {known.dialler, known.listener} == {first, second}]


def _ignore(connection: Connection, text: str) -> None:
    """Nobody there minds what is no message."""
