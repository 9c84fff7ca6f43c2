"""A `pytorch_model.bin`, which others wrote: the tensors that a draft head was published as, no more.

It is a zip archive of raw numbers and a pickle that says which tensor is where. A pickle is a program. So it
is read twice: first only its words are looked at, and any name beside the few that tensors need is refused;
then it is run, with these names standing for functions of ours, which only note what they are given. Of what
was noted arrays are made at last, each within its file.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.damage import instead, read_head
from flowspec.model.safetensors_file import DTYPES, mapped
from flowspec.model.tensors import Extent

PICKLE_BYTES_MAX = 1 << 20
"""A head of thirty tensors has some kilobytes."""
_STORAGES = {
    **{"BFloat16": "BF16", "Bool": "BOOL", "Char": "I8", "Double": "F64", "Float": "F32"},
    **{"Half": "F16", "Int": "I32", "Long": "I64", "Short": "I16", "Byte": "U8"},
}
"""Of torch's storages the dtypes, by the names that safetensors files have for them."""


class _Storage(NamedTuple):
    """So many numbers of a dtype: the archive's entry `data/KEY`."""

    dtype: Any
    key: Any


class _Tensor(NamedTuple):
    """Numbers of a storage, the first of them at `offset`."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


_CALLED: Mapping[str, Any] = {
    "collections OrderedDict": collections.OrderedDict,
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils _rebuild_tensor_v2": lambda *given: _Tensor(*given[:4]),
    **{f"torch {name}Storage": dtype for name, dtype in _STORAGES.items()},
}
"""What the names in a pickle stand for."""
_NOT_OF_TENSORS = frozenset(
    ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER")
)
_ZIP = b"PK\x03\x04"
"""How torch tells an archive from a pickle of older versions."""
_LOCAL = struct.Struct("<26xHH")
"""What is before an entry's content: at its end the lengths of a name and of something else, which follow."""


def pickled_words(path: Path) -> frozenset[str]:
    """Every text in the file's pickle, the tensors' names among them; nothing is run, and no number read.

    Raises `InputError` for another file, and for a pickle that names anything but tensors.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[frozenset[str], bytes, Mapping[str, zipfile.ZipInfo]]:
    """The words of a file's pickle, the pickle, and the entries beside it, by their names in its folder."""
    try:
        if not read_head(path).startswith(_ZIP):
            raise ValueError("it does not begin as one")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            # torch stores without packing, so what comes out of the archive is no more than its bytes.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("packed entries")
            # torch looks for ROOT/data.pkl without minding case, ROOT being the first entry's folder.
            pickles = [entry for entry in entries if entry.filename.lower().endswith(".pkl")]
            if [entry.filename for entry in pickles] != [f"{entries[0].filename.split('/')[0]}/data.pkl"]:
                names = ", ".join(entry.filename for entry in pickles)
                raise ValueError(f"the pickles {names!r:.80}, expected data.pkl alone")
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise ValueError("entries that are larger than the file")
            (entry,) = pickles
            if entry.file_size > PICKLE_BYTES_MAX:
                raise ValueError(f"a pickle of {entry.file_size} bytes")
            root, content = entry.filename.removesuffix("data.pkl"), archive.read(entry)
            beside = {entry.filename.removeprefix(root): entry for entry in entries}
            return _words(content, path), content, beside
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        is_zip = path.is_file() and read_head(path).startswith(b"PK")
        why = f" ({first_line(error)}); copy it again" if is_zip else instead(path, error)
        raise InputError(f"{path} is no zip archive of tensors as torch.save writes it{why}") from None


def _words(content: bytes, path: Path) -> frozenset[str]:
    """Every text in a pickle; raises `InputError` as `pickled_words`, and `ValueError` for what is none."""
    words = set()
    for operation, value, _ in pickletools.genops(content):
        name = operation.name
        if name == "GLOBAL" and value not in _CALLED:
            raise InputError(f"{path} names {value!r:.80}, which is no tensor; it is not opened")
        if name in _NOT_OF_TENSORS:
            raise InputError(
                f"{path} builds something by {name}, as no file of tensors does; it is not opened"
            )
        if isinstance(value, str):
            words.add(value)
    return frozenset(words)


def load_pickled(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a file by name, each over the mapped file; bfloat16 as uint16. Raises `InputError` as
    `pickled_words`, and for what is no table of tensors."""
    _, content, entries = _read(path)
    try:
        found = Unpickler(io.BytesIO(content)).load()
        is_table = isinstance(found, dict) and all(isinstance(name, str) for name in found)
        if is_table and all(isinstance(tensor, _Tensor) for tensor in found.values()):
            return {name: _array(path, tensor, entries) for name, tensor in found.items()}
    except Exception as error:  # noqa: BLE001 - a broken pickle is a broken program
        raise InputError(f"cannot read {path} ({first_line(error)}); copy it again") from None
    raise InputError(f"{path}: expected names and tensors, got something else; copy it again")


class Unpickler(pickle.Unpickler):
    """Knows no names but `_CALLED`."""

    def find_class(self, module: str, name: str) -> Any:
        return _CALLED[f"{module} {name}"]

    def persistent_load(self, given: Any) -> _Storage:
        kind, dtype, key, *_ = given
        if kind != "storage":
            raise ValueError(f"something kept elsewhere that is {kind!r:.40}")
        return _Storage(dtype, key)


def _array(path: Path, tensor: _Tensor, entries: Mapping[str, zipfile.ZipInfo]) -> npt.NDArray[Any]:
    """Raises `ValueError` and others for what no tensor is."""
    (dtype, key), offset, shape, strides = tensor
    if not all(type(each) is int and 0 <= each <= limits.ID_MAX for each in (offset, *shape, *strides)):
        raise ValueError(f"a shape {shape!r:.80} with strides {strides!r:.80}")
    entry, size = entries[f"data/{key}"], np.dtype(DTYPES[dtype]).itemsize
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        before = _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
    count = entry.file_size // size
    extent = Extent(
        path=path,
        offset=entry.header_offset + before,
        size_bytes=count * size,
        dtype=dtype,
        shape=(count,),
    )
    last = offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= count:
        raise ValueError(f"a tensor up to number {last} of {count}")
    numbers = mapped(extent)[offset:] if math.prod(shape) else np.empty(0, DTYPES[dtype])
    steps = [step * size for step in strides]
    return np.lib.stride_tricks.as_strided(numbers, shape, steps, writeable=False)
