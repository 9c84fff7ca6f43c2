"""The header of a safetensors file, which others wrote: bounded, and held to the file's length."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line


def read_header(path: Path) -> dict[str, Any]:
    """Tensor name -> dtype, shape, offsets. Checks the file's length; raises `InputError`."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > limits.TENSOR_HEADER_BYTES_MAX:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        if not all(
            isinstance(entry["dtype"], str) and _is_shape(entry["shape"]) for entry in header.values()
        ):
            raise ValueError("a header of other content")
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if not all(type(end) is int and 0 <= end <= limits.ID_MAX for end in ends):
            raise ValueError("a header with other offsets")
        end = 8 + size + max(ends, default=0)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise InputError(f"{path} is not a safetensors file ({first_line(error)}); copy it again") from None
    if path.stat().st_size != end:
        raise InputError(
            f"{path} is incomplete: expected {end} bytes, got {path.stat().st_size}; copy it again"
        )
    return dict(header)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= limits.TENSOR_AXES_MAX
        and all(type(size) is int and 0 <= size <= limits.ID_MAX for size in value)
    )
