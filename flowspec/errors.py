"""The errors a person or a program may meet, split by whose fault they are.

Our own mistakes are assertions, never one of these. Every message says what was expected, what came, and what
to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

ALIKE = 0.7
"""From so much likeness on a word may be another one misspelt."""
ABBREVIATION_MIN = 3
"""Letters that a word must have to stand for a longer name that holds it."""


class FlowSpecError(Exception):
    """Base of all expected errors.

    `exit_status` is what a command returns for it, `report` what it tells programs beyond the text, if
    anything.
    """

    exit_status = 1
    report: dict[str, Any] | None = None


class InputError(FlowSpecError):
    """What the user gave (flag, file, model, prompt) cannot be used."""

    exit_status = 2


class PeerError(FlowSpecError):
    """Another process sent something that no correct peer sends."""


class ClusterError(FlowSpecError):
    """A device is missing, refused its part, or was lost."""


class NoRoomError(ClusterError):
    """What is asked of a device does not fit into its memory."""


class UnexpectedError(ClusterError):
    """Something failed on a device that nobody foresaw: a fault in FlowSpec, or in a library that it uses."""


class BrokenError(ClusterError):
    """A pipeline cannot go on because of `device` (empty: of none in particular); others may take its place.
    `why` is the text in short.

    With `is_refusal` the device is there, but cannot do its part.
    """

    def __init__(self, text: str, device: str, why: str = "", *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal
        self.device = device
        self.why = why or text


def counted(count: int, one: str, ending: str = "s") -> str:
    """So many of a thing, in words."""
    return f"{count} {one}{ending * (count != 1)}"


def meant(word: str, known: Iterable[str], alike: float = ALIKE) -> str:
    """The end of an error: what a wrong word may stand for; nothing where that cannot be told.

    That both are flags does not make them alike.
    """
    plain = {each.lstrip("-"): each for each in known}
    found = difflib.get_close_matches(word.lstrip("-"), list(plain), n=1, cutoff=alike)
    if not found and len(_letters(word)) >= ABBREVIATION_MIN:
        holding = [name for name in plain if _letters(word) in _letters(name)]
        found = holding if len(holding) == 1 else []
    return f"; did you mean {plain[found[0]]}?" if found else ""


def _letters(word: str) -> str:
    """Letters and digits alone: pi5 is in raspberry-pi-5."""
    return "".join(character for character in word.casefold() if character.isalnum())


def first_line(error: BaseException, chars_max: int = 200) -> str:
    """What another library's error says, in short, and fit to be shown: it may quote a file that somebody
    else wrote."""
    lines = str(error).strip().splitlines()
    return (
        "".join(character if character.isprintable() else "?" for character in lines[0][:chars_max])
        if lines
        else type(error).__name__
    )
