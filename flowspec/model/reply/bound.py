"""What a reply must be that calls tools by their schemas, or is a text of a format: a grammar of all that the
model writes, with free thoughts, in its own format. What it allows, the reader of the same form reads as
calls that the schemas allow, or as such a text.

A mark that is a token of its own is possible where the grammar names it, and nowhere else; one that the
vocabulary spells with other tokens is a text like any other. No free text has one, which would be read as it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.grammar import (
    DESCRIBING,
    NAMED_SCHEMAS,
    check_grammar,
    check_size,
    json_rule,
    rule_of,
    schema_text,
    size_of,
)
from flowspec.model.reply.calls import types_of
from flowspec.model.reply.form import CHANNELS, CallFormat, Piece, ReplyForm
from flowspec.model.reply.parts import CHANNEL, END, MESSAGE, START, Tool

_SPACE = r"/[ \n]{0,4}/"  # before thoughts (GLM), and between them and what follows, if that is no text
_NO_OBJECT = r"/[\s\x1c-\x1f]*([^\s\x1c-\x1f{](?s:.*))?/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which of the tools may be called, whether one has to be (else the reply may be a text), and whether
    only one call may be; `answer`: kind and text of a `Grammar` by which the text is bound, too."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    is_single: bool = False
    answer: tuple[str, str] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the reply may be any text."""
        return not self.is_required and self.answer is None


class BoundReply(NamedTuple):
    """A `Grammar` of kind `reply`, but for what ends it."""

    text: str
    marks: tuple[int, ...]


def bound_reply(form: ReplyForm, wanted: Wanted, tokens: Mapping[str, int], *, may_think: bool) -> BoundReply:
    """What binds a reply of this form. `tokens` are the special tokens by their names. `may_think`: it may
    begin with thoughts, if the model has any. Raises `InputError` for what cannot be obeyed."""
    rules = Rules(tokens, form.marks)
    if form.is_in_channels:
        start = _in_channels(rules, wanted)
    else:
        thoughts = _thoughts(rules, form, wanted, may_think=may_think)
        start = sequence(thoughts, _behind_thoughts(rules, form, wanted))
    return BoundReply(rules.grammar(start), tuple(rules.marks))


def may_think_first(form: ReplyForm, kind: str, text: str, *, may_think: bool) -> bool:
    """Whether a model may think before a text that this grammar allows: it can, the prompt has begun it or it
    `may_think`, and the text can be told from thoughts. True for what is in channels."""
    if form.is_in_channels:
        return True
    if form.thoughts is None or kind == "lark" or not (form.is_thinking or may_think):
        return False
    rules = Rules({}, ())
    try:
        if kind == "regex":
            check_grammar(kind, text)
            check_grammar("reply", rules.grammar(_text_of(rules, form, kind, text)))
    except InputError:
        return False
    return True


def _text_of(rules: Rules, form: ReplyForm, kind: str, text: str) -> str:
    """A text of a grammar. Where thoughts may stand before it, it begins neither as they do nor with the
    space behind them, which readers leave out; a document never does."""
    found = rule_of(kind, text)
    if kind != "regex" or form.thoughts is None:
        return rules.rule(found)
    begin = re.escape(form.thoughts.begin)
    return rules.text(first=rf"{found} & ~/([\s\x1c-\x1f]|{begin})(?s:.*)/")


def _thoughts(rules: Rules, form: ReplyForm, wanted: Wanted, *, may_think: bool) -> str:
    thoughts = form.thoughts
    if thoughts is None or not (form.is_thinking or may_think):
        return ""
    space = "" if wanted.is_free else _SPACE
    rest = sequence(rules.behind(rules.text([thoughts.end]), thoughts.end), space)
    return rest if form.is_thinking else f"({rules.behind(_SPACE, thoughts.begin)} {rest})?"


def _behind_thoughts(rules: Rules, form: ReplyForm, wanted: Wanted) -> str:
    calls = form.calls
    if calls is None:
        assert wanted.answer is not None
        return _text_of(rules, form, *wanted.answer)
    call, mark = _call(rules, calls, wanted.tools), calls.marks[0]
    is_one = wanted.is_single or (wanted.is_free and mark in calls.between)  # more have marks of their own
    more = "" if is_one else f"({rules.spelled(calls.between)} {call})*"
    block = sequence(rules.spelled(*calls.opening), call, more, rules.spelled(calls.closing))
    if not wanted.is_free:
        block = sequence("" if calls.is_bare else rules.spelled(mark), block)
        if wanted.is_required or wanted.answer is None:
            return block
        if calls.is_bare:
            raise InputError(
                "this model writes calls as JSON without a mark, as which an answer in JSON may begin"
            )
        return f"({block} | {rules.rule(rule_of(*wanted.answer))})"
    without = [*calls.marks, *(() if form.thoughts is None else (form.thoughts.begin,))]
    first = _NO_OBJECT if calls.is_bare else ""
    text = rules.text(without, first=first)
    head = rules.behind(text, mark)
    if calls.is_bare:
        return f"({_SPACE} {block} | {head} {block} | {text})"
    if wanted.is_single or calls.is_last:
        return f"({head} {block} | {text})"
    return f"({head} {block})* {text}"


def _call(rules: Rules, calls: CallFormat, tools: Sequence[Tool]) -> str:
    """A call of one of these, without the mark before it."""
    ways = []
    for name, arguments in arguments_of(rules, tools, calls).items():
        begin = [each.replace("{name}", name) if isinstance(each, str) else each for each in calls.begin]
        ways.append(sequence(rules.spelled(*begin), arguments, rules.spelled(calls.end)))
    return rules.rule(*ways)


def _in_channels(rules: Rules, wanted: Wanted) -> str:
    """Messages that are thoughts, and last a call or the text; no text is first where one must be called."""
    text = rules.text()

    def message(channel: str, body: str) -> str:
        return sequence(rules.spelled(f"{CHANNEL}{channel}{MESSAGE}"), body)

    before = [message("analysis", text), *([message("commentary", text)] if wanted.is_free else [])]
    last = [_call(rules, CHANNELS, wanted.tools)] if wanted.tools else []
    if not wanted.is_required:
        last.append(message("final", text if wanted.answer is None else rules.rule(rule_of(*wanted.answer))))
    begun = rules.spelled(f"{END}{START}assistant")
    return f"(({' | '.join(before)}) {begun})* ({' | '.join(last)})"


_SIGN = re.compile(r"[^\w<>]")


class Rules:
    """Each of the `names` that is one of the special `tokens` is that token, and nothing else."""

    def __init__(self, tokens: Mapping[str, int], names: Iterable[str]) -> None:
        self._tokens = {name: tokens[name] for name in names if name in tokens}
        self._cut = re.compile(f"({'|'.join(map(re.escape, self._tokens)) or '(?!)'})")
        self.marks: list[int] = []
        """The tokens that the rules name, in the order of their numbers there."""
        self._rules: dict[str, str] = {}
        self._size = 0

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items())])

    def rule(self, *ways: str) -> str:
        return self._named("r", " | ".join(ways))

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for what a schema allows. Raises `InputError` where all come to too much."""
        body = json_rule(schema)
        if body not in self._rules:
            self._size += size_of(schema)
            check_size(self._size)
        return self.rule(body)

    def spelled(self, *pieces: Piece) -> str:
        return sequence(*map(self._piece, pieces))

    def behind(self, before: str, text: str) -> str:
        """A text behind what a terminal or an expression matches, as one terminal up to the first special
        token: where the library cuts texts into terminals it takes the longest ones, whatever follows."""
        head = self._cut.split(text, maxsplit=1)[0]
        first = self._named("T", f"{before} {_quoted(head)}") if head else before
        return sequence(first, self.spelled(text[len(head) :]))

    def text(
        self, without: Iterable[str] = (), *, least: int = 0, most: float = math.inf, first: str = ""
    ) -> str:
        """Any text of so many characters, or of the expression `first`, that has none of these in it."""
        names = "|".join(_escaped(each) for each in dict.fromkeys(without))
        wanted = first or f"/(?s:.{{{least},{most if most < math.inf else ''}}})/"
        return self._named("T", f"{wanted} & ~/(?s:.*)({names})(?s:.*)/" if names else wanted)

    def _named(self, kind: str, body: str) -> str:
        """The name of a rule (r) or terminal (T) with this body."""
        return self._rules.setdefault(body, f"{kind}{len(self._rules)}")

    def _piece(self, piece: Piece) -> str:
        if isinstance(piece, tuple):
            return f"({sequence(self._piece(piece[0]), *piece[1:])})?"
        parts = self._cut.split(piece)
        return sequence(*(self._mark(part) if part in self._tokens else _quoted(part) for part in parts))

    def _mark(self, name: str) -> str:
        token = self._tokens[name]
        if token not in self.marks:
            self.marks.append(token)
        return f"mark_{self.marks.index(token)}"


def sequence(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return _SIGN.sub(lambda found: "\\n" if found[0] == "\n" else f"\\{found[0]}", text)


Schema = Mapping[str, Any]
_IDS = frozenset(("$schema", "$id"))
_ANY_OTHER = frozenset(("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if"))
"""What says which properties there may be beside those of `properties`."""
_OF_OBJECTS = _IDS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = frozenset(("type", "enum", "const", "minLength", "maxLength", "anyOf", "oneOf"))
_REFERENCE = re.compile(r'"\$ref":"([^"]*)"')
_TAG = "</parameter>"
_CLOSE = f"\n{_TAG}\n"


def arguments_of(rules: Rules, tools: Sequence[Tool], calls: CallFormat) -> dict[str, str]:
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
            write = xml_arguments if calls.has_xml_arguments else Rules.json
            found[tool.name] = write(rules, schema)
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
