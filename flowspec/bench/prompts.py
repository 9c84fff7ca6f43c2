"""Files of prompts: one a line, or jsonl in Spec-Bench form (`turns`, maybe `question_id`, `category`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.folders import read_text, why_unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    prompt_id: str
    domain: str
    turns: tuple[str, ...]


def of_each_domain(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of them: one of each domain in turn, each domain's in their order."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    turns = zip_longest(*domains.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; raises `InputError` naming file and line."""
    try:
        size = path.stat().st_size
        if size > limits.PROMPTS_BYTES_MAX:
            raise InputError(
                f"{path}: expected prompts of at most {limits.PROMPTS_BYTES_MAX} bytes together, got {size}"
            )
        # Nothing else ends a line of jsonl, though a text may hold what Python takes for one.
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: expected a file of prompts, but it cannot be read ({why_unread(error)})"
        ) from None
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{path}: expected at least one prompt, got an empty file")
    return found


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line) if path.suffix == ".jsonl" else {"turns": [line.removesuffix("\r")]}
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns:
            raise ValueError("no turns")
        if not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError("turns that are no texts")
        if max(map(len, turns)) > limits.PROMPT_CHARS_MAX:
            raise ValueError(f"a turn of more than {limits.PROMPT_CHARS_MAX} characters")
        "".join(turns).encode()  # an escape may stand for half a character
        return Prompt(
            prompt_id=_name(row.get("question_id", number)),
            domain=_name(row.get("category") or path.stem),
            turns=tuple(turns),
        )
    except (ValueError, RecursionError) as error:
        why = first_line(error, 100)
        raise InputError(
            f'{path} line {number}: expected {{"turns": ["..."]}}, got {line!r:.80} ({why})'
        ) from None


def _name(value: object) -> str:
    """A number or a short text as the name of something; raises `ValueError` for anything else."""
    name = str(value) if isinstance(value, str | int | float) else ""
    if not name.isprintable() or not 0 < len(name) <= limits.NAME_CHARS_MAX:
        raise ValueError(
            f"question_id or category: no number or text of 1 to {limits.NAME_CHARS_MAX} characters"
        )
    return name
