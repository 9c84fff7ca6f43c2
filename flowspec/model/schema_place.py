"""Where in a JSON schema the fault is for which it is refused: llguidance tells the fault alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowspec.model.schema_size import inner_schemas

TRIES_MAX = 32
"""Schemas that are tried alone."""
CHARS_MAX = 120
"""Of a place; names in a schema may be of any length."""


def place_of_fault(
    schema: Mapping[str, Any], reason: str, reason_of: Callable[[Mapping[str, Any]], str]
) -> str:
    """The place of the innermost schema that alone is refused for the same `reason` as the whole; empty for
    the whole. `reason_of` tells why a schema is refused. After `TRIES_MAX` tries it is the place found so
    far.

    >>> place_of_fault({"items": {"not": {}}}, "not!", lambda each: "not!" if "not" in str(each) else "")
    '.items'
    """
    # what it refers to by name is there, and allows anything: a fault in it is found there
    named = {
        word: dict.fromkeys(schema[word], True)
        for word in ("$defs", "definitions")
        if isinstance(schema.get(word), Mapping)
    }
    tries, place, found = 0, "", schema
    while tries < TRIES_MAX:
        for at, inner in inner_schemas(found):
            if tries == TRIES_MAX or len(place) + len(at) > CHARS_MAX:
                return place
            if isinstance(inner, Mapping):
                tries += 1
                if reason_of({**inner, **named}) == reason:
                    place, found = place + at, inner
                    break
        else:
            break
    return place
