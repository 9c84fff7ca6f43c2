"""Answers questions about the device for a daemon, in a thread of its own.

Files, tools, links and trials of kernels take their time, and a head must not wait for them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics, Error, Loading
from flowspec.core.protocol.device_messages import AskFacts, Facts
from flowspec.runtime.transport import Sender, Wake

RETRY_S = 1.0
Question = TypeVar("Question", AskFacts, AskArithmetics)
Answer = Facts | Arithmetics
Tell = Callable[[float], None]
"""Told now and then how far an answer has come, from 0 to 1."""


class QuestionWorker(Generic[Question]):
    """`ask` and `answer` belong to the poller's thread. Questions are answered one after another.

    `find` answers one, in the worker's thread: it is told whether a head holds the daemon, and tells how far
    it has come with trying kernels.
    """

    def __init__(self, wake: Wake, name: str, find: Callable[[Question, bool, Tell], Answer]) -> None:
        self._name = name
        self._find: Callable[[Question, bool, Tell], Answer] = find
        self._wake = wake
        self._questions: queue.Queue[tuple[Sender, Question, bool]] = queue.Queue(limits.QUESTIONS_MAX)
        self._answers: deque[tuple[Sender, Answer | Loading | Error]] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, link: Sender, question: Question, *, is_held: bool) -> None:
        """Takes a question; the answer goes out by a later `answer`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._questions.put_nowait((link, question, is_held))
        except queue.Full:
            link.send(Error.saying(f"too many ask for {self._name}; ask again in a moment", RETRY_S))

    def answer(self, *, is_held: bool) -> None:
        """Sends what is ready, facts stamped with this moment's clock."""
        while self._answers:
            link, found = self._answers.popleft()
            if isinstance(found, Facts):
                found = structs.replace(found, clock_s=time.time(), is_held=is_held)
            link.send(found)

    def _run(self) -> None:
        while True:
            link, question, is_held = self._questions.get()
            found: Answer | Error
            try:
                found = self._find(question, is_held, partial(self._tell, link))
            # a device that tells odd things about itself must not end its daemon
            except (OSError, ValueError, RuntimeError) as error:
                found = Error.saying(f"cannot tell about this device: {error}")
            self._say(link, found)

    def _tell(self, link: Sender, share: float) -> None:
        self._say(link, Loading(doing="trying kernels", share=share))

    def _say(self, link: Sender, found: Answer | Loading | Error) -> None:
        self._answers.append((link, found))
        self._wake.set()
