"""Who may come in: the API key, the name by which a browser believes to speak to us, and how much anybody may
send.

A web page may have its own name point to this machine (DNS rebinding) and read answers as if they were its
own. A key stops that; without one, only requests to this machine's own names are answered.

A page of another origin does harm without reading: it takes one of a few places at the live view. So that is
for our own page, for origins that are named, and for programs, which name none.
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowspec.errors import InputError
from flowspec.folders import read_text, why_unread
from flowspec.serve.documents import ApiError

HEADER_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 8 << 20
BODY_S = 60.0  # how long a body may take to come
DISCARDED_BYTES_MAX = 8 * BODY_BYTES_MAX
"""Of a body that is too large, what is read before the refusal, for a client that listens only when it has
said everything."""
KEY_VARIABLE = "FLOWSPEC_API_KEY"
_KEY_CHARS_MIN = 8
_KEY = re.compile(rf"[!-~]{{{_KEY_CHARS_MIN},}}")
_PORT = re.compile(r":[0-9]+\Z")
_UNSAID = ("", "application/x-www-form-urlencoded")
"""Types of a body whose sender, such as curl, said nothing of it. From a web page they are refused: it could
send them here without asking the browser's leave."""
_PAGE = ("origin", "sec-fetch-site")  # what browsers send of the page that asks
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

log = logging.getLogger("flowspec.serve")


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """The keys of a file, one in each line, else that of the environment, else none; no error has a key."""
    text, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if path is None and not text:
        return ()
    if path is not None:
        where = str(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never end
                text = f"expected a file, got {path}, which is none; or set {KEY_VARIABLE}"
                raise InputError(f"--api-key-file: {text}")
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                text = "expected a key file that only its owner can read; run chmod 600 on it"
                raise InputError(f"{path}: {text}")
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            text = f"expected a file with a key in each line, cannot read {path}: {why_unread(error)}"
            raise InputError(f"--api-key-file: {text}") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys or not all(map(_KEY.fullmatch, keys)):
        text = f"expected keys of at least {_KEY_CHARS_MIN} characters without spaces, one in each line"
        raise InputError(f"{where}: {text}")
    return tuple(key.encode() for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Who may come in: API keys, else the names by which this server is called, in lower case (none: any),
    and the origins of web pages. `free` paths need no key, nor do those below one that ends in a slash."""

    keys: Sequence[bytes] = ()
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    free: Sequence[str] = ()

    def is_free(self, path: str) -> bool:
        below = tuple(each for each in self.free if each.endswith("/") and each != "/")
        return path in ("/health", *self.free) or path.startswith(below)


@dataclass(frozen=True, slots=True)
class Guard:
    """Lets in who may; answers others in the API's form."""

    app: ASGIApp
    access: AccessRules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        await (self.app if refusal is None else refusal.response)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw)
        if size > HEADER_BYTES_MAX:  # one that comes in pieces is refused before
            message = f"expected a header of at most {HEADER_BYTES_MAX} bytes, got {size}"
            return ApiError(431, message, code="header_too_large", headers={"Connection": "close"})
        if scope["path"].startswith("/live/") and (page := _foreign_page(headers, self.access.origins)):
            return ApiError(403, f"the live view is not for {page}; --cors ORIGIN lets its origin in")
        if not self.access.keys:
            host, names = _PORT.sub("", headers.get("host", "").lower()), self.access.names
            known = ", ".join(sorted(set(names)))
            text = f"this server has no key and answers to {known} only, not to {host!r:.80}"
            return ApiError(403, text) if names and host not in names else None
        # in either of two headers: clients that must send some Authorization may have it in the other
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        said = (bearer if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))
        given = [each.strip().encode("utf-8", "surrogateescape") for each in said]
        is_known = any([hmac.compare_digest(key, known) for key in given for known in self.access.keys])
        if is_known or self.access.is_free(scope["path"]):
            return None
        got = "another one" if any(given) else "none"
        message = f"expected an API key as Authorization: Bearer KEY or X-Api-Key: KEY, got {got}"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def rules_of(access: AccessRules) -> list[Middleware]:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    return [*([cors] if access.origins else []), Middleware(Guard, access=access)]


def _foreign_page(headers: Headers, origins: Iterable[str]) -> str:
    """Somebody else's web page that asks, in words; empty for our own and for programs."""
    origin = headers.get("origin")
    if origin is None:  # as of a page's image or script: browsers say whether it is the same site
        site = headers.get("sec-fetch-site", "none")
        return "" if site in ("none", "same-origin") else "a web page of another origin"
    own = headers.get("host", "").lower()
    is_ours = origin in origins or (own and origin.lower().partition("://")[2] == own)
    return "" if is_ours else f"the web page {origin!r:.80}" if origin else "a web page without an origin"


@dataclass(frozen=True, slots=True)
class Counted:
    """Tells `on_response` the route (by `route_of`) and status of every response, and the log its seconds."""

    app: ASGIApp
    route_of: Callable[[str], str]
    on_response: Callable[[str, int], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s, status = time.monotonic(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            route, status = self.route_of(scope["path"]), status or 499  # gone before there was a response
            self.on_response(route, status)
            client, spent_s = (scope.get("client") or "-")[0], time.monotonic() - began_s
            log.info("%s %s %s: %d after %.3f s", client, scope["method"], route, status, spent_s)


async def read_body(request: Request) -> bytes:
    """The body of a request; raises `ApiError` for one that is no JSON, too large or too slow."""
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
