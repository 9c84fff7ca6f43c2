"""Whether what a device says of itself can be true: a head reckons with it, and a device may be broken or
lie. Pure."""

from __future__ import annotations

from flowspec.core.protocol.facts import Facts
from flowspec.plan.memory import mib
from flowspec.plan.profile import implausible
from flowspec.plan.speed import profile_of

MEMORY_BYTES = (16 << 20, 1 << 50)


def why_insane(facts: Facts) -> str:
    """What of it cannot be, in a few words; nothing if all can."""
    least, most = MEMORY_BYTES
    total, free = facts.memory_total_bytes, facts.memory_available_bytes
    if not least <= total <= most:
        return f"{mib(total)} of memory"
    if free > total:
        return f"{mib(free)} of memory free of {mib(total)}"
    return "" if facts.speed is None else implausible(profile_of(facts.speed, facts.memory_total_bytes))
