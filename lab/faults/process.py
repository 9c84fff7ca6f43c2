"""The head's process in a cluster that fails: it may be stopped, and its clock may jump."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.sim.clock import Alarm, Clock


class Process:
    """All that the head does happens in one: its pipelines and its drafters share it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events = 0
        """What its cores were given so far."""
        self.skew_s = 0.0
        self.is_stopped = False
        self._backlog: list[Callable[[], None]] = []

    @property
    def now_s(self) -> float:
        """By its own clock, which may have jumped."""
        return self.clock.now_s + self.skew_s

    def do(self, action: Callable[[], None]) -> None:
        """Now, or when a stopped process goes on."""
        if self.is_stopped:
            self._backlog.append(action)
        else:
            action()

    def at(self, time_s: float, action: Callable[[], None]) -> Alarm:
        """The same, at an instant of its own clock as it goes now."""
        return self.clock.at(time_s - self.skew_s, lambda: self.do(action))

    def later(self, after_s: float, action: Callable[[], None]) -> Alarm:
        return self.clock.at(self.clock.now_s + after_s, lambda: self.do(action))

    def stop(self) -> None:
        """What comes waits."""
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for each in backlog:
            self.do(each)
