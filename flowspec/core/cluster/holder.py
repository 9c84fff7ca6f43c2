"""Whether a head that holds a device is there, or died: the device cannot know before its lease is over.

A head that is there renews its lease with every Ping. So whoever asks the device twice sees the end of the
lease move on, or stay where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

RENEWED_S = 0.75
"""By so much the end of a lease that was renewed has moved, at least: Pings come every second, and answers a
little sooner or later."""


def head_called(name: str, unnamed: str = "another head") -> str:
    """A head in a sentence; `head` is what the key of one is called that nobody named."""
    return unnamed if name == "head" else f"head {name}"


@dataclass(slots=True)
class Holder:
    """What was heard of another head's lease so far."""

    until_s: float = float("inf")

    def is_there(self, lease_s: float, now_s: float) -> bool:
        """Whether it was renewed since this was asked first; `lease_s` is what the device says is left of
        it."""
        until_s = now_s + lease_s
        self.until_s = min(self.until_s, until_s)
        return until_s > self.until_s + RENEWED_S
