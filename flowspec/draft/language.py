"""A small language model as a drafter: a whole model in one slice, its cache kept by node like any stage's.

The one kind that also runs on a device of its own. It has to mean the same by every token id as the target,
whatever files the two come in.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.stage.events import ClearSlots, RunLayers
from flowspec.draft.base import FileKind
from flowspec.draft.cached import Row, TreeCachedDrafter
from flowspec.draft.lookup import Ngram
from flowspec.draft.ranking import F32, Ranker
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.damage import read_json
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span
from flowspec.plan.shape import ModelShape, shape_of
from flowspec.plan.sites import PlannedDrafter


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

    def load(
        self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool
    ) -> LanguageModelDrafter:
        files = self.model_for_device(target)
        return LanguageModelDrafter.load(
            files,
            files.precision_beside(dtype),
            device,
            context=context,
            vocabulary_size=target.config().vocab_size,
            coupled=coupled,
        )

    def model_for_device(self, target: ModelFiles) -> ModelFiles:
        check_family(self.files.raw_config(), self.files.model)
        self.files.check_weights()
        check_vocabulary(self.name, self.files, target)
        return self.files

    def plan(self, target: ModelShape) -> PlannedDrafter:
        return self.of_shape(shape_of(self.files.spec, self.name, self.files.filed_bytes), target)


class LanguageModelDrafter(TreeCachedDrafter):
    """A `Drafter`. Threads are left as they are: it lives in the head's process, or is all that a daemon
    computes."""

    def __init__(
        self,
        model: Slice,
        *,
        context: int,
        vocabulary_size: int | None = None,
        coupled: bool = True,
    ) -> None:
        """Drafts with a model that is loaded whole.

        `context` is the target's, `vocabulary_size` the number of ids that the target takes: a drafter's
        vocabulary may be padded differently.
        """
        self._model = model
        self.context = min(model.spec.context_max, limits.CONTEXT_MAX, context)
        super().__init__(
            Ranker(vocabulary_size or model.spec.vocabulary, coupled=coupled),
            context_max=context,
            device=model.device,
            slot_bytes=model.slot_bytes,
            state_bytes=model.state_bytes,
        )

    @classmethod
    def load(cls, files: ModelFiles, dtype: str, device: str, **options: Any) -> LanguageModelDrafter:
        """Loads the model; raises `InputError` when that cannot be. `options` are those of the class."""
        layer_count = files.raw_config()["num_hidden_layers"]
        span = Span(first=0, end=layer_count, count=layer_count)
        return cls(Slice.load(files, span, dtype, device), **options)

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


def check_vocabulary(name: str, drafter: ModelFiles, target: ModelFiles) -> None:
    """Raises `InputError` unless both models mean the same by every id.

    Special tokens are not compared: they are often named anew when a model is fine-tuned, and one that the
    drafter misunderstands costs a guess, nothing more. Without tokenizers, sizes must do.
    """
    has_texts = drafter.has_tokenizer and target.has_tokenizer
    if has_texts and drafter.gguf is None and target.gguf is None:
        paths = drafter.path("tokenizer.json"), target.path("tokenizer.json")
        if paths[0].read_bytes() == paths[1].read_bytes():
            return
    (own, own_special), (wanted, special) = (
        _vocabulary(files) if has_texts else (dict.fromkeys(range(files.config().vocab_size), ""), set[int]())
        for files in (drafter, target)
    )
    special |= own_special
    tokens = (wanted.keys() | own.keys()) - special
    wrong = min((token for token in tokens if own.get(token) != wanted.get(token)), default=None)
    if wrong is None:
        return
    expected, got = f"{wanted.get(wrong)!r:.40} as id {wrong}", f"{own.get(wrong)!r:.40}"
    if len(own.keys() - special) != len(wanted.keys() - special):
        expected, got = f"a vocabulary of {len(wanted)} entries", f"{len(own)}"
    raise InputError(
        f"drafter {name!r} has another tokenizer than model {target.model!r}: expected {expected}, got "
        f"{got}; give a drafter trained for the same tokenizer, or --drafter {Ngram.word}"
    )


def _vocabulary(files: ModelFiles) -> tuple[dict[int, str], Set[int]]:
    """The text of each token, and the ids of special ones, which a GGUF file marks and a tokenizer.json lists
    apart."""
    if files.gguf is not None:
        from flowspec.model.gguf.tokenizer import plain_tokens

        return plain_tokens(files.gguf_file)
    path = files.path("tokenizer.json")
    content = read_json(path)
    added, model = content.get("added_tokens") or [], content.get("model")
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and type(token.get("id")) is int for token in added
    ):
        raise InputError(f"{path}: expected added_tokens with ids; copy the tokenizer again")
    special = {token["id"] for token in added}
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list) and all(
        isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocabulary
    ):
        return {token: entry[0] for token, entry in enumerate(vocabulary)}, special
    if isinstance(vocabulary, dict) and all(type(token) is int for token in vocabulary.values()):
        return {token: text for text, token in vocabulary.items()}, special
    raise InputError(f"{path}: expected a vocabulary under model, vocab; copy the tokenizer again")
