"""Judges a board's heat and power: what throttles it now, what did, what holds its clocks down."""

from __future__ import annotations

from collections.abc import Iterator

from flowspec.core.protocol.facts import Board
from flowspec.runtime.health.finding import PROBLEM, WARNING, Finding

CAP_SHARE = 0.95
"""A cap on the processor's clock above this share of what it can do is not told."""
PI_BITS = {0: "under-voltage", 1: "a capped clock", 2: "throttling", 3: "the soft temperature limit"}
"""Of the Raspberry Pi's `get_throttled`: now, and 16 bits higher since it was started."""
POWER, COOLING = "use its maker's power supply and a short cable", "give it a heat sink and a fan"


def heat_findings(name: str, board: Board) -> Iterator[Finding]:
    """What throttles the board, if anything is known of it."""
    bits = board.throttled or 0
    for shift, severity, when in ((0, PROBLEM, "now"), (16, WARNING, "since it was started, though not now")):
        seen = [bit for bit in PI_BITS if bits >> (bit + shift) & 1 and not (shift and bits >> bit & 1)]
        if seen:
            text = f"the firmware reports {', '.join(PI_BITS[bit] for bit in seen)}, {when}"
            advice = POWER if seen == [0] else COOLING if 0 not in seen else f"{POWER}; {COOLING}"
            yield Finding(severity, name, "throttling", text, advice)
    if board.is_capped:
        text = "its kernel holds its clocks down because of heat, now"
        yield Finding(PROBLEM, name, "throttling", text, COOLING)
    if board.celsius is not None and board.trip_c is not None and board.celsius >= board.trip_c:
        text = f"{board.celsius:.0f} degrees, and it throttles from {board.trip_c:.0f} on"
        yield Finding(WARNING, name, "throttling", text, COOLING)
    if (
        board.cpu_mhz is not None
        and board.cpu_max_mhz is not None
        and board.cpu_mhz < CAP_SHARE * board.cpu_max_mhz
    ):
        text = f"its processor may run at {board.cpu_mhz:.0f} MHz of {board.cpu_max_mhz:.0f}"
        advice = "look for a power mode (nvpmodel on a Jetson), a battery saver, or heat"
        yield Finding(WARNING, name, "throttling", text, advice)
    if board.power_mode and not board.power_mode.upper().startswith("MAXN"):
        text = f"its power mode is {board.power_mode}, not MAXN"
        advice = "if its supply and cooling allow: sudo nvpmodel -m 0, then sudo jetson_clocks"
        yield Finding(WARNING, name, "power mode", text, advice)
