"""The head's mind: what the verified nodes mean for the output, and when which segment, commit and draft goes
out.

Per request a `TokenTree`; prompts are chains of committed nodes sent in chunks, and answers grow as the
stages verify nodes. *Which* nodes are sent and drafted is a `Method`'s decision; everything that must be
right is here. Knows no sockets, no tensors and no clock.

The walk: while the next token of the root is known, make it the root. Each token is emitted the moment it is
known, and nothing past a stop is committed or emitted. One request waits for one thing at most, so no turn,
lock or flush exists. When an answer ends, the stages are told at once, and drop what they still have of its
guesses.

The committed tokens are the only state that outlives a pipeline. When it is lost what was in flight is
forgotten, and each answer under way becomes a prompt of what is known of it, in a new epoch;
`PipelineReformed` opens these on stages that hold nothing.

Prompts begin with what others have computed (`sharing`): the stages copy it. An Open that says so goes with
the prompt's first segment alone. While that is in flight its source is neither released nor given up, and an
Open of the source itself goes behind, with a segment, too: so each stage has the source as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from flowspec.core.head import sharing
from flowspec.core.head.admission import Admission
from flowspec.core.head.calibration import Calibrator
from flowspec.core.head.certain import CertainOf
from flowspec.core.head.costs import Costs
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.drafters import Drafters
from flowspec.core.head.events import (
    Cancel,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    Emit,
    FeaturesArrived,
    Finished,
    Forget,
    HeadCommand,
    HeadEvent,
    PipelineLost,
    PipelineReformed,
    SegmentTimed,
    SendToFirstStage,
    SendToStages,
    SetTimer,
    Submit,
    TimerFired,
    VerifiedArrived,
)
from flowspec.core.head.features import LATE_S, FeatureDesk
from flowspec.core.head.flights import Bounds, SegmentsInFlight, SentPart
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.prompt_chunks import SlotTime, chunk_rows
from flowspec.core.head.request import Request, Source, begin
from flowspec.core.methods import WITHOUT_GUESSES, MethodState, make_method
from flowspec.core.methods.base import Method, View
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Logprobs, Open, Release, Verified, VerifiedPart
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.errors import InputError, PeerError
from flowspec.tree import NodeState
from flowspec.validation import Document, expect

RULES = {
    "taken over": "an answer goes on where another head's ended",
    "kept": "a prompt begins with what the stages have cached",
    "copies": "a prompt begins with what the stages have cached of another conversation",
    "reads along": "a prompt waits for another one that is reading the same beginning",
    "read anew": "a prompt goes back behind what layers with a window hold, and is read from its beginning",
    "cancelled": "an answer ends because nobody wants it any more",
    "end told": "the stages are told of an end, for guesses of it are in flight",
    "forgotten": "a conversation is over, and its caches are released",
    "release waits": "a Release waits until nothing of its conversation is in flight",
    "gives up": "caches that nobody uses now are given up for an answer that waits",
    "waits": "an answer waits for room",
    "begins again": "an answer whose pipeline was lost becomes a prompt of what is known of it",
    "old epoch": "a segment comes back with what is known of an epoch that is over",
    "guessed": "the next token was in flight already",
    "missed": "nobody had guessed the next token",
    "goes alone": "nothing follows a segment, for the links of the pipeline are not known yet",
    "slow portion": "a prompt's portion is smaller than it could be, for a link is slow",
    "slow guesses": "what a method chose goes in several segments, for a link is slow",
    "early features": "features wait for those of other stages, or for the verdict",
    "late features": "features that a drafter lacks are waited for no longer",
    "drafter lost": "a model beside the target is asked no more",
    "drafter back": "a model that was lost is asked again, and begins with nothing",
}
"""What is decided here, by name; `HeadCore.fired` counts."""
Boarding = tuple[Request, list[int], bool]
"""Nodes of a request that go into a segment, and whether they are of its prompt."""
UNKNOWN_LEFT_S = 1e-3
"""What is taken to be left of an answer whose speed is unknown: little, so that nobody waits for its end."""
TURNAROUND_MAX_S = 600.0
"""Of what is kept between runs: longer ones would be believed for too long."""


class HeadState(Document, frozen=True, kw_only=True):
    """What is worth keeping for a later run with the same models, method and devices."""

    turnaround_s: list[Annotated[float, Meta(ge=0, le=TURNAROUND_MAX_S)]]
    calibrators: list[Calibrator]
    fused: Calibrator
    method: MethodState


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Of slots and speed, of the models beside the target and how fast they answer, and `of_method` what its
    method learnt, which that method alone understands.

    Not a copy: it goes on learning with the head that has it.
    """

    costs: Costs
    fusion: Fusion
    turnaround_s: list[float]
    of_method: object = None


class HeadCore:
    """Event in, commands out; see the module."""

    vocabulary = limits.VOCABULARY_MAX
    """Token ids that the model has; who knows better says so before the first answer."""

    def __init__(
        self,
        *,
        context: int,
        stage_count: int,
        method: Method | None = None,
        drafters: Sequence[DrafterTraits] = (),
        bounds: Bounds | None = None,
        slot_s: SlotTime | None = None,
        sliding_window: SlidingWindow | None = None,
        prefix_block: int = sharing.BLOCK,
        certain_of: CertainOf | None = None,
        capturing: tuple[int, ...] = (),
    ) -> None:
        """`slot_s` is foretold of the stages (None: nothing is), and prompts are cut into chunks by it. The
        stages' layers with a sliding window hold what `sliding_window` says (None: all layers hold all).
        Prompts begin with what others have computed, in blocks of `prefix_block` tokens (0: never); but not
        beside a drafter that wants features and copies none: they come only once, with the rows that are
        run. The stages `capturing` send features."""
        self.context = context
        self.sliding_window = sliding_window
        self.stage_count = stage_count
        self.bounds = bounds or Bounds()
        self._slot_s = slot_s
        self._certain_of = certain_of
        self.method = method or make_method(WITHOUT_GUESSES)
        assert len(drafters) <= self.method.drafters_max, (
            f"{self.method.name} makes use of {self.method.drafters_max} drafters"
        )
        self.method.meet(drafters)
        self.drafters = Drafters(drafters, self.method)
        self.costs = Costs(stage_count)
        self.portions = self.bounds.portions()
        self.is_formed = True
        self.fired: Counter[str] = Counter()
        self._requests: dict[int, Request] = {}
        self.flights = SegmentsInFlight(self._requests)
        self.admission = Admission(context, drafters, sliding_window)
        self.features = FeatureDesk(capturing)
        self._wants_features = any(each.needs_features for each in drafters)
        lacking = any(each.needs_features and not each.copies_features for each in drafters)
        self._prefix_block = 0 if lacking else prefix_block
        self._leaving: set[int] = set()
        self._turns: list[int] = []
        self._paused: set[int] = set()  # answers that wait for room to grow in, and stand as they stood
        self._is_prompts_turn = True
        self._timer_s: float | None = None
        self._rest: list[Boarding] = []

    @property
    def flights_max(self) -> int:
        """Segments that may be in flight."""
        return self.bounds.flights(self.stage_count)

    @property
    def in_flight(self) -> int:
        """Segments sent whose Verified is not back."""
        return len(self.flights)

    def may_copy(self, tokens: int) -> bool:
        """Whether a prompt may begin with a copy of what others have, and an answer of so many tokens, the
        prompt included, fits beside all of them. Any thread may ask."""
        return self._prefix_block > 0 and self.admission.has_room_beside(tokens)

    def requests(self) -> list[Request]:
        """Every conversation that is known, for those who watch."""
        return list(self._requests.values())

    def begin(self, pipeline: PipelineReformed) -> None:
        """The first pipeline is there: maybe of fewer stages than were planned, for a device may be lost
        while it loads."""
        self.is_formed = False
        self._reformed(pipeline)

    def experience(self) -> Experience:
        """What is known by now."""
        return Experience(
            costs=self.costs,
            fusion=self.drafters.fusion,
            turnaround_s=self.drafters.turnaround_s,
            of_method=self.method.experience(),
        )

    def take(self, experience: Experience) -> None:
        """Begin with what another head learnt with the same stages, models and method."""
        self.costs, self.drafters.fusion = experience.costs, experience.fusion
        self.drafters.turnaround_s = experience.turnaround_s
        self.method.take(experience.of_method)

    def state_dict(self) -> HeadState:
        drafters = self.drafters
        return HeadState(
            turnaround_s=drafters.turnaround_s,
            calibrators=drafters.fusion.calibrators,
            fused=drafters.fusion.fused,
            method=self.method.state_dict(),
        )

    def load_state_dict(self, state: HeadState) -> None:
        """Begin with the state of an earlier run; raises `Misfit`."""
        drafters, count = self.drafters, len(self.drafters.traits)
        for name in ("turnaround_s", "calibrators"):
            found = len(getattr(state, name))
            expect(found == count, name, f"{found} entries", f"one for each of {count} models")
        is_own = type(state.method) is type(self.method.state_dict())
        expect(is_own, "method", type(state.method).__name__, f"what {self.method.name} learns")
        self.method.load_state_dict(state.method)
        drafters.turnaround_s = state.turnaround_s
        drafters.fusion.calibrators, drafters.fusion.fused = state.calibrators, state.fused

    def flight_s(self, now_s: float) -> float:
        """For how long the oldest segment in flight has been so; 0 without any."""
        oldest_s = self.flights.oldest_s
        return 0.0 if oldest_s is None else now_s - oldest_s

    def left_s(self) -> float:
        """What is left of the longest answer under way, at the rate that was seen; next to nothing where none
        was, 0 without an answer."""
        left = [
            min(each.submit.new_tokens_max, self.context - len(each.submit.prompt)) - len(each.new_tokens)
            for each in self._requests.values()
            if each.submit is not None
        ]
        if not left:
            return 0.0
        return max(left) / self.costs.rate if self.costs.rate else UNKNOWN_LEFT_S

    def handle(self, event: HeadEvent, now_s: float) -> list[HeadCommand]:
        """The only mutator. Raises `InputError` for a prompt that cannot be answered, `PeerError` for a
        stage's fault."""
        commands: list[HeadCommand] = []
        if isinstance(event, Submit):
            self._submit(event, now_s, commands)
        elif isinstance(event, Cancel):
            request = self._requests.get(event.request)
            if request is not None and request.submit is not None and request.submit.answer == event.answer:
                self._end(request, "cancelled", commands)
        elif isinstance(event, Forget):
            self._forget(event.request, commands)
        elif isinstance(event, VerifiedArrived):
            self._verified(event.verified, now_s, commands)
        elif isinstance(event, FeaturesArrived):
            self._features_arrived(event, commands)
        elif isinstance(event, Drafted):
            self.drafters.drafted(event, self._requests, now_s)
        elif isinstance(event, DrafterLost):
            self.fired["drafter lost"] += 1
            self.drafters.lost(event.drafter, self._requests.values())
        elif isinstance(event, DrafterRecovered):
            self.fired["drafter back"] += 1
            self.admission.drafter_back(event.drafter, event.cache_slots)
            self.drafters.back(event.drafter, self._requests.values(), self.admission)
        elif isinstance(event, PipelineLost):
            self._lost(event, now_s)
        elif isinstance(event, PipelineReformed):
            self._reformed(event)
        elif isinstance(event, TimerFired):
            self._timer_s = None
        else:
            raise AssertionError(f"no event of a head: {event!r}")
        self._note_overdue(now_s)
        self._walk_held(now_s, commands)
        while (
            self._grow(commands)
            or self._admit(now_s, commands)
            or self._send(now_s, commands)
            or self._walk_held(now_s, commands)
        ):
            pass
        self.drafters.start(lambda: self._view(now_s, prompts=True), commands)
        wake_s = self._wake_s(now_s)
        if wake_s is not None and wake_s != self._timer_s:
            self._timer_s = wake_s
            commands.append(SetTimer(at_s=wake_s))
        return commands

    def validate(self) -> None:
        assert self.in_flight <= self.flights_max, (
            f"{self.in_flight} segments are in flight, at most {self.flights_max} may be"
        )
        assert self.is_formed or not self.in_flight, (
            f"{self.in_flight} segments are in flight, and there is no pipeline"
        )
        assert len(self._turns) == len(set(self._turns)), f"an answer has two turns: {self._turns}"
        assert self._leaving.isdisjoint(self._requests), "a conversation is over, and goes on"
        for number, request in self._requests.items():
            request.validate()
            assert request.number == number, f"request {request.number} is kept as {number}"
            is_late = request.submit is not None and request.held and self.method.may_walk(request)
            assert not is_late or number not in self._turns, (
                f"a verified segment of request {number} waits for nothing"
            )
            is_sent = request.in_flight or request.opened or request.is_prefilled
            assert request.awaits is None or not is_sent, f"request {number} was sent, and waits for a copy"
        answering = {number for number, request in self._requests.items() if request.submit is not None}
        assert answering.issuperset(self._turns), "an answer that is over has a turn"
        assert answering.issuperset(self._paused), "an answer that is over waits for room"
        assert self._paused.isdisjoint(self._turns), "an answer that waits for room has a turn"
        for number in self._turns:
            length = self._requests[number].tree.committed_length
            assert self.admission.holds(number, length), f"request {number} has no room for its tokens"
        self.flights.validate()
        self.admission.validate()
        self.features.validate(self._requests)

    # ------------------------------------------------------------------------------------------- requests

    def _submit(self, submit: Submit, now_s: float, commands: list[HeadCommand]) -> None:
        count = len(submit.prompt)
        if count == 0:
            raise InputError("expected a prompt of at least one token, got an empty one")
        if count >= self.context:
            raise InputError(too_long(count, self.context))
        assert submit.new_tokens_max >= 1
        assert len(submit.answered) <= min(submit.new_tokens_max, self.context - count), (
            "more is answered than an answer holds"
        )
        old = self._requests.get(submit.request)
        if old is None and len(self._requests) + len(self._leaving) >= limits.CONVERSATIONS_MAX:
            raise InputError(
                f"expected at most {limits.CONVERSATIONS_MAX} conversations at once; end one first"
            )
        assert old is None or old.submit is None, f"request {submit.request} is being answered"
        assert submit.request not in self._leaving, (
            f"request {submit.request} is over; its id is not used again"
        )
        grammar = submit.sampling.grammar if self.method.drafts else None
        certain = None if self._certain_of is None or grammar is None else self._certain_of(grammar)
        self.admission.ask(submit)  # what is refused has left nothing behind
        request = begin(
            old,
            submit,
            context=self.context,
            stage_count=self.stage_count,
            sliding_window=self.sliding_window,
            wants_features=self._wants_features,
            now_s=now_s,
        )
        self.features.forget_dead(request)
        self.fired["read anew"] += request.is_read_anew
        request.certain = certain
        self.drafters.begin(request, request.computed, self.admission)
        request.awaits = self._source_of(request)
        self._requests[submit.request] = request
        self._give_features(request, commands)
        self.fired["taken over"] += bool(submit.answered)
        self.fired["kept"] += request.reused > 0
        self.method.begin(request)
        if submit.answered and (reason := request.why_over):
            self._end(request, reason, commands)

    def _tell(self, message: Open | Commit | Release, commands: list[HeadCommand]) -> None:
        """Says something to all stages, if there are any; those to come learn it when the pipeline is
        formed."""
        if self.is_formed:
            commands.append(SendToStages(message=message))

    def _forget(self, number: int, commands: list[HeadCommand]) -> None:
        """Release goes out once nothing of the request is in flight: a segment behind it would open it
        again."""
        request = self._requests.get(number)
        if request is None:
            return
        if request.submit is not None:
            self._end(request, "cancelled", commands)
        del self._requests[number]
        self.features.forget(number)
        self.drafters.release(Release(request=number), commands)
        self._leaving.add(number)
        self.fired["forgotten"] += 1
        self.fired["release waits"] += self.flights.carry(number)
        self._release_if_landed(number, commands)

    def _release_if_landed(self, number: int, commands: list[HeadCommand]) -> None:
        if number in self._leaving and not self.flights.carry(number):
            self._leaving.discard(number)
            self.admission.release(number)
            self._release(Release(request=number), commands)

    def _release(self, release: Release, commands: list[HeadCommand]) -> None:
        """Segments take it along, too, so that no stage runs rows in room that it has not made yet."""
        self._tell(release, commands)
        if self.is_formed:
            self.flights.releases += (release,)

    def _end(self, request: Request, reason: str, commands: list[HeadCommand]) -> None:
        """An answer is over: the stages drop what is left of it in flight, so that nobody waits for it."""
        assert request.submit is not None
        if self.flights.have_guesses(request):
            self._tell(request.commit(is_over=True), commands)
            request.is_end_told = True
            self.fired["end told"] += 1
        if request.number in self._turns:
            self._turns.remove(request.number)
            if request.awaits is not None:
                self._tell_opening(request, commands)  # its room is held: so it is there, if with nothing new
        self._paused.discard(request.number)
        self.admission.end(request.number)
        self.method.ended(request)
        self._rest = [each for each in self._rest if each[0] is not request]
        self._requests[request.number] = self._requests.pop(request.number)  # the last to be given up
        self.fired["cancelled"] += reason == "cancelled"
        statistics = request.statistics
        statistics.dropped_alive += request.tree.alive_count
        statistics.calibration_error = self.drafters.fusion.error
        commands.append(
            Finished(request=request.number, reason=reason, reused=request.reused, statistics=statistics)
        )
        request.submit = request.awaits = None
        request.held.clear()
        request.logprobs.clear()

    # ------------------------------------------------------------------------------------------ admission

    def _grow(self, commands: list[HeadCommand]) -> bool:
        """Has answers hold room for the tokens that they have come to, before more is sent of them; one that
        there is none for now waits, and its caches may be given up. Whether there were any."""
        found = False
        for request in [self._requests[number] for number in self._turns]:
            number, length = request.number, request.tree.committed_length
            if self.admission.holds(number, length):
                continue
            found = True
            given_up = self.admission.grow(number, length, self._idle())
            self.fired["grows"] += given_up is not None
            for each in given_up or ():
                self._give_up(self._requests[each], commands)
            if given_up is None:
                self.fired["pauses"] += 1
                self._turns.remove(number)
                self._paused.add(number)
                self._rest = [each for each in self._rest if each[0] is not request]
        return found

    def _admit(self, now_s: float, commands: list[HeadCommand]) -> bool:
        """Opens the answers that there is room for, in order of arrival; whether there were any."""
        has_admitted = False
        while (
            self.is_formed
            and self.admission.is_awaited
            and (found := self.admission.admit(self._idle())) is not None
        ):
            has_admitted = True
            number, given_up = found
            for each in given_up:
                self._give_up(self._requests[each], commands)
            request = self._requests[number]
            request.statistics.admitted(now_s)
            if number in self._paused:
                self._paused.discard(number)
                self._turns.append(number)
                continue
            request.awaits = self._source_of(request)
            self._turns.append(number)
            if request.awaits is None:
                self._tell_opening(request, commands)
            else:
                self.fired["reads along"] += not request.awaits.is_ready
        self.fired["waits"] += self.is_formed and self.admission.is_awaited
        return has_admitted

    def _source_of(self, request: Request) -> Source | None:
        """From whom a prompt of which nothing was sent yet copies its beginning."""
        if not self._prefix_block:
            return None
        return sharing.find(request, self._requests.values(), self._turns, self._prefix_block)

    def _tell_opening(self, request: Request, commands: list[HeadCommand]) -> None:
        """Says it at once, unless it could overtake an Open that copies from this request, or to it: then it
        goes with its first segment, behind that one's."""
        if not self.flights.copy(request.number):
            self._tell(request.opening, commands)

    def _idle(self) -> list[int]:
        """Conversations whose caches nobody uses now: those without an answer under way, the oldest first,
        then those that wait longest last; and what the next answer would copy from goes last of all."""
        resting = [number for number, request in self._requests.items() if request.submit is None]
        waiting = self.admission.waiting
        idle = [number for number in (*resting, *reversed(waiting)) if not self.flights.carry(number)]
        source = self._requests[waiting[0]].awaits if waiting else None
        return idle if source is None else sorted(idle, key=lambda number: number == source.number)

    def _give_up(self, request: Request, commands: list[HeadCommand]) -> None:
        """Has a conversation's caches released; whatever is asked of it next begins with a prefill."""
        self.fired["gives up"] += 1
        self._paused.discard(request.number)
        release = Release(request=request.number, epoch=request.opening.epoch)
        self._release(release, commands)
        self.drafters.release(release, commands)
        request.drafter_states = []
        request.featured = 0
        self.features.forget(request.number)
        self._begin_again(request)

    def _begin_again(self, request: Request) -> None:
        """The stages hold nothing of it any more: an answer that is wanted is opened anew, with what is known
        of it as its prompt."""
        self.drafters.forget(request.number)
        self._rest = [each for each in self._rest if each[0] is not request]
        request.computed = request.in_flight = 0
        if request.submit is not None:
            self.fired["begins again"] += 1
            request.reopen()
            self.drafters.begin(request, request.opening.length - 1, self.admission)
            self.method.begin(request)

    # ------------------------------------------------------------------------------------------- recovery

    def _lost(self, event: PipelineLost, now_s: float) -> None:
        self.is_formed = False
        self.flights.clear()
        self.features.begin(())
        for number in self._leaving:
            self.admission.release(number)
        self._leaving.clear()
        for number in (*self._turns, *self._paused):
            self._requests[number].statistics.lost(event.silent_s, now_s)
        self._paused.clear()
        for request in self._requests.values():
            self._begin_again(request)

    def _reformed(self, event: PipelineReformed) -> None:
        assert not self.is_formed, "a pipeline is formed that was not lost"
        self.is_formed = True
        self.stage_count = event.stage_count
        self.features.begin(event.capturing)
        self.costs = Costs(event.stage_count)
        self.portions = self.bounds.portions()
        self._turns.clear()
        self.admission.move_to(event.rooms)

    # ------------------------------------------------------------------------------------------- learning

    def _verified(self, verified: Verified, now_s: float, commands: list[HeadCommand]) -> None:
        """A segment came back: what it proves of the stages, and what its nodes drew."""
        flight = self.flights.land(verified.segment)
        if len(verified.hops) not in (0, self.stage_count):  # none: nothing was timed
            raise PeerError(
                f"segment {verified.segment} came back from a pipeline of {len(verified.hops)}, expected one "
                f"of {self.stage_count}"
            )
        hops, context = verified.hops, flight.context
        commands.append(
            SegmentTimed(
                segment=verified.segment, rows=flight.rows, sent_s=flight.sent_s, hops=hops, context=context
            )
        )
        round_trip_s = now_s - flight.sent_s
        self.costs.learn(verified.hops, flight.rows, flight.sent_s, now_s)
        self.portions.learn(verified.hops, flight.rows, flight.sent_s, now_s)
        drawn = {part.request: part for part in verified.parts}
        for load in flight.loads:
            request = self._requests.get(load.request)
            self.fired["old epoch"] += request is not None and request.opening.epoch != load.epoch
            if request is not None and request.opening.epoch == load.epoch:
                self._landed(request, load, drawn.get(load.request), verified.segment)
                request.statistics.landed(verified.hops, len(load.nodes) / flight.rows, round_trip_s)
            self._release_if_landed(load.request, commands)
            self._release_if_landed(load.source, commands)

    def _landed(self, request: Request, load: SentPart, part: VerifiedPart | None, segment: int) -> None:
        found = load.drawn(part, self.vocabulary)
        request.opened = True
        request.in_flight -= 1
        request.computed = max(request.computed, load.end)
        request.known_length = max(request.known_length, load.committed_length)
        if request.submit is None:
            return
        if request.tree.root in load.nodes and found.get(request.tree.root, -1) < 0:
            raise PeerError(
                f"segment {segment} came back without the root of request {request.number}, which is never "
                "dropped"
            )
        request.held.append({node: token for node, token in found.items() if token >= 0})
        request.logprobs.update(load.logprobs(part, request.opening.top_logprobs, self.vocabulary))

    def _features_arrived(self, event: FeaturesArrived, commands: list[HeadCommand]) -> None:
        request = self._requests.get(event.features.request)
        self.features.take(event, request)
        self.fired["early features"] += request is not None and not self._give_features(request, commands)

    def _give_features(self, request: Request, commands: list[HeadCommand]) -> bool:
        """Gives drafters what is complete by now of a request; whether anything is."""
        found = self.features.complete(request) if request.wants_features else None
        if found is not None:
            self.drafters.give(found, commands)
        return found is not None

    def _note_overdue(self, now_s: float) -> None:
        """Features that are waited for too long are waited for no more."""
        for request in (self._requests[number] for number in self._turns):
            if request.awaits_features and now_s >= request.due_s:
                self.fired["late features"] += 1
                request.is_overdue = True

    def _wake_s(self, now_s: float) -> float | None:
        """When to look again if nothing else happens."""
        waiting = (self._requests[number] for number in self._turns)
        found = [each.due_s for each in waiting if each.awaits_features and each.due_s < float("inf")]
        wake_s = self.method.wake_s(self._view(now_s))
        return min([*found, *(() if wake_s is None else (wake_s,))], default=None)

    def _walk_held(self, now_s: float, commands: list[HeadCommand]) -> bool:
        """Looks at verified segments, in order, as far as the method lets it; whether there were any."""
        has_walked = False
        for number in list(self._turns):
            request = self._requests[number]
            while request.submit is not None and request.held and self.method.may_walk(request):
                has_walked = True
                request.next_tokens.update(request.held.popleft())
                emitted = self._walk(request, request.submit, now_s, commands)
                if request.submit is not None:
                    self.method.walked(request, emitted)
        return has_walked

    def _walk(self, request: Request, submit: Submit, now_s: float, commands: list[HeadCommand]) -> int:
        """Follow the output from the root as far as it is known now; emit it and commit it."""
        tree = request.tree
        emitted: list[int] = []
        logprobs: list[Logprobs] = []
        reason = ""
        has_all = request.featured == tree.committed_length - 1
        while not reason and (token := request.next_tokens.pop(tree.root, None)) is not None:
            self.drafters.observe(request, token)
            if token in submit.stop_ids:
                reason = "stop"
                break
            emitted.append(token)
            if submit.top_logprobs >= 0:
                logprobs.append(request.logprobs.pop(tree.root))
            request.new_tokens.append(token)
            self._move_root(request, token)
            reason = request.why_over
            request.statistics.tokens_in_flight += (
                request.root_sent and not reason
            )  # nothing waits for what follows the last one
        if emitted:
            if has_all or request.due_s == float("inf"):
                request.due_s, request.is_overdue = now_s + LATE_S, False
            self._give_features(request, commands)
            self.drafters.grow(request)
            commands.append(Emit(request=request.number, tokens=tuple(emitted), logprobs=tuple(logprobs)))
            self._learn_pace(request, len(emitted), now_s)
        if reason:
            self._end(request, reason, commands)
        elif emitted and (
            request.wants_features or (request.in_flight and self.method.commits_at_once)
        ):  # stages send features of what they know to be committed
            self._tell(request.commit(), commands)
        return len(emitted)

    def _move_root(self, request: Request, token: int) -> None:
        tree = request.tree
        request.computed = max(request.computed, tree.committed_length)
        node = tree.child(tree.root, token)
        if node is None:
            self.fired["missed"] += 1
            node = tree.add(tree.root, token, 1.0)
        request.root_sent = tree.state(node) is NodeState.SENT
        self.fired["guessed"] += request.root_sent
        request.forget(tree.commit(node))

    def _learn_pace(self, request: Request, emitted: int, now_s: float) -> None:
        request.statistics.emitted(emitted, now_s)
        is_busy = request.statistics.walks > 1
        self.costs.emitted(emitted, now_s, is_busy=is_busy, is_missed=not request.root_sent)

    # -------------------------------------------------------------------------------------------- sending

    def _view(self, now_s: float, *, prompts: bool = False) -> View:
        requests = [self._requests[number] for number in self._turns]
        return View(
            requests=[
                request for request in requests if (prompts and request.awaits is None) or request.is_decoding
            ],
            count_living=self.flights.count_living,
            stage_count=self.stage_count,
            costs=self.costs,
            traits=self.drafters.traits,
            turnaround_s=self.drafters.turnaround_s,
            asked_s=self.drafters.asked_s,
            overdue_s=self.drafters.overdue_s(now_s),
            paused=self.drafters.paused(now_s),
            prompts_wait=not all(request.is_prefilled for request in requests),
            now_s=now_s,
        )

    def _portioned(self, loads: list[Boarding]) -> list[Boarding]:
        """As much of what is to be sent as the links bring over in time; the rest follows."""
        self._rest = []
        if not self.portions.are_bound:
            return loads
        found, left = [], self.portions.rows
        for request, nodes, is_prompt in loads:
            now, later = nodes[:left], nodes[left:]
            left -= len(now)
            if now:
                found.append((request, now, is_prompt))
            if later:
                self._rest.append((request, later, is_prompt))
        self.fired["slow guesses"] += bool(self._rest)
        return found

    def _left(self) -> list[Boarding]:
        """What of the last segment that a method chose is still to be sent."""
        found = []
        for request, nodes, is_prompt in self._rest:
            if living := [node for node in nodes if request.is_living(node)]:
                found.append((request, living, is_prompt))
        return found

    def _send(self, now_s: float, commands: list[HeadCommand]) -> bool:
        """Sends at most one segment: a chunk of a prompt, or what the method chooses; the two take turns."""
        if not self.is_formed or not self._turns or self.in_flight >= self.flights_max:
            return False
        if not self.portions.may_follow(self.flights.rows):
            self.fired["goes alone"] += not self.portions.is_proven
            return False
        view = self._view(now_s)
        window = self.method.window(view)
        has_room = view.living_flights < window + (self._is_prompts_turn and self.method.overfills)
        prompt = self._next_prompt(commands) if has_room else None
        loads = self._left()
        if not loads and (prompt is None or not self._is_prompts_turn):
            choices = self.method.send(view)
            fitting = [(request, request.fitting(nodes), False) for request, nodes in choices]
            loads = [each for each in fitting if each[1]]
        loads = self._portioned(loads[: limits.PARTS_PER_SEGMENT_MAX])
        if not loads and prompt is not None:
            self.fired["slow portion"] += self.portions.is_proven and self.portions.are_bound
            if prompt.awaits is not None:
                self._copy(prompt, prompt.awaits, commands)
            loads = [(prompt, prompt.next_chunk(self._chunk_rows(prompt)), True)]
        if not loads:
            return False
        self._is_prompts_turn = not loads[0][2]
        for request, _, _ in loads:
            self._turns.remove(request.number)
            self._turns.append(request.number)
        commands.append(SendToFirstStage(segment=self.flights.depart(loads, window, now_s)))
        return True

    def _next_prompt(self, commands: list[HeadCommand]) -> Request | None:
        """Whose prompt is read next; those that wait for another to read what they begin with are not. One
        whose wait is over looks anew for whom to copy from: it may be nobody, or another one to wait for."""
        for prompt in [self._requests[number] for number in self._turns]:
            if prompt.is_prefilled:
                continue
            if prompt.awaits is not None and not sharing.is_reading_it(prompt.awaits, self._requests):
                prompt.awaits = self._source_of(prompt)
                if prompt.awaits is None:
                    self._tell_opening(prompt, commands)
            if prompt.awaits is None or prompt.awaits.is_ready:
                return prompt
        return None

    def _copy(self, prompt: Request, source: Source, commands: list[HeadCommand]) -> None:
        """Has a prompt, of which something is sent now, begin with what others hold by now."""
        self.fired["copies"] += 1
        other = self._requests[source.number]
        sharing.copy(prompt, source, other)
        self.drafters.copy(prompt, other, source.count, commands)

    def _chunk_rows(self, prompt: Request) -> int:
        """Of the prompt's next chunk. Beside others' segments no stage waits, whatever it is."""
        most = min(self.portions.rows, self.bounds.prefill_chunk)
        if self._slot_s is None or len(self._turns) > 1:
            return most
        length = prompt.opening.length - prompt.opening.keep
        return chunk_rows(length, most, self.stage_count, self._slot_s)


def too_long(count: int, context: int, most: int | None = None) -> str:
    """Why a prompt of so many tokens is refused; `most` tokens are the model's limit, where that is known."""
    if most is None:
        more = ", or raise --context if the model allows more"
    else:
        more = f", or raise --context, to {most} at most" if most > context else ": the model has no more"
    return (
        f"the prompt has {count} tokens, but the context holds {context} with the answer; shorten the "
        f"prompt{more}"
    )
