"""A head in virtual time that can be watched like a running one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from flowspec.core.head.head import HeadCore
from flowspec.core.head.request import Request
from flowspec.runtime.head import OnEvent
from flowspec.runtime.watching import Watch
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.recording import About
from tests.sim.swarm import Play, draw


def play(seed: int, take: Callable[[HeadCore, Handled], None]) -> Play:
    """A schedule, not yet run; `take` is told of every event of the head."""
    run = Play(draw(seed), checks=False)
    go_on = run.world.on_event
    assert go_on is not None

    def look(handled: Handled) -> None:
        go_on(handled)
        if handled.place == HEAD:
            take(run.world.head, handled)

    run.world.on_event = look
    return run


class VirtualHead:
    """What a `Watch` needs of `runtime.head.Head`, over a simulated schedule that goes on when it is told
    to."""

    def __init__(self, seed: int) -> None:
        self.play = play(seed, self._hear)
        self.observers: list[OnEvent] = []
        self.is_formed = True
        self.lost: list[str] = []
        self.failure: Exception | None = None
        self.loading: dict[str, tuple[str, float]] = {}
        self.pongs: dict[int, Any] = {}
        count = len(self.play.world.stages)
        plans = [SimpleNamespace(name=f"board-{index}", first=index, end=index + 1) for index in range(count)]
        self.plan = SimpleNamespace(model="made", stages=plans)
        self.stages = [SimpleNamespace(plan=plan, pong=None, ready=None) for plan in plans]

    def _hear(self, head: HeadCore, handled: Handled) -> None:
        for observer in list(self.observers):
            observer(handled.event, handled.commands, handled.now_s)  # type: ignore[arg-type]

    def observe(self, observer: OnEvent) -> None:
        self.observers.append(observer)

    def unobserve(self, observer: OnEvent) -> None:
        if observer in self.observers:
            self.observers.remove(observer)

    def observes(self, observer: OnEvent) -> bool:
        return observer in self.observers

    def requests(self) -> list[Request]:
        return self.play.world.head.requests()

    def run(self, until_s: float = float("inf")) -> None:
        self.play.world.run(until_s=until_s, events_max=20_000)


def watched(head: VirtualHead, *, keeps: bool = False) -> Watch:
    about = About(world="simulated", model="made", method="any", drafters=(), stages=[])
    clock = head.play.world.clock
    return Watch(head, about, as_numbers, keeps=keeps, clock=lambda: clock.now_s)  # type: ignore[arg-type]
