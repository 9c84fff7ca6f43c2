"""What head and daemon ask each other about a device: the weights that it needs, and facts about it. Each
question has one answer, or Error, in order.

AskModel goes over the control connection; the head then dials one for weights, so that chunks never stand
before a Commit or a Ping. Nothing in Facts names a person, a file or another network than the one that
AskFacts came by. Whoever asks judges (`flowspec doctor`); a daemon only reports.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import ACTIVATIONS, PACKED, UNPACKED
from flowspec.core.protocol.types import (
    Celsius,
    Count,
    Digest,
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

MODEL_STATES = ("", "same", "other", "part", "none")  # "": not asked; by fingerprint; part: files are missing
SPEED_SOURCES = ("given", "kept", "probed")  # by `--profile`, by `flowspec profile --keep`, by a short probe
Offset = Annotated[int, Meta(ge=0, le=limits.TENSOR_BYTES_MAX)]
Names = Annotated[tuple[Name, ...], Meta(max_length=limits.TENSORS_LISTED_MAX)]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
RateOrNone = Annotated[float, Meta(ge=0, le=1e9)]
ShareAbove = Annotated[float, Meta(gt=0, le=1)]
Threads = Annotated[int, Meta(ge=1, le=limits.THREADS_MAX)]


class WeightQuestion(Message, frozen=True, kw_only=True):
    """Of a daemon."""


class WeightAnswer(Message, frozen=True, kw_only=True):
    """Of a head."""


class AskModel(WeightQuestion, frozen=True, kw_only=True):
    """The daemon does not have the model that it was assigned layers of."""


class ModelOffer(WeightAnswer, frozen=True, kw_only=True):
    """What the model is made of."""

    config: Annotated[str, Meta(max_length=limits.CONFIG_CHARS_MAX)]  # text of config.json, or alike
    gguf: Name  # architecture named by the GGUF file that holds the tensors; empty: safetensors do
    tensor_count: Annotated[int, Meta(ge=1, le=limits.TENSORS_MAX)]


class AskNames(WeightQuestion, frozen=True, kw_only=True):
    """Which tensors are there, from number `first` on?"""

    first: Annotated[int, Meta(ge=0, le=limits.TENSORS_MAX)]


class NameList(WeightAnswer, frozen=True, kw_only=True):
    """Names of tensors, in the head's order; as many as go into one message."""

    names: Names


class AskTensors(WeightQuestion, frozen=True, kw_only=True):
    """What are these tensors?"""

    names: Names


class TensorEntry(Record, frozen=True, kw_only=True):
    """A tensor as it lies in the checkpoint."""

    name: Name
    dtype: Name  # as it is called there; of a GGUF file ggml's type
    shape: Annotated[tuple[Count, ...], Meta(max_length=limits.TENSOR_AXES_MAX)]
    size_bytes: Offset
    digest: Digest


class TensorList(WeightAnswer, frozen=True, kw_only=True):
    """The tensors that were asked for, in that order."""

    entries: Annotated[tuple[TensorEntry, ...], Meta(max_length=limits.TENSORS_LISTED_MAX)]


class AskBytes(WeightQuestion, frozen=True, kw_only=True):
    """Send bytes `[offset, offset + size)` of the tensor with this digest."""

    digest: Digest
    offset: Offset
    size: Annotated[int, Meta(ge=1, le=limits.WEIGHT_CHUNK_BYTES)]


class TensorBytes(WeightAnswer, frozen=True, kw_only=True):
    """Bytes of a tensor from `offset` on; they travel as a frame of their own."""

    digest: Digest
    offset: Offset


class AskTokens(WeightQuestion, frozen=True, kw_only=True):
    """Send the bytes of the tokens named in the Assign (`TokenBytes`), from `offset` on, as TensorBytes. Both
    go over the control connection, also of devices that need no weights, while nothing is computed."""

    offset: Annotated[int, Meta(ge=0, le=limits.TOKEN_TABLE_BYTES_MAX)]


class AskFacts(Message, frozen=True, kw_only=True):
    """Asks a daemon for its Facts; it answers whoever holds it. What may have to be found out first is only
    there if it is asked for."""

    address: Name = ""  # the IP address that it is reached by, which tells the interface
    model: Line = ""  # does it have this one, with this fingerprint? nothing is fetched
    fingerprint: Name = ""
    next_hop: Name = ""  # measure the link to this daemon
    next_name: Name = ""
    is_brief: bool = False  # measure at a glance
    speed: bool = False
    dtype: Annotated[str, one_of("", *ACTIVATIONS)] = ""  # which kernel computes this precision there?


class Interface(Record, frozen=True, kw_only=True):
    """A network interface; 0 where the speed or the MTU are not known."""

    name: Name
    kind: Annotated[str, one_of("loopback", "wired", "wi-fi", "bridge", "tunnel", "virtual", "unknown")]
    speed_mbps: Count
    mtu: Count


class LinkFacts(Record, frozen=True, kw_only=True):
    """A measured link; `problem` says why there are no figures."""

    latency_s: Seconds = 0.0  # half a round trip
    bandwidth_mbps: RateOrNone = 0.0  # of a payload
    problem: Line = ""


class Board(Record, frozen=True, kw_only=True):
    """The hardware as its kernel shows it; None or empty where it does not."""

    model: Name = ""
    is_jetson: bool = False
    power_mode: Name = ""
    throttled: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None  # the Raspberry Pi firmware's bit field
    celsius: Celsius | None = None
    trip_c: Celsius | None = None  # where the hottest zone begins to throttle
    cpu_mhz: Megahertz | None = None  # the cap that is in force
    cpu_max_mhz: Megahertz | None = None  # what the processor can do
    is_capped: bool = False  # the kernel holds clocks down because of heat


class Software(Record, frozen=True, kw_only=True):
    """Versions, empty for what is not installed."""

    python: Name
    torch: Name
    transformers: Name
    cuda: Name  # that torch was built for; empty: a CPU build


class KernelFacts(Record, frozen=True, kw_only=True):
    """What computes a precision's matrices."""

    dtype: Annotated[str, one_of(*ACTIVATIONS)]
    kernel: Name  # the best that was found right there; empty: none
    faults: Line  # what is wrong with better ones
    arithmetics: Annotated[tuple[Name, ...], Meta(max_length=limits.ARITHMETICS_MAX)] = ()  # the best first


class PackedSpeed(Record, frozen=True, kw_only=True):
    """What a device's kernels of one packed precision reach (`plan.profile.KernelRates`)."""

    dtype: Annotated[str, one_of(*PACKED)]
    gb_per_s: Rate
    tflops: Rate
    serial: Share


class Speed(Record, frozen=True, kw_only=True):
    """How fast a device is: the numbers of a device profile (docs/devices.md), and their source. Rates are
    peaks, efficiencies the shares of them that are reached; TFLOP/s are 0 for a precision that nothing is
    known of. `packed` has each packed precision once at most."""

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
    """A daemon's answer to AskFacts; None is what was not asked for, or what the daemon cannot tell."""

    clock_s: Instant  # its wall clock when it answered, since 1970
    is_held: bool
    software: Software
    board: Board
    memory_total_bytes: Count
    memory_available_bytes: Count  # what programs may still take
    memory_limit_bytes: Count  # what its user allows this daemon; 0: no limit
    resident_bytes: Count  # what it takes now
    accelerator: Name  # a CUDA device that would be used, whose memory is a pair of its own
    accelerator_total_bytes: Count
    accelerator_free_bytes: Count
    threads: Threads  # that compute
    cores: Threads  # that it may use
    interface: Interface | None
    model: Annotated[str, one_of(*MODEL_STATES)]
    link: LinkFacts | None
    speed: Speed | None
    kernel: KernelFacts | None
