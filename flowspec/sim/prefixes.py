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
    """A growing trie of tokens: by number, each prefix without its last token (`parent`), that `token`, and
    its `length`."""

    def __init__(self) -> None:
        self.parent = [EMPTY]
        self.token = [-1]
        self.length = [0]
        self._numbers: dict[tuple[int, int], int] = {}

    def after(self, prefix: int, token: int) -> int:
        """The number of a prefix that is one token longer."""
        found = self._numbers.setdefault((prefix, token), len(self.parent))
        if found == len(self.parent):
            self.parent.append(prefix)
            self.token.append(token)
            self.length.append(self.length[prefix] + 1)
        return found

    def chain(self, tokens: Sequence[int]) -> list[int]:
        """The numbers of all that `tokens` begin with, but the empty one, shortest first."""
        found = [EMPTY]
        for token in tokens:
            found.append(self.after(found[-1], token))
        return found[1:]

    def tokens(self, prefix: int, count: int | None = None) -> list[int]:
        """All of them, or the last `count`, if there are so many."""
        found: list[int] = []
        while prefix != EMPTY and len(found) != count:
            found.append(self.token[prefix])
            prefix = self.parent[prefix]
        return found[::-1]


class PrefixView:
    """The nodes of any number of requests that a drafter was given, as prefixes."""

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        self._known: dict[int, dict[int, int]] = {}

    def take(self, part: SegmentPart) -> list[tuple[int, int]]:
        """Takes a part's rows; returns those whose children are asked for, as (node, prefix)."""
        known = self._known.setdefault(part.commit.request, {})
        asked = []
        for node, parent, token, is_committed in zip(
            part.ids, part.parents, part.tokens, part.committed, strict=True
        ):
            prefix = known[node] = self._prefixes.after(EMPTY if parent < 0 else known[parent], token)
            if not is_committed:
                asked.append((node, prefix))
        return asked

    def prefix(self, request: int, node: int) -> int:
        """Of a node that was given."""
        return self._known[request][node]

    def release(self, request: int) -> None:
        self._known.pop(request, None)
