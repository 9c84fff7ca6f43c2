"""Boards that run the models beside the target, in virtual time.

Owns when jobs begin and end there, and what travels: a board other than the head's is reached over a link,
jobs and releases on the way out through the real codec, proposals on the way back by their size. Decides
nothing, and never knows what a proposal is worth.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from flowspec.core.head.events import CopyFeatures, Draft, Drafted, SendToDrafter
from flowspec.core.protocol.messages import Release, Segment
from flowspec.draft.base import CopiesFeatures, Drafter
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.clock import Clock
from flowspec.sim.link import Frames, SimulatedLink
from flowspec.wire.codec import Envelope, join_rows

ANSWER_BYTES = 64
"""A message of proposals without these: its header and the times of the job."""
PROPOSAL_BYTES = 12
"""Request, epoch and node."""
GUESS_BYTES = 8
"""A token and a confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterDeviceSpec:
    """The models that share a board, by number; `link` is each way between the head and it, None for the
    head's own board."""

    drafters: tuple[int, ...]
    link: LinkSpec | None = None


class DrafterDevice:
    """Runs the jobs of its drafters one after another, in order of arrival; `tell` is called with each when
    its proposals are at the head.

    What is proposed depends on nothing but the order of jobs and releases, so it is computed when a job
    arrives and told when it is done.
    """

    def __init__(
        self,
        clock: Clock,
        spec: DrafterDeviceSpec,
        drafters: Sequence[Drafter],
        curves: Sequence[Curve],
        rankings: Sequence[Curve],
        tell: Callable[[Drafted], None],
        *,
        chance: random.Random,
    ) -> None:
        """Of all drafters, those that the spec names are on it."""
        assert spec.link is None or not any(drafters[number].captures for number in spec.drafters), (
            "features travel to no board but the head's"
        )
        self.busy_s = 0.0
        self._clock = clock
        self._drafters = drafters
        self._curves = curves
        self._rankings = rankings
        self._tell = tell
        self._free_s = 0.0
        self.lost: set[int] = set()
        self._losses = Counter[int]()
        self._times: dict[int, float] = {}
        self._sent: deque[Draft | SendToDrafter] = deque()
        self.out: SimulatedLink | None = None
        self.back: SimulatedLink | None = None
        """Proposals are carried by their size alone."""
        if spec.link is not None:
            self.out = SimulatedLink(clock, spec.link, "head", self._arrived, chance=chance)
            chance = random.Random(chance.getrandbits(64))
            self.back = SimulatedLink(clock, spec.link, "drafter", self._arrived, chance=chance)

    @property
    def bytes_sent(self) -> int:
        """Both ways between the head and this board."""
        return sum(line.bytes for line in (self.out, self.back) if line is not None)

    def busy_until(self, now_s: float) -> float:
        """For how many seconds it computed up to now; what it has still to do begins where that ends."""
        return self.busy_s - max(0.0, self._free_s - now_s)

    def give(self, command: Draft | SendToDrafter) -> None:
        """A job or a release for one of the board's drafters."""
        if self.out is None:
            self._take(command)
        else:
            self._sent.append(command)
            message = command.segment if isinstance(command, Draft) else command.message
            assert isinstance(message, Segment | Release), "who wants features is at the head"
            self.out.send(message)

    def lose(self, drafter: int) -> None:
        """A drafter is gone: what it was at is not told, and what is asked of it from now on is not heard."""
        self.lost.add(drafter)
        self._losses[drafter] += 1

    def bring_back(self, drafter: int) -> None:
        """It is there again, and hears what is asked from now on."""
        self.lost.discard(drafter)

    def slow(self, drafter: int, times: float) -> None:
        """Its jobs take so many times as long from now on; 1 is as its curve says."""
        self._times[drafter] = times

    def _arrived(self, envelope: Envelope, frames: Frames) -> None:
        command = self._sent.popleft()
        carried: dict[str, Any] = {"segment" if isinstance(command, Draft) else "message": envelope.message}
        self._take(replace(command, **carried))

    def _take(self, command: Draft | SendToDrafter) -> None:
        if command.drafter in self.lost:
            return
        drafter = self._drafters[command.drafter]
        if isinstance(command, SendToDrafter):
            message = command.message
            if isinstance(message, Release):
                drafter.release(message)
            elif isinstance(message, CopyFeatures):
                assert isinstance(drafter, CopiesFeatures), "its traits say that it copies none"
                drafter.copy_features(message)
            else:  # stand-ins for the tensors of a real drafter; only a fake one reads them
                rows = cast(Any, join_rows(message.rows))
                drafter.take_features(message.request, message.epoch, message.nodes, rows)
            return
        started_s = max(self._free_s, self._clock.now_s)
        proposals = drafter.draft(command.segment, command.width)
        ended_s = started_s + self._times.get(command.drafter, 1.0) * self._seconds(drafter, command)
        self._free_s = ended_s
        self.busy_s += ended_s - started_s
        done = Drafted(
            drafter=command.drafter,
            job=command.job,
            proposals=proposals,
            started_s=started_s,
            ended_s=ended_s,
        )
        losses = self._losses[command.drafter]

        def tell() -> None:
            """What was lost since is not told."""
            if self._losses[command.drafter] == losses:
                self._tell(done)

        def send() -> None:
            if self.back is None:
                tell()
            else:
                guesses = sum(len(proposal.tokens) for proposal in proposals)
                size = ANSWER_BYTES + PROPOSAL_BYTES * len(proposals) + GUESS_BYTES * guesses
                self.back.carry(size, tell)

        self._clock.at(ended_s, send)

    def _seconds(self, drafter: Drafter, command: Draft) -> float:
        """Of the job that it has just done."""
        passes = getattr(drafter, "pass_rows", None) or ()
        ranked = None if passes else getattr(drafter, "ranked_rows", None)
        if ranked is not None:
            return self._rankings[command.drafter].seconds(ranked) if ranked else 0.0
        curve = self._curves[command.drafter]
        return sum(curve.seconds(rows, command.context) for rows in passes or (command.segment.row_count,))
