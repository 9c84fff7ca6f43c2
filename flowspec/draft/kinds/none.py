"""`none`: nothing drafts."""

from __future__ import annotations

from flowspec.draft.kinds.base import WordKind
from flowspec.model.files import ModelFiles
from flowspec.plan.shape import ModelShape


class Nothing(WordKind):
    word = "none"
    plural = "none"
    acceptance = 0.0

    def open(self, target: ModelFiles, dtype: str, device: object, *, context: int, coupled: bool) -> None:
        return None

    def reckoned(self, target: ModelShape) -> None:
        return None
