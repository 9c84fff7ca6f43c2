"""The parts of a reply in channels (`model/harmony.py`): thoughts in `analysis`, calls where a message is for
a function, and text in `final`, or in `commentary` that is for nobody in particular."""

from __future__ import annotations

import re

from flowspec.model.harmony import CHANNEL, END, FINAL, MESSAGE
from flowspec.model.reply.parts import Part

_TO = re.compile(r"to=(\S+)")
_FUNCTIONS = "functions."


class ChannelReader:
    """A `PartReader`. Messages to functions are calls if `has_calls`, else they are left out, as messages are
    without a channel. What comes before the first mark is text, as in a reply without channels."""

    def __init__(self, *, has_calls: bool) -> None:
        self._has_calls = has_calls
        self._header: list[str] | None = None
        """What is said of the message that begins; None within one."""
        self._named = 0
        """From where in it the channel is named; 0: it is not."""
        self._kind: str | None = "content"
        self.is_thinking = False

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        if is_mark:
            return self._mark(text)
        if self._header is not None:
            self._header.append(text)
            return []
        if not text or self._kind is None:
            return []
        if self._kind == "call":
            return [Part("arguments", text)]
        return [Part("thought" if self._kind == "thought" else "content", text)]

    def finish(self) -> list[Part]:
        return self._end()

    def _mark(self, mark: str) -> list[Part]:
        ended, header = self._end(), self._header
        if mark == MESSAGE:
            return [
                *ended,
                *self._begin(
                    "".join(header or ()), "".join((header or [])[self._named :] if self._named else ())
                ),
            ]
        self._header = None if mark == END else []
        if mark == CHANNEL:
            self._header = [*(header or ()), " "]
        self._named = len(self._header or ()) if mark == CHANNEL else 0
        return ended

    def _begin(self, header: str, channel: str) -> list[Part]:
        """A message begins, of which the header says whom it is for."""
        name = channel.split()[:1]
        self._header = None
        to = _TO.search(header)
        if to is not None and to[1].startswith(_FUNCTIONS) and name:
            self._kind = "call" if self._has_calls else None
            return [Part("name", to[1].removeprefix(_FUNCTIONS))] if self._has_calls else []
        self._kind = None
        if name == ["analysis"]:
            self._kind = "thought"
        elif name == [FINAL] or (name == ["commentary"] and to is None):
            self._kind = "content"
        self.is_thinking = self._kind == "thought"
        return []

    def _end(self) -> list[Part]:
        """The message is over."""
        was_call, self._kind, self.is_thinking = self._kind == "call", None, False
        return [Part("end")] if was_call else []
