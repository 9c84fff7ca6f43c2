"""How calls are written, as grammars have it: the other way round of what the readers read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.grammar import check_grammar, json_rule, schema_text
from flowspec.model.json_schema import DESCRIBING, NAMED_SCHEMAS, check_size, size_of
from flowspec.model.reply.parts import Tool
from flowspec.model.reply.xml_calls import types_of

_SIGN = re.compile(r"[^\w<>]")
_ANY = "/(?s:.*)/"
_WORDS = DESCRIBING - {"$schema", "$id"}
_LISTED_SCHEMAS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_INNER_SCHEMAS = frozenset(
    ("items", "additionalProperties", "unevaluatedProperties", "contains", "propertyNames")
)
_OF_OBJECTS = DESCRIBING | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = DESCRIBING | {"type", "enum", "const", "minLength", "maxLength", "anyOf", "oneOf"}
_CLOSE = "\n</parameter>"
_ANY_OTHER = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
"""What says which properties there may be beside those of `properties`."""


class Maybe(NamedTuple):
    """Something that may be left out: a text, and behind it what a regular expression matches."""

    text: str
    regex: str = ""


Piece = str | Maybe


class Rules:
    """The rules of a grammar while it is written. `tokens` are the special tokens by their names: what is a
    token of its own is that one, and nothing else."""

    def __init__(self, tokens: Mapping[str, int], names: Iterable[str]) -> None:
        self._tokens = {name: tokens[name] for name in dict.fromkeys(names) if name in tokens}
        self._cut = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        self._marks: dict[int, None] = {}
        self._rules: dict[str, str] = {}
        self._size = 0

    @property
    def marks(self) -> tuple[int, ...]:
        """The tokens that the rules name, in the order of their numbers there."""
        return tuple(self._marks)

    def grammar(self, start: str) -> str:
        """All of it, from what a reply is."""
        rules = "".join(f"\n{name}: {body}" for body, name in self._rules.items())
        return f"start: {start}{rules}"

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for what a schema allows. Raises `InputError` where all schemas together come to
        too much."""
        body = json_rule(schema)
        if body not in self._rules:
            self._size += size_of(schema)
            check_size(self._size)
        return self.rule(body)

    def one_of(self, bodies: Sequence[str]) -> str:
        return self.rule(" | ".join(bodies))

    def spelled(self, *pieces: Piece) -> str:
        """A text, with the special tokens in it."""
        return " ".join(filter(None, map(self._piece, pieces)))

    def text_up_to(self, end: str, without: Iterable[str], **bounds: Any) -> str:
        """Any text that has none of these in it, and `end` behind it, which is one of them or begins with
        one; the `bounds` are those of `text`."""
        return self.behind(self.text(without, **bounds), end)

    def behind(self, before: str, text: str) -> str:
        """A text behind what a terminal or an expression matches, as one terminal up to the first special
        token: where the library cuts texts into terminals it takes the longest ones, whatever follows."""
        found = self._cut.search(text)
        at = len(text) if found is None else found.start()
        head = self._terminal(f"{before} {quoted(text[:at])}") if at else before
        return f"{head} {self.spelled(text[at:])}".rstrip()

    def text(
        self, without: Iterable[str], *, least: int = 0, most: int | None = None, first: str = ""
    ) -> str:
        """Any text of so many characters that has none of these in it; `first` is an expression that it has
        to match, too."""
        names = "|".join(_escaped(each) for each in dict.fromkeys(without))
        wanted = [first] if first else []
        if least or most is not None:
            wanted.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        wanted = wanted or [_ANY]
        if names:
            wanted.append(f"~/(?s:.*)({names})(?s:.*)/")
        return self._terminal(" & ".join(wanted))

    def _terminal(self, body: str) -> str:
        return self._rules.setdefault(body, f"T{len(self._rules)}")

    def _piece(self, piece: Piece) -> str:
        if isinstance(piece, Maybe):
            inner = self._piece(piece.text) + (f" /{piece.regex}/" if piece.regex else "")
            return f"({inner})?"
        found, at = [], 0
        for mark in self._cut.finditer(piece):
            found += [quoted(piece[at : mark.start()]), self._mark(mark[0])]
            at = mark.end()
        return " ".join(filter(None, (*found, quoted(piece[at:]))))

    def _mark(self, name: str) -> str:
        token = self._tokens[name]
        self._marks.setdefault(token)
        return f"mark_{list(self._marks).index(token)}"


Arguments = Callable[[Rules, Tool], str]
"""What stands between the beginning and the end of a call of a tool; raises `InputError` where that cannot be
said."""


def arguments_of(rules: Rules, tool: Tool, written: Arguments) -> str:
    """The arguments of a call as they are written; raises `InputError` with the tool's name."""
    try:
        check_grammar("json_schema", schema_text(parameters_of(tool)))
        return written(rules, tool)
    except (InputError, RecursionError) as error:
        raise InputError(f"the parameters of {tool.name!r} cannot be obeyed: {error}") from None


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object of what it declares, and of nothing else unless it says
    so. Raises `InputError` for one of too many schemas in schemas."""
    try:
        found = {"type": "object", **_undescribed(tool.parameters)}
    except RecursionError:
        raise InputError(
            f"the parameters of {tool.name!r} cannot be obeyed: expected fewer schemas in schemas"
        ) from None
    if "properties" in found and not any(each in found for each in _ANY_OTHER):
        found["additionalProperties"] = False
    return found


def _undescribed(schema: Any) -> Any:
    """Without the words that only describe, which are most of many a tool's schema."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for word, said in schema.items():
        if word in _WORDS:
            continue
        if word in NAMED_SCHEMAS and isinstance(said, Mapping):
            found[word] = {name: _undescribed(each) for name, each in said.items()}
        elif word in _LISTED_SCHEMAS and isinstance(said, list):
            found[word] = [_undescribed(each) for each in said]
        else:
            found[word] = _undescribed(said) if word in _INNER_SCHEMAS else said
    return found


def check_sizes(tools: Sequence[Tool]) -> None:
    """Raises `InputError` for tools whose schemas make a grammar that is too large, before any of them is
    looked into."""
    schemas = [parameters_of(tool) for tool in tools]
    size = sum(len(schema_text(each).encode("utf-8", "surrogatepass")) for each in schemas)
    if size > limits.GRAMMAR_BYTES_MAX:
        raise InputError(
            f"the parameters of all tools: expected at most {limits.GRAMMAR_BYTES_MAX} bytes, got {size}"
        )
    check_size(sum(map(size_of, schemas)), "the parameters of all tools")


def json_arguments(rules: Rules, tool: Tool) -> str:
    return rules.json(parameters_of(tool))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How a reply calls tools: the `mark`, `opening`, calls with `between` between them, and `closing`; a
    call is `begin`, in which `{name}` is the tool's, its `arguments`, and `end`.

    With `is_each` every call has a mark of its own (and then neither opening nor closing). `is_last`: nothing
    may follow, since it might be read as one more call.
    """

    mark: str
    begin: tuple[Piece, ...]
    arguments: Arguments = json_arguments
    end: str
    opening: tuple[Piece, ...] = ()
    between: str = ""
    closing: str = ""
    is_each: bool = False
    is_last: bool = False

    def call(self, rules: Rules, tools: Sequence[Tool]) -> str:
        """A call of one of these, without the mark."""
        return rules.one_of([self._call(rules, tool) for tool in tools])

    def _call(self, rules: Rules, tool: Tool) -> str:
        begin = [each.replace("{name}", tool.name) if isinstance(each, str) else each for each in self.begin]
        arguments = arguments_of(rules, tool, self.arguments)
        return " ".join(filter(None, (rules.spelled(*begin), arguments, rules.spelled(self.end))))


def xml_arguments(rules: Rules, tool: Tool) -> str:
    """Each argument in tags with its name: a text as it is, up to the tag that closes it, and anything else
    as JSON."""
    root, arguments, newline = parameters_of(tool), [], rules.spelled("\n")
    for key, schema, needed in _fields(root):
        if not key or key != key.strip() or any(sign in key for sign in "<>\n"):
            raise InputError(f"expected names without <, > and white space around them, got {key!r:.80}")
        value = _xml_value(rules, root, schema)
        begin = rules.spelled(f"<parameter={key}>\n")
        argument = f"{begin} {value} {newline}"
        arguments.append(argument if needed else f"({argument})?")
    return " ".join(arguments)


def _xml_value(rules: Rules, root: Mapping[str, Any], schema: Any) -> str:
    kinds = types_of(schema)
    if "string" not in kinds:
        return f"{_json(rules, root, schema)} {rules.spelled(_CLOSE)}"
    tag, ways = _CLOSE.strip(), []
    for each in (*_texts(schema), *(["null"] if "null" in kinds else [])):
        if not isinstance(each, str):
            least, most = each
            ways.append(rules.text_up_to(_CLOSE, [tag], least=least, most=most))
        elif tag in each:
            raise InputError(f"expected texts without {tag}, got {each!r:.80}")
        else:
            ways.append(rules.spelled(each + _CLOSE))
    return rules.one_of(ways)


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Names, schemas, and whether they are needed, of an object that is not written as JSON."""
    for name in schema:
        if name not in _OF_OBJECTS:
            raise InputError(f"of all arguments together, {name!r:.40} is not obeyed in this model's format")
    if schema.get("type") != "object":
        raise InputError(f"type: expected object, got {schema.get('type')!r:.40}")
    fields, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(fields, Mapping) or not isinstance(needed, list):
        raise InputError("expected properties to be an object, and required a list")
    if missing := [each for each in needed if each not in fields]:
        raise InputError(f"required: expected names of properties, got {missing[0]!r:.40}")
    for key, inner in fields.items():
        yield key, inner, key in needed


def _texts(schema: Mapping[str, Any]) -> list[str | tuple[int, int | None]]:
    """What a schema allows among texts: single ones, or those of so many characters. Raises `InputError`."""
    for name in schema:
        if name not in _OF_TEXTS:
            raise InputError(
                f"{name!r:.40} of a text is not obeyed in this model's format, which has no quotes"
            )
    ways = [each for name in ("anyOf", "oneOf") for each in schema.get(name, ())]
    if ways:
        if any(name in schema for name in ("type", "enum", "const", "minLength", "maxLength")):
            raise InputError("anyOf: expected no type beside it, in this model's format")
        found = [text for each in ways if "string" in types_of(each) for text in _texts(each)]
        if "oneOf" in schema and len([each for each in ways if "string" in types_of(each)]) > 1:
            raise InputError("oneOf: expected one text in it, in this model's format")
        return found
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for bound in (least, most):
        if bound is not None and (type(bound) is not int or bound < 0):
            raise InputError(f"minLength and maxLength: expected whole numbers, got {bound!r:.40}")
    if most is not None and least > most:
        raise InputError("expected what some text satisfies, got what none does")
    if "const" not in schema and "enum" not in schema:
        return [(least, most)]
    listed = schema.get("enum", [schema.get("const")])
    fitting = [
        each
        for each in listed
        if isinstance(each, str)
        and least <= len(each)
        and (most is None or len(each) <= most)
        and ("const" not in schema or schema["const"] == each)
    ]
    if not fitting:
        raise InputError("expected what some text satisfies, got what none does")
    return [*fitting]


def _json(rules: Rules, root: Mapping[str, Any], schema: Any) -> str:
    """A value of a schema within that of a tool's parameters, the `root`, that stands alone here."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InputError(f"expected a JSON schema, got {schema!r:.80}")
    if not any(_references(schema)):
        return rules.json(schema)
    named: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
    for reference in (*_references(schema), *_references(named)):
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            raise InputError(
                f"$ref: expected one to $defs or definitions, in this model's format, got {reference!r:.80}"
            )
    return rules.json({**schema, **named})


def _references(schema: Any) -> Iterator[str]:
    """To what a schema and those in it refer."""
    if isinstance(schema, Mapping):
        if isinstance(found := schema.get("$ref"), str):
            yield found
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def quoted(text: str) -> str:
    """A text in a grammar; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """A text in a regular expression of a grammar."""
    return _SIGN.sub(lambda found: "\\n" if found[0] == "\n" else f"\\{found[0]}", text)
