"""A head's drafters: work is posted to each, one job after another, and results come back on `results` with a
wake-up, while the head keeps listening. One runs in a thread here, another on a device of its own."""

from __future__ import annotations

import os
import queue
import sys
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
    CopyFeatures,
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    PipelineLost,
    PipelineReformed,
    SendToDrafter,
    TakeFeatures,
)
from flowspec.core.head.remote_drafter import (
    BreakPipeline,
    GivenUp,
    RemoteDrafterCommand,
    RemoteDrafterCore,
    RemoteDrafterEvent,
)
from flowspec.core.protocol.messages import Expand, Release
from flowspec.draft.base import CopiesFeatures, Drafter
from flowspec.draft.registry import FALLBACK
from flowspec.errors import BrokenError, ClusterError, FlowSpecError
from flowspec.model.accelerator import is_out_of_memory
from flowspec.plan.placement import ClusterPlan
from flowspec.plan.timing import Curve
from flowspec.runtime import timeouts
from flowspec.runtime.cluster_file import HEAD
from flowspec.runtime.compute import SWITCH_INTERVAL_S, Crashed, WorkFailed, to_array
from flowspec.runtime.emulation import DraftPacer
from flowspec.runtime.heap import give_back
from flowspec.runtime.pipeline_connections import StageStatus
from flowspec.runtime.pipelines import Pipelines, Recovery
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Wake, poll_timeout_ms
from flowspec.wire.codec import join_rows

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


class LocalDrafter:
    """Owns a drafter that is loaded already, the head's `number`. With a `pace` its passes last so long by
    their rows, as declared in the emulated world.

    After a failure nothing more is done: what a drafter that broke off in the middle would say could not be
    trusted."""

    def __init__(self, drafter: Drafter, number: int, wake: Wake, pace: Curve | None = None) -> None:
        self.drafter = drafter
        self.number = number
        self._pacer = None if pace is None else DraftPacer(pace)
        self.results: deque[Drafted | WorkFailed | Crashed] = deque()
        self._wake = wake
        self._work: queue.SimpleQueue[Draft | SendToDrafter | None] = queue.SimpleQueue()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        return {
            "device": HEAD,
            "address": "",
            "pid": os.getpid(),
            "weight_bytes": self.drafter.weight_bytes,
            "received_bytes": 0,
            "is_there": True,
        }

    def post(self, work: Draft | SendToDrafter) -> None:
        self._work.put(work)

    def stop(self, timeout_s: float = timeouts.COMPUTE_STOP_S) -> None:
        """Ends the thread after what it is doing now, and waits for that no longer than `timeout_s`."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._do(work)
            except FlowSpecError as error:
                self._tell(WorkFailed(error=error))
                return
            except BaseException as error:  # noqa: BLE001 - the top of a thread: the head's thread raises it
                if is_out_of_memory(error):
                    text = (
                        "the drafter is out of memory; use a smaller one, a smaller --context, or --drafter "
                        f"{FALLBACK}"
                    )
                    self._tell(WorkFailed(error=ClusterError(text)))
                else:
                    self._tell(Crashed(error=error))
                return

    def _do(self, work: Draft | SendToDrafter) -> None:
        if isinstance(work, Draft):
            started_s = time.monotonic()
            proposals = self.drafter.draft(work.segment, work.width)
            ended_s = (
                time.monotonic()
                if self._pacer is None
                else self._pacer.end(work.segment.row_count, work.context, started_s)
            )
            self._tell(
                Drafted(
                    drafter=self.number,
                    job=work.job,
                    proposals=proposals,
                    started_s=started_s,
                    ended_s=ended_s,
                )
            )
        elif isinstance(work.message, TakeFeatures):
            own = work.message
            features = to_array(
                join_rows(own.rows), tuple(range(len(own.nodes)))
            )  # [nodes, hidden * captures]
            self.drafter.take_features(own.request, own.epoch, own.nodes, features)
        elif isinstance(work.message, CopyFeatures):
            assert isinstance(self.drafter, CopiesFeatures), "its traits say that it copies none"
            self.drafter.copy_features(work.message)
        else:
            self.drafter.release(work.message)
            give_back()

    def _tell(self, result: Drafted | WorkFailed | Crashed) -> None:
        self.results.append(result)
        self._wake.set()


class RemoteDrafter:
    """A drafter on a device, the head's `number`, which is lost (`DrafterLost`) until the first
    `DrafterRecovered`.

    Carries out what `core/head/remote_drafter.py` decides. A thread keeps the connection, as a pipeline of
    one device that answers do not need (`Pipelines`): the same dialling, leases, time-outs and probes as for
    stages. Whoever takes a `DrafterRecovered` from the results posts it again before any work for it, as the
    core wants it. One that cannot be had at first is `WorkFailed`, or `DrafterAbsent` where it
    `may_be_absent`; later it is lost, for good if it would fail again in the same way.
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
