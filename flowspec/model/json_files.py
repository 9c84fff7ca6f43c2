"""The JSON files of models and tokenizers, which others wrote: bounded in size and depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.folders import read_text, why_unread
from flowspec.model.damage import advice

_DEPTH_MAX = 100


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `InputError`."""
    try:
        size = path.stat().st_size
        if size > limits.JSON_BYTES_MAX:
            raise InputError(f"{path}: expected JSON of at most {limits.JSON_BYTES_MAX} bytes, got {size}")
        raw = json.loads(read_text(path))
        check_depth(raw)
    except (OSError, ValueError, RecursionError) as error:
        found = advice(path, f"it cannot be read ({why_unread(error)})")
        raise InputError(f"{path}: expected JSON, but {found}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, got {raw!r:.80}")
    return raw


def check_depth(value: Any) -> None:
    """Raises `ValueError` for lists and objects so deep in each other that showing or copying them could
    exhaust Python's stack."""
    level: list[Any] = [[value]]
    for _ in range(_DEPTH_MAX):
        entries = [entry for each in level for entry in (each.values() if isinstance(each, dict) else each)]
        level = [entry for entry in entries if isinstance(entry, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {_DEPTH_MAX} deep")
