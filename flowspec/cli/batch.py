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

from flowspec.bench.cases import Prompt
from flowspec.cli.answer import figures, record
from flowspec.cli.console import PlainConsole
from flowspec.cli.statistics import expertise_table
from flowspec.cli.terminal import note, show
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.errors import FlowSpecError, InputError
from flowspec.interruption import INTERRUPTED
from flowspec.llm import LLM
from flowspec.model.text import Messages
from flowspec.runtime.answer import Answer, AnswerStream
from flowspec.runtime.question import Question

PARALLEL_MAX = REQUESTS_MAX


class Batch:
    """The prompts under way."""

    def __init__(self, llm: LLM, question: Question, *, system: str | None, is_raw: bool) -> None:
        self.llm = llm
        self.question = question
        self.system = system
        self.is_raw = is_raw
        self._running: dict[int, AnswerStream] = {}
        self._is_stopped = False
        self._lock = threading.Lock()

    def answer(self, prompt: Prompt) -> list[tuple[Question, Answer]]:
        """All turns of one prompt; fewer if the batch is stopped meanwhile."""
        session, tokenizer = self.llm.session, self.llm.tokenizer
        assert tokenizer is not None
        request = session.head.new_request()
        messages: Messages = []
        found: list[tuple[Question, Answer]] = []
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            ids = tokenizer.encode_dialogue(messages, system=self.system, is_raw=self.is_raw)
            question = replace(self.question, prompt=ids)
            try:
                with self._lock:
                    if self._is_stopped:
                        break
                    stream = AnswerStream(session, question, tokenizer, request=request)
                    self._running[request] = stream
                answer = stream.answer()
            except InputError as error:
                raise InputError(f"prompt {prompt.prompt_id}: {error}") from None
            finally:
                with self._lock:
                    self._running.pop(request, None)
            found.append((question, answer))
            messages.append({"role": "assistant", "content": answer.text})
        session.head.forget(request)
        return found

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            for stream in self._running.values():
                stream.cancel()


def run(
    llm: LLM,
    question: Question,
    prompts: Sequence[Prompt],
    *,
    parallel: int,
    system: str | None,
    is_raw: bool,
    is_json: bool,
) -> int:
    """Answers and prints all prompts; the exit status."""
    batch = Batch(llm, question, system=system, is_raw=is_raw)
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
                _print(llm, prompt, found, is_json=is_json)
                bar.advance(task)
        except KeyboardInterrupt:
            batch.stop()
            for prompt, future in waiting:
                if not future.cancel():
                    _print(llm, prompt, future.result(), is_json=is_json)
            return INTERRUPTED
        except FlowSpecError:
            batch.stop()
            raise
    if not is_json and (known := expertise_table(llm.session, llm.tokenizer)) is not None:
        console.print(known)
    return 0


def _print(llm: LLM, prompt: Prompt, found: list[tuple[Question, Answer]], *, is_json: bool) -> None:
    for turn, (question, answer) in enumerate(found):
        if is_json:
            print(
                json.dumps({"prompt": prompt.prompt_id, "turn": turn, **record(llm, question, answer)}),
                flush=True,
            )
        else:
            show(f"[{prompt.prompt_id}] {answer.text}\n\n")
            note(f"  {figures(answer, llm.session)}")
