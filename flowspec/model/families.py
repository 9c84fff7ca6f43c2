"""The model families that are parity-tested, and how their pieces are named in transformers.

What a family does outside its decoder layers is part of it, so a family is listed only with a parity test
(`tests/model/test_parity.py`). Everything else is refused by name before a weight is read.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from flowspec.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Class names `{prefix}DecoderLayer`, `{prefix}RMSNorm`, `{prefix}RotaryEmbedding` in `transformers.models.{module}`."""

    module: str
    prefix: str

    def piece(self, name: str) -> Any:
        """One of the family's classes, for example `piece("DecoderLayer")`."""
        modeling = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return getattr(modeling, self.prefix + name)


FAMILIES = {
    "llama": Family(module="llama", prefix="Llama"),
    "mistral": Family(module="mistral", prefix="Mistral"),
    "qwen2": Family(module="qwen2", prefix="Qwen2"),
    "qwen3": Family(module="qwen3", prefix="Qwen3"),
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Position embeddings that depend on the position alone; others look at the whole batch and would differ by split."""


def check_family(model_type: str, model: str) -> Family:
    """The family of that name; raises `InputError` for one that is not supported."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise InputError(f"model {model!r} is of the family {model_type!r}, but FlowSpec runs {', '.join(sorted(FAMILIES))}")
    return family


def family_of(config: Any, model: str) -> Family:
    """The family of a transformers config; raises `InputError` for anything about it that is not supported."""
    family = check_family(config.model_type, model)
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise InputError(f"model {model!r} uses {rope_type!r} position embeddings, but FlowSpec runs {', '.join(_ROPE_TYPES)}")
    if getattr(config, "quantization_config", None):
        raise InputError(f"model {model!r} is quantised, but FlowSpec loads float32, bfloat16 or float16 checkpoints")
    return family
