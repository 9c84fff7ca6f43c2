"""Whether a value is one that a JSON schema allows, by what the words of JSON Schema mean: a check of its
own, for as much of them as tests use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
SAID = frozenset(("title", "description", "default", "$defs", "strict"))


def allows(schema: Any, value: Any, root: Any = None) -> bool:
    """Raises `AssertionError` for a word that it does not know."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_holds(word, said, schema, value, root) for word, said in schema.items() if word not in SAID)


def _holds(word: str, said: Any, schema: Mapping[str, Any], value: Any, root: Any) -> bool:
    if word == "$ref":
        assert said.startswith("#/$defs/")
        return allows(root["$defs"][said.removeprefix("#/$defs/")], value, root)
    if word == "type":
        return any(_is(kind, value) for kind in (said if isinstance(said, list) else [said]))
    if word == "enum":
        return any(_same(each, value) for each in said)
    if word == "const":
        return _same(said, value)
    if word == "anyOf":
        return any(allows(each, value, root) for each in said)
    if word in ("minimum", "maximum"):
        is_number = _is("number", value)
        return not is_number or (value >= said if word == "minimum" else value <= said)
    if word in ("minLength", "maxLength", "pattern"):
        if not isinstance(value, str):
            return True
        if word == "pattern":
            return re.search(said, value) is not None
        return len(value) >= said if word == "minLength" else len(value) <= said
    if word in ("items", "minItems", "maxItems"):
        if not isinstance(value, list):
            return True
        if word == "items":
            return all(allows(said, each, root) for each in value)
        return len(value) >= said if word == "minItems" else len(value) <= said
    if word in ("properties", "required", "additionalProperties"):
        if not isinstance(value, dict):
            return True
        if word == "required":
            return set(said) <= set(value)
        known = schema.get("properties", {})
        if word == "properties":
            return all(allows(said[name], each, root) for name, each in value.items() if name in said)
        return all(allows(said, each, root) for name, each in value.items() if name not in known)
    raise AssertionError(f"this check does not know {word}")


def _is(kind: str, value: Any) -> bool:
    if kind in ("number", "integer"):
        is_number = type(value) in (int, float)
        return is_number and (kind == "number" or type(value) is int or value == int(value))
    return type(value) is KINDS[kind]


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other
