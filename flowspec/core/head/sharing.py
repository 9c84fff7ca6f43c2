"""Which conversation has computed already what a prompt begins with, so that the stages copy it and it is not
read again.

Stages copy the keys and values of whole blocks of `BLOCK` tokens (`Open.source`). A source may be anything
that the stages hold: an idle conversation, or one that is in use, as far as every stage has run it. One that
is reading the same beginning right now is waited for: side by side both would take twice as long, and a copy
takes next to nothing.

Pure; the head carries out what is found, and sees to it that no stage lets go of a source, or rewinds it,
before it has copied.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import numpy as np

from flowspec.core.head.request import Ids, Request, Source, common_prefix
from flowspec.tree import NodeState

BLOCK = 32
"""Tokens that are copied together, and so the fewest that are. So few rows of a prompt take a stage about as
long as one, for it reads its weights once. And who tries out what others have asked must guess a whole block
at once, not one token after another."""


def find(
    request: Request, others: Iterable[Request], reading: Container[int], block: int = BLOCK
) -> Source | None:
    """From whom a request copies most of what it begins with, now or once that is read; None where nobody has
    a block more of it than the request keeps of its own. Of two that share as much, one that has it already.

    Those `reading` were admitted, and go on with their texts.
    """
    text = np.array(request.tree.committed_tokens(), dtype=np.int64)
    least, best = request.opening.keep // block * block + block, None
    for other in others:
        has, goes_on = other.copyable, other.number in reading and other.awaits is None
        reach = min(len(text) - 1, other.tree.committed_length if goes_on else has)
        if other is request or reach < least or not _is_told(other):
            continue
        shared = _shared(other, text, reach) // block * block
        rank = (shared, shared <= has)
        if shared < least or (best is not None and rank <= (best.count, best.is_ready)):
            continue
        if _is_held(other, shared):
            best = Source(number=other.number, epoch=other.opening.epoch, count=shared, is_ready=rank[1])
    return best


def is_reading_it(source: Source, requests: Mapping[int, Request]) -> bool:
    """Whether a source that was not ready still is not, and goes on."""
    other = requests.get(source.number)
    return (
        other is not None
        and other.submit is not None
        and other.opening.epoch == source.epoch
        and other.copyable < source.count
    )


def copy(request: Request, source: Source, other: Request) -> None:
    """Has a request that was not opened yet begin with what `other` holds."""
    count = source.count
    if other.windowed is not None:
        request.windowed = other.windowed.run(_run_most(other)).keep(count, request.opening.length)
        request.is_read_anew = False
    request.begin_with(source.number, count)


def _shared(other: Request, text: Ids, reach: int) -> int:
    """How many of the first `reach` tokens are the same."""
    found = common_prefix(other.text[:reach], text[:reach])
    path, tree = other.tree.path, other.tree
    if found == len(other.text):
        while found < reach and tree.token(path[found]) == text[found]:
            found += 1
    return found


def _is_told(other: Request) -> bool:
    """Where layers have windows, what they hold depends on the epoch that they know."""
    return other.windowed is None or other.opened


def _is_held(other: Request, count: int) -> bool:
    """Whether layers with a window hold what rows behind so many tokens see, wherever a copy that is asked
    for now is made."""
    return other.windowed is None or other.windowed.run(_run_most(other)).keepable(count) == count


def _run_most(other: Request) -> int:
    """How far any stage may have run it when it copies: it has got what was sent before, and may have heard
    since then that this is committed."""
    tree = other.tree
    sent = (tree.position(node) + 1 for node in tree.living() if tree.state(node) is NodeState.SENT)
    return max(other.run_length, *sent, 0)
