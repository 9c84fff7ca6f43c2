"""Every message survives the wire unchanged; no other frame gets past `PeerError`; each bound holds alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
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
    Assign,
    Drafting,
    Loading,
    Ping,
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
    PROTOCOL_VERSION,
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
from flowspec.core.protocol.model_spec import ModelSpec
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
from flowspec.wire.codec import BYTES, DTYPE_BYTES, KINDS, Envelope, Tensor, decode, encode, joined
from lab.fuzz.mutate import mutated
from lab.fuzz.samples import sample_envelopes
from tests.specs import spec_of_variant

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


def spec_of_layers(count: int) -> Callable[[str], ModelSpec]:
    """Of a family, of so many layers that have keys of their own."""

    def spec_of(name: str) -> ModelSpec:
        spec = spec_of_variant(name)
        layers = (replace(spec.layers[at % len(spec.layers)], source=at) for at in range(count))
        return replace(spec, layers=tuple(layers))

    return spec_of


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
        "spec": st.none()
        | st.sampled_from(("qwen3", "olmoe", "lfm2", "qwen3.5")).map(spec_of_layers(layers)),
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
    "AskTokens": build(AskTokens, offset=st.integers(0, limits.TOKEN_TABLE_BYTES_MAX)),
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(ROLES),
    "doing": st.sampled_from(LOADING_STEPS),
    "ids": st.lists(IDS, min_size=1, max_size=5).map(tuple),
    "first": st.integers(0, limits.TENSORS_MAX),
    "names": st.lists(NAMES, max_size=4).map(tuple),
    "entries": st.lists(ENTRIES, max_size=3).map(tuple),
    "digest": DIGESTS,
    "offset": OFFSETS,
    "size": st.integers(1, limits.WEIGHT_CHUNK_BYTES),
    "temperature_c": DEGREES,
    **dict.fromkeys(("clock_mhz", "clock_max_mhz"), CLOCKS),
    "arrived": st.integers(-1, limits.ID_MAX),
    "retry_after_s": st.floats(0, 3600),
    "cause": st.sampled_from(ERROR_CAUSES),
    "text": st.text(PRINTABLE, max_size=40),
}
"""Of the other messages, whose fields mean the same wherever they stand."""


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    if cls.__name__ == "Assign":
        return assigns(cls)
    return SPECIAL[cls.__name__] if cls.__name__ in SPECIAL else build(cls, **FIELDS)


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


@given(envelopes(), envelopes(), st.randoms(use_true_random=False))
@settings(max_examples=600)
def test_mutated_frames_are_valid_or_refused(
    envelope: Envelope, other: Envelope, chance: random.Random
) -> None:
    """Bytes, entries of the header by numbers at the bounds, NaN, other types and deep lists, other counts of
    frames: `lab.fuzz.mutate`."""
    frames, others = ([bytes(frame) for frame in encode(each)] for each in (envelope, other))
    valid_or_refused(mutated(frames, others, chance))


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_frames_are_valid_or_refused(frames: list[bytes]) -> None:
    valid_or_refused(frames)


COMMIT = Commit(request=1, epoch=0, base=1, path=(5,))
OPENING = Open(
    request=1, epoch=0, keep=0, length=2, root=1, slots=8, sampling=Sampling(temperature=0.5), answer_start=2
)
COPYING = replace(OPENING, keep=1, source=4)
PART = SegmentPart(
    commit=COMMIT,
    opening=OPENING,
    ids=(4, 5),
    parents=(3, 4),
    tokens=(7, 8),
    positions=(2, 3),
    committed=(False, True),
)
HOP = Hop(received_s=0.5, queued_s=0.5, compute_s=0.5, own_s=0.5, rows=2)
SEGMENT = Segment(segment=0, parts=(PART,), hops=(HOP,))
LOGPROBS = Logprobs(chosen=-1.5, ids=(3, 4), values=(-0.5, -1.5))
LIKELIEST = [LOGPROBS.chosen, list(LOGPROBS.ids), list(LOGPROBS.values)]
VERIFIED = Verified(
    segment=0,
    parts=(VerifiedPart(request=1, epoch=0, ids=(4, 5), next_tokens=(7, 8), logprobs=(LOGPROBS,) * 2),),
    hops=(HOP,),
)
EXPAND = Expand(segment=Segment(segment=0, parts=(PART,)), width=8)
PROPOSED = Proposed(
    job=0,
    proposals=(Proposal(request=1, epoch=0, node=5, tokens=(7, 8), confidences=(0.5, 0.25)),),
    compute_s=0.5,
)
DRAFTER = next(
    each.message
    for each in sample_envelopes()
    if isinstance(each.message, Assign) and each.message.drafting is not None
)
BODY = 5


def header_of(message: Any, tensor: Tensor | None = None) -> list[Any]:
    envelope = Envelope(incarnation=3, sender="head", sequence=0, message=message, tensor=tensor)
    return msgpack.unpackb(encode(envelope)[0])


def replaced(entries: list[Any], path: tuple[int, ...], value: Any) -> bytes:
    where = entries
    for index in path[:-1]:
        where = where[index]
    where[path[-1]] = value
    return msgpack.packb(entries)


def refused(frames: list[Any], match: str) -> None:
    with pytest.raises(PeerError, match=match):
        decode(frames)


def numbers(entries: Any, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], Any]:
    """Every number in nested lists, by its path."""
    if isinstance(entries, list):
        return {
            at: value
            for index, entry in enumerate(entries)
            for at, value in numbers(entry, (*path, index)).items()
        }
    return {path: entries} if isinstance(entries, (int, float)) else {}


@pytest.mark.parametrize(
    "path", [(BODY, 1, 0, 4, 0, 0), (BODY, 1, 0, 4, 0, 2, 0), (BODY, 1, 0, 4, 0, 2, 1)], ids=str
)
def test_log_probabilities_are_finite_and_of_probabilities(path: tuple[int, ...]) -> None:
    assert decode([replaced(header_of(VERIFIED), path, 0)]), "certain"
    for value in (0.1, 1e-300, math.nan, math.inf, -math.inf, True, "1", None, []):
        refused([replaced(header_of(VERIFIED), path, value)], "expected")


NUMBERS = numbers(header_of(SEGMENT))


@pytest.mark.parametrize("path", NUMBERS, ids=str)
def test_every_number_of_a_segment_is_checked(path: tuple[int, ...]) -> None:
    kind = type(NUMBERS[path])
    wrong = {
        bool: [0, 1, None],
        int: [True, -2, 2**62, 2**64 - 1, 1.0, "1", None],
        float: [True, -2.5, math.nan, math.inf, -math.inf, "1", None],
    }
    for value in wrong[kind]:
        refused([replaced(header_of(SEGMENT), path, value)], "expected|broken")


SAMPLING_NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@pytest.mark.parametrize("name", [*SAMPLING_NUMBERS[:1], *SAMPLING_NUMBERS[2:]])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.5, 101.0])
def test_sampling_takes_only_finite_numbers_in_range(name: str, value: float) -> None:
    refused([replaced(header_of(OPENING), (BODY, 6, SAMPLING_NUMBERS.index(name)), value)], name)


@pytest.mark.parametrize("start", [-1, 0, 3])
def test_an_answer_begins_after_a_token_and_not_behind_what_is_known(start: int) -> None:
    assert header_of(OPENING)[BODY][8] == 2
    refused([replaced(header_of(OPENING), (BODY, 8), start)], "answer_start")


def test_headers_over_the_limit_are_refused_and_whole_numbers_stand_for_floats() -> None:
    refused([b"\xc1" * (limits.HEADER_BYTES_MAX + 1)], f"at most {limits.HEADER_BYTES_MAX} bytes")
    refused([b"\xc1" * limits.HEADER_BYTES_MAX], "msgpack header")
    frame = replaced(header_of(OPENING), (BODY, 6, 0), 1)
    assert decode([frame]).message.sampling == Sampling(temperature=1.0)


@pytest.mark.parametrize("frames", [[], [b"", b"", b""]])
def test_other_counts_of_frames_are_refused(frames: list[bytes]) -> None:
    refused(frames, "1 or 2 frames")


VERSION = f"expected protocol {PROTOCOL_VERSION}, got .*same FlowSpec version"
COUNTS = (True, -1, 2**62, 2**64 - 1, 1.5, None, "x" * 201, b"head", ["a"])
FORGED = ("two\nlines", "\x1b[2J", "\u202edaeh")
"""Senders that would forge a line of the log."""


@pytest.mark.parametrize(
    ("entry", "value", "told"),
    [
        *((0, version, VERSION) for version in (0, 1, 2, True, 3.0, "3", None, [3])),
        *((1, kind, "message kind") for kind in (-1, len(KINDS), 2**63, True, None, "Ping", 1.0)),
        *((entry, value, "broken Ping: expected a") for entry in (2, 3, 4) for value in COUNTS),
        *((3, name, "short printable text") for name in FORGED),
    ],
)
def test_version_kind_sender_and_counts_are_checked(entry: int, value: Any, told: str) -> None:
    refused([replaced(header_of(Ping()), (entry,), value)], told)


def test_no_list_is_longer_than_any_that_a_message_has() -> None:
    part = [[0, 0, 1, [], False], None, [], [], [], [], []]
    refused(
        [replaced(header_of(SEGMENT), (BODY, 1), [part] * (limits.LIST_MAX + 1))], "exceeds max_array_len"
    )
    assert (
        max(limits.COMMIT_PATH_MAX, limits.TENSORS_LISTED_MAX, limits.NODES_PER_SEGMENT_MAX)
        == limits.LIST_MAX
    )


@pytest.mark.parametrize("at", [(), (0,), (1,), (3,), (4,), (5,), (5, 0), (5, 1, 0, 2, 0), (6,)], ids=str)
@pytest.mark.parametrize("depth", [10, 400, 900, 1000, 5000])
def test_deep_nesting_is_refused_wherever_it_stands(at: tuple[int, ...], depth: int) -> None:
    mark = b"\xc4\x04mark"
    frame = replaced(header_of(SEGMENT), at, b"mark") if at else mark
    assert mark in frame
    refused([frame.replace(mark, b"\x91" * depth + b"\x01")], "expected|payload")


def test_entries_too_few_or_too_many_and_bytes_behind_are_refused() -> None:
    refused([msgpack.packb(header_of(Ping())[:6])], "7 header entries")
    refused([msgpack.packb([*header_of(Ping()), None])], "7 header entries")
    refused([replaced(header_of(Ping()), (BODY,), [0])], "0 entries for Ping")
    refused([replaced(header_of(SEGMENT), (BODY, 1, 0), [])], "7 entries for SegmentPart")
    refused([msgpack.packb(header_of(Ping())) + b"\x00"], "msgpack header")


TENSOR = Tensor(rows=2, width=3, dtype="bfloat16", data=b"\x01" * 12)


def test_a_payload_is_what_its_shape_says_and_nothing_else() -> None:
    frames = encode(Envelope(incarnation=3, sender="stage", sequence=0, message=SEGMENT, tensor=TENSOR))
    assert decode(frames).tensor == TENSOR
    header, payload = bytes(frames[0]), bytes(frames[1])
    refused([header], "shape without its frame")
    refused([msgpack.packb(header_of(SEGMENT)), payload], "frame without its shape")
    refused([header, payload[:-1]], "with 11 bytes")
    refused([header, payload + b"\x00"], "with 13 bytes")


CHUNK = TensorBytes(digest="0f" * 32, offset=5)
MANY_BYTES = limits.WEIGHT_CHUNK_BYTES + 1


@pytest.mark.parametrize(
    ("message", "shape", "size", "match"),
    [
        (SEGMENT, [3, 2, "bfloat16"], 12, "payload of 2 rows, got 3"),
        (SEGMENT, [2, 3, "float64"], 48, "none of float32, bfloat16, float16"),
        (SEGMENT, [2, -3, "bfloat16"], 12, "expected a number"),
        (SEGMENT, [True, 6, "bfloat16"], 12, "expected a number"),
        (SEGMENT, [2, 3.0, "bfloat16"], 12, "expected a number"),
        (SEGMENT, [2, 3], 12, "payload shape"),
        (SEGMENT, [2, 2**61, "float32"], 12, "with 12 bytes"),
        (SEGMENT, [2, limits.PAYLOAD_BYTES_MAX // 2, "bfloat16"], limits.PAYLOAD_BYTES_MAX * 2, "bytes"),
        (CHUNK, [1, 0, BYTES], 0, "got .1, 0. uint8"),
        (CHUNK, [2, 3, BYTES], 6, "got .2, 3. uint8"),
        (CHUNK, [1, 3, "bfloat16"], 6, "got .1, 3. bfloat16"),
        (CHUNK, [1, MANY_BYTES, BYTES], MANY_BYTES, f"1 to {limits.WEIGHT_CHUNK_BYTES} bytes of weights"),
    ],
)
def test_wrong_payload_shapes_are_refused(message: Any, shape: list[Any], size: int, match: str) -> None:
    """Weights come as one row of bytes."""
    header = header_of(message, TENSOR if message is SEGMENT else None)
    refused([replaced(header, (6,), shape), bytes(size)], match)


def test_only_segments_and_weights_carry_a_payload_and_each_its_own() -> None:
    tensor = Tensor(rows=1, width=4, dtype=BYTES, data=b"abcd")
    envelope = Envelope(incarnation=3, sender="head", sequence=0, message=CHUNK, tensor=tensor)
    assert decode(encode(envelope)) == envelope
    refused([msgpack.packb(header_of(CHUNK))], "got none")
    refused(
        [replaced(header_of(SEGMENT), (6,), [2, 2, BYTES]), b"abcd"],
        "expected a payload of float32, bfloat16, float16",
    )
    refused([replaced(header_of(Ping()), (6,), [1, 4, BYTES]), b"abcd"], "Ping carries no payload")
    for message in (VERIFIED, Pong(queued=0, done=0, memory_bytes=0)):
        told = f"{type(message).__name__} carries no payload"
        refused([replaced(header_of(message), (6,), [0, 0, "float32"]), b""], told)


ENTRY = ["model.norm.weight", "F32", [64], 256, "0" * 64]


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (0, ["x" * 201, "a\nb", "\x00", 3, None]),
        (1, ["x" * 201, 3]),
        (2, [[-1], [2**62], [1] * (limits.TENSOR_AXES_MAX + 1), [True], [1.0], 3]),
        (3, [-1, limits.TENSOR_BYTES_MAX + 1, True, 1.0]),
        (4, ["", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61, "g" * 64, b"0" * 64]),
    ],
)
def test_what_a_head_says_of_a_tensor_is_checked(at: int, values: list[Any]) -> None:
    header = header_of(
        TensorList(entries=(TensorEntry(name="a", dtype="F32", shape=(), size_bytes=4, digest="0" * 64),))
    )
    assert decode([replaced(header, (BODY, 0, 0), ENTRY)])
    for value in values:
        refused([replaced(header, (BODY, 0, 0), [*ENTRY[:at], value, *ENTRY[at + 1 :]])], "expected")


def test_the_largest_lists_of_tensors_fit_into_a_header() -> None:
    name = "é" * limits.NAME_CHARS_MAX
    entry = TensorEntry(
        name=name,
        dtype="BF16",
        shape=(limits.ID_MAX,) * limits.TENSOR_AXES_MAX,
        size_bytes=limits.TENSOR_BYTES_MAX,
        digest="0" * 64,
    )
    for message in (
        NameList(names=(name,) * limits.TENSORS_LISTED_MAX),
        TensorList(entries=(entry,) * limits.TENSORS_LISTED_MAX),
        ModelOffer(
            config="\U0001f600" * limits.CONFIG_CHARS_MAX, gguf="llama", tensor_count=limits.TENSORS_MAX
        ),
    ):
        envelope = Envelope(incarnation=0, sender="h", sequence=0, message=message)
        assert decode(encode(envelope)) == envelope


FEATURES = Features(request=1, epoch=0, ids=(4, 5))


def test_features_come_with_a_row_for_each_node_and_fit_into_a_payload() -> None:
    tensor = Tensor(rows=2, width=3, dtype="float16", data=bytes(12))
    envelope = Envelope(incarnation=3, sender="s", sequence=0, message=FEATURES, tensor=tensor)
    assert decode(encode(envelope)) == envelope
    refused([msgpack.packb(header_of(FEATURES))], "expected a payload of 2 rows, got none")
    for shape, size, match in (
        ([2, 0, "float16"], 0, "rows of no width"),
        ([1, 3, "float16"], 6, "expected a payload of 2 rows, got 1"),
        ([2, 3, BYTES], 6, "expected a payload of float32"),
    ):
        refused([replaced(header_of(FEATURES), (6,), shape), bytes(size)], match)
    for ids in ([], [-1], [0] * (limits.FEATURES_ROWS_MAX + 1)):
        refused([replaced(header_of(FEATURES, tensor), (BODY, 2), ids), bytes(12)], "broken Features: ids")
    assert limits.FEATURES_ROWS_MAX * limits.CAPTURES_MAX * 16_384 * 4 == limits.PAYLOAD_BYTES_MAX


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_payload_bytes_travel_as_they_are(dtype: str) -> None:
    data = bytes(range(2 * 3 * DTYPE_BYTES[dtype]))
    tensor = Tensor(rows=2, width=3, dtype=dtype, data=data)
    frames = encode(Envelope(incarnation=0, sender="", sequence=0, message=SEGMENT, tensor=tensor))
    assert frames[1] is data, "a payload is not copied"
    assert bytes(decode(frames).tensor.data) == data


MANY_TOP = limits.TOP_LOGPROBS_MAX + 1
MANY_PARTS = [
    [[request, 0, 1, [], False], None, [], [], [], [], []]
    for request in range(limits.PARTS_PER_SEGMENT_MAX + 1)
]


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (COMMIT, (3,), [1] * (limits.COMMIT_PATH_MAX + 1)),
        (SEGMENT, (1,), [header_of(SEGMENT)[BODY][1][0]] * 2),
        (SEGMENT, (1,), MANY_PARTS),
        (SEGMENT, (1, 0, 2), [4, 5, 6]),
        (SEGMENT, (1, 0, 3), [3, 5]),
        (SEGMENT, (1, 0, 1, 1), 1),
        (SEGMENT, (2,), [[0.0, 0.0, 0.0, 0]] * (limits.STAGES_MAX + 1)),
        (Verified(segment=0, parts=(), hops=()), (1,), [[1, 0, [4, 5], [7]]]),
        (VERIFIED, (1, 0, 4), [LIKELIEST]),
        (VERIFIED, (1, 0, 3), [7, -1]),
        (VERIFIED, (1, 0, 4, 0, 1), [3]),
        (VERIFIED, (1, 0, 4, 0, 2), [-0.5] * 3),
        (VERIFIED, (1, 0, 4, 0), [-0.5, [1] * MANY_TOP, [-0.5] * MANY_TOP]),
        (VERIFIED, (1, 0, 4, 0, 1, 0), limits.VOCABULARY_MAX + 1),
        (OPENING, (7,), limits.TOP_LOGPROBS_MAX + 1),
        (OPENING, (9,), 3),
        (COPYING, (9,), 1),
        (COPYING, (9,), -2),
        (COPYING, (9,), limits.ID_MAX + 1),
        (COPYING, (9,), None),
        (COPYING, (2,), 0),
        (OPENING, (6, 5), list(range(limits.SUPPRESS_TOKENS_MAX + 1))),
        (OPENING, (6, 5), [limits.VOCABULARY_MAX + 1]),
        (OPENING, (6, 5), [-1]),
        (OPENING, (6, 5), [7, 5]),
        (OPENING, (6, 5), [5, 5]),
        (OPENING, (6, 5), [5.0]),
        (OPENING, (6, 5), {}),
        (OPENING, (6, 6), [[token, 0.0] for token in range(limits.LOGIT_BIAS_MAX + 1)]),
        (OPENING, (6, 6), [[7, 1.0], [5, 1.0]]),
        (OPENING, (6, 6), [[5, 1.0], [5, 2.0]]),
        (OPENING, (6, 6), [[limits.VOCABULARY_MAX + 1, 1.0]]),
        (OPENING, (6, 6), [[5]]),
        (OPENING, (6, 6), [[5, 1.0, 1.0]]),
        (OPENING, (6, 6), [5, 1.0]),
        (OPENING, (6, 6), [["5", 1.0]]),
        *((OPENING, (6, 6), [[5, bias]]) for bias in (100.5, -math.inf, math.nan, "1", None)),
        (OPENING, (6, -1), ["xml", "{}", [0]]),
        (OPENING, (6, -1), ["regex", "x" * (limits.GRAMMAR_BYTES_MAX + 1), [0]]),
        (OPENING, (6, -1), ["regex", "é" * (limits.GRAMMAR_BYTES_MAX // 2 + 1), [0]]),
        (OPENING, (6, -1), ["regex", b"x", [0]]),
        (OPENING, (6, -1), ["regex", "x", []]),
        (OPENING, (6, -1), ["regex", "x", [1, 0]]),
        (OPENING, (6, -1), ["regex", "x", list(range(limits.GRAMMAR_ENDS_MAX + 1))]),
        (OPENING, (6, -1), ["regex", "x"]),
        (OPENING, (2,), 2),
        (OPENING, (5,), 1),
        (EXPAND, (0, 2), [[0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0]]),
        (EXPAND, (1,), limits.DRAFT_WIDTH_MAX + 1),
        (PROPOSED, (1,), [[1, 0, 4, [], []]] * (limits.NODES_PER_SEGMENT_MAX + 1)),
        (PROPOSED, (1, 0, 3), [7] * (limits.DRAFT_WIDTH_MAX + 1)),
        (PROPOSED, (1, 0, 4), [0.5]),
        (PROPOSED, (1, 0, 4), [0.5, 1.5]),
        (PROPOSED, (2,), -1.0),
        (DRAFTER, (2,), 1),
        (DRAFTER, (4,), 1),
        (DRAFTER, (11,), [2]),
        (DRAFTER, (12, 0), 0),
        (AskNames(first=0), (0,), limits.TENSORS_MAX + 1),
        (NameList(names=("a",)), (0,), ["a"] * (limits.TENSORS_LISTED_MAX + 1)),
        (NameList(names=("a",)), (0,), ["a" * (limits.NAME_CHARS_MAX + 1)]),
        (AskTensors(names=("a",)), (0,), ["a"] * (limits.TENSORS_LISTED_MAX + 1)),
        (AskTensors(names=("a",)), (0,), [1]),
        (TensorList(entries=()), (0,), [ENTRY] * (limits.TENSORS_LISTED_MAX + 1)),
        (ModelOffer(config="{}", gguf="", tensor_count=1), (1,), "x" * (limits.NAME_CHARS_MAX + 1)),
        (ModelOffer(config="{}", gguf="", tensor_count=1), (0,), "x" * (limits.CONFIG_CHARS_MAX + 1)),
        (ModelOffer(config="{}", gguf="", tensor_count=1), (2,), 0),
        (ModelOffer(config="{}", gguf="", tensor_count=1), (2,), limits.TENSORS_MAX + 1),
        (AskBytes(digest="0" * 64, offset=0, size=1), (2,), limits.WEIGHT_CHUNK_BYTES + 1),
        (AskBytes(digest="0" * 64, offset=0, size=1), (2,), 0),
        (AskTokens(offset=0), (0,), limits.TOKEN_TABLE_BYTES_MAX + 1),
        (AskTokens(offset=0), (0,), -1),
        (AskBytes(digest="0" * 64, offset=0, size=1), (1,), limits.TENSOR_BYTES_MAX + 1),
        (AskBytes(digest="0" * 64, offset=0, size=1), (0,), "/etc/passwd"),
        (Loading(share=0.5), (1,), "dancing"),
    ],
)
def test_counts_and_relations_between_fields_are_checked(
    message: Any, path: tuple[int, ...], value: Any
) -> None:
    refused([replaced(header_of(message), (BODY, *path), value)], "expected")


def test_the_largest_segment_allowed_passes() -> None:
    count, top = limits.NODES_PER_SEGMENT_MAX, limits.ID_MAX
    commit = Commit(request=top, epoch=top, base=limits.CONTEXT_MAX, path=(top,) * limits.COMMIT_PATH_MAX)
    largest = {"ids": top, "parents": top - 1, "tokens": limits.VOCABULARY_MAX}
    largest |= {"positions": limits.CONTEXT_MAX, "committed": True}
    columns: dict[str, Any] = {name: (value,) * count for name, value in largest.items()}
    part = SegmentPart(commit=commit, opening=None, **columns)
    segment = Segment(segment=top, parts=(part,), hops=(HOP,) * limits.STAGES_MAX)
    envelope = Envelope(incarnation=top, sender="h", sequence=top, message=segment)
    assert decode(encode(envelope)) == envelope


def test_as_many_parts_as_a_segment_has_may_bring_the_longest_openings() -> None:
    """All in one header: a request that names many tokens must not make a segment that stages refuse."""
    top, last = limits.ID_MAX, limits.VOCABULARY_MAX
    first_mark = last - 2 * limits.GRAMMAR_ENDS_MAX
    sampling = Sampling(
        suppress_tokens=tuple(range(last - limits.SUPPRESS_TOKENS_MAX + 1, last + 1)),
        logit_bias=tuple((token, -99.9) for token in range(last - limits.LOGIT_BIAS_MAX + 1, last + 1)),
        grammar=Grammar(
            kind="reply",
            text="x" * limits.GRAMMAR_BYTES_MAX,
            ends=tuple(range(last - limits.GRAMMAR_ENDS_MAX + 1, last + 1)),
            marks=tuple(range(first_mark, first_mark + limits.GRAMMAR_MARKS_MAX)),
        ),
    )
    rows = limits.NODES_PER_SEGMENT_MAX // limits.PARTS_PER_SEGMENT_MAX
    columns = {"ids": (top,) * rows, "parents": (top - 1,) * rows, "tokens": (last,) * rows}
    parts = []
    for request in range(top - limits.PARTS_PER_SEGMENT_MAX, top):
        fields = {"request": request, "epoch": top, "keep": 0, "length": limits.CONTEXT_MAX, "root": top}
        opening = Open(**fields, slots=limits.CONTEXT_MAX, sampling=sampling, answer_start=1)
        commit = Commit(request=request, epoch=top, base=limits.CONTEXT_MAX, path=(top,) * 100)
        places = {"positions": (limits.CONTEXT_MAX,) * rows, "committed": (True,) * rows}
        parts.append(SegmentPart(commit=commit, opening=opening, **columns, **places))
    segment = Segment(
        segment=top,
        parts=tuple(parts),
        hops=(HOP,) * limits.STAGES_MAX,
        releases=(Release(request=top),) * limits.LIST_MAX,
    )
    envelope = Envelope(incarnation=top, sender="h", sequence=top, message=segment)
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize("rows", [(), (0,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_rows_can_be_taken_out_of_a_payload(rows: tuple[int, ...], wrap: type) -> None:
    lines = [bytes([row] * 8) for row in range(3)]
    taken = Tensor(rows=3, width=4, dtype="float16", data=wrap(b"".join(lines))).select(rows)
    assert (taken.rows, taken.width, taken.dtype) == (len(rows), 4, "float16")
    assert bytes(taken.data) == b"".join(lines[row] for row in rows)


def test_rows_come_apart_each_with_memory_of_its_own_and_are_joined_side_by_side() -> None:
    data = bytearray(range(12))
    first = Tensor(rows=3, width=2, dtype="float16", data=memoryview(data)).apart()
    data[:] = bytes(12)
    assert [bytes(row.data) for row in first] == [bytes(range(at, at + 4)) for at in (0, 4, 8)]
    second = Tensor(rows=3, width=1, dtype="float16", data=b"aabbcc").apart()
    found = joined([*zip(first, second, strict=True)])
    assert (found.rows, found.width, found.dtype) == (3, 3, "float16")
    lines = [bytes(range(4)) + b"aa", bytes(range(4, 8)) + b"bb", bytes(range(8, 12)) + b"cc"]
    assert bytes(found.data) == b"".join(lines)


SAMPLE_FACTS = next(each.message for each in sample_envelopes() if isinstance(each.message, Facts))


@pytest.mark.parametrize("message", [PROPOSED, SAMPLE_FACTS], ids=["Proposed", "Facts"])
def test_every_number_of_proposals_and_facts_is_checked(message: Any) -> None:
    for path in numbers(header_of(message)):
        for value in (-(2**62), 2**63, math.nan, math.inf, "1", []):
            refused([replaced(header_of(message), path, value)], "expected|broken")


@pytest.mark.parametrize("text", ["x" * (limits.NAME_CHARS_MAX + 1), "two\nlines", "\x1b[2J", 7, None])
def test_texts_of_facts_are_short_printable_and_texts(text: Any) -> None:
    for at, entry in enumerate(header_of(SAMPLE_FACTS)[BODY]):
        if isinstance(entry, str):
            refused([replaced(header_of(SAMPLE_FACTS), (BODY, at), text)], "expected")
    for at in range(4):
        refused([replaced(header_of(SAMPLE_FACTS), (BODY, 2, at), text)], "expected")
