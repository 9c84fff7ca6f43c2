"""Thoughts, calls and the final channel in what models write, in the texts that their publishers print,
however they are cut."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Built

from flowspec.model.files import ModelFiles
from flowspec.model.reply import form as forms
from flowspec.model.reply.calls import typed
from flowspec.model.reply.form import THOUGHTS, CallFormat, ReplyForm, form_of, format_of, thoughts_of
from flowspec.model.reply.parts import MARKS as CHANNEL_MARKS
from flowspec.model.reply.parts import Part, Tool, calls_in
from flowspec.model.text import TextStream, Tokenizer
from tests.nightly import nightly
from tests.serve.scripted_model import GPT_OSS, MISTRAL, QWEN3, tokenizer_of

FORMAT = {
    "XML": forms.XML,
    "JSON list": forms.JSON_LIST,
    "Mistral": forms.MISTRAL,
    "Hermes": forms.HERMES,
    "bare JSON": forms.BARE_JSON,
}
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
DATA = json.loads((Path(__file__).parents[1] / "data/replies.json").read_text("utf-8"))
"""What models write, in the layouts of their publishers and templates."""
BY_NAME = {"gemma": GEMMA, "brackets": BRACKETS, "tags": TAGS, None: None}


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


def cuts(reply: str, sizes: tuple[int, ...]) -> Iterator[list[str]]:
    for size in (*sizes, len(reply)):
        yield [reply[at : at + size] for at in range(0, len(reply), size)]


@pytest.mark.parametrize("case", DATA["replies"], ids=lambda case: case["format"])
def test_each_format_is_read_however_it_is_cut(case: dict[str, Any]) -> None:
    for pieces in cuts(case["reply"], (1, 2, 3, 5, 8, 13)):
        text, thought, calls = read(form(case["format"], BY_NAME[case["thoughts"]]), pieces)
        assert (text, thought) == (case["text"], case["thought"])
        assert [[name, json.loads(arguments)] for name, arguments in calls] == case["calls"]


@pytest.mark.parametrize(("name", "reply"), DATA["texts"])
def test_what_is_no_call_is_text(name: str, reply: str) -> None:
    for pieces in cuts(reply, (1, 4)):
        assert read(form(name), pieces) == (reply, "", [])


def test_a_call_is_told_as_it_is_written_and_no_part_of_a_mark_shown() -> None:
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
    found = form("Hermes").reader()
    assert found.push("a <tool") == [Part("content", "a ")]
    assert found.push("_caX") == [Part("content", "<tool_caX")]
    assert found.push("<tool_call") == []
    assert found.finish() == [Part("content", "<tool_call")]


@pytest.mark.parametrize(
    ("reply", "text", "arguments"),
    [
        ('x<tool_call>{"name": "f", "arguments": {"a": oops, }}</tool_call>y', "xy", '{"a": oops, }'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>y', "y", '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", '{"a": "b'),
    ],
)
def test_arguments_that_are_no_json_are_handed_on_as_text(reply: str, text: str, arguments: str) -> None:
    assert read(form("Hermes"), [reply]) == (text, "", [("f", arguments)])


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
    found = ReplyForm(is_in_channels=True, calls=forms.CHANNELS if has_calls else None).reader()
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
        reply = f'<tool_call>{{"arguments": {{"text": "{text}"}}, "name": "say"}}</tool_call>'
        _, _, calls = read(form("Hermes"), [reply])
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("say", {"text": said})]
        calls[0][1].encode()


SIGNS: list[tuple[str, Sequence[str], CallFormat]] = [
    ('<tool_call>\n{"name": <function-name>', (), forms.HERMES),
    ("<tool_call>\n<function=example_function_name>", (), forms.XML),
    ("respond with <|tool_call|> followed by a JSON list", (), forms.JSON_LIST),
    ("<|tool_call|>[{}]<|/tool_call|>", (), forms.CLOSED_JSON_LIST),
    ("[TOOL_CALLS] [", ["[TOOL_CALLS]"], forms.MISTRAL_LIST),
    ("[TOOL_CALLS]", ["[ARGS]"], forms.MISTRAL),
    ("[TOOL_CALLS]", ["[ARGS]", "[CALL_ID]"], forms.MISTRAL_WITH_IDS),
    ('{"name": function name, "parameters": dictionary of argument name and its value}', (), forms.BARE_JSON),
    ("", ["<|python_tag|>"], forms.BARE_JSON),
    ("", MARKS, forms.CHANNELS),
]


def test_a_format_is_recognised_and_a_prompt_may_open_thoughts() -> None:
    for template, vocabulary, expected in SIGNS:
        assert format_of(template, vocabulary) is expected
    for unread in (
        "<tool_call>{name}\n<arg_key>",
        "<|tool_call_start|>[",
        "<|tool_call>call:",
        "<function_calls>",
    ):
        assert format_of(unread, ()) is None
    assert format_of("{{ messages }}", ["<|end|>"]) is None
    assert form_of("{{ messages }}", ["<|end|>"], "hello", ()) is None
    assert thoughts_of("{{ messages }}") is None
    template = "{{ '<think>' }}"
    for prompt, is_open in (("a<think>\n", True), ("a<think>\n\n</think>\n\n", False), ("a", False)):
        found = form_of(template, (), prompt, ())
        assert found is not None
        assert found.is_thinking is is_open


@pytest.mark.parametrize(
    ("text", "schema", "expected"), [*DATA["typed"], ("[" * 5000, {"type": "array"}, "[" * 5000)]
)
def test_texts_get_the_type_of_their_schema(text: str, schema: Any, expected: Any) -> None:
    assert typed(text, schema) == expected


WORDS = [
    *{mark for each in FORMAT.values() for mark in (*each.marks, *each.others)},
    *("<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "é", "<", "x"),
    *("[f(a=1)]", "[ARGS]"),
    *('{"name": "get_current_weather", "arguments": ', '{"name": "f", "parameters": {', " ", "\n", "\\"),
    *('"', ",", "{", "}", "[", "]"),
]
WORDS.sort()


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
    @settings(max_examples=nightly(25, 500))
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
def test_hostile_replies_take_bounded_time(name: str) -> None:
    mark, many = FORMAT[name].marks[0], nightly(40_000, 1_000_000)
    for reply in (
        mark + '{"name": "get_current_weather", "arguments": {"text": "' + "a" * many + '"}}',
        mark + '{"arguments": {"text": "' + "a" * many,
        mark + "[" * many,
        mark * (many // 10),
        mark + "<parameter=a>" * (many // 10),
        "<think>" * (many // 10),
    ):
        began_s = time.process_time()
        pieces = [reply[at : at + 16] for at in range(0, len(reply), 16)]
        text, thought, calls = read(form(name, TAGS), pieces)
        assert time.process_time() - began_s < 10
        assert len(text) + len(thought) + sum(len(arguments) for _, arguments in calls) > many // 2


OFFERED = (Tool(name="get_weather"),)
REPLIES = {
    QWEN3: '<think>\nH\u20acm\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "\U0001f600"}}\n</tool_call>\n\n\u20ac.',
    MISTRAL: 'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "\U0001f600"}',
    GPT_OSS: "<|channel|>analysis<|message|>H\u20acm<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "\U0001f600"}<|end|>',
}
EXPECTED = {
    QWEN3: ("I look.\n\u20ac.", "H\u20acm"),
    MISTRAL: ("Hm.", ""),
    GPT_OSS: ("", "H\u20acm"),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("replies")
    return {template: tokenizer_of(folder / str(place), template) for place, template in enumerate(REPLIES)}


@pytest.mark.parametrize("template", REPLIES, ids=("Qwen3", "Mistral", "GPT-OSS"))
def test_any_number_of_tokens_at_a_time_gives_the_same(
    template: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[template]
    form = form_of(tokenizer.template(OFFERED), tokenizer.added_tokens, "", OFFERED)
    ids = tokenizer._tokenizer(REPLIES[template], add_special_tokens=False)["input_ids"]

    @given(st.sets(st.integers(0, len(ids))))
    def check(cuts: set[int]) -> None:
        stream = TextStream(tokenizer, ["never"], form)
        shown, parts = "", []
        for begin, end in pairwise(sorted({0, len(ids), *cuts})):
            shown += stream.push(ids[begin:end])
            parts += stream.take_parts()
        shown += stream.finish()
        parts += stream.take_parts()
        thoughts = "".join(part.text for part in parts if part.kind == "thought")
        assert (shown, thoughts) == EXPECTED[template]
        assert shown == stream.text
        assert [call.name for call in calls_in(parts)] == ["get_weather"]
        assert "\U0001f600" in calls_in(parts)[0].arguments
        assert (stream.thought_tokens > 0) == bool(thoughts)

    check()


def test_the_only_call_ends_an_answer_with_the_token_that_ends_it(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[QWEN3]
    ids = tokenizer._tokenizer(REPLIES[QWEN3], add_special_tokens=False)["input_ids"]
    template = tokenizer.template(OFFERED)
    form = form_of(template, tokenizer.added_tokens, "", OFFERED, is_single=True)
    ends = [TextStream(tokenizer, (), form).stops_at(ids[:count]) for count in range(len(ids))]
    first = ends.index(True)
    assert all(ends[first:])
    assert tokenizer.decode(ids[:first]).rstrip().endswith("}")
    rule = TextStream(tokenizer, (), form)
    assert [rule.stops_at(ids[:count]) for count in range(first + 1)] == [False] * first + [True]


# ------------------------------------------------------------------------------------------ channels

NAMES = ("a", "b", "c", "final", "analysis", "commentary", " to=x", "assistant", "d")
SPECIAL = (*CHANNEL_MARKS, "<|return|>", "<|constrain|>")
IDS = {text: token for token, text in enumerate((*NAMES, *SPECIAL))}


@pytest.fixture(scope="module")
def in_channels(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("harmony"), SPECIAL)


def made(folder: Path, special: Sequence[str]) -> Tokenizer:
    built = Built(models.BPE({word: IDS[word] for word in NAMES}, []))
    built.add_special_tokens([AddedToken(text, special=True) for text in special])
    built.decoder = decoders.Fuse()
    built.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    return Tokenizer(ModelFiles(str(folder)))


def ids(text: str) -> list[int]:
    return [IDS[part.replace("_", " ")] for part in text.split()]


THOUGHT = "<|channel|> analysis <|message|> a b <|end|> <|start|> assistant "
ANSWERS = (
    (THOUGHT + "<|channel|> final <|message|> c d <|return|>", "c d"),
    (THOUGHT + "<|channel|> final <|constrain|> b <|message|> c <|return|>", "c"),
    ("<|channel|> commentary _to=x <|message|> a <|end|> <|start|> <|channel|> final <|message|> b", "b"),
    ("<|channel|> final <|message|> a <|end|> <|start|> assistant <|channel|> analysis <|message|> b", "a"),
    (THOUGHT, ""),
    ("<|start|> assistant <|message|> a", ""),
    ("a b <|end|>", "a b"),
)


@pytest.mark.parametrize(("given", "expected"), ANSWERS)
def test_the_text_of_an_answer_is_that_of_its_final_channel(
    given: str, expected: str, in_channels: Tokenizer
) -> None:
    for at_once in (1, 3, 99):
        tokens, stream = ids(given), TextStream(in_channels)
        pieces = [stream.push(tokens[at : at + at_once]) for at in range(0, len(tokens), at_once)]
        assert "".join([*pieces, stream.finish()]) == stream.text
        assert stream.text == expected.replace(" ", "")


def test_thoughts_do_not_stop_an_answer(in_channels: Tokenizer) -> None:
    rule, tokens = TextStream(in_channels, ["b"]), ids(ANSWERS[0][0])
    assert not any(rule.stops_at(tokens[:count]) for count in range(1, len(tokens) + 1))
    tokens = ids(THOUGHT + "<|channel|> final <|message|> c b a")
    assert not rule.stops_at(tokens[:-3])
    assert TextStream(in_channels, ["b"]).stops_at(tokens[:-1])
