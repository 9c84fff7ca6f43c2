"""What head and daemons say to each other to set a cluster up and to watch it: who is there, which
arithmetics, which layers, signs of life, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import ModelSpec, SlidingWindow
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.core.protocol.types import (
    Celsius,
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
Precision = Annotated[str, one_of(*ACTIVATIONS)]
Stage = Annotated[int, Meta(ge=0, le=limits.STAGES_MAX)]
Arithmetic = Annotated[Name, Meta(min_length=1)]


class Hello(Message, frozen=True, kw_only=True):
    """First message of every connection to a daemon: who dials, and what the connection is for."""

    name: Name
    version: Name
    role: Annotated[str, one_of(*ROLES)]


class Welcome(Message, frozen=True, kw_only=True):
    """A daemon's answer to Hello. `count` was drawn for this connection: the next message to it must bear it
    as its number."""

    name: Name
    version: Name
    device: Name
    pid: Count
    memory_bytes: Count
    count: Count
    holder: Name = ""  # the head that has it, unless its pipeline is the one that asks
    lease_s: Lease = 0.0  # until that head's lease is over, unless it renews it


class Drafting(Record, frozen=True, kw_only=True):
    """What a daemon must know to draft with a model."""

    vocabulary: Annotated[int, Meta(ge=1, le=limits.VOCABULARY_MAX)]  # the target's; its own may be padded
    coupled: bool  # it ranks with the target's noise


class Assign(Message, frozen=True, kw_only=True):
    """Makes a daemon stage `stage` of `stages`: load layers `[first_layer, end_layer)`, send on to `next_hop`
    (`host:port` of `next_name`). With `drafting` it becomes a drafter instead: all layers of a small model,
    which answers `Expand` with `Proposed`.

    `captures` names hidden states that a drafter wants of committed nodes: the inputs of those layers,
    `layer_count` being the output after the final norm. Each stage sends those of its own layers straight to
    the head (`Features`). `arithmetic` names the bits that its layers are to be computed with
    (`core.cluster.agreement`); empty: the best that the device has, as for drafters, which decide no token.

    Whoever draws or drafts is to have the bytes of the model's tokens, for answers that a grammar binds: it
    asks for those with `tokens_digest` (`AskTokens`) unless it has them. Empty: no answer is bound.
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
    next_ip: Name = ""  # of `next_hop`'s host, if the head knows it: a daemon may be unable to look it up
    is_beside: bool = False  # make ready beside the work for an earlier pipeline of this head, which goes on
    arithmetic: Name = ""
    cache: Annotated[str, one_of(*CACHES)] = CACHE_AUTO
    sliding_window: SlidingWindow | None = None  # what layers with one hold; None: all layers hold all
    tokens_digest: Name = ""
    tokens_bytes: Annotated[int, Meta(ge=0, le=limits.TOKEN_TABLE_BYTES_MAX)] = 0
    spec: ModelSpec | None = None  # None: nothing is loaded, as in simulated worlds

    def __post_init__(self) -> None:
        count, last, captures = self.layer_count, self.stages - 1, self.captures
        is_last, has_both = self.stage == last, bool(self.tokens_digest) == bool(self.tokens_bytes)
        is_ascending = list(captures) == sorted(set(captures)) and max(captures, default=0) <= count
        self.expect(
            ("next_ip", not self.next_ip or is_numeric(self.next_ip), "an IP address"),
            ("stage", 0 <= self.stage <= last, f"0 to {last}"),
            ("end_layer", self.first_layer < self.end_layer <= count, f"{self.first_layer + 1} to {count}"),
            ("end_layer", (self.end_layer == count) == is_last, "the last on the last stage"),
            ("next_hop", (self.next_hop == "") == is_last, "none on the last stage only"),
            ("tokens_bytes", has_both, "a size where there is a digest"),
            ("captures", is_ascending, f"layers up to {count} in growing order"),
        )
        if self.spec is not None:
            layers, computed = self.spec.layers, "layers of a model that can be computed, without an entry"
            expect(len(layers) == count, "spec", len(layers), f"{count} layers")
            for dense in (layer.dense for layer in layers):
                is_of_head = dense is not None and (dense.has_entry or dense.embedding_norm)
                expect(not is_of_head, "spec", dense, computed)
        if self.drafting is not None:
            self.expect(
                ("stages", self.stages == 1, "1 of a drafter"),
                ("first_layer", self.first_layer == 0, "0 of a drafter, which holds all layers"),
                ("captures", not self.captures, "none of a drafter"),
                ("is_beside", not self.is_beside, "none of a drafter"),
                ("sliding_window", not self.sliding_window, "none of a drafter"),
            )

    @property
    def nodes_max(self) -> int:
        """Nodes of a conversation's tree that may be in the cache beside its `context`."""
        return limits.TREE_NODES_MAX if self.drafting is None else limits.DRAFT_NODES_MAX

    @property
    def summary(self) -> str:
        """What is assigned, for a log."""
        if self.drafting is not None:
            return f"drafter {self.model} ({self.dtype})"
        layers = f"layers {self.first_layer} to {self.end_layer - 1} of {self.model}"
        return f"{layers} (stage {self.stage + 1} of {self.stages}, {self.arithmetic or self.dtype})"

    @property
    def captured(self) -> int:
        """How many of the `captures` this stage has."""
        end = self.end_layer + (self.end_layer == self.layer_count)
        return sum(self.first_layer <= layer < end for layer in self.captures)


def capturing_of(assigns: Sequence[Assign]) -> tuple[int, ...]:
    """Which stages capture anything, by number; the assigns are in pipeline order."""
    return tuple(index for index, assign in enumerate(assigns) if assign.captured)


class AskArithmetics(Message, frozen=True, kw_only=True):
    """Which arithmetics of a precision has your device? A daemon answers whoever holds it; it may have to try
    its kernels first, and says `Loading` meanwhile."""

    dtype: Precision


class Arithmetics(Message, frozen=True, kw_only=True):
    """A daemon's answer to AskArithmetics: those that were found right there, the best first."""

    dtype: Precision
    names: Annotated[tuple[Arithmetic, ...], Meta(max_length=limits.ARITHMETICS_MAX)]
    trouble: Line = ""  # why there are none

    def __post_init__(self) -> None:
        is_one = bool(self.names) != bool(self.trouble)
        expect(is_one, "trouble", self.trouble, "what is wrong where there are no names")


class Loading(Message, frozen=True, kw_only=True):
    """How far a daemon has come with its slice. It is `trying kernels` where that was not done on this
    processor before, `asking for weights`: what the slice is made of, `checking` what of it was stored
    before, `receiving` the rest, and `loading` it all. With the model there it does the last alone, and in
    int8 or int4 also checks what it quantised before."""

    share: Share  # of what it is `doing`
    doing: Annotated[str, one_of(*LOADING_STEPS)] = "loading"


class Ready(Message, frozen=True, kw_only=True):
    """A daemon's slice is loaded and its next hop reached."""

    weight_bytes: Count
    memory_bytes: Count  # resident
    cache_slots: Count  # of all conversations together, that it has memory for
    slot_bytes: Annotated[int, Meta(ge=1, le=limits.ID_MAX)] = 1  # of a slot, in all its layers
    windowed_bytes: Count = 0  # of these in layers with a sliding window
    state_bytes: Count = 0  # of a conversation's states
    received_bytes: Count = 0  # of weights that the head sent
    load_s: Instant = 0.0  # that loading still takes, where earlier work leaves no memory for it yet
    grammars: Name = ""  # library and version that computes the masks of grammars; empty: it cannot

    def __post_init__(self) -> None:
        most = self.slot_bytes
        expect(self.windowed_bytes <= most, "windowed_bytes", self.windowed_bytes, f"at most {most}")


class Reset(Message, frozen=True, kw_only=True):
    """The head lets go of a daemon: its requests are forgotten, its slice may stay loaded."""


class Ping(Message, frozen=True, kw_only=True):
    """Keeps a head's lease alive; the daemon answers with Pong from the loop that does the work."""


class Pong(Message, frozen=True, kw_only=True):
    """A daemon's sign of life; None where nothing tells it."""

    queued: Count  # segments that wait
    done: Count  # segments run so far
    memory_bytes: Count  # resident
    running_s: Instant = 0.0  # since the running segment began or, where seen, a layer of it ended; 0: idle
    temperature_c: Celsius | None = None  # of the device's hottest part
    clock_mhz: Megahertz | None = None  # of its fastest core right now
    clock_max_mhz: Megahertz | None = None  # what that core can do
    is_throttled: bool = False  # as its kernel or firmware says
    arrived: IdOrNone = -1  # number of the last segment that came


class Error(Message, frozen=True, kw_only=True):
    """Something went wrong at the sender; one line that says what was expected, what came, and what to do.

    `cause` is what a head needs to know to go on: the `next` device is lost, this one cannot do its `part` or
    is `gone`, or the same may do it `again`. Without one every pipeline would fail alike.
    """

    text: Line
    retry_after_s: Lease = 0.0  # above 0: the same request may succeed then
    cause: Annotated[str, one_of("", "next", "part", "gone", "again")] = ""

    @classmethod
    def saying(cls, text: str, retry_after_s: float = 0.0, cause: str = "") -> Error:
        """An Error for any text: cut to the limit, without control characters."""
        shown = "".join(letter if letter.isprintable() else " " for letter in text[: limits.TEXT_CHARS_MAX])
        return cls(text=shown, retry_after_s=retry_after_s, cause=cause)
