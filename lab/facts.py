"""Puts the numbers and names that code defines into the documents, at the places that are marked for them.

A place is `<!--NAME-->value<!---->`. NAME is a constant of `core/protocol/limits.py`, `messages.py` beside it
or `runtime/timeouts.py`, any other one with its module (`serve.guard.BODY_BYTES_MAX`), or a name of `FACTS`,
with a capital where a sentence begins with it.

    python -m lab.facts            # writes what has changed
    python -m lab.facts --check    # writes nothing; a line for each wrong place, and status 1
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

from msgspec import Struct, structs

from flowspec.cli.commands import COMMANDS
from flowspec.core.methods import METHODS
from flowspec.core.protocol import limits, messages
from flowspec.errors import InputError
from flowspec.model.families import FAMILIES
from flowspec.runtime import timeouts
from flowspec.serve.bodies import Neutral, notes
from flowspec.serve.completion_request import ChatBody, CompletionBody
from flowspec.serve.responses.request import ResponseBody
from flowspec.validation import expected
from lab.command import Parser, run_command

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"<!--([A-Za-z][\w.]*)-->(.*?)<!---->", re.DOTALL)
PLAIN = (limits, timeouts, messages)
"""Modules whose constants go by their names alone."""
WORDS = re.findall(
    r"\w+",
    "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty",
)
NAMES = {
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3",
    "Gemma4": "Gemma 4",
    "Gemma4Unified": "Gemma 4",
    "Glm4Moe": "GLM-4.5",
    "GptOss": "GPT-OSS",
    "Lfm2": "LFM2",
    "Olmo2": "OLMo 2",
    "Olmoe": "OLMoE",
    "Phi3": "Phi-3 and Phi-4",
    "Qwen3_5": "Qwen3.5",
    "Qwen3_5Moe": "Qwen3.5's mixture",
    "Qwen3Moe": "Qwen3-MoE",
}
"""Families that people call otherwise than transformers' classes."""


def families() -> list[str]:
    """By the names that people use, each once."""
    return list(dict.fromkeys(NAMES.get(each.prefix, each.prefix) for each in FAMILIES.values()))


def experiments() -> int:
    return len(list((ROOT / "configs/experiments").glob("*.toml")))


def in_words(count: int) -> str:
    return WORDS[count] if count < len(WORDS) else f"{count:,}"


def accepted_fields() -> str:
    """What requests may say, as a table: read off their types."""
    bodies: dict[str, Any] = {"chats": ChatBody, "completions": CompletionBody, "responses": ResponseBody}
    of: dict[tuple[str, str], list[str]] = {}
    for kind, body in bodies.items():
        hints, noted = get_type_hints(body, include_extras=True), {each[1]: each[2] for each in notes(body)}
        for each in structs.fields(body):
            name = each.encode_name
            of.setdefault(_row_of(name, hints[each.name], noted.get(name)), []).append(kind)
    names: dict[tuple[str, str], list[str]] = {}
    for (name, taken), kinds in of.items():
        names.setdefault((taken, "all" if len(kinds) == len(bodies) else ", ".join(kinds)), []).append(name)
    rows = [f"| {', '.join(listed)} | {taken} | {kinds} |" for (taken, kinds), listed in names.items()]
    return "\n".join(["", "", "| field | what it may be | of |", "|---|---|---|", *rows, "", ""])


def _row_of(name: str, hint: Any, note: str | Neutral | None) -> tuple[str, str]:
    """A field in a row, and what it may be."""
    if isinstance(note, str):
        return f"`{name}`", "anything, without effect"
    if note is not None and note.kind == "elsewhere":
        return f"`{name}` (here `{note.expected}`)", "nothing"
    if note is not None:
        values = " or ".join(map(json.dumps, note.values))
        return f"`{name}` {values}".strip(), "no other value: these, and nothing, ask for nothing"
    told = expected(hint)
    inner: list[Any] = [
        each for each in get_args(hint) if isinstance(each, type) and issubclass(each, Struct)
    ]
    if told == "an object" and inner:
        told = f"an object of {', '.join(f'`{each.encode_name}`' for each in structs.fields(inner[0]))}"
    return f"`{name}`", told


FACTS: Mapping[str, Callable[[], str]] = {
    "families": lambda: in_words(len(families())),
    "families.names": lambda: ", ".join(families()),
    "methods": lambda: in_words(len(METHODS)),
    "commands": lambda: in_words(len(COMMANDS)),
    "experiments": lambda: in_words(experiments()),
    "requests.fields": accepted_fields,
}


def written(name: str, number: object) -> str:
    """A constant as documents write it: bytes with their unit."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InputError(f"{name} is no number")
    if "BYTES" in name:
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if number >= 1 << shift and number % (1 << shift) == 0:
                return f"{int(number) >> shift} {unit}"
        return f"{int(number):,} bytes"
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def value(name: str) -> str:
    """What stands at a place; raises `InputError` for a name that there is not."""
    if name in FACTS:
        return FACTS[name]()
    if name.lower() in FACTS:
        return FACTS[name.lower()]().capitalize()
    home, _, constant = name.rpartition(".")
    modules: Sequence[ModuleType] = PLAIN
    try:
        modules = [importlib.import_module(f"flowspec.{home}")] if home else PLAIN
    except ImportError:
        modules = ()
    for module in modules:
        if hasattr(module, constant):
            return written(name, getattr(module, constant))
    raise InputError(f"{name} is no name that code defines")


def wrong(text: str) -> Iterator[str]:
    """Of each wrong place its line, and what is wrong."""
    for place in PLACE.finditer(text):
        name, shown = place[1], " ".join(place[2].split())
        try:
            now = " ".join(value(name).split())
            is_right, why = shown == now, f"{name} is {now:.200}, not {shown:.200}"
        except InputError as error:
            is_right, why = False, str(error)
        if not is_right:
            yield f"{text.count(chr(10), 0, place.start()) + 1}: {why}"


def filled(text: str) -> str:
    """The text with every place as code has it now; one that is right keeps its line breaks."""

    def told(place: re.Match[str]) -> str:
        now = value(place[1])
        shown = place[2] if place[2].split() == now.split() else now
        return f"<!--{place[1]}-->{shown}<!---->"

    return PLACE.sub(told, text)


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("flowspec/**/*.md")])


def run(args: argparse.Namespace) -> int:
    found: list[str] = []
    for document in documents():
        text = document.read_text("utf-8")
        found += [f"{document.relative_to(ROOT)}:{line}" for line in wrong(text)]
        if not args.check and filled(text) != text:
            document.write_text(filled(text), "utf-8")
    if args.json:
        print(json.dumps({"wrong": found}))
    else:
        for line in found:
            print(line + ("; run python -m lab.facts" if args.check else ""))
    return int(args.check and bool(found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.facts", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a place is wrong")
    return run_command(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
