"""Which IP address a device's name stands for, as far as is known, and when to ask again.

Look-ups take as long as they like, and may hang for as long as the name service is out. So nobody waits for
one who knows an address already:

- The last address that was found is the answer, while a new look-up runs, and when that fails. It is looked
  up again when it is `fresh_s` old; a device that got another address is found at its new one the next time.
- A name without an address is waited for as long as a look-up may take, and is then an error, as it is when
  the look-up says so. It is looked up again when that is `again_s` ago.
- A name is looked up once at a time: one that hangs is not joined by others.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


def is_good_for(address: str, other: str) -> bool:
    """Whether a host's IP address, as known here, means the same on a host at `other`: loopback may not."""
    return not ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(other).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTimeouts:
    """How long what takes, in seconds: see the module. `limit_s` is how long a look-up is waited for."""

    limit_s: float
    fresh_s: float
    again_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is known of a name: its `address`, or what is wrong with it, or neither yet.

    With `is_wanted` it must be looked up now.
    """

    address: str = ""
    trouble: str = ""
    is_wanted: bool = False


@dataclass(slots=True)
class _Name:
    """`began_s` is that of the look-up that runs, if one does; `ended_s` that of the last one."""

    address: str = ""
    trouble: str = ""
    began_s: float | None = None
    ended_s: float | None = None


class AddressBook:
    def __init__(self, timeouts: LookupTimeouts) -> None:
        self.timeouts = timeouts
        self._names: dict[str, _Name] = {}

    def ask(self, name: str, now_s: float) -> Lookup:
        """What is known of a name; where it `is_wanted`, a look-up has begun: `found` or `failed` must
        follow."""
        known = self._names.setdefault(name, _Name())
        if known.began_s is not None:
            is_late = not known.address and now_s - known.began_s >= self.timeouts.limit_s
            trouble = f"no name service answered within {self.timeouts.limit_s:g} s" if is_late else ""
            return Lookup(address=known.address, trouble=trouble)
        lasts_s = self.timeouts.again_s if known.trouble else self.timeouts.fresh_s
        is_wanted = known.ended_s is None or now_s - known.ended_s >= lasts_s
        if is_wanted:
            known.began_s = now_s
        trouble = "" if known.address or is_wanted else known.trouble
        return Lookup(address=known.address, trouble=trouble, is_wanted=is_wanted)

    def found(self, name: str, address: str, now_s: float) -> None:
        """The look-up of a name gave this address."""
        self._names[name] = _Name(address=address, ended_s=now_s)

    def failed(self, name: str, trouble: str, now_s: float) -> None:
        """The look-up of a name failed; the address that it had is kept."""
        self._names[name] = _Name(address=self._names[name].address, trouble=trouble, ended_s=now_s)
