"""What a daemon tells about its device when it is asked to: one question, one answer.

Nothing in here names a person, a file or another network than the one the question came by. Whoever asks
judges (`flowspec doctor`); a daemon only reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.protocol import limits
from flowspec.core.protocol.checks import check, check_most, check_range, check_text
from flowspec.core.protocol.precision import ACTIVATIONS, PACKED, UNPACKED

INTERFACE_KINDS = ("loopback", "wired", "wi-fi", "bridge", "tunnel", "virtual", "unknown")
MODEL_STATES = ("", "same", "other", "part", "none")
"""Not asked; there, with the fingerprint; there, with another one; there, but weight files are missing or
broken; not there."""
_CELSIUS_MAX = 1000.0
_RATE_MAX = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFacts:
    """Asks a daemon for its Facts; it answers whoever holds it.

    `address` is the IP address by which it is reached, so that it can tell which interface that is. With a
    `model` it looks whether it has it with this `fingerprint` (nothing is fetched), with a `next_hop` it
    measures the link to that daemon, `next_name`, at a glance where `is_brief`. `speed` asks how fast it is,
    and `dtype` which kernel computes that precision there: both may have to be found out first.
    """

    address: str = ""
    model: str = ""
    fingerprint: str = ""
    next_hop: str = ""
    next_name: str = ""
    is_brief: bool = False
    speed: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        check(self.dtype in ("", *ACTIVATIONS), "dtype", self.dtype, f"{', '.join(ACTIVATIONS)} or empty")
        for field in ("address", "fingerprint", "next_hop", "next_name"):
            check_text(field, getattr(self, field))
        check_text("model", self.model, limits.TEXT_CHARS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface; 0 where the speed or the MTU are not known."""

    name: str
    kind: str
    speed_mbps: int
    mtu: int

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check(self.kind in INTERFACE_KINDS, "kind", self.kind, ", ".join(INTERFACE_KINDS))
        for field in ("speed_mbps", "mtu"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """A measured link: half a round trip, and the rate of a payload; `problem` says why there is neither."""

    latency_s: float = 0.0
    bandwidth_mbps: float = 0.0
    problem: str = ""

    def __post_init__(self) -> None:
        check_range("latency_s", self.latency_s, 0, 1e6)
        check_range("bandwidth_mbps", self.bandwidth_mbps, 0, 1e9)
        check_text("problem", self.problem, limits.TEXT_CHARS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The hardware as its kernel shows it; None or empty where it does not.

    `throttled` is the Raspberry Pi firmware's bit field. `trip_c` is where the hottest zone begins to
    throttle. Clocks are in MHz: `cpu_mhz` is the cap that is in force, `cpu_max_mhz` what the processor can
    do. It `is_capped` where the kernel holds clocks down because of heat.
    """

    model: str = ""
    is_jetson: bool = False
    power_mode: str = ""
    throttled: int | None = None
    celsius: float | None = None
    trip_c: float | None = None
    cpu_mhz: float | None = None
    cpu_max_mhz: float | None = None
    is_capped: bool = False

    def __post_init__(self) -> None:
        for field in ("model", "power_mode"):
            check_text(field, getattr(self, field))
        if self.throttled is not None:
            check_range("throttled", self.throttled, 0, (1 << 32) - 1)
        mhz_max = limits.CLOCK_MHZ_MAX
        for field, most in (
            ("celsius", _CELSIUS_MAX),
            ("trip_c", _CELSIUS_MAX),
            ("cpu_mhz", mhz_max),
            ("cpu_max_mhz", mhz_max),
        ):
            value = getattr(self, field)
            if value is not None:
                check_range(field, value, -_CELSIUS_MAX, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, empty for what is not installed; `cuda` is the version that torch was built for, empty for a
    CPU build."""

    python: str
    torch: str
    transformers: str
    cuda: str

    def __post_init__(self) -> None:
        for field in ("python", "torch", "transformers", "cuda"):
            check_text(field, getattr(self, field))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What computes a precision's matrices: the best `kernel` that was found right there, empty for none.

    `faults` is what is wrong with better ones. `arithmetics` are those of all kernels that are right, best
    first (`core.cluster.agreement`).
    """

    dtype: str
    kernel: str
    faults: str
    arithmetics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.dtype in ACTIVATIONS, "dtype", self.dtype, ", ".join(ACTIVATIONS))
        check_text("kernel", self.kernel)
        check_most("arithmetics", len(self.arithmetics), limits.ARITHMETICS_MAX)
        for name in self.arithmetics:
            check_text("arithmetics", name)
        check_text("faults", self.faults, limits.TEXT_CHARS_MAX)


SPEED_SOURCES = ("given", "kept", "probed")
"""Of a profile: its daemon's `--profile`, what `flowspec profile --keep` measured, or a short probe of the
daemon's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSpeed:
    """What a device's kernels of one packed precision reach (`plan.profile.KernelRates`)."""

    dtype: str
    gb_per_s: float
    tflops: float
    serial: float

    def __post_init__(self) -> None:
        check(self.dtype in PACKED, "dtype", self.dtype, ", ".join(PACKED))
        for field in ("gb_per_s", "tflops"):
            check(0 < getattr(self, field) <= _RATE_MAX, field, getattr(self, field), "a rate above 0")
        check_range("serial", self.serial, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a device is: the numbers of a device profile (docs/devices.md), and where its daemon has them
    from.

    Rates are peaks, efficiencies the shares of them that are reached; TFLOP/s are 0 for a precision that
    nothing is known of. `packed` has each packed precision once at most.
    """

    name: str
    source: str
    gb_per_s: float
    memory_efficiency: float
    float32: float
    float16: float
    bfloat16: float
    compute_efficiency: float
    serial: float
    packed: tuple[PackedSpeed, ...]
    layer_us: float
    expert_us: float
    pass_us: float

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check(self.source in SPEED_SOURCES, "source", self.source, ", ".join(SPEED_SOURCES))
        check(0 < self.gb_per_s <= _RATE_MAX, "gb_per_s", self.gb_per_s, "a rate above 0")
        for field in ("memory_efficiency", "compute_efficiency"):
            check(0 < getattr(self, field) <= 1, field, getattr(self, field), "a share above 0")
        check_range("serial", self.serial, 0, 1)
        for field in (*UNPACKED, "layer_us", "expert_us", "pass_us"):
            check_range(field, getattr(self, field), 0, _RATE_MAX)
        check(
            any(getattr(self, field) for field in UNPACKED),
            "float32",
            self.float32,
            "TFLOP/s for at least one precision",
        )
        names = [each.dtype for each in self.packed]
        check(len(set(names)) == len(names), "packed", names, "each precision once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A daemon's answer to AskFacts.

    `clock_s` is its wall clock when it answered, in seconds since 1970. `memory_available_bytes` is what
    programs may still take; `memory_limit_bytes` what its user allows this daemon, 0 for no limit;
    `resident_bytes` what it takes now. `accelerator` names a CUDA device that would be used, whose memory is
    its own pair of fields. A daemon computes with `threads` on the `cores` that it may use. `speed` is None
    where it was not asked for, and where the daemon cannot tell. `kernel` is None where it was not asked for.
    """

    clock_s: float
    is_held: bool
    software: Software
    board: Board
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int
    resident_bytes: int
    accelerator: str
    accelerator_total_bytes: int
    accelerator_free_bytes: int
    threads: int
    cores: int
    interface: Interface | None
    model: str
    link: LinkFacts | None
    speed: Speed | None
    kernel: KernelFacts | None

    def __post_init__(self) -> None:
        check_range("clock_s", self.clock_s, 0, 1e12)
        check_text("accelerator", self.accelerator)
        for field in ("total", "available", "limit"):
            check_range(f"memory_{field}_bytes", getattr(self, f"memory_{field}_bytes"), 0, limits.ID_MAX)
        for field in ("resident_bytes", "accelerator_total_bytes", "accelerator_free_bytes"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)
        for field in ("threads", "cores"):
            check_range(field, getattr(self, field), 1, limits.THREADS_MAX)
        check(self.model in MODEL_STATES, "model", self.model, "same, other, part, none or empty")
