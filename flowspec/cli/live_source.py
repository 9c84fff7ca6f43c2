"""Where a terminal's live view comes from: the event stream of a running `flowspec serve`, or a recording
that is played."""

from __future__ import annotations

import http.client
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from flowspec.errors import ClusterError, InputError
from flowspec.watch.figures import Frame
from flowspec.watch.recording import Format, Frames, Heading, wrong_document

CONNECT_S = 5.0
SILENT_S = 15.0
"""A server says something at least every few seconds."""
LINE_BYTES_MAX = 16 << 20
PATH = "/live/events"
API = "/v1"
"""Of the address that clients of the API use, which means the same server."""

Step = tuple[dict[str, Any] | None, list[Frame]]
"""A hello if there is a new one, and frames."""


def served(url: str, key: str) -> Iterator[Step]:
    """What a server tells, until it ends; raises `InputError` for a URL that is none, `ClusterError` where
    nothing, or something else, is there."""
    parts = urllib.parse.urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(f"--url: expected http://HOST:PORT of a running flowspec serve, got {url!r:.100}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=CONNECT_S)
    headers = {"Accept": "text/event-stream", **({"Authorization": f"Bearer {key}"} if key else {})}
    is_there = False
    try:
        connection.request("GET", parts.path.rstrip("/").removesuffix(API) + PATH, headers=headers)
        if connection.sock is not None:
            connection.sock.settimeout(SILENT_S)
        response = connection.getresponse()
        check_answer(url, response)
        is_there = True
        yield from events(response)
    except TimeoutError:
        raise ClusterError(
            f"{url}: no word for {SILENT_S if is_there else CONNECT_S:.0f} s; is flowspec serve still "
            "running there?"
        ) from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        if is_there:
            raise ClusterError(f"{url}: the connection was lost ({_reason(error)})") from None
        raise ClusterError(
            f"{url}: nothing answers there ({_reason(error)}); is flowspec serve running?"
        ) from None
    finally:
        connection.close()


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def check_answer(url: str, response: http.client.HTTPResponse) -> None:
    """Raises `ClusterError` unless it is a stream of events."""
    if response.status == 401:
        raise ClusterError(f"{url}: a key is wanted, or this one is wrong; set FLOWSPEC_API_KEY")
    is_stream = (response.getheader("Content-Type") or "").startswith("text/event-stream")
    if response.status != 200 or not is_stream:
        text = " ".join(response.read(300).decode("utf-8", "replace").split())
        shown = "".join(letter for letter in text if letter.isprintable())
        raise ClusterError(
            f"{url}: expected a live view, got status {response.status}: {shown:.150}; is that flowspec "
            "serve?"
        )


def events(lines: http.client.HTTPResponse) -> Iterator[Step]:
    """The events of a stream; others' text is checked as a recording's is."""
    name, data = "", []
    at_s = 0.0
    while line := lines.readline(LINE_BYTES_MAX):
        if len(line) >= LINE_BYTES_MAX:
            raise ClusterError("the server sent a line that is too long; is that flowspec serve?")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text.startswith("event:"):
            name = text[6:].strip()
        elif text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            step = _event(name, "\n".join(data), at_s)
            if step is not None:
                at_s = step[1][-1]["t"] if step[1] else at_s
                yield step
            name, data = "", []
        elif text.startswith(":"):
            yield None, []  # a sign of life


def _event(name: str, text: str, at_s: float) -> Step | None:
    if name not in ("hello", "frames", "loading"):
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ClusterError("the server sent an event that is no JSON; is that flowspec serve?") from None
    if name == "loading":
        raise ClusterError("the server still loads its model; try again when it says that it is serving")
    if name == "hello":
        hello, frames, wrong = value, [], wrong_document(value, Format, Heading)
    else:
        hello, frames, wrong = None, value, wrong_document({"frames": value}, Frames)
        if not wrong and frames and frames[0]["t"] < at_s:
            wrong = f"frames of {frames[0]['t']} s after those of {at_s} s"
    if wrong:
        raise ClusterError(
            f"the server sent what this FlowSpec does not know ({wrong}); run the same version"
        )
    return hello, frames


def played(document: Mapping[str, Any], speed: float) -> Iterator[Step]:
    """A recording in its own time, so many times as fast; a step at least ten times a second."""
    frames: list[Frame] = document["frames"]
    yield {name: value for name, value in document.items() if name != "frames"}, []
    started_s, at = time.monotonic(), 0
    while at < len(frames):
        now_s = speed * (time.monotonic() - started_s)
        due = at
        while due < len(frames) and frames[due]["t"] <= now_s:
            due += 1
        yield None, frames[at:due]
        at = due
        if at < len(frames):
            time.sleep(min(0.1, max(0.0, (frames[at]["t"] - now_s) / speed)))
