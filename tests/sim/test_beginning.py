"""A simulated cluster begins with the product's own forming and holding, and needs neither of them while
nothing fails."""

from __future__ import annotations

from collections import Counter

from flowspec.core.cluster.daemon import (
    CallerMessageArrived,
    Compute,
    ComputeReported,
    DaemonEvent,
    SendOn,
    SendPong,
)
from flowspec.core.cluster.forming import CONTROL, DATA, SendControl
from flowspec.core.cluster.membership import Tick
from flowspec.core.protocol.cluster_messages import Ping
from flowspec.core.stage.events import ControlArrived, LayersDone, SegmentArrived
from flowspec.plan.placement import ClusterPlan
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.forming import FormedPipeline
from flowspec.sim.record import HEAD
from flowspec.sim.world import Cluster, Handled
from tests.sim.swarm import Play, draw

SEEDS = range(15)


def plan(stages: int) -> ClusterPlan:
    return Cluster(devices=(DeviceSpec(curve=Curve(base_s=0.1)),) * stages, context=50).plan()


def test_every_device_of_a_plan_is_held_with_its_part_and_ready() -> None:
    for count in (1, 2, 5):
        beginning = FormedPipeline(plan(count))
        assignments = [holding.assignment for holding in beginning.daemons.values()]
        assert [
            (assignment.assign.stage, assignment.is_ready)
            for assignment in assignments
            if assignment is not None
        ] == [(stage, True) for stage in range(count)]
        assert [stage.is_last for stage in beginning.stages] == [False] * (count - 1) + [True]
        beginning.forming.validate()
        for holding in beginning.daemons.values():
            holding.validate()


class Shadow:
    """Daemons beside a world that are told what its stages are told: they must have the same done, and
    nothing else."""

    def __init__(self, play: Play) -> None:
        self.seen: Counter[str] = Counter()
        self._beginning = FormedPipeline(play.schedule.cluster.plan())
        self._names = list(self._beginning.daemons)
        self._look = play.world.on_event
        play.world.on_event = self.look

    def look(self, handled: Handled) -> None:
        if handled.place != HEAD:
            self._compare(handled)
        assert self._look is not None
        self._look(handled)

    def _compare(self, handled: Handled) -> None:
        name = self._names[handled.place]
        holding, callers = self._beginning.daemons[name], self._beginning.callers
        event, now_s = handled.event, handled.now_s
        told: DaemonEvent
        if isinstance(event, SegmentArrived):
            caller = callers[name, "stage" if handled.place else DATA]
            told = CallerMessageArrived(
                caller=caller, message=event.segment, payload=event.payload, payload_bytes=event.payload_bytes
            )
        elif isinstance(event, ControlArrived):
            told = CallerMessageArrived(caller=callers[name, CONTROL], message=event.message)
        else:
            assert isinstance(event, LayersDone)
            told = ComputeReported(assignment_id=holding.number, result=event)
        commands = holding.handle(told, now_s)
        assert all(isinstance(command, Compute | SendOn) for command in commands)
        works = [command.work for command in commands if isinstance(command, Compute | SendOn)]
        assert list(map(repr, works)) == list(map(repr, handled.commands)), (
            f"at {now_s} s {name} does otherwise with {event}"
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


def test_while_nothing_fails_the_head_says_nothing_to_its_devices_but_ping() -> None:
    beginning = FormedPipeline(plan(3))
    pings = [SendControl(pipeline=1, device=name, message=Ping()) for name in beginning.daemons]
    for second in range(1, 60):
        assert beginning.forming.handle(Tick(flight_s=0.5, tokens=second), float(second)) == pings
        for holding in beginning.daemons.values():
            assert holding.assignment is not None
            answers = holding.handle(
                CallerMessageArrived(caller=holding.assignment.control, message=Ping()), float(second)
            )
            assert [type(answer) for answer in answers] == [SendPong]
