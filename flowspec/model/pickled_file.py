"""A `pytorch_model.bin`, which others wrote: the tensors that a draft head was published as, no more.

It is a zip archive of raw numbers and a pickle that says which tensor is where. A pickle is a program: it is
run with the few names that tensors need standing for functions of ours, which only note what they are given,
and refused where it has any other name.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.damage import ZIP_MAGIC, advice, read_head
from flowspec.model.safetensors_file import DTYPES
from flowspec.model.tensors import Extent

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
        return {name: _extent(path, tensor, entries, root) for name, tensor in found.items()}
    except Exception as error:  # noqa: BLE001 - a broken pickle is a broken program
        raise InputError(
            f"cannot read {path} as torch.save writes it ({first_line(error)}); copy it again"
        ) from None


def _extent(path: Path, tensor: Any, entries: Mapping[str, zipfile.ZipInfo], root: str) -> Extent:
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
