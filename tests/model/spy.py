"""The logits of all rows that real slices run in a pipeline, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowspec.core.stage.events import ClearSlots, CloseCache, JobPart, OpenCache, RunLayers
from flowspec.model.slice import Slice


class Spy:
    """Keeps the logits of all rows that the last stage ran, by the path that each stands for."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices
        self.logits: dict[tuple[int, ...], bytes] = {}
        self.most_bytes = 0
        self._tokens: dict[tuple[int, int], int] = {}

    def run(self, stage: int, job: RunLayers, payload: Any) -> tuple[Any, ...]:
        part = self.slices[stage]
        if stage < len(self.slices) - 1:
            return part.run(job, payload)
        rows, states = part.forward(job, payload)
        logits = part.logits(states)
        paths = [path for each in job.parts for path in self._paths(each)]
        self.logits |= {paths[row]: found.tobytes() for row, found in zip(rows, logits, strict=True)}
        requests = [each for each in job.parts for _ in each.slots]
        drawn = [
            part._sampler(requests[row]).draw(logits[place], len(paths[row])) if job.sampled[row] else -1
            for place, row in enumerate(rows)
        ]
        return rows, states[:, :0], tuple(drawn)

    def opened(self, stage: int, command: OpenCache | ClearSlots | CloseCache) -> None:
        """Tells of a change of the caches: tokens that were copied stand in other slots, too."""
        if stage == len(self.slices) - 1 and isinstance(command, OpenCache) and command.copied is not None:
            copied = command.copied
            for slot, other in enumerate(copied.slots.tolist()):
                self._tokens[command.request, slot] = self._tokens[copied.source, other]

    def _paths(self, part: JobPart) -> list[tuple[int, ...]]:
        self._tokens |= {
            (part.request, slot): token
            for slot, token in zip(part.slots.tolist(), part.tokens.tolist(), strict=True)
        }
        paths = []
        for visible in part.visible:
            slots = np.flatnonzero(visible)
            slots = slots[np.argsort(part.key_positions[slots])]
            paths.append(tuple(self._tokens[part.request, slot] for slot in slots.tolist()))
        return paths
