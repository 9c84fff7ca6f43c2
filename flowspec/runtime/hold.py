"""A head's hold on a daemon: the stage or drafter it made of it, and what that can be sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import psutil
import zmq

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Assign, Error, Hello, Ready, Welcome
from flowspec.core.drafter import DrafterCore
from flowspec.core.messages import Expand, Message, Segment
from flowspec.core.stage import StageCore
from flowspec.core.weight_messages import AskModel, ModelOffer, NameList, TensorBytes, TensorList, WeightAnswer, WeightQuestion
from flowspec.errors import PeerError
from flowspec.plan.memory import mib
from flowspec.runtime import timeouts
from flowspec.runtime.compute import Loaded
from flowspec.runtime.emulation import Shaper
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.peers import Peer
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Link, Receiver, dial
from flowspec.wire.codec import Tensor

log = logging.getLogger("flowspec.daemon")


@dataclass(slots=True)
class Hold:
    """The head that holds this daemon, and the stage or drafter it made of it."""

    number: int
    control: Peer
    assign: Assign
    core: StageCore | DrafterCore
    shape: Shaper | None = None
    next_hop: Link | None = None
    next_monitor: Monitor | None = None
    next_receiver: Receiver = field(default_factory=Receiver)
    next_ready: bool = False
    next_deadline_s: float = 0.0
    loaded: Loaded | None = None
    data: Peer | None = None
    weights: Peer | None = None
    unanswered: int = 0
    is_ready: bool = False

    @property
    def name(self) -> str:
        return self.control.hello.name

    def check_segment(self, segment: Segment, payload: Tensor | None) -> None:
        """Raises `PeerError` for a segment that this stage's slice cannot run."""
        if self.loaded is None or self.assign.drafting is not None:
            raise PeerError("a segment came before the slice was loaded" if self.loaded is None else "a drafter takes no segments alone")
        if len(segment.hops) != self.assign.stage:
            raise PeerError(f"expected a segment after {self.assign.stage} hops, got {len(segment.hops)}")
        if self.assign.stage == 0:
            if payload is not None:
                raise PeerError("the first stage takes tokens, but a payload came")
            _check_tokens(segment, self.loaded)
        elif segment.row_count:
            expected = (segment.row_count, self.assign.payload_width(self.loaded.hidden_size), self.assign.payload_dtype)
            found = None if payload is None else (payload.rows, payload.width, payload.dtype)
            if found != expected:
                raise PeerError(f"expected a payload of {expected}, got {found}")

    def check_expand(self, message: Expand) -> None:
        """Raises `PeerError` for a job that this drafter cannot do."""
        if self.loaded is None:
            raise PeerError("a job came before the drafter was loaded")
        _check_tokens(message.segment, self.loaded)

    @property
    def onward(self) -> Link | None:
        """Where segments leave to the next hop, or the last stage's reports to the head; None while it is not there."""
        if self.assign.next_hop:
            return self.next_hop
        return None if self.data is None else self.data.link

    def take_data(self, data: Peer) -> None:
        """The head's data connection is there."""
        self.data = data
        if not self.assign.next_hop:
            data.link.shape = self.shape

    def dial_next(self, context: zmq.Context[Any], sender: str, keys: Keyring | None, now_s: float) -> None:
        """Sets out for the next hop, on the last stage nothing; raises `InputError` for an address that is none, or a device without key."""
        if not self.assign.next_hop:
            self.next_ready = True
            return
        socket = dial(context, self.assign.next_hop, self.assign.next_name, keys)
        self.next_hop = Link(socket, incarnation=self.control.incarnation, sender=sender)
        self.next_receiver = Receiver(self.control.incarnation)
        self.next_monitor = Monitor(socket)
        self.next_hop.send(Hello(name=sender, version=__version__, role="stage"))
        self.next_hop.shape = self.shape
        self.next_deadline_s = now_s + timeouts.LINK_S

    def reached_next(self, welcome: Welcome) -> None:
        """The next hop answered: segments may follow."""
        assert self.next_hop is not None
        self.next_hop.count_from(welcome.count)
        self.next_ready = True

    def lost_next(self, keys: Keyring | None, ready: set[Any]) -> str | None:
        """What happened to the connection to the next hop; None if nothing did that counts."""
        if self.next_monitor is None or self.next_monitor.socket not in ready:
            return None
        lost, _ = self.next_monitor.drain()
        refusal = self.next_monitor.refusal
        if refusal is not None and refusal.is_final:
            return f"refuses: {refusal.told(keys)}"
        return "was lost: its connection closed" if lost and self.next_ready else None

    def why_silent(self, keys: Keyring | None) -> str:
        """For a next hop that did not answer in time."""
        refusal = None if self.next_monitor is None else self.next_monitor.refusal
        return f"did not answer within {timeouts.LINK_S:.0f} s" + (f": {refusal.told(keys)}" if refusal is not None else "")

    def tell_ready(self) -> None:
        """Tells the head that this stage can begin, once, as soon as its slice is loaded and the next hop reached."""
        if self.loaded is None or not self.next_ready or self.is_ready:
            return
        self.is_ready = True
        resident = psutil.Process().memory_info().rss
        loaded = self.loaded
        self.control.link.send(
            Ready(
                weight_bytes=loaded.weight_bytes,
                memory_bytes=resident,
                cache_slots=loaded.cache_slots,
                received_bytes=loaded.received_bytes,
            )
        )
        kept = "kept" if loaded.reused else "loaded"
        text = "ready: %s weights %s, process %s, room for %d cache slots"
        log.info(text, kept, mib(loaded.weight_bytes), mib(resident), loaded.cache_slots)

    def ask(self, question: WeightQuestion) -> bool:
        """Sends the head a question about weights; False when it cannot be reached."""
        self.unanswered += 1
        peer = self.control if isinstance(question, AskModel) else self.weights
        return peer is not None and peer.link.send(question)

    def check_answer(self, message: Message) -> WeightAnswer | Error:
        """An answer to one of the questions; raises `PeerError` for anything else."""
        if not isinstance(message, ModelOffer | NameList | TensorList | TensorBytes | Error):
            raise PeerError(f"a head's weights connection carries no {type(message).__name__}")
        if not self.unanswered:
            raise PeerError(f"a {type(message).__name__} came that nobody asked for")
        self.unanswered -= 1
        return message

    @property
    def next_device(self) -> str:
        """The next hop, for messages to people."""
        return f"the next device {self.assign.next_name} at {self.assign.next_hop}"


def core_of(assign: Assign) -> StageCore | DrafterCore:
    """The mind of what a head makes of a daemon."""
    if assign.drafting is not None:
        return DrafterCore()
    is_last = assign.stage == assign.stages - 1
    return StageCore(is_last=is_last, slots_max=assign.context + limits.TREE_NODES_MAX, returns_features=bool(assign.captures))


def _check_tokens(segment: Segment, loaded: Loaded) -> None:
    most = max((token for part in segment.parts for token in part.tokens), default=0)
    if most >= loaded.vocabulary_size:
        raise PeerError(f"expected token ids below {loaded.vocabulary_size}, got {most}")
