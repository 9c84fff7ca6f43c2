"""Which published files are an assistant of Gemma 4: a small drafter that reads its target's keys and
values."""

from __future__ import annotations

from typing import Any

from flowspec.errors import InputError
from flowspec.model.damage import read_json
from flowspec.model.files import ModelFiles
from flowspec.model.support import check_config

DECODERS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
"""`model_type` of an assistant's config, and that of the decoder within."""


def is_assistant(files: ModelFiles) -> bool:
    """Whether a folder holds an assistant and not a model, by its config; no weight is read."""
    return files.gguf is None and str(read_json(files.path("config.json")).get("model_type")) in DECODERS


def assistant_config(files: ModelFiles) -> dict[str, Any]:
    """An assistant's config.json. Raises `InputError` for numbers that no model has, and for one without a
    decoder."""
    path = files.path("config.json")
    raw = read_json(path)
    check_config(raw, path)
    expected, part = DECODERS[raw["model_type"]], raw.get("text_config")
    if not isinstance(part, dict) or part.get("model_type") != expected:
        raise InputError(f"{path}: text_config: expected a decoder of {expected}, got {part!r:.80}")
    return raw
