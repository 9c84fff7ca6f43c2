"""Every message survives the wire unchanged, and no frame that is not ours gets past `PeerError`, whatever it
holds."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import (
    ERROR_CAUSES,
    LOADING_STEPS,
    ROLES,
    Arithmetics,
    AskArithmetics,
    Drafting,
    Error,
    Pong,
    Ready,
)
from flowspec.core.protocol.facts import (
    INTERFACE_KINDS,
    MODEL_STATES,
    SPEED_SOURCES,
    AskFacts,
    Board,
    Facts,
    Interface,
    KernelFacts,
    LinkFacts,
    PackedSpeed,
    Software,
    Speed,
)
from flowspec.core.protocol.messages import (
    GRAMMAR_KINDS,
    HOP_ROWS,
    HOP_SECONDS,
    Commit,
    Expand,
    Features,
    Grammar,
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
from flowspec.core.protocol.precision import ACTIVATIONS, CACHES, PACKED
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.core.protocol.weight_messages import (
    AskBytes,
    AskNames,
    AskTensors,
    AskTokens,
    ModelOffer,
    NameList,
    TensorBytes,
    TensorEntry,
    TensorList,
)
from flowspec.errors import PeerError
from flowspec.wire.codec import BYTES, DTYPE_BYTES, KINDS, Envelope, Tensor, decode, encode

IDS = st.integers(0, 9) | st.integers(0, limits.ID_MAX)
PRINTABLE = st.characters(categories=["L", "N", "P", "S"])
NAMES = st.text(PRINTABLE, max_size=8) | st.just("é" * limits.NAME_CHARS_MAX)
BY_TYPE = {int: IDS, str: NAMES, float: st.floats(0, 1), bool: st.booleans()}


def build(cls: type, **special: Any) -> st.SearchStrategy[Any]:
    """A record of `cls`; a field without a rule of its own (`special`) takes anything its type allows."""
    hints = get_type_hints(cls)
    return st.builds(
        cls, **{field.name: special.get(field.name, BY_TYPE.get(hints[field.name])) for field in fields(cls)}
    )


_POSITIONS = st.integers(1, limits.CONTEXT_MAX)
WINDOWS = build(SlidingWindow, tokens=_POSITIONS, back=_POSITIONS, step=_POSITIONS, snapshot=_POSITIONS)


@st.composite
def assigns(draw: st.DrawFn, cls: type) -> Any:
    stages, layers = draw(st.integers(1, limits.STAGES_MAX)), draw(st.integers(1, limits.LAYERS_MAX))
    last, first = draw(st.booleans()) or stages == 1 or layers == 1, draw(st.integers(0, max(0, layers - 2)))
    has_tokens = draw(st.booleans())
    special: dict[str, st.SearchStrategy[Any]] = {
        "model": st.text(PRINTABLE, max_size=30),
        "stages": st.just(stages),
        "stage": st.just(stages - 1) if last else st.integers(0, stages - 2),
        "layer_count": st.just(layers),
        "first_layer": st.just(first),
        "end_layer": st.just(layers) if last else st.integers(first + 1, layers - 1),
        "next_hop": st.just("") if last else st.just("10.0.0.2:7700"),
        "next_ip": st.sampled_from(["", "10.0.0.2", "fe80::1"]),
        "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
        "cache": st.sampled_from(CACHES),
        "context": st.integers(1, limits.CONTEXT_MAX),
        "drafting": st.none(),
        "tokens_digest": st.just("0" * limits.DIGEST_CHARS if has_tokens else ""),
        "tokens_bytes": st.integers(1, limits.TOKEN_TABLE_BYTES_MAX) if has_tokens else st.just(0),
        "sliding_window": st.none() | WINDOWS,
        "captures": st.lists(st.integers(0, layers), max_size=limits.CAPTURES_MAX, unique=True)
        .map(sorted)
        .map(tuple),
    }
    if stages == 1 and draw(st.booleans()):
        drafting = build(Drafting, vocabulary=st.integers(1, limits.VOCABULARY_MAX))
        special |= {"first_layer": st.just(0), "captures": st.just(()), "drafting": drafting}
        special |= {"is_beside": st.just(False), "sliding_window": st.none()}
    return draw(build(cls, **special))


TOKENS = st.integers(0, limits.VOCABULARY_MAX)
BOUND_TEXTS = st.text(max_size=8) | st.just("x" * limits.GRAMMAR_BYTES_MAX)
ENDS = st.sets(TOKENS, min_size=1, max_size=5).map(sorted).map(tuple)


@st.composite
def replies(draw: st.DrawFn) -> Grammar:
    ends = draw(ENDS)
    marks = draw(st.lists(TOKENS.filter(lambda token: token not in ends), max_size=5, unique=True))
    return Grammar(kind="reply", text=draw(BOUND_TEXTS), ends=ends, marks=tuple(marks))


GRAMMARS = replies() | build(
    Grammar, kind=st.sampled_from(GRAMMAR_KINDS), text=BOUND_TEXTS, ends=ENDS, marks=st.just(())
)
SAMPLINGS = build(
    Sampling,
    grammar=st.none() | GRAMMARS,
    temperature=st.just(0.0) | st.floats(limits.TEMPERATURE_MIN, limits.TEMPERATURE_MAX),
    top_k=st.integers(0, limits.VOCABULARY_MAX),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    presence_penalty=st.floats(-limits.PENALTY_MAX, limits.PENALTY_MAX),
    frequency_penalty=st.floats(-limits.PENALTY_MAX, limits.PENALTY_MAX),
    repetition_penalty=st.floats(limits.REPETITION_PENALTY_MIN, limits.REPETITION_PENALTY_MAX),
    suppress_tokens=st.sets(TOKENS, max_size=5).map(sorted).map(tuple)
    | st.just(tuple(range(limits.SUPPRESS_TOKENS_MAX))),
    logit_bias=st.dictionaries(TOKENS, st.floats(-limits.BIAS_MAX, limits.BIAS_MAX), max_size=5).map(
        lambda found: tuple(sorted(found.items()))
    )
    | st.just(tuple((token, -100.0) for token in range(limits.LOGIT_BIAS_MAX))),
)
HOPS = build(
    Hop,
    **dict.fromkeys(HOP_SECONDS, st.floats(0, 1e6)),
    **dict.fromkeys(HOP_ROWS, st.integers(0, limits.NODES_PER_SEGMENT_MAX)),
)


@st.composite
def opens(draw: st.DrawFn, request: int | None = None, epoch: int | None = None) -> Open:
    length = draw(st.integers(1, limits.CONTEXT_MAX))
    number = draw(IDS if request is None else st.just(request))
    own = {"epoch": st.just(epoch)} if epoch is not None else {}
    keep = draw(st.integers(0, length - 1))
    others = IDS.filter(lambda other: other != number)
    slots = st.integers(length, limits.CONTEXT_MAX + limits.TREE_NODES_MAX)
    top = st.integers(-1, limits.TOP_LOGPROBS_MAX)
    return draw(
        build(
            Open,
            **own,
            request=st.just(number),
            keep=st.just(keep),
            source=st.just(-1) | others if keep else st.just(-1),
            length=st.just(length),
            slots=slots,
            sampling=SAMPLINGS,
            top_logprobs=top,
            answer_start=st.integers(1, length),
        )
    )


def commits(requests: st.SearchStrategy[int] = IDS) -> st.SearchStrategy[Commit]:
    return build(
        Commit,
        request=requests,
        base=st.integers(1, limits.CONTEXT_MAX),
        path=st.lists(IDS, max_size=5).map(tuple),
    )


@st.composite
def parts(draw: st.DrawFn, request: int) -> SegmentPart:
    commit = draw(commits(st.just(request)))
    opening = draw(st.none() | opens(request, commit.epoch))
    ids = draw(st.lists(IDS, max_size=6))
    columns = {
        "parents": tuple(draw(st.integers(-1, node - 1)) for node in ids),
        "tokens": tuple(draw(st.integers(0, limits.VOCABULARY_MAX)) for _ in ids),
        "positions": tuple(draw(st.integers(0, limits.CONTEXT_MAX)) for _ in ids),
        "committed": tuple(draw(st.booleans()) for _ in ids),
    }
    return SegmentPart(commit=commit, opening=opening, ids=tuple(ids), **columns)


@st.composite
def logprobs(draw: st.DrawFn) -> Logprobs:
    ids = draw(st.lists(st.integers(0, limits.VOCABULARY_MAX), max_size=limits.TOP_LOGPROBS_MAX))
    low = st.floats(max_value=0, allow_infinity=False)
    return Logprobs(chosen=draw(low), ids=tuple(ids), values=tuple(draw(low) for _ in ids))


@st.composite
def verified_parts(draw: st.DrawFn) -> VerifiedPart:
    ids = draw(st.lists(IDS, max_size=5).map(tuple))
    tokens = tuple(draw(st.integers(0, limits.VOCABULARY_MAX)) for _ in ids)
    found = tuple(draw(logprobs()) for _ in ids) if draw(st.booleans()) else ()
    return draw(build(VerifiedPart, ids=st.just(ids), next_tokens=st.just(tokens), logprobs=st.just(found)))


SEGMENTS = st.lists(IDS, max_size=3, unique=True).flatmap(
    lambda requests: build(
        Segment,
        parts=st.tuples(*[parts(request) for request in requests]),
        hops=st.lists(HOPS, max_size=3).map(tuple),
        releases=st.lists(build(Release), max_size=3).map(tuple),
    )
)
PROPOSALS = st.integers(0, 4).flatmap(
    lambda count: build(
        Proposal,
        tokens=st.lists(st.integers(0, limits.VOCABULARY_MAX), min_size=count, max_size=count).map(tuple),
        confidences=st.lists(st.floats(0, 1), min_size=count, max_size=count).map(tuple),
    )
)
DIGESTS = st.text("0123456789abcdef", min_size=limits.DIGEST_CHARS, max_size=limits.DIGEST_CHARS)
OFFSETS = st.integers(0, limits.TENSOR_BYTES_MAX)
NAME_LISTS = st.lists(NAMES, max_size=4).map(tuple)
ENTRIES = build(
    TensorEntry,
    digest=DIGESTS,
    size_bytes=OFFSETS,
    shape=st.lists(IDS, max_size=limits.TENSOR_AXES_MAX).map(tuple),
)
DEGREES = st.none() | st.floats(-50, 150)
CLOCKS = st.none() | st.floats(0, 1e4)
BOARDS = build(
    Board,
    throttled=st.none() | st.integers(0, 2**32 - 1),
    celsius=DEGREES,
    trip_c=DEGREES,
    cpu_mhz=CLOCKS,
    cpu_max_mhz=CLOCKS,
)
RATES = ("gb_per_s", "memory_efficiency", "float32", "compute_efficiency")
PACKED_SPEEDS = st.lists(
    build(
        PackedSpeed,
        dtype=st.sampled_from(PACKED),
        **dict.fromkeys(("gb_per_s", "tflops"), st.floats(0.01, 1)),
    ),
    unique_by=lambda each: each.dtype,
).map(tuple)
DTYPES = st.sampled_from(tuple(ACTIVATIONS))
ARITHMETIC = st.text(PRINTABLE, min_size=1, max_size=20)
ARITHMETICS = st.lists(ARITHMETIC, min_size=1, max_size=3).map(tuple)
FACTS = build(
    Facts,
    software=build(Software),
    board=BOARDS,
    **dict.fromkeys(("threads", "cores"), st.integers(1, limits.THREADS_MAX)),
    interface=st.none() | build(Interface, kind=st.sampled_from(INTERFACE_KINDS)),
    model=st.sampled_from(MODEL_STATES),
    link=st.none() | build(LinkFacts),
    speed=st.none()
    | build(
        Speed,
        source=st.sampled_from(SPEED_SOURCES),
        packed=PACKED_SPEEDS,
        **dict.fromkeys(RATES, st.floats(0.01, 1)),
    ),
    kernel=st.none() | build(KernelFacts, dtype=DTYPES, arithmetics=ARITHMETICS),
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "Ready": build(Ready, slot_bytes=st.integers(9, limits.ID_MAX), windowed_bytes=st.integers(0, 9)),
    "AskFacts": build(AskFacts, dtype=st.just("") | DTYPES),
    "AskArithmetics": build(AskArithmetics, dtype=DTYPES),
    "Arithmetics": build(Arithmetics, dtype=DTYPES, names=ARITHMETICS, trouble=st.just(""))
    | build(Arithmetics, dtype=DTYPES, names=st.just(()), trouble=ARITHMETIC),
    "Facts": FACTS,
    "Open": opens(),
    "Commit": commits(),
    "Segment": SEGMENTS,
    "Verified": build(
        Verified,
        parts=st.lists(verified_parts(), max_size=3).map(tuple),
        hops=st.lists(HOPS, max_size=3).map(tuple),
    ),
    "Features": build(Features, ids=st.lists(IDS, min_size=1, max_size=5).map(tuple)),
    "Expand": build(
        Expand,
        segment=SEGMENTS.map(lambda segment: replace(segment, hops=())),
        width=st.integers(1, limits.DRAFT_WIDTH_MAX),
    ),
    "Proposed": build(
        Proposed, proposals=st.lists(PROPOSALS, max_size=3).map(tuple), compute_s=st.floats(0, 1e6)
    ),
    "ModelOffer": build(
        ModelOffer,
        config=st.text(st.characters(codec="utf-8")),
        tensor_count=st.integers(1, limits.TENSORS_MAX),
    ),
    "AskNames": build(AskNames, first=st.integers(0, limits.TENSORS_MAX)),
    "NameList": build(NameList, names=NAME_LISTS),
    "AskTensors": build(AskTensors, names=NAME_LISTS),
    "TensorList": build(TensorList, entries=st.lists(ENTRIES, max_size=3).map(tuple)),
    "AskTokens": build(AskTokens, offset=st.integers(0, limits.TOKEN_TABLE_BYTES_MAX)),
    "AskBytes": build(
        AskBytes, digest=DIGESTS, offset=OFFSETS, size=st.integers(1, limits.WEIGHT_CHUNK_BYTES)
    ),
    "TensorBytes": build(TensorBytes, digest=DIGESTS, offset=OFFSETS),
    "Pong": build(
        Pong,
        temperature_c=DEGREES,
        clock_mhz=CLOCKS,
        clock_max_mhz=CLOCKS,
        arrived=st.integers(-1, limits.ID_MAX),
    ),
    "Error": build(
        Error,
        text=st.text(PRINTABLE, max_size=40),
        retry_after_s=st.floats(0, 3600),
        cause=st.sampled_from(ERROR_CAUSES),
    ),
}


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    if cls.__name__ == "Assign":
        return assigns(cls)
    if cls.__name__ in SPECIAL:
        return SPECIAL[cls.__name__]
    return build(cls, role=st.sampled_from(ROLES), doing=st.sampled_from(LOADING_STEPS))


@st.composite
def envelopes(draw: st.DrawFn, cls: type | None = None) -> Envelope:
    message = draw(messages_of(cls) if cls else st.sampled_from(KINDS).flatmap(messages_of))
    tensor = None
    if isinstance(message, TensorBytes):
        width = draw(st.integers(1, 9))
        tensor = Tensor(rows=1, width=width, dtype=BYTES, data=random.Random(width).randbytes(width))
    elif isinstance(message, Features) or (isinstance(message, Segment) and draw(st.booleans())):
        dtype, rows = draw(st.sampled_from(sorted(DTYPE_BYTES))), message.row_count
        width = draw(st.integers(int(isinstance(message, Features)), 4))
        data = random.Random(width).randbytes(rows * width * DTYPE_BYTES[dtype])
        tensor = Tensor(rows=rows, width=width, dtype=dtype, data=data)
    return Envelope(
        incarnation=draw(IDS), sender=draw(NAMES), sequence=draw(IDS), message=message, tensor=tensor
    )


def valid_or_refused(frames: list[bytes]) -> None:
    """The promise: an envelope that `encode` could have written, or `PeerError`; never anything else."""
    try:
        envelope = decode(frames)
    except PeerError:
        return
    assert decode(encode(envelope)) == envelope


@pytest.mark.arm
@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_kind_of_message_round_trips(cls: type, data: st.DataObject) -> None:
    envelope = data.draw(envelopes(cls))
    frames = encode(envelope)
    assert len(frames) == (1 if envelope.tensor is None else 2)
    assert decode(frames) == envelope
    assert decode([memoryview(bytearray(frame)) for frame in frames]) == envelope, (
        "as ZeroMQ hands frames over"
    )


@given(envelopes(), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_mutated_bytes_are_valid_or_refused(envelope: Envelope, draw: random.Random) -> None:
    frames = [bytearray(frame) for frame in encode(envelope)]
    for _ in range(draw.randint(1, 3)):
        frame = draw.choice(frames)
        at = draw.randrange(len(frame) + 1)
        edit = draw.choice([0, 0, 0, 1, 2, 3, 4])
        if edit == 0 and at < len(frame):
            frame[at] = draw.choice(
                [draw.randrange(256), 0x00, 0xC0, 0xC1, 0xC3, 0xCB, 0xCF, 0xD3, 0xDD, 0xFF]
            )
        elif edit == 1:
            del frame[at:]
        elif edit == 2:
            del frame[at : at + draw.randint(1, 3)]
        elif edit == 3:
            frame[at:at] = draw.randbytes(draw.randint(1, 9))
        else:
            frames = draw.choice([frames[:1], frames * 2, frames[::-1], [*frames, bytearray()]])
    valid_or_refused([bytes(frame) for frame in frames])


NASTY: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**62, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, 1.0, -0.5, math.nan, math.inf, -math.inf, 1e308),
    *("", "x" * 201, "x" * 70_000, b"", b"\xff" * 9, [], [[]], [0] * 5000, [True], [None], {}, {"a": 1}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(0, 0)),
]


@given(envelopes(), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_a_header_with_any_entry_replaced_is_valid_or_refused(
    envelope: Envelope, draw: random.Random
) -> None:
    header, *payload = encode(envelope)
    where = entries = msgpack.unpackb(header)
    if entries[5] and draw.random() < 0.8:
        where = entries[5]
    while True:
        at = draw.randrange(len(where))
        if not isinstance(where[at], list) or not where[at] or draw.random() < 0.1:
            break
        where = where[at]
    where[at : at + 1] = draw.choice([[nasty] for nasty in NASTY] + [[], [where[at]] * 2])
    valid_or_refused([msgpack.packb(entries), *payload])


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_frames_are_valid_or_refused(frames: list[bytes]) -> None:
    valid_or_refused(frames)
