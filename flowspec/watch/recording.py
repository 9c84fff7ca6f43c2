"""Recordings: one JSON document of what happened in some answers, to be replayed elsewhere. Others' files are
checked before they are used."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.folders import why_unread
from flowspec.watch.figures import Frame

FORMAT = "flowspec-recording"
VERSION = 1
WORLDS = ("cluster", "emulated", "simulated")
FILE_BYTES_MAX = 64 << 20
FRAMES_MAX = 500_000
TEXT_MAX = limits.TEXT_CHARS_MAX
SECONDS_MAX = 1e7
COUNT_MAX = 1 << 53
REPORT_KEYS_MAX = 200

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a recording is of. `created` is an ISO time, or empty where it happened in no time of ours."""

    world: str
    model: str
    method: str
    drafters: tuple[str, ...]
    stages: list[dict[str, Any]]
    created: str = ""

    def document(self) -> dict[str, Any]:
        """The recording without its frames."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "world": self.world,
            "model": self.model,
            "method": self.method,
            "drafters": list(self.drafters),
            "stages": self.stages,
            "created": self.created,
        }


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


def read_recording(path: Path) -> dict[str, Any]:
    """The document of a file that anybody may have written; raises `InputError`."""
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise InputError(
                f"{path}: expected a recording of at most {FILE_BYTES_MAX >> 20} MiB, got {size >> 20}"
            )
        with path.open("rb") as file:
            raw = json.loads(file.read(FILE_BYTES_MAX + 1))
    except OSError as error:
        raise InputError(f"{path}: expected a recording, which cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = why_unread(error)
        raise InputError(f"{path}: expected a recording in JSON, but it cannot be read ({why})") from None
    if wrong := wrong_document(raw):
        raise InputError(f"{path}: {wrong}")
    document: dict[str, Any] = raw
    return document


def wrong_document(raw: Any) -> str:
    """What is wrong with a document, in a line; nothing if nothing is."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        return f"expected a recording ({FORMAT}), got something else"
    if raw.get("version") != VERSION or isinstance(raw["version"], bool):
        return (
            f"expected version {VERSION} of the format, got {_shown(raw.get('version'))}; use the FlowSpec "
            "that wrote it"
        )
    for name, check in _DOCUMENT.items():
        if not check(raw.get(name)):
            return f"{name}: got {_shown(raw.get(name))}"
    frames = raw.get("frames")
    if not isinstance(frames, list) or len(frames) > FRAMES_MAX:
        return f"frames: expected a list of at most {FRAMES_MAX}"
    before_s = 0.0
    for number, frame in enumerate(frames):
        if wrong := _wrong_frame(frame, before_s):
            return f"frame {number}: {wrong}"
        before_s = frame["t"]
    return ""


def _wrong_frame(frame: Any, before_s: float) -> str:
    if not isinstance(frame, dict) or not isinstance(kind := frame.get("kind"), str) or kind not in _FRAMES:
        return (
            f"expected one of {', '.join(_FRAMES)}, got "
            f"{_shown(frame.get('kind') if isinstance(frame, dict) else frame)}"
        )
    if not _seconds(frame.get("t")) or frame["t"] < before_s:
        return f"t: expected seconds from {before_s:g} on, got {_shown(frame.get('t'))}"
    for name, check in _FRAMES[kind].items():
        if not check(frame.get(name)):
            return f"{name} of {kind}: got {_shown(frame.get(name))}"
    return ""


def _shown(value: Any) -> str:
    """A value that somebody else wrote, in short."""
    text = repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    return f"{text[:60]}"


# ------------------------------------------------------------------------------------------- what is expected


def _number(least: float, most: float) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and least <= value <= most
        )

    return check


def _whole(most: int = COUNT_MAX, least: int = 0) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= TEXT_MAX


def _list(check: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _row(*checks: Check) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(each(item) for each, item in zip(checks, value, strict=True))
        )

    return check


def _record(checks: Mapping[str, Check]) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(check(value.get(name)) for name, check in checks.items())
    )


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _report(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= REPORT_KEYS_MAX


_id = _whole()
_seconds = _number(0, SECONDS_MAX)
_share = _number(0, 1)
_layers: Check = lambda value: _row(_id, _id)(value) and value[0] < value[1] <= limits.LAYERS_MAX  # noqa: E731
_stages = _list(_record({"name": _text, "layers": _layers}), limits.STAGES_MAX)
_nodes = _list(_id, limits.DRAFT_NODES_MAX * 64)
_stay = _record(
    {
        "stage": _whole(limits.STAGES_MAX - 1),
        **dict.fromkeys(("arrived_s", "started_s", "ended_s", "left_s"), _seconds),
        **dict.fromkeys(("alive", "dead", "dropped"), _id),
    }
)
_device = _record(
    {
        "name": _text,
        "memory_bytes": _id,
        "temperature_c": _or_null(_number(-300, 1000)),
        "queued": _id,
        "done": _id,
        "running_s": _seconds,
        "present": lambda value: isinstance(value, bool),
        "throttled": lambda value: value is None or isinstance(value, bool),
        "loading": lambda value: value is None or _record({"doing": _text, "share": _share})(value),
    }
)
_DOCUMENT: dict[str, Check] = {
    "world": lambda value: value in WORLDS,
    "model": _text,
    "method": _text,
    "drafters": _list(_text, limits.LIST_MAX),
    "stages": _stages,
    "created": _text,
}
_FRAMES: dict[str, dict[str, Check]] = {
    "stages": {"stages": _stages},
    "lost": {"silent_s": _seconds},
    "failed": {"text": _text},
    "note": {"text": _text},
    "missed": {},
    "begin": {"request": _id, "prompt_tokens": _id, "reused": _id, "text": _text},
    "root": {"request": _id, "node": _id, "token": _text, "position": _id},
    "nodes": {"request": _id, "nodes": _list(_row(_id, _id, _text, _share), limits.DRAFT_NODES_MAX * 64)},
    "sent": {
        "segment": _id,
        "parts": _list(_row(_id, _nodes), limits.PARTS_PER_SEGMENT_MAX),
        "prompt_rows": _id,
    },
    "trip": {
        "segment": _id,
        "sent_s": _seconds,
        "back_s": _seconds,
        "stays": _list(_stay, limits.STAGES_MAX),
    },
    "draft": {"drafter": _whole(limits.LIST_MAX), "started_s": _seconds, "ended_s": _seconds},
    "tokens": {"request": _id, "nodes": _list(_row(_id, _text), limits.CONTEXT_MAX)},
    "dead": {"request": _id, "nodes": _nodes},
    "end": {"request": _id, "reason": _text, "statistics": _report},
    "devices": {"devices": _list(_device, limits.LIST_MAX)},
    "figures": {
        **dict.fromkeys(("tokens_per_s", "S", "acceptance"), _number(0, 1e9)),
        "rho": _share,
        "busy": _list(_share, limits.STAGES_MAX),
        "dropped_rows": _id,
    },
}
"""The fields of each kind of frame."""


def record_document(about: About, frames: Sequence[Frame]) -> dict[str, Any]:
    return {**about.document(), "frames": list(frames)}
