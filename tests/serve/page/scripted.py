"""A server with the page, whose API says what a test wants said: the frames of a recording, and the same
answer as a chat's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowspec.serve.live import page_routes
from tests.serve.page.recordings import recording

BATCH_S = 0.1
PACE = 0.3
"""Of the time that a recording says an answer takes it."""


def event(name: str | None, data: object) -> str:
    return (
        f"event: {name}\n" if name else ""
    ) + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def chunk(delta: dict[str, str], reason: str | None = None) -> str:
    return event(None, {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


@dataclass
class Script:
    """What the server says. `refusals` are given before anything else, one to a chat: status, message,
    headers."""

    found: dict[str, Any] = field(default_factory=recording)
    key: str | None = None
    refusals: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    hold: bool = False
    """After its first tokens an answer waits until the client goes away."""
    thoughts: str = ""
    """What comes before the answer."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    gone: int = 0
    watchers: set[asyncio.Queue[list[dict[str, Any]]]] = field(default_factory=set)

    def refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return problem(401, "Incorrect API key provided.")

    async def models(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse(
            {"object": "list", "data": [{"id": self.found["model"], "object": "model"}]}
        )

    async def saved(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse(self.found)

    async def live(self, request: Request) -> Response:
        return self.refused(request) or StreamingResponse(self._frames(), media_type="text/event-stream")

    async def _frames(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.watchers.add(queue)
        try:
            yield event(
                "hello",
                {name: value for name, value in self.found.items() if name != "frames"} | {"live": True},
            )
            yield event("frames", [frame for frame in self.found["frames"] if frame["t"] == 0.0])
            while True:
                yield event("frames", await queue.get())
        finally:
            self.watchers.discard(queue)

    async def chat(self, request: Request) -> Response:
        if (refused := self.refused(request)) is not None:
            return refused
        self.asked.append(await request.json())
        if self.refusals:
            return problem(*self.refusals.pop(0))
        return StreamingResponse(self._answer(), media_type="text/event-stream")

    async def _answer(self) -> AsyncIterator[str]:
        frames = [frame for frame in self.found["frames"] if frame["t"] > 0.0]
        try:
            yield chunk({"role": "assistant", "content": ""})
            if self.thoughts:
                yield chunk({"reasoning_content": self.thoughts})
            count = 0
            while frames:
                until_s = frames[0]["t"] + BATCH_S
                batch = [frame for frame in frames if frame["t"] <= until_s]
                frames = frames[len(batch) :]
                for queue in self.watchers:
                    queue.put_nowait(batch)
                for frame in (frame for frame in batch if frame["kind"] == "tokens"):
                    text = "".join(token for _, token in frame["nodes"])
                    count += len(frame["nodes"])
                    yield chunk({"content": text})
                if self.hold and count:
                    await asyncio.sleep(60)
                await asyncio.sleep(PACE * BATCH_S)
            yield chunk({}, "stop")
            usage = {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}
            yield event(None, {"choices": [], "usage": usage})
            yield event(None, "[DONE]")
        except (asyncio.CancelledError, GeneratorExit):
            self.gone += 1
            raise

    def app(self) -> Starlette:
        api = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/live/events", self.live),
            Route("/live/recording", self.saved),
        ]
        return Starlette(routes=[*page_routes(), *api])


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers=headers)


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The app on a free port of this machine, until it is left; yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    )
    started = Thread(target=server.run)
    started.start()
    try:
        while not server.started:
            assert started.is_alive(), "the server did not start"
            started.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        started.join()
