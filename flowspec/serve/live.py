"""The live view over HTTP: a stream of what happens (server-sent events), and the last answer's recording.

Routes for whoever serves them; who may use them is decided there. Text of frames is made in the watch's
thread, a recording in one of the pool: the event loop only passes it on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flowspec.runtime.watching import EVERY_S, TooManyError, Watch, Watcher
from flowspec.watch.recording import as_text

HEARTBEAT_S = 5.0
"""A stream in which nothing happens says this often that it is there."""
RETRY_S = 10
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def live_routes(watch: Watch, is_stopping: Callable[[], bool] = lambda: False) -> list[Route]:
    """`/live/events` and `/live/recording` of a watch that keeps recordings; streams end once the server
    `is_stopping`, or the watch is closed."""

    downloads = asyncio.Lock()  # a recording is large: one at a time is made

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return StreamingResponse((), media_type="text/event-stream", headers=HEADERS)
        try:
            watcher = await run_in_threadpool(watch.join)
        except TooManyError as error:
            return _refusal(503, str(error), "too_many_watchers", {"Retry-After": str(RETRY_S)})
        return StreamingResponse(
            _stream(watch, watcher, is_stopping), media_type="text/event-stream", headers=HEADERS
        )

    async def recording(request: Request) -> Response:
        async with downloads:
            body = await run_in_threadpool(_recording, watch)
        if body is None:
            return _refusal(
                404,
                "there is no recording: an answer is recorded while somebody watches /live/events",
                "no_recording",
            )
        headers = {**HEADERS, "Content-Disposition": 'attachment; filename="flowspec-recording.json"'}
        return Response(body, media_type="application/json", headers=headers)

    return [
        Route("/live/events", events, methods=["GET"]),
        Route("/live/recording", recording, methods=["GET"]),
    ]


def _recording(watch: Watch) -> bytes | None:
    text = watch.recording_text()
    return None if text is None else text.encode()


def _refusal(status: int, text: str, code: str, headers: dict[str, str] | None = None) -> Response:
    """An error in the API's own form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": text, "type": kind, "param": None, "code": code}}, status, headers
    )


async def _stream(watch: Watch, watcher: Watcher, is_stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Hello, then frames as they come; when the client goes, its place is free again."""
    try:
        yield _event("hello", as_text(watch.hello()))
        said_s = time.monotonic()
        while watch.has(watcher) and not is_stopping():
            for batch in watcher.take():
                yield _event("frames", batch.text)
                said_s = time.monotonic()
            if time.monotonic() - said_s >= HEARTBEAT_S:
                yield ": here\n\n"
                said_s = time.monotonic()
            await asyncio.sleep(EVERY_S)
    finally:
        asyncio.get_running_loop().run_in_executor(
            None, watch.leave, watcher
        )  # not awaited: the stream may have been cancelled


def _event(name: str, text: str) -> str:
    return f"event: {name}\ndata: {text}\n\n"
