"""Safetensors files, which others wrote: headers, bounded and held to the file's length, and tensors by
memory map."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.arithmetic.arrays import F32, Numbers
from flowspec.model.damage import instead
from flowspec.model.tensors import Extent, Tensors

NUMBERS = ("F64", "F32", "BF16", "F16")
"""The dtypes that are loaded, by the names that these files have for them."""
LEVELS = ("I64", "I32", "I8", "U8", "F8_E4M3")
"""Those that quantised checkpoints have beside them."""
DTYPES: Mapping[str, np.dtype[Any]] = {
    **{"F64": np.dtype("f8"), "F32": np.dtype("f4"), "BF16": np.dtype("u2"), "F16": np.dtype("f2")},
    **{"I64": np.dtype("i8"), "I32": np.dtype("i4"), "I16": np.dtype("i2"), "I8": np.dtype("i1")},
    **{"U8": np.dtype("u1"), "F8_E4M3": np.dtype("u1"), "BOOL": np.dtype("?")},
}
"""As numpy has them; of bfloat16, and of floats of 8 bits, their bits."""
_BITS = np.arange(256, dtype=np.uint16)
_AS_FLOAT16 = ((_BITS & 128) << 8 | (_BITS & 127) << 7).view(np.float16)
"""Of the same fractions as floats of 8 bits, whose exponents count from a place 8 further up."""
FLOATS8: F32 = np.where(_BITS & 127 == 127, np.float32(np.nan), _AS_FLOAT16.astype(np.float32) * 256)
"""The numbers that floats of 8 bits (E4M3, without infinite ones) are, by their bits."""


def read_header(path: Path) -> dict[str, Extent]:
    """Where each tensor lies, of whatever dtype, as raw bytes, little-endian and row-major. Checks the file's
    length; raises `InputError`."""
    try:
        with path.open("rb") as file:
            begin = file.read(8)
            size = int.from_bytes(begin, "little")
            if len(begin) < 8 or size > limits.TENSOR_HEADER_BYTES_MAX:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        found = {name: _extent(path, 8 + size, entry) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a safetensors file{instead(path, error)}") from None
    length = max((each.offset + each.size_bytes for each in found.values()), default=8 + size)
    if (has := path.stat().st_size) != length:
        raise InputError(f"{path} is incomplete: expected {length} bytes, got {has}; copy it again")
    return found


def content_of(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """A file of numpy's arrays, as the format has them: https://huggingface.co/docs/safetensors."""
    names = {dtype: name for name, dtype in DTYPES.items() if not name.startswith(("BF", "F8"))}
    header: dict[str, Any] = {}
    parts, end = [], 0
    for name, x in tensors.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": names[x.dtype], "shape": x.shape, "data_offsets": (begin, end)}
        parts.append(np.ascontiguousarray(x).tobytes())
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)  # so that numbers are aligned
    return b"".join((len(told).to_bytes(8, "little"), told, *parts))


def _extent(path: Path, start: int, entry: Any) -> Extent:
    """Raises `ValueError` and others for what describes no tensor."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = (begin, end, *shape)
    if not all(type(size) is int and 0 <= size <= limits.ID_MAX for size in sizes) or begin > end:
        raise ValueError("a header with other numbers")
    if not isinstance(dtype, str) or len(shape) > limits.TENSOR_AXES_MAX:
        raise ValueError("a header of other content")
    if dtype in DTYPES and end - begin != (size := math.prod(shape) * DTYPES[dtype].itemsize):
        raise ValueError(f"a tensor of {end - begin} bytes that has {size} by its shape")
    return Extent(path=path, offset=start + begin, size_bytes=end - begin, dtype=dtype, shape=tuple(shape))


def mapped(extent: Extent) -> npt.NDArray[Any]:
    """The numbers of a tensor, over the memory-mapped file: read-only, of `DTYPES`. Raises `OSError` or
    `ValueError` where the file is not there any more, or shorter.

    What was read of them counts as this process's memory for as long as the array is there.
    """
    dtype = DTYPES[extent.dtype]
    if not extent.size_bytes:
        return np.empty(extent.shape, dtype)
    numbers = np.memmap(extent.path, dtype, "r", extent.offset, extent.shape).view(np.ndarray)
    return numbers.copy() if extent.offset % dtype.itemsize else numbers  # such numbers lie across words


class RawTensors(Tensors):
    """Tensors that lie in files as raw bytes, each in its `extent`."""

    def extent(self, name: str) -> Extent:
        """Where a tensor lies; raises `InputError` where there is none, or of a dtype that is not loaded."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        return self.extent(name).shape

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
    """The tensors of a model's safetensors files, which are found by `path` when they are read.

    `file_of` says which file holds which tensor; each has one of the `dtypes`. `read` is for files of another
    kind.
    """

    def __init__(
        self,
        model: str,
        file_of: Mapping[str, str],
        path: Callable[[str], Path],
        dtypes: Collection[str] = NUMBERS,
        read: Callable[[Path], dict[str, Extent]] = read_header,
    ) -> None:
        self.model, self._file_of, self._path, self._dtypes, self._read = model, file_of, path, dtypes, read
        self._headers: dict[str, dict[str, Extent]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def extent(self, name: str) -> Extent:
        file = self._file_of.get(name, "")
        if file and file not in self._headers:
            self._headers[file] = self._read(self._path(file))
        found = self._headers.get(file, {}).get(name)
        if found is None:
            why = "the folder may be incomplete or of another family"
            why = f"{file} should hold it by the index; copy it again" if file else why
            raise InputError(f"model {self.model!r} has no tensor {name}; {why}")
        if found.dtype not in self._dtypes:
            raise InputError(
                f"tensor {name} of {self.model!r} is {found.dtype}; expected one of {', '.join(self._dtypes)}"
            )
        return found
