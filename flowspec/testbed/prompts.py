"""Reads prompt files: jsonl in Spec-Bench form (`question_id`, `category`, `turns`), or one prompt a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from flowspec.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A dialogue's user turns."""

    prompt_id: str
    domain: str
    turns: tuple[str, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; raises `InputError` naming file and line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: expected a file of prompts, but it cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{path}: expected at least one prompt, got an empty file")
    return found


def _prompt(path: Path, number: int, line: str) -> Prompt:
    if path.suffix != ".jsonl":
        return Prompt(prompt_id=str(number), domain=path.stem, turns=(line,))
    try:
        row = json.loads(line)
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError("turns is no list of texts")
        return Prompt(prompt_id=str(row.get("question_id", number)), domain=str(row.get("category", path.stem)), turns=tuple(turns))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f'{path} line {number}: expected {{"turns": ["..."]}}, got {type(error).__name__}: {error}') from None
