"""Both cores in a small cluster whose frames somebody tampers with: lost, twice, late, changed, or made up.

What runs is the product's own: `HeadCore`, `StageCore`, the codec between them, and what a daemon checks of a segment (`Hold`). Layers
and drafter are arithmetic. As in the runtime, a frame that the codec refuses is dropped with its sender, and a `PeerError` of a
core ends the cluster. Everything follows from the genome: each of its numbers seeds the chance for the next `STEPS` steps, so that
a beginning that led somewhere can be kept and gone on from.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Assign, Hello
from flowspec.core.drafting import DrafterTraits
from flowspec.core.events import (
    Cancel,
    ControlArrived,
    Draft,
    Drafted,
    Emit,
    Forget,
    HeadEvent,
    LayersDone,
    Proposal,
    RunLayers,
    SegmentArrived,
    SendSegment,
    SendVerified,
    SetTimer,
    StageEvent,
    Submit,
    TimerFired,
    ToPipeline,
    ToStages,
    Trim,
    VerifiedArrived,
)
from flowspec.core.head import HeadCore
from flowspec.core.messages import Commit, Hop, Message, Open, Part, Release, Sampling, Segment, Verified, VerifiedPart
from flowspec.core.methods import METHODS, make_method
from flowspec.core.stage import StageCore
from flowspec.errors import InputError, PeerError
from flowspec.runtime.compute import Loaded
from flowspec.runtime.hold import Hold
from flowspec.runtime.peers import Peer
from flowspec.runtime.transport import Link, Receiver
from flowspec.testbed.fuzz.mutate import mutated, nudged
from flowspec.testbed.fuzz.samples import Frames, sample_frames
from flowspec.wire.codec import DTYPE_BYTES, Envelope, Tensor, decode, encode

Genome = tuple[int, ...]

STEPS = 16
CONTEXT = 48
VOCABULARY = 6
WIDTH = 4
REQUESTS = 3
_SAMPLES = sample_frames()
_TAMPERING = {"control": (2, 2, 2, 2, 2, 6, 3), "data": (1, 1, 1, 1, 2, 10, 2), "head": (1, 0.2, 2, 0.2, 2, 12, 0.2)}
"""How often what is done to a link's frames, in the order of `World._tampered`; what ends a cluster at once is rare."""


@dataclass(slots=True)
class Ending:
    """How a world went: frames that arrived, those refused by the codec or a check, and what a core said when it ended the cluster."""

    frames: int = 0
    refused: int = 0
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
        self._tampering = chance.choice((0.02, 0.1, 0.4))
        count = chance.randint(1, 3)
        traits = chance.choice((None, DrafterTraits(context=CONTEXT), DrafterTraits(context=CONTEXT // 2, needs_features=True)))
        method = make_method("ar" if traits is None else chance.choice(METHODS))
        self._head = HeadCore(context=CONTEXT, stage_count=count, method=method, drafter=traits)
        self._head.vocabulary = VOCABULARY
        features = bool(traits and traits.needs_features)
        self._stages = [_hold(index, count, features=features) for index in range(count)]
        self._seen: Frames = _SAMPLES[0]
        self._forgotten: set[int] = set()

    def run(self) -> Ending:
        """Until the genome ends or a core ends the cluster."""
        try:
            for seed in self._genome:
                self._chance = random.Random(seed)
                for _ in range(STEPS):
                    self._step()
        except PeerError as error:
            self._ending.error = str(error)
        return self._ending

    def _step(self) -> None:
        self._now_s += self._chance.choice((0.0, 0.001, 0.001, 0.1))
        waiting = [key for key, link in self._links.items() if link]
        if not waiting or self._chance.random() < 0.1:
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
            event = Submit(request=number, prompt=prompt, new_tokens_max=chance.randint(1, 30), sampling=sampling, stop_ids=stops)
        try:
            self._to_head(event)
        except InputError:
            assert isinstance(event, Submit), "only a prompt may be too long"

    # ------------------------------------------------------------------------------------------------- links

    def _post(self, key: tuple[str, int], message: Message, tensor: Tensor | None = None) -> None:
        envelope = Envelope(incarnation=1, sender="peer", sequence=0, message=message, tensor=tensor)
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
                    self._to_stage(index, cast(StageEvent, event))

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
            return [self._seen, frames]
        if way == "mutated":
            return [mutated(frames, chance.choice(_SAMPLES), chance)]
        if way == "nudged":
            return [nudged(frames, chance)]
        return [self._made_up(key[0]), frames]

    def _made_up(self, kind: str) -> Frames:
        """A valid message with numbers as they occur here, for this kind of connection."""
        chance = self._chance
        try:
            message = _verified(chance) if kind == "head" else _control(chance) if kind == "control" else _segment(chance)
        except ValueError:  # a message's own rules: our frame would not leave
            return self._seen
        rows = message.row_count if isinstance(message, Segment | Verified) else 0
        tensor = _rows(rows, WIDTH) if rows and chance.random() < 0.7 else None
        return [bytes(frame) for frame in encode(Envelope(incarnation=1, sender="x", sequence=0, message=message, tensor=tensor))]

    # ----------------------------------------------------------------------------------------------- devices

    def _received(self, kind: str, index: int, frames: Frames) -> VerifiedArrived | StageEvent | None:
        """As a daemon and a head take frames: what a core is told, None for what they refuse.

        Here that was a stranger's, so that the cluster goes on.
        """
        try:
            envelope = decode(frames)
            message, tensor = envelope.message, envelope.tensor
            if kind == "head" and isinstance(message, Verified):
                return VerifiedArrived(verified=message)
            if kind == "control" and isinstance(message, Open | Commit | Release):
                return ControlArrived(message=message)
            if kind == "data" and isinstance(message, Segment):
                self._stages[index].check_segment(message, tensor)
                size = 0 if tensor is None else len(tensor.data)
                return SegmentArrived(segment=message, payload=tensor, received_s=self._now_s, payload_bytes=size)
        except PeerError:
            return None
        return None

    def _to_stage(self, index: int, event: StageEvent) -> None:
        core = self._stages[index].core
        for command in core.handle(event, self._now_s):
            if isinstance(command, RunLayers):
                self._links.setdefault(("compute", index), deque()).append((command, set()))
            elif isinstance(command, Trim):
                self._links["compute", index][0][1].update(command.rows)
            elif isinstance(command, SendSegment | SendVerified):
                message = command.segment if isinstance(command, SendSegment) else command.verified
                tensor = command.payload.select(command.rows) if command.rows else None
                self._post(("data", index + 1) if isinstance(command, SendSegment) else ("head", 0), message, tensor)
        assert core.queued <= limits.QUEUED_SEGMENTS_MAX
        assert len(core.requests()) <= limits.REQUESTS_MAX

    def _run_layers(self, index: int, job: RunLayers, dead: set[int]) -> None:
        hold, chance = self._stages[index], self._chance
        count = sum(len(part.slots) for part in job.parts)
        rows = tuple(row for row in range(count) if row not in dead or chance.random() < 0.5)
        tokens = [int(token) for part in job.parts for token in part.tokens]
        positions = [int(position) for part in job.parts for position in part.positions]
        asked = [bool(each) for part in job.parts for each in part.sampled]
        drawn = tuple(_next(tokens[row], positions[row]) if asked[row] else -1 for row in rows) if hold.core.is_last else ()
        payload = _rows(len(rows), WIDTH) if rows else None
        done = LayersDone(
            job=job.job,
            rows=rows,
            payload=payload,
            next_tokens=drawn,
            started_s=self._now_s,
            ended_s=self._now_s + chance.choice((0, 0.01)),
        )
        self._to_stage(index, done)

    def _drafted(self, job: Draft) -> Drafted:
        chance = self._chance
        proposals = []
        for part in job.segment.parts:
            for node, token, position, committed in zip(part.ids, part.tokens, part.positions, part.committed, strict=True):
                if not committed and chance.random() < 0.9:
                    tokens = dict.fromkeys((_next(token, position), chance.randrange(VOCABULARY), chance.randrange(VOCABULARY)))
                    confidences = tuple(0.6 / 2**rank for rank in range(len(tokens)))
                    request, epoch = part.commit.request, part.commit.epoch
                    proposals.append(Proposal(request=request, epoch=epoch, node=node, tokens=tuple(tokens), confidences=confidences))
        return Drafted(job=job.job, proposals=tuple(proposals), started_s=self._now_s, ended_s=self._now_s)

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


def _hold(index: int, count: int, *, features: bool) -> Hold:
    is_last = index == count - 1
    assign = Assign(
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
    )
    core = StageCore(is_last=is_last, slots_max=CONTEXT + limits.TREE_NODES_MAX, returns_features=features and is_last)
    link = Link(cast(Any, None), incarnation=1, sender="stage")  # nothing is sent by it
    head = Peer("", Hello(name="head", version=__version__, role="head-control"), link, Receiver())
    hold = Hold(1, head, assign, core)
    hold.loaded = Loaded(weight_bytes=0, cache_slots=600, received_bytes=0, hidden_size=WIDTH, vocabulary_size=VOCABULARY, reused=False)
    return hold


def _next(token: int, position: int) -> int:
    """The token that this world's model draws."""
    return (3 * token + position) % VOCABULARY


def _rows(rows: int, width: int) -> Tensor:
    return Tensor(rows=rows, width=width, dtype="float32", data=bytes(rows * width * DTYPE_BYTES["float32"]))


def _few(chance: random.Random, most: int, low: int = 0) -> tuple[int, ...]:
    return tuple(chance.randint(low, 20) for _ in range(chance.randint(0, most)))


def _open(chance: random.Random, request: int, epoch: int) -> Open:
    length = chance.choice((1, 2, 5, CONTEXT, CONTEXT + 1))
    keep, slots = chance.randint(0, length), chance.choice((CONTEXT + limits.TREE_NODES_MAX, length, CONTEXT * 9))
    return Open(request=request, epoch=epoch, keep=keep, length=length, root=chance.randint(0, 20), slots=slots, sampling=Sampling())


def _commit(chance: random.Random, request: int, epoch: int) -> Commit:
    base = chance.choice((1, 2, 5, chance.randint(1, CONTEXT), limits.CONTEXT_MAX))
    return Commit(request=request, epoch=epoch, base=base, path=_few(chance, chance.choice((0, 3, 60))))


def _control(chance: random.Random) -> Open | Commit | Release:
    request, epoch = chance.randrange(REQUESTS), chance.randrange(3)
    return chance.choice((_open, _commit, _commit, lambda *_: Release(request=request)))(chance, request, epoch)


def _segment(chance: random.Random) -> Segment:
    parts = []
    for request in chance.sample(range(REQUESTS), chance.randint(0, REQUESTS)):
        epoch = chance.randrange(3)
        ids = _few(chance, 6)
        parts.append(
            Part(
                commit=_commit(chance, request, epoch),
                opening=_open(chance, request, epoch) if chance.random() < 0.3 else None,
                ids=ids,
                parents=tuple(chance.randint(-1, node - 1) for node in ids),
                tokens=tuple(chance.randrange(VOCABULARY + 1) for _ in ids),
                positions=tuple(chance.choice((0, 1, 5, CONTEXT - 1, CONTEXT, limits.CONTEXT_MAX)) for _ in ids),
                committed=tuple(chance.random() < 0.5 for _ in ids),
            )
        )
    return Segment(segment=chance.randrange(40), parts=tuple(parts), hops=_hops(chance))


def _verified(chance: random.Random) -> Verified:
    parts = []
    for _ in range(chance.randint(0, 2)):
        ids = _few(chance, 5)
        tokens = tuple(chance.choice((-1, chance.randrange(VOCABULARY), VOCABULARY, limits.VOCABULARY_MAX)) for _ in ids)
        parts.append(VerifiedPart(request=chance.randrange(REQUESTS), epoch=chance.randrange(3), ids=ids, next_tokens=tokens))
    return Verified(segment=chance.randrange(40), parts=tuple(parts), hops=_hops(chance))


def _hops(chance: random.Random) -> tuple[Hop, ...]:
    seconds = (0.0, 1e-300, 0.01, 1e6)
    return tuple(
        Hop(
            received_s=chance.choice((*seconds, 1e12)),
            queued_s=chance.choice(seconds),
            compute_s=chance.choice(seconds),
            own_s=chance.choice(seconds),
            rows=chance.randint(0, 9),
        )
        for _ in range(chance.randint(0, 4))
    )
