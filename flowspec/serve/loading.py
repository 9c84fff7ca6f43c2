"""What the server says while its model is loaded: the page with how far it is, and for all else 503 and when
to come again. It listens from the start, and the server that answers takes its place at the same socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec.serve.documents import STREAM_HEADERS, frame, json_response
from flowspec.serve.guard import AccessRules, refused, rules_of
from flowspec.serve.live import HEARTBEAT_S
from flowspec.serve.page import page_routes
from flowspec.serve.refusals import ApiError
from flowspec.serve.server import listen, server_of

RETRY_S = 5
EVERY_S = 0.25
"""How often the page is told how far it is, if that has changed."""
REASON = "the model is being loaded"
RETRY_HEADER = {"Retry-After": str(RETRY_S)}


class Loading:
    """How far the devices have come, by what is told of them: a device's name, a colon, what it does, and a
    share of that. One thread tells, another one asks."""

    def __init__(self, model: str) -> None:
        self.is_over = False
        self._model = model
        self._steps: dict[str, dict[str, Any]] = {}

    def take(self, text: str, share: float) -> None:
        device, _, doing = text.rpartition(":")
        step = {"device": device, "doing": doing.strip(), "share": round(share, 3)}
        self._steps = {**self._steps, device: step}  # another one: whoever reads has all of one

    def report(self) -> dict[str, Any]:
        """The model's name, and a step for each device that was heard of."""
        return {"model": self._model, "steps": list(self._steps.values())}

    def refusal(self) -> ApiError:
        """What everybody is told who asks for something."""
        steps = ", ".join(
            f"{step['device']}: {step['doing']} {step['share']:.0%}"
            for step in self.report()["steps"]
            if step["device"]
        )
        message = f"{REASON}{f' ({steps})' if steps else ''}; try again in {RETRY_S} s"
        return ApiError(503, message, code="loading", headers=RETRY_HEADER)


def loading_app(loading: Loading, access: AccessRules, *, has_page: bool) -> ASGIApp:
    """The whole server while the model is loaded; the same may come in as later."""

    async def health(request: Request) -> Response:
        return json_response({"status": "loading", "reason": REASON}, 503, RETRY_HEADER)

    async def events(request: Request) -> Response:
        frames = () if request.method == "HEAD" else _events(loading)
        return StreamingResponse(frames, headers=STREAM_HEADERS)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await refused(loading.refusal())(scope, receive, send)

    routes: list[BaseRoute] = [Route("/health", health)]
    if has_page:
        routes += [*page_routes(), Route("/live/events", events, methods=["GET"])]
    return Starlette(routes=[*routes, Mount("/", refuse)], middleware=rules_of(access))


async def _events(loading: Loading) -> AsyncIterator[bytes]:
    """What is loaded, whenever that changes; ends when it is over, so that the page comes again."""
    said, said_s = b"", 0.0
    while not loading.is_over:
        told = frame(loading.report(), "loading")
        if told != said or time.monotonic() - said_s >= HEARTBEAT_S:
            yield told
            said, said_s = told, time.monotonic()
        await asyncio.sleep(EVERY_S)


@contextlib.contextmanager
def loading_server(
    bound: socket.socket, loading: Loading, access: AccessRules, *, has_page: bool
) -> Iterator[None]:
    """Answers at the socket, in a thread of its own. At the end the socket still listens: who calls meanwhile
    is answered by whoever takes it next."""
    listen(bound)
    server = server_of(loading_app(loading, access, has_page=has_page), is_loading=True)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[bound.dup()])), name="loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        loading.is_over = True
        server.should_exit = True
        thread.join()
