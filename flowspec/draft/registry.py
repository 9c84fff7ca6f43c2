"""The kinds of drafters: the one list of them, and from what a user calls a drafter to the drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flowspec.draft.base import FileKind, Kind, WordKind
from flowspec.draft.feature_kinds import SKETCH, Assistant, Block, Eagle, Mtp
from flowspec.draft.language import LanguageKind
from flowspec.draft.lookup import Ngram, Suffix
from flowspec.errors import InputError, meant
from flowspec.model.files import BUNDLED, TOYS, ModelFiles, bundled_folder, bundled_models
from flowspec.plan.shape import SHAPES, ModelShape, find_shape
from flowspec.plan.sites import PlannedDrafter

BY_WORD: Sequence[type[WordKind]] = (Ngram, Suffix, Mtp)
BY_FILES: Sequence[type[FileKind]] = (Assistant, Block, Eagle, LanguageKind)
"""The first that files are of; the last takes whatever is left."""
KINDS: Sequence[type[Kind]] = (*BY_WORD, *BY_FILES)
NONE = "none"
"""Nothing drafts."""
WORDS = (*(kind.word for kind in BY_WORD), NONE)
WITHOUT_TENSORS = (*(kind.word for kind in BY_WORD if not kind.has_tensors), NONE)
"""Drafters that need no device."""
SHARING = tuple(kind.word for kind in BY_WORD if kind.shares_texts)
"""Those by which one user's texts tell in the time of another's answers."""
FALLBACK = Ngram.word
"""What goes with every target."""
PLANNED_FALLBACK = PlannedDrafter(name=FALLBACK, shape=None, acceptance=Ngram.acceptance)


def find_drafter(name: str, *, may_fetch: bool = True) -> Kind:
    """What a user's name for a drafter means: a word, `bundled` or another bundled model, or the folder or
    hub id of files, which are fetched only if they `may_fetch`; raises `InputError` for one that means
    nothing."""
    for word in BY_WORD:
        if word.word == name:
            return word(name)
    files = _files(name, may_fetch=may_fetch)
    return next(kind(name, files) for kind in BY_FILES if kind.is_in(files))


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


def plan_drafter(name: str, target: ModelShape, *, may_fetch: bool = True) -> PlannedDrafter:
    """What the planner computes with of a drafter by its name; of some that need no files, by their shape
    alone: an EAGLE head (`SKETCH`), or a name of `plan.shape`."""
    has_files = name in (*WORDS, BUNDLED, *bundled_models()) or os.path.isdir(name) or "/" in name
    if name == SKETCH or (name in SHAPES and not has_files):
        return Eagle.sketch(name, target) or LanguageKind.of_shape(find_shape(name), target)
    return find_drafter(name, may_fetch=may_fetch).plan(target)


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
