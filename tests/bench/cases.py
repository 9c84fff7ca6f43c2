"""Cases that need no model: made prompts with made answers."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.bench.cases import PlainCase
from flowspec.core.protocol.messages import Sampling

STOP = 2


def made(
    name: str,
    answer: Sequence[int],
    *,
    domain: str = "made",
    prompt: Sequence[int] = (5, 6, 7),
    sampling: Sampling | None = None,
) -> PlainCase:
    return PlainCase(
        prompt_id=name,
        domain=domain,
        prompt=tuple(prompt),
        sampling=sampling or Sampling(),
        new_tokens_max=30,
        stop_ids=frozenset({STOP}),
        answer=tuple(answer),
    )
