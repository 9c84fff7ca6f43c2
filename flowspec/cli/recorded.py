"""Recording answers that a command asks for, for the page of `flowspec serve`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flowspec.errors import InputError
from flowspec.model.text import Tokenizer
from flowspec.runtime.session import Session
from flowspec.runtime.watching import Notes, watch_session
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.recording import write_recording


class NotRecordedError(InputError):
    """The answer is there, but not its recording."""


def check_recording(path: Path) -> None:
    """Whether a recording can be written there, before anything is started."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        why = "is a folder" if path.is_dir() else "is in no folder that can be written"
        raise InputError(f"expected a file for the recording, but {path} {why}")


@contextlib.contextmanager
def recorded(
    session: Session, tokenizer: Tokenizer | None, path: Path | None, notes: Notes
) -> Iterator[None]:
    """Writes what the head does in the meantime, one answer, to a file, with what `notes` tell of devices;
    nothing without one. Raises `NotRecordedError` after the answer."""
    if path is None:
        yield
        return
    watch = watch_session(session, as_numbers if tokenizer is None else tokenizer.decode, keeps=True)
    watch.join(reads=False)
    notes.watch = watch
    try:
        yield
        watch.settle()
        document = watch.recording()
    finally:
        notes.watch = None
        watch.close()
    if document is None:
        raise NotRecordedError(
            "nothing is recorded: the answer was too long for it, or was known before it began"
        )
    try:
        write_recording(path, document)
    except InputError as error:
        raise NotRecordedError(str(error)) from None
