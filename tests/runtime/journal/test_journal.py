"""Journals: their lines are read again and all else is refused; on the disk they are gone on with, and
cost no answer where they cannot be written."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs, to_builtins

from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.errors import InputError
from flowspec.runtime.journal import file
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.journal.lines import Entry, JournalContent, Row, Setting, ask_row, read_lines, sealed
from flowspec.runtime.question import Question
from flowspec.runtime.session import Limits
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
    question=Question(
        prompt=(5, 6, 7),
        sampling=Sampling(temperature=0.7, top_p=0.9, seed=1 << 40),
        limits=Limits(new_tokens_max=9, stop_ids=frozenset([2])),
        stops=("\n", "ü\u2028"),
        answered=(8, 9),
    ),
    user="What?",
    system="Short.",
    end="stop",
    text="That.",
)


def changed(entry: Entry, *, is_ended: bool = False, **question: Any) -> Entry:
    """The same with another question; its answer has not ended."""
    end = (entry.end, entry.text) if is_ended else (None, None)
    return replace(entry, question=replace(entry.question, **question), end=end[0], text=end[1])


SECOND = replace(changed(FIRST, prompt=(5, 6, 7, 8, 9, 3), answered=(4, 4, 4)), user="And?")


def seal(*rows: Any) -> bytes:
    """A journal of these rows, whatever they say."""
    return b"".join(sealed(row, number) for number, row in enumerate(rows, 1))


def tokens_row(tokens: list[int]) -> Row:
    return Row(tokens=tuple(tokens))


def rows_of(*entries: Entry, setting: Setting = SETTING) -> list[Any]:
    rows: list[Any] = [setting]
    before: tuple[int, ...] = ()
    for entry in entries:
        rows.append(ask_row(entry, before))
        rows += [tokens_row([token]) for token in entry.question.answered]
        if entry.end:
            rows.append(Row(end=entry.end, text=entry.text))
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
    given_up = read(written(changed(FIRST), SECOND))
    assert (given_up.messages(), given_up.last) == ([], SECOND)


def test_journals_of_before_go_on_with_the_arithmetic_that_came_last() -> None:
    rows = rows_of(FIRST, SECOND)
    for at in (len(rows) - 2, len(rows_of(FIRST))):
        content = read(seal(*rows[:at], {"arithmetic": "safe"}, *rows[at:]))
        assert (content.setting, content.last) == (structs.replace(SETTING, arithmetic="safe"), SECOND)


def test_a_journal_ends_with_its_last_whole_line() -> None:
    """Wherever the writer was killed, or a power cut left zeros."""
    data = written(FIRST, SECOND)
    for end in range(len(seal(SETTING)), len(data) + 1):
        for tail in (b"", b"\0" * 5):
            content = read(data[:end] + tail)
            assert content.size_bytes <= end
            assert data[content.size_bytes : end].count(b"\n") == 0
            if content.last is not None:
                whole = SECOND if content.earlier else FIRST
                assert whole.known[: len(content.last.known)] == content.last.known


def beginning(good: JournalContent, of: JournalContent) -> bool:
    """Whether one journal is what another one was earlier."""
    if good.last is None:
        return not good.earlier
    whole = of.last if len(good.earlier) == len(of.earlier) else FIRST
    assert whole is not None
    return good.last.known == whole.known[: len(good.last.known)]


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


def ask_of(entry: Entry, **changes: Any) -> Any:
    return {"ask": {**to_builtins(ask_row(entry, ()))["ask"], **changes}}


HEAD = to_builtins(SETTING)
EARLIER = b'{"journal":1,"command":"chat","model":"m","fingerprint":"f","dtype":"float32","context":100}\n'


@pytest.mark.parametrize(
    ("data", "line", "expected"),
    [
        (b"[]\n", 1, "an object"),
        (b"\xff\n", 1, "decode byte 0xff"),
        (EARLIER, 0, "journal of format 1, expected 6"),
        (seal(HEAD).replace(b"chat", b"chit"), 1, "checksum"),
        (seal({**HEAD, "dtype": "float33"}), 1, "dtype"),
        (seal(HEAD, tokens_row([1])), 2, "a question"),
        (seal(*rows_of(FIRST), tokens_row([1])), 6, "a question"),
        (seal(HEAD, ask_of(FIRST, keep=1)), 2, "keep"),
        (seal(HEAD, ask_of(FIRST), tokens_row([1, 2])), 3, "tokens: expected none"),
        (seal(HEAD, ask_of(FIRST), tokens_row([1] * 10)), 3, "tokens"),
        (seal(HEAD, ask_of(FIRST, prompt=[5] * 99), tokens_row([1, 1])), 3, "at most 100 with the prompt"),
        (seal(HEAD, ask_of(FIRST), {"end": "", "text": None}), 3, "end"),
        (seal(*rows_of(FIRST, SECOND, setting=structs.replace(SETTING, command="generate"))), 6, "ask"),
    ],
    ids=range(13),
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
    entry = changed(FIRST, is_ended=True, sampling=sampling)
    assert read_lines(seal(*rows_of(entry)), "j").last == entry
    for name, wrong in (
        ("suppress_tokens", [5, 3]),
        ("logit_bias", [[5, 101]]),
        ("logit_bias", {"5": 1}),
        ("grammar", {"kind": "xml", "text": "a", "ends": [1]}),
        ("tilt", 1.0),
    ):
        with pytest.raises(InputError, match=name):
            read_lines(seal(SETTING, ask_of(FIRST, sampling={name: wrong})), "j")


def lines_of(rows: list[Any]) -> bytes:
    """With right checksums: whoever can change a journal can count."""
    return seal(*(row if isinstance(row, dict) else {"tokens": row} for row in rows))


MUTANTS = mutants(to_builtins(rows_of(FIRST, SECOND))).map(lines_of)


@given(st.binary(max_size=300) | MUTANTS)
def test_any_bytes_are_a_journal_or_refused(data: bytes) -> None:
    with one_line_at_most():
        content = read(data)
        assert content.size_bytes <= len(data)
        if content.last is not None:
            assert (
                read(written(content.last, setting=structs.replace(content.setting, command="chat"))).last
                == content.last
            )


EMPTY = changed(FIRST, answered=())


@pytest.fixture
def said() -> list[str]:
    return []


def test_an_answer_is_gone_on_with_in_the_same_file(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "it"
    with Journal.start(path, SETTING, said.append) as journal:
        journal.ask(EMPTY)
        journal.tokens([8])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b'{"tokens":[')  # killed in the middle of a line
    journal, content = Journal.open(path, said.append)
    with journal:
        assert content.last == changed(EMPTY, answered=(8,))
        journal.tokens([9])
        journal.end("stop", "That.")
        journal.ask(changed(SECOND, answered=()))
        for token in SECOND.question.answered:
            journal.tokens([token])
    assert path.read_bytes() == written(FIRST, SECOND)
    assert said == []


def test_the_good_part_of_a_damaged_one_goes_on(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "it"
    good, last = written(changed(FIRST, answered=(8,))), b'{"tokens":[9],"line":4,"crc":"00000000"}\n'
    path.write_bytes(good + last)
    told = (
        "line 4 is damaged: its checksum does not fit; the 3 lines before it are whole: --good-part goes on"
    )
    with pytest.raises(InputError, match=told):
        Journal.open(path, said.append)
    assert path.read_bytes() == good + last, "a refusal changes nothing"
    journal, content = Journal.open(path, said.append, good_part=True)
    with journal:
        assert content.last is not None
        assert content.last.question.answered == (8,)
        assert path.read_bytes() == good
        journal.tokens([9])
        journal.end("stop", "That.")
    assert path.read_bytes() == written(FIRST)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "it"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists; --resume goes on with it"):
        Journal.start(path, SETTING, said.append)
    with pytest.raises(InputError, match="nothing that is whole"):
        Journal.open(path, said.append)
    assert path.read_text() == "mine"


def test_what_is_no_journal_is_refused(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 65 << 20)
    for kind in ("folder", "pipe", "missing", "large"):
        with pytest.raises(InputError, match="expected a journal") as caught:
            Journal.open(tmp_path / kind, said.append)
        assert "\n" not in str(caught.value)


def test_a_full_disk_ends_the_journal_and_not_the_answer(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    real, room = os.write, len(written(changed(EMPTY, answered=(8,)))) + 4

    def write(descriptor: int, data: bytes) -> int:
        left = room - path.stat().st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:left])

    monkeypatch.setattr(os, "write", write)
    with Journal.start(path, SETTING, said.append) as journal:
        journal.ask(EMPTY)
        for token in (8, 9, 10):
            journal.tokens([token])
        monkeypatch.undo()
        journal.end("stop", "That.")
    assert len(said) == 1
    assert "cannot be written (No space left on device); the answer goes on without it" in said[0]
    assert path.read_bytes() == written(changed(EMPTY, answered=(8,))) + b'{"to', (
        "nothing follows half a line"
    )


def test_a_folder_keeps_the_newest(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "FILES_MAX", 3)
    inside = tmp_path / "state" / "journals"
    with pytest.raises(InputError, match="holds no dialogue"):
        file.newest(inside)
    paths = []
    for age in range(5):
        assert not file.new_path(inside).exists()
        path = inside / f"{age}.jsonl"
        Journal.start(path, SETTING, said.append).close()
        os.utime(path, (age, age))
        paths.append(path)
    assert stat.S_IMODE(inside.stat().st_mode) == 0o700
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert file.newest(inside) == paths[-1]
    with Journal.open(paths[2], said.append)[0]:
        os.utime(paths[2], (0, 0))
        os.mkfifo(inside / "pipe.jsonl")
        os.utime(inside / "pipe.jsonl", (0, 0))
        file.prune(inside)
        assert [path.exists() for path in paths[2:]] == [True, True, True], "the oldest is in use"
    monkeypatch.setattr(file, "FOLDER_BYTES_MAX", paths[4].stat().st_size)
    file.prune(inside)
    assert [path.exists() for path in paths[2:]] == [False, False, True]
