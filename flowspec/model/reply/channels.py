"""Replies in channels (OpenAI's harmony format, GPT-OSS): messages between special tokens. Thoughts are in
`analysis`, text in `final`, or in `commentary` for nobody in particular, and calls are for a function."""

from __future__ import annotations

import re

from flowspec.model.reply.parts import Kind, Part

START, CHANNEL, MESSAGE, END = MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""Before whose turn it is, before a channel's name, before a message, and behind it."""
CONSTRAIN = "<|constrain|>"  # in a header, before the form that a message has
_CALL = re.compile(r"to=functions\.(\S+)")
_RECIPIENT = " to="  # begins a reply of which the prompt's end has the rest of the header


class ChannelReader:
    """Tells the parts of a reply in channels apart. Messages to functions are calls if `has_calls`, else they
    are left out, as messages are without a channel. What comes before the first mark is text, as in a reply
    without channels, unless it says whom the first message is for."""

    def __init__(self, *, has_calls: bool) -> None:
        self._has_calls = has_calls
        self._begun: str | None = ""
        """At the reply's beginning: what may be whom the first message is for; None behind it."""
        self._header: str | None = None
        """What is said of the message that begins; None within one."""
        self._kind: Kind | None = "content"
        """What the message is; None for one that is left out."""

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is a thought, as far as is known."""
        return self._kind == "thought"

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        """Takes more text, or the name of a special token, which is a mark; returns what is known now."""
        if is_mark:
            return self._mark(text)
        if self._header is not None:
            self._header += text
            return []
        if self._begun is not None:
            text, self._begun = self._begun + text, None
            if text.startswith(_RECIPIENT) or _RECIPIENT.startswith(text):
                self._begun = text
                return []
        return [Part(self._kind, text)] if text and self._kind is not None else []

    def finish(self) -> list[Part]:
        """At a message's end, and the reply's: what was held back."""
        begun, kind, self._begun, self._kind = self._begun, self._kind, None, None
        if kind == "arguments":
            return [Part("end")]
        return [Part("content", begun)] if begun else []

    def _mark(self, mark: str) -> list[Part]:
        if mark == CONSTRAIN:
            if self._header is not None:
                self._header += " "
            return []
        if mark == CHANNEL and self._begun:
            self._header, self._begun = self._begun, None
        header, ended = self._header or "", self.finish()
        self._header = {START: "", CHANNEL: f"{header} {CHANNEL} "}.get(mark)
        if mark != MESSAGE:
            return ended
        _, is_named, channel = header.rpartition(CHANNEL)
        name = channel.split()[:1] if is_named else []
        call = _CALL.search(header)
        if call is not None and name:
            self._kind = "arguments" if self._has_calls else None
            return [*ended, Part("name", call[1])] if self._has_calls else ended
        if name == ["analysis"]:
            self._kind = "thought"
        elif name == ["final"] or (name == ["commentary"] and "to=" not in header):
            self._kind = "content"
        return ended
