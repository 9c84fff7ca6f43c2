"""Files of weights, which others wrote: safetensors, and a `pytorch_model.bin`, as draft heads are published.
Headers are bounded and held to the file's length, and tensors lie in the memory-mapped file.

A `pytorch_model.bin` is a zip archive of raw numbers and a pickle that says which tensor is where. A pickle
is a program: it is run with the few names that tensors need standing for functions of ours, which only note
what they are given, and refused where it has any other name.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.arithmetic.arrays import F32, Numbers
from flowspec.model.damage import ZIP_MAGIC, advice, instead, read_head
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
_BLOCK_BYTES, _EDGE_BYTES = 4096, 256


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
        found = {name: _extent_in_header(path, 8 + size, entry) for name, entry in header.items()}
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


def _extent_in_header(path: Path, start: int, entry: Any) -> Extent:
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


class SafetensorsTensors(Tensors):
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
        self.names = file_of
        self._headers: dict[str, dict[str, Extent]] = {}

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

    def extent(self, name: str) -> Extent:
        """Where a tensor lies; raises `InputError` where there is none, or of a dtype that is not loaded."""
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
            is_zero = partial(_is_zero, file.fileno())
            known = [(is_zero(each.offset, each.size_bytes), each) for each in tensors]
            for are_zeros, members in groupby(known, itemgetter(0)):
                run = [each for _, each in members]
                begin, end = run[0].offset, run[-1].offset + run[-1].size_bytes
                is_matrix = any(len(each.shape) > 1 for each in run)
                goes_on = run[-1] is tensors[-1] or is_zero(end, _EDGE_BYTES)
                is_begun = run[0] is not tensors[0] and is_zero(max(0, begin - _EDGE_BYTES), _EDGE_BYTES)
                if are_zeros and is_matrix and (goes_on or is_begun):
                    raise InputError(
                        f"{path} was not written to its end: {end - begin} bytes of weights from byte "
                        f"{begin} on are zeros, as a download leaves them that is cut off; fetch it again"
                    )


def _is_zero(descriptor: int, offset: int, size: int) -> bool:
    """Of the bytes that the file has there; a place beyond its end has none."""
    end, is_read = offset + size, False
    while offset < end and (block := os.pread(descriptor, min(_BLOCK_BYTES, end - offset), offset)):
        if block.strip(b"\0"):
            return False
        offset, is_read = offset + len(block), True
    return is_read


# ----------------------------------------------------------------------------- pytorch_model.bin

PICKLE_BYTES_MAX = 1 << 18
"""A head of thirty tensors has some kilobytes."""
_LOCAL = struct.Struct("<26xHH")
"""What is before an entry's content: at its end the lengths of a name and of something else, which follow."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """Numbers from `offset` on of a storage: a dtype, and the KEY of the archive's entry `data/KEY`."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


_CALLED: Mapping[str, Any] = {
    "collections OrderedDict": lambda: {},
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils _rebuild_tensor_v2": lambda *given: _Tensor(*given[:4]),
    **{"torch BFloat16Storage": "BF16", "torch BoolStorage": "BOOL", "torch ByteStorage": "U8"},
    **{"torch CharStorage": "I8", "torch DoubleStorage": "F64", "torch FloatStorage": "F32"},
    **{"torch HalfStorage": "F16", "torch IntStorage": "I32", "torch LongStorage": "I64"},
    "torch ShortStorage": "I16",
}
"""What the names in a pickle stand for; of storages dtypes, as safetensors files name them."""


class _Memo(dict[int, Any]):
    """Tuples of tuples that are named again and again would take for ever to compare: none can be."""

    def __setitem__(self, place: int, value: Any) -> None:
        super().__setitem__(place, object() if type(value) is tuple else value)


class Unpickler(pickle._Unpickler):
    """Knows no names but `_CALLED`, and makes nothing that is larger than the pickle: no file of tensors has
    copies of tables or sets of sets, and attributes of tables are left out. It is Python's own, for the one
    in C makes room for as many values as a file claims to have."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in (*pickle.DUP, *pickle.BYTEARRAY8, *pickle.FROZENSET)
    }
    dispatch[pickle.BUILD[0]] = lambda self: self.stack.pop()

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.memo = _Memo()

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in _CALLED:
            raise ValueError(f"it names {f'{module} {name}'!r:.80}, which is no tensor")
        return _CALLED[f"{module} {name}"]

    def persistent_load(self, given: Any) -> Any:
        kind, dtype, key, *_ = given
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise ValueError("it keeps something elsewhere that is no storage")
        return dtype, key


def read_pickled(path: Path) -> dict[str, Extent]:
    """Where each tensor of a file lies, as `read_header` of safetensors; no number is read. Raises
    `InputError` for another file, and for a pickle of anything else."""
    if not read_head(path).startswith(ZIP_MAGIC):  # as torch tells one from a pickle of older versions
        raise InputError(f"{path} is no zip archive, as torch.save writes it; {advice(path)}")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            # torch looks for ROOT/data.pkl without minding case, ROOT being the first entry's folder.
            pickles = [name for name in archive.namelist() if name.lower().endswith(".pkl")]
            root = f"{archive.namelist()[0].split('/')[0]}/"
            if pickles != [f"{root}data.pkl"]:
                raise ValueError("it has another pickle than data.pkl")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise ValueError("its entries are packed, which torch never does")
            if (size := entries[pickles[0]].file_size) > PICKLE_BYTES_MAX:
                raise ValueError(f"a pickle of {size} bytes")
            found = Unpickler(archive.read(pickles[0])).load()
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise ValueError("expected names and tensors, got something else")
        return {name: _extent_in_archive(path, tensor, entries, root) for name, tensor in found.items()}
    except Exception as error:  # noqa: BLE001 - a broken pickle is a broken program
        raise InputError(
            f"cannot read {path} as torch.save writes it ({first_line(error)}); copy it again"
        ) from None


def _extent_in_archive(path: Path, tensor: Any, entries: Mapping[str, zipfile.ZipInfo], root: str) -> Extent:
    """Raises `ValueError` and others for what is no tensor, and for one that does not lie in one piece."""
    if not isinstance(tensor, _Tensor):
        raise ValueError("expected names and tensors, got something else")
    (dtype, key), offset, shape = tensor.storage, tensor.offset, tuple(tensor.shape)
    if not all(type(each) is int and 0 <= each <= limits.ID_MAX for each in (offset, *shape)):
        raise ValueError("a tensor of no shape")
    entry, each = entries[f"{root}data/{key}"], DTYPES[dtype].itemsize
    for place, (length, step) in enumerate(zip(shape, tensor.strides, strict=True)):
        if length > 1 and step != math.prod(shape[place + 1 :]):
            raise ValueError("a tensor that does not lie in one piece; save it by .contiguous()")
    size_bytes = math.prod(shape) * each
    if offset * each + size_bytes > entry.file_size:
        raise ValueError("a tensor that ends behind its storage")
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        before = _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
    begin = entry.header_offset + before + offset * each
    return Extent(path=path, offset=begin, size_bytes=size_bytes, dtype=dtype, shape=shape)
