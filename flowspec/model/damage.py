"""Files of models that others wrote: what is wrong with one (it is something else than its name says, or a
link out of the model's folder), and JSON, bounded in size and depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.folders import read_text, why_unread

GGUF_MAGIC = b"GGUF"
ZIP_MAGIC = b"PK\x03\x04"
_FETCH = "`flowspec fetch OWNER/NAME` gets the whole model"
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = (b"<!doctype html", b"<html", b"<?xml")
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_HEAD_BYTES = 512
_DEPTH_MAX = 100


def read_head(path: Path) -> bytes:
    """The first bytes of a file; none of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def advice(path: Path, otherwise: str = "copy it again") -> str:
    """What a file that cannot be read is by its first bytes, and what to do; else `otherwise`."""
    head = read_head(path)
    text, suffix = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower(), path.suffix.lower()
    packed = next((name for magic, name in _PACKED.items() if head.startswith(magic)), "")
    is_json = text.startswith(b"{") and suffix not in (".json", ".jinja")
    is_gguf = head.startswith(GGUF_MAGIC) and suffix != ".gguf"
    torch = ", as torch.save writes it; docs/security.md tells how to convert one"
    cure = "; unpack it first" if suffix == ".json" else torch
    kinds = (
        (not head, "is empty; fetch it again"),
        (head.startswith(_LFS), f"is a pointer that git-lfs left; run `git lfs pull` there, or {_FETCH}"),
        (text.startswith(_PAGE), f"is a web page that was saved in its place; {_FETCH}"),
        (is_json, f"is JSON, such as a server's answer that was saved in its place; {_FETCH}"),
        (is_gguf, f"is a GGUF file; give it by itself: --model {path}"),
        (head.startswith(ZIP_MAGIC), f"is a zip archive{cure}"),
        (packed, f"is packed with {packed}; unpack it first"),
        (not any(head), f"begins with zeros, so its download was not finished; {_FETCH}"),
    )
    return next((f"it {text}" for is_so, text in kinds if is_so), otherwise)


def instead(path: Path, error: Exception) -> str:
    """What follows the words that a file is not what its name says: what it is, if that can be told, else how
    reading it failed."""
    found = advice(path, "")
    return f"; {found}" if found else f" ({why_unread(error)}); copy it again"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `InputError`."""
    try:
        if (size := path.stat().st_size) > limits.JSON_BYTES_MAX:
            raise InputError(f"{path}: expected JSON of at most {limits.JSON_BYTES_MAX} bytes, got {size}")
        raw = json.loads(read_text(path))
        _check_depth(raw)
    except (OSError, ValueError, RecursionError) as error:
        found = advice(path, f"it cannot be read ({why_unread(error)}); {_FETCH}")
        raise InputError(f"{path}: expected JSON, but {found}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, got {raw!r:.80}")
    return raw


def _check_depth(value: Any, left: int = _DEPTH_MAX) -> None:
    """Raises `ValueError` for lists and objects so deep in each other that showing or copying them could
    exhaust Python's stack."""
    if isinstance(value, dict | list):
        if not left:
            raise ValueError(f"it is nested more than {_DEPTH_MAX} deep")
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, left - 1)


def check_inside(path: Path, folder: Path) -> None:
    """Raises `InputError` for a file of a model's folder that is a link out of it: models come from others,
    and the text of any file here could become a part of every prompt. In the hub's cache all files of a
    snapshot are links to its blobs."""
    real, root = path.resolve(), folder.resolve()
    is_cached = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not real.is_relative_to(root) and not is_cached:
        raise InputError(
            f"{path} is a link out of the model's folder, to {real}; copy the file there instead"
        )
