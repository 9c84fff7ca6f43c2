"""A stage's connections to the next one: dialled for one assignment, watched, and closed with it.

Segments go over one, and ZeroMQ's signs of life over another, which carries nothing else: behind a long
segment on a slow link they would come so late that the next stage was taken for lost.
"""

from __future__ import annotations

from typing import Any

import zmq

from flowspec.core.protocol.cluster_messages import Assign, Hello, Welcome
from flowspec.core.protocol.types import Message
from flowspec.errors import InputError
from flowspec.runtime.emulation import Shaper
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import (
    Receiver,
    Sender,
    Wake,
    bracketed,
    dealer,
    reach,
    receive,
    split_address,
)
from flowspec.version import __version__
from flowspec.wire.codec import decode


class NextHop:
    """On its way to `assign.next_hop` when made, or as soon as its address is known (`go_on`; `wake` is set
    then).

    The address is that of its name, or else what the head says.

    Raises `InputError` for an address that is none, a host that cannot be found, or a device without a key.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        assign: Assign,
        *,
        incarnation: int,
        sender: str,
        keys: Keyring | None,
        shape: Shaper | None,
        poller: zmq.Poller,
        wake: Wake,
    ) -> None:
        self._keys = keys
        self._poller = poller
        self._is_reached = False
        self._address, self._hint = assign.next_hop, assign.next_ip
        self._wake = wake
        self._is_dialled = False
        self._hello = Hello(name=sender, version=__version__, role="stage")
        self.socket = dealer(context, assign.next_name, keys, has_pulse=False)
        self._pulse = dealer(context, assign.next_name, keys)
        self.link = Sender(self.socket, incarnation=incarnation, sender=sender)
        self._receiver = Receiver(incarnation)
        self._monitor = Monitor(self.socket)
        self._pulse_monitor = Monitor(self._pulse)
        self._shape = shape
        for source in (self.socket, self._monitor.socket, self._pulse_monitor.socket):
            poller.register(source, zmq.POLLIN)
        try:
            self.go_on()
        except InputError:
            self.close()
            raise

    def go_on(self) -> None:
        """Dials, if that was not done and the address is known by now; raises `InputError`."""
        if self._is_dialled:
            return
        try:
            is_known = reach(self.socket, self._address, self._wake)
        except InputError:
            if not self._hint:
                raise
            self._address = f"{bracketed(self._hint)}:{split_address(self._address)[1]}"
            is_known = reach(self.socket, self._address)
        if is_known:
            self._is_dialled = reach(self._pulse, self._address)
            self.link.send(self._hello)
            self.link.shape = self._shape

    def read(self) -> Message | None:
        """The next thing that it said, None for nothing; raises `PeerError`."""
        frames = receive(self.socket)
        if frames is None:
            return None
        envelope = decode(frames)
        self._receiver.check(envelope)
        if isinstance(envelope.message, Welcome):
            self.link.count_from(envelope.message.count)
            self._is_reached = True
        return envelope.message

    def lost(self, ready: set[Any]) -> str | None:
        """What happened to the connection, if anything did that counts; `ready` are the sockets that have
        something."""
        if ready.isdisjoint((self._monitor.socket, self._pulse_monitor.socket)):
            return None
        lost = self._monitor.drain()[0] + self._pulse_monitor.drain()[0]
        refusal = self._monitor.refusal
        if refusal is not None and refusal.is_final:
            return f"refuses: {refusal.told(self._keys)}"
        return "was lost: its connection closed" if lost and self._is_reached else None

    @property
    def trouble(self) -> str:
        """Why it may not have answered, where something tells."""
        refusal = self._monitor.refusal
        return "" if refusal is None else refusal.told(self._keys, has_answered=self._is_reached)

    def close(self) -> None:
        for source in (self.socket, self._monitor.socket, self._pulse_monitor.socket):
            self._poller.unregister(source)
        self._monitor.close()
        self._pulse_monitor.close()
        self._pulse.close()
        self.socket.close()
