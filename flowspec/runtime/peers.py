"""Who dials a daemon: connections by their ZeroMQ identity, from Hello on, and those that are not listened to
any more.

Each connection gets a number of its own to count on from after Hello, so that one that was recorded cannot be
played again. With keys, its name and what it is for must be what its key stands for. A ROUTER cannot close
one connection, so a peer that breaks the protocol is told why and ignored from then on.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import zmq

from flowspec.core.cluster.daemon import Caller
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Hello
from flowspec.errors import PeerError
from flowspec.runtime.security.keyring import check_hello
from flowspec.runtime.transport import Receiver, Sender
from flowspec.version import __version__
from flowspec.wire.codec import Envelope

log = logging.getLogger("flowspec.daemon")

COUNT_BITS = 61
"""Of the numbers that connections begin with: they cannot be guessed, nor reach the largest count."""


@dataclass(eq=False, slots=True)
class Peer(Caller):
    """One connection to our port; `user` is whose key opened it (`Port.receive`)."""

    user: str
    identity: bytes
    link: Sender
    receiver: Receiver


class Peers:
    """The connections of one ROUTER; the longest silent ones are forgotten when there are too many.

    Those of `kept_incarnation`, the cluster that holds the daemon, are never forgotten.
    """

    def __init__(self, router: zmq.Socket[Any], name: str) -> None:
        self._router = router
        self._name = name
        self.kept_incarnation: int | None = None
        self._known: OrderedDict[bytes, Peer] = OrderedDict()
        self._banned: OrderedDict[bytes, None] = OrderedDict()

    def is_banned(self, identity: bytes) -> bool:
        return identity in self._banned

    def sender_of(self, identity: bytes, user: str, envelope: Envelope) -> tuple[Peer, bool]:
        """The peer that sent an envelope, and whether this is its first; raises `PeerError` for a broken
        protocol."""
        peer = self._known.get(identity)
        is_new = peer is None
        if peer is None:
            peer = self._introduce(identity, user, envelope)
        peer.receiver.check(envelope)
        if (envelope.incarnation, envelope.sender, user) != (peer.incarnation, peer.name, peer.user):
            raise PeerError("the incarnation, the sender or its key changed on an open connection")
        if isinstance(envelope.message, Hello) and not is_new:
            raise PeerError("Hello came twice")
        if is_new:
            peer.receiver.expected = secrets.randbits(COUNT_BITS)
        self._known.move_to_end(identity)
        return peer, is_new

    def known(self, identity: bytes) -> Peer | None:
        """The peer of a connection that has said Hello."""
        return self._known.get(identity)

    def ban(self, identity: bytes, error: Error) -> None:
        """Stops listening to a connection, and tells it why."""
        self._banned[identity] = None
        if len(self._banned) > limits.BANNED_MAX:
            self._banned.popitem(last=False)
        peer = self._known.pop(identity, None)
        if peer is not None and peer.role == "measure":
            log.debug("%s has measured its link to this daemon", peer.name)
        else:
            log.warning("dropped %s: %s", "an unknown peer" if peer is None else peer.name, error.text)
        link = (
            peer.link
            if peer is not None
            else Sender(self._router, incarnation=0, sender=self._name, identity=identity)
        )
        link.send(error)

    def _introduce(self, identity: bytes, user: str, envelope: Envelope) -> Peer:
        hello = envelope.message
        if not isinstance(hello, Hello):
            raise PeerError(f"expected Hello first, got {type(hello).__name__}")
        if hello.version != __version__:
            raise PeerError(
                f"this daemon runs FlowSpec {__version__}, {hello.name} runs {hello.version}; install the "
                "same version everywhere"
            )
        if user:
            check_hello(user, hello)
        link = Sender(self._router, incarnation=envelope.incarnation, sender=self._name, identity=identity)
        peer = self._known[identity] = Peer(
            hello.name, hello.role, envelope.incarnation, user, identity, link, Receiver()
        )
        if len(self._known) > limits.PEERS_MAX:
            oldest = next(
                (key for key, known in self._known.items() if known.incarnation != self.kept_incarnation),
                None,
            )
            if oldest is None:
                raise PeerError(f"expected at most {limits.PEERS_MAX} connections of one head, one more came")
            del self._known[oldest]
        return peer
