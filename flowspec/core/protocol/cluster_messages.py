"""What head and daemons say to each other to set a cluster up and to watch it: who is there, which
arithmetics, which layers, signs of life, errors.

Like all messages (`messages`) these are frozen; the codec checks what comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.core.protocol.types import (
    Count,
    IdOrNone,
    Instant,
    Layer,
    Lease,
    Length,
    Line,
    Megahertz,
    Message,
    Name,
    Record,
    Share,
    is_numeric,
    one_of,
)
from flowspec.validation import expect

ROLES = ("head-control", "head-data", "head-weights", "stage", "measure")
LOADING_STEPS = ("trying kernels", "asking for weights", "checking", "receiving", "loading")
ERROR_CAUSES = ("", "next", "part", "gone", "again")
Precision = Annotated[str, one_of(*ACTIVATIONS)]
Stage = Annotated[int, Meta(ge=0, le=limits.STAGES_MAX)]
Celsius = Annotated[float, Meta(ge=limits.CELSIUS_RANGE[0], le=limits.CELSIUS_RANGE[1])]
Arithmetic = Annotated[Name, Meta(min_length=1)]


class Hello(Message, frozen=True, kw_only=True):
    """First message of every connection to a daemon: who dials, and what the connection is for."""

    name: Name
    version: Name
    role: Annotated[str, one_of(*ROLES)]


class Welcome(Message, frozen=True, kw_only=True):
    """A daemon's answer to Hello: what it is, and the number, drawn for this connection, that the next
    message to it must bear.

    If a pipeline other than the one that asks has it, `holder` names that head, whose lease is over in
    `lease_s` unless it renews it.
    """

    name: Name
    version: Name
    device: Name
    pid: Count
    memory_bytes: Count
    count: Count
    holder: Name = ""
    lease_s: Lease = 0.0

    @property
    def is_held(self) -> bool:
        return bool(self.holder)


class Drafting(Record, frozen=True, kw_only=True):
    """What a daemon must know to draft with a model: how many token ids the target has (its own may be padded
    differently).

    `coupled` says that it ranks with the target's noise.
    """

    vocabulary: Annotated[int, Meta(ge=1, le=limits.VOCABULARY_MAX)]
    coupled: bool


class Assign(Message, frozen=True, kw_only=True):
    """Makes a daemon stage `stage` of `stages`: load layers `[first_layer, end_layer)`, send on to `next_hop`
    (`host:port` of `next_name`).

    `captures` names hidden states that a drafter wants of committed nodes: the inputs of those layers,
    `layer_count` being the output after the final norm. Each stage keeps those of its own layers, and sends
    them straight to the head (`Features`).

    `next_ip` is the address of the host of `next_hop` as the head knows it (empty: it knows none), for a
    daemon that cannot look it up.

    `arithmetic` names the bits that its layers are to be computed with (`core.cluster.agreement`); empty: the
    best that the device has, as for drafters, which decide no token.

    Whoever draws or drafts is to have the bytes of the model's tokens, for answers that a grammar binds:
    `tokens_digest` names them and `tokens_bytes` is their size; it asks for them (`AskTokens`) unless it has
    them. Empty: no answer is bound.

    Layers with a sliding window hold what `sliding_window` says (None: all layers hold all).

    With `drafting` the daemon becomes a drafter instead: all layers of a small model, which answers `Expand`
    with `Proposed`.

    `spec` is what the model computes (None: nothing is loaded, as in simulated worlds).

    With `is_beside` an earlier pipeline of the same head holds the daemon and goes on: it makes ready for
    this one beside its work.
    """

    model: Line
    fingerprint: Name
    stage: Stage = 0
    stages: Stage = 1
    first_layer: Layer = 0
    end_layer: Layer
    layer_count: Annotated[int, Meta(ge=1, le=limits.LAYERS_MAX)]
    next_hop: Name = ""
    next_name: Name = ""
    dtype: Precision
    context: Length
    captures: Annotated[tuple[Layer, ...], Meta(max_length=limits.CAPTURES_MAX)] = ()
    drafting: Drafting | None = None
    next_ip: Name = ""
    is_beside: bool = False
    arithmetic: Name = ""
    cache: Annotated[str, one_of(*CACHES)] = CACHE_AUTO
    sliding_window: SlidingWindow | None = None
    tokens_digest: Name = ""
    tokens_bytes: Annotated[int, Meta(ge=0, le=limits.TOKEN_TABLE_BYTES_MAX)] = 0
    spec: ModelSpec | None = None

    def __post_init__(self) -> None:
        count, last = self.layer_count, self.stages - 1
        expect(self.next_ip == "" or is_numeric(self.next_ip), "next_ip", self.next_ip, "an IP address")
        expect(0 <= self.stage <= last, "stage", self.stage, f"0 to {last}")
        is_span = self.first_layer < self.end_layer <= count
        expect(is_span, "end_layer", self.end_layer, f"{self.first_layer + 1} to {count}")
        is_last = self.stage == last
        expect(
            (self.end_layer == count) == is_last, "end_layer", self.end_layer, "the last on the last stage"
        )
        expect((self.next_hop == "") == is_last, "next_hop", self.next_hop, "none on the last stage only")
        has_both = bool(self.tokens_digest) == bool(self.tokens_bytes)
        expect(has_both, "tokens_bytes", self.tokens_bytes, "a size where there is a digest")
        is_ascending = (
            list(self.captures) == sorted(set(self.captures)) and max(self.captures, default=0) <= count
        )
        expect(is_ascending, "captures", self.captures, f"layers up to {count} in growing order")
        if self.spec is not None:
            self._check_spec(self.spec)
        if self.drafting is not None:
            expect(self.stages == 1, "stages", self.stages, "1 of a drafter")
            expect(
                self.first_layer == 0,
                "first_layer",
                self.first_layer,
                "0 of a drafter, which holds all layers",
            )
            for name in ("captures", "is_beside", "sliding_window"):
                expect(not getattr(self, name), name, getattr(self, name), "none of a drafter")

    def _check_spec(self, spec: ModelSpec) -> None:
        expect(len(spec.layers) == self.layer_count, "spec", len(spec.layers), f"{self.layer_count} layers")
        for dense in (layer.dense for layer in spec.layers):
            is_of_head = dense is None or dense.has_entry or bool(dense.embedding_norm)
            expect(not is_of_head, "spec", dense, "layers of a model that can be computed, without an entry")

    @property
    def nodes_max(self) -> int:
        """Nodes of a conversation's tree that may be in the cache beside its `context`."""
        return limits.TREE_NODES_MAX if self.drafting is None else limits.DRAFT_NODES_MAX

    @property
    def payload_dtype(self) -> str:
        """Of the rows that this stage receives."""
        return ACTIVATIONS[self.dtype]

    @property
    def told(self) -> str:
        """What is assigned, for a log."""
        if self.drafting is not None:
            return f"drafter {self.model} ({self.dtype})"
        layers = f"layers {self.first_layer} to {self.end_layer - 1} of {self.model}"
        return f"{layers} (stage {self.stage + 1} of {self.stages}, {self.arithmetic or self.dtype})"

    def payload_width(self, hidden_size: int, carried: int = 0) -> int:
        """Width of the rows that this stage receives: the hidden state, and so many `carried` numbers that
        the slice needs beside it."""
        return carried + hidden_size

    @property
    def captured(self) -> int:
        """How many of the `captures` this stage has."""
        end = self.end_layer + (self.end_layer == self.layer_count)
        return sum(self.first_layer <= layer < end for layer in self.captures)


def capturing_of(assigns: Sequence[Assign]) -> tuple[int, ...]:
    """Which stages capture anything, by number; the assigns are in pipeline order."""
    return tuple(index for index, assign in enumerate(assigns) if assign.captured)


class AskArithmetics(Message, frozen=True, kw_only=True):
    """Asks a daemon which arithmetics of a precision its device has; it answers whoever holds it.

    It may have to try its kernels first, and says `Loading` meanwhile.
    """

    dtype: Precision


class Arithmetics(Message, frozen=True, kw_only=True):
    """A daemon's answer to AskArithmetics: those that were found right there, the best first.

    Without any `trouble` says why.
    """

    dtype: Precision
    names: Annotated[tuple[Arithmetic, ...], Meta(max_length=limits.ARITHMETICS_MAX)]
    trouble: Line = ""

    def __post_init__(self) -> None:
        is_one = bool(self.names) != bool(self.trouble)
        expect(is_one, "trouble", self.trouble, "what is wrong where there are no names")


class Loading(Message, frozen=True, kw_only=True):
    """How far a daemon has come with its slice, `share` from 0 to 1 of what it is `doing`.

    That is `trying kernels` where that was not done on this processor before, `asking for weights`: what the
    slice is made of, `checking` what of it was stored before, `receiving` the rest, and `loading` it all. A
    daemon that has the model does the last, and in int8 or int4 also checks what it quantised before.
    """

    share: Share
    doing: Annotated[str, one_of(*LOADING_STEPS)] = "loading"


class Ready(Message, frozen=True, kw_only=True):
    """A daemon's slice is loaded and its next hop reached; `memory_bytes` is its resident memory.

    The head sent `received_bytes` of weights for it: 0 where they were there already. It has memory for
    `cache_slots` of all conversations together. One takes `slot_bytes` in all its layers, `windowed_bytes` of
    these in layers with a sliding window; the states of a conversation take `state_bytes`.

    `grammars` is what it computes the masks of grammars by, a library and its version (empty: it cannot).

    Where it made ready beside a pipeline and had no memory for both slices, loading takes about `load_s` more
    once that one is over.
    """

    weight_bytes: Count
    memory_bytes: Count
    cache_slots: Count
    slot_bytes: Annotated[int, Meta(ge=1, le=limits.ID_MAX)] = 1
    windowed_bytes: Count = 0
    state_bytes: Count = 0
    received_bytes: Count = 0
    load_s: Instant = 0.0
    grammars: Name = ""

    def __post_init__(self) -> None:
        most = self.slot_bytes
        expect(self.windowed_bytes <= most, "windowed_bytes", self.windowed_bytes, f"at most {most}")


class Reset(Message, frozen=True, kw_only=True):
    """The head lets go of a daemon: its requests are forgotten, its slice may stay loaded."""


class Ping(Message, frozen=True, kw_only=True):
    """Keeps a head's lease alive; the daemon answers with Pong from the loop that does the work."""


class Pong(Message, frozen=True, kw_only=True):
    """A daemon's sign of life: segments waiting and run so far, how long it has been at the one that runs (0:
    idle), resident memory.

    `arrived` is the number of the last segment that came (-1: none yet).

    `running_s` counts from when that one last got further: when it began, or (where that can be seen) when
    one of its layers ended. `temperature_c` is that of its device's hottest part, `clock_mhz` that of its
    fastest core right now and `clock_max_mhz` what it can do, each None where nothing tells it. It
    `is_throttled` where its kernel or firmware says so.
    """

    queued: Count
    done: Count
    memory_bytes: Count
    running_s: Instant = 0.0
    temperature_c: Celsius | None = None
    clock_mhz: Megahertz | None = None
    clock_max_mhz: Megahertz | None = None
    is_throttled: bool = False
    arrived: IdOrNone = -1


class Error(Message, frozen=True, kw_only=True):
    """Something went wrong at the sender; one line that says what was expected, what came, and what to do.

    `retry_after_s` above 0 says that the same request may succeed then. `cause` is what a head needs to know
    to go on: the `next` device is lost, this one cannot do its `part` or is `gone`, or the same may do it
    `again`. Without one every pipeline would fail alike.
    """

    text: Line
    retry_after_s: Lease = 0.0
    cause: Annotated[str, one_of(*ERROR_CAUSES)] = ""

    @classmethod
    def saying(cls, text: str, retry_after_s: float = 0.0, cause: str = "") -> Error:
        """An Error for any text: cut to the limit, without control characters."""
        shown = "".join(letter if letter.isprintable() else " " for letter in text[: limits.TEXT_CHARS_MAX])
        return cls(text=shown, retry_after_s=retry_after_s, cause=cause)
