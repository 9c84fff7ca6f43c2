"""Replies in channels (OpenAI's harmony format, GPT-OSS): messages between special tokens.

Thoughts are in the channel `analysis`, calls where a message is for a function, and text is in `final`, or in
`commentary` that is for nobody in particular.
"""

from __future__ import annotations

import re

from flowspec.model.reply.parts import Part

START, CHANNEL, MESSAGE, END = MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""Before whose turn it is, before a channel's name, before a message, and behind it."""
FINAL = "final"
CONSTRAIN = "<|constrain|>"
"""In a header, before the form that a message has."""
_TO = re.compile(r"to=(\S+)")
_RECIPIENT = " to="
"""What a reply begins with that is addressed to a reader: the prompt's end has the rest of its header."""
_FUNCTIONS = "functions."


class ChannelReader:
    """A `PartReader`. Messages to functions are calls if `has_calls`, else they are left out, as messages are
    without a channel. What comes before the first mark is text, as in a reply without channels, unless it
    says whom the first message is for."""

    def __init__(self, *, has_calls: bool) -> None:
        self._has_calls = has_calls
        self._header: list[str] | None = None
        """What is said of the message that begins; None within one."""
        self._named = 0
        """From where in it the channel is named; 0: it is not."""
        self._kind: str | None = "content"
        self._opening: str | None = ""
        """At a reply's beginning: what may be whom the first message is for; None behind it."""
        self.is_thinking = False

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        if is_mark:
            return self._mark(text)
        if self._header is not None:
            self._header.append(text)
            return []
        if not text or self._kind is None:
            return []
        if self._opening is not None:
            text, self._opening = self._opening + text, None
            if text.startswith(_RECIPIENT) or _RECIPIENT.startswith(text):
                self._opening = text
                return []
        if self._kind == "call":
            return [Part("arguments", text)]
        return [Part("thought" if self._kind == "thought" else "content", text)]

    def finish(self) -> list[Part]:
        return [*self._opened(), *self._end()]

    def _opened(self) -> list[Part]:
        """What was held of the beginning, which is text."""
        held, self._opening = self._opening, None
        return [Part("content", held)] if held else []

    def _mark(self, mark: str) -> list[Part]:
        if mark == CONSTRAIN:
            if self._header is not None:
                self._header.append(" ")
            return []
        if mark == CHANNEL and self._opening:
            self._header, self._opening = [self._opening], None
        if opened := self._opened():
            return [*opened, *self._mark(mark)]
        ended, header = self._end(), self._header or []
        if mark == MESSAGE:
            channel = header[self._named :] if self._named else []
            return [*ended, *self._begin("".join(header), "".join(channel))]
        self._header, self._named = None if mark == END else [], 0
        if mark == CHANNEL:
            self._header = [*header, " "]
            self._named = len(self._header)
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
