"""Which arithmetic a session computes with, by what its devices answer.

An *arithmetic* is a name of the bits that a device's kernels compute for a precision. Devices of one pipeline
must have the same, and the pipelines of one session, too: else an answer would depend on who was lost. So a
head asks all devices of a pipeline before anything is loaded, and takes the best that all have, best being
the first device's word. The name of the first pipeline that is formed is kept from then on. A device that
lacks it is not taken in, unless a user has allowed a change and no pipeline can be formed without it.
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
    """What the devices of a session agree on: `name` is the arithmetic that is kept, empty before that.

    A name that is given is kept from the beginning, as an earlier session's. With `may_change` another one
    may follow where no pipeline can be formed with it.
    """

    def __init__(self, name: str = "", *, may_change: bool = False) -> None:
        self.name = name
        self.may_change = may_change
        self.lacking: tuple[str, ...] = ()
        """Devices that were left out because they lack the name, since the last pipeline was formed."""
        self._told: dict[str, Arithmetics] = {}
        self._may_leave = may_change  # at first nothing was computed here yet

    def hear(self, device: str, told: Arithmetics) -> None:
        self._told[device] = told

    def lack(self, device: str) -> Lack | None:
        """Why a device cannot take part in what is computed now, if it cannot."""
        told = self._told[device]
        if not told.names:
            return Lack(device=device, text=told.trouble)
        if not self.name or self.name in told.names:
            return None
        text = f"it lacks the arithmetic {self.name}, which is kept, and has {', '.join(told.names)}"
        if not self.may_change:
            text += "; --allow-arithmetic-change would go on without it where nothing else does"
        return Lack(device=device, text=text)

    def agree(self, devices: Sequence[str]) -> str | Lack:
        """The arithmetic of a pipeline of these devices, which have all answered, or who cannot take part."""
        lacks = [lack for device in devices if (lack := self.lack(device)) is not None]
        if not lacks and self.name:
            return self.name
        for lack in lacks:
            has_none = not self._told[lack.device].names
            if has_none or not self._may_leave:
                self.lacking = tuple(dict.fromkeys((*self.lacking, *(() if has_none else (lack.device,)))))
                return lack
        first = devices[0]
        common = self._told[first].names
        for device in devices:
            told = self._told[device]
            left = tuple(name for name in common if name in told.names)
            if not left:
                has, other = ", ".join(told.names), ", ".join(self._told[first].names)
                text = f"it shares no arithmetic of {told.dtype} with the devices before it: it has {has}"
                return Lack(device=device, text=f"{text}, {first} {other}; use --dtype int8")
            common = left
        return common[0]

    def form(self, name: str) -> None:
        """A pipeline that computes with this arithmetic is there."""
        self.name, self.lacking, self._may_leave = name, (), False

    def stop(self) -> str:
        """No pipeline can be formed of those that are there. What a person is told, if this is the reason."""
        if not self.lacking:
            return ""
        lack = "lacks" if len(self.lacking) == 1 else "lack"
        who = f"{', '.join(self.lacking)} {lack} the arithmetic {self.name}"
        if not self.may_change:
            return f"{who}; --allow-arithmetic-change goes on with another, which may give other tokens"
        self._may_leave = True
        return f"{who}; going on with another, as soon as devices answer again"
