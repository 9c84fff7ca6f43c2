"""Thoughts and calls of an answer's tokens, however many of them come at a time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_plain_reading_is_as_before(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[QWEN3]
    ids = tokenizer._tokenizer(REPLIES[QWEN3], add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert stream.push(ids) + stream.finish() == REPLIES[QWEN3]
    assert stream.take_parts() == ()
