"""Prefixes by number, and which prefix stands for which node: what a drafter in virtual time remembers of its
requests.

A prefix gets one number for as long as it is remembered, whatever node, epoch or world it comes from, so what
was computed for it once can be looked up. Believes what it is told; `FakeDrafter` is the one that checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.messages import SegmentPart

EMPTY = 0
"""The number of the prefix of no tokens."""


class Prefixes:
    """A growing trie of tokens."""

    def __init__(self) -> None:
        self._parent = [EMPTY]
        self._token = [-1]
        self._length = [0]
        self._numbers: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def after(self, prefix: int, token: int) -> int:
        """The number of a prefix that is one token longer."""
        key = (prefix, token)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._parent)
            self._parent.append(prefix)
            self._token.append(token)
            self._length.append(self._length[prefix] + 1)
        return found

    def chain(self, tokens: Sequence[int]) -> list[int]:
        """The numbers of all that `tokens` begin with, but the empty one, shortest first."""
        found: list[int] = []
        for token in tokens:
            found.append(self.after(found[-1] if found else EMPTY, token))
        return found

    def parent(self, prefix: int) -> int:
        """The prefix without its last token."""
        return self._parent[prefix]

    def token(self, prefix: int) -> int:
        return self._token[prefix]

    def length(self, prefix: int) -> int:
        return self._length[prefix]

    def tokens(self, prefix: int) -> list[int]:
        return self.recent(prefix, self._length[prefix])

    def recent(self, prefix: int, count: int) -> list[int]:
        """The last `count` tokens, or all if there are fewer."""
        found: list[int] = []
        while prefix != EMPTY and len(found) < count:
            found.append(self._token[prefix])
            prefix = self._parent[prefix]
        return found[::-1]


class PrefixView:
    """The nodes of any number of requests that a drafter was given, as prefixes."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self._known: dict[int, dict[int, int]] = {}

    def take(self, part: SegmentPart) -> list[tuple[int, int]]:
        """Takes a part's rows; returns those whose children are asked for, as (node, prefix)."""
        known = self._known.setdefault(part.commit.request, {})
        asked = []
        for node, parent, token, is_committed in zip(
            part.ids, part.parents, part.tokens, part.committed, strict=True
        ):
            prefix = known[node] = self.prefixes.after(EMPTY if parent < 0 else known[parent], token)
            if not is_committed:
                asked.append((node, prefix))
        return asked

    def prefix(self, request: int, node: int) -> int:
        """Of a node that was given."""
        return self._known[request][node]

    def release(self, request: int) -> None:
        self._known.pop(request, None)
