"""The models beside the target: which job each is at, what it has of each request, and how far it is trusted.

Each has one job at a time. *Which* nodes it is asked about is the method's decision. A model that is lost is
asked no more; what it said stays, and if it comes back it begins with nothing, as every tree-cached model
may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from flowspec.core.head.admission import Admission
from flowspec.core.head.drafter_jobs import draft_part
from flowspec.core.head.drafter_state import DrafterState
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    CopyFeatures,
    Draft,
    Drafted,
    HeadCommand,
    SendToDrafter,
    TakeFeatures,
)
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.request import Request
from flowspec.core.head.tree_growth import grow, learn, observe
from flowspec.core.methods.base import Method, Observation, View
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Release, Segment, SegmentPart

DRAFT_ROWS_MAX = 256
"""Rows of one drafting job; a prompt takes several."""
USUAL_ROWS_MAX = 64
"""Jobs of more rows bring a model up to date and say nothing of how fast it answers."""
USUAL_ROWS = 16
"""A usual job has about so many; one of more takes longer by no more than that."""
SHARE_NEW = 0.1
"""Weight of the newest job in how fast a model answers."""
OVERDUE = 2.0
"""A job that takes so many times as long as it should is overdue."""
PAUSE_S = 20.0
"""After so long without a job how fast a model was says little of how fast it is: other work or heat slow a
device down for about that long."""


class Drafters:
    """See the module. Models are told by their number in `traits`."""

    def __init__(self, traits: Sequence[DrafterTraits], method: Method) -> None:
        self.traits = tuple(traits)
        self.fusion = Fusion(
            [each.level for each in traits], is_calibrated=method.is_calibrated, fuses=method.fuses
        )
        self._method = method
        self._jobs: list[dict[int, set[int]] | None] = [None] * len(traits)
        self._jobs_done = [0] * len(traits)
        self._lost: set[int] = set()
        self._asked: list[tuple[int, float]] = [(0, 0.0)] * len(
            traits
        )  # rows of each one's job, and when it was asked for
        self.turnaround_s = [0.0] * len(traits)
        self._answered_s: list[float | None] = [None] * len(traits)
        self._jobs_since_pause = [round(1 / SHARE_NEW)] * len(traits)

    @property
    def asked_s(self) -> list[float | None]:
        """When each was asked what it is at; None: it is idle."""
        return [
            None if job is None else asked_s
            for job, (_, asked_s) in zip(self._jobs, self._asked, strict=True)
        ]

    def overdue_s(self, now_s: float) -> list[float]:
        """How long each has been at a job that it should be through with; 0 where it is idle or in time."""
        found = []
        for job, (rows, asked_s), usual_s in zip(self._jobs, self._asked, self.turnaround_s, strict=True):
            lasted_s = 0.0 if job is None else now_s - asked_s
            is_late = usual_s > 0 and lasted_s > OVERDUE * usual_s * max(1.0, rows / USUAL_ROWS)
            found.append(lasted_s if is_late else 0.0)
        return found

    def paused(self, now_s: float) -> list[bool]:
        """Who has had no job for so long that nobody knows how fast it is."""
        return [
            job is None and answered_s is not None and now_s - answered_s > PAUSE_S
            for job, answered_s in zip(self._jobs, self._answered_s, strict=True)
        ]

    def begin(self, request: Request, keep: int, admission: Admission) -> None:
        """A new answer, or a new epoch of one: the first `keep` tokens are those of the last one."""
        request.drafter_states = request.drafter_states or [DrafterState() for _ in self.traits]
        request.weights = request.weights or [1.0] * len(self.traits)
        request.candidates.clear()
        for drafter, (drafter_state, traits) in enumerate(
            zip(request.drafter_states, self.traits, strict=True)
        ):
            drafter_state.advance(request.tree)
            drafter_state.begin(request.opening, keep, traits.context)
            if drafter in self._lost or not admission.may_draft(request.number, drafter):
                drafter_state.close()

    def forget(self, number: int) -> None:
        """What jobs under way propose for a request is for an epoch that is over."""
        for job in self._jobs:
            if job is not None:
                job.pop(number, None)

    def release(self, release: Release, commands: list[HeadCommand]) -> None:
        """The caches of a request may go."""
        there = (drafter for drafter in range(len(self.traits)) if drafter not in self._lost)
        commands.extend(SendToDrafter(drafter=drafter, message=release) for drafter in there)

    def copy(self, request: Request, other: Request, count: int, commands: list[HeadCommand]) -> None:
        """The stages copy the first `count` tokens of a request from another one: models that want features
        of these, which have the other's, get them."""
        nodes, source_nodes = tuple(request.tree.path[:count]), tuple(other.tree.path[:count])
        message = CopyFeatures(
            request=request.number, nodes=nodes, source=other.number, source_nodes=source_nodes
        )
        for drafter, traits in enumerate(self.traits):
            if traits.needs_features:
                assert traits.copies_features, f"model {drafter} would lack features of what is copied"
                commands.append(SendToDrafter(drafter=drafter, message=message))
                request.featured = count

    def give(self, message: TakeFeatures, commands: list[HeadCommand]) -> None:
        """Features have come, for all who want any."""
        wanting = (drafter for drafter, traits in enumerate(self.traits) if traits.needs_features)
        commands.extend(SendToDrafter(drafter=drafter, message=message) for drafter in wanting)

    def lost(self, drafter: int, requests: Iterable[Request]) -> None:
        """A model is gone, and with it the job that it was at; one that wants features never is, for it is in
        the head's own process."""
        assert not self.traits[drafter].needs_features, (
            f"model {drafter} would need features again that come only once"
        )
        self._lost.add(drafter)
        if self._jobs[drafter] is not None:
            self._jobs[drafter] = None
            self._jobs_done[drafter] += 1
        for request in requests:
            if request.drafter_states:  # else its caches were given up
                request.drafter_states[drafter].close()

    def back(self, drafter: int, requests: Iterable[Request], admission: Admission) -> None:
        """A lost model is there again, with nothing: it is given each text anew, as far as it is wanted for
        it."""
        self._lost.discard(drafter)
        self.turnaround_s[drafter] = 0.0
        for request in (each for each in requests if each.drafter_states):
            drafter_state = request.drafter_states[drafter] = DrafterState()
            if request.submit is not None and admission.may_draft(request.number, drafter):
                drafter_state.begin(request.opening, 0, self.traits[drafter].context)
                for node in request.tree.living():
                    drafter_state.offer(request.tree, node)

    def start(self, view: Callable[[], View], commands: list[HeadCommand]) -> None:
        """Gives every idle model what the method wants of it."""
        for drafter, traits in enumerate(self.traits):
            if self._jobs[drafter] is None and drafter not in self._lost:
                self._start(drafter, traits, view(), commands)

    def _start(self, drafter: int, traits: DrafterTraits, view: View, commands: list[HeadCommand]) -> None:
        parts: list[SegmentPart] = []
        asked: dict[int, set[int]] = {}
        rows = 0
        for request, nodes in self._method.expand(view, drafter)[: limits.PARTS_PER_SEGMENT_MAX]:
            part = (
                draft_part(request, drafter, traits, nodes, DRAFT_ROWS_MAX - rows)
                if rows < DRAFT_ROWS_MAX
                else None
            )
            if part is not None:
                rows += len(part.ids)
                parts.append(part)
                asked[request.number] = set(request.drafter_states[drafter].pending)
                request.statistics.draft_rows += len(part.ids)
        if parts:
            self._jobs[drafter] = asked
            self._asked[drafter] = (rows, view.now_s)
            job = self._jobs_done[drafter]
            commands.append(
                Draft(
                    drafter=drafter,
                    job=job,
                    segment=Segment(segment=job, parts=tuple(parts)),
                    width=self._method.width,
                )
            )

    def drafted(self, event: Drafted, requests: Mapping[int, Request], now_s: float) -> None:
        asked, self._jobs[event.drafter] = self._jobs[event.drafter], None
        assert asked is not None, f"draft {event.job} is done, but none was asked for"
        assert event.job == self._jobs_done[event.drafter], (
            f"expected draft {self._jobs_done[event.drafter]}, got {event.job}"
        )
        self._jobs_done[event.drafter] += 1
        rows, asked_s = self._asked[event.drafter]
        self._timed(event.drafter, rows, asked_s, now_s)
        known = {number: requests[number] for number in asked if number in requests}
        current = {number: request for number, request in known.items() if request.submit is not None}
        for proposal in event.proposals:
            request = current.get(proposal.request)
            if request is not None and request.opening.epoch == proposal.epoch:
                learn(request, event.drafter, proposal, self.fusion)
        for number, request in current.items():
            request.drafter_states[event.drafter].land(asked[number], request.is_living)
            request.statistics.draft_passes += 1
            request.statistics.draft_s += (event.ended_s - event.started_s) / len(current)
            self.grow(request)

    def _timed(self, drafter: int, rows: int, asked_s: float, now_s: float) -> None:
        """A job of so many rows is done. After a pause its time counts as a plain mean at first."""
        answered_s = self._answered_s[drafter]
        if answered_s is not None and asked_s - answered_s > PAUSE_S:
            self._jobs_since_pause[drafter] = 0
        self._answered_s[drafter] = now_s
        if rows <= USUAL_ROWS_MAX:
            before_s = self.turnaround_s[drafter] or now_s - asked_s
            self._jobs_since_pause[drafter] += 1
            weight = max(SHARE_NEW, 1 / self._jobs_since_pause[drafter])
            self.turnaround_s[drafter] = before_s + weight * (now_s - asked_s - before_s)

    def observe(self, request: Request, token: int) -> None:
        """The token after a request's root is known."""
        root = request.tree.root
        if offers := request.candidates.offers.get(root):
            chances = {drafter: self.fusion.chance_of(drafter, own, token) for drafter, own in offers.items()}
            self._method.observed(request, Observation(token, offers, chances))
        observe(request, root, token, self.fusion)

    def grow(self, request: Request) -> None:
        """Makes nodes of what is proposed, as far as it is worth it by now."""
        if request.submit is not None:
            request.statistics.nodes_drafted += grow(request, self._method.value_min, self.fusion)
