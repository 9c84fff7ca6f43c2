"""Recordings: one JSON document of what happened in some answers, for the page to replay."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowspec.errors import InputError
from flowspec.watch.figures import Frame

FORMAT = "flowspec-recording"
VERSION = 1
FILE_BYTES_MAX = 64 << 20
"""So large a file the page reads."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of. `created` is an ISO time, or empty where it happened in no time of ours."""

    world: str
    model: str
    method: str
    drafters: tuple[str, ...]
    stages: Sequence[Any]
    created: str = ""

    def document(self) -> dict[str, Any]:
        """The recording without its frames."""
        about = msgspec.structs.asdict(self)
        return {"format": FORMAT, "version": VERSION, **about, "drafters": list(self.drafters)}


def as_text(value: Any) -> str:
    """JSON as it goes into files and over the wire: short, in ASCII, and nothing that a browser does not
    read."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def rebased(text: str, origin_s: float) -> str:
    """A frame's text on a clock that begins at `origin_s` of its own; what was before it is its beginning."""
    return _INSTANT.sub(lambda found: f"{found[1]}{max(0.0, round(float(found[2]) - origin_s, 6))}", text)


_INSTANT = re.compile(r'("(?:t|sent_s|back_s|started_s|ended_s|arrived_s|left_s)":)([0-9.e+-]+)')
"""A field that is an instant, as `as_text` writes it: no string can have it inside, where quotes are escaped.
"""


def document_text(about: About, texts: Iterable[str]) -> str:
    """A recording of frames that are text already."""
    return f'{as_text(about.document())[:-1]},"frames":[{",".join(texts)}]}}'


def write_recording(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a recording whole, or raises `InputError` and leaves what was there."""
    text = as_text(document)
    if len(text) > FILE_BYTES_MAX:
        raise InputError(
            f"the recording has {len(text) >> 20} MiB, expected at most {FILE_BYTES_MAX >> 20}; record a "
            "shorter answer"
        )
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text + "\n", "utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write the recording {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def record_document(about: About, frames: Sequence[Frame]) -> dict[str, Any]:
    return {**about.document(), "frames": list(frames)}
