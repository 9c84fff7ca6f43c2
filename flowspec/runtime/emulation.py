"""The emulated world: daemons of this machine that compute the real small model but take the time of declared
devices.

Owns what is declared (`Emulation`), the padding of computing to it (`Pacer`), the shaping of connections
(`Shaper`), and the verdict that this machine is too slow to play its part (`Lateness`). Padding can only
lengthen: where the real work takes longer than declared, the emulation is wrong, so it ends with an error
instead of a number. Declared times mean what they mean to the simulator (`flowspec.sim.device`,
`flowspec.sim.link`). Knows nothing of sockets, cores and tensors.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from flowspec.errors import ClusterError
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.validation import fit
from flowspec.wire.codec import Tensor

COARSE_S = 0.001
"""So long before an instant a wait ends its one long sleep: a busy machine wakes sleepers late."""
SHORT_SLEEP_S = 0.0002
SPIN_S = 0.0001
"""The last stretch of a wait only yields; short, because daemons share cores."""
WARM_UP_JOBS = 3
"""A process's first passes are slow (memory comes, threads start); they say nothing about the machine."""
JOBS_MIN = 20
JOBS_MAX = 50
LATE_SHARE_MAX = 0.05
"""What runs late makes a figure wrong by as much; emulated and simulated figures differ by less than this."""
QUEUED_MESSAGES_MAX = 4096
"""Messages on their way over one shaped connection."""

Frames = Sequence[bytes | memoryview]
DeadRows = Callable[[], frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEmulation:
    """What one local daemon pretends to be.

    `layers` is the time of all its layers together, `sampling` what the last stage adds after them.
    `outgoing` is the link to the next hop, and another like it to the head. A row of a payload counts
    `row_bytes` there, as in the declared model; 0 counts the bytes that really travel. With `layer_count`,
    `layers` is the time of so many, and it takes its share for those that it holds. After `cool_s` of work it
    is hot, and takes `heat` times as long.
    """

    layers: Curve
    sampling: Curve
    outgoing: LinkSpec
    row_bytes: int = 0
    layer_count: int = 0
    cool_s: float = float("inf")
    heat: float = 1.0

    def __post_init__(self) -> None:
        if min(self.row_bytes, self.layer_count) < 0 or self.heat <= 0:
            raise ValueError(f"expected row_bytes and layer_count from 0 and a heat above 0, got {self}")

    def pace(self, held: int, worked_s: float) -> Curve:
        """The time of the `held` layers together, after so many seconds of work."""
        share = held / self.layer_count if self.layer_count else 1.0
        return self.layers.scaled(share * (self.heat if worked_s >= self.cool_s else 1.0))

    def shaper(self, stage: int) -> Shaper:
        """The shape of what leaves the daemon when it is stage number `stage`."""
        return Shaper(self.outgoing, row_bytes=self.row_bytes, chance=random.Random(f"stage {stage}"))

    def shaper_to_head(self, stage: int, captured: int) -> Shaper:
        """The shape of what it sends straight to the head: verdicts, and features of so many states."""
        return Shaper(
            self.outgoing, row_bytes=self.row_bytes * captured, chance=random.Random(f"to head {stage}")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What a whole local cluster pretends to be: a device for each stage, and what the head needs to play
    along.

    `drafting` is the time of a pass of the drafter by rows, `control` shapes the head's messages to each
    stage on the control connections, `first_hop` its segments to the first stage (integers only, so bytes
    count as they are).
    """

    devices: tuple[DeviceEmulation, ...]
    drafting: Curve
    control: LinkSpec
    first_hop: LinkSpec

    def control_shaper(self, stage: int) -> Shaper:
        return Shaper(self.control, chance=random.Random(f"control {stage}"))

    def first_hop_shaper(self) -> Shaper:
        return Shaper(self.first_hop, chance=random.Random("first hop"))


def devices_to_json(devices: Sequence[DeviceEmulation]) -> str:
    """Declared devices for the command line of another process of ours; an infinite bandwidth survives."""
    return json.dumps([asdict(device) for device in devices])


def devices_from_json(text: str) -> tuple[DeviceEmulation, ...]:
    return fit(json.loads(text), tuple[DeviceEmulation, ...])


def wait_until(
    instant_s: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> float:
    """Sleeps until an instant and hits it within a fraction of a millisecond on a quiet machine; returns the
    time then."""
    while (left_s := instant_s - (now_s := clock())) > 0:
        if left_s > COARSE_S + SHORT_SLEEP_S:
            sleep(left_s - COARSE_S)
        else:
            sleep(min(SHORT_SLEEP_S, left_s - SPIN_S) if left_s > SPIN_S else 0)
    return now_s


class Lateness:
    """Whether this machine keeps up with what is declared: how late the last jobs ended, beside how long they
    should take."""

    def __init__(self, who: str, advice: str) -> None:
        self._who = who
        self._advice = advice
        self._warm_ups_left = WARM_UP_JOBS
        self._jobs: deque[tuple[float, float]] = deque(maxlen=JOBS_MAX)

    def count(self, declared_s: float, took_s: float) -> None:
        """A job that should have taken `declared_s` took `took_s`; raises `ClusterError` when too many are
        too late."""
        if self._warm_ups_left:
            self._warm_ups_left -= 1
            return
        self._jobs.append((declared_s, max(0.0, took_s - declared_s)))
        asked_s = sum(declared for declared, _ in self._jobs)
        late_s = sum(late for _, late in self._jobs)
        if len(self._jobs) >= JOBS_MIN and late_s > LATE_SHARE_MAX * asked_s:
            count = len(self._jobs)
            late = sum(late > LATE_SHARE_MAX * declared for declared, late in self._jobs)
            asked_ms, took_ms = (1000 * seconds / count for seconds in (asked_s, asked_s + late_s))
            raise ClusterError(
                f"{self._who} cannot keep up with what it emulates: its profile asks for {asked_ms:.2f} ms a "
                f"pass, this machine took {took_ms:.2f} ms (means of the last {count}, of which {late} were "
                f"late), and at more than {100 * LATE_SHARE_MAX:.0f}% the figures would be wrong; end other "
                f"work on this machine and start again; where nearly all are late even so, {self._advice}"
            )


class Pacer:
    """Makes the jobs of one stage's compute thread last as long as declared, layer by layer.

    The declared time of all layers is divided evenly among the real ones. Rows that die shorten the layers
    after the next boundary. Boundaries are instants reckoned from the job's beginning: what one layer took
    too long the next ones catch up. `worked_s` is for how long the device has worked, with layers that it
    held before, too.
    """

    def __init__(
        self,
        device: DeviceEmulation,
        *,
        stage: int,
        stages: int,
        layers: int,
        worked_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.worked_s = worked_s
        self._device = device
        self._curve = device.pace(layers, worked_s)
        self._layers = layers
        self._is_last = stage == stages - 1
        self._clock = clock
        self._sleep = sleep
        advice = "use fewer stages, a slower profile or a larger model shape"
        self._lateness = Lateness(f"stage {stage + 1} of {stages}", advice)
        self._sampled: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._dead: frozenset[int] = frozenset()
        self._context = 0
        self._started_s = 0.0
        self._due_s = 0.0

    def begin(self, sampled: npt.NDArray[np.bool_], context: int, started_s: float) -> None:
        """A job began at `started_s`, whose rows see `context` earlier tokens; `sampled` `[rows]`: whose next
        token is asked for."""
        self._curve = self._device.pace(self._layers, self.worked_s)
        self._sampled, self._dead = sampled, frozenset()
        self._context = context
        self._started_s = self._due_s = started_s

    def boundary(self, dead_rows: DeadRows) -> frozenset[int]:
        """Before each layer: waits until it is due, and only then reads which rows are dead, so that none
        dies too late."""
        dead = self._wait_and_read(dead_rows)
        if self._alive:
            self._due_s += self._curve.seconds(self._alive, self._context) / self._layers
        return dead

    def end(self, dead_rows: DeadRows) -> float:
        """After the last layer, and the sampling on the last stage: waits until the job may end, and returns
        that instant.

        Rows that died in the last layer are not sampled from. Raises `ClusterError` when the machine cannot
        keep up.
        """
        if self._is_last and self._alive:
            dead = self._wait_and_read(dead_rows)
            asked = int(np.delete(self._sampled, list(dead)).sum())
            self._due_s += self._device.sampling.seconds(asked) if asked else 0.0
        ended_s = wait_until(self._due_s, self._clock, self._sleep)
        self.worked_s += ended_s - self._started_s
        self._lateness.count(self._due_s - self._started_s, ended_s - self._started_s)
        return ended_s

    def _wait_and_read(self, dead_rows: DeadRows) -> frozenset[int]:
        wait_until(self._due_s, self._clock, self._sleep)
        self._dead = dead_rows()
        return self._dead

    @property
    def _alive(self) -> int:
        return len(self._sampled) - len(self._dead)


class DraftPacer:
    """Makes a drafter's passes last as long as declared."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._lateness = Lateness("the drafter", "use a smaller drafter, fewer stages or a slower profile")

    def end(self, rows: int, context: int, started_s: float) -> float:
        """Waits until a pass over `rows` may end, and returns that instant; raises `ClusterError` as
        `Pacer.end` does."""
        declared_s = self._curve.seconds(rows, context)
        ended_s = wait_until(started_s + declared_s)
        self._lateness.count(declared_s, ended_s - started_s)
        return ended_s


class Shaper:
    """One connection's messages on their way: they leave one after another, and arrive in order after the
    link's delay.

    The arithmetic is that of `flowspec.sim.link`. It sits at the sender, which hands a message to its socket
    at the instant at which it is to arrive.
    """

    def __init__(self, spec: LinkSpec, *, chance: random.Random, row_bytes: int = 0) -> None:
        self._spec = spec
        self._chance = chance
        self._row_bytes = row_bytes
        self._queue: deque[tuple[float, Frames]] = deque()
        self._free_s = 0.0
        self._arrived_s = 0.0

    @property
    def due_s(self) -> float:
        """When the next message arrives; infinity when none is on its way."""
        return self._queue[0][0] if self._queue else float("inf")

    def put(self, frames: Frames, tensor: Tensor | None, now_s: float) -> bool:
        """A message, header first, and the payload in it; False when too many are on their way."""
        if len(self._queue) >= QUEUED_MESSAGES_MAX:
            return False
        size = len(frames[0])
        if tensor is not None:
            size += tensor.rows * self._row_bytes if self._row_bytes else len(tensor.data)
        self._free_s = max(self._free_s, now_s) + self._spec.transfer_s(size)
        late_s = self._chance.uniform(0, self._spec.jitter_s) if self._spec.jitter_s else 0.0
        self._arrived_s = max(self._arrived_s, self._free_s + self._spec.delay_s + late_s)
        self._queue.append((self._arrived_s, frames))
        return True

    def take(self, now_s: float) -> Frames | None:
        """The next message that has arrived by now, if there is one."""
        return self._queue.popleft()[1] if self._queue and self.due_s <= now_s else None
