"""The lines of a journal: what is written is read again, and anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.messages import Sampling
from flowspec.errors import InputError
from flowspec.runtime.journal.lines import Content, Entry, Setting, ask_line, end_line, read_lines, setting_line, tokens_line
from tests.mutations import mutants, one_line_at_most

SETTING = Setting(command="chat", model="bundled", fingerprint="f" * 32, dtype="float32", context=100)
FIRST = Entry(
    prompt=(5, 6, 7),
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=1 << 40),
    new_tokens_max=9,
    stop_ids=frozenset([2]),
    stops=("\n", "ü\u2028"),
    user="What?",
    system="Short.",
    tokens=(8, 9),
    end="stop",
    text="That.",
)
SECOND = replace(FIRST, prompt=(5, 6, 7, 8, 9, 3), user="And?", tokens=(4, 4, 4), end="", text=None)


def written(*entries: Entry, setting: Setting = SETTING) -> bytes:
    """A journal of these answers, whose tokens came one by one."""
    lines, before = [setting_line(setting)], ()
    for entry in entries:
        lines.append(ask_line(entry, before))
        lines += [tokens_line([token]) for token in entry.tokens]
        if entry.end:
            lines.append(end_line(entry.end, entry.text))
        before = entry.known
    return b"".join(lines)


def read(data: bytes) -> Content:
    return read_lines(data, "it")


def test_what_is_written_is_read_again() -> None:
    data = written(FIRST, SECOND)
    assert read(data) == Content(setting=SETTING, earlier=(("What?", "That."),), last=SECOND, size_bytes=len(data))
    assert read(data).messages() == [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    assert len(read(written(FIRST, replace(SECOND, end="cancelled", text="No"))).messages()) == 4


def test_a_prompt_is_written_as_what_it_adds() -> None:
    assert json.loads(ask_line(SECOND, FIRST.known))["ask"]["prompt"] == [3]
    assert json.loads(ask_line(SECOND, (5, 6, 9, 9)))["ask"]["prompt"] == [7, 8, 9, 3]


def test_a_journal_ends_with_its_last_whole_line() -> None:
    """Wherever the writer was killed, or a power cut left zeros."""
    data = written(FIRST, SECOND)
    for end in range(len(setting_line(SETTING)), len(data) + 1):
        for tail in (b"", b"\0" * 5):
            content = read(data[:end] + tail)
            assert content.size_bytes <= end
            assert data[content.size_bytes : end].count(b"\n") == 0
            if content.last is not None:
                whole = SECOND if content.earlier else FIRST
                assert whole.tokens[: len(content.last.tokens)] == content.last.tokens


def test_a_question_that_was_given_up_is_no_part_of_the_dialogue() -> None:
    content = read(written(replace(FIRST, end="", text=None), SECOND))
    assert (content.messages(), content.last) == ([], SECOND)


def row_of(entry: Entry, **changes: Any) -> bytes:
    fields = {**json.loads(ask_line(entry, ()))["ask"], **changes}
    return json.dumps({"ask": fields}).encode() + b"\n"


HEAD = setting_line(SETTING)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "it: expected a journal, got nothing that is whole; ask again"),
        (b"{", "it: expected a journal, got nothing that is whole; ask again"),
        (b"[]\n", "it line 1: expected a journal of flowspec: expected an object"),
        (b"\xff\n", "it line 1: expected a journal of flowspec: 'utf-8' codec"),
        (b'{"journal":2}\n', "it line 1: expected a journal of flowspec: journal: expected format 1, that of this version, got 2"),
        (HEAD.replace(b"float32", b"float33"), "it line 1: expected a journal of flowspec: dtype: expected"),
        (HEAD.replace(b"100}", b"true}"), "it line 1: expected a journal of flowspec: context: expected int, got True"),
        (HEAD + tokens_line([1]), "it line 2: expected a journal of flowspec: expected a question"),
        (written(FIRST) + tokens_line([1]), "it line 6: expected a journal of flowspec: expected a question"),
        (HEAD + row_of(FIRST, prompt=[]), "it line 2: expected a journal of flowspec: prompt: expected at least one token"),
        (HEAD + row_of(FIRST, keep=1), "it line 2: expected a journal of flowspec: keep: expected 0 to 0, got 1"),
        (HEAD + row_of(FIRST, stops=[""]), "it line 2: expected a journal of flowspec: stops: expected texts that are not empty"),
        (HEAD + row_of(FIRST, user="\ud800"), "it line 2: expected a journal of flowspec: 'utf-8' codec"),
        (HEAD + row_of(FIRST) + tokens_line([1, 2]), "it line 3: expected a journal of flowspec: tokens: expected none that ends"),
        (HEAD + row_of(FIRST) + tokens_line([1] * 10), "it line 3: expected a journal of flowspec: tokens: expected at most 9"),
        (
            HEAD + row_of(FIRST, prompt=[5] * 99) + tokens_line([1, 1]),
            "it line 3: expected a journal of flowspec: tokens: expected at most 100 with the prompt",
        ),
        (HEAD + row_of(FIRST) + end_line("", None), "it line 3: expected a journal of flowspec: end: expected stop, length"),
        (HEAD + b"[" * 100_000 + b"\n", "it line 2: expected a journal of flowspec: "),
        (
            written(FIRST, SECOND, setting=replace(SETTING, command="generate")),
            "it line 6: expected a journal of flowspec: ask: expected one in a journal of generate",
        ),
    ],
    ids=range(19),
)
def test_anything_else_is_refused_in_one_line(data: bytes, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        read(data)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


LEAVES = st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=3) | st.lists(st.integers(-1, 9), max_size=4)
NAMES = st.sampled_from(["journal", "ask", "tokens", "end", "text", "keep", "prompt", "sampling", "seed", "context", "user", "x"])
ROWS = st.dictionaries(NAMES, LEAVES | st.dictionaries(NAMES, LEAVES, max_size=4), max_size=4).map(lambda row: json.dumps(row).encode())
GOOD = written(FIRST, SECOND)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A journal with some of its bytes changed, or lines added."""
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    lines = bytes(data).split(b"\n")
    for row in draw(st.lists(ROWS, max_size=3)):
        lines.insert(draw(st.integers(0, len(lines))), row)
    return b"\n".join(lines)


def lines_of(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


MUTANTS = mutants([json.loads(line) for line in GOOD.splitlines()]).map(lines_of)


@given(st.binary(max_size=300) | spoilt() | st.lists(ROWS, max_size=4).map(b"\n".join) | MUTANTS)
def test_any_bytes_are_a_journal_or_refused(data: bytes) -> None:
    with one_line_at_most():
        content = read(data)
        assert content.size_bytes <= len(data)
        if content.last is not None:
            assert read(written(content.last, setting=replace(content.setting, command="chat"))).last == content.last
