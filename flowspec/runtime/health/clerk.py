"""Answers AskFacts for a daemon in a thread of its own: files, tools and links take their time, and a head must not wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import replace

from flowspec.core import limits
from flowspec.core.cluster_messages import Error
from flowspec.core.facts import AskFacts, Facts
from flowspec.runtime.compute import Machine
from flowspec.runtime.health.gather import gather
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Link, Wake

RETRY_S = 1.0


class Clerk:
    """`ask` and `answer` belong to the poller's thread. Facts are gathered one after another."""

    def __init__(self, machine: Machine, wake: Wake, keys: Keyring | None = None) -> None:
        self._machine = machine
        self._keys = keys
        self._wake = wake
        self._questions: queue.Queue[tuple[Link, AskFacts, bool]] = queue.Queue(limits.QUESTIONS_MAX)
        self._answers: deque[tuple[Link, Facts | Error]] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, link: Link, question: AskFacts, *, is_held: bool) -> None:
        """Takes a question; the answer goes out by a later `answer`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="facts", daemon=True)
            self._thread.start()
        try:
            self._questions.put_nowait((link, question, is_held))
        except queue.Full:
            link.send(Error.saying("too many ask for facts; ask again in a moment", RETRY_S))

    def answer(self, *, is_held: bool) -> None:
        """Sends what is ready, stamped with this moment's clock."""
        while self._answers:
            link, found = self._answers.popleft()
            link.send(replace(found, clock_s=time.time(), is_held=is_held) if isinstance(found, Facts) else found)

    def _run(self) -> None:
        while True:
            link, question, is_held = self._questions.get()
            found: Facts | Error
            try:
                found = gather(question, self._machine, is_held=is_held, keys=self._keys)
            except (OSError, ValueError, RuntimeError) as error:  # a device that tells odd things about itself must not end its daemon
                found = Error.saying(f"cannot tell about this device: {error}")
            self._answers.append((link, found))
            self._wake.set()
