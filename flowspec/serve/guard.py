"""Who may come in: the API key, the name by which a browser believes to speak to us, and how much anybody may
send.

A web page may have its own name point to this machine (DNS rebinding) and would then read answers as if they
were its own. A key stops that; where there is none, only requests to this machine's own names are answered.

A page of another origin need not read an answer to do harm: it takes one of a few places at the live view,
and has everything recorded. So the live view is for our own page, for origins that are named, and for
programs, which name none.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowspec.errors import InputError
from flowspec.folders import read_text, why_unread
from flowspec.serve.documents import json_response
from flowspec.serve.refusals import ApiError

HEADER_BYTES_MAX = 16 << 10
_LINE_BYTES = len(": \r\n")
"""Of a header's line, beside the name and the value."""
BODY_BYTES_MAX = 8 << 20
BODY_S = 60.0
"""How long a body may take to come."""
DISCARDED_BYTES_MAX = 8 * BODY_BYTES_MAX
"""Of a body that is too large, what is read before the refusal, for a client that listens only when it has
said everything."""
KEY_VARIABLE = "FLOWSPEC_API_KEY"
_KEY_CHARS_MIN = 8
_KEY = re.compile(rf"[!-~]{{{_KEY_CHARS_MIN},}}")
_PORT = re.compile(r":[0-9]+\Z")
_FREE = ("/health",)
"""Paths that never need a key."""
_LIVE = "/live/"
_UNSAID = ("", "application/x-www-form-urlencoded")
"""Types of a body whose sender, such as curl, said nothing of it. From a web page they are refused: it could
send them here without asking the browser's leave."""
_PAGE = ("origin", "sec-fetch-site")
"""What browsers send of the page that asks."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

log = logging.getLogger("flowspec.serve")


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """The keys of a file, one in each line, else that of the environment, else none; raises `InputError`. No
    message has a key in it."""
    text, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if path is None and not text:
        return ()
    if path is not None:
        where = str(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never end
                raise InputError(
                    f"--api-key-file: expected a file, got {path}, which is none; or set {KEY_VARIABLE}"
                )
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise InputError(
                    f"{path}: expected a key file that only its owner can read; run chmod 600 on it"
                )
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"--api-key-file: expected a file with a key in each line, cannot read {path}: "
                f"{why_unread(error)}"
            ) from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys or not all(map(_KEY.fullmatch, keys)):
        raise InputError(
            f"{where}: expected keys of at least {_KEY_CHARS_MIN} characters without spaces, one in each line"
        )
    return tuple(key.encode() for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Who may come in: API keys, else the names by which this server is called, in lower case (none: any),
    and the origins of web pages that may.

    Paths that are `free` need no key, nor does what is below those of them that end in a slash.
    """

    keys: Sequence[bytes] = ()
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    free: Sequence[str] = ()


class Guard:
    """Lets in who may; answers others in the API's form. Web pages do not watch, unless they are ours or of
    an origin that may."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app = app
        self._access = access
        self._free_below = tuple(path for path in access.free if path.endswith("/") and path != "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refused(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + _LINE_BYTES for name, value in headers.raw)
        if size > HEADER_BYTES_MAX:  # one that comes in pieces is refused before
            message = f"expected a header of at most {HEADER_BYTES_MAX} bytes, got {size}"
            return ApiError(431, message, code="header_too_large", headers={"Connection": "close"})
        if scope["path"].startswith(_LIVE) and (page := _foreign_page(headers, self._access.origins)):
            return ApiError(403, f"the live view is not for {page}; --cors ORIGIN lets its origin in")
        if not self._access.keys:
            host, names = _PORT.sub("", headers.get("host", "").lower()), self._access.names
            if names and host not in names:
                known = ", ".join(sorted(set(names)))
                text = f"this server has no key and answers to {known} only, not to {host!r:.80}"
                return ApiError(403, text)
            return None
        if scope["path"] in (*_FREE, *self._access.free) or scope["path"].startswith(self._free_below):
            return None
        given = _keys_in(headers)
        if any([hmac.compare_digest(key, known) for key in given for known in self._access.keys]):
            return None
        got = "another one" if any(given) else "none"
        message = f"expected an API key as Authorization: Bearer KEY or X-Api-Key: KEY, got {got}"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def rules_of(access: AccessRules) -> list[Middleware]:
    """Around an app, lets in who may."""
    guard = Middleware(Guard, access=access)
    if not access.origins:
        return [guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    return [cors, guard]


def _foreign_page(headers: Headers, origins: Iterable[str]) -> str:
    """Somebody else's web page that asks, in words, as far as browsers tell; empty for our own and for
    programs.

    A page's image or script tells no origin, but browsers say whether it is the same site.
    """
    origin = headers.get("origin")
    if origin is None:
        site = headers.get("sec-fetch-site", "none")
        return "" if site in ("none", "same-origin") else "a web page of another origin"
    own = headers.get("host", "").lower()
    is_ours = origin in origins or (own and origin.lower().partition("://")[2] == own)
    return "" if is_ours else f"the web page {origin!r:.80}" if origin else "a web page without an origin"


def _keys_in(headers: Headers) -> list[bytes]:
    """The keys that a request gives, in either of two headers, or in both: clients that must send some
    Authorization may have the right one in the other."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    given = [key if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return [each.strip().encode("utf-8", "surrogateescape") for each in given]


def refused(error: ApiError) -> Response:
    return json_response(error.document, error.status, error.headers)


class Counted:
    """Tells `on_response` the route and status of every response, and the log its seconds, too; `route_of`
    names a path, so that paths are not made up by clients."""

    def __init__(
        self, app: ASGIApp, route_of: Callable[[str], str], on_response: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._route_of = route_of
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.monotonic(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            route, status = self._route_of(scope["path"]), status or 499  # gone before there was a response
            self._on_response(route, status)
            client, spent_s = (scope.get("client") or "-")[0], time.monotonic() - began_s
            log.info("%s %s %s: %d after %.3f s", client, scope["method"], route, status, spent_s)


async def read_body(request: Request) -> bytes:
    """The body of a request that has JSON; raises `ApiError` for one that has not, is too large or too
    slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and (kind not in _UNSAID or any(name in request.headers for name in _PAGE)):
        text = f"expected a body of type application/json, got {kind or 'none'!r:.80}"
        raise ApiError(415, text, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "expected a body that is not compressed", code="unsupported_media_type")
    try:
        return await asyncio.wait_for(_read(request), BODY_S)
    except asyncio.TimeoutError:
        text = f"the body did not come within {BODY_S:.0f} s"
        raise ApiError(408, text, headers={"Connection": "close"}) from None


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    is_large = declared.isdecimal() and int(declared) > BODY_BYTES_MAX
    chunks, size = [], 0
    if not (is_large and "expect" in request.headers):
        async for chunk in request.stream():
            size += len(chunk)
            is_large = is_large or size > BODY_BYTES_MAX
            if size > DISCARDED_BYTES_MAX:
                break
            if not is_large:
                chunks.append(chunk)
    if is_large:
        message = f"expected a body of at most {BODY_BYTES_MAX} bytes"
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
    return b"".join(chunks)


async def while_there(receive: Receive, work: Awaitable[None]) -> None:
    """Does the work, and gives it up when the client goes away."""

    async def go() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(go())
    try:
        await asyncio.wait([doing, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
    if not doing.cancelled():
        doing.result()
