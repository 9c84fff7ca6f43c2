"""One connection in virtual time: frames leave one after another and arrive in order.

Owns bytes, delays and the count of messages, as a ZeroMQ connection of the runtime does. Every message passes
through the real codec on its way. Never knows what the messages mean. A connection may be held up and let go
on, and it may be cut: then the last frames on their way are lost, and those before them may still arrive,
late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from flowspec.core.protocol.types import Message
from flowspec.errors import PeerError
from flowspec.plan.timing import LinkSpec
from flowspec.sim.clock import Clock
from flowspec.wire.codec import Envelope, Tensor, decode, encode

INCARNATION = 1

Frames = Sequence[bytes | memoryview]
Receive = Callable[[Envelope, Frames], None]


class SharedInterface:
    """A device's way out, or in, that is slow: what is sent on any connection takes it, in turn. A row of a
    payload counts as `row_bytes`."""

    def __init__(self, mbps: float, row_bytes: int) -> None:
        self._mbps = mbps
        self._row_bytes = row_bytes
        self._free_s = 0.0

    def carry(self, size: int, rows: int, from_s: float) -> float:
        """When so many bytes, and rows, that come at an instant are through."""
        self._free_s = max(self._free_s, from_s) + (size + rows * self._row_bytes) * 8e-6 / self._mbps
        return self._free_s


class SimulatedLink:
    """A connection from `sender`; `receive` is called with each message at the instant its last byte arrives.

    `row_bytes` is how many bytes one row of a payload has in the world that is simulated: the payloads here
    stand in for hidden states and are smaller. None counts them as they are.
    """

    def __init__(
        self,
        clock: Clock,
        spec: LinkSpec,
        sender: str,
        receive: Receive,
        *,
        chance: random.Random,
        row_bytes: int | None = None,
        incarnation: int = INCARNATION,
    ) -> None:
        self.spec = spec
        self.messages = 0
        self.bytes = 0
        self.interfaces: Sequence[SharedInterface] = ()
        """What it shares with other connections."""
        self._clock = clock
        self._chance = chance
        self._free_s = 0.0
        self._arrived_s = 0.0
        self._sender = sender
        self._receive = receive
        self._row_bytes = row_bytes
        self._received = 0
        self._incarnation = incarnation
        self._end: int | None = None
        self._late_s = 0.0
        self._held: list[Frames] | None = None
        self.stalls: Callable[[Frames], bool] = lambda frames: False
        """Whether the link stalls with these frames, as one that does not carry large packets: they and what
        is behind them wait."""
        self.tamper: Callable[[Frames], Sequence[Frames]] | None = None
        """What somebody makes of the next frames on their way."""
        self.refuse: Callable[[str], None] = lambda text: None
        """Hears why what came is no message; nothing behind it is read."""

    def carry(self, size: int, arrive: Callable[[], None], rows: int = 0) -> None:
        """Queue so many bytes behind those already on the connection; `arrive` is called when the last is
        there. Ways that are shared count `rows`, too."""
        transfer_s = self.spec.transfer_s(size)
        through_s = self._clock.now_s
        for way in self.interfaces:
            through_s = way.carry(size, rows, through_s)
        self._free_s = max(self._free_s, through_s) + transfer_s
        late_s = self._chance.uniform(0, self.spec.jitter_s) if self.spec.jitter_s else 0.0
        # Jitter never reorders: a connection is a TCP stream, so what is late holds up what is behind it.
        self._arrived_s = max(self._arrived_s, self._free_s + self.spec.delay_s + late_s)
        self.messages += 1
        self.bytes += size
        self._clock.at(self._arrived_s, arrive)

    def send(self, message: Message, tensor: Tensor | None = None, extra_bytes: int = 0) -> None:
        """Queue a message behind those already on the connection; `extra_bytes` of it are not there in this
        world."""
        frames = encode(
            Envelope(
                incarnation=self._incarnation,
                sender=self._sender,
                sequence=self.messages,
                message=message,
                tensor=tensor,
            )
        )
        size = len(frames[0]) + extra_bytes
        if tensor is not None:
            size += len(tensor.data) if self._row_bytes is None else tensor.rows * self._row_bytes
        self.carry(size, lambda: self._arrive(frames), 0 if tensor is None else tensor.rows)

    def cut(self, survivors: float = 0.0, late_s: float = 0.0) -> None:
        """Ends the connection: of the frames on their way the first `survivors` (a share) arrive, so much
        later, and no others."""
        if self._end is None:
            self._end = self._received + int(survivors * (self.messages - self._received))
            self._late_s = late_s

    def hold(self) -> None:
        """Nothing arrives until `let_go`."""
        self._held = self._held or []

    def let_go(self) -> None:
        held, self._held = self._held, None
        for number, frames in enumerate(held or ()):
            self._arrive(frames)
            if self._held is not None and held is not None:  # it stalls again
                self._held += held[number + 1 :]
                return

    def _arrive(self, frames: Frames, is_late: bool = False) -> None:
        if self._held is None and self.stalls(frames):
            self.hold()
        if self._held is not None:
            self._held.append(frames)
        elif self._late_s and not is_late:
            self._clock.at(self._clock.now_s + self._late_s, lambda: self._arrive(frames, is_late=True))
        elif self._end is None or self._received < self._end:
            self._deliver(frames)

    def _deliver(self, frames: Frames) -> None:
        number, self._received, tamper = self._received, self._received + 1, self.tamper
        for each in [frames] if tamper is None else tamper(frames):
            try:
                envelope = decode(each)
            except PeerError as error:
                if tamper is None:
                    raise
                self._end = self._received
                self.refuse(str(error))
                return
            assert tamper is not None or envelope.sequence == number, (
                f"message {envelope.sequence} from {self._sender}, expected {number}"
            )
            self._receive(envelope, each)

    def is_full(self, frames_max: int) -> bool:
        """Whether nothing passes, and so many messages wait."""
        return self._held is not None and len(self._held) >= frames_max
