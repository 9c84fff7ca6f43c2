"""The head's side of a drafter on a device: what goes there, what of its words counts, and what became of
work when it was lost."""

from __future__ import annotations

import queue
import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowspec.bench.checkpoints import VOCABULARY_SIZE
from flowspec.core.head.events import (
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    PipelineLost,
    PipelineReformed,
    SendToDrafter,
)
from flowspec.core.protocol.messages import Expand, Proposal, Proposed, Release, Segment
from flowspec.core.stage.slots import CacheRoom
from flowspec.errors import BrokenError, ClusterError
from flowspec.model.files import bundled_folder
from flowspec.runtime import remote_drafter
from flowspec.runtime.compute import WorkFailed
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.remote_drafter import Notice, RemoteDrafter
from flowspec.runtime.transport import Wake
from tests.runtime.clusters import WAIT_S, drafter_for

SLOTS = 1500


class FakeConnections:
    """A connection on which all that is told is written down."""

    rooms = (CacheRoom(slots=SLOTS),)

    def __init__(self) -> None:
        self.all = [object()]
        self.proposed: deque[Proposed] = deque()
        self.told: queue.SimpleQueue[Expand | Release] = queue.SimpleQueue()

    def tell(self, message: Expand | Release) -> None:
        self.told.put(message)


class FakePipelines:
    """Pipelines that do what the test says, in the drafter's thread."""

    def __init__(
        self, plan: Any, wake: Wake, *rest: Any, on_change: Callable[[Any], None], **named: Any
    ) -> None:
        self.connections: FakeConnections | None = None
        self.due_s = float("inf")
        self.broken_by: list[BrokenError] = []
        self.script: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.refusal: ClusterError | None = None
        self._wake = wake
        self._on_change = on_change

    def connect(self) -> None:
        self.script.get()()
        self.connections = FakeConnections()

    def listen(self, timeout_ms: int) -> Iterator[None]:
        select.select([self._wake.read_fd], [], [], timeout_ms / 1000)
        self._wake.clear()
        while not self.script.empty():
            self.script.get()()
        yield from ()

    def broken(self, error: BrokenError) -> None:
        self.broken_by.append(error)
        self.lose()

    def lose(self) -> None:
        self.connections = None
        self._on_change(PipelineLost())

    def form(self) -> None:
        self.connections = FakeConnections()
        self._on_change(PipelineReformed(stage_count=1, rooms=(CacheRoom(slots=SLOTS),)))

    def watch(self, stand: Callable[[float], Any]) -> None:
        stand(0.0)

    def close(self) -> None:
        self.connections = None


class Rig:
    """A drafter whose device the test plays."""

    def __init__(self) -> None:
        folder = bundled_folder("draft")
        self.wake = Wake()
        self.drafter = RemoteDrafter(drafter_for(folder, LocalDaemon(name="pi", port=9, pid=0)), 3, self.wake)
        self.pipelines: Any = self.drafter._pipelines

    def do(self, act: Callable[[], None]) -> None:
        """Something happens on the device's side."""
        self.pipelines.script.put(act)
        self.drafter._wake.set()

    def result(self) -> Any:
        while not self.drafter.results:
            assert select.select([self.wake.read_fd], [], [], WAIT_S)[0], "nothing came of it"
            self.wake.clear()
        return self.drafter.results.popleft()

    def told(self) -> Expand | Release:
        message: Expand | Release = self.pipelines.connections.told.get(timeout=WAIT_S)
        return message

    def begin(self) -> None:
        self.do(lambda: None)
        self.welcome()

    def welcome(self) -> None:
        """The head takes note that the drafter is there."""
        back = self.result()
        assert back == DrafterRecovered(drafter=3, cache_slots=SLOTS)
        self.drafter.post(back)

    def answers(self, job: int, *proposals: Proposal, compute_s: float = 0.0) -> None:
        self.do(
            lambda: self.pipelines.connections.proposed.append(
                Proposed(job=job, proposals=proposals, compute_s=compute_s)
            )
        )


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(remote_drafter, "Pipelines", FakePipelines)
    made = Rig()
    yield made
    made.do(lambda: None)
    made.drafter.stop(WAIT_S)
    made.wake.close()


def draft(job: int) -> Draft:
    return Draft(job=job, segment=Segment(segment=job, parts=()), width=4, drafter=3)


def proposal(token: int = 7) -> Proposal:
    return Proposal(request=1, epoch=0, node=5, tokens=(token,), confidences=(0.5,))


def test_work_goes_out_in_order_and_what_is_proposed_comes_back(rig: Rig) -> None:
    rig.begin()
    rig.drafter.post(draft(0))
    rig.drafter.post(SendToDrafter(drafter=3, message=Release(request=2)))
    assert rig.told() == Expand(segment=Segment(segment=0, parts=()), width=4)
    assert rig.told() == Release(request=2)
    rig.answers(0, proposal(), compute_s=1e4)
    done = rig.result()
    assert isinstance(done, Drafted)
    assert (done.drafter, done.job, done.proposals) == (3, 0, (proposal(),))
    assert 0 <= done.ended_s - done.started_s < WAIT_S, "it cannot have computed longer than we waited"


def test_proposals_that_cannot_be_lose_it_and_it_may_come_back(rig: Rig) -> None:
    rig.begin()
    rig.drafter.post(draft(0))
    rig.told()
    rig.answers(0, proposal(VOCABULARY_SIZE))
    assert rig.result() == DrafterLost(drafter=3)
    (error,) = rig.pipelines.broken_by
    assert (error.device, "token ids below" in str(error)) == ("pi", True)
    rig.drafter.post(draft(1))  # the head has not looked at its results yet
    rig.do(rig.pipelines.form)
    rig.welcome()
    rig.drafter.post(draft(2))
    first = rig.told()
    assert isinstance(first, Expand)
    assert first.segment.segment == 2


def test_one_that_cannot_be_had_at_first_is_an_error_and_later_a_note(rig: Rig) -> None:
    def refuse() -> None:
        raise ClusterError("the model computed nan")

    rig.begin()
    rig.do(refuse)
    assert rig.result() == DrafterLost(drafter=3)
    assert rig.result() == Notice(
        text="drafter draft on pi is given up (the model computed nan); answers go on without it"
    )
    other = Rig()
    other.do(refuse)
    failed = other.result()
    assert isinstance(failed, WorkFailed)
    other.drafter.stop(WAIT_S)
    other.wake.close()
