"""TOML files that say what is wrong with them: tables whose values are asked for by key and kind.

Every error is one line that names the file, the table and the key, what was expected and what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flowspec.core.protocol import limits
from flowspec.errors import FlowSpecError, InputError, first_line, meant
from flowspec.folders import read_text, why_unread

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NUMBER_MAX = 1e9
Found = TypeVar("Found")


def read_toml(path: Path, what: str) -> Table:
    """The file as a table; `what` it is expected to be is for the message. Raises `InputError`."""
    try:
        size = path.stat().st_size
        if size > limits.TOML_BYTES_MAX:
            raise InputError(f"{path}: expected {what} of at most {limits.TOML_BYTES_MAX} bytes, got {size}")
        data = tomllib.loads(read_text(path))
        repr(data)  # a number with too many digits to be shown in a message fails here
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected {what}, but it cannot be read ({why_unread(error)})") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # beside TOMLDecodeError: numbers too long, brackets too deep
        why = first_line(error)
        raise InputError(f"{path}: not valid TOML: {why[:1].lower()}{why[1:]}") from None
    return Table(where=str(path), data=data)


def toml_text(text: str) -> str:
    """A text as a TOML string; JSON's escapes are TOML's but for surrogates, which names cannot hold."""
    return json.dumps(
        "".join(character if character.isprintable() else "?" for character in text), ensure_ascii=False
    )


def _is_text(value: Any) -> bool:
    """Whether it can name something, and be shown in a line."""
    return isinstance(value, str) and bool(value) and value.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table, and where it stands."""

    where: str
    data: dict[str, Any]

    def wrong(self, key: str, expected: str) -> NoReturn:
        found = repr(self.data[key])[:80] if key in self.data else "nothing"
        raise InputError(f"{self.where}: {key}: expected {expected}, got {found}")

    def check(self, keys: Collection[str]) -> None:
        unknown = sorted(set(self.data) - set(keys))
        if unknown:
            known = ", ".join(sorted(keys))
            hint = meant(unknown[0], keys)
            raise InputError(f"{self.where}: unknown key {unknown[0]!r}; expected {known}{hint}")

    def found(self, key: str, find: Callable[[], Found]) -> Found:
        """What `find` makes of a value; its error names table and key."""
        try:
            return find()
        except FlowSpecError as error:
            raise InputError(f"{self.where}: {key}: {str(error).removeprefix(f'{key}: ')}") from None

    def table(self, key: str, *, needed: bool = True) -> Table:
        found = self.data.get(key, None if needed else {})
        if not isinstance(found, dict):
            self.wrong(key, f"a table [{key}]")
        return Table(where=f"{self.where}: {key}", data=found)

    def tables(self, key: str) -> list[Table]:
        """`key = [{...}]` or `[[key]]`, at least one."""
        found = self.data.get(key)
        if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
            self.wrong(key, f"at least one table, in {key} = [...] or as [[{key}]]")
        return [
            Table(where=f"{self.where}: {key} {number}", data=each) for number, each in enumerate(found, 1)
        ]

    def number(
        self, key: str, default: float | None = None, *, least: float | None = None, most: float = NUMBER_MAX
    ) -> float:
        """A number above 0, or from `least`."""
        value: Any = self.data.get(key, default)
        if (
            type(value) not in (int, float)
            or not (value > 0 if least is None else least <= value)
            or not value <= most
        ):
            low = "above 0" if least is None else f"from {least:g}"
            self.wrong(key, f"a number {low}{'' if most == NUMBER_MAX else f' to {most:g}'}")
        return float(value)

    def whole(self, key: str, default: int | None = None, *, most: int = 10**6) -> int:
        """A whole number from 1."""
        value: Any = self.data.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            self.wrong(key, f"a whole number from 1 to {most}")
        return int(value)

    def text(self, key: str, default: str | None = None, *, among: Collection[str] = ()) -> str:
        value: Any = self.data.get(key, default)
        if not _is_text(value) or (among and value not in among):
            self.wrong(key, f"one of {', '.join(among)}" if among else "a printable text")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        value: Any = self.data.get(key, default)
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
        return bool(value)

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value: Any = self.data.get(key, default)
        if not isinstance(value, list) or not value or not all(_is_text(each) for each in value):
            self.wrong(key, "a list of printable texts")
        return list(value)

    def numbers(self, key: str, default: list[float] | None = None) -> list[float]:
        value: Any = self.data.get(key, default)
        if (
            not isinstance(value, list)
            or not value
            or not all(type(each) in (int, float) and 0 <= each <= NUMBER_MAX for each in value)
        ):
            self.wrong(key, "a list of numbers from 0")
        return [float(each) for each in value]
