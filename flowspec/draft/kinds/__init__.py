"""The kinds of drafters: the one list of them, and from what a user calls a drafter to the drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowspec.core.protocol.cluster_messages import Drafting
from flowspec.draft.kinds.assistant import Assistant
from flowspec.draft.kinds.base import FileKind, Kind, WordKind
from flowspec.draft.kinds.block import Block
from flowspec.draft.kinds.eagle import SKETCH, Eagle
from flowspec.draft.kinds.language import LanguageKind
from flowspec.draft.kinds.mtp import Mtp
from flowspec.draft.kinds.ngram import Ngram
from flowspec.draft.kinds.none import Nothing
from flowspec.draft.kinds.suffix import Suffix
from flowspec.draft.protocol import Drafter
from flowspec.errors import InputError, meant
from flowspec.model.files import BUNDLED, TOYS, ModelFiles, bundled_folder, bundled_models
from flowspec.plan import sites
from flowspec.plan.shape import SHAPES, ModelShape

if TYPE_CHECKING:
    from flowspec.model.slice import Slice

BY_WORD: Sequence[type[WordKind]] = (Ngram, Suffix, Mtp, Nothing)
BY_FILES: Sequence[type[FileKind]] = (Assistant, Block, Eagle, LanguageKind)
"""The first that files are of; the last takes whatever is left."""
ALL: Sequence[type[Kind]] = (*BY_WORD, *BY_FILES)
WORDS = tuple(kind.word for kind in BY_WORD)
WITHOUT_TENSORS = tuple(kind.word for kind in BY_WORD if not kind.has_tensors)
"""Drafters that need no device."""
SHARING = tuple(kind.word for kind in BY_WORD if kind.shares_texts)
"""Those by which one user's texts tell in the time of another's answers."""
NONE = Nothing.word
FALLBACK = Ngram.word
"""What goes with every target."""


def find_drafter(name: str, *, may_fetch: bool = True) -> Kind:
    """What a user's name for a drafter means: a word, `bundled` or another bundled model, or the
    folder or hub id of files, which are fetched only if they `may_fetch`; raises `InputError` for one that
    means nothing."""
    for word in BY_WORD:
        if word.word == name:
            return word(name)
    files = _files(name, may_fetch=may_fetch)
    return next(kind(name, files) for kind in BY_FILES if kind.is_in(files))


def of_layout(layout: str) -> type[Kind] | None:
    """The kind that runs what is published in a layout; None where none does."""
    return next((kind for kind in ALL if layout in kind.layouts), None)


def check_drafter(name: str, *, may_fetch: bool = True) -> None:
    """Raises `InputError` for a name that means nothing, before anything is started; `Kind.open` checks the
    rest."""
    if name in WORDS:
        return
    files = _files(name, may_fetch=may_fetch)
    try:
        if not Assistant.is_in(files):
            files.raw_config()
    except InputError as error:
        raise InputError(f"--drafter: {error}") from None


def open_drafter(
    name: str,
    target: ModelFiles,
    dtype: str,
    device: str | None = None,
    *,
    context: int,
    coupled: bool = True,
) -> Drafter | None:
    """The drafter of a name, loaded; see `Kind.open`."""
    return find_drafter(name).open(target, dtype, device, context=context, coupled=coupled)


def drafter_of(model: Slice, told: Drafting, context: int) -> Drafter:
    """The drafter on a device of its own, over the model that was loaded whole there.

    No message names its kind: there is one that has a `Kind.model_for_device`.
    """
    return LanguageKind.over(model, told, context)


def is_sketch(name: str) -> bool:
    """Whether a name is of a drafter that needs no files to be planned with: an EAGLE head, or a shape."""
    if name == SKETCH:
        return True
    has_files = name in (*WORDS, BUNDLED, *bundled_models()) or os.path.isdir(name) or "/" in name
    return not has_files and name in SHAPES


def sketched(name: str, target: ModelShape) -> sites.PlannedDrafter:
    """What the planner reckons of a drafter that is named by a shape; raises `InputError` for a name that
    means nothing."""
    return next(found for kind in ALL if (found := kind.sketched(name, target)) is not None)


def model_name(name: str) -> str:
    """What `ModelFiles` calls a drafter: `bundled` is the target's name there."""
    if name != BUNDLED:
        return name
    return str(bundled_folder("draft")) if os.path.isdir("draft") else "draft"


def _files(name: str, *, may_fetch: bool) -> ModelFiles:
    try:
        return ModelFiles(model_name(name), may_fetch=may_fetch)
    except InputError:
        why = f"the file {name!r} is no model" if os.path.isfile(name) else f"there is no folder {name!r}"
        if name in TOYS:
            why = f"{name} is in the package flowspec-models, which is not installed"
        raise InputError(
            f"--drafter: expected bundled, {', '.join(WORDS)}, one of {', '.join(bundled_models())}, a model "
            f"folder or a hub id such as owner/name, but {why}"
            f"{meant(name, (BUNDLED, *WORDS, *bundled_models()))}"
        ) from None
