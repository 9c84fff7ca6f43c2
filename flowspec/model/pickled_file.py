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


def pickled_words(path: Path) -> frozenset[str]:
    """Every text in the file's pickle, the tensors' names among them; nothing is run, and no number read.

    Raises `InputError` for another file, and for a pickle that names anything but tensors.
    """
    words = set()
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            # torch stores without packing, so what comes out of the archive is no more than its bytes.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("packed entries")
            (pickle,) = (entry for entry in entries if entry.filename.endswith("/data.pkl"))
            if pickle.file_size > PICKLE_BYTES_MAX:
                raise ValueError(f"a pickle of {pickle.file_size} bytes")
            for operation, value, _ in pickletools.genops(archive.read(pickle)):
                name = operation.name
                if name == "GLOBAL" and value not in _CALLED:
                    raise InputError(f"{path} names {value!r:.80}, which is no tensor; it is not opened")
                if name in ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
                    raise InputError(f"{path} names something by {name}, as no file of tensors does; "
                                     "it is not opened")  # fmt: skip
                if isinstance(value, str):
                    words.add(value)
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} is no zip archive of tensors as torch.save writes it ({first_line(error)}); copy "
            "it again"
        ) from None
    return frozenset(words)


def load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, each over the mapped file. Raises `InputError` as `pickled_words`, and
    for what is no table of tensors."""
    pickled_words(path)
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 - torch lets out whatever it meets in a broken file
        raise InputError(f"cannot read {path} ({first_line(error)}); copy it again") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise InputError(f"{path}: expected names and tensors, got something else; copy it again")
    return found
