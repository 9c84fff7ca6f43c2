"""A small language model (`draft.language`), checked to mean the same by every token id as the target.

The one kind that also runs on a device of its own, where it is a slice of all its layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flowspec.core.protocol.cluster_messages import Drafting
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.kinds.ngram import Ngram
from flowspec.draft.protocol import Drafter
from flowspec.errors import InputError
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles
from flowspec.model.json_files import read_json
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, find_shape, shape_of

if TYPE_CHECKING:
    import torch

    from flowspec.model.slice import Slice

ADVICE = f"give a drafter trained for the same tokenizer, or --drafter {Ngram.word}"


class LanguageKind(FileKind):
    plural = "language models"
    acceptance = 0.58  # the bundled one's

    @staticmethod
    def is_in(files: ModelFiles) -> bool:
        return True  # what is none is refused by its family

    def load(
        self, target: ModelFiles, dtype: str, device: torch.device, *, context: int, coupled: bool
    ) -> Drafter:
        from flowspec.draft.language import LanguageModelDrafter

        files = self.model_for_device(target)
        vocabulary_size = target.config().vocab_size
        return LanguageModelDrafter.load(
            files,
            files.precision_beside(dtype),
            device,
            context=context,
            vocabulary_size=vocabulary_size,
            coupled=coupled,
        )

    def model_for_device(self, target: ModelFiles) -> ModelFiles:
        check_family(str(self.files.raw_config().get("model_type")), self.files.model)
        self.files.check_weights()
        _check_tokenizer(self.name, self.files, target)
        return self.files

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        return self.of_shape(shape_of(self.files.config(), self.name, self.files.filed_bytes), target)

    @classmethod
    def sketched(cls, name: str, target: ModelShape) -> sites.PlannedDrafter:
        return cls.of_shape(find_shape(name), target)

    @staticmethod
    def over(model: Slice, told: Drafting, context: int) -> Drafter:
        """A drafter over a model that is loaded whole, which drafts as it was `told`."""
        from flowspec.draft.language import LanguageModelDrafter

        return LanguageModelDrafter(
            model, context=context, vocabulary_size=told.vocabulary, coupled=told.coupled
        )


def _check_tokenizer(name: str, drafter: ModelFiles, target: ModelFiles) -> None:
    """Raises `InputError` unless both models mean the same by every id.

    Only vocabularies are compared: special tokens are often named anew when a model is fine-tuned, and one
    that the drafter misunderstands costs a guess, nothing more. Without tokenizers, sizes must do.
    """
    paths = drafter.find("tokenizer.json"), target.find("tokenizer.json")
    if paths[0] is None or paths[1] is None:
        size, vocabulary_size = drafter.config().vocab_size, target.config().vocab_size
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
