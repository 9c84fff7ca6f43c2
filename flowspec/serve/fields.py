"""The fields of a JSON object from somebody else, taken one by one; what nobody took is refused.

Each taker returns None for a field that is absent or null, and raises `ApiError` for one that is not what it
should be.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn

from flowspec.errors import meant
from flowspec.folders import why_unread
from flowspec.plain_json import read_json
from flowspec.serve.refusals import ApiError, invalid


def parse(body: bytes) -> dict[str, Any]:
    """A request's body; raises `ApiError` for anything but one JSON object."""
    try:
        found = read_json(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        text = f"expected a JSON object as body, got something else: {why_unread(error):.120}"
        raise ApiError(400, text, code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(
            400, f"expected a JSON object as body, got {type(found).__name__}", code="invalid_json"
        )
    return found


def json_of(found: Any, field: str | None = None) -> bytes:
    """What was read from a request as JSON again; `field` names it in errors. Raises `ApiError` for too many
    brackets in brackets, and for text with halves of characters, which no answer could repeat."""
    where = "" if field is None else f"{field}: "
    try:
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError:
        expected = "expected fewer brackets in brackets"
    except UnicodeEncodeError:
        expected = "expected text in whole characters, got half of one"
    raise ApiError(400, f"{where}{expected}", field, "invalid_value")


_NOWHERE: Mapping[str, str] = {}
_COMPARED_MAX = 64
_NAME_CHARS_MAX = 80
"""So many fields, with names so long, are looked at for a misspelt one."""


class Fields:
    """Takes the fields of `data`; `where` is the path to it, for messages (`messages[0].`)."""

    def __init__(self, data: dict[str, Any], where: str = "") -> None:
        self._data = data
        self._left = dict.fromkeys(data)
        self._known: dict[str, None] = {}
        self._where = where

    def name(self, field: str) -> str:
        """The full name of a field."""
        return f"{self._where}{field}"

    def take(self, field: str) -> Any:
        """The field as it is."""
        self._known[field] = None
        self._left.pop(field, None)
        return self._data.get(field)

    def needed(self, field: str, elsewhere: Mapping[str, str] = _NOWHERE) -> Any:
        """The field, which has to be there; `elsewhere` as in `finish`, for what may be there instead."""
        found = self.take(field)
        if found is None:
            for other in elsewhere.keys() & self._left.keys():
                self._refuse(other, elsewhere)
            raise ApiError(
                400,
                f"{self.name(field)}: expected a value, got none{self._written_for(field)}",
                self.name(field),
                "missing_required_parameter",
            )
        return found

    def _written_for(self, field: str) -> str:
        """The end of an error: under which name a field may have been given that is missing."""
        left = [each for each in islice(self._left, _COMPARED_MAX) if len(each) <= _NAME_CHARS_MAX]
        found = difflib.get_close_matches(field, left, n=1)
        return f"; did you write {found[0]!r} for it?" if found else ""

    def of_type(self, field: str, kind: type[int | float]) -> int | float | None:
        """A number of any size, whole for `int`."""
        found: int | float | None = self.take(field)
        if found is not None and type(found) not in (int, kind):
            expected = "a whole number" if kind is int else "a number"
            raise invalid(self.name(field), expected, found, "invalid_type")
        return found

    def number(self, field: str, low: float, high: float) -> float | None:
        found = self.of_type(field, float)
        if found is None:
            return None
        if not low <= found <= high or not math.isfinite(found):
            raise invalid(self.name(field), f"a number from {low:g} to {high:g}", found)
        return float(found)

    def whole(self, field: str, low: int, high: int) -> int | None:
        found = self.of_type(field, int)
        if found is None:
            return None
        if not low <= found <= high:
            raise invalid(self.name(field), f"a whole number from {low} to {high}", found)
        return int(found)

    def flag(self, field: str) -> bool:
        found = self.take(field)
        if found is not None and type(found) is not bool:
            raise invalid(self.name(field), "true or false", found, "invalid_type")
        return bool(found)

    def text(self, field: str) -> str | None:
        found = self.take(field)
        if found is not None and type(found) is not str:
            raise invalid(self.name(field), "a string", found, "invalid_type")
        return found

    def inner(self, field: str) -> Fields:
        """The fields of an object in here; none if it is absent."""
        found = self.take(field)
        if found is not None and type(found) is not dict:
            raise invalid(self.name(field), "an object", found, "invalid_type")
        return Fields(found or {}, self.name(f"{field}."))

    def ignored(self, *fields: str) -> None:
        """Fields that say nothing about the answer, whatever they hold."""
        for field in fields:
            self.take(field)

    def harmless(self, fields: Iterable[str]) -> tuple[str, ...]:
        """Takes those of the fields that nobody took; returns which of them hold something."""
        left = [field for field in fields if field not in self._known]
        return tuple(field for field in left if self.take(field) is not None)

    def neutral(self, field: str, *values: Any, instead: str = "") -> None:
        """A field that FlowSpec lacks: absent, null, or a value by which nothing is asked."""
        found = self.take(field)
        if found is None or any(type(found) is type(value) and found == value for value in values):
            return
        if type(found) in (int, float) and any(
            type(value) in (int, float) and found == value for value in values
        ):
            return
        expected = " or ".join([*(json.dumps(value) for value in values), "nothing"])
        raise ApiError(
            400,
            f"{self.name(field)}: FlowSpec does not support this; expected {expected}, got "
            f"{found!r:.80}{instead}",
            self.name(field),
            "unsupported_parameter",
        )

    def rest(self) -> dict[str, Any]:
        """Those that nobody took, for another reader, who refuses what it does not know."""
        left, self._left = self._left, {}
        return {field: self._data[field] for field in left}

    @property
    def known(self) -> Iterable[str]:
        """The fields that somebody asked for."""
        return self._known

    def neutral_rest(self, fields: Mapping[str, tuple[Any, ...]]) -> None:
        """`neutral` for those of the fields that nobody took."""
        for field, values in fields.items():
            if field not in self._known:
                self.neutral(field, *values)

    def finish(self, elsewhere: Mapping[str, str] = _NOWHERE) -> None:
        """Raises `ApiError` for a field that nobody took; `elsewhere` tells what fields of other servers are
        here."""
        for field in self._left:
            self._refuse(field, elsewhere)

    def _refuse(self, field: str, elsewhere: Mapping[str, str]) -> NoReturn:
        name = self.name(field)[:120]
        here = elsewhere.get(field)
        hint = meant(field[:120], self._known) if here is None else f"; here that is {here}"
        raise ApiError(400, f"unknown field {name!r:.120}{hint}", name, "unknown_parameter")
