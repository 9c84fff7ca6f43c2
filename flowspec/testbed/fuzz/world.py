"""Both cores in a small cluster whose frames somebody tampers with: lost, twice, late, changed, or made up.

What runs is the product's own: `HeadCore`, the daemons' `Holding` with its `StageCore`, and the codec between them. Layers
and drafter are arithmetic. As in the runtime, a frame that the codec refuses is dropped with its sender, and a pipeline is lost now and
then, and another of as many stages or not takes its place, to which the frames of the old one still come. A `PeerError` of a core ends the
cluster, or (where somebody would re-plan) its pipeline. Where nobody tampers there is none, and every token is the model's.

Everything follows from the genome: each of its numbers seeds the chance for the next `STEPS` steps, so that a beginning that led
somewhere can be kept and gone on from.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from flowspec import __version__
from flowspec.core.cluster_messages import Assign, Welcome
from flowspec.core.events import (
    Cancel,
    Draft,
    Drafted,
    Emit,
    Forget,
    HeadEvent,
    LayersDone,
    PipelineLost,
    Reformed,
    RunLayers,
    SendSegment,
    SetTimer,
    Submit,
    TimerFired,
    ToPipeline,
    ToStages,
    Trim,
    VerifiedArrived,
)
from flowspec.core.head import HeadCore
from flowspec.core.holding import Ban, Caller, Compute, Greeted, Holding, Loaded, NextSaid, Said, SendOn, Terms, Worked, check_segment
from flowspec.core.incarnation import incarnation_of
from flowspec.core.messages import Commit, Message, Open, Proposal, Release, Sampling, Segment, Verified
from flowspec.core.methods import METHODS, make_method
from flowspec.core.mirror import DrafterTraits
from flowspec.errors import InputError, PeerError
from flowspec.testbed.fuzz.layers import logprobs_of, next_token, payload_of
from flowspec.testbed.fuzz.made_up import CONTEXT, REQUESTS, VOCABULARY, made_up
from flowspec.testbed.fuzz.mutate import mutated, nudged
from flowspec.testbed.fuzz.samples import Frames, sample_frames
from flowspec.wire.codec import Envelope, Tensor, decode, encode

Genome = tuple[int, ...]

STEPS = 16
WIDTH = 4
STAGES_MAX = 3
SESSION = 1
TOP_LOGPROBS = (-1, 0, 2)
"""What each request wants."""
LOST_SHARE = 0.02
"""Of the steps of a world with losses; another pipeline is formed some steps later."""
FORMED_SHARE = 0.15
_SAMPLES = sample_frames()
_TAMPERING = {"control": (2, 2, 2, 2, 2, 6, 3), "data": (1, 1, 1, 1, 2, 10, 2), "head": (1, 0.2, 2, 0.2, 2, 12, 0.2)}
"""How often what is done to a link's frames, in the order of `World._tampered`; what ends a cluster at once is rare."""


@dataclass(slots=True)
class Ending:
    """How a world went: frames that arrived, those refused by the codec or a check, pipelines lost, and what a core said at the end of the last."""

    frames: int = 0
    refused: int = 0
    lost: int = 0
    error: str = ""


class World:
    """One head and one to three stages. `run` returns how it went; anything else that comes out of it is a defect."""

    def __init__(self, genome: Genome) -> None:
        self._genome = genome
        self._chance = chance = random.Random(genome[0])
        self._ending = Ending()
        self._now_s = 0.0
        self._timer_s: float | None = None
        self._links: dict[tuple[str, int], deque[Any]] = {}
        self._tampering = chance.choice((0.0, 0.02, 0.1, 0.4))
        count = chance.randint(1, STAGES_MAX)
        traits = chance.choice((None, DrafterTraits(context=CONTEXT), DrafterTraits(context=CONTEXT // 2, needs_features=True)))
        method = make_method("ar" if traits is None else chance.choice(METHODS))
        self._head = HeadCore(context=CONTEXT, stage_count=count, method=method, drafters=() if traits is None else (traits,))
        self._head.vocabulary = VOCABULARY
        self._features = bool(traits and traits.needs_features)
        self._generation = 1
        self._stages = self._holds(count)
        self._loses, self._replans = chance.random() < 0.5, chance.random() < 0.5
        self._seen: Frames = _SAMPLES[0]
        self._texts: dict[int, list[int]] = {}
        self._forgotten: set[int] = set()

    def run(self) -> Ending:
        """Until the genome ends or a core ends the cluster."""
        try:
            for seed in self._genome:
                self._chance = random.Random(seed)
                for _ in range(STEPS):
                    self._step_or_lose()
        except PeerError as error:
            self._ending.error = str(error)
        assert self._tampering or not self._ending.error, f"nobody tampers, but {self._ending.error}"
        return self._ending

    def _step_or_lose(self) -> None:
        try:
            self._step()
        except PeerError as error:
            if not self._replans:
                raise
            self._ending.error = str(error)
            if self._head.is_formed:  # else an old stage's, of which the head hears no more
                self._lose()

    @property
    def _incarnation(self) -> int:
        return incarnation_of(SESSION, self._generation)

    def _step(self) -> None:
        self._now_s += self._chance.choice((0.0, 0.001, 0.001, 0.1))
        waiting = [key for key, link in self._links.items() if link]
        if not self._head.is_formed and self._chance.random() < FORMED_SHARE:
            self._form(self._chance.randint(1, STAGES_MAX))
        elif self._loses and self._head.is_formed and self._chance.random() < LOST_SHARE:
            self._lose()
        elif not waiting or self._chance.random() < 0.1:
            self._ask()
        elif self._timer_s is not None and self._chance.random() < 0.2:
            self._now_s = max(self._now_s, self._timer_s)
            self._timer_s = None
            self._to_head(TimerFired())
        else:
            self._deliver(self._chance.choice(waiting))

    def _ask(self) -> None:
        """What a user does: ask, go on with a conversation, cancel, forget."""
        chance, number = self._chance, self._chance.randrange(REQUESTS)
        known = {request.number: request for request in self._head.requests()}
        event: HeadEvent
        if number in known and known[number].submit is not None:
            event = Cancel(request=number)
        elif number in known and chance.random() < 0.2:
            event = Forget(request=number)
            self._forgotten.add(number)
        elif number in self._forgotten:
            return
        else:
            before = known[number].tree.committed_tokens() if number in known and chance.random() < 0.8 else []
            prompt = (*before, *(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 12))))
            sampling = Sampling(temperature=chance.choice((0.0, 1.0)), seed=number)
            stops = frozenset(chance.choice(((), (0,))))
            longest = chance.randint(1, 30)
            answered = tuple(chance.randrange(1, VOCABULARY) for _ in range(chance.choice((0, 0, 1, longest))))[
                : max(0, CONTEXT - len(prompt))
            ]
            event = Submit(
                request=number,
                prompt=prompt,
                new_tokens_max=longest,
                sampling=sampling,
                stop_ids=stops,
                answered=answered,
                top_logprobs=TOP_LOGPROBS[number],
            )
        try:
            if isinstance(event, Submit):
                self._texts[number] = [*event.prompt, *event.answered]
            self._to_head(event)
        except InputError:
            assert isinstance(event, Submit), "only a prompt may be too long"

    # -------------------------------------------------------------------------------------------- pipelines

    def _holds(self, count: int) -> list[_Daemon]:
        return [_Daemon(index, count, self._incarnation, features=self._features) for index in range(count)]

    def _lose(self) -> None:
        """The head gives the pipeline up; its stages live on until they are told of another one, and what is on its way stays there."""
        self._ending.lost += 1
        self._to_head(PipelineLost(silent_s=self._chance.choice((0.0, 5.0))))

    def _form(self, count: int) -> None:
        """Another pipeline; what the stages of the old one still compute is dropped there, its frames come to the new one's."""
        self._generation += 1
        self._stages = self._holds(count)
        for key in [key for key in self._links if key[0] == "compute" or key[1] >= count]:
            del self._links[key]
        self._to_head(Reformed(stage_count=count))

    # ------------------------------------------------------------------------------------------------- links

    def _post(self, key: tuple[str, int], message: Message, tensor: Tensor | None = None) -> None:
        envelope = Envelope(incarnation=self._incarnation, sender="peer", sequence=0, message=message, tensor=tensor)
        self._links.setdefault(key, deque()).append([bytes(frame) for frame in encode(envelope)])

    def _deliver(self, key: tuple[str, int]) -> None:
        kind, index = key
        link = self._links[key]
        if kind == "compute":
            self._run_layers(index, *link.popleft())
        elif kind == "draft":
            self._to_head(self._drafted(link.popleft()))
        else:
            for frames in self._tampered(key, link):
                self._ending.frames += 1
                event = self._received(kind, index, frames)
                if event is None:
                    self._ending.refused += 1
                elif kind == "head":
                    self._to_head(cast(VerifiedArrived, event))
                else:
                    self._to_stage(index, cast(Said, event))

    def _tampered(self, key: tuple[str, int], link: deque[Frames]) -> list[Frames]:
        """The next frames of a link, or what somebody made of them."""
        chance = self._chance
        frames = link.popleft()
        if chance.random() > self._tampering:
            self._seen = frames
            return [frames]
        way = chance.choices(("lost", "twice", "late", "old", "mutated", "nudged", "made up"), _TAMPERING[key[0]])[0]
        if way == "lost":
            return []
        if way == "twice":
            return [frames, frames]
        if way == "late":
            link.append(frames)
            return []
        if way == "old":
            return [self._stamped(self._seen) if chance.random() < 0.5 else self._seen, frames]
        if way == "mutated":
            return [mutated(frames, chance.choice(_SAMPLES), chance)]
        if way == "nudged":
            return [nudged(frames, chance)]
        return [self._made_up(key[0]), frames]

    def _made_up(self, kind: str) -> Frames:
        """A valid message with numbers as they occur here, for this kind of connection."""
        chance = self._chance
        try:
            message = made_up(kind, chance)
        except ValueError:  # a message's own rules: our frame would not leave
            return self._seen
        rows = message.row_count if isinstance(message, Segment | Verified) else 0
        tensor = payload_of(rows, WIDTH) if rows and chance.random() < 0.7 else None
        envelope = Envelope(incarnation=self._incarnation, sender="x", sequence=0, message=message, tensor=tensor)
        return [bytes(frame) for frame in encode(envelope)]

    def _stamped(self, frames: Frames) -> Frames:
        """Old frames as if they were of the pipeline that is there: a device that lies."""
        return [bytes(frame) for frame in encode(replace(decode(frames), incarnation=self._incarnation))]

    # ----------------------------------------------------------------------------------------------- devices

    def _received(self, kind: str, index: int, frames: Frames) -> VerifiedArrived | Said | None:
        """As a daemon and a head take frames: what a core is told, None for what they refuse, also since it is of another pipeline.

        Here that was a stranger's, so that the cluster goes on.
        """
        try:
            envelope = decode(frames)
            message, tensor = envelope.message, envelope.tensor
            if envelope.incarnation != self._incarnation or (kind == "head" and not self._head.is_formed):
                return None
            if kind == "head" and isinstance(message, Verified):
                return VerifiedArrived(verified=message)
            if kind == "control" and isinstance(message, Open | Commit | Release):
                return Said(caller=self._stages[index].control, message=message)
            if kind == "data" and isinstance(message, Segment):
                check_segment(self._stages[index].assign, LOADED, message, tensor)
                size = 0 if tensor is None else len(tensor.data)
                return Said(caller=self._stages[index].before, message=message, payload=tensor, payload_bytes=size)
        except PeerError:
            return None
        return None

    def _to_stage(self, index: int, event: Said | Worked) -> None:
        core = self._stages[index].core
        for command in core.handle(event, self._now_s):
            if isinstance(command, Ban):
                raise PeerError(command.error.text)
            if isinstance(command, Compute):
                if isinstance(command.work, RunLayers):
                    self._links.setdefault(("compute", index), deque()).append((command.work, set()))
                elif isinstance(command.work, Trim):
                    self._links["compute", index][0][1].update(command.work.rows)
            elif isinstance(command, SendOn):
                work = command.work
                tensor = work.payload.select(work.rows) if work.rows else None
                if isinstance(work, SendSegment):
                    self._post(("data", index + 1), work.segment, tensor)
                else:
                    self._post(("head", 0), work.verified, tensor)
        core.validate(is_honest=not self._tampering)
        if isinstance(event, Worked) and core.hold is None and self._stages[index].is_held:
            self._stages[index].is_held = False
            raise PeerError("a segment that had waited broke the protocol")

    def _run_layers(self, index: int, job: RunLayers, dead: set[int]) -> None:
        daemon, chance = self._stages[index], self._chance
        count = sum(len(part.slots) for part in job.parts)
        rows = tuple(row for row in range(count) if row not in dead or chance.random() < 0.5)
        tokens = [int(token) for part in job.parts for token in part.tokens]
        positions = [int(position) for part in job.parts for position in part.positions]
        asked = [bool(each) for part in job.parts for each in part.sampled]
        drawn = tuple(next_token(tokens[row], positions[row]) if asked[row] else -1 for row in rows) if not daemon.assign.next_hop else ()
        wanted = [part.top_logprobs for part in job.parts for _ in part.slots]
        logprobs = tuple(
            logprobs_of(wanted[row]) if token >= 0 and wanted[row] >= 0 else None for row, token in zip(rows, drawn, strict=False)
        )
        payload = payload_of(len(rows), WIDTH) if rows else None
        done = LayersDone(
            job=job.job,
            rows=rows,
            payload=payload,
            next_tokens=drawn,
            started_s=self._now_s,
            ended_s=self._now_s + chance.choice((0, 0.01)),
            logprobs=logprobs,
        )
        self._to_stage(index, Worked(hold=1, result=done))

    def _drafted(self, job: Draft) -> Drafted:
        chance = self._chance
        proposals = []
        for part in job.segment.parts:
            for node, token, position, committed in zip(part.ids, part.tokens, part.positions, part.committed, strict=True):
                if not committed and chance.random() < 0.9:
                    tokens = dict.fromkeys((next_token(token, position), chance.randrange(VOCABULARY), chance.randrange(VOCABULARY)))
                    confidences = tuple(0.6 / 2**rank for rank in range(len(tokens)))
                    request, epoch = part.commit.request, part.commit.epoch
                    proposals.append(Proposal(request=request, epoch=epoch, node=node, tokens=tuple(tokens), confidences=confidences))
        return Drafted(drafter=job.drafter, job=job.job, proposals=tuple(proposals), started_s=self._now_s, ended_s=self._now_s)

    def _to_head(self, event: HeadEvent) -> None:
        for command in self._head.handle(event, self._now_s):
            if isinstance(command, ToStages):
                for index in range(len(self._stages)):
                    self._post(("control", index), command.message)
            elif isinstance(command, ToPipeline):
                self._post(("data", 0), command.segment)
            elif isinstance(command, Draft):
                self._links.setdefault(("draft", 0), deque()).append(command)
            elif isinstance(command, SetTimer):
                self._timer_s = command.at_s
            elif isinstance(command, Emit):
                assert max(command.tokens) < VOCABULARY, f"token {max(command.tokens)} was emitted"
                self._emitted(self._texts[command.request], command.tokens)
                wanted = len(command.tokens) if TOP_LOGPROBS[command.request] >= 0 else 0
                assert len(command.logprobs) == wanted, f"{len(command.logprobs)} log-probabilities with {len(command.tokens)} tokens"
        for request in self._head.requests():
            if request.submit is not None:
                assert request.tree.committed_tokens() == self._texts[request.number], "the text is not what was asked and emitted"
        assert self._head.in_flight <= self._head.flights_max

    def _emitted(self, text: list[int], tokens: Sequence[int]) -> None:
        """New tokens of an answer; where nobody tampers they are what the model draws, whatever was lost."""
        for token in tokens:
            assert self._tampering or token == next_token(text[-1], len(text) - 1), f"{token} was emitted after {text}"
            text.append(token)


LOADED = Loaded(weight_bytes=0, cache_slots=600, received_bytes=0, hidden_size=WIDTH, vocabulary_size=VOCABULARY, reused=False)


class _Daemon:
    """A daemon that holds a stage, and is ready; `control` and `before` are who speaks to it."""

    def __init__(self, index: int, count: int, incarnation: int, *, features: bool) -> None:
        is_last = index == count - 1
        self.assign = Assign(
            model="m",
            fingerprint="f",
            stage=index,
            stages=count,
            first_layer=index,
            end_layer=index + 1,
            layer_count=count,
            next_hop="" if is_last else "h:1",
            next_name="",
            dtype="float32",
            context=CONTEXT,
            captures=(count,) if features else (),
        )
        self.core = Holding(Terms(lease_s=1e9, link_s=1e9))
        self.is_held = True
        self.control = Caller("head", "head-control", incarnation)
        self.before = Caller("before", "stage" if index else "head-data", incarnation)
        data = Caller("head", "head-data", incarnation)
        for caller in (self.control, self.before, data):
            self.core.handle(Greeted(caller=caller), 0.0)
        self.core.handle(Said(caller=self.control, message=self.assign), 0.0)
        self.core.handle(Worked(hold=1, result=LOADED), 0.0)
        if not is_last:
            welcome = Welcome(name="next", version=__version__, device="cpu", pid=1, memory_bytes=1, count=0)
            self.core.handle(NextSaid(hold=1, message=welcome), 0.0)
        assert self.core.hold is not None, "it was assigned a stage"
        assert self.core.hold.is_ready, "all is there"
