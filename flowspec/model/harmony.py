"""Answers in channels (OpenAI's harmony format, GPT-OSS): what of an answer is for the user.

Such a model writes messages, each with a channel: its thoughts (`analysis`), calls of tools (`commentary`),
and the answer (`final`). Special tokens divide them; those of the final channel are the answer's text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

START, CHANNEL, MESSAGE, END = MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""Before whose turn it is, before a channel's name, before a message, and behind it."""
FINAL = "final"


class FinalChannel:
    """Goes through the tokens of one answer. `marks` are the ids of `MARKS`; `decode` gives a text of tokens.

    An answer that names no channel is shown as it is.
    """

    def __init__(self, marks: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> None:
        self._marks = {token: mark for mark, token in marks.items()}
        self._decode = decode
        self._name: list[int] | None = None
        """Tokens of the channel's name, which may be followed by whom the message is for; None outside."""
        self._is_shown = True

    def shows(self, token: int) -> bool:
        """Takes the next token; whether it is part of the text."""
        mark = self._marks.get(token)
        if mark is None:
            if self._name is not None:
                self._name.append(token)
            return self._is_shown
        if mark == CHANNEL:
            self._name = []
        elif mark == MESSAGE:
            self._is_shown = self._name is not None and self._decode(self._name).split()[:1] == [FINAL]
            self._name = None
            return False
        self._is_shown = False
        return False
