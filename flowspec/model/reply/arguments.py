"""What the arguments of a call have to be, as rules of a grammar, by the schema of the tool: JSON, or texts
in tags, as `json_calls.py` and `xml_calls.py` read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.grammar import check_grammar, schema_text
from flowspec.model.json_schema import DESCRIBING, NAMED_SCHEMAS, check_size, size_of
from flowspec.model.reply.parts import Tool
from flowspec.model.reply.rules import Rules, sequence
from flowspec.model.reply.xml_calls import types_of

Schema = Mapping[str, Any]
Arguments = Callable[[Rules, Schema], str]
"""What the arguments of a schema are in a call; raises `InputError` where that cannot be said."""
_IDS = frozenset(("$schema", "$id"))
_ANY_OTHER = frozenset(("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if"))
"""What says which properties there may be beside those of `properties`."""
_OF_OBJECTS = _IDS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = frozenset(("type", "enum", "const", "minLength", "maxLength", "anyOf", "oneOf"))
_REFERENCE = re.compile(r'"\$ref":"([^"]*)"')
_TAG = "</parameter>"
_CLOSE = f"\n{_TAG}\n"


def arguments_of(rules: Rules, tools: Sequence[Tool], written: Arguments) -> dict[str, str]:
    """What the arguments of each of the tools are, by its name. Raises `InputError` with that name."""
    found, length, size, most = {}, 0, 0, limits.GRAMMAR_BYTES_MAX
    for tool in tools:
        try:
            schema = _schema(tool)
            text = schema_text(schema)
            length += len(text.encode("utf-8", "surrogatepass"))
            if length > most:
                raise InputError(f"the parameters of all tools: expected at most {most} bytes, got {length}")
            size += size_of(schema)
            check_size(size, "the parameters of all tools")
            check_grammar("json_schema", text)
            found[tool.name] = written(rules, schema)
        except (InputError, RecursionError) as error:
            why = error if isinstance(error, InputError) else "expected fewer schemas in schemas"
            raise InputError(f"the parameters of {tool.name!r} cannot be obeyed: {why}") from None
    return found


def _schema(tool: Tool) -> Schema:
    """An object of what a tool declares, and of nothing else unless it says so."""
    found = {"type": "object", **_undescribed(tool.parameters)}
    if "properties" in found and _ANY_OTHER.isdisjoint(found):
        found["additionalProperties"] = False
    return found


def _undescribed(schema: Any, *, are_named: bool = False) -> Any:
    """A schema, or schemas that `are_named`, without the words that describe, which are most of many."""
    if isinstance(schema, list):
        return [_undescribed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if are_named:
        return {name: _undescribed(each) for name, each in schema.items()}
    return {
        word: said if word in ("enum", "const") else _undescribed(said, are_named=word in NAMED_SCHEMAS)
        for word, said in schema.items()
        if word not in DESCRIBING - _IDS
    }


def xml_arguments(rules: Rules, schema: Schema) -> str:
    """Each argument in tags with its name: a text as it is, up to the closing tag, anything else as JSON."""
    if unknown := schema.keys() - _OF_OBJECTS:
        raise InputError(
            f"of all arguments together, {min(unknown)!r:.40} is not obeyed in this model's format"
        )
    if schema["type"] != "object":
        raise InputError(f"type: expected object, got {schema['type']!r:.40}")
    fields, needed = schema.get("properties", {}), schema.get("required", [])
    if missing := [name for name in needed if name not in fields]:
        raise InputError(f"required: expected names of properties, got {missing[0]!r:.40}")
    arguments = []
    for name, inner in fields.items():
        if not name or name != name.strip() or any(sign in name for sign in "<>\n"):
            raise InputError(f"expected names without <, > and white space around them, got {name!r:.80}")
        argument = sequence(rules.spelled(f"<parameter={name}>\n"), _value(rules, schema, inner))
        arguments.append(argument if name in needed else f"({argument})?")
    return sequence(*arguments)


def _value(rules: Rules, root: Schema, schema: Any) -> str:
    """A value of a schema within that of all arguments, the `root`, up to the tag that closes it."""
    kinds = types_of(schema)
    if "string" not in kinds:
        return sequence(rules.json(_alone(root, schema)), rules.spelled(_CLOSE))
    listed = _listed(schema)
    may_be_null = "null" in kinds and (listed is None or None in listed)
    null = [rules.spelled(f"null{_CLOSE}")] if may_be_null else []
    return rules.rule(*_texts(rules, schema), *null)


def _listed(schema: Schema) -> list[Any] | None:
    """The only values of a schema; None for one that lists none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _texts(rules: Rules, schema: Schema) -> list[str]:
    """Texts that a schema allows, each up to the tag that closes it."""
    if unknown := schema.keys() - _OF_TEXTS:
        raise InputError(
            f"{min(unknown)!r:.40} of a text is not obeyed in this model's format, which has no quotes"
        )
    ways = schema.get("anyOf", schema.get("oneOf"))
    if ways is not None:
        texts = [each for each in ways if "string" in types_of(each)]
        if len(schema) > 1 or ("oneOf" in schema and len(texts) > 1):
            raise InputError("anyOf, oneOf: expected no more, and one text in oneOf, in this model's format")
        return [text for each in texts for text in _texts(rules, each)]
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if (listed := _listed(schema)) is not None:
        texts = [each for each in listed if isinstance(each, str) and least <= len(each) <= most]
        if wrong := [each for each in texts if _TAG in each]:
            raise InputError(f"expected texts without {_TAG}, got {wrong[0]!r:.80}")
        found = [rules.spelled(each + _CLOSE) for each in texts]
    else:
        found = [rules.behind(rules.text([_TAG], least=least, most=most), _CLOSE)] if least <= most else []
    if not found:
        raise InputError("expected what some text satisfies, got what none does")
    return found


def _alone(root: Schema, schema: Any) -> Schema:
    """A schema within the `root`, with what it refers to there."""
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise InputError(f"expected a JSON schema, got {schema!r:.80}")
    if _REFERENCE.search(schema_text(schema)):
        schema = {**schema, **{word: root[word] for word in ("$defs", "definitions") if word in root}}
    for found in _REFERENCE.findall(schema_text(schema)):
        if not found.startswith(("#/$defs/", "#/definitions/")):
            raise InputError(
                f"$ref: expected one to $defs or definitions, in this model's format, got {found!r:.80}"
            )
    return schema
