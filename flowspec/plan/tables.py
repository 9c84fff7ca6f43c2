"""TOML files of people: read as a type (`flowspec.validation`), with one line for what is wrong in them that
names the file, the table and the key, what was expected and what is there."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.errors import FlowSpecError, InputError, first_line, meant
from flowspec.folders import read_text, why_unread
from flowspec.validation import PRINTABLE, Document, Misfit, fit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = TypeVar("Kind")
Text = Annotated[str, Meta(pattern=rf"\A{PRINTABLE}+\Z", description="a printable text")]
Texts = Annotated[tuple[Text, ...], Meta(min_length=1, description="a list of printable texts")]
NUMBER_MAX = 1e9
Positive = Annotated[float, Meta(gt=0, le=NUMBER_MAX, description="a number above 0")]
NotNegative = Annotated[float, Meta(ge=0, le=NUMBER_MAX, description="a number from 0")]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=10**6)]


def among(names: Collection[str]) -> Meta:
    """Of a text that is one of these."""
    return Meta(pattern=rf"\A({'|'.join(map(re.escape, names))})\Z", description=f"one of {', '.join(names)}")


def some_tables(name: str) -> Meta:
    """Of tables [[name]], of which there is one at least."""
    return Meta(min_length=1, description=f"at least one table, in {name} = [...] or as [[{name}]]")


class Table(Document, frozen=True, kw_only=True):
    """A table of a TOML file."""

    NOUN: ClassVar[str] = "a table"


def read_toml(
    path: Path, kind: type[Kind], what: str, changes: Callable[[dict[str, Any]], None] = lambda table: None
) -> Kind:
    """The file as a type; `what` it is expected to be is for the message. `changes` are made to its table
    before it is checked. Raises `InputError`."""
    try:
        size = path.stat().st_size
        if size > limits.TOML_BYTES_MAX:
            raise InputError(f"{path}: expected {what} of at most {limits.TOML_BYTES_MAX} bytes, got {size}")
        data = tomllib.loads(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected {what}, but it cannot be read ({why_unread(error)})") from None
    except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep, too
        why = first_line(error)
        raise InputError(f"{path}: not valid TOML: {why[:1].lower()}{why[1:]}") from None
    changes(data)
    with at(path):
        return fit(data, kind)


def shipped_files(folder: str) -> dict[str, Path]:
    """The TOML files by name that FlowSpec has in a folder: of a checkout, beside the package, or under the
    environment's `share` when installed."""
    installed = Path(sys.prefix) / "share" / "flowspec" / Path(folder).name
    places = (installed, Path(__file__).resolve().parents[2] / folder)
    return {path.stem: path for place in places for path in sorted(place.glob("*.toml"))}


def find_file(name: str, folder: str, what: str, taken: str = "a .toml file") -> Path:
    """A `.toml` file, or a shipped one by its name; raises `InputError` that begins with `what`."""
    shipped = shipped_files(folder)
    if name not in shipped and not name.endswith(".toml"):
        expected = f"{taken} or one of {', '.join(sorted(shipped))}"
        raise InputError(f"{what}: expected {expected}, got {name!r:.80}{meant(name, shipped)}")
    return shipped.get(name, Path(name))


@contextlib.contextmanager
def at(place: object) -> Iterator[None]:
    """Errors of what is done there begin with the place: a file, a table, a key. Raises `InputError`."""
    try:
        yield
    except (Misfit, FlowSpecError) as error:
        said = f"{error.place}: {error.said}" if isinstance(error, Misfit) and error.place else str(error)
        raise InputError(f"{place}: {said.removeprefix(f'{place}: ')}") from None


def toml_of(table: Mapping[str, Any], comments: Mapping[str, str] = {}, within: str = "") -> str:
    """A table as TOML, what is None or empty left out, with comments by key; `within` are the names before
    those of its tables, whose own may have dots."""
    lines, tables = [], []
    for key, value in table.items():
        rows = [value] if isinstance(value, Mapping) else value
        if isinstance(rows, list | tuple) and rows and isinstance(rows[0], Mapping):
            name = within + (key if re.fullmatch(r"[\w.-]+", key, re.ASCII) else _value(key))
            form = "[{}]" if rows is not value else "[[{}]]"
            found = [toml_of(each, comments, f"{name}.") for each in rows]
            tables += [each if each[:1] in ("", "[") else f"{form.format(name)}\n{each}" for each in found]
        elif value not in (None, (), []):
            bare = key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _value(key)
            comment = f"  # {comments[key]}" if key in comments else ""
            lines.append(f"{bare} = {_value(value)}{comment}\n")
    return "\n".join(filter(None, ("".join(lines), *tables)))


def _value(value: Any) -> str:
    """JSON's escapes are TOML's but for surrogates, which names cannot hold."""
    if isinstance(value, str):
        shown = "".join(character if character.isprintable() else "?" for character in value)
        return json.dumps(shown, ensure_ascii=False)
    if not isinstance(value, list | tuple):
        return json.dumps(value)
    items = list(map(_value, value))
    is_flat = not isinstance(value[0], list | tuple)
    return f"[{', '.join(items)}]" if is_flat else "[\n" + "".join(f"  {each},\n" for each in items) + "]"
