"""What llguidance does not tell of a JSON schema: how large a grammar it comes to, which can be a million
times its text; and where in it the fault is for which it is refused.

Each item up to `maxItems` is a rule of its own in a grammar, and what is put together (`allOf`, a `$ref` with
more beside it) is written out wherever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from flowspec.errors import InputError

SIZE_MAX = 1 << 14
"""Schemas and items in all; llguidance takes about a second and 150 MB for as many."""
TRIES_MAX = 32
"""Schemas that are tried alone where the place of a fault is looked for."""
CHARS_MAX = 120
"""Of a place; names in a schema may be of any length."""
DESCRIBING = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id")
)
"""Words that say nothing of a value."""
NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Words that hold schemas by names."""
_VALUES = frozenset(("enum", "const", "default", "examples"))
_BESIDE = DESCRIBING | {"$defs", "definitions"}


def check_size(size: int, what: str = "json_schema") -> None:
    """Raises `InputError` for what comes to too much."""
    if size > SIZE_MAX:
        raise InputError(
            f"{what}: expected at most {SIZE_MAX} schemas and items (minItems, maxItems), each counted "
            "wherever it is put together with others (allOf, $ref)"
        )


def size_of(root: Any) -> int:
    """Schemas and items that this comes to, if not too many. Raises `InputError` for too deep ones."""
    known: dict[str, int] = {}

    def size(schema: Any, *, is_whole: bool) -> int:
        """With all that it refers to where it `is_whole`, as is what is put together."""
        if not isinstance(schema, Mapping):
            return 1
        is_whole = is_whole or _is_put_together(schema)
        found = 1 + max(_number(schema.get(word)) for word in ("minItems", "maxItems"))
        reference = schema.get("$ref")
        if is_whole and isinstance(reference, str):
            if reference not in known:
                known[reference] = 0  # the library refuses what it would have to write out for ever
                known[reference] = size(_referred(root, reference), is_whole=True)
            found += known[reference]
        for _, inner in inner_schemas(schema):
            found += size(inner, is_whole=is_whole)
            if found > SIZE_MAX:
                break
        return found

    try:
        return size(root, is_whole=False)
    except RecursionError:
        raise InputError("json_schema: expected fewer schemas in schemas") from None


def _referred(root: Any, reference: str) -> Any:
    """What is in a place of a schema; None for nothing."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        raise InputError(
            f"json_schema: expected a $ref to a place here, with more beside it, got {reference!r:.80}"
        )
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        if isinstance(found, list):
            found = {str(at): each for at, each in enumerate(found)}
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_put_together(schema: Mapping[str, Any]) -> bool:
    together = schema.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return True
    said = set(schema) - _BESIDE
    return len(said) > 1 and not said.isdisjoint(("$ref", "allOf", "anyOf", "oneOf"))


def _number(found: Any) -> int:
    return min(found, SIZE_MAX) if type(found) is int and found > 0 else 0


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, each with its place there: `.properties.city`, `.anyOf[0]`."""
    for word, said in schema.items():
        if word in NAMED_SCHEMAS and isinstance(said, Mapping):
            yield from ((f".{word}.{name}", each) for name, each in said.items())
        elif word not in _VALUES and isinstance(said, list):
            yield from ((f".{word}[{at}]", each) for at, each in enumerate(said) if isinstance(each, Mapping))
        elif word not in _VALUES and isinstance(said, Mapping):
            yield f".{word}", said


def place_of_fault(schema: Mapping[str, Any], is_faulty: Callable[[Mapping[str, Any]], bool]) -> str:
    """The place of the innermost schema that `TRIES_MAX` tries find faulty alone; empty for the whole.

    >>> place_of_fault({"items": {"not": {}}}, lambda schema: "not" in str(schema))
    '.items'
    """
    # what it refers to by name is there, and allows anything: a fault in it is found there
    named = {
        word: dict.fromkeys(schema[word], True)
        for word in ("$defs", "definitions")
        if isinstance(schema.get(word), Mapping)
    }
    place, left = "", inner_schemas(schema)
    for _ in range(TRIES_MAX):
        at, inner = next(left, ("", None))
        if not at or len(place) + len(at) > CHARS_MAX:
            break
        if isinstance(inner, Mapping) and is_faulty({**inner, **named}):
            place, left = place + at, inner_schemas(inner)
    return place
