"""Virtual time: a heap of what happens when. Nothing here or above it ever reads a real clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Alarm:
    """Something that will happen; `cancel` undoes it, also when it has happened already."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Clock:
    """Runs actions in order of (time, when they were asked for), so that ties are the same in every run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Alarm]] = []
        self._count = 0

    def at(self, time_s: float, action: Action) -> Alarm:
        """Have `action` happen at `time_s`; what is due already happens next, after what was asked for
        earlier."""
        alarm = Alarm(action)
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, alarm))
        self._count += 1
        return alarm

    def step(self, until_s: float = float("inf")) -> bool:
        """Let the next thing happen; False if nothing is left to happen up to `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            time_s, _, alarm = heapq.heappop(self._heap)
            if alarm.action is not None:
                self.now_s = time_s
                action, alarm.action = alarm.action, None
                action()
                return True
        return False
