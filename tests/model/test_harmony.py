"""Answers in channels: only what is in the final one is text, however the tokens come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from flowspec.model.files import ModelFiles
from flowspec.model.harmony import MARKS, FinalChannel
from flowspec.model.text import StopStrings, TextStream
from flowspec.model.text import Tokenizer as OurTokenizer

WORDS = ("a", "b", "c", "final", "analysis", "commentary", " to=x", "assistant", "d")
SPECIAL = (*MARKS, "<|return|>", "<|constrain|>")
IDS = {text: token for token, text in enumerate((*WORDS, *SPECIAL))}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> OurTokenizer:
    return made(tmp_path_factory.mktemp("harmony"), SPECIAL)


def made(folder: Path, special: Sequence[str]) -> OurTokenizer:
    built = Tokenizer(models.BPE({word: IDS[word] for word in WORDS}, []))
    built.add_special_tokens([AddedToken(text, special=True) for text in special])
    built.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    return OurTokenizer(ModelFiles(str(folder)))


def ids(text: str) -> list[int]:
    return [IDS[part.replace("_", " ")] for part in text.split()]


THOUGHTS = "<|channel|> analysis <|message|> a b <|end|> <|start|> assistant "
ANSWERS = (
    (THOUGHTS + "<|channel|> final <|message|> c d <|return|>", "c d"),
    (THOUGHTS + "<|channel|> final <|constrain|> b <|message|> c <|return|>", "c"),
    (
        "<|channel|> commentary _to=x <|message|> a <|end|> <|start|> <|channel|> final <|message|> b",
        "b",
    ),
    ("<|channel|> final <|message|> a <|end|> <|start|> assistant <|channel|> analysis <|message|> b", "a"),
    (THOUGHTS, ""),
    ("<|start|> assistant <|message|> a", ""),
    ("a b <|end|>", "a b"),
)


@pytest.mark.parametrize(("given", "expected"), ANSWERS)
def test_the_text_of_an_answer_is_that_of_its_final_channel(
    given: str, expected: str, tokenizer: OurTokenizer
) -> None:
    for at_once in (1, 3, 99):
        tokens, stream = ids(given), TextStream(tokenizer)
        pieces = [stream.push(tokens[at : at + at_once]) for at in range(0, len(tokens), at_once)]
        assert "".join([*pieces, stream.finish()]) == stream.text
        assert stream.text.split() == expected.split()


def test_thoughts_do_not_stop_an_answer(tokenizer: OurTokenizer) -> None:
    rule, tokens = StopStrings(TextStream(tokenizer, ["b"])), ids(ANSWERS[0][0])
    assert not any(rule.stops_at(tokens[:count]) for count in range(1, len(tokens) + 1))
    tokens = ids(THOUGHTS + "<|channel|> final <|message|> c b a")
    assert not rule.stops_at(tokens[:-3])
    assert StopStrings(TextStream(tokenizer, ["b"])).stops_at(tokens[:-1])


def test_a_model_without_channels_is_shown_as_it_is(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, ("<|start|>", "<|end|>"))
    assert tokenizer.final_channel() is None


def test_a_final_channel_is_known_by_its_first_word() -> None:
    names = {1: "final", 2: "finally"}
    for token, name in names.items():
        marks = dict(zip(MARKS, (10, 11, 12, 13), strict=True))
        channel = FinalChannel(marks, lambda _, name=name: name)  # type: ignore[misc]
        assert [channel.shows(each) for each in (11, token, 12, 7)] == [False, False, False, name == "final"]
