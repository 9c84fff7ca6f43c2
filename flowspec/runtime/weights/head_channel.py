"""The compute thread's line to the head while it loads: questions and progress leave by the poller thread,
answers come in by it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.device_messages import WeightAnswer, WeightQuestion
from flowspec.errors import ClusterError

PROGRESS_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far loading has come; the fields are those of `Loading`."""

    doing: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadQuestion:
    """A question for the head."""

    question: WeightQuestion


class QueuedHeadChannel:
    """A `HeadChannel` for one assignment after another. The compute thread begins, asks and takes answers;
    the poller delivers and hangs up."""

    def __init__(self, tell: Callable[[HeadQuestion | LoadProgress], None]) -> None:
        self._tell = tell
        self._assignment_id = 0
        self._ended = 0
        self._answers: queue.SimpleQueue[tuple[int, WeightAnswer | Error | None, bytes | memoryview]] = (
            queue.SimpleQueue()
        )
        self._doing = ""
        self._told_s = 0.0

    def deliver(self, assignment_id: int, answer: WeightAnswer | Error, data: bytes | memoryview) -> None:
        """An answer for assignment `assignment_id`."""
        self._answers.put((assignment_id, answer, data))

    def hang_up(self, assignment_id: int) -> None:
        """Assignment `assignment_id` has ended: no answer will come, and nobody needs one."""
        self._ended = assignment_id
        self._answers.put((assignment_id, None, b""))

    def begin(self, assignment_id: int) -> None:
        """From now on for assignment `assignment_id`."""
        self._assignment_id = assignment_id
        self._doing = ""

    def end(self) -> None:
        """Forgets answers that nobody takes any more."""
        while not self._answers.empty():
            self._answers.get()

    def ask(self, question: WeightQuestion) -> None:
        self._tell(HeadQuestion(question=question))

    def answer(self) -> tuple[WeightAnswer | Error, bytes | memoryview]:
        while True:
            self._check_held()  # whoever hangs up says so before waking us
            assignment_id, answer, data = self._answers.get()
            if assignment_id == self._assignment_id and answer is not None:
                return answer, data

    def tell(self, doing: str, share: float) -> None:
        """Progress, now and then: at once when something else is being done."""
        self._check_held()
        now_s = time.monotonic()
        if doing != self._doing or now_s - self._told_s > PROGRESS_EVERY_S:
            self._doing, self._told_s = doing, now_s
            self._tell(LoadProgress(doing=doing, share=share))

    def _check_held(self) -> None:
        if self._ended >= self._assignment_id:
            raise ClusterError("the head let go before all weights were there")
