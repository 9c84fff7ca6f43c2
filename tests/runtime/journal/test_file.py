"""Journals on the disk: whose they are, how they are gone on with, and what happens when they cannot be
written."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.errors import InputError
from flowspec.runtime.journal import folder
from flowspec.runtime.journal.file import Journal
from tests.runtime.journal.test_lines import FIRST, SECOND, SETTING, written

EMPTY = replace(FIRST, tokens=(), end="", text=None)


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
        assert content.last == replace(EMPTY, tokens=(8,))
        journal.tokens([9])
        journal.end("stop", "That.")
        journal.ask(replace(SECOND, tokens=()))
        for token in SECOND.tokens:
            journal.tokens([token])
    assert path.read_bytes() == written(FIRST, SECOND)
    assert said == []


def test_the_good_part_of_a_damaged_one_goes_on(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "it"
    good, last = written(replace(FIRST, tokens=(8,), end="")), b'{"tokens":[9],"line":4,"crc":"00000000"}\n'
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
        assert content.last.tokens == (8,)
        assert path.read_bytes() == good
        journal.tokens([9])
        journal.end("stop", "That.")
    assert path.read_bytes() == written(FIRST)


def test_one_writes_at_a_time(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "it"
    with (
        Journal.start(path, SETTING, said.append),
        pytest.raises(InputError, match="in use by another flowspec"),
    ):
        Journal.open(path, said.append)
    Journal.open(path, said.append)[0].close()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "it"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists; --resume goes on with it"):
        Journal.start(path, SETTING, said.append)
    with pytest.raises(InputError, match="nothing that is whole"):
        Journal.open(path, said.append)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "large"])
def test_what_is_no_journal_is_refused(tmp_path: Path, said: list[str], kind: str) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.touch()
        os.truncate(path, 65 << 20)
    with pytest.raises(InputError, match="expected a journal") as caught:
        Journal.open(path, said.append)
    assert "\n" not in str(caught.value)


def test_a_full_disk_ends_the_journal_and_not_the_answer(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    real, room = os.write, len(written(replace(EMPTY, tokens=(8,)))) + 4

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
    assert path.read_bytes() == written(replace(EMPTY, tokens=(8,))) + b'{"to', "nothing follows half a line"


def test_a_folder_keeps_the_newest(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "FILES_MAX", 3)
    inside = tmp_path / "state" / "journals"
    with pytest.raises(InputError, match="holds no dialogue"):
        folder.newest(inside)
    paths = []
    for age in range(5):
        assert not folder.new_path(inside).exists()
        path = inside / f"{age}.jsonl"
        Journal.start(path, SETTING, said.append).close()
        os.utime(path, (age, age))
        paths.append(path)
    assert stat.S_IMODE(inside.stat().st_mode) == 0o700
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert folder.newest(inside) == paths[-1]
    with Journal.open(paths[2], said.append)[0]:
        os.utime(paths[2], (0, 0))
        folder.prune(inside)
        assert [path.exists() for path in paths[2:]] == [True, True, True], "the oldest is in use"
    monkeypatch.setattr(folder, "FOLDER_BYTES_MAX", paths[4].stat().st_size)
    folder.prune(inside)
    assert [path.exists() for path in paths[2:]] == [False, False, True]
