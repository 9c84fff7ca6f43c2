"""One frame or more of every kind of message, made by the messages' own classes: what mutation starts
from."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from flowspec import __version__
from flowspec.core.protocol.cluster_messages import (
    Arithmetics,
    AskArithmetics,
    Assign,
    Drafting,
    Error,
    Hello,
    Loading,
    Ping,
    Pong,
    Ready,
    Reset,
    Welcome,
)
from flowspec.core.protocol.device_messages import (
    AskBytes,
    AskFacts,
    AskModel,
    AskNames,
    AskTensors,
    AskTokens,
    Board,
    Facts,
    Interface,
    KernelFacts,
    LinkFacts,
    ModelOffer,
    NameList,
    Software,
    TensorBytes,
    TensorEntry,
    TensorList,
)
from flowspec.core.protocol.messages import (
    Commit,
    Expand,
    Features,
    Hop,
    Logprobs,
    Open,
    Proposal,
    Proposed,
    Release,
    Sampling,
    Segment,
    SegmentPart,
    Verified,
    VerifiedPart,
)
from flowspec.core.protocol.model_spec import (
    Convolution,
    DeltaRule,
    Dense,
    Heads,
    LayerSpec,
    Mixture,
    ModelSpec,
    Rotary,
    SlidingWindow,
)
from flowspec.core.protocol.types import Message
from flowspec.plan.profile import find_profile, speed_of
from flowspec.wire.codec import BYTES, DTYPE_BYTES, Envelope, Tensor, encode

Frames = list[bytes]

_DIGEST = "0123456789abcdef" * 4
_OPEN = Open(
    request=1,
    epoch=2,
    keep=3,
    length=5,
    root=9,
    slots=300,
    sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, presence_penalty=0.5, seed=7),
    answer_start=4,
    source=6,
)
_COMMIT = Commit(request=1, epoch=2, base=5, path=(10, 11))
_PART = SegmentPart(
    commit=_COMMIT,
    opening=_OPEN,
    ids=(11, 12, 13),
    parents=(10, 11, 11),
    tokens=(3, 4, 5),
    positions=(6, 7, 7),
    committed=(False,) * 3,
)
_PROMPT = SegmentPart(
    commit=Commit(request=2, epoch=0, base=2, path=()),
    opening=None,
    ids=(0, 1),
    parents=(-1, 0),
    tokens=(8, 9),
    positions=(0, 1),
    committed=(True, True),
)
_LOGPROBS = Logprobs(chosen=-1.25, ids=(7, 4), values=(-0.5, -1.25))
_HOP = Hop(
    received_s=1e6,
    queued_s=0.1,
    compute_s=0.2,
    own_s=0.001,
    rows=3,
    dead_in_queue=1,
    dead_between_layers=1,
    dead_late=0,
)
_KV = Heads(count=2, width=4)
_DENSE = Dense(scale=0.5, activation="silu", neurons=8, biases=("mlp.up_proj",))
_MIXTURE = Mixture(router="softmax", experts=4, chosen=2, neurons=8)
_RULE = DeltaRule(key_heads=1, heads=2, key_width=4, value_width=4, length=3)
_ATTENDING = LayerSpec(heads=4, kv=_KV, source=0, dense=_DENSE)
_KINDS = (
    structs.replace(_ATTENDING, window=64),
    structs.replace(_ATTENDING, dense=structs.replace(_DENSE, mixture=_MIXTURE)),
    structs.replace(
        _ATTENDING, inputs=_RULE.inputs, state=32, window=3, dense=structs.replace(_DENSE, mixer=_RULE)
    ),
    structs.replace(
        _ATTENDING, inputs=8, window=3, dense=structs.replace(_DENSE, mixer=Convolution(length=3))
    ),
)
_SPEC = ModelSpec(
    family="llama",
    hidden=8,
    vocabulary=90,
    context_max=512,
    is_tied=False,
    rotaries=(Rotary(frequencies=(1.0, 0.5)),),
    layers=tuple(structs.replace(kind, source=place) for place, kind in enumerate((_KINDS[:3] * 3)[:8])),
)
_OTHER_SPEC = structs.replace(
    _SPEC, layers=tuple(structs.replace(_KINDS[place % 2 * 3], source=place) for place in range(8))
)
_ASSIGN: dict[str, Any] = {
    "model": "owner/name",
    "fingerprint": _DIGEST[:32],
    "stages": 2,
    "layer_count": 8,
    "dtype": "float32",
    "context": 256,
}
MESSAGES: tuple[Message, ...] = (
    Hello(name="head", version=__version__, role="head-control"),
    Hello(name="board", version=__version__, role="stage"),
    Welcome(name="board", version=__version__, device="cpu", pid=7, memory_bytes=1 << 30, count=1 << 40),
    Assign(
        **_ASSIGN,
        stage=0,
        first_layer=0,
        end_layer=4,
        next_hop="127.0.0.1:7700",
        next_name="board",
        next_ip="127.0.0.1",
        spec=_SPEC,
    ),
    Assign(
        **_ASSIGN,
        stage=1,
        first_layer=4,
        end_layer=8,
        next_hop="",
        next_name="",
        captures=(2, 4, 8),
        sliding_window=SlidingWindow(tokens=512),
        spec=_OTHER_SPEC,
    ),
    Assign(
        **{**_ASSIGN, "stages": 1},
        stage=0,
        first_layer=0,
        end_layer=8,
        next_hop="",
        next_name="",
        drafting=Drafting(vocabulary=90, coupled=True),
    ),
    Expand(segment=Segment(segment=6, parts=(_PART, _PROMPT), releases=(Release(request=3),)), width=8),
    Proposed(
        job=6,
        proposals=(Proposal(request=1, epoch=2, node=11, tokens=(3, 4), confidences=(0.5, 0.25)),),
        compute_s=0.01,
    ),
    Loading(share=0.5, doing="receiving"),
    Ready(weight_bytes=1, memory_bytes=2, cache_slots=600, received_bytes=3),
    Reset(),
    Ping(),
    Pong(
        queued=1,
        done=2,
        memory_bytes=3,
        running_s=0.5,
        temperature_c=61.5,
        clock_mhz=1500.0,
        clock_max_mhz=2400.0,
        is_throttled=True,
    ),
    Error(text="no", retry_after_s=0.5),
    Error(text="lost", cause="next"),
    _OPEN,
    _COMMIT,
    Commit(request=1, epoch=2, base=5, path=(), is_over=True),
    Segment(segment=4, parts=(_PART, _PROMPT), hops=(_HOP,)),
    Segment(segment=5, parts=(), releases=(Release(request=3, epoch=1), Release(request=4))),
    Verified(
        segment=4,
        parts=(VerifiedPart(request=1, epoch=2, ids=(11, 12), next_tokens=(4, 5)),),
        hops=(_HOP, _HOP),
    ),
    Verified(
        segment=4,
        parts=(
            VerifiedPart(request=1, epoch=2, ids=(11, 12), next_tokens=(5, 4), logprobs=(_LOGPROBS,) * 2),
        ),
        hops=(),
    ),
    Features(request=1, epoch=2, ids=(11, 12, 13)),
    Release(request=1),
    AskModel(),
    AskNames(first=0),
    AskTensors(names=("model.norm.weight",)),
    AskBytes(digest=_DIGEST, offset=0, size=4),
    AskTokens(offset=0),
    ModelOffer(config='{"model_type": "llama"}', tensor_count=3, gguf=""),
    NameList(names=("model.norm.weight", "lm_head.weight")),
    TensorList(
        entries=(
            TensorEntry(name="model.norm.weight", dtype="F32", shape=(8, 2), size_bytes=64, digest=_DIGEST),
        )
    ),
    TensorBytes(digest=_DIGEST, offset=4),
    AskFacts(
        address="127.0.0.1",
        model="owner/name",
        fingerprint="0",
        next_hop="127.0.0.1:7700",
        next_name="board",
        speed=True,
        dtype="int8",
    ),
    Facts(
        clock_s=1e9,
        is_held=True,
        software=Software(python="3.11", torch="2", transformers="5", cuda=""),
        board=Board(
            model="Raspberry Pi 4", throttled=5, celsius=60.5, trip_c=80.0, cpu_mhz=1500.0, cpu_max_mhz=1800.0
        ),
        memory_total_bytes=4,
        memory_available_bytes=3,
        memory_limit_bytes=0,
        resident_bytes=1,
        accelerator="",
        accelerator_total_bytes=0,
        accelerator_free_bytes=0,
        threads=2,
        cores=4,
        interface=Interface(name="eth0", kind="wired", speed_mbps=1000, mtu=1500),
        model="same",
        link=LinkFacts(latency_s=0.001, bandwidth_mbps=900.0),
        speed=speed_of(find_profile("raspberry-pi-4"), "given"),
        kernel=KernelFacts(
            dtype="int8",
            kernel="qnnpack",
            faults="onednn computes something else than it should",
            arithmetics=("groups32",),
        ),
    ),
    AskArithmetics(dtype="int8"),
    Arithmetics(dtype="bfloat16", names=("pairs16", "lanes16")),
    Arithmetics(dtype="int8", names=(), trouble="int8 does not run right on cpu"),
)


def sample_envelopes() -> list[Envelope]:
    """Every message alone, and with each kind of payload that it may have."""
    found = []
    for number, message in enumerate(MESSAGES):
        payloads: list[Tensor | None] = [None]
        if isinstance(message, TensorBytes):
            payloads = [Tensor(rows=1, width=4, dtype=BYTES, data=b"abcd")]
        elif isinstance(message, Segment | Features) and message.row_count:
            rows, width = message.row_count, 4
            of_each = [
                Tensor(rows=rows, width=width, dtype=dtype, data=bytes(rows * width * size))
                for dtype, size in DTYPE_BYTES.items()
            ]
            payloads = [*payloads, *of_each] if isinstance(message, Segment) else [*of_each]
        found += [
            Envelope(incarnation=77, sender="head", sequence=number, message=message, tensor=each)
            for each in payloads
        ]
    return found


def sample_frames() -> list[Frames]:
    return [[bytes(frame) for frame in encode(envelope)] for envelope in sample_envelopes()]
