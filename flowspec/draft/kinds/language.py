"""A small language model (`draft.language`), checked to mean the same by every token id as the target.

The one kind that also runs on a device of its own, where it is a slice of all its layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowspec.core.protocol.cluster_messages import Drafting
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.kinds.vocabulary import check_vocabulary
from flowspec.draft.protocol import Drafter
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, find_shape, shape_of

if TYPE_CHECKING:
    from flowspec.model.slice import Slice


class LanguageKind(FileKind):
    plural = "language models"
    acceptance = 0.58  # the bundled one's
    layouts = ("language-model",)

    @staticmethod
    def is_in(files: ModelFiles) -> bool:
        return True  # what is none is refused by its family

    def check(self, target: ModelFiles) -> None:
        super().check(target)
        self.model_for_device(target)

    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
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
        check_family(self.files.raw_config(), self.files.model)
        self.files.check_weights()
        check_vocabulary(self.name, self.files, target)
        return self.files

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        return self.of_shape(shape_of(self.files.spec, self.name, self.files.filed_bytes), target)

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
