"""The drafter's jobs, one at a time: which nodes it is asked about, and what its answers teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowspec.core import limits
from flowspec.core.drafting import draft_part, learn
from flowspec.core.events import Draft, Drafted
from flowspec.core.messages import Part, Segment
from flowspec.core.request import Request

DRAFT_ROWS_MAX = 256
"""Rows of one drafting job; a prompt takes several."""


class DraftJobs:
    """The job under way, if there is one, with the nodes that each request is waiting for in it."""

    def __init__(self) -> None:
        self._asked: dict[int, set[int]] | None = None
        self._done = 0

    @property
    def is_busy(self) -> bool:
        return self._asked is not None

    def start(self, wanted: Sequence[tuple[Request, Sequence[int]]], width: int) -> Draft | None:
        """A job for these nodes, as many as it takes; None if nothing is to be run."""
        parts: list[Part] = []
        asked: dict[int, set[int]] = {}
        rows = 0
        for request, nodes in wanted[: limits.PARTS_PER_SEGMENT_MAX]:
            part = draft_part(request, nodes, DRAFT_ROWS_MAX - rows) if rows < DRAFT_ROWS_MAX else None
            if part is not None:
                rows += len(part.ids)
                parts.append(part)
                asked[request.number] = set(request.draft.pending)
                request.statistics.draft_rows += len(part.ids)
        if not parts:
            return None
        self._asked = asked
        return Draft(job=self._done, segment=Segment(segment=self._done, parts=tuple(parts)), width=width)

    def forget(self, request: int) -> None:
        """What the job under way proposes for a request is for an epoch that is over."""
        if self._asked is not None:
            self._asked.pop(request, None)

    def done(self, event: Drafted, requests: Mapping[int, Request]) -> list[Request]:
        """Notes what was proposed; returns the requests that are still being answered."""
        assert self._asked is not None, f"draft {event.job} is done, but none was asked for"
        assert event.job == self._done, f"expected draft {self._done}, got {event.job}"
        asked, self._asked = self._asked, None
        self._done += 1
        known = {number: requests[number] for number in asked if number in requests}
        current = {number: request for number, request in known.items() if request.submit is not None}
        for proposal in event.proposals:
            request = current.get(proposal.request)
            if request is not None and request.opening.epoch == proposal.epoch:
                learn(request, proposal)
        for number, request in current.items():
            request.draft.answered(asked[number], request.is_living)
            request.statistics.draft_passes += 1
            request.statistics.draft_s += (event.ended_s - event.started_s) / len(current)
        return list(current.values())
