"""Replies that are bound to calls, or to a text behind thoughts: whatever is drawn among what the grammar
allows, the reader of the same form reads calls in it, with arguments that the tools' schemas allow, or a text
of the format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from flowspec.core.protocol.messages import Grammar
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError
from flowspec.model.grammar import GrammarMasks, GrammarVocabulary, check_grammar, is_whole
from flowspec.model.reply import form as forms
from flowspec.model.reply.bound import BoundReply, Wanted, bound_reply, may_think_first
from flowspec.model.reply.form import THOUGHTS, ReplyForm
from flowspec.model.reply.parts import Part, Tool, calls_in
from tests.model.test_reply import BY_NAME, DATA, FORMAT, TAGS
from tests.model.test_reply import joined as said
from tests.nightly import nightly
from tests.schemas import allows

END = 0
BYTES = tuple(bytes([byte]) for byte in range(256))
WORDS = (b'"}', b'{"', b'": ', b'", "', b"}\n", b"\n<", b"ab", b"></", b"parameter>", b"\n\n", b")]", b'")')
GRAMMARS = json.loads((Path(__file__).parents[1] / "data/grammars.json").read_text("utf-8"))
TOOLS = tuple(Tool(name=name, parameters=schema) for name, schema in GRAMMARS["tools"].items())
ANSWER = GRAMMARS["answer"]
DOCUMENT = ("json_schema", json.dumps(ANSWER))
FORMATS = {
    **FORMAT,
    "JSON list": forms.CLOSED_JSON_LIST,
    "JSON list without an end": forms.JSON_LIST,
    "Mistral with ids": forms.MISTRAL_WITH_IDS,
    "Mistral list": forms.MISTRAL_LIST,
    "channels": forms.CHANNELS,
}


def form_of(name: str, thoughts: Any = None, **fields: Any) -> ReplyForm:
    fields |= {"tools": {tool.name: tool for tool in TOOLS}, "is_in_channels": name == "channels"}
    return ReplyForm(calls=FORMATS[name], thoughts=thoughts, **fields)


class Model:
    """A vocabulary, of which the marks are tokens of their own, or none of them is, and a die for a model."""

    def __init__(self, form: ReplyForm, *, has_tokens: bool = True) -> None:
        self.form = form
        calls = () if form.calls is None else (*form.calls.marks, *form.calls.others)
        names = dict.fromkeys((*calls, *form.marks))
        first = 1 + len(BYTES) + len(WORDS)
        self.tokens = {name: first + place for place, name in enumerate(names)} if has_tokens else {}
        spelled = () if has_tokens else tuple(name.encode() for name in names)
        parts = tuple(part for name in spelled for part in (name[:-1], name[-2:] + b"\n"))
        self.table = TokenBytes((b"", *BYTES, *WORDS, *(b"" for _ in self.tokens), *parts, b""))
        self.names = {token: name for name, token in self.tokens.items()}
        self.vocabulary = GrammarVocabulary(self.table)
        tags = (*names, "\n</parameter>", "</parameter>", "</function>", "</arg_value>", "}", ")", "\n")
        self.wishes = [tag.encode() for tag in tags]

    def bound(self, wanted: Wanted, *, may_think: bool = True) -> Grammar:
        return self._grammar(bound_reply(self.form, wanted, self.tokens, may_think=may_think))

    def bound_text(self, kind: str, text: str) -> Grammar:
        assert self.form.calls is None
        return self.bound(Wanted(answer=(kind, text)))

    def _grammar(self, found: BoundReply) -> Grammar:
        check_grammar("reply", found.text, len(found.marks))
        return Grammar(kind="reply", text=found.text, ends=(END,), marks=found.marks)

    def replies(
        self, grammar: Grammar, count: int, *beginnings: str, sizes: Sequence[int] = (1, 7)
    ) -> Iterator[list[Part]]:
        """What is read of so many replies, each in portions of these sizes; they begin in turn with these
        texts, where the grammar allows it."""
        for seed in range(count):
            answer = self.draws(grammar, seed, beginnings[seed % len(beginnings)] if beginnings else "")
            for size in sizes:
                yield self.read(answer, size)

    def draws(self, grammar: Grammar, seed: int, first: str = "", most: int = 3000) -> list[int]:
        """Any reply that the grammar allows: at random, with a wish to write marks now and then, `first` of
        all this text, and to end at last."""
        dice, masks = random.Random(seed), GrammarMasks(grammar, self.vocabulary)
        answer: list[int] = []
        wish = first.encode()
        while len(answer) < most:
            allowed = np.flatnonzero(masks.allowed(answer)).tolist()
            if not wish and dice.random() < 0.15:
                wish = dice.choice(self.wishes)
            wished = [token for token in allowed if (text := self._written(token)) and wish.startswith(text)]
            if wished:
                token = max(wished, key=lambda each: len(self._written(each)))
                wish = wish[len(self._written(token)) :]
            else:
                wish = b""
                (token,) = dice.choices(allowed, [self._weight(each, len(answer)) for each in allowed])
            if token == END:
                assert masks.is_whole(answer)
                assert is_whole(grammar, self.table, answer)
                return answer
            answer.append(token)
        raise AssertionError(f"no end: {self.text(answer)[-300:]!r}")

    def _written(self, token: int) -> bytes:
        return self.names[token].encode() if token in self.names else self.table.texts[token]

    def _weight(self, token: int, length: int) -> float:
        is_long = length > 400
        if token == END or token in self.names:
            return 4000 if is_long else 40
        if is_long and self.table.texts[token][:1] in (b'"', b"]"):
            return 400
        return 40 if any(sign in b'"<>[]{}()|/,;\n' for sign in self.table.texts[token]) else 1

    def pieces(self, answer: list[int]) -> Iterator[tuple[str, bool]]:
        """Texts, and names of marks."""
        held = b""
        for token in answer:
            if token in self.names:
                yield held.decode(), False
                yield self.names[token], True
                held = b""
            else:
                held += self.table.texts[token]
        yield held.decode(), False

    def text(self, answer: list[int]) -> str:
        return "".join(text for text, _ in self.pieces(answer))

    def read(self, answer: list[int], size: int = 7) -> list[Part]:
        reader, found = self.form.reader(), []
        for text, is_mark in self.pieces(answer):
            if is_mark:
                found += reader.push(text, is_mark=True)
            for at in range(0, 0 if is_mark else len(text), size):
                found += reader.push(text[at : at + size])
        return [*found, *reader.finish()]


def follow(model: Model, masks: GrammarMasks, reply: str) -> list[int]:
    """The reply in tokens, each of which the grammar allows behind those before it."""
    answer: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, model.tokens)) or '(?!)'})", reply):
        found = [model.tokens[piece]] if piece in model.tokens else [1 + byte for byte in piece.encode()]
        for token in found:
            assert masks.allowed(answer)[token], model.text([*answer, token])
            answer.append(token)
    assert masks.is_whole(answer)
    return answer


def beginnings(form: ReplyForm) -> list[str]:
    """Of a text, of thoughts, of a call, of a document."""
    if form.is_in_channels:
        return ["<|channel|>final", "<|channel|>analysis", "<|channel|>commentary to=", "{"]
    return ["Well, ", f"{TAGS.begin}Hm.", form.calls.marks[0] if form.calls else "", "{"]


def check_calls(parts: list[Part], schemas: Mapping[str, Any]) -> int:
    """That each call is one of a tool, with arguments that are JSON and that its schema allows."""
    calls = calls_in(parts)
    for call in calls:
        assert allows(schemas[call.name], json.loads(call.arguments)), call
    assert sum(part.kind == "end" for part in parts) == len(calls)
    return len(calls)


SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


has_tokens = pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelled"])
each_form = pytest.mark.parametrize(
    ("variant", "has_tokens"),
    [(variant, has) for variant in FORMATS for has in (True, False) if has or variant != "channels"],
)
"""What is in channels has tokens for them."""


@each_form
def test_a_reply_that_has_to_call_does(variant: str, has_tokens: bool) -> None:
    for thoughts in (None,) if variant == "channels" else nightly((TAGS,), (None, TAGS)):
        model = Model(form_of(variant, thoughts), has_tokens=has_tokens)
        for is_single in (False, True):
            grammar = model.bound(Wanted(tools=TOOLS, is_required=True, is_single=is_single))
            for parts in model.replies(grammar, nightly(2, 6)):
                assert said(parts, "content") == ""
                count = check_calls(parts, SCHEMAS)
                assert count == 1 if is_single else count >= 1


@each_form
def test_a_reply_that_may_call_is_bound_where_it_does(variant: str, has_tokens: bool) -> None:
    for is_single in nightly((has_tokens,), (False, True)):
        form = form_of(variant, None if variant == "channels" else TAGS, is_single=is_single)
        model = Model(form, has_tokens=has_tokens)
        grammar = model.bound(Wanted(tools=TOOLS, is_single=is_single))
        calls, thoughts = set(), set()
        for parts in model.replies(grammar, nightly(8, 12), *beginnings(form)):
            count = check_calls(parts, SCHEMAS)
            assert count <= 1 or not is_single
            calls.add(bool(count))
            thoughts.add(bool(said(parts, "thought")))
        assert calls == thoughts == {True, False}


@pytest.mark.parametrize("variant", [each for each in FORMATS if each != "bare JSON"])
def test_a_reply_is_a_call_or_the_document_that_was_asked_for(variant: str) -> None:
    form = form_of(variant, None if variant == "channels" else TAGS, is_either=True)
    model = Model(form)
    grammar = model.bound(Wanted(tools=TOOLS, answer=DOCUMENT))
    told = set()
    for parts in model.replies(grammar, nightly(4, 12), *beginnings(form), sizes=(1, 10_000)):
        text, count = said(parts, "content"), check_calls(parts, SCHEMAS)
        assert bool(text) is not bool(count)
        assert not text or allows(ANSWER, json.loads(text))
        told.add(bool(text))
    assert told == {True, False}


def test_the_text_in_channels_is_final_and_json_cannot_be_told_from_a_call() -> None:
    model = Model(replace(form_of("channels"), calls=None))
    thoughts = 0
    for parts in model.replies(model.bound_text(*DOCUMENT), 8, sizes=(7,)):
        assert allows(ANSWER, json.loads(said(parts, "content")))
        thoughts += bool(said(parts, "thought"))
    assert thoughts
    wanted = Wanted(tools=TOOLS, answer=DOCUMENT)
    with pytest.raises(InputError, match="calls as JSON without a mark"):
        bound_reply(form_of("bare JSON"), wanted, {}, may_think=True)


FORMATS_OF_TEXTS = {
    "document": DOCUMENT,
    "expression": ("regex", "(yes|no) [0-9]{2}"),
    "any text": ("regex", "(?s:.{0,9})"),
    "no text": ("regex", ""),
    "perhaps a space": ("regex", "a?( b|c)"),
    "perhaps thoughts": ("regex", r"(<think>|\[THINK\]|<\|channel>thought|no)[a-z]"),
}


@pytest.mark.parametrize("thoughts", THOUGHTS, ids=str)
@has_tokens
@pytest.mark.parametrize("is_thinking", [True, False], ids=["begun", "free"])
def test_a_text_of_a_format_stands_behind_thoughts(
    thoughts: Any, has_tokens: bool, is_thinking: bool
) -> None:
    form = ReplyForm(thoughts=thoughts, is_thinking=is_thinking)
    model = Model(form, has_tokens=has_tokens)
    thought = set()
    for kind, text in FORMATS_OF_TEXTS.values():
        assert may_think_first(form, kind, text, may_think=True)
        grammar = model.bound_text(kind, text)
        for parts in model.replies(grammar, nightly(4, 6), f"{thoughts.begin}Hm.{thoughts.end}", ""):
            found = said(parts, "content")
            is_document = kind == "json_schema"
            assert allows(ANSWER, json.loads(found)) if is_document else re.fullmatch(text, found), found
            thought.add(bool(said(parts, "thought")))
    assert thought >= ({True} if is_thinking else {True, False})


def test_a_model_thinks_first_where_it_may_and_where_the_text_can_be_told() -> None:
    free, begun = ReplyForm(thoughts=TAGS), ReplyForm(thoughts=TAGS, is_thinking=True)
    assert may_think_first(free, *DOCUMENT, may_think=True)
    assert may_think_first(begun, *DOCUMENT, may_think=False)
    assert may_think_first(ReplyForm(is_in_channels=True), *DOCUMENT, may_think=False)
    assert not may_think_first(free, *DOCUMENT, may_think=False)
    assert not may_think_first(ReplyForm(), *DOCUMENT, may_think=True)
    for kind, text in (
        ("lark", 'start: "a"'),
        ("regex", " yes| no"),
        ("regex", r"\s+[a-z]*|<think>a"),
        ("regex", "("),
        ("regex", "\ud800"),
    ):
        assert not may_think_first(begun, kind, text, may_think=True), text


@pytest.mark.parametrize("case", DATA["documents"], ids=lambda case: case["reply"][:24])
@has_tokens
def test_thoughts_before_a_document_are_written_as_the_model_was_trained_to(
    case: dict[str, Any], has_tokens: bool
) -> None:
    form = ReplyForm(thoughts=BY_NAME[case["thoughts"]], is_thinking=case["is_thinking"])
    model = Model(form, has_tokens=has_tokens)
    masks = GrammarMasks(model.bound_text(*DOCUMENT), model.vocabulary)
    answer = follow(model, masks, case["reply"])
    assert not any(masks.allowed(answer[:count])[END] for count in range(len(answer)))
    assert np.flatnonzero(masks.allowed(answer)).tolist() == [END]
    parts = model.read(answer)
    assert json.loads(said(parts, "content")) == {"answer": "Paris", "is_sure": True}
    assert bool(said(parts, "thought")) is ("Paris" in case["reply"].partition('"answer"')[0])


@pytest.mark.parametrize("is_required", [True, False], ids=["required", "auto"])
@has_tokens
def test_thoughts_are_where_the_prompt_or_the_request_has_them(has_tokens: bool, is_required: bool) -> None:
    wanted = Wanted(tools=TOOLS, is_required=is_required)
    for is_thinking, may_think in ((True, False), (False, True), (False, False)):
        model = Model(form_of("Hermes", TAGS, is_thinking=is_thinking), has_tokens=has_tokens)
        grammar, thought = model.bound(wanted, may_think=may_think), set()
        for parts in model.replies(grammar, nightly(3, 10), "", TAGS.begin, TAGS.begin, sizes=(7,)):
            check_calls(parts, SCHEMAS)
            thought.add(bool(said(parts, "thought").strip()))
        assert (True in thought) is (is_thinking or may_think)


@pytest.mark.parametrize(("variant", "parameters", "told"), GRAMMARS["unbindable"])
def test_what_cannot_be_obeyed_is_refused_with_the_name_of_the_tool(
    variant: str, parameters: dict[str, Any], told: str
) -> None:
    tool = Tool(name="broken", parameters={"type": "object", **parameters})
    with pytest.raises(InputError) as refused:
        bound_reply(form_of(variant), Wanted(tools=(TOOLS[0], tool)), {}, may_think=False)
    assert str(refused.value).startswith("the parameters of 'broken' cannot be obeyed: ")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("variant", ["Hermes", "XML"])
def test_texts_and_numbers_of_every_kind_of_schema(variant: str) -> None:
    """Of which formats without quotes write each in another way."""
    parameters = GRAMMARS["every kind"]
    tool = Tool(name="f", parameters=parameters)
    model = Model(replace(form_of(variant), tools={"f": tool}))
    grammar = model.bound(Wanted(tools=(tool,), is_required=True, is_single=True))
    for parts in model.replies(grammar, nightly(6, 12), sizes=(7,)):
        assert check_calls(parts, {"f": parameters}) == 1


def test_tools_of_which_the_schemas_are_too_large_are_refused() -> None:
    """Words that only describe do not count, but a property may have the name of one."""

    def asked(count: int, words: int) -> BoundReply:
        kind = {"enum": ["x" * 900], "description": "d" * words, "examples": [{"description": 1}]}
        tools = tuple(
            Tool(
                name=f"f{place}",
                parameters={"type": "object", "properties": {"description": kind, f"{place}": kind}},
            )
            for place in range(count)
        )
        return bound_reply(form_of("Hermes"), Wanted(tools=tools), {}, may_think=False)

    with pytest.raises(InputError, match="the parameters of all tools: expected at most 65536 bytes, got"):
        asked(90, 0)
    found = asked(25, 9000)
    check_grammar("reply", found.text, len(found.marks))
    assert "ddd" not in found.text
    assert '"description":{"enum"' in found.text
    assert len(found.text) < 65_536


def test_tools_of_which_the_schemas_come_to_too_much_are_refused() -> None:
    """Each alone is not too much; nor are many arguments that each have all that the schemas share."""

    def asked(count: int, fields: int) -> str:
        items = {"type": "array", "items": {"type": "integer"}, "maxItems": 1000}
        both = {f"a{place}": {"anyOf": [{"$ref": "#/$defs/A"}, {"const": place}]} for place in range(fields)}
        parameters = {"type": "object", "properties": both, "$defs": {"A": items}}
        tools = tuple(Tool(name=f"f{place}", parameters=parameters) for place in range(count))
        return bound_reply(form_of("XML"), Wanted(tools=tools), {}, may_think=False).text

    assert asked(3, 3)
    with pytest.raises(InputError, match="the parameters of all tools: expected at most 16384 schemas and"):
        asked(30, 1)
    with pytest.raises(InputError, match="of 'f0' cannot be obeyed: json_schema: expected at most 16384"):
        asked(1, 30)


@pytest.mark.parametrize("variant", ["Hermes", "XML"])
@pytest.mark.parametrize("word", ["items", "anyOf", "properties"])
def test_schemas_within_schemas_are_bound_or_refused_by_name(variant: str, word: str) -> None:
    for depth in (5, 60, 300, 900):
        inner: Any = {"type": "string"}
        for _ in range(depth):
            inner = (
                {"items": inner, "type": "array"}
                if word == "items"
                else {word: [inner] if word == "anyOf" else {"a": inner}}
            )
        tool = Tool(name="deep", parameters={"type": "object", "properties": {"a": inner}})
        refused = ""
        try:
            found = bound_reply(form_of(variant), Wanted(tools=(tool,)), {}, may_think=False)
            check_grammar("reply", found.text, len(found.marks))
        except InputError as error:
            refused = str(error)
        assert depth > 5 or not refused
        assert not refused or re.fullmatch("the parameters of 'deep' cannot be obeyed: .+", refused)


@pytest.mark.parametrize("case", DATA["bound"], ids=lambda case: case["variant"])
def test_what_a_grammar_allows_is_what_the_model_was_trained_to_write(case: dict[str, Any]) -> None:
    """By each of the masks on the way, where a call has to be and where one may."""
    form = form_of(case["variant"], BY_NAME[case["thoughts"]])
    for has_tokens in (True,) if case["variant"] == "channels" else (True, False):
        model = Model(form, has_tokens=has_tokens)
        for is_required in (True, False):
            grammar = model.bound(Wanted(tools=TOOLS, is_required=is_required))
            answer = follow(model, GrammarMasks(grammar, model.vocabulary), case["reply"])
            count = check_calls(model.read(answer), SCHEMAS)
            assert count == len(re.findall("get_weather|get-time|get[({]place", case["reply"]))


@pytest.mark.parametrize(
    "case",
    [case for case in DATA["bound"] if case["variant"] != "channels"],
    ids=lambda case: case["variant"],
)
def test_a_bound_call_that_the_reply_ends_within_is_no_text(case: dict[str, Any]) -> None:
    """Nor is any part of it behind its mark, wherever `max_tokens` cuts it; one that is not bound is text."""
    variant, thoughts, reply = case["variant"], BY_NAME[case["thoughts"]], case["reply"]
    mark = "{" if variant == "bare JSON" else FORMATS[variant].marks[0]
    first = reply.index(mark)
    following = reply.find(mark, first + 1) if variant != "bare JSON" else -1
    shown: dict[bool, set[bool]] = {True: set(), False: set()}
    for end in range(first + len(mark), following if following >= 0 else len(reply)):
        for is_bound, found in shown.items():
            reader = form_of(variant, thoughts, is_bound=is_bound).reader()
            parts = [*reader.push(reply[:end]), *reader.finish()]
            found.add(bool(said(parts, "content").strip()))
    assert shown[True] == {False}
    assert True in shown[False]
