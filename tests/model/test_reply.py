"""Thoughts and calls in what models write, in the texts that their publishers print, however they are cut."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.reply.block_calls import typed
from flowspec.model.reply.form import (
    CHANNELS,
    FORMATS,
    THOUGHTS,
    ReplyForm,
    form_of,
    format_of,
    thoughts_of,
)
from flowspec.model.reply.literals import Literals
from flowspec.model.reply.parts import Part, Tool, calls_in, unfinished

FORMAT = {each.name: each for each in FORMATS}
GEMMA, BRACKETS, TAGS = THOUGHTS
WEATHER = Tool(
    name="get_current_weather",
    description="Get the current weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "state": {"type": "string"},
            "days": {"type": "integer"},
            "dimensions": {"type": "object"},
            "flags": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
    },
)
TOOLS = {WEATHER.name: WEATHER}
Call = tuple[str, Any]


def form(name: str | None, thoughts: Any = None, *, is_thinking: bool = False) -> ReplyForm:
    calls = None if name is None else FORMAT[name]
    return ReplyForm(calls=calls, tools=TOOLS, thoughts=thoughts, is_thinking=is_thinking)


def parts_of(found: ReplyForm, pieces: list[str]) -> list[Part]:
    reader = found.reader()
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


@pytest.mark.parametrize("said", ["<", "<tool", "<tool_call>", '<tool_call>\n{"na', "<thi"])
@pytest.mark.parametrize("before", ["", "<think>Hm.</think>\n\n"])
def test_of_a_bound_reply_a_mark_that_was_cut_is_no_text(said: str, before: str) -> None:
    bound = replace(form("Hermes", TAGS), is_bound=True)
    if not (before and said == "<thi"):  # which would be no mark there
        assert joined(parts_of(bound, [before, said]), "content") == ""
    assert joined(parts_of(bound, [f"{before}1 <", " 2"]), "content") == "1 < 2"
    assert joined(parts_of(form("Hermes", TAGS), [before, "a <"]), "content") == "a <", "it may be one"


def joined(parts: list[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def read(found: ReplyForm, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, thoughts, and calls as names with arguments."""
    parts = parts_of(found, pieces)
    calls = [(call.name, call.arguments) for call in calls_in(parts)]
    assert sum(part.kind == "end" for part in parts) == len(calls)
    return joined(parts, "content"), joined(parts, "thought"), calls


# name of the format, what the model writes, its text, its thoughts, its calls
REPLIES: list[tuple[str, Any, str, str, str, list[Call]]] = [
    (  # Qwen2.5 and Qwen3, as their chat template asks for it
        "Hermes",
        TAGS,
        '<think>\nI need the weather.\n</think>\n\n<tool_call>\n{"name": "get_current_weather", '
        '"arguments": {"city": "San Francisco, CA", "unit": "celsius"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_time", "arguments": {}}\n</tool_call>',
        "",
        "I need the weather.",
        [("get_current_weather", {"city": "San Francisco, CA", "unit": "celsius"}), ("get_time", {})],
    ),
    (  # the other order, and arguments that are a string, as the API has them
        "Hermes",
        None,
        'Let me see.\n<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>',
        "Let me see.\n",
        "",
        [("f", {"a": 1})],
    ),
    (  # Mistral 7B v0.3 up to Small 3.1
        "Mistral",
        None,
        'Hello[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}, "id": "D681PevKs"}, '
        '{"name": "get_age", "arguments":{"name": "John Doe"}}]',
        "Hello",
        "",
        [("add", {"a": 3.5, "b": 4}), ("get_age", {"name": "John Doe"})],
    ),
    (  # Mistral Small 3.2
        "Mistral",
        None,
        '[TOOL_CALLS]add[CALL_ID]D681PevKs[ARGS]{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}',
        "",
        "",
        [("add", {"a": 3.5, "b": 4}), ("multiply", {"a": 3, "b": 6})],
    ),
    (  # Ministral 3
        "Mistral",
        BRACKETS,
        '[THINK]Juleman?[/THINK][TOOL_CALLS]sparklify[ARGS]{"text": "JULEMAND"}',
        "",
        "Juleman?",
        [("sparklify", {"text": "JULEMAND"})],
    ),
    (  # Llama 3.1 and 3.2
        "bare JSON",
        None,
        '{"name": "get_current_weather", "parameters": {"city": "Dallas", "state": "TX"}}',
        "",
        "",
        [("get_current_weather", {"city": "Dallas", "state": "TX"})],
    ),
    (
        "bare JSON",
        None,
        '<|python_tag|>{"type": "function", "name": "get_current_weather", "parameters": {"city": "Dallas"}}',
        "",
        "",
        [("get_current_weather", {"city": "Dallas"})],
    ),
    (
        "bare JSON",
        None,
        '{"name": "get_current_weather", "parameters": {}}; '
        '{"name": "get_current_weather", "parameters": {}}',
        "",
        "",
        [("get_current_weather", {})] * 2,
    ),
    (  # Granite 3
        "JSON list",
        TAGS,
        "<think>\nThe user is asking about the weather.\n</think>\nI'll check.\n"
        '<|tool_call|>[{"name": "get_weather", "arguments": {"location": "New York"}}]',
        "I'll check.\n",
        "The user is asking about the weather.",
        [("get_weather", {"location": "New York"})],
    ),
    (  # Phi-4-mini
        "JSON list",
        None,
        '<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>',
        "",
        "",
        [("foo", {"a": 1})],
    ),
    (  # Qwen3-Coder and Qwen3.5
        "XML",
        None,
        "Sure! Let me check the weather for you."
        "<tool_call>\n<function=get_current_weather>\n<parameter=city>\nDallas\n</parameter>\n"
        '<parameter=dimensions>\n{"width": 10, \n "height": 20}\n</parameter>\n'
        "<parameter=days>\n2\n</parameter>\n<parameter=flags>\nTrue\n</parameter>\n"
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_current_weather>\n<parameter=city>\n12\n</parameter>\n</function>\n"
        "</tool_call>",
        "Sure! Let me check the weather for you.",
        "",
        [
            (
                "get_current_weather",
                {"city": "Dallas", "dimensions": {"width": 10, "height": 20}, "days": 2, "flags": True},
            ),
            ("get_current_weather", {"city": "12"}),
        ],
    ),
    (  # ends within values
        "XML",
        None,
        "<tool_call>\n<function=get_current_weather>\n"
        "<parameter=city>\nsee </tool_call>, </function>\n</parameter>\n"
        '<parameter=dimensions>\n{"a": "</parameter>\\n</tool_call>"}\n</parameter>\n'
        "</function>\n</tool_call>ok",
        "ok",
        "",
        [
            (
                "get_current_weather",
                {"city": "see </tool_call>, </function>", "dimensions": {"a": "</parameter>\n</tool_call>"}},
            )
        ],
    ),
    (  # the same in Python's calls, and in keys and values
        "python lines",
        None,
        '<function_calls>f(a="</function_calls>", b=1)</function_calls>',
        "",
        "",
        [("f", {"a": "</function_calls>", "b": 1})],
    ),
    (
        "keys and values",
        None,
        "<tool_call>get_current_weather\n<arg_key>dimensions</arg_key>\n"
        '<arg_value>{"a": "</arg_value></tool_call>"}</arg_value>\n</tool_call>',
        "",
        "",
        [("get_current_weather", {"dimensions": {"a": "</arg_value></tool_call>"}})],
    ),
    (  # the same without the first tag, which these models leave out at times
        "XML",
        None,
        "Sure!\n<function=get_current_weather>\n<parameter=city>\nDallas\n</parameter>\n</function>\n"
        "</tool_call>",
        "Sure!\n",
        "",
        [("get_current_weather", {"city": "Dallas"})],
    ),
    (
        "XML",
        None,
        "<function=f>\n</function>\n<function=g>\n</function>",
        "",
        "",
        [("f", {}), ("g", {})],
    ),
    (  # GLM-4.5
        "keys and values",
        TAGS,
        "\n<think>Paris, then.</think>\nOne moment.\n"
        "<tool_call>get_current_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "One moment.\n",
        "Paris, then.",
        [("get_current_weather", {"city": "Paris", "days": 3})],
    ),
    (  # LFM2
        "python list",
        None,
        '<|tool_call_start|>[get_candidate_status(candidate_id="12345"), list_files(recursive=True, limit=5, '
        "exts=['.jpg', \".png\"])]<|tool_call_end|>Checking the current status of candidate ID 12345.",
        "Checking the current status of candidate ID 12345.",
        "",
        [
            ("get_candidate_status", {"candidate_id": "12345"}),
            ("list_files", {"recursive": True, "limit": 5, "exts": [".jpg", ".png"]}),
        ],
    ),
    (  # LFM2 that was asked for JSON
        "python list",
        None,
        '<|tool_call_start|>[{"name": "read_excerpt", "arguments": {"from": null}}]<|tool_call_end|>',
        "",
        "",
        [("read_excerpt", {"from": None})],
    ),
    (  # OLMo 3
        "python lines",
        None,
        '<function_calls>get_weather(city="San\\nFrancisco",'
        ' metric=false)\nregister(name="Jo")</function_calls>',
        "",
        "",
        [("get_weather", {"city": "San\nFrancisco", "metric": False}), ("register", {"name": "Jo"})],
    ),
    (  # Gemma 4
        "gemma",
        GEMMA,
        '<|channel>thought\nThey are in Tokyo.<channel|><|tool_call>call:get_weather{location:<|"|>Tokyo, '
        '}<|"|>,days:42,flag:true,nested:{inner_key:<|"|>val<|"|>},items:[<|"|>a<|"|>,-1.5]}<tool_call|>',
        "",
        "They are in Tokyo.",
        [
            (
                "get_weather",
                {
                    "location": "Tokyo, }",
                    "days": 42,
                    "flag": True,
                    "nested": {"inner_key": "val"},
                    "items": ["a", -1.5],
                },
            )
        ],
    ),
]


@pytest.mark.parametrize(("name", "thoughts", "reply", "text", "thought", "calls"), REPLIES)
def test_each_format_is_read_however_it_is_cut(
    name: str, thoughts: Any, reply: str, text: str, thought: str, calls: list[Call]
) -> None:
    for size in (1, 2, 3, 5, 8, 13, len(reply)):
        pieces = [reply[at : at + size] for at in range(0, len(reply), size)]
        found = read(form(name, thoughts), pieces)
        assert found[:2] == (text, thought)
        assert [(each, json.loads(arguments)) for each, arguments in found[2]] == calls


# A reply that is no call, in a format, is text, all of it.
TEXTS = [
    ("Hermes", "Write <tool_call> and </tool_call> around it."),
    ("Hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("Hermes", '<tool_call>\n{"arguments": {"a": 1'),
    ("Hermes", "<tool_call></tool_call>"),
    ("Hermes", '<tool_call>{"arguments": {"a": 1e9999}, "name": "f"}</tool_call>'),
    ("Hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'),
    ("Mistral", "[TOOL_CALLS] not json at all"),
    ("Mistral", "[TOOL_CALLS]"),
    ("Mistral", "[TOOL_CALLS][ARGS]{}"),
    ("bare JSON", '{"answer": 5} and more'),
    ("bare JSON", '{"name": "get_other", "parameters": {}}'),
    ("bare JSON", '<|python_tag|>brave_search.call(query="x")'),
    ("bare JSON", 'The object is {"name": "get_current_weather", "parameters": {}}'),
    ("JSON list", "<|tool_call|>[]"),
    ("XML", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("XML", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"),
    ("keys and values", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
    ("python list", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("python list", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>"),
    ("python list", "<|tool_call_start|>[f(a=1)"),
    ("gemma", "<|tool_call>call:f{a:<tool_call|>"),
]


@pytest.mark.parametrize(("name", "reply"), TEXTS)
def test_what_is_no_call_is_text(name: str, reply: str) -> None:
    for size in (1, 4, len(reply)):
        pieces = [reply[at : at + size] for at in range(0, len(reply), size)]
        assert read(form(name), pieces) == (reply, "", [])


def test_a_name_comes_before_its_arguments_and_they_as_they_are_written() -> None:
    found = form("Hermes").reader()
    said = [
        found.push(piece) for piece in ('<tool_call>{"name": "f", "argu', 'ments": {"te', 'xt": "a', 'b"}')
    ]
    assert said == [
        [],
        [Part("name", "f"), Part("arguments", '{"te')],
        [Part("arguments", 'xt": "a')],
        [Part("arguments", 'b"}'), Part("end")],
    ]


def test_no_part_of_a_mark_is_shown() -> None:
    found = form("Hermes").reader()
    assert found.push("a <tool") == [Part("content", "a ")]
    assert found.push("_caX") == [Part("content", "<tool_caX")]
    assert found.push("<tool_call") == []
    assert found.finish() == [Part("content", "<tool_call")]


def test_arguments_that_are_no_json_are_handed_on_as_text() -> None:
    text = 'x<tool_call>{"name": "f", "arguments": {"a": oops, }}</tool_call>y'
    assert read(form("Hermes"), [text]) == ("xy", "", [("f", '{"a": oops, }')])
    unclosed = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>y'
    assert read(form("Hermes"), [unclosed]) == ("y", "", [("f", '{"a": 1')])


def test_a_call_that_is_cut_off_is_what_came_of_it() -> None:
    assert read(form("Hermes"), ['<tool_call>{"name": "f", "arguments": {"a": "b']) == (
        "",
        "",
        [("f", '{"a": "b')],
    )


def test_thoughts_only_begin_a_reply() -> None:
    plain = form(None, TAGS)
    assert read(plain, ["\n <think>a</think>\n\nb <think>c</think>"])[:2] == ("b <think>c</think>", "a")
    assert read(plain, ["b <think>c</think>"])[:2] == ("b <think>c</think>", "")
    assert read(plain, ["<think>a"])[:2] == ("", "a")
    assert read(plain, ["<thi"])[:2] == ("<thi", "")
    assert read(plain, ["<think></think>b"])[:2] == ("b", "")
    opened = form(None, TAGS, is_thinking=True)
    assert read(opened, ["\na ", "\n</th", "ink>b"])[:2] == ("b", "a")


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]


def channels(reply: str, *, has_calls: bool = True, size: int = 99) -> tuple[str, str, list[tuple[str, str]]]:
    """`reply` has its marks between spaces of their own."""
    found = ReplyForm(is_in_channels=True, calls=CHANNELS if has_calls else None).reader()
    parts: list[Part] = []
    for piece in reply.replace("<|", "\0<|").replace("|>", "|>\0").split("\0"):
        if piece in MARKS:
            parts += found.push(piece, is_mark=True)
        elif not piece.startswith("<|"):  # other special tokens are no text
            for at in range(0, len(piece), size):
                parts += found.push(piece[at : at + size])
    parts += found.finish()
    return (
        joined(parts, "content"),
        joined(parts, "thought"),
        [(call.name, call.arguments) for call in calls_in(parts)],
    )


HARMONY = (
    "<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"
    '{"location":"San Francisco"}<|call|>'
)


def test_channels_hold_thoughts_calls_and_text() -> None:
    expected = ("", "Need to use function get_current_weather.")
    for size in (1, 3, 99):
        assert channels(HARMONY, size=size) == (
            *expected,
            [("get_current_weather", '{"location":"San Francisco"}')],
        )
    assert channels(HARMONY, has_calls=False) == (*expected, [])
    other = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a":1}'
    assert channels(other) == ("", "", [("f", '{"a":1}')])
    assert channels("<|channel|>commentary<|message|>I plan.<|end|>" + other)[0] == "I plan."
    assert channels("<|channel|>final<|message|>Hi.<|return|>") == ("Hi.", "", [])
    assert channels("no channels") == ("no channels", "", [])
    own = ' to=functions.f<|channel|>commentary<|constrain|>json<|message|>{"a":1}'
    for size in (1, 3, 99):  # the prompt ends behind <|start|>assistant
        assert channels(own, size=size) == ("", "", [("f", '{"a":1}')])
        assert channels(" to be or not", size=size) == (" to be or not", "", [])
        assert channels(" to=", size=size) == (" to=", "", [])
    joined = "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}"
    assert channels(joined) == ("", "", [("f", "{}")])


def test_halves_of_a_character_become_one_or_are_replaced() -> None:
    for text, said in (("\\ud83d\\ude00", "\U0001f600"), ("\\ud83d", "\ufffd")):
        for name, reply in (
            ("python list", f'<|tool_call_start|>[say(text="{text}")]<|tool_call_end|>'),
            ("Hermes", f'<tool_call>{{"arguments": {{"text": "{text}"}}, "name": "say"}}</tool_call>'),
        ):
            _, _, calls = read(form(name), [reply])
            assert [(called, json.loads(arguments)) for called, arguments in calls] == [
                ("say", {"text": said})
            ], name
            calls[0][1].encode()


SIGNS = {
    '<tool_call>\n{"name": <function-name>': "Hermes",
    "<tool_call>\n<function=example_function_name>": "XML",
    "<tool_call>{function-name}\n<arg_key>": "keys and values",
    "respond with <|tool_call|> followed by a JSON list": "JSON list",
    "[TOOL_CALLS] [": "Mistral",
    "List of tools: <|tool_list_start|>[": "python list",
    "<|tool_call>call:": "gemma",
    "<function_calls>": "python lines",
    '{"name": function name, "parameters": dictionary of argument name and its value}': "bare JSON",
}


@pytest.mark.parametrize(("template", "name"), SIGNS.items())
def test_a_format_is_recognised_by_the_template(template: str, name: str) -> None:
    found = format_of(template, ())
    assert found is not None
    assert found.name == name


def test_a_format_is_recognised_by_special_tokens() -> None:
    assert format_of("", MARKS) is CHANNELS
    assert format_of("", ["<|tool_call_start|>"]) is FORMAT["python list"]
    assert format_of("{{ messages }}", ["<|end|>"]) is None
    assert form_of("{{ messages }}", ["<|end|>"], "hello", {}) is None
    assert thoughts_of("{{ messages }}") is None


def test_a_prompt_may_open_thoughts() -> None:
    template = "{{ '<think>' }}"
    for prompt, expected in (("a<think>\n", True), ("a<think>\n\n</think>\n\n", False), ("a", False)):
        found = form_of(template, (), prompt, {})
        assert found is not None
        assert found.is_thinking is expected


def test_ids_are_what_templates_take_back() -> None:
    assert FORMAT["Hermes"].new_id().startswith("call_")
    mistral = FORMAT["Mistral"].new_id()
    assert len(mistral) == 9
    assert mistral.isalnum()


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", None, 12),
        ("twelve", None, "twelve"),
        ("'twelve'", None, "'twelve'"),
        ("True", {"type": "boolean"}, True),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ("null", {"type": ["string", "null"]}, None),
        ("none", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "none"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"type": 5, "anyOf": 7, "enum": {"a": 1}}, 5),
        ("NaN", {"type": "number"}, "NaN"),
        ("-4E+339", {"type": "number"}, -4 * 10**339),
        ("[1e400]", {"type": "array"}, [10**400]),
        ("1e9999", {"type": "number"}, "1e9999"),
        ("[1e" + "9" * 30 + "]", {"type": "array"}, "[1e" + "9" * 30 + "]"),
        ("{'a': 1e" + "9" * 30 + "}", {"type": "object"}, "{'a': 1e" + "9" * 30 + "}"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_texts_get_the_type_of_their_schema(text: str, schema: Any, expected: Any) -> None:
    assert typed(text, schema) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(VALUES)
def test_literals_are_those_of_python(value: Any) -> None:
    found = Literals(repr(value))
    assert found.value() == value
    assert found.is_over


@given(st.dictionaries(st.from_regex("[a-z]+", fullmatch=True), VALUES), st.text())
def test_calls_that_are_written_are_read_again(arguments: dict[str, Any], text: str) -> None:
    write = FORMAT["python list"].write
    assert write is not None
    reply = write([("f", arguments), ("g", {"text": text})])
    found = read(form("python list"), [reply])[2]
    assert [(name, json.loads(each)) for name, each in found] == [("f", arguments), ("g", {"text": text})]


WORDS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "\n"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|python_tag|>"),
    *(
        '{"name": "get_current_weather", "arguments": ',
        '{"name": "f", "parameters": {',
        "}",
        "{",
        "[",
        "]",
        " ",
    ),
    *(
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<arg_key>a</arg_key>",
        '"',
        "\\",
        "x",
        ",",
    ),
    *(
        "<arg_value>1</arg_value>",
        "call:f{a:1}",
        "[f(a=1)]",
        "<function_calls>",
        "</function_calls>",
        "é",
        "<",
    ),
]


@st.composite
def cut(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A reply made of what formats are made of, and the same in pieces."""
    reply = "".join(draw(st.lists(st.sampled_from(WORDS), max_size=14)))
    at = sorted({0, len(reply), *draw(st.lists(st.integers(0, len(reply)), max_size=12))})
    return reply, [reply[begin:end] for begin, end in pairwise(at)]


def without_space(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", [None, *FORMAT])
@pytest.mark.parametrize("thoughts", [None, TAGS])
def test_any_cut_gives_the_same_and_nothing_is_lost(name: str | None, thoughts: Any) -> None:
    @given(cut())
    def check(case: tuple[str, list[str]]) -> None:
        reply, pieces = case
        whole = read(form(name, thoughts), [reply])
        assert read(form(name, thoughts), pieces) == whole
        text, thought, calls = whole
        if not calls:
            assert without_space(reply) in [
                without_space(each) for each in (text, f"<think>{thought}</think>{text}", f"<think>{thought}")
            ]

    check()


@pytest.mark.parametrize("name", FORMAT)
@pytest.mark.parametrize(
    "reply",
    [
        "{mark}" + '{"name": "get_current_weather", "arguments": {"text": "' + "a" * 1_000_000 + '"}}',
        "{mark}" + '{"arguments": {"text": "' + "a" * 1_000_000,
        "{mark}" + "[" * 300_000,
        "{mark}" * 30_000,
        "{mark}" + "<parameter=a>" * 60_000,
        "<think>" * 60_000,
    ],
    ids=["long", "unclosed", "brackets", "marks", "parameters", "thoughts"],
)
def test_hostile_replies_take_bounded_time(name: str, reply: str) -> None:
    reply = reply.replace("{mark}", FORMAT[name].marks[0])
    began_s = time.process_time()
    text, thought, calls = read(form(name, TAGS), [reply[at : at + 16] for at in range(0, len(reply), 16)])
    assert time.process_time() - began_s < 10
    assert len(text) + len(thought) + sum(len(arguments) for _, arguments in calls) > 100_000


def test_the_longest_beginning_of_a_mark_is_held_back() -> None:
    assert [unfinished(text, ("<ab>", "b<abc")) for text in ("x", "x<", "x<a", "b<ab", "<ab", "")] == [
        *(0, 1, 2),
        *(4, 3, 0),
    ]
