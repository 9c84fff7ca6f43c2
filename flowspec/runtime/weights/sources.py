"""Where the tensors of a slice come from, in the order in which they are looked for: a folder here, the hub,
the head by way of the store; and of quantised matrices the store, which has them as they were rounded before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowspec.child_process import python_module, words
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.device_messages import TensorEntry
from flowspec.core.protocol.limits import DIGEST_CHARS, JSON_BYTES_MAX
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import ClusterError, InputError, PeerError
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.arithmetic.packed import Levels, Panels
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.config import MODEL_TYPES
from flowspec.model.gguf.file import GgufTensor
from flowspec.model.gguf.tensors import GgufTensors
from flowspec.model.hub import hub_cache
from flowspec.model.rounding import FORMAT, ROUNDINGS
from flowspec.model.tensors import Extent, Extents, Tensors, TensorsOver
from flowspec.model.weight_files import DTYPES, SafetensorsTensors, content_of, mapped, read_header
from flowspec.model.weights import Weight
from flowspec.plan.memory import mib
from flowspec.runtime.weights.store import DISK_SHARE, DISK_SPARED_BYTES, HashedFiles, WeightStore
from flowspec.runtime.weights.transfer import HeadChannel, Manifest, Pull

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""Files of a model: which one holds which tensor, or the only one."""
UNKEPT = "quantised weights are made again at the next start: %s"
log = logging.getLogger("flowspec.daemon")


class Source(ModelFiles):
    """A model in a folder or a GGUF file here, whose tensors have to be the head's: each is checked right
    before it is read, so that it comes from the disk once. Its digest is kept in `folder` (None: the user's
    cache folder) for as long as the file stays as it is. Names of tensors are those in the files.

    `entries` are the tensors of the slice, as the head describes them.
    """

    def __init__(self, model: str, channel: HeadChannel, folder: Path | None = None) -> None:
        super().__init__(model, may_fetch=False)
        self.entries: dict[str, TensorEntry] = {}
        self._channel, self._hashed = channel, HashedFiles(folder)
        self._right: set[str | Path] = set()

    def look(self, assign: Assign) -> None:
        """Takes the head's word for what the model computes, so that no config is built here. Raises
        `FlowSpecError` where there is no such model here, or by its fingerprint another than the head's."""
        if (found := self.fingerprint()) != assign.fingerprint:
            own, expected = found[:8], assign.fingerprint[:8]
            raise ClusterError(f"model {self.model!r} on this device ({own}) is not the head's ({expected})")
        self._learn_spec(assign)

    def _learn_spec(self, assign: Assign) -> None:
        layer_count = self.raw_config()["num_hidden_layers"]
        if assign.spec is None:
            raise ClusterError(f"the head did not say what {self.model!r} computes; expected Assign.spec")
        if layer_count != assign.layer_count:
            raise ClusterError(
                f"model {self.model!r} has {layer_count} layers, the head expects {assign.layer_count}"
            )
        self.spec = assign.spec

    def manifest(self) -> Manifest:
        """All of it but the tensors' values."""
        return Manifest(self.config_text(), self.gguf_architecture, frozenset(self._extents))

    def learn(self, entries: Iterable[TensorEntry]) -> None:
        """Takes the head's word for what the tensors are."""
        self.entries = {entry.name: entry for entry in entries}

    def entry(self, name: str) -> TensorEntry:
        """What a tensor is, by the head or by its file."""
        return self.entries[name] if name in self.entries else self._entry_here(name)

    def _entry_here(self, name: str) -> TensorEntry:
        with self._readable():
            return self._hashed.entry(name, self._extents.extent(name), lambda size: self.show_checking())

    def check(self, name: str) -> None:
        """Raises `ClusterError` for a tensor that is not what it has to be."""
        if name not in self._right:
            if self._entry_here(name) != self.entries.get(name):
                file = self._extents.extent(name).path.name
                raise ClusterError(
                    f"{name} in {file} of {self.model!r} here is not what it is at the head, though the rest "
                    f"seems the same: one of the two copies is damaged; compare `sha256sum {file}` of both, "
                    "and copy the right one again"
                )
            self._right.add(name)

    def tensors(self) -> Tensors:
        return _CheckedTensors(super().tensors(), self.check)

    def names_of(self, weights: Iterable[Weight]) -> set[str]:
        """The tensors that parameters are made of."""
        tensors = self.tensors()
        return {part for weight in weights for name in weight.tensors for part in tensors.files_of(name)}

    def fetch(self, names: set[str]) -> None:
        """Has the files that hold these tensors here, if they can be had file by file."""

    @contextlib.contextmanager
    def ready(self, names: set[str]) -> Iterator[int]:
        """These tensors can be read as long as this lasts; yields the bytes of them that the head sent.

        Raises `ClusterError` in the end where files have changed.
        """
        try:
            yield 0
        finally:
            with self._readable():
                self._hashed.save()
                if not self.is_unchanged():
                    text = f"the files of {self.model!r} changed while they were loaded; start again"
                    raise ClusterError(text)

    def is_unchanged(self) -> bool:
        """Whether its files are as they were when they were checked. Raises `OSError`."""
        return self._hashed.are_unchanged()

    def close(self) -> None:
        self._hashed.close()

    @functools.cached_property
    def _extents(self) -> Extents:
        return self.extents()

    def show_checking(self, share: float = 0.0) -> None:
        """Raises `ClusterError` when the head has let go."""
        self._channel.show("checking", share)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"model {self.model!r} cannot be read: {error}") from None


class _CheckedTensors(TensorsOver):
    """Tensors of which each is checked before it is read."""

    def __init__(self, tensors: Tensors, check: Callable[[str], None]) -> None:
        super().__init__(tensors)
        self._check = check

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        self._check_files(name)
        return super().load(name, shape)

    def rows(self, name: str, first: int, end: int) -> Numbers:
        self._check_files(name)
        return super().rows(name, first, end)

    def levels(self, name: str, first: int, end: int) -> Levels:
        self._check_files(name)
        return super().levels(name, first, end)

    def _check_files(self, name: str) -> None:
        for file in self.files_of(name):
            self._check(file)


class HubSource(Source):
    """A model in the hub's cache, whose files of weights have to have the hash that the hub names them by.

    What is not there is fetched, up to `limit_bytes` of weights (None: half of what is free; 0: nothing is).
    """

    def __init__(
        self, model: str, channel: HeadChannel, folder: Path | None, limit_bytes: int | None
    ) -> None:
        super().__init__(model, channel, folder)
        self._limit_bytes = limit_bytes

    def look(self, assign: Assign) -> None:
        """Has config and index here, unless all weights are in one file that is not here yet."""
        if self._limit_bytes != 0:
            try:
                is_known = self._has_index and self.fingerprint() == assign.fingerprint
            except InputError:
                is_known = False
            if not is_known:
                self._fetch(["config.json", INDEX], JSON_BYTES_MAX)
        super().look(assign)

    def fetch(self, names: set[str]) -> None:
        missing = self._missing(names)
        if missing and self._limit_bytes == 0:
            raise InputError(
                f"{missing[0]} of {self.model!r} is not in the hub's cache here, and this daemon fetches "
                "nothing from there"
            )
        if missing:
            log.info("fetching %s of %s from the hub", ", ".join(missing), self.model)
            self._fetch(missing, self._allowed_bytes())
            if missing := self._missing(names):
                raise InputError(f"{self.model!r} on the hub has no {missing[0]}")

    def _missing(self, names: Iterable[str]) -> list[str]:
        """The files of weights that hold these tensors and are not here."""
        file_of = self.file_map() if self._has_index else {}
        files = {file_of.get(name, WHOLE) for name in names} if file_of else {WHOLE}
        return sorted(file for file in files if self.find(file) is None)

    def tensors(self) -> Tensors:
        """Those of the index; of a file that is not here yet none are known."""
        return super().tensors() if self._has_index else SafetensorsTensors(self.model, {}, self.path)

    def check(self, name: str) -> None:
        """By its file as a whole."""
        path = self._extents.extent(name).path
        if path in self._right:
            return
        blob, size = path.resolve().name, path.stat().st_size
        with self._readable():
            whole = Extent(path=path, offset=0, size_bytes=size, dtype="", shape=())
            found = self._hashed.digest(whole, lambda size: self.show_checking())
            if len(blob) != DIGEST_CHARS:  # of a small file, which git names
                found = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
        if found != blob:
            raise ClusterError(
                f"{path.name} of {self.model!r} in the hub's cache here is damaged; delete {path} and {blob}"
            )
        self._right.add(path)

    @property
    def _has_index(self) -> bool:
        return self.find(INDEX) is not None or self.find(WHOLE) is not None

    def _allowed_bytes(self) -> int:
        folder = hub_cache()
        while not folder.exists():
            folder = folder.parent
        free = max(0, shutil.disk_usage(folder).free - DISK_SPARED_BYTES)
        return int(free * DISK_SHARE) if self._limit_bytes is None else min(free, self._limit_bytes)

    def _fetch(self, names: Sequence[str], bytes_max: int) -> None:
        """Has a child fetch those of these files that the hub has, unless they exceed so many bytes. A
        download that hangs cannot be ended from another thread, a process can; it ends with its parent, too.

        Raises `InputError` for what it says is wrong, `ClusterError` when the head has let go.
        """
        command = python_module("flowspec.model.hub", self.model, str(bytes_max), *names)
        quiet, answer = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}, dict[str, Any]()
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=quiet) as child:
            try:
                for word in words(child):
                    self._channel.show("receiving", 0.0)
                    answer |= word
            finally:
                child.kill()
        ended = f"cannot get {names[0]} of {self.model!r}: the download ended with {child.returncode}"
        if "bytes" not in answer:
            raise InputError(answer.get("error", ended))
        if answer["bytes"] > bytes_max:
            raise InputError(
                f"the files of {self.model!r} that hold these layers have {mib(answer['bytes'])}, but this "
                f"daemon may fetch {mib(bytes_max)} from the hub; give this device fewer layers, or its "
                "daemon more --cache-limit"
            )


class HeadSource(Source):
    """A model as the head describes it; tensors that the store has come from there, others are pulled into
    it. The config is held to the same rules as one that lies here: no code of a model is ever run.

    Of a GGUF file tensors are known, stored and unpacked as they are there.
    """

    def __init__(self, model: str, channel: HeadChannel, manifest: Manifest, store: WeightStore) -> None:
        self._manifest, self._store = manifest, store
        with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
            Path(folder, "config.json").write_text(manifest.config, "utf-8")
            super().__init__(folder, channel)
            self.model = model
            self._raw = super().raw_config()
        if self.gguf_architecture and self.gguf_architecture not in MODEL_TYPES:
            raise InputError(
                f"model {model!r} is a GGUF file of the architecture {self.gguf_architecture!r}, which this "
                "FlowSpec does not run"
            )

    @property
    def gguf_architecture(self) -> str:
        return self._manifest.gguf

    def raw_config(self) -> dict[str, Any]:
        return self._raw

    def look(self, assign: Assign) -> None:
        self._learn_spec(assign)

    def tensors(self) -> Tensors:
        names, kind = self._manifest.names, self.gguf_architecture
        if kind:
            return GgufTensors(self.model, kind, self._raw, self.spec, names, self.extent)
        raw = SafetensorsTensors(
            self.model,
            {name: name for name in names},  # each in a file of its own
            Path,
            self.dtypes,
            lambda file: {str(file): self.extent(str(file))},
        )
        return self.under_scheme(raw)

    def learn(self, entries: Iterable[TensorEntry]) -> None:
        """Raises `PeerError` for a tensor that no file could hold, or that is not loaded."""
        for entry in entries:
            self.entries[entry.name] = entry
            try:
                size = self.extent(entry.name).size_bytes
            except (InputError, ValueError):
                size = -1
            if size != entry.size_bytes:
                raise PeerError(
                    f"the head offers {entry.name} as {entry.dtype:.20} {list(entry.shape)} of "
                    f"{entry.size_bytes} bytes"
                )

    def entry(self, name: str) -> TensorEntry:
        """Raises `InputError` for a tensor that was not asked for, as the model has it not."""
        if name not in self.entries:
            raise InputError(
                f"model {self.model!r} has no tensor {name}; the head's folder may be incomplete or of "
                "another family"
            )
        return self.entries[name]

    def extent(self, name: str) -> Any:
        """Where a tensor is in the store. Raises `InputError` and `ValueError` for one that is not loaded."""
        entry = self.entry(name)
        path, dtype, shape = self._store.path(entry.digest), entry.dtype, entry.shape
        if self.gguf_architecture:
            return GgufTensor.at(name, shape, dtype, path)
        if dtype not in self.dtypes:
            raise ValueError(f"{name} is {dtype}")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        return Extent(path=path, offset=0, size_bytes=size, dtype=dtype, shape=shape)

    @contextlib.contextmanager
    def ready(self, names: set[str]) -> Iterator[int]:
        """Raises `ClusterError` when they do not fit on the disk, the head gives up, or what comes is damaged
        twice."""
        store, entries = self._store, [self.entries[name] for name in names if name in self.entries]
        needed = {entry.digest: entry.size_bytes for entry in entries}
        with store.reserve(needed):
            sizes = {store.path(digest): size for digest, size in needed.items()}
            right = store.check(sizes, self.show_checking)
            stored, total = mib(sum(sizes[path] for path in right)), mib(sum(sizes.values()))
            log.info("%s of %s of weights are stored in %s", stored, total, store.folder)
            missing = {path.name: size for path, size in sizes.items() if path not in right}
            yield Pull(self._channel, store, missing).run() if missing else 0


class RoundedMatrices:
    """The quantised matrices of one load of a slice: rounded once, kept packed in the store, in safetensors,
    and read from there the next time. What only they are made of is then neither read nor
    fetched.

    A file's key is the SHA-256 of all that its content follows from: the digests of the tensors that a matrix
    is joined of, how they are joined, the precision, and the version of the arithmetic. So a changed
    checkpoint has other keys, and neither the model's name nor the split counts.
    """

    def __init__(self, source: Source, matrices: Sequence[Weight], dtype: str, store: WeightStore) -> None:
        """Raises `InputError` when a file of the model cannot be read."""
        self._source, self._store = source, store
        self._is_kept = True
        self._found: dict[str, Path] = {}
        self._keys: dict[tuple[str, ...], str] = {}
        tensors = source.tensors()
        for number, weight in enumerate(matrices):
            source.show_checking(number / len(matrices))
            parts = [
                [part if isinstance(part, int) else [part.start, part.stop] for part in parts]
                for parts in weight.parts.values()
            ]
            made_of = [_identity(source, tensors, name) for name in weight.tensors]
            content = [FORMAT, dtype, ACTIVATIONS[dtype], list(weight.shape), parts, made_of]
            self._keys[weight.tensors] = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Finds what is stored and right, and keeps it there meanwhile."""
        found = self._store.made(self._keys.values())
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._store.reserve({key: size for key, (_, size) in found.items()}))
            except ClusterError as error:
                log.warning(UNKEPT, error)
                found, self._is_kept = {}, False
            right = self._store.check(dict(found.values()), self._source.show_checking)
            self._found = {key: path for key, (path, _) in found.items() if path in right}
            text = "%d of %d quantised matrices are stored in %s"
            log.info(text, len(self._found), len(self._keys), self._store.folder)
            yield

    def is_stored(self, weight: Weight) -> bool:
        return weight.is_packed and self._keys[weight.tensors] in self._found

    def __call__(self, weight: Weight, make: Callable[[], Panels]) -> Panels:
        key = self._keys[weight.tensors]
        if key in self._found:
            return mapped(read_header(self._found[key])["panels"])
        panels = make()
        if self._is_kept:
            try:
                if not self._source.is_unchanged():
                    raise ClusterError("the model's files change while they are loaded")
                self._store.keep(key, content_of({"panels": panels}))
            except (OSError, ClusterError) as error:
                log.warning(UNKEPT, error)
                self._is_kept = False
        return panels


def _identity(source: Source, tensors: Tensors, name: str) -> tuple[str, ...]:
    """Of a tensor: its digest and dtype, and what its values follow from beside its bytes: in GGUF files what
    was done to it, which its name and the config tell, in quantised checkpoints how, and of several that are
    one tensor which it is."""
    entries = [source.entry(part) for part in tensors.files_of(name)]
    own = itertools.chain.from_iterable((entry.digest, entry.dtype) for entry in entries)
    if source.gguf_architecture:
        return *own, source.gguf_architecture, json.dumps(source.raw_config(), sort_keys=True), name
    return (*own, name) if source.scheme is None else (*own, repr(source.scheme), name)


ReadyWeights = tuple[set[str], int, RoundedMatrices | None]


@contextlib.contextmanager
def ready_weights(
    source: Source, weights: Sequence[Weight], dtype: str, store: WeightStore | None
) -> Iterator[ReadyWeights]:
    """Has what parameters are made of ready to be loaded: yields which tensors are read for them, the bytes
    that the head sent, and where rounded matrices are kept.

    Without a store, or in a precision that is not rounded, none are kept. Raises as `Source.ready` does.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(source.close)
        rounded = None
        if store is not None and dtype in ROUNDINGS:
            packed = [weight for weight in weights if weight.is_packed]
            rounded = RoundedMatrices(source, packed, dtype, store)
            stack.enter_context(rounded.stored())
            weights = [weight for weight in weights if not rounded.is_stored(weight)]
        names = source.names_of(weights)
        received_bytes = stack.enter_context(source.ready(names))
        yield names, received_bytes, rounded
