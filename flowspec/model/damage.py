"""What is wrong with a model's file: what it is in place of what its name says, a link out of the model's
folder, weights that were never written though the file has its full length."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from pathlib import Path

from flowspec.errors import InputError
from flowspec.folders import why_unread
from flowspec.model.tensors import Extent

GGUF_MAGIC = b"GGUF"
ZIP_MAGIC = b"PK\x03\x04"
HEAD_BYTES = 512
_FETCH = "`flowspec fetch OWNER/NAME` gets the whole model"
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = (b"<!doctype html", b"<html", b"<?xml")
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_SAMPLE_BYTES = 4096
_EDGE_BYTES = 256
_BLOCK_BYTES = 1 << 20


def read_head(path: Path) -> bytes:
    """The first bytes of a file; none of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def is_gguf_file(path: Path) -> bool:
    """Whether a file is GGUF by its first bytes, whatever its name is."""
    return path.is_file() and read_head(path).startswith(GGUF_MAGIC)


def advice(path: Path, otherwise: str = "copy it again") -> str:
    """What a file that cannot be read is by its first bytes, and what to do; else `otherwise`."""
    head = read_head(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if not head:
        return "it is empty; fetch it again"
    if head.startswith(_LFS):
        return f"it is a pointer that git-lfs left in its place; run `git lfs pull` there, or {_FETCH}"
    if text.startswith(_PAGE):
        return f"it is a web page that was saved in its place; {_FETCH}"
    if text.startswith(b"{") and path.suffix not in (".json", ".jinja"):
        return f"it is JSON, such as a server's answer that was saved in its place; {_FETCH}"
    if head.startswith(GGUF_MAGIC) and path.suffix.lower() != ".gguf":
        return f"it is a GGUF file; give it by itself: --model {path}"
    if head.startswith(ZIP_MAGIC) and path.suffix == ".json":
        return "it is a zip archive; unpack it first"
    if head.startswith(ZIP_MAGIC):
        return "it is a zip archive, as torch.save writes it; docs/security.md tells how to convert one"
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            return f"it is packed with {name}; unpack it first"
    if not any(head):
        return f"it begins with zeros, so its download was not finished; {_FETCH}"
    return otherwise


def advice_for_json(path: Path) -> str:
    """`advice`, also for JSON that breaks off; empty where the file is whole, or is no JSON by its name."""
    found = advice(path, "")
    if not found and path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            return f"{path.name} is no whole JSON ({error!s:.80}); {_FETCH}"
    return found


def instead(path: Path, error: Exception) -> str:
    """What follows the words that a file is not what its name says: what it is, if that can be told, else how
    reading it failed."""
    found = advice(path, "")
    return f"; {found}" if found else f" ({why_unread(error)}); copy it again"


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


def check_written(extents: Iterable[Extent]) -> None:
    """Raises `InputError` for weights that are a hole in their file: zeros from somewhere on, over one matrix
    at least, which a download that had the space beforehand leaves when it is cut off.

    A matrix of zeros alone is none: merged models have some. A hole does not end where a tensor does, or goes
    on to the file's end.
    """
    placed = sorted(extents, key=lambda each: (str(each.path), each.offset))
    for path, group in groupby(placed, key=lambda each: each.path):
        tensors = list(group)
        with path.open("rb") as file:
            descriptor = file.fileno()
            for is_zero, members in groupby(tensors, partial(_has_only_zeros, descriptor)):
                run = list(members)
                if not is_zero or all(len(each.shape) < 2 for each in run):
                    continue
                begin, end = run[0].offset, run[-1].offset + run[-1].size_bytes
                is_first, is_last = run[0] is tensors[0], run[-1] is tensors[-1]
                is_hole = is_last or _is_zero(descriptor, end, _EDGE_BYTES)
                if is_hole or (not is_first and _is_zero(descriptor, begin - _EDGE_BYTES, _EDGE_BYTES)):
                    raise InputError(
                        f"{path} was not written to its end: {end - begin} bytes of weights from byte "
                        f"{begin} on are zeros, as a download leaves them that is cut off; fetch it again"
                    )


def _has_only_zeros(descriptor: int, tensor: Extent) -> bool:
    middle = tensor.offset + max(0, tensor.size_bytes - _SAMPLE_BYTES) // 2
    return _is_zero(descriptor, middle, min(_SAMPLE_BYTES, tensor.size_bytes)) and _is_zero(
        descriptor, tensor.offset, tensor.size_bytes
    )


def _is_zero(descriptor: int, offset: int, size: int) -> bool:
    """Of the bytes that the file has there; a place beyond its end has none."""
    end, is_read = offset + size, False
    while offset < end and (block := os.pread(descriptor, min(_BLOCK_BYTES, end - offset), offset)):
        if any(block):
            return False
        offset, is_read = offset + len(block), True
    return is_read
