"""The live view over HTTP: its page, a stream of what happens, and the last answer's recording.

The page's files hold no data, so they need no key; the routes that it calls do. Text of frames is made in the
watch's thread, a recording in one of the pool: the event loop only passes it on.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from pathlib import PurePath

from msgspec import Raw
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from flowspec.runtime.watching import EVERY_S, TooManyError, Watch, Watcher
from flowspec.serve.documents import JSON, STREAM_HEADERS, ApiError, frame
from flowspec.watch.recording import as_text

HEARTBEAT_S = 5.0
"""A stream in which nothing happens says this often that it is there."""
PATHS = ("/", "/page/")
"""Where the page is; a path that ends in a slash is all that is below it."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """`/` and `/page/<file>`, for the files of the page and nothing else."""
    folder = resources.files("flowspec.serve").joinpath("page")
    files = {each.name: (each.read_bytes(), TYPES[PurePath(each.name).suffix]) for each in folder.iterdir()}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return PlainTextResponse("no such file\n", 404, headers=HEADERS)
        content, media_type = files[name]
        # of the content, so that a browser that has it need not have it sent again
        headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return [Route("/", file, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]


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
            return ApiError(503, str(error), None, "too_many_watchers", {"Retry-After": "10"}).response
        return StreamingResponse(_stream(watch, watcher, is_stopping), headers=STREAM_HEADERS)

    async def recording(request: Request) -> Response:
        async with downloads:
            body = await run_in_threadpool(watch.recording_text)
        if body is None:
            text = "there is no recording: an answer is recorded while somebody watches /live/events"
            return ApiError(404, text, None, "no_recording").response
        attached = {"content-disposition": 'attachment; filename="flowspec-recording.json"'}
        return Response(body, headers={**STREAM_HEADERS, "content-type": JSON, **attached})

    paths = {"/live/events": events, "/live/recording": recording}
    return [Route(path, route, methods=["GET"]) for path, route in paths.items()]


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
    finally:  # not awaited: the stream may have been cancelled
        asyncio.get_running_loop().run_in_executor(None, watch.leave, watcher)
