"""The server itself: a socket, uvicorn, and how it begins and ends.

While its model is loaded, it serves the page with how far that is, and for all else 503 and when to come
again; then the server that answers takes its place at the same socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowspec.errors import FlowSpecError, InputError
from flowspec.llm import LLM
from flowspec.runtime.addresses import not_ours
from flowspec.runtime.connection_limit import connections_most
from flowspec.serve.app import build_app
from flowspec.serve.documents import STREAM_HEADERS, ApiError, frame, json_response
from flowspec.serve.guard import AccessRules, rules_of
from flowspec.serve.live import HEARTBEAT_S, page_routes
from flowspec.serve.metrics import Totals
from flowspec.serve.service import Service, ServiceOptions

CONNECTIONS_MAX = 512  # beyond, a connection is closed at once
BACKLOG = 128
HEADER_S = 10.0
"""How long a request's header may take to come, from a connection's beginning or the header's first byte."""
REST_S = 10.0
"""How long the rest of a body may take that is not read any more, since its request is answered already."""
STALL_S = 30.0  # how long a client may take nothing of what waits for it
KEEP_ALIVE_S = 60  # how long a connection may be idle between two requests
GRACE_S = 2.0  # how long answers go on when the server is told to stop
CLOSE_S = 3.0  # how long their connections may then take to close
FAILURE_S = 0.25  # how often it is looked whether the cluster has failed
RETRY_S = 5
RETRY_HEADER = {"Retry-After": str(RETRY_S)}
REASON = "the model is being loaded"
PROGRESS_S = 0.25  # how often the page is told how far loading is, if that has changed
log = logging.getLogger("flowspec.serve")


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its port (0 takes a free one) and does not listen yet; raises `InputError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise InputError(f"--host: expected an address of this machine, got {host!r}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(error, host, port) from None
    return bound


def listen(bound: socket.socket) -> None:
    """From now on calls wait for an answer; once more does no harm. Raises `InputError`."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise _refusal(error, *bound.getsockname()[:2]) from None


def _refusal(error: OSError, host: str, port: int) -> InputError:
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} on {host} is taken; stop what uses it or choose another with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return not_ours(host)
    return InputError(f"cannot listen on {host}:{port}: {error.strerror}")


def url_of(host: str, bound: socket.socket) -> str:
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}/v1"


class _Protocol(H11Protocol):
    """uvicorn's own, with limits to connections, and to how long a client may keep one waiting."""

    files_share = 2
    _waits_for: object = None
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # whatever waits to be sent is told to `pause_writing`
        if len(self.connections) > connections_most(CONNECTIONS_MAX, self.files_share):
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_less()

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._deadline)
        _cancel(self._stalled)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """A deadline for what the client owes: a header, or the rest of a body that nobody reads."""
        theirs: object = self.conn.their_state
        owes = theirs is h11.IDLE or (theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE)
        waits_for = theirs if owes else None
        if waits_for is not self._waits_for:
            _cancel(self._deadline)
            if waits_for is not None:
                seconds = HEADER_S if waits_for is h11.IDLE else REST_S
                self._deadline = self.loop.call_later(seconds, self.transport.close)
            self._waits_for = waits_for

    def _expect_less(self) -> None:
        """Hangs up on a client that takes nothing for too long, also once all has been said."""
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() >= left:
                self.transport.abort()
            else:
                self._expect_less()

        self._stalled = self.loop.call_later(STALL_S, look)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _LoadingProtocol(_Protocol):
    files_share = 4  # while a model is loaded, libraries open files for it and for themselves


def _tell_of_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio tells by a traceback that connections have taken the last file that the process may open."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.warning("cannot take another connection (%s); those that are open go on", error.strerror)
    else:
        loop.default_exception_handler(context)


class _Server(uvicorn.Server):
    """uvicorn's own; signals are the caller's."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_tell_of_error)
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_of(app: ASGIApp, *, is_loading: bool = False) -> uvicorn.Server:
    """A server of this app, with our limits; it takes its sockets when it is started."""
    settings: dict[str, Any] = {
        "http": _LoadingProtocol if is_loading else _Protocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "backlog": connections_most(BACKLOG, 4),  # asyncio takes so many at once before any is refused
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": GRACE_S + CLOSE_S,
    }
    return _Server(uvicorn.Config(app, **settings))


async def serve(
    llm: LLM,
    bound: socket.socket,
    *,
    options: ServiceOptions,
    access: AccessRules,
    totals: Totals,
    on_ready: Callable[[Service, Callable[[], None]], None],
    on_failure: Callable[[FlowSpecError], None] = lambda error: None,
    more: Callable[[Service], Sequence[Route]] = lambda service: (),
) -> None:
    """Answers requests until the function is called, in this loop, that `on_ready` is given; then no answer
    is under way any more. A second call waits for nobody. `on_failure` is told when nothing can be answered
    any more; requests are told so until the end."""
    service = Service(llm, options, totals)
    server = server_of(build_app(service, access, more(service)))

    def stop() -> None:
        if service.stopping.is_set():
            service.cancel_all()
            server.force_exit = True
            return
        service.stop()
        server.should_exit = True
        asyncio.get_running_loop().call_later(GRACE_S, service.cancel_all)

    async def tell_of_failure() -> None:
        while (failure := llm.session.head.failure) is None:
            await asyncio.sleep(FAILURE_S)
        on_failure(failure)

    listen(bound)  # who calls now is answered in a moment
    on_ready(service, stop)
    looking = asyncio.create_task(tell_of_failure())
    try:
        await server.serve(sockets=[bound])
    finally:
        looking.cancel()
        await service.close()


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

    def refusal(self) -> ApiError:
        steps = ", ".join(
            f"{device}: {step['doing']} {step['share']:.0%}" for device, step in self._steps.items() if device
        )
        message = f"{REASON}{f' ({steps})' if steps else ''}; try again in {RETRY_S} s"
        return ApiError(503, message, code="loading", headers=RETRY_HEADER)

    async def events(self) -> AsyncIterator[bytes]:
        """What is loaded, whenever that changes; ends when it is over, so that the page comes again."""
        said, said_s = b"", 0.0
        while not self.is_over:
            told = frame({"model": self._model, "steps": list(self._steps.values())}, "loading")
            if told != said or time.monotonic() - said_s >= HEARTBEAT_S:
                yield told
                said, said_s = told, time.monotonic()
            await asyncio.sleep(PROGRESS_S)


@contextlib.contextmanager
def loading_server(
    bound: socket.socket, loading: Loading, access: AccessRules, *, has_page: bool
) -> Iterator[None]:
    """Answers at the socket, in a thread of its own; the same may come in as later. At the end the socket
    still listens: who calls meanwhile is answered by whoever takes it next."""

    async def health(request: Request) -> Response:
        return json_response({"status": "loading", "reason": REASON}, 503, RETRY_HEADER)

    async def events(request: Request) -> Response:
        frames = () if request.method == "HEAD" else loading.events()
        return StreamingResponse(frames, headers=STREAM_HEADERS)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await loading.refusal().response(scope, receive, send)

    routes: list[BaseRoute] = [Route("/health", health)]
    if has_page:
        routes += [*page_routes(), Route("/live/events", events, methods=["GET"])]
    app = Starlette(routes=[*routes, Mount("/", refuse)], middleware=rules_of(access))
    server = server_of(app, is_loading=True)
    listen(bound)
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
