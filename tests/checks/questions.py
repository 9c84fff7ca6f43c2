"""What checks ask the bundled model, and how its answers are sampled."""

from __future__ import annotations

from typing import Any

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
