"""Safetensors files, which others wrote: headers, bounded and held to the file's length, and tensors by
memory map."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.damage import instead
from flowspec.model.tensors import Extent, Tensors, check_shape

ELEMENT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Of the dtypes that are loaded, by the names that these files have for them."""
LEVEL_BYTES = {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
"""Of those that quantised checkpoints have beside them."""
MAPPED_BYTES_MAX = 32 << 20


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
        raise InputError(f"{path} is not a safetensors file{instead(path, error)}") from None
    if path.stat().st_size != end:
        raise InputError(
            f"{path} is incomplete: expected {end} bytes, got {path.stat().st_size}; copy it again"
        )
    return dict(header)


def written_extents(path: Path) -> list[Extent]:
    """Where each tensor lies, of whatever dtype; raises `InputError`."""
    header = read_header(path)
    data = path.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return [
        Extent(
            path=path,
            offset=data + entry["data_offsets"][0],
            size_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
        )
        for entry in header.values()
        if type(entry["data_offsets"][0]) is int and entry["data_offsets"][0] >= 0
    ]


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= limits.TENSOR_AXES_MAX
        and all(type(size) is int and 0 <= size <= limits.ID_MAX for size in value)
    )


class SafetensorsTensors(Tensors):
    """The tensors of a model's safetensors files, which are found by `path` when they are read."""

    def __init__(
        self,
        model: str,
        file_of: Mapping[str, str],
        path: Callable[[str], Path],
        element_bytes: Mapping[str, int] = ELEMENT_BYTES,
    ) -> None:
        """`file_of` says which file holds which tensor; `element_bytes` of each dtype that one may have."""
        self._model = model
        self._element_bytes = element_bytes
        self._file_of = file_of
        self._path = path
        self._headers: dict[str, dict[str, Any]] = {}
        self._open: dict[str, Any] = {}
        self._mapped_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["shape"])

    def extent(self, name: str) -> Extent:
        """Where the tensor lies as raw bytes, little-endian and row-major. Raises `InputError` for a header
        that contradicts itself."""
        entry = self._entry(name)
        file = self._file_of[name]
        path = self._path(file)
        ends = [other["data_offsets"][1] for other in self._headers[file].values()]
        begin, end = entry["data_offsets"][:2]
        size_bytes = self.element_count(name) * self._element_bytes[entry["dtype"]]
        if type(begin) is not int or begin < 0 or end - begin != size_bytes:
            raise InputError(
                f"{path}: {name}: expected {size_bytes} bytes by its shape, got the offsets "
                f"{entry['data_offsets']}"
            )
        # The header's check made sure that the data end where the file does.
        return Extent(
            path=path,
            offset=path.stat().st_size - max(ends) + begin,
            size_bytes=size_bytes,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
        )

    def load(self, name: str, shape: tuple[int, ...]) -> Any:
        """Over the memory-mapped file.

        Maps are dropped every so often: pages of a file that were read count as this process's memory until
        then.
        """
        from safetensors import SafetensorError, safe_open

        entry, file = self._entry(name), self._file_of[name]
        check_shape(name, self._model, shape, entry["shape"])
        try:
            if self._mapped_bytes > MAPPED_BYTES_MAX:
                self.close()
            self._mapped_bytes += self.element_count(name) * self._element_bytes[entry["dtype"]]
            if file not in self._open:
                self._open[file] = safe_open(self._path(file), framework="pt")
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"cannot read {name} of {self._model!r}: {first_line(error)}") from None

    def close(self) -> None:
        self._open.clear()
        self._mapped_bytes = 0

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._file_of:
            raise InputError(
                f"model {self._model!r} has no tensor {name}; the folder may be incomplete or of "
                "another family"
            )
        file = self._file_of[name]
        if file not in self._headers:
            self._headers[file] = read_header(self._path(file))
        entry = self._headers[file].get(name)
        if entry is None:
            raise InputError(
                f"{file} of {self._model!r} should hold {name} by its index, but does not; copy it again"
            )
        if entry["dtype"] not in self._element_bytes:
            raise InputError(
                f"tensor {name} of {self._model!r} is {entry['dtype']}; expected one of "
                f"{', '.join(self._element_bytes)}"
            )
        return dict(entry)
