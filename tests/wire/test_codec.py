"""Every message survives the wire unchanged; no other frame gets past `PeerError`; each bound holds alone."""

from __future__ import annotations

import math
import random
import re
import tracemalloc
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct, structs

from flowspec import checking
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import (
    Arithmetics,
    Assign,
    Drafting,
    Loading,
    Ping,
    Pong,
    Ready,
)
from flowspec.core.protocol.device_messages import (
    ModelOffer,
    NameList,
    PackedSpeed,
    Speed,
    TensorBytes,
    TensorEntry,
    TensorList,
)
from flowspec.core.protocol.messages import (
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
from flowspec.errors import PeerError
from flowspec.wire.codec import BYTES, DTYPE_BYTES, KINDS, Envelope, Tensor, decode, encode, join_rows
from lab.fuzz.mutate import mutated
from lab.fuzz.samples import sample_envelopes
from tests.specs import spec_of_variant

IDS = st.integers(0, 9) | st.integers(0, limits.ID_MAX)
PRINTABLE = st.characters(categories=["L", "N", "P", "S"])
NAMES = st.text(PRINTABLE, max_size=8) | st.just("é" * limits.NAME_CHARS_MAX)


def bare(hint: Any) -> tuple[Any, Meta]:
    """A type, and all bounds that it has."""
    if get_origin(hint) is not Annotated:
        return hint, Meta()
    inner, *metas = get_args(hint)
    names = ("ge", "gt", "le", "lt", "pattern", "min_length", "max_length")
    found = {name: value for meta in metas for name in names if (value := getattr(meta, name)) is not None}
    return inner, Meta(**found)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """All that a type and its bounds allow."""
    inner, meta = bare(hint)
    if get_origin(inner) in (types.UnionType, Union):
        return st.one_of([st.none() if each is type(None) else values(each) for each in get_args(inner)])
    if get_origin(inner) is tuple:
        items, most = get_args(inner), min(meta.max_length or 5, 5)
        if items[-1] is not Ellipsis:
            return st.tuples(*map(values, items))
        return st.lists(values(items[0]), min_size=meta.min_length or 0, max_size=most).map(tuple)
    if inner is int:
        low, high = meta.ge, meta.le if meta.lt is None else meta.lt - 1
        return st.integers(low, min(high, low + 9)) | st.integers(low, high)
    if inner is float:
        low, high = (meta.ge if meta.gt is None else meta.gt), (meta.le if meta.lt is None else meta.lt)
        return st.floats(low, high, exclude_min=meta.gt is not None, exclude_max=meta.lt is not None)
    if inner is str:
        if meta.pattern is None:
            return st.text(max_size=8) | st.text("\U0001f600", max_size=meta.max_length or 8)
        if "\\u2028" in ascii(meta.pattern):
            return NAMES
        return st.from_regex(meta.pattern, fullmatch=True).filter(lambda text: len(text) <= 64)
    if inner is bool:
        return st.booleans()
    return st.deferred(lambda: messages_of(inner))


def build(cls: type, **special: Any) -> st.SearchStrategy[Any]:
    """A record of `cls`; a field without a rule of its own (`special`) takes anything its type allows."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **({name: values(hint) for name, hint in hints.items()} | special))


def spec_of_layers(count: int) -> Callable[[str], ModelSpec]:
    """Of a family, of so many layers that have keys of their own."""

    def spec_of(name: str) -> ModelSpec:
        spec = spec_of_variant(name)
        layers = (structs.replace(spec.layers[at % len(spec.layers)], source=at) for at in range(count))
        return structs.replace(spec, layers=tuple(layers))

    return spec_of


@st.composite
def assigns(draw: st.DrawFn) -> Any:
    stages, layers = draw(st.integers(1, limits.STAGES_MAX)), draw(st.integers(1, limits.LAYERS_MAX))
    last, first = draw(st.booleans()) or stages == 1 or layers == 1, draw(st.integers(0, max(0, layers - 2)))
    has_tokens = draw(st.booleans())
    special: dict[str, st.SearchStrategy[Any]] = {
        "stages": st.just(stages),
        "stage": st.just(stages - 1) if last else st.integers(0, stages - 2),
        "layer_count": st.just(layers),
        "first_layer": st.just(first),
        "end_layer": st.just(layers) if last else st.integers(first + 1, layers - 1),
        "next_hop": st.just("") if last else st.just("10.0.0.2:7700"),
        "next_ip": st.sampled_from(["", "10.0.0.2", "fe80::1"]),
        "drafting": st.none(),
        "tokens_digest": st.just("0" * limits.DIGEST_CHARS if has_tokens else ""),
        "tokens_bytes": st.integers(1, limits.TOKEN_TABLE_BYTES_MAX) if has_tokens else st.just(0),
        "spec": st.none()
        | st.sampled_from(("qwen3", "olmoe", "lfm2", "qwen3.5")).map(spec_of_layers(layers)),
        "captures": st.lists(st.integers(0, layers), max_size=limits.CAPTURES_MAX, unique=True)
        .map(sorted)
        .map(tuple),
    }
    if stages == 1 and draw(st.booleans()):
        special |= {"first_layer": st.just(0), "captures": st.just(()), "drafting": values(Drafting)}
        special |= {"is_beside": st.just(False), "sliding_window": st.none()}
    return draw(build(Assign, **special))


TOKENS = st.integers(0, limits.VOCABULARY_MAX)
BOUND_TEXTS = st.text(max_size=8) | st.just("x" * limits.GRAMMAR_BYTES_MAX)
ENDS = st.sets(TOKENS, min_size=1, max_size=5).map(sorted).map(tuple)


@st.composite
def replies(draw: st.DrawFn) -> Grammar:
    ends = draw(ENDS)
    marks = draw(st.lists(TOKENS.filter(lambda token: token not in ends), max_size=5, unique=True))
    return Grammar(kind="reply", text=draw(BOUND_TEXTS), ends=ends, marks=tuple(marks))


GRAMMARS = replies() | build(Grammar, text=BOUND_TEXTS, ends=ENDS, marks=st.just(()))
SAMPLINGS = build(
    Sampling,
    grammar=st.none() | GRAMMARS,
    temperature=st.just(0.0) | st.floats(limits.TEMPERATURE_MIN, limits.TEMPERATURE_MAX),
    suppress_tokens=st.sets(TOKENS, max_size=5).map(sorted).map(tuple)
    | st.just(tuple(range(limits.SUPPRESS_TOKENS_MAX))),
    logit_bias=st.dictionaries(TOKENS, st.floats(-limits.BIAS_MAX, limits.BIAS_MAX), max_size=5).map(
        lambda found: tuple(sorted(found.items()))
    )
    | st.just(tuple((token, -100.0) for token in range(limits.LOGIT_BIAS_MAX))),
)


@st.composite
def opens(draw: st.DrawFn, request: int | None = None, epoch: int | None = None) -> Open:
    length = draw(st.integers(1, limits.CONTEXT_MAX))
    number = draw(IDS if request is None else st.just(request))
    own = {"epoch": st.just(epoch)} if epoch is not None else {}
    keep = draw(st.integers(0, length - 1))
    others = IDS.filter(lambda other: other != number)
    return draw(
        build(
            Open,
            **own,
            request=st.just(number),
            keep=st.just(keep),
            source=st.just(-1) | others if keep else st.just(-1),
            length=st.just(length),
            slots=st.integers(length, limits.CONTEXT_MAX + limits.TREE_NODES_MAX),
            answer_start=st.integers(1, length),
        )
    )


@st.composite
def parts(draw: st.DrawFn, request: int) -> SegmentPart:
    commit = draw(build(Commit, request=st.just(request)))
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


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    found = draw(st.dictionaries(st.integers(0, limits.VOCABULARY_MAX), st.floats(0, 1), max_size=4))
    columns = {"tokens": st.just(tuple(found)), "confidences": st.just(tuple(found.values()))}
    return draw(build(Proposal, **columns))


SEGMENTS = st.lists(IDS, max_size=3, unique=True).flatmap(
    lambda requests: build(Segment, parts=st.tuples(*[parts(request) for request in requests]))
)
TROUBLE = st.text(PRINTABLE, min_size=1, max_size=20)
SPECIAL: dict[type, Callable[[], st.SearchStrategy[Any]]] = {
    Arithmetics: lambda: (
        build(Arithmetics, names=st.just(()), trouble=TROUBLE)
        | build(Arithmetics, names=st.lists(TROUBLE, min_size=1, max_size=3).map(tuple), trouble=st.just(""))
    ),
    Assign: assigns,
    Expand: lambda: build(Expand, segment=SEGMENTS.map(lambda segment: structs.replace(segment, hops=()))),
    Logprobs: logprobs,
    Open: opens,
    Proposal: proposals,
    Ready: lambda: build(Ready, slot_bytes=st.integers(9, limits.ID_MAX), windowed_bytes=st.integers(0, 9)),
    Sampling: lambda: SAMPLINGS,
    Segment: lambda: SEGMENTS,
    Speed: lambda: build(
        Speed,
        float32=st.floats(0.01, 1),
        packed=st.lists(values(PackedSpeed), unique_by=lambda each: each.dtype, max_size=3).map(tuple),
    ),
    VerifiedPart: verified_parts,
}
"""Of records whose fields must fit together."""


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    return SPECIAL[cls]() if cls in SPECIAL else build(cls)


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


def valid_or_refused(frames: list[Any], never: str = "^$") -> None:
    """The promise: an envelope that `encode` could have written, or `PeerError`, but not one that says what
    is `never` said; never anything else."""
    try:
        envelope = decode(frames)
    except PeerError as error:
        if re.search(never, str(error)):
            pytest.fail(str(error))
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
COPYING = structs.replace(OPENING, keep=1, source=4)
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


def leaves(entries: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every number and text in nested lists, by its path."""
    if isinstance(entries, list):
        for place, entry in enumerate(entries):
            yield from leaves(entry, (*path, place))
    elif entries is not None:
        yield path, entries


WRONG: dict[type, list[Any]] = {
    bool: [0, 1, "true", []],
    int: [True, -(2**62), 2**62, 2**64 - 1, 1.0, "1", []],
    float: [True, math.nan, math.inf, -math.inf, "1", []],
    str: [7, b"x", [], True],
}
FORGED = ("two\nlines", "\x1b[2J", "\u202edaeh", "x" * (limits.TEXT_CHARS_MAX + 1))
"""Texts that would forge a line of a log, and one too long for it."""


FREE = ('{"model_type": "llama"}',)
"""Of the texts in the samples: a config may have lines."""


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_number_and_text_of_a_message_is_checked(cls: type) -> None:
    """Whatever its types say: none is without a bound, or takes another type."""
    for envelope in sample_envelopes():
        if type(envelope.message) is not cls:
            continue
        header, *payload = encode(envelope)
        for path, value in leaves(msgpack.unpackb(header)[BODY], (BODY,)):
            is_free = type(value) is not str or value in FREE
            for wrong in (*WRONG[type(value)], *(() if is_free else FORGED)):
                refused([replaced(msgpack.unpackb(header), path, wrong), *payload], "expected|broken")


def types_in(hint: Any) -> Iterator[Any]:
    """A type, and all that are in it."""
    inner, _ = bare(hint)
    yield hint
    for each in get_args(inner):
        yield from types_in(each)
    if isinstance(inner, type) and issubclass(inner, Struct):
        for each in get_type_hints(inner, include_extras=True).values():
            yield from types_in(each)


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_no_list_of_a_message_is_without_a_bound(cls: type) -> None:
    for hint in types_in(cls):
        inner, meta = bare(hint)
        if get_origin(inner) is tuple and Ellipsis in get_args(inner):
            assert meta.max_length is not None, f"{hint} in {cls.__name__}"
            assert meta.max_length <= limits.LIST_MAX


@pytest.mark.parametrize("wrong", [b"\xa2\xff\xfe", b"\x81\x80\x01", b"\xc7\x01\x05a", b"\xd4\xff\x00"])
@pytest.mark.parametrize("at", [(3,), (BODY,), (BODY, 0), (BODY, 1, 0)], ids=str)
def test_what_is_no_text_no_key_and_no_type_of_ours_is_refused(wrong: bytes, at: tuple[int, ...]) -> None:
    """A text that is not UTF-8, a map whose key is a map, extensions."""
    mark = b"\xc4\x04mark"
    refused([replaced(header_of(SEGMENT), at, b"mark").replace(mark, wrong)], "broken")


OF_BOUNDS = "a (whole )?number (from|above|of)|of at most .* (characters|entries)"
"""How bounds that stand in types are told; rules between fields have other words."""


def bounds_of(hint: Any, entry: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Of what is in a message of some type: each place with a bound, what is at the edge, and what is one
    beyond."""
    inner, meta = bare(hint)
    if get_origin(inner) in (types.UnionType, Union):
        kinds = [each for each in get_args(inner) if each is not type(None)]
        if entry is None:
            return
        tagged = {each.__name__: each for each in kinds if isinstance(each, type)}
        inner, meta = bare(kinds[0] if not kinds[1:] else tagged[entry[0]])
    for edge, sign in ((meta.ge, -1), (meta.le, 1)):
        if edge is not None and abs(edge) < 1e300:
            yield path, edge, edge + sign if inner is int else edge + sign * max(1e-9, 1e-9 * abs(edge))
    for beyond in (meta.gt, meta.lt):
        if beyond is not None:
            yield path, None, beyond
    if meta.max_length is not None:
        item = "x" if inner is str else (entry[0] if entry else None)
        whole = item * (meta.max_length + 1) if inner is str else [item] * (meta.max_length + 1)
        yield path, whole[1:] if inner is str else None, whole
    if meta.min_length:
        yield path, None, "" if inner is str else []
    if get_origin(inner) is tuple:
        items = get_args(inner)
        for place, each in enumerate(entry[:1] if items[-1] is Ellipsis else entry):
            yield from bounds_of(items[place], each, (*path, place))
    if isinstance(inner, type) and issubclass(inner, Struct):
        hints = get_type_hints(inner, include_extras=True)
        first = int(inner.__struct_config__.tag is not None)
        for place, each in enumerate(hints.values(), first):
            yield from bounds_of(each, entry[place], (*path, place))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_bound_of_a_message_holds_at_its_edge_and_not_one_beyond(cls: type) -> None:
    """Wherever a type states one: numbers, lengths of texts and of lists. What is at the edge may break a
    rule between fields, but no bound."""
    samples = [each for each in sample_envelopes() if type(each.message) is cls]
    assert samples
    for envelope in samples:
        header, *payload = encode(envelope)
        entries = msgpack.unpackb(header)
        for path, edge, beyond in bounds_of(cls, entries[BODY], (BODY,)):
            refused([replaced(msgpack.unpackb(header), path, beyond), *payload], "expected|broken")
            if edge is not None:
                valid_or_refused([replaced(msgpack.unpackb(header), path, edge), *payload], OF_BOUNDS)


@pytest.mark.parametrize("start", [-1, 0, 3])
def test_an_answer_begins_after_a_token_and_not_behind_what_is_known(start: int) -> None:
    assert header_of(OPENING)[BODY][8] == 2
    refused([replaced(header_of(OPENING), (BODY, 8), start)], "answer_start")


def test_headers_over_the_limit_are_refused_and_whole_numbers_stand_for_floats() -> None:
    refused([b"\xc1" * (limits.HEADER_BYTES_MAX + 1)], f"at most {limits.HEADER_BYTES_MAX} bytes")
    refused([b"\xc1" * limits.HEADER_BYTES_MAX], "broken header")
    frame = replaced(header_of(OPENING), (BODY, 6, 0), 1)
    assert decode([frame]).message.sampling == Sampling(temperature=1.0)


@pytest.mark.parametrize("frames", [[], [b"", b"", b""]])
def test_other_counts_of_frames_are_refused(frames: list[bytes]) -> None:
    refused(frames, "1 or 2 frames")


VERSION = f"expected protocol {PROTOCOL_VERSION}, got .*same FlowSpec version"
COUNTS = (True, -1, 2**62, 2**64 - 1, 1.5, None, "x" * 201, b"head", ["a"])


@pytest.mark.parametrize(
    ("entry", "value", "told"),
    [
        *((0, version, VERSION) for version in (0, 1, 2, PROTOCOL_VERSION - 1, 100)),
        *((0, version, "broken header: protocol: expected") for version in (True, 3.0, "3", None, [3], 300)),
        *((1, kind, "broken header: kind: ") for kind in (-1, len(KINDS), 2**63, True, None, "Ping", 1.0)),
        *((2, value, "broken header: incarnation: expected a whole number") for value in COUNTS),
        *((4, value, "broken header: sequence: expected a whole number") for value in COUNTS),
        *((3, value, "broken header: sender: expected a printable text") for value in (*COUNTS, *FORGED)),
    ],
)
def test_version_kind_sender_and_counts_are_checked(entry: int, value: Any, told: str) -> None:
    refused([replaced(header_of(Ping()), (entry,), value)], told)


def test_a_long_list_is_refused_before_it_becomes_many_objects() -> None:
    """A header of 6 MiB may have six million entries of a byte: none of them is made, wherever it stands."""
    nothing = header_of(SEGMENT)
    for entries in (nothing, nothing[:BODY]):
        for entry in (0, [], [[]]):
            entries[1:] = [entry] * (limits.HEADER_BYTES_MAX // 4)
            frame = msgpack.packb(entries)
            tracemalloc.start()
            refused([frame], "broken header")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()
    for path in ((1,), (1, 0, 2), (2,), (3,)):
        frame = replaced(header_of(SEGMENT), (BODY, *path), [0] * (limits.HEADER_BYTES_MAX - 1000))
        tracemalloc.start()
        refused([frame], "broken Segment: Expected `array` of length <= ")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("at", [(), (0,), (1,), (3,), (4,), (5,), (5, 0), (5, 1, 0, 2, 0), (6,)], ids=str)
@pytest.mark.parametrize("depth", [10, 400, 900, 1000, 5000])
def test_deep_nesting_is_refused_wherever_it_stands(at: tuple[int, ...], depth: int) -> None:
    mark = b"\xc4\x04mark"
    frame = replaced(header_of(SEGMENT), at, b"mark") if at else mark
    assert mark in frame
    refused([frame.replace(mark, b"\x91" * depth + b"\x01")], "expected|payload|broken")


def test_entries_too_few_or_too_many_and_bytes_behind_are_refused() -> None:
    refused([msgpack.packb(header_of(Ping())[:6])], "broken header: shape: expected .*, got nothing")
    refused([msgpack.packb([*header_of(Ping()), None])], "broken header: expected 7 entries")
    refused([replaced(header_of(Ping()), (BODY,), [0])], "broken Ping: expected 0 entries")
    refused([replaced(header_of(SEGMENT), (BODY, 1, 0), [])], "broken Segment: parts.0..commit: .* nothing")
    refused([msgpack.packb(header_of(Ping())) + b"\x00"], "trailing")


TENSOR = Tensor(rows=2, width=3, dtype="bfloat16", data=b"\x01" * 12)


def test_a_payload_is_what_its_shape_says_and_nothing_else() -> None:
    frames = encode(Envelope(incarnation=3, sender="stage", sequence=0, message=SEGMENT, tensor=TENSOR))
    assert decode(frames).tensor == TENSOR
    header, payload = bytes(frames[0]), bytes(frames[1])
    refused([header], "a shape where there is a payload")
    refused([msgpack.packb(header_of(SEGMENT)), payload], "a shape where there is a payload")
    refused([header, payload[:-1]], "with 11 bytes")
    refused([header, payload + b"\x00"], "with 13 bytes")


CHUNK = TensorBytes(digest="0f" * 32, offset=5)
MANY_BYTES = limits.WEIGHT_CHUNK_BYTES + 1


@pytest.mark.parametrize(
    ("message", "shape", "size", "match"),
    [
        (SEGMENT, [3, 2, "bfloat16"], 12, "payload of 2 rows, got 3"),
        (SEGMENT, [2, 3, "float64"], 48, "dtype: expected one of float32, bfloat16, float16"),
        (SEGMENT, [2, -3, "bfloat16"], 12, "expected a whole number"),
        (SEGMENT, [True, 6, "bfloat16"], 12, "expected a whole number"),
        (SEGMENT, [2, 3.0, "bfloat16"], 12, "expected a whole number"),
        (SEGMENT, [2, 3], 12, "dtype: expected"),
        (SEGMENT, [2, 2**61, "float32"], 12, "with 12 bytes"),
        (SEGMENT, [2, limits.PAYLOAD_BYTES_MAX // 2, "bfloat16"], limits.PAYLOAD_BYTES_MAX * 2, "bytes"),
        (CHUNK, [1, 0, BYTES], 0, "got .1, 0, 'uint8'"),
        (CHUNK, [2, 3, BYTES], 6, "got .2, 3, 'uint8'"),
        (CHUNK, [1, 3, "bfloat16"], 6, "got .1, 3, 'bfloat16'"),
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
    refused([msgpack.packb(header_of(CHUNK))], "none")
    refused(
        [replaced(header_of(SEGMENT), (6,), [2, 2, BYTES]), b"abcd"],
        "expected a payload of float32, bfloat16, float16",
    )
    refused([replaced(header_of(Ping()), (6,), [1, 4, BYTES]), b"abcd"], "Ping carries no payload")
    for message in (VERIFIED, Pong(queued=0, done=0, memory_bytes=0)):
        told = f"{type(message).__name__} carries no payload"
        refused([replaced(header_of(message), (6,), [0, 0, "float32"]), b""], told)


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


def test_with_check_a_message_of_our_own_that_no_peer_takes_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envelope = Envelope(incarnation=0, sender="h", sequence=0, message=Loading(share=1.5))
    assert encode(envelope), "bounds are the receiver's to check"
    monkeypatch.setenv(checking.VARIABLE, "1")
    with pytest.raises(checking.BrokenCoreError, match=r"a broken Loading: share: expected a number from 0"):
        encode(envelope)
    for each in sample_envelopes():
        assert encode(each)


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


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (SEGMENT, (1,), [header_of(SEGMENT)[BODY][1][0]] * 2),
        (SEGMENT, (1, 0, 2), [4, 5, 6]),
        (SEGMENT, (1, 0, 3), [3, 5]),
        (SEGMENT, (1, 0, 1, 1), 1),
        (Verified(segment=0, parts=(), hops=()), (1,), [[1, 0, [4, 5], [7]]]),
        (VERIFIED, (1, 0, 4), [LIKELIEST]),
        (VERIFIED, (1, 0, 4, 0, 1), [3]),
        (VERIFIED, (1, 0, 4, 0, 2), [-0.5] * 3),
        (OPENING, (9,), 3),
        (COPYING, (9,), 1),
        (COPYING, (2,), 0),
        (OPENING, (6, 5), [7, 5]),
        (OPENING, (6, 5), [5, 5]),
        (OPENING, (6, 5), {}),
        (OPENING, (6, 6), [[7, 1.0], [5, 1.0]]),
        (OPENING, (6, 6), [[5, 1.0], [5, 2.0]]),
        (OPENING, (6, 6), [[5]]),
        (OPENING, (6, 6), [[5, 1.0, 1.0]]),
        (OPENING, (6, 6), [5, 1.0]),
        *((OPENING, (6, 6), [[5, bias]]) for bias in (100.5, -math.inf, math.nan, "1", None)),
        (OPENING, (6, -1), ["xml", "{}", [0]]),
        (OPENING, (6, -1), ["regex", "x" * (limits.GRAMMAR_BYTES_MAX + 1), [0]]),
        (OPENING, (6, -1), ["regex", "é" * (limits.GRAMMAR_BYTES_MAX // 2 + 1), [0]]),
        (OPENING, (6, -1), ["regex", "x", []]),
        (OPENING, (6, -1), ["regex", "x", [1, 0]]),
        (OPENING, (6, -1), ["regex", "x"]),
        (OPENING, (2,), 2),
        (OPENING, (5,), 1),
        (EXPAND, (0, 2), [[0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0]]),
        (PROPOSED, (1, 0, 4), [0.5]),
        (DRAFTER, (2,), 1),
        (DRAFTER, (4,), 1),
        (DRAFTER, (11,), [2]),
        (DRAFTER, (12, 0), 0),
    ],
)
def test_counts_and_relations_between_fields_are_checked(
    message: Any, path: tuple[int, ...], value: Any
) -> None:
    refused([replaced(header_of(message), (BODY, *path), value)], "expected|Expected")


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
    found = join_rows([*zip(first, second, strict=True)])
    assert (found.rows, found.width, found.dtype) == (3, 3, "float16")
    lines = [bytes(range(4)) + b"aa", bytes(range(4, 8)) + b"bb", bytes(range(8, 12)) + b"cc"]
    assert bytes(found.data) == b"".join(lines)
