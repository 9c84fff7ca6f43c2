"""Mistakes that a head might make when its pipeline is lost, for tests that must find them."""

from __future__ import annotations

import pytest

from flowspec.core.flights import Flights
from flowspec.core.request import Request


def sends_only_the_root_again(patch: pytest.MonkeyPatch) -> None:
    """The head believes that the new stages hold what the old ones held."""
    reopen = Request.reopen

    def broken(self: Request) -> None:
        reopen(self)
        self.unsent = self.computed = self.opening.length - 1

    patch.setattr(Request, "reopen", broken)


def keeps_the_flights(patch: pytest.MonkeyPatch) -> None:
    """What was in flight when the pipeline was lost counts as in flight in the next one."""
    patch.setattr(Flights, "clear", lambda self: None)
