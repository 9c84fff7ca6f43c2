"""A head's hold on a daemon: the stage it made of it, and what that stage can be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.messages import Assign, Segment
from flowspec.core.stage import StageCore
from flowspec.errors import PeerError
from flowspec.runtime.compute import Loaded
from flowspec.runtime.emulation import Shaper
from flowspec.runtime.peers import Peer
from flowspec.runtime.transport import Link, Monitor, Receiver
from flowspec.wire.codec import Tensor


@dataclass(slots=True)
class Hold:
    """The head that holds this daemon, and the stage it made of it."""

    number: int
    control: Peer
    assign: Assign
    core: StageCore
    lease_until_s: float
    shape: Shaper | None = None
    next_hop: Link | None = None
    next_monitor: Monitor | None = None
    next_receiver: Receiver = field(default_factory=Receiver)
    next_ready: bool = False
    next_deadline_s: float = 0.0
    loaded: Loaded | None = None
    data: Peer | None = None
    is_ready: bool = False

    @property
    def name(self) -> str:
        return self.control.hello.name

    def check_segment(self, segment: Segment, payload: Tensor | None) -> None:
        """Raises `PeerError` for a segment that this stage's slice cannot run."""
        if self.loaded is None:
            raise PeerError("a segment came before the slice was loaded")
        if len(segment.hops) != self.assign.stage:
            raise PeerError(f"expected a segment after {self.assign.stage} hops, got {len(segment.hops)}")
        if self.assign.stage == 0:
            if payload is not None:
                raise PeerError("the first stage takes tokens, but a payload came")
            tokens = [token for part in segment.parts for token in part.tokens]
            if tokens and max(tokens) >= self.loaded.vocabulary_size:
                raise PeerError(f"expected token ids below {self.loaded.vocabulary_size}, got {max(tokens)}")
        elif segment.row_count:
            expected = (segment.row_count, self.assign.payload_width(self.loaded.hidden_size), self.assign.payload_dtype)
            found = None if payload is None else (payload.rows, payload.width, payload.dtype)
            if found != expected:
                raise PeerError(f"expected a payload of {expected}, got {found}")

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

    @property
    def next_device(self) -> str:
        """The next hop, for messages to people."""
        return f"the next device {self.assign.next_name} at {self.assign.next_hop}"
