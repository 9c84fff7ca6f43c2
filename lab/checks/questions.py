"""What checks ask the bundled model, how its answers are sampled, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.verify import parting

QUESTIONS = (
    "What is 17 + 25?",
    "What is 3 + 4?",
    "Tell me a story.",
    "What is FlowSpec?",
    "Who are you?",
    "What is 99 - 1?",
)
"""Short ones that it answers."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
)
"""Fields of `Sampling`, as a request's document has them, too."""


def agreement(expected: Sequence[int], found: Sequence[int], stop_ids: frozenset[int]) -> str:
    """`exact` or `wrong`, as in `parting`."""
    return EXACT if parting(expected, found, stop_ids) is None else WRONG
