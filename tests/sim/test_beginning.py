"""A simulated cluster needs no daemons while nothing fails: they hand on what stages are told and say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from msgspec import structs

from flowspec.core.cluster.daemon import (
    CallerConnected,
    CallerMessageArrived,
    Compute,
    ComputeReported,
    DaemonCore,
    DaemonLimits,
    NextHopMessageArrived,
    SendOn,
)
from flowspec.core.cluster.forming import CONTROL, DATA
from flowspec.core.stage.events import ControlArrived, LayersDone, SegmentArrived
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled
from tests.core.test_daemon import FIRST, LOADED, WELCOME, Caller, assign
from tests.sim.swarm import Play, draw

SEEDS = range(15)
NEVER_S = 1e9
ANY_TOKEN = replace(LOADED, hidden_size=1, vocabulary_size=1 << 17)


class Shadow:
    """Daemons beside a world that are told what its stages are told: they must have the same done, and
    nothing else."""

    def __init__(self, play: Play) -> None:
        self.seen: Counter[str] = Counter()
        cluster = play.schedule.cluster
        self._daemons = []
        for stage in range(len(cluster.devices)):
            daemon = DaemonCore(DaemonLimits(lease_s=NEVER_S, link_s=NEVER_S))
            callers = {role: Caller("head", role, FIRST) for role in (CONTROL, DATA, "stage")}
            part = structs.replace(
                assign(len(cluster.devices), stage),
                context=cluster.context,
                sliding_window=cluster.sliding_window,
            )
            for event in (
                *(CallerConnected(caller=caller) for caller in callers.values()),
                CallerMessageArrived(caller=callers[CONTROL], message=part),
                ComputeReported(assignment_id=1, result=ANY_TOKEN),
                *([NextHopMessageArrived(assignment_id=1, message=WELCOME)] if part.next_hop else []),
            ):
                daemon.handle(event, 0.0)
            assert daemon.assignment is not None
            assert daemon.assignment.is_ready
            self._daemons.append((daemon, callers))
        self._look = play.world.on_event
        play.world.on_event = self.look

    def look(self, handled: Handled) -> None:
        if handled.place != HEAD:
            self._compare(handled)
        assert self._look is not None
        self._look(handled)

    def _compare(self, handled: Handled) -> None:
        daemon, callers = self._daemons[handled.place]
        event = handled.event
        told: CallerMessageArrived | ComputeReported
        if isinstance(event, SegmentArrived):
            caller = callers["stage" if handled.place else DATA]
            told = CallerMessageArrived(
                caller=caller, message=event.segment, payload=event.payload, payload_bytes=event.payload_bytes
            )
        elif isinstance(event, ControlArrived):
            told = CallerMessageArrived(caller=callers[CONTROL], message=event.message)
        else:
            assert isinstance(event, LayersDone)
            told = ComputeReported(assignment_id=1, result=event)
        commands = daemon.handle(told, handled.now_s)
        assert all(isinstance(command, Compute | SendOn) for command in commands)
        works = [command.work for command in commands if isinstance(command, Compute | SendOn)]
        assert list(map(repr, works)) == list(map(repr, handled.commands)), (
            f"at {handled.now_s} s stage {handled.place} does otherwise with {event}"
        )
        self.seen.update(type(work).__name__ for work in works)


def test_while_nothing_fails_a_daemon_hands_on_what_its_stage_is_told_and_says() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        if not draw(seed).captures:  # features are not there in this world: payloads would be too narrow
            play = Play(draw(seed), checks=False)
            shadow = Shadow(play)
            play.run()
            seen.update(shadow.seen)
    assert all(
        seen[kind] > 10
        for kind in ("RunLayers", "Trim", "OpenCache", "CloseCache", "SendSegment", "SendVerified")
    ), seen
