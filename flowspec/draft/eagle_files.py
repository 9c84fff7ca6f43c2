"""The tensors of an EAGLE head, whoever published it: which files hold them, and what FlowSpec calls them.

Told from other networks by the names of tensors, for a head's config often looks like a model's.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import DTYPES, narrowed
from flowspec.model.files import ModelFiles
from flowspec.model.pickled_file import read_pickled
from flowspec.model.safetensors_file import LEVELS, NUMBERS, SafetensorsTensors, read_header

LAYERS_MAX = 4
"""Of a head: of those published most have one, some two, and four those that guess all at once."""
PICKLED = "pytorch_model.bin"
_RENAMED = (
    (r"midlayer\.", "layers.0."),  # SafeAILab's EAGLE-3, SpecForge and AngelSlim, which have one layer
    # Older names of EAGLE-3.1 (SGLang's `llama_eagle3.py` reads both).
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
)
"""What publishers call parts of the network, and what is said here."""
_PARALLEL = re.compile(r"mask_hidden|parallel_draft_heads\.")
_BLOCKS = re.compile(r"hidden_norm\.weight|markov_head\.|confidence_head\.")
"""Only drafters of whole blocks (DFlash, DSpark) have these beside their layers."""


def plain_name(published: str) -> str:
    """The name of a tensor in the one spelling that is used here."""
    for pattern, name in _RENAMED:
        published = re.sub(f"^{pattern}", name, published)
    return published


def kind_of(published: Collection[str]) -> str | None:
    """`eagle`, `eagle3`, or None for any other network."""
    names = {plain_name(name) for name in published}
    if not any(name.startswith("layers.0.") for name in names) or any(map(_BLOCKS.match, names)):
        return None
    if "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in published):
        return "eagle3"
    return "eagle" if "fc.weight" in names else None


def is_parallel(published: Collection[str]) -> bool:
    """Whether a head guesses several tokens at once (P-EAGLE, ModelOpt's parallel heads)."""
    return any(map(_PARALLEL.match, published))


def is_eagle(files: ModelFiles) -> bool:
    """Whether a folder holds an EAGLE head and not a model. No weight is read."""
    if files.gguf is not None:
        return False
    layer_count = files.raw_config().get("num_hidden_layers")
    return type(layer_count) is int and layer_count <= LAYERS_MAX and kind_of(_published(files)) is not None


def _published(files: ModelFiles) -> Collection[str]:
    path = _pickled(files)
    return files.file_map() if path is None else read_pickled(path)


def _pickled(files: ModelFiles) -> Path | None:
    """The file of a head that has no safetensors; None where it has."""
    if any(files.find(name) for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    return files.find(PICKLED)


class HeadTensors:
    """A head's tensors by the names that are used here, mapped and read when asked for."""

    def __init__(self, files: ModelFiles) -> None:
        self.model = files.model
        self._files = files
        path = _pickled(files)
        read = read_header if path is None else read_pickled
        self._file_of = files.file_map() if path is None else dict.fromkeys(read_pickled(path), PICKLED)
        dtypes = (*NUMBERS, *LEVELS, "BOOL")  # as `t2d` is
        self._opened = SafetensorsTensors(files.model, self._file_of, files.path, dtypes, read)
        self._published: dict[str, str] = {}
        for published in self._file_of:
            name = plain_name(published)
            if name in self._published:
                raise InputError(
                    f"EAGLE head {self.model!r} has both {published} and {self._published[name]}, which are "
                    "one tensor; expected one of them"
                )
            self._published[name] = published
        self.names = frozenset(self._published)
        self.kind = kind_of(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def published(self, name: str) -> str:
        """What the files call a tensor, or would call it."""
        is_single = any(each.startswith("midlayer.") for each in self._file_of)
        return self._published.get(name, name.replace("layers.0.", "midlayer.") if is_single else name)

    def shape(self, name: str) -> tuple[int, ...]:
        """As its file says; raises `InputError` if the tensor is missing."""
        return self._opened.shape(self._known(name))

    def load(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A tensor over the mapped file, to be copied; raises `InputError` if it is missing or of another
        shape."""
        published = self._known(name)
        if self.shape(name) != shape:
            raise InputError(
                f"tensor {self.published(name)} of EAGLE head {self.model!r}: expected shape "
                f"{list(shape)} by config.json, got {list(self.shape(name))}"
            )
        return self._opened.load(published, shape)

    def copy_into(self, name: str, array: npt.NDArray[Any]) -> None:
        """A tensor of numbers, in the dtype of `array`."""
        found = self.load(name, array.shape)
        if found.dtype.kind != "f" and found.dtype != DTYPES["bfloat16"]:
            raise InputError(
                f"tensor {self.published(name)} of EAGLE head {self.model!r} is {found.dtype}; expected "
                "float32, bfloat16 or float16"
            )
        kind = next(kind for kind, dtype in DTYPES.items() if dtype == array.dtype)
        np.copyto(array, narrowed(found, kind))

    def _known(self, name: str) -> str:
        published = self.published(name)
        if name not in self.names:
            raise InputError(
                f"EAGLE head {self.model!r} has no tensor {published}; expected all of a published layout"
            )
        return published
