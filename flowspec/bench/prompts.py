"""Files of prompts: one a line, or jsonl in Spec-Bench form (`turns`, maybe `question_id`, `category`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.folders import read_text, why_unread
from flowspec.validation import PRINTABLE, Misfit, decode_json, expect, fit

NAME_MAX, CHARS_MAX = limits.NAME_CHARS_MAX, limits.PROMPT_CHARS_MAX
Name = Annotated[str, Meta(pattern=rf"\A{PRINTABLE}*\Z", max_length=NAME_MAX)]
Turn = Annotated[
    str, Meta(pattern=r"\S", max_length=CHARS_MAX, description=f"a text of 1 to {CHARS_MAX} characters")
]


class Row(Struct, frozen=True, kw_only=True):
    """A line of jsonl, of which the rest is for others."""

    turns: Annotated[tuple[Turn, ...], Meta(min_length=1)]
    question_id: Name | int | float | None = None
    category: Name | int | float | None = None

    def __post_init__(self) -> None:
        expect(self.question_id != "", "question_id", "", f"a number or a text of 1 to {NAME_MAX} characters")


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
        row = decode_json(line, Row) if path.suffix == ".jsonl" else fit({"turns": [line.rstrip("\r")]}, Row)
    except (Misfit, msgspec.DecodeError, RecursionError) as error:
        told, why = '{"turns": ["..."]}', first_line(error, 100)
        raise InputError(f"{path} line {number}: expected {told}, got {line!r:.80} ({why})") from None
    name = number if row.question_id is None else row.question_id
    return Prompt(prompt_id=str(name), domain=str(row.category or path.stem), turns=row.turns)
