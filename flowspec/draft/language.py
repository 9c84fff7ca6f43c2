"""A small language model as a drafter: a whole model in one slice, its cache kept by node like any
stage's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.stage.events import ClearSlots, RunLayers
from flowspec.draft.cached import Row, TreeCachedDrafter
from flowspec.draft.ranking import F32, Ranker
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span


class LanguageModelDrafter(TreeCachedDrafter):
    """A `Drafter`. Threads are left as they are: it lives in the head's process, or
    is all that a daemon computes."""

    def __init__(
        self,
        model: Slice,
        *,
        context: int | None = None,
        vocabulary_size: int | None = None,
        coupled: bool = True,
    ) -> None:
        """Drafts with a model that is loaded whole.

        `context` is the target's (None: no less than the drafter's own), `vocabulary_size` the number of ids
        that the target takes: a drafter's vocabulary may be padded differently.
        """
        self._model = model
        own = min(model.spec.context_max, limits.CONTEXT_MAX)
        self.context = own if context is None else min(own, context)
        super().__init__(
            Ranker(vocabulary_size or model.spec.vocabulary, coupled=coupled),
            context_max=max(self.context, context or 0),
            device=model.device,
            slot_bytes=model.slot_bytes,
            state_bytes=model.state_bytes,
        )

    @classmethod
    def load(cls, files: ModelFiles, dtype: str, device: str, **options: Any) -> LanguageModelDrafter:
        """Loads the model; raises `InputError` when that cannot be. `options` are those of the class."""
        layer_count = files.raw_config()["num_hidden_layers"]
        return cls(
            Slice.load(files, Span(first=0, end=layer_count, count=layer_count), dtype, device), **options
        )

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], Array]:
        _, hidden = self._model.forward(job, None)
        asked = [place for place, row in enumerate(rows) if row.asked]
        return [rows[place] for place in asked], hidden[asked]

    def logits(self, hidden: Array) -> F32:
        return self._model.logits(hidden)

    def open_cache(self, request: int, slots: int) -> None:
        self._model.open_cache(request, slots)

    def clear_slots(self, command: ClearSlots) -> None:
        self._model.clear_slots(command)

    def close_cache(self, request: int) -> None:
        self._model.close_cache(request)
