"""Mistakes that a head or a stage might make, for tests that must find them."""

from __future__ import annotations

import pytest

from flowspec.core.head.flights import Bounds, SegmentsInFlight
from flowspec.core.head.link_pacer import LinkPacer
from flowspec.core.head.request import Request
from flowspec.core.protocol.messages import SegmentPart
from flowspec.core.stage.stage import StageCore, _Request


def sends_only_the_root_again(patch: pytest.MonkeyPatch) -> None:
    """The head believes that the new stages hold what the old ones held."""
    reopen = Request.reopen

    def broken(self: Request) -> None:
        reopen(self)
        self.unsent = self.computed = self.opening.length - 1

    patch.setattr(Request, "reopen", broken)


def keeps_the_flights(patch: pytest.MonkeyPatch) -> None:
    """What was in flight when the pipeline was lost counts as in flight in the next one."""
    patch.setattr(SegmentsInFlight, "clear", lambda self: None)


def tells_no_end(patch: pytest.MonkeyPatch) -> None:
    """The head keeps to itself that an answer is over."""
    patch.setattr(SegmentsInFlight, "have_guesses", lambda self, request: False)


def drops_the_path_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """A stage that learns of an end runs nothing of the answer any more, committed rows neither."""
    admit = StageCore._admit

    def broken(self: StageCore, request: _Request, part: SegmentPart, row: int) -> int | None:
        return None if request.is_over else admit(self, request, part, row)

    patch.setattr(StageCore, "_admit", broken)


def sends_prompts_whole(patch: pytest.MonkeyPatch) -> None:
    """A head that does not mind how long a link is busy with a segment."""
    patch.setattr(Bounds, "portions", lambda self: LinkPacer(None, self.prefill_chunk))
