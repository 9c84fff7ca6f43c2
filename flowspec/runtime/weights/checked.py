"""Models in files of this device whose content is checked before it is used: by the head's digests, or by the
hub's own.

A tensor is hashed right before it is loaded, so that it comes from the disk once; its digest is kept for as
long as the file stays as it is (`digests.py`), and then the next start hashes nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from flowspec.core.protocol.device_messages import TensorEntry
from flowspec.core.protocol.limits import DIGEST_CHARS
from flowspec.errors import ClusterError, InputError
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.arithmetic.packed import Levels
from flowspec.model.files import ModelFiles
from flowspec.model.safetensors_file import SafetensorsTensors
from flowspec.model.tensors import Extent, Extents, Tensors, TensorsOver
from flowspec.runtime.weights.digests import OpenFiles

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""Files of a model: which one holds which tensor, or the only one."""
Step = Callable[[int], None]
"""Told how many bytes were hashed; what it raises ends the work."""


class CheckedFiles(ModelFiles):
    """A model here, each tensor checked before it is read. `folder` keeps digests (None: the user's cache
    folder).

    Between `begin` and `end` its files are open and tensors can be read. Names are those in the files.
    """

    def __init__(self, model: str, *, folder: Path | None, step: Step = lambda size: None) -> None:
        super().__init__(model, may_fetch=False)
        self.opened = OpenFiles(folder)
        self._step = step

    def tensors(self) -> Tensors:
        return _CheckedTensors(super().tensors(), self.check)

    def check(self, name: str) -> None:
        """Raises `ClusterError` for a tensor that is not what it has to be."""
        raise NotImplementedError

    def digest(self, extent: Extent) -> str:
        """The SHA-256 of these bytes; raises `InputError` where they cannot be read."""
        try:
            return self.opened.digest(extent, self._step)
        except OSError as error:
            raise InputError(f"model {self.model!r} cannot be read: {error}") from None

    def end(self) -> None:
        """What was read is loaded: closes the files, and keeps digests.

        Raises `ClusterError` if one of the files is not the one that was checked any more.
        """
        try:
            self.opened.save()
            if not self.opened.unchanged():
                raise ClusterError(f"the files of {self.model!r} changed while they were loaded; start again")
        except OSError as error:
            raise InputError(f"model {self.model!r} cannot be read: {error}") from None
        finally:
            self.opened.close()


class LocalModel(CheckedFiles):
    """A model in a folder or a GGUF file here. `entries` are the tensors of the slice as the head describes
    them."""

    def __init__(self, model: str, *, folder: Path | None = None, step: Step = lambda size: None) -> None:
        super().__init__(model, folder=folder, step=step)
        self.entries: dict[str, TensorEntry] = {}

    @functools.cached_property
    def _extents(self) -> Extents:
        return self.extents()

    def learn(self, entries: Iterable[TensorEntry]) -> None:
        """Takes the head's word for what the tensors are."""
        self.entries = {entry.name: entry for entry in entries}

    def check(self, name: str) -> None:
        extent, entry = self._extents.extent(name), self.entries.get(name)
        if entry is None or (extent.dtype, extent.shape) != (entry.dtype, entry.shape):
            raise self._differs(name, extent)
        if self.digest(extent) != entry.digest:
            raise self._differs(name, extent)

    def _differs(self, name: str, extent: Extent) -> ClusterError:
        return ClusterError(
            f"{name} in {extent.path.name} of {self.model!r} here is not what it is at the head, though the "
            "rest seems the same: "
            f"one of the two copies is damaged; compare `sha256sum {extent.path.name}` of both, and copy the "
            "right one again"
        )


class HubModel(CheckedFiles):
    """A model in the hub's cache: a file of weights has to have the hash that the hub names it by. Nothing is
    fetched."""

    def __init__(self, model: str, *, folder: Path | None = None, step: Step = lambda size: None) -> None:
        super().__init__(model, folder=folder, step=step)
        self._right: set[Path] = set()

    @property
    def has_index(self) -> bool:
        """Whether it is known here which tensors there are."""
        return self.find(INDEX) is not None or self.find(WHOLE) is not None

    def tensors(self) -> Tensors:
        """Those of the index; of a file that is not here yet none are known."""
        return super().tensors() if self.has_index else SafetensorsTensors(self.model, {}, self.path)

    def missing(self, names: Iterable[str]) -> list[str]:
        """The files of weights that hold these tensors and are not here."""
        file_of = self.file_map() if self.has_index else {}
        files = {file_of.get(name, WHOLE) for name in names} if file_of else {WHOLE}
        return sorted(file for file in files if self.find(file) is None)

    def check(self, name: str) -> None:
        path = self.path(self._file_of[name])
        if path in self._right:
            return
        blob, size = path.resolve().name, path.stat().st_size
        whole = Extent(path=path, offset=0, size_bytes=size, dtype="", shape=())
        found = self.digest(whole) if len(blob) == DIGEST_CHARS else self._digest_of_git(path, size)
        if found != blob:
            raise ClusterError(
                f"{path.name} of {self.model!r} in the hub's cache here is damaged; delete {path} and {blob}"
            )
        self._right.add(path)

    def _digest_of_git(self, path: Path, size: int) -> str:
        """The name of a file that a repository does not store apart, as git makes it; these are small."""
        whole = Extent(path=path, offset=0, size_bytes=size, dtype="", shape=())
        self.opened.read(whole, 0, 0)  # so that `end` looks whether it has changed
        found = hashlib.sha1(b"blob %d\0" % size)
        found.update(path.read_bytes())
        return found.hexdigest()

    @functools.cached_property
    def _file_of(self) -> dict[str, str]:
        return self.file_map()


class _CheckedTensors(TensorsOver):
    """Tensors of which each is checked before it is first read."""

    def __init__(self, tensors: Tensors, check: Callable[[str], None]) -> None:
        super().__init__(tensors)
        self._check = check
        self._checked: set[str] = set()

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        self._check_all(name)
        return super().load(name, shape)

    def rows(self, name: str, first: int, end: int) -> Numbers:
        self._check_all(name)
        return super().rows(name, first, end)

    def levels(self, name: str, first: int, end: int) -> Levels:
        self._check_all(name)
        return super().levels(name, first, end)

    def _check_all(self, name: str) -> None:
        for file in self.files_of(name):
            if file not in self._checked:
                self._check(file)
                self._checked.add(file)
