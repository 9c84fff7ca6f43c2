"""Which stages have become slower or faster than they were when the pipeline was formed, by what their passes
take. Pure.

Heat, a neighbour on the same board or a weak supply slow a device down while it works; a plan that was made
before then has the wrong stage for its bottleneck. What a pass takes depends on its rows and on the tokens
before them, so passes are compared with passes of the same kind:

- A *kind* is a number of rows and a stretch of context. The first `BASIS` passes of each kind, after a
  warm-up, are what the plan stands on. For a kind that comes up while the stage is known to be slower, they
  count as what they would have taken before.
- How slow a stage *is* now: the median of its last `RECENT` passes, each as a multiple of its kind's basis.
  One slow pass, or seven, say nothing.
- A stage has *changed* when it was `LEVEL` times as slow, or as fast, for `changed_s` of work without a look
  in between at which it was not. Pauses do not count, for a device cools in them.
- What is known of a device goes on counting when another pipeline is formed, for its plan reckons with it
  (`slowness`); its passes are then measured anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from flowspec.core.protocol.cluster_messages import Pong
from flowspec.core.protocol.messages import Hop

LEVEL = 1.2
"""So many times as slow, or as fast, as at first is a change."""
COUNTED = 1.1
"""What is nearer to the speed at first than this is taken for it: noise must not make another plan of a
forming."""
COUNTED_AFTER_S = 10.0
"""Of work, for which a stage must have been beyond `COUNTED` for it to count in a plan."""
WARM_UP = 3
"""A process's first passes are slow, and say nothing about the device."""
BASIS = 5
"""Passes whose median a kind is measured by."""
RECENT = 15
PAUSE_S = 5.0
"""What a pause between two passes counts at most."""
EXACT_ROWS = 16
CONTEXT_MIN = 128
"""Contexts below it are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A device takes `slowness` times what it took when its pipeline was formed; `why` is what it says of its
    heat, where it says anything."""

    device: str
    slowness: float
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        if self.slowness < 1:
            return f"{self.device} is {1 / self.slowness:.2f} times as fast as it was{why}"
        return f"{self.device} has slowed down to {1 / self.slowness:.0%} of its speed{why}"


def kind_of(rows: int, context: int) -> tuple[int, int]:
    """Passes of one kind take about the same: rows to an eighth of a power of two, context to a quarter of
    one."""
    return (rows if rows <= EXACT_ROWS else _rounded(rows, 4)), (
        0 if context < CONTEXT_MIN else _rounded(context, 3)
    )


def _rounded(number: int, bits: int) -> int:
    """A number with so many significant bits, rounded down."""
    step = number.bit_length() - bits
    return number >> step << step


@dataclass(slots=True)
class _Stage:
    """What one stage's passes take. `changed_s` and `counted_s` are for how long it has been beyond `LEVEL`
    and `COUNTED`."""

    device: str
    passes: int = 0
    basis: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    slowness: float = 1.0
    changed_s: float = 0.0
    counted_s: float = 0.0
    looked_at: int = 0
    looked_s: float | None = None

    @property
    def is_off(self) -> bool:
        return max(self.slowness, 1 / self.slowness) >= LEVEL

    def learn(self, kind: tuple[int, int], seconds: float) -> None:
        self.passes += 1
        if self.passes <= WARM_UP or seconds <= 0:
            return
        basis = self.basis.setdefault(kind, [])
        if len(basis) < BASIS:
            basis.append(seconds / (self.slowness if self.is_off else 1.0))
            if len(basis) == BASIS:
                basis[:] = [median(basis)] * BASIS
            return
        self.recent.append(seconds / basis[0])

    def look(self, now_s: float) -> None:
        """Takes note of how slow it is by now, and for how long."""
        before_s, self.looked_s = self.looked_s, now_s
        if len(self.recent) < RECENT or before_s is None:
            self.looked_at = self.passes
            return
        if self.passes == self.looked_at:
            self.looked_s = before_s  # what the next pass has to say is of the time since the last one
            return
        self.looked_at = self.passes
        was, self.slowness = self.slowness, median(self.recent)
        worked_s = min(now_s - before_s, PAUSE_S)
        is_same_way = (was > 1) == (self.slowness > 1)
        off = max(self.slowness, 1 / self.slowness)
        self.counted_s = self.counted_s + worked_s if off >= COUNTED and is_same_way else 0.0
        self.changed_s = self.changed_s + worked_s if self.is_off and is_same_way else 0.0


class Slowing:
    """See the module. A change is told when it has lasted for `changed_s`."""

    def __init__(self, changed_s: float) -> None:
        self._changed_s = changed_s
        self._stages: list[_Stage] = []
        self._known: dict[str, float] = {}
        self._why: dict[str, str] = {}

    @property
    def slowness(self) -> dict[str, float]:
        """How many times as slow as at the start of the session devices are known to be, by name: those that
        are as they were are left out."""
        found = dict(self._known)
        for stage in self._stages:
            if stage.counted_s >= min(COUNTED_AFTER_S, self._changed_s):
                found[stage.device] = found.get(stage.device, 1.0) * stage.slowness
        return {
            device: slowness for device, slowness in found.items() if max(slowness, 1 / slowness) >= COUNTED
        }

    def begin(self, devices: Sequence[str]) -> None:
        """A pipeline of these devices is there, in this order, whose plan reckons with `slowness`."""
        self._known = self.slowness
        self._stages = [_Stage(device) for device in devices]

    def passed(self, hops: Sequence[Hop], context: int) -> None:
        """A segment came back; what its rows saw of earlier tokens was `context` long."""
        if len(hops) != len(self._stages):
            return  # nothing was timed
        for stage, hop in zip(self._stages, hops, strict=True):
            if hop.rows and not hop.dead_between_layers:
                stage.learn(kind_of(hop.rows, context), hop.compute_s)

    def heard(self, device: str, pong: Pong) -> None:
        """What a device says of its heat while it works: an idle one's clock is low for want of work."""
        if pong.running_s > 0 or pong.queued > 0:
            self._why[device] = why_slow(pong)

    def look(self, now_s: float) -> list[Change]:
        """What has changed for long enough, the slowest first; told at every look until another pipeline is
        there."""
        for stage in self._stages:
            stage.look(now_s)
        changed = [stage for stage in self._stages if stage.changed_s >= self._changed_s]
        changed.sort(key=lambda stage: -stage.slowness)
        return [
            Change(device=each.device, slowness=each.slowness, why=self._why.get(each.device, ""))
            for each in changed
        ]


def why_slow(pong: Pong) -> str:
    """What holds a device down as it says itself, in a few words; empty where it tells nothing."""
    found = ["throttled"] if pong.is_throttled else []
    if pong.temperature_c is not None:
        found.append(f"{pong.temperature_c:.0f} degrees")
    if pong.clock_mhz is not None and pong.clock_max_mhz is not None and pong.clock_mhz < pong.clock_max_mhz:
        found.append(f"clock at {pong.clock_mhz:.0f} of {pong.clock_max_mhz:.0f} MHz")
    return ", ".join(found)
