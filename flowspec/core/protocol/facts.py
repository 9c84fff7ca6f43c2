"""What a daemon tells about its device when it is asked to: one question, one answer.

Nothing in here names a person, a file or another network than the one the question came by. Whoever asks
judges (`flowspec doctor`); a daemon only reports.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import ACTIVATIONS, PACKED, UNPACKED
from flowspec.core.protocol.types import (
    Count,
    Instant,
    Line,
    Megahertz,
    Message,
    Name,
    Record,
    Seconds,
    Share,
    one_of,
)
from flowspec.validation import expect

INTERFACE_KINDS = ("loopback", "wired", "wi-fi", "bridge", "tunnel", "virtual", "unknown")
MODEL_STATES = ("", "same", "other", "part", "none")
"""Not asked; there, with the fingerprint; there, with another one; there, but weight files are missing or
broken; not there."""
SPEED_SOURCES = ("given", "kept", "probed")
"""Of a profile: its daemon's `--profile`, what `flowspec profile --keep` measured, or a short probe of the
daemon's own."""
Celsius = Annotated[float, Meta(ge=-1000, le=1000)]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
RateOrNone = Annotated[float, Meta(ge=0, le=1e9)]
ShareAbove = Annotated[float, Meta(gt=0, le=1)]
Threads = Annotated[int, Meta(ge=1, le=limits.THREADS_MAX)]


class AskFacts(Message, frozen=True, kw_only=True):
    """Asks a daemon for its Facts; it answers whoever holds it.

    `address` is the IP address by which it is reached, so that it can tell which interface that is. With a
    `model` it looks whether it has it with this `fingerprint` (nothing is fetched), with a `next_hop` it
    measures the link to that daemon, `next_name`, at a glance where `is_brief`. `speed` asks how fast it is,
    and `dtype` which kernel computes that precision there: both may have to be found out first.
    """

    address: Name = ""
    model: Line = ""
    fingerprint: Name = ""
    next_hop: Name = ""
    next_name: Name = ""
    is_brief: bool = False
    speed: bool = False
    dtype: Annotated[str, one_of("", *ACTIVATIONS)] = ""


class Interface(Record, frozen=True, kw_only=True):
    """A network interface; 0 where the speed or the MTU are not known."""

    name: Name
    kind: Annotated[str, one_of(*INTERFACE_KINDS)]
    speed_mbps: Count
    mtu: Count


class LinkFacts(Record, frozen=True, kw_only=True):
    """A measured link: half a round trip, and the rate of a payload; `problem` says why there is neither."""

    latency_s: Seconds = 0.0
    bandwidth_mbps: RateOrNone = 0.0
    problem: Line = ""


class Board(Record, frozen=True, kw_only=True):
    """The hardware as its kernel shows it; None or empty where it does not.

    `throttled` is the Raspberry Pi firmware's bit field. `trip_c` is where the hottest zone begins to
    throttle. Clocks are in MHz: `cpu_mhz` is the cap that is in force, `cpu_max_mhz` what the processor can
    do. It `is_capped` where the kernel holds clocks down because of heat.
    """

    model: Name = ""
    is_jetson: bool = False
    power_mode: Name = ""
    throttled: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    celsius: Celsius | None = None
    trip_c: Celsius | None = None
    cpu_mhz: Megahertz | None = None
    cpu_max_mhz: Megahertz | None = None
    is_capped: bool = False


class Software(Record, frozen=True, kw_only=True):
    """Versions, empty for what is not installed; `cuda` is the version that torch was built for, empty for a
    CPU build."""

    python: Name
    torch: Name
    transformers: Name
    cuda: Name


class KernelFacts(Record, frozen=True, kw_only=True):
    """What computes a precision's matrices: the best `kernel` that was found right there, empty for none.

    `faults` is what is wrong with better ones. `arithmetics` are those of all kernels that are right, best
    first (`core.cluster.agreement`).
    """

    dtype: Annotated[str, one_of(*ACTIVATIONS)]
    kernel: Name
    faults: Line
    arithmetics: Annotated[tuple[Name, ...], Meta(max_length=limits.ARITHMETICS_MAX)] = ()


class PackedSpeed(Record, frozen=True, kw_only=True):
    """What a device's kernels of one packed precision reach (`plan.profile.KernelRates`)."""

    dtype: Annotated[str, one_of(*PACKED)]
    gb_per_s: Rate
    tflops: Rate
    serial: Share


class Speed(Record, frozen=True, kw_only=True):
    """How fast a device is: the numbers of a device profile (docs/devices.md), and where its daemon has them
    from.

    Rates are peaks, efficiencies the shares of them that are reached; TFLOP/s are 0 for a precision that
    nothing is known of. `packed` has each packed precision once at most.
    """

    name: Name
    source: Annotated[str, one_of(*SPEED_SOURCES)]
    gb_per_s: Rate
    memory_efficiency: ShareAbove
    float32: RateOrNone
    float16: RateOrNone
    bfloat16: RateOrNone
    compute_efficiency: ShareAbove
    serial: Share
    packed: Annotated[tuple[PackedSpeed, ...], Meta(max_length=len(PACKED))]
    layer_us: RateOrNone
    expert_us: RateOrNone
    pass_us: RateOrNone

    def __post_init__(self) -> None:
        is_known = any(getattr(self, name) for name in UNPACKED)
        expect(is_known, "float32", self.float32, "TFLOP/s for at least one precision")
        names = [each.dtype for each in self.packed]
        expect(len(set(names)) == len(names), "packed", names, "each precision once")


class Facts(Message, frozen=True, kw_only=True):
    """A daemon's answer to AskFacts.

    `clock_s` is its wall clock when it answered, in seconds since 1970. `memory_available_bytes` is what
    programs may still take; `memory_limit_bytes` what its user allows this daemon, 0 for no limit;
    `resident_bytes` what it takes now. `accelerator` names a CUDA device that would be used, whose memory is
    its own pair of fields. A daemon computes with `threads` on the `cores` that it may use. `speed` is None
    where it was not asked for, and where the daemon cannot tell. `kernel` is None where it was not asked for.
    """

    clock_s: Instant
    is_held: bool
    software: Software
    board: Board
    memory_total_bytes: Count
    memory_available_bytes: Count
    memory_limit_bytes: Count
    resident_bytes: Count
    accelerator: Name
    accelerator_total_bytes: Count
    accelerator_free_bytes: Count
    threads: Threads
    cores: Threads
    interface: Interface | None
    model: Annotated[str, one_of(*MODEL_STATES)]
    link: LinkFacts | None
    speed: Speed | None
    kernel: KernelFacts | None
