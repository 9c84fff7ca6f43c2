"""What comes from outside as types: `fit` makes structs of JSON, TOML or msgpack, and tells in a line what
does not fit.

Bounds stand in the types (`Annotated[int, Meta(ge=0)]`), rules between fields in `__post_init__`, by
`expect`. msgspec checks both when it decodes; it does not check types and bounds of what the program itself
builds, which `checked` does.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Collection, Mapping, Set
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct

from flowspec.errors import first_line, meant

Fitted = TypeVar("Fitted")
Path = tuple[str | int, ...]
"""Where a value stands: names of fields, and places in lists."""
_MISFITS = (msgspec.ValidationError, RecursionError, OverflowError, SystemError)
"""What msgspec raises; the last one before 0.20, for a number that floats cannot hold."""
SHOWN_CHARS_MAX = 80
PRINTABLE = "[^\0-\x1f\x7f-\xa0\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
"""A character, as a pattern, that neither ends a line, nor moves a terminal's cursor, nor turns the direction
of a text."""
KNOWN_SHOWN_MAX = 40
"""Names that are told where one is not known."""


class Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of JSON or TOML: it has no other fields than these. `NOUN` is what people call it.

    A class that inherits says `frozen` and `kw_only` again, which msgspec and type checkers do not inherit.
    """

    NOUN: ClassVar[str] = "an object"


class Told(str):
    """What came, in words, where it is not shown itself."""

    __slots__ = ()
    __repr__ = str.__str__


NOTHING = Told("nothing")
"""What came where nothing came."""


class Misfit(ValueError):
    """A value that is not what its type says: what was `expected` at a `path`, and the `value` that came.

    `known` are the names of fields that there may be, where one came that there is not. `kind` is `type` for
    a value of another type, else `value`, or what the rule says that it breaks.
    """

    def __init__(
        self, path: Path, expected: str, value: object, known: Collection[str] = (), kind: str = "value"
    ) -> None:
        self.path, self.expected, self.value, self.known, self.kind = path, expected, value, known, kind
        where = _dotted(path[:-1] if known else path)
        super().__init__(f"{where}: {self.said}" if where else self.said)

    @property
    def is_missing(self) -> bool:
        return self.value is NOTHING

    @property
    def is_unknown(self) -> bool:
        """Whether there is no such field."""
        return bool(self.known)

    @property
    def field(self) -> str:
        """The path as programs write it: `messages[0].role`."""
        return _dotted(self.path)

    @property
    def place(self) -> str:
        """The path as people count, `device 2: memory`, without a name that is not known."""
        path = self.path[:-1] if self.is_unknown else self.path
        names = [f" {each + 1}" if isinstance(each, int) else f": {_printable(each)}" for each in path]
        return "".join(names).removeprefix(": ").strip()

    @property
    def said(self) -> str:
        """The error without its path, but for the name of a field that is not known."""
        if not self.is_unknown:
            return f"expected {self.expected}, got {shown(self.value)}"
        name = str(self.path[-1])
        listed = f"; expected {', '.join(sorted(self.known))}" if len(self.known) <= KNOWN_SHOWN_MAX else ""
        return f"unknown key {shown(name)}{listed}{meant(name[:SHOWN_CHARS_MAX], self.known)}"

    def within(self, path: Path) -> Misfit:
        """The same of a value that stands at this path itself."""
        return Misfit((*path, *self.path), self.expected, self.value, self.known, self.kind)


def _dotted(path: Path) -> str:
    names = [f"[{each}]" if isinstance(each, int) else f".{_printable(each)}" for each in path]
    return "".join(names).removeprefix(".")


def _printable(name: str) -> str:
    """A name that somebody else may have chosen, fit for a line."""
    return name if name.isprintable() and len(name) <= SHOWN_CHARS_MAX else shown(name)


def expect(condition: bool, name: str, value: object, expected: str, kind: str = "value") -> None:
    """Raises `Misfit` for a field unless the condition holds."""
    if not condition:
        raise Misfit((name,), expected, value, kind=kind)


def fit(data: Any, kind: type[Fitted]) -> Fitted:
    """Plain data as a type; raises `Misfit`."""
    try:
        return msgspec.convert(data, kind)
    except _MISFITS:
        raise misfit(data, kind) from None


def checked(value: Fitted) -> Fitted:
    """A struct that the program has built, all that its types say being true of it; raises `Misfit`."""
    fit(msgspec.to_builtins(value, enc_hook=plain), type(value))
    return value


def plain(value: Any) -> Any:
    """What stands for a value that msgspec does not write by itself: numpy's numbers, subclasses of `str`."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"expected text, numbers, lists and structs, got {shown(value)}")


def decode_json(data: bytes | str, kind: type[Fitted]) -> Fitted:
    """JSON as a type; raises `Misfit` for what does not fit, `msgspec.DecodeError` for what is no JSON (`NaN`
    and half a surrogate pair, too), `RecursionError` for too many brackets in brackets."""
    try:
        try:
            found: Fitted = _json_decoder(typing.cast(Any, kind)).decode(data)
        except msgspec.ValidationError:
            raise misfit(msgspec.json.decode(data), kind) from None
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(_why_no_json(data, error)) from None
    return found


def _why_no_json(data: bytes | str, error: Exception) -> str:
    """Why, and where, as Python's own reader tells it: msgspec takes half a pair for the end of the text."""
    try:
        json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as other:
        return first_line(other)
    return "a number that floats cannot hold" if "range" in str(error) else "half of a surrogate pair"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


@functools.cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def as_dict(value: Any) -> Any:
    """A struct, and those in it, as dictionaries by name, whatever they are when they travel."""
    if isinstance(value, Struct):
        return {name: as_dict(getattr(value, name)) for name in value.__struct_fields__}
    return [as_dict(each) for each in value] if isinstance(value, list | tuple) else value


def shown(value: object) -> str:
    """A value that somebody else wrote, in short."""
    try:
        return f"{value!r:.{SHOWN_CHARS_MAX}}"
    except (RecursionError, ValueError):  # brackets too deep, a number with too many digits
        return f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------ what does not fit


def misfit(data: Any, hint: Any, path: Path = ()) -> Misfit:
    """The first part of plain data that does not fit its type, which the whole does not."""
    inner, metas = _bare(hint)
    while get_origin(inner) in (Union, types.UnionType):
        member = _member_for(data, inner)
        if member is inner:
            break
        inner, metas = _bare(member)[0], _bare(member)[1] or metas
    configs = [getattr(_bare(each)[0], "__struct_config__", None) for each in get_args(inner)]
    tags = {each.tag: each.tag_field for each in configs if each is not None and each.tag_field is not None}
    if tags and isinstance(data, dict) and get_origin(inner) in (Union, types.UnionType):
        field = next(iter(tags.values()))
        return Misfit((*path, field), expected(Literal[tuple(tags)]), data.get(field, NOTHING))
    if isinstance(inner, type) and issubclass(inner, Struct):
        return _misfit_of_struct(data, inner, path, hint)
    origin, items = get_origin(inner) or inner, get_args(inner)
    most = next((each.max_length for each in metas if each.max_length is not None), math.inf)
    if origin in (list, tuple, set, frozenset) and isinstance(data, list | tuple | Set) and items:
        if len(data) > most:
            return Misfit(path, expected(hint), Told(f"{len(data)} entries"))
        entries = list(data)
        if origin is tuple and items[-1] is not Ellipsis:
            for place, (each, item) in enumerate(zip(entries, items, strict=False)):
                if not _fits(each, item):
                    return misfit(each, item, (*path, place))
        elif (wrong := _first_misfit(entries, items[0])) is not None:
            return misfit(entries[wrong], items[0], (*path, wrong))
    if origin in (dict, Mapping, typing.Mapping) and isinstance(data, dict) and items:
        pairs = list(data.items())
        if (wrong := _first_misfit(pairs, tuple[items])) is not None:  # type: ignore[valid-type]
            (key, each), (name, item) = pairs[wrong], items
            pair = (each, item) if _fits(key, name) else (key, name)
            return misfit(*pair, (*path, str(key)))
    members = items if origin in (Union, types.UnionType) else (inner,)
    words = [word for each in members if get_origin(each) is Literal for word in get_args(each)]
    is_of_type = _fits(data, inner) or type(data) in map(type, words)
    told = expected(Annotated[(inner, *metas)] if metas else inner)
    return Misfit(path, told, data, kind="value" if is_of_type else "type")


def _first_misfit(entries: list[Any], item: Any) -> int | None:
    """The place of the first that does not fit, by halves: long lists are quick as long as few are looked
    at."""
    if _fits(entries, list[item]):
        return None
    low, high = 0, len(entries)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(entries[low:middle], list[item]):
            low = middle
        else:
            high = middle
    return low


def _misfit_of_struct(data: Any, kind: Any, path: Path, hint: Any) -> Misfit:
    """Of an object, or of a list where the struct is one."""
    config, fields, hints = kind.__struct_config__, msgspec.structs.fields(kind), _hints(kind)
    if config.array_like:
        is_tagged = config.tag is not None
        if not isinstance(data, list | tuple):
            return Misfit(path, expected(hint), data, kind="type")
        given = dict(zip([each.encode_name for each in fields], data[is_tagged:], strict=False))
        if len(data) - is_tagged > len(fields):
            return Misfit(path, f"{len(fields)} entries", Told(f"{len(data)} entries"))
    else:
        if not isinstance(data, dict):
            return Misfit(path, expected(hint), data, kind="type")
        given = dict(data)
        if config.tag_field is not None and given.pop(config.tag_field, NOTHING) != config.tag:
            value = data.get(config.tag_field, NOTHING)
            return Misfit((*path, config.tag_field), expected(hint), value)
    known = [each.encode_name for each in fields]
    said = [  # what it is
        each for each in fields if each.required and get_origin(_bare(hints[each.name])[0]) is Literal
    ]
    unknown = [name for name in given if name not in known and config.forbid_unknown_fields]
    if unknown and all(_fits(given.get(each.encode_name, NOTHING), hints[each.name]) for each in said):
        return Misfit((*path, str(unknown[0])), "", given[unknown[0]], known)
    for each in (*said, *fields):
        value = given.get(each.encode_name, NOTHING)
        if value is NOTHING and each.required:
            return Misfit((*path, each.encode_name), expected(hints[each.name]), NOTHING)
        if value is not NOTHING and not _fits(value, hints[each.name]):
            return misfit(value, hints[each.name], (*path, each.encode_name))
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:  # its own rule
        if isinstance(error.__cause__, Misfit):
            return error.__cause__.within(path)
        return Misfit(path, str(error), data)
    return Misfit(path, expected(hint), data)


def _fits(data: Any, hint: Any) -> bool:
    if hint in (Any, msgspec.Raw):
        return True
    try:
        msgspec.convert(data, hint)
    except _MISFITS:
        return False
    return True


def _bare(hint: Any) -> tuple[Any, tuple[Meta, ...]]:
    """A type without what is said of it."""
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        return inner, tuple(each for each in metas if isinstance(each, Meta))
    return hint, ()


def _member_for(data: Any, union: Any) -> Any:
    """The type of a union that data like these was most likely meant to be."""
    members = [each for each in get_args(union) if each is not type(None)]
    for member in members if len(members) > 1 else ():
        inner = _bare(member)[0]
        if isinstance(inner, type) and issubclass(inner, Struct):
            config = inner.__struct_config__
            if isinstance(data, list | tuple if config.array_like else dict) and (
                config.tag is None or _tag(data, config.tag_field) == config.tag
            ):
                return member
        elif isinstance(kind := get_origin(inner) or inner, type) and isinstance(data, kind):
            return member
    return members[0] if len(members) == 1 else union


def _tag(data: Any, field: str | None) -> Any:
    return data.get(field) if isinstance(data, dict) else next(iter(data), None)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


# ------------------------------------------------------------------------------------------ types in words


def expected(hint: Any) -> str:
    """What a type takes, for people: `Meta(description=...)` where it has one."""
    inner, metas = _bare(hint)
    for meta in metas:
        if meta.description:
            return meta.description
    origin = get_origin(inner) or inner
    if origin in (Union, types.UnionType):
        told = [expected(each) for each in get_args(inner) if each is not type(None)]
        return " or ".join(dict.fromkeys(told))
    if origin is Literal:
        values = [str(each) for each in get_args(inner)]
        return values[0] if len(values) == 1 else f"one of {', '.join(filter(None, values))}"
    meta = next(iter(metas), Meta())
    if origin is bool:
        return "true or false"
    if origin in (int, float):
        return ("a whole number" if origin is int else "a number") + _bounds(meta)
    if origin in (list, tuple, set, frozenset):
        items = get_args(inner)
        is_row = origin is tuple and items and items[-1] is not Ellipsis
        return f"a list of {len(items)} entries" if is_row else "a list" + _size(meta, "entries")
    if origin in (dict, Mapping):
        return "an object" + _size(meta, "fields")
    if origin is str:
        return ("a printable text" if meta.pattern else "a string") + _size(meta, "characters")
    if isinstance(inner, type) and issubclass(inner, Struct) and inner.__struct_config__.array_like:
        return inner.__name__
    return getattr(inner, "NOUN", "an object")


def _bounds(meta: Meta) -> str:
    low = f" from {_number(meta.ge)}" if meta.ge is not None else ""
    low = f" above {_number(meta.gt)}" if meta.gt is not None else low
    if meta.le is None and meta.lt is None:
        return low
    word = "to" if meta.ge is not None else ("and at most" if low else "of at most")
    return (
        f"{low} {word} {_number(meta.le)}" if meta.le is not None else f"{low} and below {_number(meta.lt)}"
    )


def _number(bound: Any) -> str:
    return str(bound).removesuffix(".0")


def _size(meta: Meta, what: str) -> str:
    if meta.max_length is None:
        return " that is not empty" if meta.min_length else ""
    return f" of {f'{meta.min_length} to' if meta.min_length else 'at most'} {meta.max_length} {what}"
