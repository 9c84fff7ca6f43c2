"""Server-sent events: how a stream's documents are framed."""

from __future__ import annotations

import json
from typing import Any

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies are not to hold it back
)
DONE = b"data: [DONE]\n\n"


def keep_alive() -> bytes:
    """A comment, which clients ignore: the connection is not dead, only silent."""
    return b": keep-alive\n\n"


def data(document: dict[str, Any]) -> bytes:
    """One event; JSON escapes line ends, so it is one line."""
    return (
        b"data: "
        + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        + b"\n\n"
    )


def event(name: str, document: dict[str, Any]) -> bytes:
    """One event that says of which type it is."""
    return b"event: " + name.encode() + b"\n" + data(document)
