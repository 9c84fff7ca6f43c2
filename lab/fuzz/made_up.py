"""Valid messages that no head and no stage said, with numbers as they occur in a `World`: requests, epochs,
nodes and tokens that may exist."""

from __future__ import annotations

import random
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import (
    HOP_SECONDS,
    Commit,
    Features,
    Hop,
    Logprobs,
    Open,
    Release,
    Sampling,
    Segment,
    SegmentPart,
    Verified,
    VerifiedPart,
)
from flowspec.core.protocol.types import Message

CONTEXT = 48
VOCABULARY = 6
REQUESTS = 3
EPOCHS = 3


def made_up(kind: str, chance: random.Random) -> Message:
    """A message for this kind of connection: `control`, `data` or `head`. Raises `ValueError` for one that
    breaks a message's own rules."""
    if kind == "head":
        return _features(chance) if chance.random() < 0.3 else _verified(chance)
    return _control(chance) if kind == "control" else _segment(chance)


def _few(chance: random.Random, most: int, low: int = 0) -> tuple[int, ...]:
    return tuple(chance.randint(low, 20) for _ in range(chance.randint(0, most)))


def _open(chance: random.Random, request: int, epoch: int) -> Open:
    length = chance.choice((1, 2, 5, CONTEXT, CONTEXT + 1))
    keep, slots = (
        chance.randint(0, length),
        chance.choice((CONTEXT + limits.TREE_NODES_MAX, length, CONTEXT * 9)),
    )
    return Open(
        request=request,
        epoch=epoch,
        keep=keep,
        length=length,
        root=chance.randint(0, 20),
        slots=slots,
        source=chance.choice((-1, -1, 0, 1, 2)),
        sampling=_sampling(chance),
        answer_start=chance.choice((1, length)),
    )


def _sampling(chance: random.Random) -> Sampling:
    """Often with tokens that may not be drawn, all of them too, or that no model has."""
    suppressed = sorted(chance.sample(range(VOCABULARY + 2), chance.choice((0, 0, 2, VOCABULARY + 2))))
    named = sorted(chance.sample(range(VOCABULARY + 2), chance.choice((0, 0, 3))))
    return Sampling(
        temperature=chance.choice((0.0, 1.0)),
        suppress_tokens=tuple(suppressed),
        logit_bias=tuple((token, chance.choice((-100.0, 0.5))) for token in named),
        presence_penalty=chance.choice((0.0, 0.0, 1.5)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
    )


def _commit(chance: random.Random, request: int, epoch: int) -> Commit:
    base = chance.choice((1, 2, 5, chance.randint(1, CONTEXT), limits.CONTEXT_MAX))
    return Commit(
        request=request,
        epoch=epoch,
        base=base,
        path=_few(chance, chance.choice((0, 3, 60))),
        is_over=chance.random() < 0.1,
    )


def _control(chance: random.Random) -> Open | Commit | Release:
    request, epoch = chance.randrange(REQUESTS), chance.randrange(EPOCHS)
    return chance.choice((_open, _commit, _commit, lambda *_: Release(request=request)))(
        chance, request, epoch
    )


def _segment(chance: random.Random) -> Segment:
    parts = []
    for request in chance.sample(range(REQUESTS), chance.randint(0, REQUESTS)):
        epoch = chance.randrange(EPOCHS)
        ids = _few(chance, 6)
        parts.append(
            SegmentPart(
                commit=_commit(chance, request, epoch),
                opening=_open(chance, request, epoch) if chance.random() < 0.3 else None,
                ids=ids,
                parents=tuple(chance.randint(-1, node - 1) for node in ids),
                tokens=tuple(chance.randrange(VOCABULARY + 1) for _ in ids),
                positions=tuple(
                    chance.choice((0, 1, 5, CONTEXT - 1, CONTEXT, limits.CONTEXT_MAX)) for _ in ids
                ),
                committed=tuple(chance.random() < 0.5 for _ in ids),
            )
        )
    return Segment(segment=chance.randrange(40), parts=tuple(parts), hops=_hops(chance))


def _verified(chance: random.Random) -> Verified:
    parts = []
    for _ in range(chance.randint(0, 2)):
        ids = _few(chance, 5)
        tokens = tuple(
            chance.choice((chance.randrange(VOCABULARY), VOCABULARY, limits.VOCABULARY_MAX)) for _ in ids
        )
        few = tuple(chance.randrange(VOCABULARY + 1) for _ in range(chance.randint(0, 3)))
        logprobs = (Logprobs(chosen=-0.5, ids=few, values=(-0.5,) * len(few)),) * (
            chance.randint(0, 1) * len(ids)
        )
        request, epoch = chance.randrange(REQUESTS), chance.randrange(EPOCHS)
        parts.append(
            VerifiedPart(request=request, epoch=epoch, ids=ids, next_tokens=tokens, logprobs=logprobs)
        )
    return Verified(segment=chance.randrange(40), parts=tuple(parts), hops=_hops(chance))


def _features(chance: random.Random) -> Features:
    request, epoch = chance.randrange(REQUESTS), chance.randrange(EPOCHS)
    return Features(request=request, epoch=epoch, ids=_few(chance, 5))


def _hops(chance: random.Random) -> tuple[Hop, ...]:
    seconds = (0.0, 1e-300, 0.01, 1e6)
    found = []
    for _ in range(chance.randint(0, 4)):
        received_s = chance.choice((*seconds, 1e12))
        times: dict[str, Any] = {name: chance.choice(seconds) for name in HOP_SECONDS}
        found.append(Hop(received_s=received_s, **times, rows=chance.randint(0, 9)))
    return tuple(found)
