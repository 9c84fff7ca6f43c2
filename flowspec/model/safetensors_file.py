"""Safetensors files, which others wrote: headers, bounded and held to the file's length, and tensors by
memory map."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.arithmetic.arrays import F32, Numbers
from flowspec.model.damage import instead
from flowspec.model.tensors import Extent, Tensors

ELEMENT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Of the dtypes that are loaded, by the names that these files have for them."""
FLOATS8 = "F8_E4M3"
LEVEL_BYTES = {"I64": 8, "I32": 4, "I8": 1, "U8": 1, FLOATS8: 1}
"""Of those that quantised checkpoints have beside them."""
DTYPES: Mapping[str, npt.DTypeLike] = {
    **{"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "F16": np.float16, "BOOL": np.bool_},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, FLOATS8: np.uint8},
}
"""As numpy has them; of bfloat16, and of floats of 8 bits, their bits."""


def read_header(path: Path) -> dict[str, Extent]:
    """Where each tensor lies, of whatever dtype, as raw bytes, little-endian and row-major. Checks the file's
    length; raises `InputError`."""
    try:
        with path.open("rb") as file:
            begin = file.read(8)
            if len(begin) < 8:
                raise ValueError(f"{len(begin)} bytes")
            (size,) = struct.unpack("<Q", begin)
            if size > limits.TENSOR_HEADER_BYTES_MAX:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        if not all(
            isinstance(entry["dtype"], str) and _are_sizes(entry["shape"], limits.TENSOR_AXES_MAX)
            for entry in header.values()
        ):
            raise ValueError("a header of other content")
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        if not all(_are_sizes(both, 2) and len(both) == 2 for both in offsets.values()):
            raise ValueError("a header with other offsets")
        length = 8 + size + max((end for _, end in offsets.values()), default=0)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise InputError(f"{path} is not a safetensors file{instead(path, error)}") from None
    if path.stat().st_size != length:
        raise InputError(
            f"{path} is incomplete: expected {length} bytes, got {path.stat().st_size}; copy it again"
        )
    return {
        name: Extent(
            path=path,
            offset=8 + size + begin,
            size_bytes=end - begin,
            dtype=header[name]["dtype"],
            shape=tuple(header[name]["shape"]),
        )
        for name, (begin, end) in offsets.items()
    }


def _are_sizes(value: Any, count_max: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= count_max
        and all(type(size) is int and 0 <= size <= limits.ID_MAX for size in value)
    )


def mapped(extent: Extent) -> npt.NDArray[Any]:
    """The numbers of a tensor, over the memory-mapped file: read-only, of `DTYPES`. Raises `OSError` or
    `ValueError` where the file is not there any more, or shorter.

    What was read of them counts as this process's memory for as long as the array is there.
    """
    dtype = np.dtype(DTYPES[extent.dtype])
    if not extent.size_bytes:
        return np.empty(extent.shape, dtype)
    before = extent.offset % mmap.ALLOCATIONGRANULARITY
    with extent.path.open("rb") as file:
        pages = mmap.mmap(
            file.fileno(),
            before + extent.size_bytes,
            access=mmap.ACCESS_READ,
            offset=extent.offset - before,
        )
    numbers = np.frombuffer(pages, np.uint8, extent.size_bytes, before)
    if extent.offset % dtype.itemsize:
        numbers = numbers.copy()  # such numbers lie across words
    return numbers.view(dtype).reshape(extent.shape)


def load_mapped(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a file that FlowSpec wrote, by name, as `mapped`."""
    return {name: mapped(extent) for name, extent in read_header(path).items()}


def floats8(bits: npt.NDArray[np.uint8]) -> F32:
    """The numbers that floats of 8 bits (E4M3, without infinite ones) are."""
    return _FLOATS8[bits]


def _table8() -> F32:
    exponents, fractions = np.divmod(np.arange(128), 8)
    smallest = 2.0**-9
    found = np.where(exponents > 0, (8 + fractions) * smallest * 2.0 ** (exponents - 1), fractions * smallest)
    found[127] = np.nan
    return np.concatenate([found, -found]).astype(np.float32)


_FLOATS8 = _table8()


class RawTensors(Tensors):
    """Tensors that lie in files as raw bytes, each in its `extent`."""

    def extent(self, name: str) -> Extent:
        """Where a tensor lies; raises `InputError` where there is none, or of a dtype that is not loaded."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        return self.extent(name).shape

    def level_type(self, name: str) -> str:
        dtype = self.extent(name).dtype
        return dtype if dtype in LEVEL_BYTES else ""

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        """Over the memory-mapped file, as `mapped`."""
        self.check_shape(name, shape)
        try:
            return mapped(self.extent(name))
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {name} of {self.model!r}: {first_line(error)}; start again"
            ) from None


class SafetensorsTensors(RawTensors):
    """The tensors of a model's safetensors files, which are found by `path` when they are read."""

    def __init__(
        self,
        model: str,
        file_of: Mapping[str, str],
        path: Callable[[str], Path],
        element_bytes: Mapping[str, int] = ELEMENT_BYTES,
    ) -> None:
        """`file_of` says which file holds which tensor; `element_bytes` of each dtype that one may have."""
        self.model = model
        self._element_bytes = element_bytes
        self._file_of = file_of
        self._path = path
        self._headers: dict[str, dict[str, Extent]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def extent(self, name: str) -> Extent:
        if name not in self._file_of:
            raise InputError(
                f"model {self.model!r} has no tensor {name}; the folder may be incomplete or of "
                "another family"
            )
        file = self._file_of[name]
        if file not in self._headers:
            self._headers[file] = read_header(self._path(file))
        found = self._headers[file].get(name)
        if found is None:
            raise InputError(
                f"{file} of {self.model!r} should hold {name} by its index, but does not; copy it again"
            )
        if found.dtype not in self._element_bytes:
            raise InputError(
                f"tensor {name} of {self.model!r} is {found.dtype}; expected one of "
                f"{', '.join(self._element_bytes)}"
            )
        size_bytes = math.prod(found.shape) * self._element_bytes[found.dtype]
        if found.size_bytes != size_bytes:
            raise InputError(
                f"{found.path}: {name}: expected {size_bytes} bytes by its shape, got {found.size_bytes} by "
                "its offsets; copy the file again"
            )
        return found
