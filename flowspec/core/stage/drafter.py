"""What a daemon that holds a drafter makes of what its head tells it: one job at a time, in order with
Releases.

The model's own state (which nodes live, in which slots) is the drafter's; here is only what the daemon's
poller must know while another thread computes. Knows no sockets, no tensors and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Expand, Proposed, Release
from flowspec.errors import PeerError

DrafterEvent = Expand | Release | Proposed


class DrafterCore:
    """Event in, commands out, as `StageCore`: `Expand` and `Release` are for the drafter, `Proposed` is for
    the head."""

    def __init__(self) -> None:
        self.done = 0
        self.arrived = -1
        self._job: int | None = None
        self._started_s = 0.0
        self._open: set[int] = set()

    @property
    def queued(self) -> int:
        """Jobs that wait: none, since a head asks again when it has been answered."""
        return 0

    def running_s(self, now_s: float) -> float:
        """How long the job has been running; 0 while there is none."""
        return 0.0 if self._job is None else max(0.0, now_s - self._started_s)

    def requests(self) -> list[int]:
        return list(self._open)

    def validate(self, *, is_honest: bool = True) -> None:
        """What is true between two events, of an honest head and of any other; raises `AssertionError`."""
        assert len(self._open) <= limits.REQUESTS_MAX, f"{len(self._open)} requests may be open"

    def handle(self, event: DrafterEvent, now_s: float) -> Sequence[DrafterEvent]:
        """The only mutator. Raises `PeerError` when a message breaks the protocol."""
        if isinstance(event, Expand):
            if self._job is not None:
                raise PeerError(f"job {event.segment.segment} came while job {self._job} runs")
            openings = [part.opening for part in event.segment.parts if part.opening is not None]
            if copying := [opening.request for opening in openings if opening.source >= 0]:
                raise PeerError(f"request {copying[0]} begins with a copy, but a drafter reads what it needs")
            self._job, self._started_s = event.segment.segment, now_s
            self._open.difference_update(release.request for release in event.segment.releases)
            self._open.update(part.commit.request for part in event.segment.parts)
            if len(self._open) > limits.REQUESTS_MAX:
                raise PeerError(
                    f"expected at most {limits.REQUESTS_MAX} requests at once, got {len(self._open)}"
                )
        elif isinstance(event, Release):
            self._open.discard(event.request)
        else:
            assert event.job == self._job, f"job {event.job} is done, but {self._job} was asked for"
            self._job = None
            self.done += 1
        return (event,)
