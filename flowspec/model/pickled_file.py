"""A `pytorch_model.bin`, which others wrote: the tensors that a draft head was published as, no more.

It is a zip archive of raw numbers and a pickle that says which tensor is where. A pickle is a program. So it
is read twice: first only its words are looked at, and any name beside the few that tensors need is refused;
then torch's unpickler runs it (`weights_only`), which itself calls nothing that is not on its list. torch's
list alone would not bound what is built: it has `bytearray`, of any length.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec.errors import InputError, first_line
from flowspec.model.damage import instead, read_head

if TYPE_CHECKING:
    import torch

PICKLE_BYTES_MAX = 1 << 20
"""A head of thirty tensors has some kilobytes."""
_STORAGES = ("BFloat16", "Bool", "Char", "Double", "Float", "Half", "Int", "Long", "Short", "Byte")
_CALLED = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_parameter",
        "torch._utils _rebuild_tensor_v2",
        *(f"torch {name}Storage" for name in _STORAGES),
    }
)
_NOT_OF_TENSORS = frozenset(
    ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER")
)
_ZIP = b"PK\x03\x04"
"""How torch tells an archive from a pickle of older versions."""


def pickled_words(path: Path) -> frozenset[str]:
    """Every text in the file's pickle, the tensors' names among them; nothing is run, and no number read.

    Raises `InputError` for another file, and for a pickle that names anything but tensors.
    """
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
            (pickle,) = pickles
            if pickle.file_size > PICKLE_BYTES_MAX:
                raise ValueError(f"a pickle of {pickle.file_size} bytes")
            return _words(archive.read(pickle), path)
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        is_zip = path.is_file() and read_head(path).startswith(b"PK")
        why = f" ({first_line(error)}); copy it again" if is_zip else instead(path, error)
        raise InputError(f"{path} is no zip archive of tensors as torch.save writes it{why}") from None


def _words(pickle: bytes, path: Path) -> frozenset[str]:
    """Every text in a pickle; raises `InputError` as `pickled_words`, and `ValueError` for what is none."""
    words = set()
    for operation, value, _ in pickletools.genops(pickle):
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


def load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, each over the mapped file. Raises `InputError` as `pickled_words`, and
    for what is no table of tensors."""
    pickled_words(path)
    import torch

    try:
        # The bytes that torch finds, should its reader of archives see another pickle than Python's.
        _words(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"), path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - torch lets out whatever it meets in a broken file
        raise InputError(f"cannot read {path} ({first_line(error)}); copy it again") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise InputError(f"{path}: expected names and tensors, got something else; copy it again")
    return found
