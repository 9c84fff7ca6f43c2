"""Another head that wants a device for itself: it takes it as soon as it is free, and lets go of it in the
end."""

from __future__ import annotations

from flowspec import __version__
from flowspec.core.cluster.forming import CONTROL
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.protocol.cluster_messages import Assign, Error, Hello, Ping, Reset
from flowspec.sim.clock import Clock
from flowspec.sim.link import Frames
from flowspec.wire.codec import Envelope
from lab.faults.daemon import SimDaemon
from lab.faults.network import Connection, Network

PLACE = "another head"
FIRST_SESSION = 1000
PING_S = 0.5


class OtherHead:
    """Asks for `daemon` from now until `until_s`. `number` tells it from others of its kind."""

    def __init__(
        self, clock: Clock, network: Network, daemon: SimDaemon, number: int, layer_count: int, until_s: float
    ) -> None:
        self._clock = clock
        self._until_s = until_s
        self._layer_count = layer_count
        taken = {PLACE: self._take, daemon.name: daemon.take}
        self._line = network.connect(
            PLACE,
            daemon.name,
            CONTROL,
            incarnation_of(FIRST_SESSION + number, 1),
            taken,
            {},
            {daemon.name: daemon.refuse},
        )
        self._line.send(PLACE, Hello(name=PLACE, version=__version__, role=CONTROL))
        self._ask()
        self._ping()

    def _ask(self) -> None:
        if self._clock.now_s < self._until_s:
            assign = Assign(
                model="another",
                fingerprint="another",
                end_layer=self._layer_count,
                layer_count=self._layer_count,
                dtype="float32",
                context=16,
            )
            self._line.send(PLACE, assign)

    def _ping(self) -> None:
        if self._clock.now_s >= self._until_s:
            self._line.send(PLACE, Reset())
            return
        self._line.send(PLACE, Ping())
        self._clock.at(min(self._until_s, self._clock.now_s + PING_S), self._ping)

    def _take(self, connection: Connection, envelope: Envelope, frames: Frames) -> None:
        del connection, frames
        if isinstance(envelope.message, Error) and envelope.message.retry_after_s > 0:
            self._clock.at(self._clock.now_s + PING_S, self._ask)
