"""The models beside the target that a head draws on, in virtual time, and their loss and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowspec.core.events import Draft, Drafted, DrafterBack, DrafterLost, HeadEvent, ToDrafter
from flowspec.plan.timing import Curve
from flowspec.sim.clock import Clock
from flowspec.sim.drafter import FakeDrafter


class SimDrafters:
    """Runs jobs. `do` has the head's process do something, as soon as it is not stopped; `step` gives its core an event."""

    def __init__(
        self,
        clock: Clock,
        drafters: Sequence[FakeDrafter],
        drafting: Sequence[Curve],
        do: Callable[[Callable[[], None]], None],
        step: Callable[[HeadEvent], None],
    ) -> None:
        self._clock = clock
        self._drafters = drafters
        self._drafting = drafting
        self._do = do
        self._step = step
        self._lives = [0] * len(drafters)
        self._lost: set[int] = set()

    def draft(self, draft: Draft, started_s: float) -> None:
        """A job, which nobody does if its drafter is lost."""
        if draft.drafter in self._lost:
            return
        life = self._lives[draft.drafter]
        seconds = self._drafting[draft.drafter].seconds(draft.segment.row_count, draft.context)
        proposals = self._drafters[draft.drafter].draft(draft.segment, draft.width)
        done = Drafted(drafter=draft.drafter, job=draft.job, proposals=proposals, started_s=started_s, ended_s=started_s + seconds)

        def come() -> None:
            if self._lives[draft.drafter] == life:
                self._step(done)

        self._clock.at(self._clock.now_s + seconds, lambda: self._do(come))

    def release(self, command: ToDrafter) -> None:
        """A drafter that is there gives up caches."""
        if command.drafter not in self._lost:
            self._drafters[command.drafter].release(command.message)

    def lose(self, drafter: int) -> None:
        """A model is gone, with the job that it was at and all that it held; what it is asked before the head hears is lost.

        A stopped head may hear of a return, and ask, before it hears of the next loss: that is lost, too.
        """

        def heard() -> None:
            self._end_life(drafter)
            self._step(DrafterLost(drafter=drafter))

        self._end_life(drafter)
        self._do(heard)

    def give_back(self, drafter: int) -> None:
        """A lost model is there again, with nothing."""

        def back() -> None:
            self._lost.discard(drafter)
            self._step(DrafterBack(drafter=drafter, cache_slots=self._drafters[drafter].cache_slots))

        self._do(back)

    def _end_life(self, drafter: int) -> None:
        self._lives[drafter] += 1
        self._lost.add(drafter)
        self._drafters[drafter].restart()
