"""Recordings: one JSON document of what happened in some answers, to be replayed elsewhere. Others' files are
checked before they are used."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, cast, get_args

import msgspec
from msgspec import Meta, Struct

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.validation import Misfit, decode_json, expect, fit
from flowspec.watch.figures import Frame

FORMAT: Literal["flowspec-recording"] = "flowspec-recording"
VERSION = 1
FILE_BYTES_MAX = 64 << 20
FRAMES_MAX = 500_000
SECONDS_MAX = 1e7
COUNT_MAX = 1 << 53
REPORT_KEYS_MAX = 200
NODES_MAX = limits.DRAFT_NODES_MAX * 64

Text = Annotated[str, Meta(max_length=limits.TEXT_CHARS_MAX)]
Id = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]


class About(Struct, frozen=True, kw_only=True):
    """What a recording is of. `created` is an ISO time, or empty where it happened in no time of ours."""

    world: str
    model: Text
    method: Text
    drafters: Annotated[tuple[Text, ...], Meta(max_length=limits.LIST_MAX)]
    stages: Sequence[Any]
    created: Text = ""

    def document(self) -> dict[str, Any]:
        """The recording without its frames."""
        about = msgspec.structs.asdict(self)
        return {"format": FORMAT, "version": VERSION, **about, "drafters": list(self.drafters)}


# ------------------------------------------------------------------------------------------- what is expected


def _list(kind: Any, most: int) -> Any:
    return Annotated[list[kind], Meta(max_length=most)]


def _record(name: str, fields: Mapping[str, Any], **config: Any) -> Any:
    """A type with these fields; one that may be null need not be there."""
    given = [(each, kind, *([None] if type(None) in get_args(kind) else [])) for each, kind in fields.items()]
    return msgspec.defstruct(name, given, frozen=True, kw_only=True, **config)


class _Stage(Struct, frozen=True, kw_only=True):
    name: Text
    layers: tuple[Id, Id]

    def __post_init__(self) -> None:
        first, end = self.layers
        is_some = first < end <= limits.LAYERS_MAX
        expect(is_some, "layers", self.layers, f"the first one and the end, at most {limits.LAYERS_MAX}")


_NODES = _list(Id, NODES_MAX)
_STAY = {
    "stage": Annotated[int, Meta(ge=0, le=limits.STAGES_MAX - 1)],
    **dict.fromkeys(("arrived_s", "started_s", "ended_s", "left_s"), Seconds),
    **dict.fromkeys(("alive", "dead", "dropped"), Id),
}
_DEVICE = {
    "name": Text,
    "memory_bytes": Id,
    "temperature_c": Annotated[float, Meta(ge=-300, le=1000)] | None,
    "queued": Id,
    "done": Id,
    "running_s": Seconds,
    "present": bool,
    "throttled": bool | None,
    "loading": _record("Loading", {"doing": Text, "share": Share}) | None,
}
_FRAMES: dict[str, dict[str, Any]] = {
    "stages": {"stages": _list(_Stage, limits.STAGES_MAX)},
    "lost": {"silent_s": Seconds},
    "failed": {"text": Text},
    "note": {"text": Text},
    "missed": {},
    "begin": {"request": Id, "prompt_tokens": Id, "reused": Id, "text": Text},
    "root": {"request": Id, "node": Id, "token": Text, "position": Id},
    "nodes": {"request": Id, "nodes": _list(tuple[Id, Id, Text, Share], NODES_MAX)},
    "sent": {
        "segment": Id,
        "parts": _list(tuple[Id, _NODES], limits.PARTS_PER_SEGMENT_MAX),  # type: ignore[valid-type]
        "prompt_rows": Id,
    },
    "trip": {
        "segment": Id,
        "sent_s": Seconds,
        "back_s": Seconds,
        "stays": _list(_record("Stay", _STAY), limits.STAGES_MAX),
    },
    "draft": {
        "drafter": Annotated[int, Meta(ge=0, le=limits.LIST_MAX)],
        "started_s": Seconds,
        "ended_s": Seconds,
    },
    "tokens": {"request": Id, "nodes": _list(tuple[Id, Text], limits.CONTEXT_MAX)},
    "dead": {"request": Id, "nodes": _NODES},
    "end": {
        "request": Id,
        "reason": Text,
        "statistics": Annotated[dict[str, Any], Meta(max_length=REPORT_KEYS_MAX)],
    },
    "devices": {"devices": _list(_record("Device", _DEVICE), limits.LIST_MAX)},
    "figures": {
        **dict.fromkeys(("tokens_per_s", "S", "acceptance"), Annotated[float, Meta(ge=0, le=1e9)]),
        "rho": Share,
        "busy": _list(Share, limits.STAGES_MAX),
        "dropped_rows": Id,
    },
}
"""The fields of each kind of frame."""


class _Frame(Struct, frozen=True, kw_only=True, tag_field="kind"):
    NOUN: ClassVar[str] = f"a frame of a kind among {', '.join(_FRAMES)}"
    t: Seconds


_KINDS = tuple(_record(kind, fields, bases=(_Frame,), tag=kind) for kind, fields in _FRAMES.items())


class Frames(Struct, frozen=True, kw_only=True):
    """Things that happened, in order."""

    frames: _list(Union[_KINDS], FRAMES_MAX)  # type: ignore[valid-type]  # noqa: UP007

    def __post_init__(self) -> None:
        frames: list[Any] = self.frames
        for number, (before, frame) in enumerate(pairwise(frames), 1):
            if frame.t < before.t:
                raise Misfit(("frames", number, "t"), f"seconds from {before.t:g} on", frame.t)


class Format(Struct, frozen=True, kw_only=True):
    format: Literal["flowspec-recording"]
    version: Annotated[
        int, Meta(ge=VERSION, le=VERSION, description=f"{VERSION} (else use the FlowSpec that wrote it)")
    ]


class Heading(About, frozen=True, kw_only=True):
    world: Literal["cluster", "emulated", "simulated"]
    stages: Annotated[list[_Stage], Meta(max_length=limits.STAGES_MAX)]
    created: Text


def wrong_document(raw: Any, *parts: type) -> str:
    """What is wrong with a document, or with `parts` of one, in a line; nothing if nothing is."""
    try:
        for part in parts or (Format, Heading, Frames):
            fit(raw, part)
    except Misfit as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------- text and files


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
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InputError(f"{path}: expected a recording of at most {FILE_BYTES_MAX >> 20} MiB, got more")
        document: Any = decode_json(data, object)
    except OSError as error:
        raise InputError(f"{path}: expected a recording, which cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        why = first_line(error)
        raise InputError(f"{path}: expected a recording in JSON, but it cannot be read ({why})") from None
    if wrong := wrong_document(document):
        raise InputError(f"{path}: {wrong}")
    return cast(dict[str, Any], document)


def record_document(about: About, frames: Sequence[Frame]) -> dict[str, Any]:
    return {**about.document(), "frames": list(frames)}
