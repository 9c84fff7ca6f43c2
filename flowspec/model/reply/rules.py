"""The rules of a reply's grammar while it is written, in llguidance's form of Lark."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flowspec.model.grammar import json_rule
from flowspec.model.json_schema import check_size, size_of

_SIGN = re.compile(r"[^\w<>]")


Piece = str | tuple[str, ...]
"""A text; or what may be left out: a text, and behind it what regular expressions match."""


class Rules:
    """Each of the `names` that is one of the special `tokens` is that token, and nothing else."""

    def __init__(self, tokens: Mapping[str, int], names: Iterable[str]) -> None:
        self._tokens = {name: tokens[name] for name in names if name in tokens}
        self._cut = re.compile(f"({'|'.join(map(re.escape, self._tokens)) or '(?!)'})")
        self.marks: list[int] = []
        """The tokens that the rules name, in the order of their numbers there."""
        self._rules: dict[str, str] = {}
        self._size = 0

    def grammar(self, start: str) -> str:
        """All of it, from what a reply is."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items())])

    def rule(self, *ways: str) -> str:
        """The name of a rule for any of these."""
        return self._named("r", " | ".join(ways))

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for what a schema allows. Raises `InputError` where all come to too much."""
        body = json_rule(schema)
        if body not in self._rules:
            self._size += size_of(schema)
            check_size(self._size)
        return self.rule(body)

    def spelled(self, *pieces: Piece) -> str:
        """A text, with the special tokens in it."""
        return sequence(*map(self._piece, pieces))

    def behind(self, before: str, text: str) -> str:
        """A text behind what a terminal or an expression matches, as one terminal up to the first special
        token: where the library cuts texts into terminals it takes the longest ones, whatever follows."""
        head = self._cut.split(text, maxsplit=1)[0]
        first = self._named("T", f"{before} {_quoted(head)}") if head else before
        return sequence(first, self.spelled(text[len(head) :]))

    def text(
        self, without: Iterable[str] = (), *, least: int = 0, most: float = math.inf, first: str = ""
    ) -> str:
        """Any text of so many characters, or of the expression `first`, that has none of these in it."""
        names = "|".join(_escaped(each) for each in dict.fromkeys(without))
        wanted = first or f"/(?s:.{{{least},{most if most < math.inf else ''}}})/"
        return self._named("T", f"{wanted} & ~/(?s:.*)({names})(?s:.*)/" if names else wanted)

    def _named(self, kind: str, body: str) -> str:
        """The name of a rule (r) or terminal (T) with this body."""
        return self._rules.setdefault(body, f"{kind}{len(self._rules)}")

    def _piece(self, piece: Piece) -> str:
        if isinstance(piece, tuple):
            return f"({sequence(self._piece(piece[0]), *piece[1:])})?"
        parts = self._cut.split(piece)
        return sequence(*(self._mark(part) if part in self._tokens else _quoted(part) for part in parts))

    def _mark(self, name: str) -> str:
        token = self._tokens[name]
        if token not in self.marks:
            self.marks.append(token)
        return f"mark_{self.marks.index(token)}"


def sequence(*parts: str) -> str:
    """One part behind the other, without those that are empty."""
    return " ".join(filter(None, parts))


def _quoted(text: str) -> str:
    """A text in a grammar; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """A text in a regular expression of a grammar."""
    return _SIGN.sub(lambda found: "\\n" if found[0] == "\n" else f"\\{found[0]}", text)
