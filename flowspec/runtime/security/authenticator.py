"""Lets the listed keys in, and nobody else: the handler that ZeroMQ asks about each connection (ZAP, RFC 27).

It answers in the daemon's own poller, for `zmq.auth` would bring a thread with an event loop for these few
lines, and tells neither who was refused from where nor the name that goes with a key. ZeroMQ stamps the name
on every message of the connection from then on.
"""

from __future__ import annotations

import logging
from typing import Any

import zmq
from zmq.utils import z85

from flowspec.repeats import ABOUT
from flowspec.runtime.security.keyring import KEY_BYTES, Keyring

VERSION = b"1.0"
REQUEST_FRAMES = 7

log = logging.getLogger("flowspec.daemon")


class Authenticator:
    """The handler of one context. Make it before the socket that it guards is bound."""

    def __init__(self, context: zmq.Context[Any], keys: Keyring) -> None:
        self._keys = keys
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        while self.socket.poll(0):
            version, question, _, address, _, mechanism, *credentials = [
                *self.socket.recv_multipart(),
                *[b""] * REQUEST_FRAMES,
            ][:REQUEST_FRAMES]
            user = self._keys.user_of(credentials[0]) if (version, mechanism) == (VERSION, b"CURVE") else None
            if user is None:
                self._refused(address.decode("ascii", "replace").removeprefix("::ffff:"), credentials[0])
            status, text = (b"200", b"OK") if user is not None else (b"400", b"this key is not listed")
            self.socket.send_multipart([VERSION, question, status, text, (user or "").encode(), b""])

    def _refused(self, address: str, public: bytes) -> None:
        shown = z85.encode(public).decode() if len(public) == KEY_BYTES else "none"
        log.warning(
            "refused a connection from %s: its key is not listed in %s (public key %s)",
            address,
            self._keys.where,
            shown,
            extra={ABOUT: f"refused {address}"},  # whoever has many keys is one peer
        )
