"""A drafter on a device of its own, as the head sees it: work goes there, proposals come back, and its loss
is an event like others.

Carries out what `core/head/remote_drafter.py` decides. A thread keeps the connection, as a pipeline of one
device that answers do not need (`Pipelines`): the same dialling, leases, time-outs and probes as for stages.
Nothing that happens there holds the head up. Results come back on `results` with a wake-up, as a
`DraftThread`'s.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from flowspec.checking import BrokenCoreError, check, is_on
from flowspec.core.cluster.forming import Start
from flowspec.core.driving import Driver
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    PipelineLost,
    PipelineReformed,
    SendToDrafter,
)
from flowspec.core.head.remote_drafter import (
    BreakPipeline,
    GivenUp,
    RemoteDrafterCommand,
    RemoteDrafterCore,
    RemoteDrafterEvent,
)
from flowspec.core.protocol.messages import Expand, Release
from flowspec.errors import BrokenError, FlowSpecError
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.compute import Crashed, WorkFailed
from flowspec.runtime.pipeline_connections import StageStatus
from flowspec.runtime.pipelines import Pipelines, Recovery
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Wake, poll_timeout_ms

POLL_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDrafter:
    """A drafter that shall run on a device: `name` is the user's for it, and `plan` has that device as its
    only stage."""

    name: str
    plan: ClusterPlan

    def traits(self, level: int) -> DrafterTraits:
        """What the head must know of it before it is there."""
        return DrafterTraits(context=self.plan.context, level=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A line for the user; with a `share` it tells how far the loading has come."""

    text: str
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterAbsent:
    """The device of this drafter does not answer at the start; `DrafterRecovered` follows if it is there
    later."""

    drafter: int


Result = Drafted | DrafterLost | DrafterRecovered | DrafterAbsent | Notice | WorkFailed | Crashed


class RemoteDrafter:
    """The head's drafter number `number`, which is lost (`DrafterLost`) until the first `DrafterRecovered`.

    Whoever takes a `DrafterRecovered` from the results posts it again before any work for it, as the core
    wants it. One that cannot be had at first is `WorkFailed`, or `DrafterAbsent` where it `may_be_absent`;
    later it is lost, for good if it would fail again in the same way.
    """

    def __init__(
        self,
        placed: PlacedDrafter,
        number: int,
        wake: Wake,
        keys: Keyring | None = None,
        *,
        may_be_absent: bool = False,
    ) -> None:
        self.placed = placed
        self.number = number
        self.stage: StageStatus | None = None
        self.results: deque[Result] = deque()
        self._head_wake = wake
        self._wake = Wake()
        self._work: deque[Draft | SendToDrafter | DrafterRecovered] = deque()
        self._core = RemoteDrafterCore(number, placed.plan.vocabulary)
        self._driver: Driver[RemoteDrafterEvent, RemoteDrafterCommand] = Driver(self._handle, self._do)
        self._is_checked = is_on()
        self._stopping = self._is_absent = False
        self._pipelines = Pipelines(
            placed.plan,
            self._wake,
            lambda text, share: self._tell(Notice(text=text, share=share)),
            None,
            Recovery(
                replan=lambda devices, slowness: placed.plan,
                on_note=lambda text: self._tell(Notice(text=text)),
                start=Start.SHORT if may_be_absent else Start.WHOLE,
            ),
            keys,
            on_change=self._changed,
            meanwhile=self._wait,
            drafter=placed.name,
        )
        self._thread = threading.Thread(target=self._run, name=f"drafter {placed.name}", daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        welcome, ready = (None, None) if self.stage is None else (self.stage.welcome, self.stage.ready)
        return {
            "device": self._device,
            "address": self.placed.plan.stages[0].address,
            "pid": welcome.pid if welcome else None,
            "weight_bytes": ready.weight_bytes if ready else 0,
            "received_bytes": ready.received_bytes if ready else 0,
            "is_there": self._core.is_there,
        }

    def post(self, work: Draft | SendToDrafter | DrafterRecovered) -> None:
        self._work.append(work)
        self._wake.set()

    def stop(self, timeout_s: float = timeouts.COMPUTE_STOP_S) -> None:
        """Lets go of the device, and waits for that no longer than `timeout_s`."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._wake.close()

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._pipelines.connect()
            assert self._pipelines.connections is not None
            self._changed(PipelineReformed(stage_count=1, rooms=self._pipelines.connections.rooms))
            while not self._stopping:
                for _ in self._pipelines.listen(
                    poll_timeout_ms(self._pipelines.due_s, time.monotonic(), POLL_MS)
                ):
                    pass  # its answers are gathered in `Stages.proposed`
                while (stages := self._pipelines.connections) is not None and stages.proposed:
                    self._driver.give(stages.proposed.popleft())
                while self._work:
                    self._driver.give(self._work.popleft())
                self._pipelines.watch(self._core.tick)
        except BrokenCoreError as error:
            self._tell(Crashed(error=error))
        except FlowSpecError as error:
            self._give_up(error)
        except BaseException as error:  # noqa: BLE001 - the top of a thread: the head's thread raises it
            self._tell(Crashed(error=error))
        finally:
            self._pipelines.close()

    def _wait(self) -> bool:
        """While it is not there at first: says once that it is absent; returns whether to go on."""
        if self._pipelines.is_waiting and not self._is_absent:
            self._is_absent = True
            self._tell(DrafterAbsent(drafter=self.number))
        return not self._stopping

    @property
    def _device(self) -> str:
        return self.placed.plan.stages[0].name

    def _handle(self, event: RemoteDrafterEvent) -> list[RemoteDrafterCommand]:
        commands = self._core.handle(event, time.monotonic())
        if self._is_checked:
            check(self._core, event)
        return commands

    def _do(self, command: RemoteDrafterCommand) -> None:
        if isinstance(command, BreakPipeline):
            self._pipelines.broken(BrokenError(command.text, self._device))
        elif isinstance(command, Expand | Release):
            assert self._pipelines.connections is not None, "one that is there has its connection"
            self._pipelines.connections.tell(command)
        else:
            self._tell(command)

    def _changed(self, event: PipelineLost | PipelineReformed) -> None:
        if isinstance(event, PipelineReformed):
            assert self._pipelines.connections is not None
            self.stage = self._pipelines.connections.all[0]
        self._driver.give(event)

    def _give_up(self, error: FlowSpecError) -> None:
        """Nothing more is to be had of it in this session."""
        if self.stage is None:
            self._tell(WorkFailed(error=error))
            return
        self._driver.give(GivenUp())
        self._tell(
            Notice(
                text=(
                    f"drafter {self.placed.name} on {self._device} is given up ({error}); answers go on "
                    "without it"
                )
            )
        )

    def _tell(self, result: Result) -> None:
        self.results.append(result)
        self._head_wake.set()
