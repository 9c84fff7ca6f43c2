"""The keys that one process goes by: its own pair, and the public keys of the heads and devices that it
believes.

CURVE (CurveZMQ, RFC 26) encrypts a connection and proves to each end that the other holds the secret of a
public key; which public keys count, and for which name, is decided here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from flowspec.core.protocol.cluster_messages import Hello
from flowspec.errors import InputError, PeerError

KEY_BYTES = 32
NAME_CHARS = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}"
HEAD, DEVICE = "head", "device"
CONNECTIONS_OF = {
    HEAD: ("head-control", "head-data", "head-weights", "measure"),
    DEVICE: ("stage", "measure"),
}
"""Which connections (`Hello.role`) each kind of key may open: only a head's key can give work, only a
device's can pass it on."""
DOMAIN = b"flowspec"


class UnlistedError(InputError):
    """A device that is to be dialled has no key here."""


def check_name(name: str) -> str:
    """A name that can have a key: it also names a file, here and on the device. Raises `InputError`."""
    if re.fullmatch(NAME_CHARS, name, re.ASCII) is None:
        raise InputError(
            "a name with a key: expected up to 63 letters, digits, dots, dashes and underscores, got "
            f"{name!r:.80}; rename it"
        )
    return name


def need_curve() -> None:
    """Raises `InputError` where ZeroMQ was built without encryption."""
    if not zmq.has("curve"):
        raise InputError(
            "this ZeroMQ was built without CURVE encryption; install pyzmq's own build: pip install "
            "--force-reinstall pyzmq"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """One process's keys, 32 raw bytes each; `where` they were read, for messages."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)
    heads: Mapping[str, bytes]
    devices: Mapping[str, bytes]
    where: str

    def listen(self, socket: zmq.Socket[Any]) -> None:
        """Before a socket is bound: it takes encrypted connections only, and only those that a gate lets
        in."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate ZeroMQ would let everybody in

    def dial(self, socket: zmq.Socket[Any], device: str) -> None:
        """Before a socket is connected: only the device of this name will be spoken to. Raises
        `UnlistedError` if it has no key."""
        if device not in self.devices:
            raise UnlistedError(
                f"{self.where} lists no key of device {device!r:.80}; make one with flowspec keygen, which "
                "tells what to copy, or correct its name in the cluster file, or take it out of it"
            )
        socket.curve_serverkey = self.devices[device]
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def user_of(self, public: bytes) -> str | None:
        """`head:NAME` or `device:NAME`, whose key this is; None for a key that is not listed."""
        for kind, listed in ((HEAD, self.heads), (DEVICE, self.devices)):
            for name, key in listed.items():
                if key == public:
                    return f"{kind}:{name}"
        return None


def check_hello(user: str, hello: Hello) -> None:
    """Raises `PeerError` for a peer that says to be, or wants to do, what its key does not stand for."""
    kind, _, name = user.partition(":")
    if hello.name != name:
        raise PeerError(f"expected {name} by its key, but it calls itself {hello.name}")
    if hello.role not in CONNECTIONS_OF[kind]:
        raise PeerError(f"{name} has the key of a {kind}, which opens no {hello.role} connections")
