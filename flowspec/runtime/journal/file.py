"""A journal on the disk: written as an answer comes, locked by the one who writes it, readable by its owner
alone. A chat's lie in a folder, a file for each dialogue, the oldest going when there are too many.

Every line is one `write` and lies in the operating system's hands when that returns, before its tokens are
shown: a head that is killed loses nothing that was seen. Nothing is synchronised, so a power cut loses what
the system had not written yet (on Linux some 30 seconds); what is left still is the beginning of the same
answer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flowspec.errors import InputError
from flowspec.folders import files_by_age, try_lock, why_unread
from flowspec.runtime.journal.lines import Entry, JournalContent, Row, Setting, ask_row, read_lines, sealed

FILE_BYTES_MAX = 64 << 20
"""A larger file is not read: an answer as long as the longest context takes 56 MB, a token a line."""
FILES_MAX = 20
FOLDER_BYTES_MAX = 64 << 20
SUFFIX = ".jsonl"


class Journal:
    """An open journal. What cannot be written is told once, and ends the journal, not the answer."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        tell: Callable[[str], None],
        *,
        lines: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lines = lines
        self._before = tuple(before)
        self._tokens: list[int] = []
        self._tell = tell
        self._is_broken = False

    @classmethod
    def start(cls, path: Path, setting: Setting, tell: Callable[[str], None]) -> Journal:
        """A new file; raises `InputError` where there is one, or none can be."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from None
        _lock(path, descriptor)
        journal = cls(path, descriptor, tell)
        journal._write(setting)
        return journal

    @classmethod
    def open(
        cls, path: Path, tell: Callable[[str], None], *, good_part: bool = False
    ) -> tuple[Journal, JournalContent]:
        """One that is there, and what it says; half a line at its end is removed. Raises `InputError`.

        A damaged one is refused, or with `good_part` loses the damaged line and all behind it.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from None
        try:
            _lock(path, descriptor)
            content = read_lines(_read(path, descriptor), str(path))
            if content.damage and not good_part:
                lines = f"{content.lines} lines before it are" if content.lines > 1 else "line before it is"
                way = f"the {lines} whole: --good-part goes on from there, and removes the rest"
                raise InputError(f"{content.damage}; {way}")
            os.ftruncate(descriptor, content.size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise _unusable(path, error) from None
        except InputError:
            os.close(descriptor)
            raise
        last = () if content.last is None else content.last.known
        return cls(path, descriptor, tell, lines=content.lines, before=last), content

    def ask(self, entry: Entry) -> None:
        self._write(ask_row(entry, (*self._before, *self._tokens)))
        self._before = tuple(entry.question.prompt)
        self._tokens.clear()

    def tokens(self, tokens: Sequence[int]) -> None:
        """These tokens of its answer are known."""
        self._write(Row(tokens=tuple(tokens)))
        self._tokens += tokens

    def end(self, reason: str, text: str | None) -> None:
        self._write(Row(end=reason, text=text))

    def close(self) -> None:
        """Nothing is written any more; the lock is given back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, row: Setting | Row) -> None:
        assert self._descriptor >= 0, "the journal is closed"
        if self._is_broken:
            return
        self._lines += 1
        try:
            line = sealed(row, self._lines)
            while line:
                line = line[os.write(self._descriptor, line) :]
        except (OSError, UnicodeError) as error:
            self._is_broken = True  # half a line may be there, and must stay the last one
            why = why_unread(error)
            self._tell(f"the journal {self.path} cannot be written ({why}); the answer goes on without it")


def is_locked(path: Path) -> bool:
    """Whether someone writes this journal now; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe has nobody to wait for
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    if not try_lock(descriptor):
        raise InputError(f"{path} is in use by another flowspec; end that one first")


def _read(path: Path, descriptor: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: expected a journal, got something that is no file")
    size = status.st_size
    if size > FILE_BYTES_MAX:
        raise InputError(
            f"{path}: expected a journal of at most {FILE_BYTES_MAX >> 20} MiB, got {size >> 20} MiB"
        )
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(FILE_BYTES_MAX)


def _unusable(path: Path, error: OSError | ValueError) -> InputError:
    if isinstance(error, FileExistsError):
        return InputError(f"{path} exists; --resume goes on with it, another name begins a new journal")
    return InputError(f"{path}: expected a journal that can be read and written ({why_unread(error)})")


# ------------------------------------------------------------------------------------------------- the folder


def new_path(folder: Path) -> Path:
    """A name for a new journal, room being made for it; raises `OSError` where the folder cannot be used."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    prune(folder)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (folder / f"{stamp}-{os.getpid()}-{number}{SUFFIX}" for number in itertools.count())
    return next(path for path in names if not path.exists())


def newest(folder: Path) -> Path:
    """The journal that was written last; raises `InputError` where there is none."""
    found = files_by_age(folder, SUFFIX)
    if not found:
        raise InputError(f"{folder} holds no dialogue that could go on; flowspec chat begins one")
    return found[-1]


def prune(folder: Path) -> None:
    """Removes the oldest journals, so that a new one makes no more than `FILES_MAX`, nor those before it
    `FOLDER_BYTES_MAX`."""
    kept_bytes = 0
    for count, path in enumerate(reversed(files_by_age(folder, SUFFIX)), 1):
        with contextlib.suppress(OSError):  # another chat may prune, too
            kept_bytes += path.stat().st_size
            if (count >= FILES_MAX or kept_bytes > FOLDER_BYTES_MAX) and not is_locked(path):
                path.unlink()
