"""Sums of what happens at the head, counted in its thread as it happens and read from others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.events import HeadCommand, HeadEvent, PipelineLost, Timed
from flowspec.core.protocol.messages import Hop

NOTES_KEPT = 5


@dataclass(slots=True)
class Totals:
    """`compute_s` is by stage in pipeline order, `losses` counts pipelines; rows of segments that are lost
    with one are in none of the sums."""

    compute_s: list[float] = field(default_factory=list)
    segments: int = 0
    rows: int = 0
    dead_in_queue: int = 0
    dead_between_layers: int = 0
    dead_late: int = 0
    losses: int = 0
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))

    def on_event(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        """An `OnEvent` of the head."""
        if isinstance(event, PipelineLost):
            self.losses += 1
        for command in commands:
            if isinstance(command, Timed):
                self.segments += 1
                self._add(command.hops)

    def note(self, text: str) -> None:
        """What the head tells people, kept with its time of day."""
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")

    def _add(self, hops: Sequence[Hop]) -> None:
        self.compute_s += [0.0] * (len(hops) - len(self.compute_s))
        for place, hop in enumerate(hops):
            self.compute_s[place] += hop.compute_s
            self.rows += hop.rows
            self.dead_in_queue += hop.dead_in_queue
            self.dead_between_layers += hop.dead_between_layers
            self.dead_late += hop.dead_late
