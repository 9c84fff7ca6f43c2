"""Answers a file of prompts, several at a time; their nodes share the pipeline's segments.

Answers are printed in the order of the file, each when it and those before it are there. A prompt of several
turns is a dialogue, whose turns are answered one after another. Ctrl-C stops all answers and prints what is
finished.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rich.progress import Progress

from flowspec.cli.answer import Asked, Outcome, Question, record
from flowspec.cli.console import PlainConsole
from flowspec.cli.expertise import expertise_table
from flowspec.cli.terminal import note, show
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.errors import FlowSpecError, InputError
from flowspec.interruption import INTERRUPTED
from flowspec.model.prompts import Prompt
from flowspec.model.text import Messages
from flowspec.runtime.session import Session
from flowspec.runtime.token_stream import TokenStream

PARALLEL_MAX = REQUESTS_MAX


class Batch:
    """The prompts under way."""

    def __init__(self, session: Session, question: Question, *, system: str | None, is_raw: bool) -> None:
        self.session = session
        self.question = question
        self.system = system
        self.is_raw = is_raw
        self._running: dict[int, TokenStream] = {}
        self._is_stopped = False
        self._lock = threading.Lock()

    def answer(self, prompt: Prompt) -> list[tuple[Question, Outcome]]:
        """All turns of one prompt; fewer if the batch is stopped meanwhile."""
        assert self.question.tokenizer is not None
        request = self.session.head.new_request()
        messages: Messages = []
        found: list[tuple[Question, Outcome]] = []
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            ids = self.question.tokenizer.encode_dialogue(messages, system=self.system, is_raw=self.is_raw)
            question = replace(self.question, prompt=ids, request=request)
            try:
                outcome = self._ask(question)
            except InputError as error:
                raise InputError(f"prompt {prompt.prompt_id}: {error}") from None
            if outcome is None:
                break
            found.append((question, outcome))
            messages.append({"role": "assistant", "content": outcome.text or ""})
        self.session.head.forget(request)
        return found

    def _ask(self, question: Question) -> Outcome | None:
        with self._lock:
            if self._is_stopped:
                return None
            asked = Asked(self.session, question)
            self._running[question.request] = asked.answer
        try:
            return asked.follow(lambda text: None)
        finally:
            with self._lock:
                del self._running[question.request]

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            for answer in self._running.values():
                self.session.head.cancel(answer)


def run(
    session: Session,
    question: Question,
    prompts: Sequence[Prompt],
    *,
    parallel: int,
    system: str | None,
    is_raw: bool,
    is_json: bool,
) -> int:
    """Answers and prints all prompts; the exit status."""
    batch = Batch(session, question, system=system, is_raw=is_raw)
    console = PlainConsole(stderr=True)
    with (
        ThreadPoolExecutor(parallel) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("answers", total=len(prompts))
        waiting = deque((prompt, pool.submit(batch.answer, prompt)) for prompt in prompts)
        try:
            while waiting:
                prompt, future = waiting[0]
                found = future.result()
                waiting.popleft()
                _print(session, prompt, found, is_json=is_json)
                bar.advance(task)
        except KeyboardInterrupt:
            batch.stop()
            for prompt, future in waiting:
                if not future.cancel():
                    _print(session, prompt, future.result(), is_json=is_json)
            return INTERRUPTED
        except FlowSpecError:
            batch.stop()
            raise
    if not is_json and (known := expertise_table(session, question.tokenizer)) is not None:
        console.print(known)
    return 0


def _print(session: Session, prompt: Prompt, found: list[tuple[Question, Outcome]], *, is_json: bool) -> None:
    for turn, (question, outcome) in enumerate(found):
        if is_json:
            print(
                json.dumps({"prompt": prompt.prompt_id, "turn": turn, **record(session, question, outcome)}),
                flush=True,
            )
        else:
            show(f"[{prompt.prompt_id}] {outcome.text}\n\n")
            note(f"  {outcome.figures}")
