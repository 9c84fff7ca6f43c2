"""The drafter's thread in the head's process: runs drafting jobs one after another, while the head keeps
listening.

Work goes in by `post` and is done in that order; results come back on `results` with a wake-up. After a
failure nothing more is done: what a drafter that broke off in the middle would say could not be trusted.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from typing import Any

from flowspec.core.head.events import CopyFeatures, Draft, Drafted, SendToDrafter, TakeFeatures
from flowspec.draft.kinds import FALLBACK
from flowspec.draft.protocol import CopiesFeatures, Drafter
from flowspec.errors import ClusterError, FlowSpecError
from flowspec.model.device_errors import is_out_of_memory
from flowspec.plan.timing import Curve
from flowspec.runtime import timeouts
from flowspec.runtime.cluster_file import HEAD
from flowspec.runtime.compute import SWITCH_INTERVAL_S, Crashed, WorkFailed, to_array
from flowspec.runtime.emulation import DraftPacer
from flowspec.runtime.heap import give_back
from flowspec.runtime.transport import Wake
from flowspec.wire.codec import join_rows


class DraftThread:
    """Owns a drafter that is loaded already, the head's `number`. With a `pace` its passes last so long by
    their rows, as declared in the emulated world."""

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
            rows = join_rows(own.rows)  # [nodes, hidden * captures]
            features = to_array(rows, tuple(range(len(own.nodes))))
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
