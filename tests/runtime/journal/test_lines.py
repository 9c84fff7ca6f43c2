"""The lines of a journal: what is written is read again, and anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.errors import InputError
from flowspec.runtime.journal.lines import (
    Entry,
    JournalContent,
    Row,
    Setting,
    arithmetic_row,
    ask_row,
    end_row,
    read_lines,
    sealed,
    setting_row,
    tokens_row,
)
from tests.mutations import mutants, one_line_at_most
from tests.nightly import nightly

SETTING = Setting(
    command="chat",
    model="bundled",
    fingerprint="f" * 32,
    dtype="float32",
    context=100,
    arithmetic="fast",
)
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
    arithmetic="fast",
)
SECOND = replace(FIRST, prompt=(5, 6, 7, 8, 9, 3), user="And?", tokens=(4, 4, 4), end="", text=None)


def seal(*rows: Row) -> bytes:
    """A journal of these rows, whatever they say."""
    return b"".join(sealed(row, number) for number, row in enumerate(rows, 1))


def rows_of(*entries: Entry, setting: Setting = SETTING) -> list[Row]:
    rows: list[Row] = [setting_row(setting)]
    before: tuple[int, ...] = ()
    for entry in entries:
        rows.append(ask_row(entry, before))
        rows += [tokens_row([token]) for token in entry.tokens]
        if entry.end:
            rows.append(end_row(entry.end, entry.text))
        before = entry.known
    return rows


def written(*entries: Entry, setting: Setting = SETTING) -> bytes:
    """A journal of these answers, whose tokens came one by one."""
    return seal(*rows_of(*entries, setting=setting))


def read(data: bytes) -> JournalContent:
    return read_lines(data, "it")


def test_what_is_written_is_read_again() -> None:
    data = written(FIRST, SECOND)
    lines = data.count(b"\n")
    earlier = (("What?", "That."),)
    assert read(data) == JournalContent(
        setting=SETTING, earlier=earlier, last=SECOND, lines=lines, size_bytes=len(data)
    )
    assert read(data).messages() == [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "That."},
    ]
    assert len(read(written(FIRST, replace(SECOND, end="cancelled", text="No"))).messages()) == 4


def test_where_it_ran_is_kept_and_a_journal_of_before_says_nothing_of_it() -> None:
    for setting in (replace(SETTING, cluster="/home/me/boards.toml"), replace(SETTING, local=2)):
        assert read(seal(*rows_of(FIRST, setting=setting))).setting == setting
    before = {name: value for name, value in setting_row(SETTING).items() if name not in ("cluster", "local")}
    assert read(seal(before, *rows_of(FIRST)[1:])).setting == SETTING


def test_another_arithmetic_is_of_all_that_follows_it() -> None:
    rows = rows_of(FIRST, SECOND)
    at = len(rows) - 2  # before the last two tokens
    content = read(seal(*rows[:at], arithmetic_row("safe"), *rows[at:]))
    assert content.setting == replace(SETTING, arithmetic="safe")
    assert content.last == replace(SECOND, changes=((1, "safe"),))
    first = len(rows_of(FIRST))
    content = read(seal(*rows[:first], arithmetic_row("safe"), *rows[first:]))
    assert content.last == replace(SECOND, arithmetic="safe"), "between two answers nothing changes in any"


def test_a_prompt_is_written_as_what_it_adds() -> None:
    assert list(ask_row(SECOND, FIRST.known)["ask"]["prompt"]) == [3]
    assert list(ask_row(SECOND, (5, 6, 9, 9))["ask"]["prompt"]) == [7, 8, 9, 3]


def test_a_journal_ends_with_its_last_whole_line() -> None:
    """Wherever the writer was killed, or a power cut left zeros."""
    data = written(FIRST, SECOND)
    for end in range(len(seal(setting_row(SETTING))), len(data) + 1):
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


def beginning(good: JournalContent, of: JournalContent) -> bool:
    """Whether one journal is what another one was earlier."""
    if good.last is None:
        return not good.earlier
    whole = of.last if len(good.earlier) == len(of.earlier) else FIRST
    assert whole is not None
    return good.last.prompt == whole.prompt and good.last.tokens == whole.tokens[: len(good.last.tokens)]


def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    """What is before its line is whole. In the last line's end it makes half a line of it, as if a head had
    been killed."""
    data = written(FIRST, SECOND)
    whole = read(data)
    for place in range(len(data)):
        line = data[:place].count(b"\n") + 1
        for bit in nightly((place % 8,), range(8)):
            flipped = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            if line == 1:
                with pytest.raises(InputError, match=r"line 1|journal of format"):
                    read(flipped)
                continue
            found = read(flipped)
            assert place == len(data) - 1 or found.damage.startswith(f"it line {line} is damaged: ")
            assert found.lines == line - 1
            assert beginning(found, whole)


def test_lines_that_are_there_twice_missing_or_elsewhere_are_found() -> None:
    lines = written(FIRST, SECOND).splitlines(keepends=True)
    for place in range(1, len(lines)):
        own = f"it line {place + 1} is damaged: it should be line {place + 1} by its own count, and is not"
        below = own.replace(str(place + 1), str(place + 2))
        if place < len(lines) - 1:
            assert read(b"".join(lines[:place] + lines[place + 1 :])).damage == own
            swapped = [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]]
            assert read(b"".join(swapped)).damage == own
        assert read(b"".join([*lines[: place + 1], *lines[place:]])).damage == below


def ask_of(entry: Entry, **changes: Any) -> Row:
    return {"ask": {**ask_row(entry, ())["ask"], **changes}}


HEAD = setting_row(SETTING)
EARLIER = b'{"journal":1,"command":"chat","model":"m","fingerprint":"f","dtype":"float32","context":100}\n'


@pytest.mark.parametrize(
    ("data", "line", "expected"),
    [
        (b"", 0, "nothing that is whole"),
        (b"[]\n", 1, "an object"),
        (b"\xff\n", 1, "codec"),
        (EARLIER, 0, "journal of format 1, expected 4"),
        (seal(HEAD).replace(b"chat", b"chit"), 1, "checksum"),
        (seal({**HEAD, "dtype": "float33"}), 1, "dtype"),
        (seal({**HEAD, "cache": "q4_0"}), 1, "cache"),
        (seal({**HEAD, "context": True}), 1, "context"),
        (seal({**HEAD, "local": "2"}), 1, "local"),
        (seal(HEAD, tokens_row([1])), 2, "a question"),
        (seal(*rows_of(FIRST), tokens_row([1])), 6, "a question"),
        (seal(HEAD, ask_of(FIRST, prompt=[])), 2, "prompt"),
        (seal(HEAD, ask_of(FIRST, keep=1)), 2, "keep"),
        (seal(HEAD, ask_of(FIRST, stops=[""])), 2, "stops"),
        (seal(HEAD, ask_of(FIRST), tokens_row([1, 2])), 3, "tokens: expected none"),
        (seal(HEAD, ask_of(FIRST), tokens_row([1] * 10)), 3, "tokens"),
        (seal(HEAD, ask_of(FIRST, prompt=[5] * 99), tokens_row([1, 1])), 3, "at most 100 with the prompt"),
        (seal(HEAD, ask_of(FIRST), end_row("", None)), 3, "end"),
        (seal(*rows_of(FIRST, SECOND, setting=replace(SETTING, command="generate"))), 6, "ask"),
    ],
    ids=range(19),
)
def test_anything_else_is_refused_in_one_line(data: bytes, line: int, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        read(data)
    (said,) = str(caught.value).splitlines()
    assert said.startswith(f"it line {line}" if line else "it")
    assert expected in said


def test_tokens_that_are_not_drawn_and_biases_are_kept() -> None:
    sampling = Sampling(
        seed=4,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        suppress_tokens=(3, 5),
        logit_bias=((2, -100.0), (9, 0.25)),
        grammar=Grammar(kind="reply", text="a|\u00e9", ends=(1, 7), marks=(9, 2)),
    )
    entry = replace(FIRST, sampling=sampling)
    assert read_lines(seal(*rows_of(entry)), "j").last == entry
    for name, wrong in (
        ("suppress_tokens", [5, 3]),
        ("logit_bias", [[5, 101]]),
        ("logit_bias", {"5": 1}),
        ("grammar", {"kind": "xml", "text": "a", "ends": [1]}),
    ):
        with pytest.raises(InputError, match=name):
            read_lines(seal(setting_row(SETTING), ask_of(FIRST, sampling={name: wrong})), "j")


def test_a_sampling_field_that_a_line_lacks_is_off_and_one_that_is_unknown_is_refused() -> None:
    row = ask_of(FIRST, sampling={"temperature": 0.5, "seed": 4})
    assert read(seal(HEAD, row)).last == replace(
        FIRST, tokens=(), end="", text=None, sampling=Sampling(temperature=0.5, seed=4)
    )
    row = ask_of(FIRST, sampling={"temperature": 0.5, "seed": 4, "tilt": 1.0})
    with pytest.raises(InputError, match="tilt"):
        read(seal(HEAD, row))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(-1, 9), max_size=4)
)
NAMES = st.sampled_from(
    ["journal", "ask", "tokens", "end", "text", "keep", "prompt", "sampling", "seed", "context", "user", "x"]
)
ROWS = st.dictionaries(NAMES, LEAVES | st.dictionaries(NAMES, LEAVES, max_size=4), max_size=4).map(
    lambda row: json.dumps(row).encode()
)
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
    """Also with a right checksum: whoever can change a journal can count."""
    return seal(*(row if isinstance(row, dict) else {"tokens": row} for row in rows))


MUTANTS = mutants(json.loads(json.dumps(rows_of(FIRST, SECOND)))).map(lines_of)


@given(st.binary(max_size=300) | spoilt() | st.lists(ROWS, max_size=4).map(b"\n".join) | MUTANTS)
def test_any_bytes_are_a_journal_or_refused(data: bytes) -> None:
    with one_line_at_most():
        content = read(data)
        assert content.size_bytes <= len(data)
        if content.last is not None:
            assert (
                read(written(content.last, setting=replace(content.setting, command="chat"))).last
                == content.last
            )
