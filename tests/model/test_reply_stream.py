"""Thoughts, calls and the final channel of an answer's tokens, however many of them come at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Built

from flowspec.model.files import ModelFiles
from flowspec.model.harmony import MARKS, FinalChannel
from flowspec.model.reply.parts import Tool, calls_in
from flowspec.model.text import StopStrings, TextStream, Tokenizer
from tests.serve.scripted_model import GPT_OSS, LFM2, MISTRAL, QWEN3, tokenizer_of

TOOLS = (Tool(name="get_weather"),)
REPLIES = {
    QWEN3: '<think>\nH\u20acm\n</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "\U0001f600"}}\n</tool_call>\n\n\u20ac.',
    LFM2: '\u20ac<|tool_call_start|>[get_weather(city="\U0001f600")]<|tool_call_end|>Done.',
    MISTRAL: 'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "\U0001f600"}',
    GPT_OSS: "<|channel|>analysis<|message|>H\u20acm<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "\U0001f600"}<|end|>',
}
EXPECTED = {
    QWEN3: ("I look.\n\u20ac.", "H\u20acm"),
    LFM2: ("\u20acDone.", ""),
    MISTRAL: ("Hm.", ""),
    GPT_OSS: ("", "H\u20acm"),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("replies")
    return {template: tokenizer_of(folder / str(place), template) for place, template in enumerate(REPLIES)}


@pytest.mark.parametrize("template", REPLIES, ids=("Qwen3", "LFM2", "Mistral", "GPT-OSS"))
def test_any_number_of_tokens_at_a_time_gives_the_same(
    template: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[template]
    form = tokenizer.reply_form("", TOOLS)
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
    form = tokenizer.reply_form("", TOOLS, is_single=True)
    ends = [StopStrings(TextStream(tokenizer, (), form)).stops_at(ids[:count]) for count in range(len(ids))]
    first = ends.index(True)
    assert all(ends[first:])
    assert tokenizer.decode(ids[:first]).rstrip().endswith("}")
    rule = StopStrings(TextStream(tokenizer, (), form))
    assert [rule.stops_at(ids[:count]) for count in range(first + 1)] == [False] * first + [True]


# ------------------------------------------------------------------------------------------ channels

WORDS = ("a", "b", "c", "final", "analysis", "commentary", " to=x", "assistant", "d")
SPECIAL = (*MARKS, "<|return|>", "<|constrain|>")
IDS = {text: token for token, text in enumerate((*WORDS, *SPECIAL))}


@pytest.fixture(scope="module")
def in_channels(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("harmony"), SPECIAL)


def made(folder: Path, special: Sequence[str]) -> Tokenizer:
    built = Built(models.BPE({word: IDS[word] for word in WORDS}, []))
    built.add_special_tokens([AddedToken(text, special=True) for text in special])
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
        assert stream.text.split() == expected.split()


def test_thoughts_do_not_stop_an_answer(in_channels: Tokenizer) -> None:
    rule, tokens = StopStrings(TextStream(in_channels, ["b"])), ids(ANSWERS[0][0])
    assert not any(rule.stops_at(tokens[:count]) for count in range(1, len(tokens) + 1))
    tokens = ids(THOUGHT + "<|channel|> final <|message|> c b a")
    assert not rule.stops_at(tokens[:-3])
    assert StopStrings(TextStream(in_channels, ["b"])).stops_at(tokens[:-1])


def test_a_model_without_channels_is_shown_as_it_is(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, ("<|start|>", "<|end|>"))
    assert tokenizer.final_channel() is None


def test_a_final_channel_is_known_by_its_first_word() -> None:
    names = {1: "final", 2: "finally"}
    for token, name in names.items():
        marks = dict(zip(MARKS, (10, 11, 12, 13), strict=True))
        channel = FinalChannel(marks, lambda _, name=name: name)  # type: ignore[misc]
        assert [channel.shows(each) for each in (11, token, 12, 7)] == [False, False, False, name == "final"]
