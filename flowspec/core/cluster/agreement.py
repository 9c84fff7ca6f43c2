"""Which arithmetic a session computes with, by what its devices answer.

An *arithmetic* is a name of the bits that a device's kernels compute for a precision. All pipelines of a
session must have the same: else an answer would depend on who was lost. So a head asks all devices of a
pipeline before anything is loaded, and takes the best that all have, best being the first device's word. The
session keeps the name of its first pipeline, and a device that lacks it is not taken in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.cluster_messages import Arithmetics


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A device cannot compute what the others do: `text` says why, in a line."""

    device: str
    text: str


class Agreement:
    """What the devices of a session agree on. `name` is the arithmetic that is kept: that of the session that
    this one resumes, else that of the first pipeline; empty before that."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._told: dict[str, Arithmetics] = {}

    def hear(self, device: str, told: Arithmetics) -> None:
        self._told[device] = told

    def lack(self, device: str) -> Lack | None:
        """Why a device cannot compute what is kept, if it cannot."""
        told = self._told[device]
        if not told.names:
            return Lack(device=device, text=told.trouble)
        if self.name in ("", *told.names):
            return None
        text = f"expected the arithmetic {self.name}, which this began with, got {', '.join(told.names)}"
        return Lack(device=device, text=f"{text}; use devices that have it, or begin anew")

    def agree(self, devices: Sequence[str]) -> str | Lack:
        """The arithmetic of a pipeline of these devices, which have all answered, or who cannot take part."""
        first = self._told[devices[0]].names
        common = first
        for device in devices:
            if (lack := self.lack(device)) is not None:
                return lack
            told = self._told[device]
            common = tuple(name for name in common if name in told.names)
            if not common:
                has, other = ", ".join(told.names), ", ".join(first)
                text = f"it shares no arithmetic of {told.dtype} with the devices before it: it has {has}"
                return Lack(device=device, text=f"{text}, {devices[0]} {other}; use devices that share one")
        return self.name or common[0]
