"""What head and daemons say to each other to set a cluster up and to watch it: who is there, which
arithmetics, which layers, signs of life, errors.

As all messages (`messages`) these are frozen, and validated when built, on either end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol import limits
from flowspec.core.protocol.checks import check, check_all, check_range, check_text, is_numeric
from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.core.protocol.sliding_window import SlidingWindow

ROLES = ("head-control", "head-data", "head-weights", "stage", "measure")
LOADING_STEPS = ("trying kernels", "asking for weights", "checking", "receiving", "loading")
ERROR_CAUSES = ("", "next", "part", "gone", "again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of every connection to a daemon: who dials, and what the connection is for."""

    name: str
    version: str
    role: str

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_text("version", self.version)
        check(self.role in ROLES, "role", self.role, ", ".join(ROLES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """A daemon's answer to Hello: what it is, and the number, drawn for this connection, that the next
    message to it must bear.

    If a pipeline other than the one that asks has it, `holder` names that head, whose lease is over in
    `lease_s` unless it renews it.
    """

    name: str
    version: str
    device: str
    pid: int
    memory_bytes: int
    count: int
    holder: str = ""
    lease_s: float = 0.0

    @property
    def is_held(self) -> bool:
        return bool(self.holder)

    def __post_init__(self) -> None:
        for field in ("name", "version", "device", "holder"):
            check_text(field, getattr(self, field))
        for field in ("pid", "memory_bytes", "count"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)
        check_range("lease_s", self.lease_s, 0, 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What a daemon must know to draft with a model: how many token ids the target has (its own may be padded
    differently).

    `coupled` says that it ranks with the target's noise.
    """

    vocabulary: int
    coupled: bool

    def __post_init__(self) -> None:
        check_range("vocabulary", self.vocabulary, 1, limits.VOCABULARY_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
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

    model: str
    fingerprint: str
    stage: int = 0
    stages: int = 1
    first_layer: int = 0
    end_layer: int
    layer_count: int
    next_hop: str = ""
    next_name: str = ""
    dtype: str
    context: int
    captures: tuple[int, ...] = ()
    drafting: Drafting | None = None
    next_ip: str = ""
    is_beside: bool = False
    arithmetic: str = ""
    cache: str = CACHE_AUTO
    sliding_window: SlidingWindow | None = None
    tokens_digest: str = ""
    tokens_bytes: int = 0
    spec: ModelSpec | None = None

    def __post_init__(self) -> None:
        if self.spec is not None:
            count = len(self.spec.layers)
            check(count == self.layer_count, "spec", count, f"{self.layer_count} layers")
            for dense in (layer.dense for layer in self.spec.layers):
                check(dense is not None, "spec", dense, "layers that can be computed")
                is_of_head = dense is not None and (dense.has_entry or dense.embedding_norm)
                check(not is_of_head, "spec", "a layer of a head", "layers of a model, which have no entry")
        check_text("model", self.model, limits.TEXT_CHARS_MAX)
        for field in ("fingerprint", "next_hop", "next_name", "arithmetic", "tokens_digest"):
            check_text(field, getattr(self, field))
        check(self.next_ip == "" or is_numeric(self.next_ip), "next_ip", self.next_ip, "an IP address")
        check_range("stages", self.stages, 1, limits.STAGES_MAX)
        check_range("stage", self.stage, 0, self.stages - 1)
        check_range("layer_count", self.layer_count, 1, limits.LAYERS_MAX)
        check_range("first_layer", self.first_layer, 0, self.layer_count - 1)
        check_range("end_layer", self.end_layer, self.first_layer + 1, self.layer_count)
        check(
            (self.end_layer == self.layer_count) == (self.stage == self.stages - 1),
            "end_layer",
            self.end_layer,
            "the last layer on the last stage only",
        )
        check(
            (self.next_hop == "") == (self.stage == self.stages - 1),
            "next_hop",
            self.next_hop,
            "none on the last stage only",
        )
        check(self.dtype in ACTIVATIONS, "dtype", self.dtype, f"one of {', '.join(ACTIVATIONS)}")
        check(self.cache in CACHES, "cache", self.cache, f"one of {', '.join(CACHES)}")
        check_range("context", self.context, 1, limits.CONTEXT_MAX)
        check_range("tokens_bytes", self.tokens_bytes, 0, limits.TOKEN_TABLE_BYTES_MAX)
        check(
            bool(self.tokens_digest) == bool(self.tokens_bytes),
            "tokens_bytes",
            self.tokens_bytes,
            "a size where there is a digest",
        )
        check_all("captures", self.captures, 0, self.layer_count, limits.CAPTURES_MAX)
        check(
            list(self.captures) == sorted(set(self.captures)),
            "captures",
            self.captures,
            "layers in growing order",
        )
        if self.drafting is not None:
            check(self.stages == 1, "stages", self.stages, "1 of a drafter")
            check(
                self.first_layer == 0,
                "first_layer",
                self.first_layer,
                "0 of a drafter, which holds all layers",
            )
            check(not self.captures, "captures", self.captures, "none of a drafter")
            check(not self.is_beside, "is_beside", self.is_beside, "false of a drafter")
            check(self.sliding_window is None, "sliding_window", self.sliding_window, "none of a drafter")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AskArithmetics:
    """Asks a daemon which arithmetics of a precision its device has; it answers whoever holds it.

    It may have to try its kernels first, and says `Loading` meanwhile.
    """

    dtype: str

    def __post_init__(self) -> None:
        check(self.dtype in ACTIVATIONS, "dtype", self.dtype, ", ".join(ACTIVATIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetics:
    """A daemon's answer to AskArithmetics: those that were found right there, the best first.

    Without any `trouble` says why.
    """

    dtype: str
    names: tuple[str, ...]
    trouble: str = ""

    def __post_init__(self) -> None:
        check(self.dtype in ACTIVATIONS, "dtype", self.dtype, ", ".join(ACTIVATIONS))
        most = limits.ARITHMETICS_MAX
        check(len(self.names) <= most, "names", self.names, f"at most {most}")
        for name in self.names:
            check(bool(name), "names", self.names, "names that are not empty")
            check_text("names", name)
        check_text("trouble", self.trouble, limits.TEXT_CHARS_MAX)
        is_one = bool(self.names) != bool(self.trouble)
        check(is_one, "trouble", self.trouble, "what is wrong where there are no names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How far a daemon has come with its slice, `share` from 0 to 1 of what it is `doing`.

    That is `trying kernels` where that was not done on this processor before, `asking for weights`: what the
    slice is made of, `checking` what of it was stored before, `receiving` the rest, and `loading` it all. A
    daemon that has the model does the last, and in int8 or int4 also checks what it quantised before.
    """

    share: float
    doing: str = "loading"

    def __post_init__(self) -> None:
        check(self.doing in LOADING_STEPS, "doing", self.doing, ", ".join(LOADING_STEPS))
        check_range("share", self.share, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A daemon's slice is loaded and its next hop reached; `memory_bytes` is its resident memory.

    The head sent `received_bytes` of weights for it: 0 where they were there already. It has memory for
    `cache_slots` of all conversations together. One takes `slot_bytes` in all its layers, `windowed_bytes` of
    these in layers with a sliding window; the states of a conversation take `state_bytes`.

    `grammars` is what it computes the masks of grammars by, a library and its version (empty: it cannot).

    Where it made ready beside a pipeline and had no memory for both slices, loading takes about `load_s` more
    once that one is over.
    """

    weight_bytes: int
    memory_bytes: int
    cache_slots: int
    slot_bytes: int = 1
    windowed_bytes: int = 0
    state_bytes: int = 0
    received_bytes: int = 0
    load_s: float = 0.0
    grammars: str = ""

    def __post_init__(self) -> None:
        check_text("grammars", self.grammars)
        for field in ("weight_bytes", "memory_bytes", "cache_slots", "state_bytes", "received_bytes"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)
        check_range("slot_bytes", self.slot_bytes, 1, limits.ID_MAX)
        check_range("windowed_bytes", self.windowed_bytes, 0, self.slot_bytes)
        check_range("load_s", self.load_s, 0, limits.ID_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """The head lets go of a daemon: its requests are forgotten, its slice may stay loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Keeps a head's lease alive; the daemon answers with Pong from the loop that does the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """A daemon's sign of life: segments waiting and run so far, how long it has been at the one that runs (0:
    idle), resident memory.

    `arrived` is the number of the last segment that came (-1: none yet).

    `running_s` counts from when that one last got further: when it began, or (where that can be seen) when
    one of its layers ended. `temperature_c` is that of its device's hottest part, `clock_mhz` that of its
    fastest core right now and `clock_max_mhz` what it can do, each None where nothing tells it. It
    `is_throttled` where its kernel or firmware says so.
    """

    queued: int
    done: int
    memory_bytes: int
    running_s: float = 0.0
    temperature_c: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    is_throttled: bool = False
    arrived: int = -1

    def __post_init__(self) -> None:
        for field in ("queued", "done", "memory_bytes", "running_s"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)
        check_range("arrived", self.arrived, -1, limits.ID_MAX)
        for field in ("clock_mhz", "clock_max_mhz"):
            if (clock_mhz := getattr(self, field)) is not None:
                check_range(field, clock_mhz, 0, limits.CLOCK_MHZ_MAX)
        if self.temperature_c is not None:
            check_range("temperature_c", self.temperature_c, *limits.CELSIUS_RANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Something went wrong at the sender; one line that says what was expected, what came, and what to do.

    `retry_after_s` above 0 says that the same request may succeed then. `cause` is what a head needs to know
    to go on: the `next` device is lost, this one cannot do its `part` or is `gone`, or the same may do it
    `again`. Without one every pipeline would fail alike.
    """

    text: str
    retry_after_s: float = 0.0
    cause: str = ""

    def __post_init__(self) -> None:
        check(self.cause in ERROR_CAUSES, "cause", self.cause, ", ".join(filter(None, ERROR_CAUSES)))
        check_text("text", self.text, limits.TEXT_CHARS_MAX)
        check_range("retry_after_s", self.retry_after_s, 0, 3600)

    @classmethod
    def saying(cls, text: str, retry_after_s: float = 0.0, cause: str = "") -> Error:
        """An Error for any text: cut to the limit, without control characters."""
        shown = "".join(
            character if character.isprintable() else " " for character in text[: limits.TEXT_CHARS_MAX]
        )
        return cls(text=shown, retry_after_s=retry_after_s, cause=cause)
