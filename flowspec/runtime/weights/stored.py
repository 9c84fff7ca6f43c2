"""A model as a daemon knows it from its head: the config that came, and tensors in the store. Loads like one
from files."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flowspec.core.protocol.device_messages import ModelOffer, TensorEntry
from flowspec.errors import InputError, PeerError
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.config import MODEL_TYPES
from flowspec.model.gguf.file import GgufTensor
from flowspec.model.gguf.tensors import GgufTensors
from flowspec.model.safetensors_file import DTYPES, RawTensors
from flowspec.model.tensors import Extent, Tensors
from flowspec.runtime.weights.store import WeightStore


class StoredModel(ModelFiles):
    """`model` is its name at the head. The config is held to the same rules as one that lies here: no code of
    a model is ever run.

    Of a GGUF file tensors are known, stored and unpacked as they are there.
    """

    def __init__(self, model: str, offer: ModelOffer, names: Iterable[str], store: WeightStore) -> None:
        self.store = store
        self.names = frozenset(names)
        self.entries: dict[str, TensorEntry] = {}
        self._architecture = offer.gguf
        self._text, self._config = offer.config, None
        with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
            super().__init__(self._written(folder), may_fetch=False)
            self.model = model
            self.raw = super().raw_config()
        if self._architecture and self._architecture not in MODEL_TYPES:
            raise InputError(
                f"model {model!r} is a GGUF file of the architecture {self._architecture!r}, which this "
                "FlowSpec does not run"
            )

    @property
    def gguf_architecture(self) -> str:
        return self._architecture

    def raw_config(self) -> dict[str, Any]:
        return self.raw

    def config(self) -> Any:
        """Built when it is asked for, which nobody does where the head has said what the model computes."""
        if self._config is None:
            with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
                self.folder = Path(self._written(folder))
                self._config = super().config()
        return self._config

    def _written(self, folder: str) -> str:
        (Path(folder) / "config.json").write_text(self._text, "utf-8")
        return folder

    def tensors(self) -> Tensors:
        if not self._architecture:
            return self.under_scheme(StoredTensors(self))
        return GgufTensors(self.model, self._architecture, self.raw, self.spec, self.names, self._packed)

    def add(self, entry: TensorEntry) -> None:
        """Learns what a tensor is; raises `PeerError` for one that no file could hold, or that FlowSpec does
        not load."""
        if entry.size_bytes != (self._packed_bytes(entry) if self._architecture else self._bytes(entry)):
            raise PeerError(
                f"the head offers {entry.name} as {entry.dtype:.20} {list(entry.shape)} of "
                f"{entry.size_bytes} bytes"
            )
        self.entries[entry.name] = entry

    def entry(self, name: str) -> TensorEntry:
        """What a tensor is; raises `InputError` for one that was not asked for, as the model has it not."""
        found = self.entries.get(name)
        if found is None:
            raise InputError(
                f"model {self.model!r} has no tensor {name}; the head's folder may be incomplete or of "
                "another family"
            )
        return found

    def _bytes(self, entry: TensorEntry) -> int | None:
        """The bytes that a tensor of this dtype and shape has in a safetensors file; None for dtypes that are
        not loaded."""
        is_known = entry.dtype in self.dtypes
        return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize if is_known else None

    def _packed(self, name: str) -> GgufTensor:
        return self._packed_of(self.entry(name))

    def _packed_of(self, entry: TensorEntry) -> GgufTensor:
        return GgufTensor.at(entry.name, entry.shape, entry.dtype, self.store.path(entry.digest))

    def _packed_bytes(self, entry: TensorEntry) -> int | None:
        try:
            return self._packed_of(entry).size_bytes
        except (InputError, ValueError):
            return None


class StoredTensors(RawTensors):
    """The tensors of a `StoredModel`: names are known of all, sizes of those that were asked for, contents of
    those that came."""

    def __init__(self, model: StoredModel) -> None:
        self.model = model.model
        self._stored = model

    def __contains__(self, name: str) -> bool:
        return name in self._stored.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.names)

    def extent(self, name: str) -> Extent:
        entry = self._stored.entry(name)
        return Extent(
            path=self._stored.store.path(entry.digest),
            offset=0,
            size_bytes=entry.size_bytes,
            dtype=entry.dtype,
            shape=entry.shape,
        )
