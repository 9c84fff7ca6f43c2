"""What a daemon listens on: one ROUTER, what happens to its connections, and with keys the handler that
says who may come in."""

from __future__ import annotations

import logging
from typing import Any

import zmq

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.runtime.connection_limit import ConnectionLimit
from flowspec.runtime.monitor import Refusal
from flowspec.runtime.security.authenticator import Authenticator
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import bind_router, end_context

log = logging.getLogger("flowspec.daemon")


class Port:
    """The port `number` on `host`. Without keys and beyond loopback it must be asked to be `insecure`; raises
    `InputError`, and ends the context."""

    def __init__(
        self, context: zmq.Context[Any], host: str, port: int, keys: Keyring | None, *, insecure: bool
    ) -> None:
        self._is_keyed = keys is not None
        self._authenticator = None if keys is None else Authenticator(context, keys)
        try:
            self.router, self.number = bind_router(context, host, port, keys, insecure=insecure)
        except InputError:
            end_context(context)
            raise
        self._connection_limit = ConnectionLimit(self.router)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        return [
            self.router,
            self._connection_limit.socket,
            *([] if self._authenticator is None else [self._authenticator.socket]),
        ]

    def watch(self, ready: set[Any]) -> None:
        """Answers who knocks, and logs who was turned away."""
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.answer()
        if self._connection_limit.socket not in ready:
            return
        found = self._connection_limit.drain()
        if found.closed:
            log.debug("%d connection(s) closed", found.closed)
        if found.surplus:
            most = self._connection_limit.connections_max
            few = "" if most == limits.CONNECTIONS_MAX else ", half of the files that `ulimit -n` allows"
            log.warning("refused connections: there are %d already%s", most, few)
        for refusal in dict.fromkeys(found.failed):
            if refusal is not Refusal.UNLISTED:  # the authenticator told who that was
                log.warning("dropped connections: %s", self._why(refusal))

    def _why(self, refusal: Refusal) -> str:
        theirs = (
            "came without keys, which this daemon asks for"
            if self._is_keyed
            else "have keys, and this daemon has none"
        )
        if refusal is Refusal.MECHANISM:
            return f"they {theirs}"
        if refusal is Refusal.HUNG_UP:  # whoever notices first hangs up
            return f"they hung up in the handshake; perhaps they {theirs}"
        return (
            "they were not encrypted for this device's key, or replayed"
            if self._is_keyed
            else "they did not speak ZeroMQ"
        )

    def receive(self) -> tuple[bytes, str, list[bytes]] | None:
        """The next message: its connection's identity, whose key opened that (`head:NAME`, `device:NAME`;
        empty without keys), the frames."""
        try:
            identity = self.router.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        user = str(identity.get("User-Id")) if self._is_keyed else ""
        return identity.bytes, user, self.router.recv_multipart()
