"""What commands tell before they have an answer."""

from __future__ import annotations

from flowspec.cli.console import STARTING


def without_starting(text: str) -> list[str]:
    """The lines of standard error, but for those that tell that a model is being loaded: how many these are
    depends on how busy the machine is."""
    return [line for line in text.splitlines() if not line.startswith((f"({STARTING})", "(still loading "))]
