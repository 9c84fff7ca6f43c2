"""The world of `lab.faults`, with somebody who tampers with its frames: lost, twice, late, changed,
or made up.

What runs is the product's own: `HeadCore`, `PipelineCore`, the daemons' `DaemonCore` with its `StageCore`,
and the codec between them. The cluster, its faults and what is asked are a schedule's. A frame that the codec
refuses ends its connection, as in the runtime; what no honest peer says ends the pipeline or bans the
speaker, and the head forms another one. Every core's `validate()` is asked after every event. Where nobody
tampers the world is as honest as ever, and every token is the model's.

Everything follows from the genome: the first of its numbers draws the schedule, each other one seeds the
chance for the next `STEPS` frames, so that a beginning that led somewhere can be kept and gone on from. With
the last of them the world ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from flowspec.core.protocol.messages import Features, Segment
from flowspec.sim.link import Frames as AnyFrames
from flowspec.wire.codec import Envelope, Tensor, decode, encode
from lab.faults.network import Connection
from lab.faults.pipelines import HEAD
from lab.faults.play import Play
from lab.faults.schedule import draw
from lab.fuzz.made_up import made_up
from lab.fuzz.mutate import mutated, nudged
from lab.fuzz.samples import Frames, sample_frames

Genome = tuple[int, ...]

STEPS = 16
EVENTS_MAX = 20_000
SEEDS = 1 << 32
RATES = (0.0, 0.01, 0.05, 0.2)
"""Of the frames, how many somebody tampers with."""
WAYS = ("lost", "twice", "late", "old", "mutated", "nudged", "made up")
_WEIGHTS = {
    "control": (2, 2, 2, 2, 1, 6, 3),
    "data": (1, 1, 1, 1, 1, 10, 2),
    "head": (1, 0.2, 2, 0.2, 1, 12, 0.2),
}
"""How often what is done to frames, in the order of `WAYS`, by where they go; what ends a cluster at once is
rare."""
_SAMPLES = sample_frames()


@dataclass(slots=True)
class Ending:
    """How a world went: frames that came, those that the codec or a check refused, pipelines, and what the
    head said at the end."""

    frames: int = 0
    refused: int = 0
    pipelines: int = 0
    error: str = ""


class World:
    """One head and its devices. `run` returns how it went; anything else that comes out of it is a defect."""

    def __init__(self, genome: Genome) -> None:
        self._genome = genome
        self._chance = random.Random(genome[0])
        self._rate = self._chance.choice(RATES)
        self._ending = Ending()
        self._seen: Frames = _SAMPLES[0]
        self._late: dict[tuple[int, str], tuple[Connection, Frames]] = {}
        self._is_over = False
        schedule = draw(genome[0] % SEEDS)
        self._play = Play(schedule, self._tamper if self._rate else None)

    def run(self) -> Ending:
        """Until the genome ends, or the session does."""
        self._play.run_until(lambda: self._is_over, EVENTS_MAX)
        self._ending.pipelines = self._play.cluster.pipelines
        self._ending.refused = sum(daemon.rules["misbehaved"] for daemon in self._play.daemons.values())
        self._ending.refused += self._play.cluster.forming.fired["misspoke"]
        self._ending.error = self._play.ending
        return self._ending

    def _tamper(self, connection: Connection, sender: str, frames: AnyFrames) -> Sequence[Frames]:
        """The next frames on their way, or what somebody makes of them."""
        own: Frames = [bytes(frame) for frame in frames]
        number, step = divmod(self._ending.frames, STEPS)
        self._ending.frames += 1
        if step == 0:
            if number + 1 >= len(self._genome):
                self._is_over = True
                return [own]
            self._chance = random.Random(self._genome[number + 1])
        late = self._late.pop((id(connection), sender), None)
        found = self._changed(connection, sender, own)
        return found if late is None else [*found, late[1]]

    def _changed(self, connection: Connection, sender: str, frames: Frames) -> list[Frames]:
        chance = self._chance
        if chance.random() > self._rate:
            self._seen = frames
            return [frames]
        to_head = sender != HEAD and HEAD in (connection.dialler, connection.listener)
        kind = "head" if to_head else "control" if connection.role == "head-control" else "data"
        way = chance.choices(WAYS, _WEIGHTS[kind])[0]
        if way == "lost":
            return []
        if way == "twice":
            return [frames, frames]
        if way == "late":
            # The connection is kept, too, so that no other one can get its identity.
            self._late[id(connection), sender] = connection, frames
            return []
        if way == "old":
            return [_stamped(self._seen, connection) if chance.random() < 0.5 else self._seen, frames]
        if way == "mutated":
            return [mutated(frames, chance.choice(_SAMPLES), chance)]
        if way == "nudged":
            return [nudged(frames, chance)]
        return [self._made_up(kind, connection), frames]

    def _made_up(self, kind: str, connection: Connection) -> Frames:
        """A valid message with numbers as they occur here, for this kind of connection."""
        chance = self._chance
        try:
            message = made_up(kind, chance)
        except ValueError:  # a message's own rules: our frame would not leave
            return self._seen
        rows = message.row_count if isinstance(message, Segment | Features) else 0
        has_payload = rows and (isinstance(message, Features) or chance.random() < 0.7)
        tensor = Tensor(rows=rows, width=1, dtype="float32", data=bytes(4 * rows)) if has_payload else None
        envelope = Envelope(
            incarnation=connection.incarnation, sender="x", sequence=0, message=message, tensor=tensor
        )
        return [bytes(frame) for frame in encode(envelope)]


def _stamped(frames: Frames, connection: Connection) -> Frames:
    """Old frames as if they were of this connection: a device that lies."""
    return [
        bytes(frame) for frame in encode(structs.replace(decode(frames), incarnation=connection.incarnation))
    ]
