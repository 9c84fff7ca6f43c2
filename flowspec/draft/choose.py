"""From what a user calls a drafter to the drafter: which kind it is, and whether it fits the target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec.draft.protocol import Drafter
from flowspec.errors import InputError
from flowspec.model.families import check_family
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder, bundled_models
from flowspec.model.json_files import read_json
from flowspec.model.trials import check_torch

if TYPE_CHECKING:
    import torch

NONE = "none"
NGRAM = "ngram"
WITHOUT_TENSORS = (NGRAM, NONE)
"""Drafters that need no device, and no torch."""
ADVICE = "give a drafter trained for the same tokenizer, or --drafter ngram"


def open_drafter(
    name: str,
    target: ModelFiles,
    dtype: str,
    device: torch.device | None = None,
    *,
    context: int,
    coupled: bool = True,
) -> Drafter | None:
    """The drafter `name`, loaded; None for `none`. Raises `InputError` when there is none or it does not fit
    the target.

    `name` is `bundled` or another model that is shipped, `ngram`, `none`, or the folder or hub id of a
    language model or an EAGLE head. The device is CUDA where torch sees it, unless one is given. `context` is
    the target's; a drafter that can handle fewer positions is fine: it stops drafting there.
    """
    if name == NONE:
        return None
    if name == NGRAM:
        from flowspec.draft.ngram import NgramDrafter

        return NgramDrafter(context)
    check_torch()
    from flowspec.draft.language import LanguageModelDrafter
    from flowspec.model.accelerator import find

    device = device or find("auto").device
    files = language_model(name, target)
    if files is None:
        from flowspec.draft.eagle import EagleDrafter

        return EagleDrafter(drafter_files(name), target, dtype, device, context=context, coupled=coupled)
    vocabulary_size = target.config().vocab_size
    return LanguageModelDrafter.load(
        files, dtype, device, context=context, vocabulary_size=vocabulary_size, coupled=coupled
    )


def language_model(name: str, target: ModelFiles) -> ModelFiles | None:
    """The files of a drafter that is a model by itself, checked to fit the target; None for an EAGLE head,
    which needs the target's features."""
    from flowspec.draft.eagle_head import is_eagle, tensor_names

    files = drafter_files(name)
    raw = files.raw_config()
    if is_eagle(raw, tensor_names(files)):
        return None
    check_family(str(raw.get("model_type")), files.model)
    files.check_weights()
    _check_tokenizer(name, files, target, target.config().vocab_size)
    return files


def check_drafter(name: str) -> None:
    """Raises `InputError` for a name that means nothing, before anything is started; `open_drafter` checks
    the rest."""
    if name not in WITHOUT_TENSORS:
        drafter_files(name).raw_config()


def model_name(name: str) -> str:
    """What `ModelFiles` calls a drafter: `bundled` is the target's name there."""
    if name != BUNDLED:
        return name
    return str(bundled_folder("draft")) if os.path.isdir("draft") else "draft"


def drafter_files(name: str) -> ModelFiles:
    """The files of a model beside the target; raises `InputError` for a name that means nothing."""
    try:
        return ModelFiles(model_name(name))
    except InputError:
        raise InputError(
            f"--drafter: expected bundled, ngram, none, one of {', '.join(bundled_models())}, a model folder "
            "or a hub id such as owner/name, "
            f"but there is no folder {name!r}"
        ) from None


def _check_tokenizer(name: str, drafter: ModelFiles, target: ModelFiles, vocabulary_size: int) -> None:
    """Raises `InputError` unless both models mean the same by every id.

    Only vocabularies are compared: special tokens are often named anew when a model is fine-tuned, and one
    that the drafter misunderstands costs a guess, nothing more. Without tokenizers, sizes must do.
    """
    paths = drafter.find("tokenizer.json"), target.find("tokenizer.json")
    if paths[0] is None or paths[1] is None:
        size = drafter.config().vocab_size
        if size != vocabulary_size:
            raise _misfit(name, target, f"a vocabulary of {vocabulary_size} entries", f"{size}")
        return
    if paths[0].read_bytes() == paths[1].read_bytes():
        return
    found, expected = _vocabulary(paths[0]), _vocabulary(paths[1])
    if len(found) != len(expected):
        raise _misfit(name, target, f"a vocabulary of {len(expected)} entries", f"{len(found)}")
    wrong = min((token for token, text in expected.items() if found.get(token) != text), default=None)
    if wrong is not None:
        raise _misfit(name, target, f"{expected[wrong]!r:.40} as id {wrong}", f"{found.get(wrong)!r:.40}")


def _misfit(name: str, target: ModelFiles, expected: str, got: str) -> InputError:
    return InputError(
        f"drafter {name!r} has another tokenizer than model {target.model!r}: expected {expected}, got "
        f"{got}; {ADVICE}"
    )


def _vocabulary(path: Path) -> dict[int, str]:
    """Id -> text of a tokenizer.json, without the tokens added to its model."""
    model = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list) and all(
        isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocabulary
    ):
        return {token: entry[0] for token, entry in enumerate(vocabulary)}
    if isinstance(vocabulary, dict) and all(type(token) is int for token in vocabulary.values()):
        return {token: text for text, token in vocabulary.items()}
    raise InputError(f"{path}: expected a vocabulary under model, vocab; copy the tokenizer again")
