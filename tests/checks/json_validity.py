"""Whether a JSON document is one that a schema allows, by the words of the specification (draft 7 and
2020-12).

For checking what others wrote: it shares nothing with llguidance, and is itself held to the answers that
JSON-Schema-Test-Suite gives for each of its schemas. What it does not know it says (`UnknownError`), and
never guesses. `format` says nothing here, as in the specification.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

DEPTH_MAX = 60
EXPONENT_MAX = 400
_ANNOTATIONS = {
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "format",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "$defs",
    "definitions",
}


class UnknownError(Exception):
    """The schema says something that is not checked here."""


def is_valid(schema: Any, document: Any, *, is_draft7: bool) -> bool:
    """Raises `UnknownError`."""
    return _Checker(schema, is_draft7).allows(schema, document, 0)


def read(text: str) -> Any:
    """A document with its numbers as they are written, which doubles may not hold. Raises `ValueError` for
    what is none, and `UnknownError` for numbers of very many digits."""
    return json.loads(text, parse_float=_exact)


def _exact(text: str) -> Fraction:
    _, _, exponent = text.lower().partition("e")
    if abs(int(exponent or "0")) > EXPONENT_MAX:
        raise UnknownError("a number of very many digits")
    return Fraction(text)


def equal(first: Any, second: Any) -> bool:
    """As JSON has it: 1 is 1.0, and neither is true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if _is_number(first) and _is_number(second):
        return bool(first == second)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    return type(first) is type(second) and bool(first == second)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Fraction)) and not isinstance(value, bool)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and math.isfinite(value) and value == math.floor(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _pattern(text: str) -> re.Pattern[str]:
    """ECMA 262 where Python means the same; what may differ is not known."""
    if re.search(r"\\[pPcuZzAGk]|\(\?[^:=!]|\\[dDwWsSbB]|\$.", text):
        raise UnknownError(f"the pattern {text!r:.60}")
    try:
        return re.compile(text.replace("$", r"\Z"))
    except re.error:
        raise UnknownError(f"the pattern {text!r:.60}") from None


class _Checker:
    def __init__(self, root: Any, is_draft7: bool) -> None:
        self._root = root
        self._is_draft7 = is_draft7

    def allows(self, schema: Any, value: Any, depth: int) -> bool:
        if depth > DEPTH_MAX:
            raise UnknownError("a schema that refers to itself for ever")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnknownError("a schema that is neither an object nor a boolean")
        if "$ref" in schema and self._is_draft7:
            return self.allows(self._referred(schema["$ref"]), value, depth + 1)
        known = _ANNOTATIONS | (_RULES.keys() - ({"prefixItems"} if self._is_draft7 else _OF_DRAFT7))
        if unknown := sorted(schema.keys() - known - _BESIDE):
            raise UnknownError(unknown[0])
        return all(
            rule(self, schema, argument, value, depth + 1)
            for name, argument in schema.items()
            if (rule := _RULES.get(name)) is not None
        )

    def _referred(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise UnknownError(f"$ref {reference!r:.40}")
        at = self._root
        if isinstance(at, dict) and "$id" in at:
            raise UnknownError("$ref beside $id")
        for step in reference.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            at = at[int(step)] if isinstance(at, list) else at.get(step) if isinstance(at, dict) else None
            if at is None:
                raise UnknownError(f"$ref {reference!r:.40}")
        return at

    # Rules get the schema that they stand in, what they say there, and the value.

    def ref(self, schema: Any, reference: Any, value: Any, depth: int) -> bool:
        return self.allows(self._referred(reference), value, depth)

    def type(self, schema: Any, names: Any, value: Any, depth: int) -> bool:
        return any(_TYPES[name](value) for name in ([names] if isinstance(names, str) else names))

    def enum(self, schema: Any, values: Any, value: Any, depth: int) -> bool:
        return any(equal(each, value) for each in values)

    def const(self, schema: Any, wanted: Any, value: Any, depth: int) -> bool:
        return equal(wanted, value)

    def properties(self, schema: Any, properties: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, dict):
            return True
        return all(self.allows(own, value[name], depth) for name, own in properties.items() if name in value)

    def pattern_properties(self, schema: Any, patterns: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, dict):
            return True
        compiled = [(_pattern(text), own) for text, own in patterns.items()]
        return all(
            self.allows(own, value[name], depth)
            for pattern, own in compiled
            for name in value
            if pattern.search(name)
        )

    def additional_properties(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, dict):
            return True
        patterns = [_pattern(text) for text in schema.get("patternProperties", ())]
        return all(
            self.allows(own, value[name], depth)
            for name in value
            if name not in schema.get("properties", ())
            and not any(pattern.search(name) for pattern in patterns)
        )

    def property_names(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        return not isinstance(value, dict) or all(self.allows(own, name, depth) for name in value)

    def required(self, schema: Any, names: Any, value: Any, depth: int) -> bool:
        return not isinstance(value, dict) or all(name in value for name in names)

    def dependent_required(self, schema: Any, needs: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, dict):
            return True
        return all(other in value for name, others in needs.items() if name in value for other in others)

    def dependent_schemas(self, schema: Any, needs: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, dict):
            return True
        return all(self.allows(own, value, depth) for name, own in needs.items() if name in value)

    def dependencies(self, schema: Any, needs: Any, value: Any, depth: int) -> bool:
        names = {name: own for name, own in needs.items() if isinstance(own, list)}
        others = {name: own for name, own in needs.items() if not isinstance(own, list)}
        return self.dependent_required(schema, names, value, depth) and self.dependent_schemas(
            schema, others, value, depth
        )

    def items(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, list):
            return True
        if isinstance(own, list):
            if not self._is_draft7:
                raise UnknownError("items as a list")
            return all(self.allows(each, entry, depth) for each, entry in zip(own, value, strict=False))
        first = 0 if self._is_draft7 else len(schema.get("prefixItems", ()))
        return all(self.allows(own, entry, depth) for entry in value[first:])

    def prefix_items(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, list):
            return True
        return all(self.allows(each, entry, depth) for each, entry in zip(own, value, strict=False))

    def additional_items(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        before = schema.get("items")
        if not isinstance(value, list) or not isinstance(before, list):
            return True
        return all(self.allows(own, entry, depth) for entry in value[len(before) :])

    def contains(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, list):
            return True
        count = sum(self.allows(own, entry, depth) for entry in value)
        if self._is_draft7:
            return count > 0
        return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", count))

    def unique_items(self, schema: Any, wanted: Any, value: Any, depth: int) -> bool:
        if not wanted or not isinstance(value, list):
            return True
        return not any(equal(value[at], other) for at in range(len(value)) for other in value[:at])

    def multiple_of(self, schema: Any, step: Any, value: Any, depth: int) -> bool:
        if not _is_number(value):
            return True
        if not math.isfinite(value):
            raise UnknownError("a number that no double holds")
        return (Fraction(str(value)) / Fraction(str(step))).denominator == 1

    def all_of(self, schema: Any, parts: Any, value: Any, depth: int) -> bool:
        return all([self.allows(own, value, depth) for own in parts])

    def any_of(self, schema: Any, parts: Any, value: Any, depth: int) -> bool:
        return any([self.allows(own, value, depth) for own in parts])

    def one_of(self, schema: Any, parts: Any, value: Any, depth: int) -> bool:
        return sum([self.allows(own, value, depth) for own in parts]) == 1

    def no(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        return not self.allows(own, value, depth)

    def condition(self, schema: Any, own: Any, value: Any, depth: int) -> bool:
        return self.allows(
            schema.get("then" if self.allows(own, value, depth) else "else", True), value, depth
        )

    def pattern(self, schema: Any, text: Any, value: Any, depth: int) -> bool:
        return not isinstance(value, str) or _pattern(text).search(value) is not None


_Rule = Callable[[_Checker, Any, Any, Any, int], bool]


def _number(holds: Callable[[Any, Any], bool]) -> _Rule:
    return lambda checker, schema, bound, value, depth: not _is_number(value) or holds(value, bound)


def _length(kind: type[Any], holds: Callable[[Any, Any], bool]) -> _Rule:
    def rule(checker: _Checker, schema: Any, bound: Any, value: Any, depth: int) -> bool:
        return not isinstance(value, kind) or holds(len(value), bound)

    return rule


def _least(size: Any, bound: Any) -> bool:
    return bool(size >= bound)


def _most(size: Any, bound: Any) -> bool:
    return bool(size <= bound)


_OF_DRAFT7 = {"dependencies", "additionalItems"}
_BESIDE = {"then", "else", "minContains", "maxContains"}
"""Read by the rule that they stand beside; without it they say nothing."""
_RULES: dict[str, _Rule] = {
    "$ref": _Checker.ref,
    "type": _Checker.type,
    "enum": _Checker.enum,
    "const": _Checker.const,
    "properties": _Checker.properties,
    "patternProperties": _Checker.pattern_properties,
    "additionalProperties": _Checker.additional_properties,
    "propertyNames": _Checker.property_names,
    "required": _Checker.required,
    "dependentRequired": _Checker.dependent_required,
    "dependentSchemas": _Checker.dependent_schemas,
    "dependencies": _Checker.dependencies,
    "items": _Checker.items,
    "prefixItems": _Checker.prefix_items,
    "additionalItems": _Checker.additional_items,
    "contains": _Checker.contains,
    "uniqueItems": _Checker.unique_items,
    "multipleOf": _Checker.multiple_of,
    "allOf": _Checker.all_of,
    "anyOf": _Checker.any_of,
    "oneOf": _Checker.one_of,
    "not": _Checker.no,
    "if": _Checker.condition,
    "pattern": _Checker.pattern,
    "minimum": _number(_least),
    "maximum": _number(_most),
    "exclusiveMinimum": _number(lambda value, bound: bool(value > bound)),
    "exclusiveMaximum": _number(lambda value, bound: bool(value < bound)),
    "minLength": _length(str, _least),
    "maxLength": _length(str, _most),
    "minItems": _length(list, _least),
    "maxItems": _length(list, _most),
    "minProperties": _length(dict, _least),
    "maxProperties": _length(dict, _most),
}
