"""An assistant of Gemma 4 (`draft.assistant`): it wants the target's features, which only the head of the
pipeline is sent."""

from __future__ import annotations

from flowspec.draft.assistant_files import assistant_config, is_assistant
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.protocol import Drafter
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape


class Assistant(FileKind):
    plural = "assistants of Gemma 4"
    acceptance = 0.635  # an EAGLE head's: none is published
    layouts = ("gemma4-assistant",)
    reads_features = True

    @staticmethod
    def is_in(files: ModelFiles) -> bool:
        return is_assistant(files)

    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
        from flowspec.draft.assistant import AssistantDrafter
        from flowspec.draft.assistant_head import AssistantHead

        loaded = AssistantHead.load(self.files, target, dtype, device)
        return AssistantDrafter(loaded, target, context=context, coupled=coupled)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        raw = assistant_config(self.files)
        part, found = raw["text_config"], {}
        for name in _NUMBERS:
            found[name] = part.get(name)
            if type(found[name]) is not int or found[name] < 1:
                raise InputError(
                    f"assistant {self.name!r}: {name}: expected a number, got {found[name]!r:.40}"
                )
        hidden = found["hidden_size"]
        shape = ModelShape(
            name=self.name,
            layers=found["num_hidden_layers"],
            hidden=hidden,
            intermediate=found["intermediate_size"],
            heads=found["num_attention_heads"],
            kv_heads=found["num_key_value_heads"],
            head_dim=found["head_dim"],
            vocabulary=found["vocab_size"],
            is_tied=True,
            extra_params=3 * target.hidden * hidden,
        )
        return self.of_shape(shape, target)


_NUMBERS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
