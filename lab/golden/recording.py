"""A recording: what a part of FlowSpec did, by key; how it is kept in a file, and how two are compared.

A value is JSON. Where two differ is told as a path into the value, and of texts, which are lists of lines, as
line numbers: a difference is read without opening a file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recordings"
WORD = re.compile(r"[\w-]{1,16}")
LIST = re.compile(r'\[\s*(?:(?:[-\d.eE]+|"[\w-]{1,16}")(?:,\s+|\s*(?=\])))+\]')
SUMS = 1e-12  # by so much figures differ that libraries of linear algebra sum in another order
SHOWN_CHARS = 160
"""Of a value in a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was seen now. The same key may be seen several times, and must have the same value each time:
    `at` says under which circumstances this was, such as a method and a number of stages.
    """

    key: str
    value: Any
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """What cannot be seen on this machine, and why: everything recorded below this key is left out."""

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """At `place`, which begins with a key, something else was seen than was recorded."""

    place: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.place}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """From what, where and when a recording was made."""

    commit: str
    date: str
    machine: str
    versions: str


@dataclass(slots=True, kw_only=True)
class Recording:
    origin: Origin
    entries: dict[str, Any]

    @staticmethod
    def read(part: str) -> Recording | None:
        path = file_of(part)
        if not path.is_file():
            return None
        document = json.loads(path.read_text("utf-8"))
        return Recording(origin=Origin(**document["origin"]), entries=document["entries"])

    def write(self, part: str) -> None:
        document = {"origin": asdict(self.origin), "entries": self.entries}
        text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
        FOLDER.mkdir(exist_ok=True)
        file_of(part).write_text(_pack_lists(text) + "\n", "utf-8")


def file_of(part: str) -> Path:
    return FOLDER / f"{part}.json"


def _pack_lists(text: str) -> str:
    """Lists of numbers and of short words stand on one line: token ids would take a line each."""
    return LIST.sub(lambda found: re.sub(r"\s+", " ", found[0]), text)


class Comparison:
    """Holds observations to a recording, one after the other, or collects a new recording from them."""

    def __init__(self, recorded: dict[str, Any] | None) -> None:
        self._recorded = recorded
        self.seen: dict[str, Any] = {}
        self.absent: list[Absent] = []
        self.observations = 0

    def take(self, found: Observation | Absent) -> list[Difference]:
        if isinstance(found, Absent):
            self.absent.append(found)
            return []
        self.observations += 1
        value = json.loads(json.dumps(found.value))  # as a file gives it back: lists for tuples
        place = f"{found.key} [{found.at}]" if found.at else found.key
        first = self.seen.setdefault(found.key, value)
        if self._recorded is None:
            return list(differences(first, value, place))
        if found.key not in self._recorded:
            return [Difference(place=place, expected="nothing: it is not recorded", got=_short(value))]
        return list(differences(self._recorded[found.key], value, place))

    def end(self) -> list[Difference]:
        """What was recorded and not seen."""
        return [
            Difference(place=key, expected=_short(value), got="nothing")
            for key, value in (self._recorded or {}).items()
            if key not in self.seen and not any(is_below(key, each.key) for each in self.absent)
        ]


def is_below(key: str, above: str) -> bool:
    return key == above or key.startswith(f"{above}/")


def differences(expected: Any, got: Any, place: str) -> Iterator[Difference]:
    """Where two JSON values differ: each place once, but of lists of another length the first one only."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted({*expected, *got}):
            inside = f"{place} > {key}"
            if key not in got:
                yield Difference(place=inside, expected=_short(expected[key]), got="nothing")
            elif key not in expected:
                yield Difference(place=inside, expected="nothing", got=_short(got[key]))
            else:
                yield from differences(expected[key], got[key], inside)
    elif isinstance(expected, list) and isinstance(got, list):
        if _is_text(expected) and _is_text(got):
            yield from _text_differences(expected, got, place)
        else:
            yield from _list_differences(expected, got, place)
    elif isinstance(expected, str) and isinstance(got, str):
        if expected != got:
            old, new = _cut(expected, got)
            yield Difference(place=place, expected=old, got=new)
    elif not _is_same(expected, got):
        yield Difference(place=place, expected=_short(expected), got=_short(got))


def _is_same(expected: Any, got: Any) -> bool:
    is_close = type(expected) is type(got) is float and math.isclose(expected, got, rel_tol=SUMS)
    return is_close or (type(expected), expected) == (type(got), got)


def _is_text(value: list[Any]) -> bool:
    """Whether these are lines, not digests or names."""
    return all(isinstance(line, str) for line in value) and not all(map(WORD.fullmatch, value))


def _text_differences(expected: list[str], got: list[str], place: str) -> Iterator[Difference]:
    matcher = difflib.SequenceMatcher(a=expected, b=got, autojunk=False)
    for kind, first, end, got_first, got_end in matcher.get_opcodes():
        if kind != "equal":
            old, new = _cut("\n".join(expected[first:end]), "\n".join(got[got_first:got_end]))
            yield Difference(
                place=f"{place} > line {first + 1}",
                expected=old if end > first else "nothing",
                got=new if got_end > got_first else "nothing",
            )


def _list_differences(expected: list[Any], got: list[Any], place: str) -> Iterator[Difference]:
    pairs = zip(expected, got, strict=False)
    apart = [index for index, pair in enumerate(pairs) if not _is_same(*pair)]
    if len(expected) == len(got) and not any(isinstance(each, dict | list) for each in (*expected, *got)):
        if apart:  # one line tells of many numbers
            first, count = apart[0], f" ({len(apart)} of {len(got)} differ)" if len(apart) > 1 else ""
            found = f"{_short(got[first])}{count}"
            yield Difference(place=f"{place} > {first}", expected=_short(expected[first]), got=found)
        return
    if len(expected) == len(got):
        for index, (old, new) in enumerate(zip(expected, got, strict=True)):
            yield from differences(old, new, f"{place} > {index}")
        return
    index = apart[0] if apart else min(len(expected), len(got))
    old, new = (_short(each[index]) if index < len(each) else "the end" for each in (expected, got))
    yield Difference(
        place=f"{place} > {index}", expected=f"{old} of {len(expected)}", got=f"{new} of {len(got)}"
    )


def _cut(expected: str, got: str) -> tuple[str, str]:
    """Two texts from shortly before the place where they part."""
    apart = next(
        (at for at, (old, new) in enumerate(zip(expected, got, strict=False)) if old != new),
        min(len(expected), len(got)),
    )
    begin = max(0, apart - SHOWN_CHARS // 3)
    lead = "..." if begin else ""
    return _short(lead + expected[begin:]), _short(lead + got[begin:])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
