"""Asks lost devices whether they are there again: a Hello on a connection of its own, and whoever says
Welcome is; it also says whether it can be had."""

from __future__ import annotations

from typing import Any

import zmq

from flowspec.core.cluster.membership import ProbeAnswered
from flowspec.core.protocol.cluster_messages import Hello, Welcome
from flowspec.errors import InputError, PeerError
from flowspec.runtime.pipeline_connections import head_name
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Sender, dealer, end_context, reach, receive
from flowspec.version import __version__
from flowspec.wire.codec import decode


class Probes:
    """The questions that are open, at most one for each device; one thread uses it. `session` is a number
    that holds nothing. With `keys` only who has its own counts."""

    def __init__(self, session: int, keys: Keyring | None = None) -> None:
        self._incarnation = session
        self._keys = keys
        self._sender = head_name(keys)
        self._context: zmq.Context[Any] = zmq.Context()
        self._open: dict[str, tuple[zmq.Socket[bytes], str]] = {}
        self._unsaid: set[str] = set()

    def ask(self, device: str, address: str) -> None:
        """Asks a device; an earlier question to it that got no answer is given up."""
        self._close(device)
        try:
            self._open[device] = dealer(self._context, device, self._keys), address
        except InputError:  # it may have a key later
            return
        self._unsaid.add(device)
        self._greet(device)

    def _greet(self, device: str) -> None:
        """Says Hello, if the device's address is known by now."""
        socket, address = self._open[device]
        try:
            if not reach(socket, address):
                return
        except InputError:  # a name that cannot be resolved now may be later
            self._close(device)
            return
        self._unsaid.discard(device)
        link = Sender(socket, incarnation=self._incarnation, sender=self._sender)
        link.send(Hello(name=self._sender, version=__version__, role="head-control"))

    def answered(self) -> list[ProbeAnswered]:
        """Who has answered since the last call."""
        found = []
        for device in list(self._unsaid):
            self._greet(device)
        for device, (socket, _) in list(self._open.items()):
            frames = receive(socket)
            if frames is None:
                continue
            self._close(device)
            try:
                message = decode(frames).message
                if isinstance(message, Welcome):
                    found.append(ProbeAnswered(device=device, is_held=bool(message.holder)))
            except PeerError:  # whoever it is, it is no daemon of ours
                continue
        return found

    def _close(self, device: str) -> None:
        self._unsaid.discard(device)
        if device in self._open:
            self._open.pop(device)[0].close(linger=0)

    def close(self) -> None:
        end_context(self._context)
