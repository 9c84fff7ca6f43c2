"""Sums of what happens at the head, counted in its thread as it happens and read from others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.head.events import (
    HeadCommand,
    HeadEvent,
    PipelineLost,
    SegmentTimed,
)
from flowspec.core.head.hop_sums import HopSums

NOTES_KEPT = 5


@dataclass(slots=True)
class Totals:
    """`losses` counts pipelines; rows of segments that are lost with one are in none of the sums."""

    hops: HopSums = field(default_factory=HopSums)
    segments: int = 0
    losses: int = 0
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))

    def on_event(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        """An `OnEvent` of the head."""
        if isinstance(event, PipelineLost):
            self.losses += 1
        for command in commands:
            if isinstance(command, SegmentTimed):
                self.segments += 1
                self.hops.add(command.hops)

    def note(self, text: str) -> None:
        """What the head tells people, kept with its time of day."""
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")
