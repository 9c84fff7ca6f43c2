"""Quantised matrices in the daemon's store: rounded once, kept as levels and scales in safetensors, found
again by what they were made of.

A file's key is the SHA-256 of all that its content follows from: the digests of the tensors that the matrix
is joined of, how they are joined, the precision, and the version of the arithmetic. So a changed checkpoint
has other keys, and neither the model's name nor the split counts. Tensors that nobody needs beside a stored
matrix are neither read nor fetched from the head.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import ModelFiles
from flowspec.model.rounding import FORMAT, ROUNDINGS, Rounded
from flowspec.model.safetensors_file import content_of, mapped, read_header
from flowspec.model.weights import Weight, stack_bytes
from flowspec.runtime.weights.checked import CheckedFiles, LocalModel
from flowspec.runtime.weights.digests import OpenFiles
from flowspec.runtime.weights.receive import HeadChannel, fetched
from flowspec.runtime.weights.store import WeightStore
from flowspec.runtime.weights.stored import StoredModel

log = logging.getLogger("flowspec.daemon")

HEADER_BYTES = 1 << 10
"""A file's header is smaller; what follows it is no larger than the packed matrix."""
Tell = Callable[[str, float], None]
"""Progress: what is being done, and the share that is done."""
Identity = tuple[str, ...]
"""Of a tensor: its digest, its dtype, and what else its values follow from."""


class StoredRounded:
    """Rounded matrices for one load of a slice in precision `dtype`; `matrices` are the parameters that are
    packed.

    The model's own files are read through `opened`. `keys` holds a file's key by the names of a matrix's
    tensors. Raises `InputError` when a file of the model cannot be read.
    """

    def __init__(
        self,
        files: ModelFiles,
        matrices: Iterable[Weight],
        dtype: str,
        store: WeightStore,
        opened: OpenFiles,
        tell: Tell,
    ) -> None:
        self._store = store
        self._tell = tell
        self._opened = opened
        self._found: dict[str, Path] = {}
        self._has_room = False
        matrices = list(matrices)
        sources = sorted({name for weight in matrices for name in weight.tensors})
        if isinstance(files, StoredModel | LocalModel):
            self._identities = self._by_the_head(files, sources)
        else:
            self._identities = self._identify(files, sources)
        self.keys = {weight.tensors: self._key(weight, dtype) for weight in matrices}
        self._sizes = {
            self.keys[weight.tensors]: stack_bytes(weight.shape, dtype) + HEADER_BYTES for weight in matrices
        }

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Finds what is stored and right, and keeps it there meanwhile."""
        found = self._store.made(self.keys.values())
        sizes = {key: size for key, (_, size) in found.items()}
        total, done = sum(sizes.values()), 0

        def step(size: int) -> None:
            nonlocal done
            done += size
            self._tell("checking", min(1.0, done / total))

        with contextlib.ExitStack() as stack:
            if self._reserved(stack, sizes):
                self._found = {
                    key: path
                    for key, (path, size) in found.items()
                    if self._store.check_made(path, size, step)
                }
                if len(self._found) < len(found):
                    damaged = len(found) - len(self._found)
                    log.warning(
                        "%d stored matrices in %s were damaged; they are made again",
                        damaged,
                        self._store.folder,
                    )
                log.info(
                    "%d of %d quantised matrices are stored in %s",
                    len(self._found),
                    len(self.keys),
                    self._store.folder,
                )
            yield

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Has room for those that are not stored, if there is any."""
        missing = {key: size for key, size in self._sizes.items() if key not in self._found}
        with contextlib.ExitStack() as stack:
            self._has_room = self._reserved(stack, missing)
            yield
        self._has_room = False

    def _reserved(self, stack: contextlib.ExitStack, sizes: Mapping[str, int]) -> bool:
        """Whether the store has room for these files, which it then keeps until the end of `stack`."""
        try:
            stack.enter_context(self._store.reserve(sizes))
        except ClusterError as error:
            log.warning("quantised weights are made again at the next start: %s", error)
            return False
        return True

    def is_stored(self, weight: Weight) -> bool:
        return self.keys[weight.tensors] in self._found

    def __call__(self, weight: Weight, make: Callable[[], Rounded]) -> Rounded:
        path = self._found.get(self.keys[weight.tensors])
        if path is not None:
            return {name: mapped(extent) for name, extent in read_header(path).items()}
        rounded = make()
        if self._has_room:
            self._keep(weight, rounded)
        return rounded

    def _keep(self, weight: Weight, rounded: Rounded) -> None:
        try:
            if self._opened.unchanged():
                self._store.keep_made(self.keys[weight.tensors], content_of(rounded))
                return
            log.warning("the model's files change while they are loaded; what is made of them is not kept")
        except (OSError, ClusterError) as error:
            log.warning("quantised weights are not kept: %s", error)
        self._has_room = False

    def _by_the_head(self, model: StoredModel | LocalModel, names: Sequence[str]) -> dict[str, Identity]:
        tensors, entries = model.tensors(), model.entries
        found: dict[str, Identity] = {}
        for name in names:
            parts = tensors.files_of(name)
            if all(part in entries for part in parts):
                of_parts = [(entries[part].digest, entries[part].dtype) for part in parts]
                found[name] = (*itertools.chain(*of_parts), *_how(model, name))
        return found

    def _identify(self, files: ModelFiles, names: Sequence[str]) -> dict[str, Identity]:
        """Of tensors in files here; hashed, unless that was done before and the file has not changed."""
        tensors, extents = files.tensors(), files.extents()
        found: dict[str, Identity] = {}
        try:
            for number, name in enumerate(names):
                self._tell("checking", number / len(names))
                parts = [extents.extent(part) for part in tensors.files_of(name)]
                of_parts = [(self._opened.digest(part), part.dtype) for part in parts]
                found[name] = (*itertools.chain(*of_parts), *_how(files, name))
        except OSError as error:
            raise InputError(f"model {files.model!r} cannot be read: {error}") from None
        self._opened.save()
        return found

    def _key(self, weight: Weight, dtype: str) -> str:
        parts = [
            [part if isinstance(part, int) else [part.start, part.stop] for part in parts]
            for parts in weight.parts.values()
        ]
        identities = [self._identities.get(name) for name in weight.tensors]
        content = [FORMAT, dtype, ACTIVATIONS[dtype], list(weight.shape), parts, identities]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _how(files: ModelFiles, name: str) -> Identity:
    """What the values of a tensor follow from beside its bytes: in GGUF files what was done to it, which its
    name and the config tell, in quantised checkpoints how, and of several that are one tensor which it is."""
    if files.gguf_architecture:
        return (files.gguf_architecture, json.dumps(files.raw_config(), sort_keys=True), name)
    return (name,) if files.scheme is None else (repr(files.scheme), name)


@contextlib.contextmanager
def ready_weights(
    files: ModelFiles, weights: Sequence[Weight], dtype: str, store: WeightStore | None, channel: HeadChannel
) -> Iterator[tuple[int, StoredRounded | None]]:
    """Has what a slice is made of ready to be loaded: yields the bytes that the head sent for it, and where
    rounded matrices are kept.

    Without a store, or in a precision that is not rounded, none are kept. Raises `ClusterError` as `fetched`
    does.
    """
    with contextlib.ExitStack() as stack:
        kept = None
        if store is not None and dtype in ROUNDINGS:
            own = stack.enter_context(contextlib.closing(OpenFiles(store.folder)))
            opened = files.opened if isinstance(files, CheckedFiles) else own
            packed = [weight for weight in weights if weight.is_packed]
            kept = StoredRounded(files, packed, dtype, store, opened, channel.tell)
            stack.enter_context(kept.checked())
            weights = [weight for weight in weights if not weight.is_packed or not kept.is_stored(weight)]
        received_bytes = 0
        if isinstance(files, StoredModel):
            spared = files.entries.keys() - in_files(files, weights)
            received_bytes = stack.enter_context(fetched(files, channel, spared))
        if kept is not None:
            stack.enter_context(kept.room())
        yield received_bytes, kept


def in_files(files: ModelFiles, weights: Iterable[Weight]) -> set[str]:
    """The tensors that parameters are made of, by their names in the files."""
    tensors = files.tensors()
    return {part for weight in weights for name in weight.tensors for part in tensors.files_of(name)}
