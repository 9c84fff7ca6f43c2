"""The live view over HTTP: a stream of what happens (server-sent events), and the last answer's recording.

Routes for whoever serves them; who may use them is decided there. Text of frames is made in the watch's
thread, a recording in one of the pool: the event loop only passes it on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from msgspec import Raw
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from flowspec.runtime.watching import EVERY_S, TooManyError, Watch, Watcher
from flowspec.serve.documents import JSON, STREAM_HEADERS, frame
from flowspec.serve.guard import refused
from flowspec.serve.refusals import ApiError
from flowspec.watch.recording import as_text

HEARTBEAT_S = 5.0
"""A stream in which nothing happens says this often that it is there."""
RETRY_S = 10


def live_routes(watch: Watch, is_stopping: Callable[[], bool] = lambda: False) -> list[Route]:
    """`/live/events` and `/live/recording` of a watch that keeps recordings; streams end once the server
    `is_stopping`, or the watch is closed."""

    downloads = asyncio.Lock()  # a recording is large: one at a time is made

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return StreamingResponse((), headers=STREAM_HEADERS)
        try:
            watcher = await run_in_threadpool(watch.join)
        except TooManyError as error:
            retry = {"Retry-After": str(RETRY_S)}
            return refused(ApiError(503, str(error), None, "too_many_watchers", retry))
        return StreamingResponse(_stream(watch, watcher, is_stopping), headers=STREAM_HEADERS)

    async def recording(request: Request) -> Response:
        async with downloads:
            body = await run_in_threadpool(watch.recording_text)
        if body is None:
            text = "there is no recording: an answer is recorded while somebody watches /live/events"
            return refused(ApiError(404, text, None, "no_recording"))
        attached = {"content-disposition": 'attachment; filename="flowspec-recording.json"'}
        return Response(body, headers={**STREAM_HEADERS, "content-type": JSON, **attached})

    return [
        Route("/live/events", events, methods=["GET"]),
        Route("/live/recording", recording, methods=["GET"]),
    ]


async def _stream(watch: Watch, watcher: Watcher, is_stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Hello, then frames as they come; when the client goes, its place is free again."""
    try:
        yield frame(Raw(as_text(watch.hello())), "hello")
        said_s = time.monotonic()
        while watch.has(watcher) and not is_stopping():
            for batch in watcher.take():
                yield frame(Raw(batch.text), "frames")
                said_s = time.monotonic()
            if time.monotonic() - said_s >= HEARTBEAT_S:
                yield b": here\n\n"
                said_s = time.monotonic()
            await asyncio.sleep(EVERY_S)
    finally:
        asyncio.get_running_loop().run_in_executor(
            None, watch.leave, watcher
        )  # not awaited: the stream may have been cancelled
