"""Real servers over real daemons: in this process, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from starlette.routing import Route

from flowspec.errors import FlowSpecError
from flowspec.llm import LLM
from flowspec.serve.guard import AccessRules
from flowspec.serve.metrics import Totals
from flowspec.serve.server import bind, serve, url_of
from flowspec.serve.service import Service, ServiceOptions
from tests.runtime.clusters import wait_until

MODEL = "bundled"
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
STORY = [{"role": "user", "content": "Tell me a story."}]
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "messages": STORY,
    "max_tokens": 900,
    "extra_body": {"ignore_eos": True},
}
"""Answers that go on for as long as any test."""


@dataclass(slots=True)
class Running:
    """A server that is there."""

    url: str
    service: Service
    stop: Callable[[], object]

    def client(self, key: str = "none") -> openai.OpenAI:
        """The official client; what it is refused it does not ask again by itself."""
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def ask(self, **fields: Any) -> Any:
        """A chat's answer."""
        with self.client() as client:
            return client.chat.completions.create(**{"model": MODEL, "messages": SUM, **fields})

    def streamed(self, **fields: Any) -> list[Any]:
        """A chat's chunks."""
        asked = {"model": MODEL, "messages": SUM, "stream": True, **fields}
        with self.client() as client:
            return list(client.chat.completions.create(**asked))

    def connect(self) -> socket.socket:
        """A connection without a client library."""
        return socket.create_connection(
            ("127.0.0.1", int(self.url.rpartition(":")[2].partition("/")[0])), timeout=60
        )

    def count(self, name: str) -> float:
        """A metric that has this name and these labels."""
        for line in self.service.metrics.text().decode().splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"there is no metric {name}")

    def wait_idle(self) -> None:
        """Until nothing is being answered, and nothing of any answer is in the pipeline."""
        core = self.service.session.head._core
        wait_until(
            lambda: not self.service.gate.running and not self.service.gate.waiting, "no answer is under way"
        )
        wait_until(lambda: not core.in_flight, "the pipeline is empty")


@contextlib.contextmanager
def running(
    llm: LLM,
    *,
    options: ServiceOptions | None = None,
    access: AccessRules | None = None,
    totals: Totals | None = None,
    more: Callable[[Service], Sequence[Route]] = lambda service: (),
) -> Iterator[Running]:
    bound = bind("127.0.0.1", 0)
    there = threading.Event()
    found: list[Running] = []
    failed: list[BaseException] = []

    def ready(service: Service, stop: Callable[[], None]) -> None:
        loop, url = asyncio.get_running_loop(), url_of("127.0.0.1", bound)
        found.append(Running(url, service, lambda: loop.is_closed() or loop.call_soon_threadsafe(stop)))
        there.set()

    def work() -> None:
        try:
            asyncio.run(
                serve(
                    llm,
                    bound,
                    options=options or ServiceOptions(),
                    access=access or AccessRules(),
                    totals=totals or Totals(),
                    on_ready=ready,
                    more=more,
                )
            )
        except (FlowSpecError, OSError, RuntimeError) as error:
            failed.append(error)
            there.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert there.wait(30)
    try:
        if found:
            yield found[0]
    finally:
        if found:
            found[0].stop()
        thread.join(60)
        bound.close()
    assert not failed, failed
    assert not thread.is_alive()
