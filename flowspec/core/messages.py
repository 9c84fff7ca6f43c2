"""What devices say to each other. Every message is frozen and validated when built, on either end.

`Segment`, `Verified`, `Open`, `Commit` and `Release` make up the protocol of the token trees; the rest sets a cluster up and watches it, with
`weight_messages` and `facts`. A broken rule raises `ValueError`: our own bug when we build a message, a peer's when the codec does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core import limits
from flowspec.core.checks import check, check_all, check_range, check_text
from flowspec.core.facts import AskFacts, Facts
from flowspec.core.precision import ACTIVATIONS
from flowspec.core.weight_messages import WeightAnswer, WeightQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a next token is drawn; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        least, most = limits.TEMPERATURE_MIN, limits.TEMPERATURE_MAX
        check(self.temperature == 0 or least <= self.temperature <= most, "temperature", self.temperature, f"0, or {least} to {most}")
        check_range("top_k", self.top_k, 0, limits.VOCABULARY_MAX)
        check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        check(0 <= self.min_p < 1, "min_p", self.min_p, "0 or more and below 1")
        check_range("seed", self.seed, 0, limits.ID_MAX)


# ------------------------------------------------------------------------------------- setting a cluster up

ROLES = ("head-control", "head-data", "head-weights", "stage", "measure")
LOADING_STEPS = ("asking", "checking", "receiving", "loading")
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
    """A daemon's answer to Hello: what it is, and the number, drawn for this connection, that the next message to it must bear."""

    name: str
    version: str
    device: str
    pid: int
    memory_bytes: int
    count: int

    def __post_init__(self) -> None:
        for field in ("name", "version", "device"):
            check_text(field, getattr(self, field))
        for field in ("pid", "memory_bytes", "count"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Makes a daemon stage `stage` of `stages`: load layers `[first_layer, end_layer)`, send on to `next_hop` (`host:port` of `next_name`).

    `captures` names hidden states that a drafter wants of committed nodes: the inputs of those layers, `layer_count` being
    the output after the final norm. They ride behind the hidden states to the last stage, and back with Verified.
    """

    model: str
    fingerprint: str
    stage: int
    stages: int
    first_layer: int
    end_layer: int
    layer_count: int
    next_hop: str
    next_name: str
    dtype: str
    context: int
    captures: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_text("model", self.model, limits.TEXT_CHARS_MAX)
        for field in ("fingerprint", "next_hop", "next_name"):
            check_text(field, getattr(self, field))
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
        check((self.next_hop == "") == (self.stage == self.stages - 1), "next_hop", self.next_hop, "none on the last stage only")
        check(self.dtype in ACTIVATIONS, "dtype", self.dtype, f"one of {', '.join(ACTIVATIONS)}")
        check_range("context", self.context, 1, limits.CONTEXT_MAX)
        check_all("captures", self.captures, 0, self.layer_count, limits.CAPTURES_MAX)
        check(list(self.captures) == sorted(set(self.captures)), "captures", self.captures, "layers in growing order")

    @property
    def payload_dtype(self) -> str:
        """Of the rows that this stage receives."""
        return ACTIVATIONS[self.dtype]

    def payload_width(self, hidden_size: int) -> int:
        """Width of the rows that this stage receives: the hidden state and what earlier stages captured."""
        return hidden_size * (1 + sum(layer < self.first_layer for layer in self.captures))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How far a daemon has come with its slice, `share` from 0 to 1 of what it is `doing`.

    That is `asking` the head what the slice is made of, `checking` what of it was stored before, `receiving` the rest, and `loading`
    it all. A daemon that has the model does the last, and in int8 or int4 also checks what it quantised before.
    """

    share: float
    doing: str = "loading"

    def __post_init__(self) -> None:
        check(self.doing in LOADING_STEPS, "doing", self.doing, ", ".join(LOADING_STEPS))
        check_range("share", self.share, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A daemon's slice is loaded and its next hop reached; `memory_bytes` is its resident memory.

    The head sent `received_bytes` of weights for it: 0 where they were there already.
    """

    weight_bytes: int
    memory_bytes: int
    received_bytes: int = 0

    def __post_init__(self) -> None:
        for field in ("weight_bytes", "memory_bytes", "received_bytes"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """The head lets go of a daemon: its requests are forgotten, its slice may stay loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Keeps a head's lease alive; the daemon answers with Pong from the loop that does the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """A daemon's sign of life: segments waiting and run so far, how long it has been at the one that runs (0: idle), resident memory."""

    queued: int
    done: int
    memory_bytes: int
    running_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("queued", "done", "memory_bytes", "running_s"):
            check_range(field, getattr(self, field), 0, limits.ID_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Something went wrong at the sender; one line that says what was expected, what came, and what to do.

    `retry_after_s` above 0 says that the same request may succeed then. `cause` is what a head needs to know to go on: the `next` device
    is lost, this one cannot do its `part` or is `gone`, or the same may do it `again`. Without one every pipeline would fail alike.
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
        shown = "".join(character if character.isprintable() else " " for character in text[: limits.TEXT_CHARS_MAX])
        return cls(text=shown, retry_after_s=retry_after_s, cause=cause)


# -------------------------------------------------------------------------------------------- token trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Begins epoch `epoch` of a request: keep the first `keep` tokens of the last epoch, forget everything else.

    `length` tokens are committed from the start (the prompt); its last one is node `root`. A new chat turn is an Open
    of the next epoch, so this also is the design's Rewind.
    """

    request: int
    epoch: int
    keep: int
    length: int
    root: int
    slots: int
    sampling: Sampling

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)
        check_range("length", self.length, 1, limits.CONTEXT_MAX)
        check_range("keep", self.keep, 0, self.length - 1)
        check_range("root", self.root, 0, limits.ID_MAX)
        check_range("slots", self.slots, self.length, limits.CONTEXT_MAX + limits.DRAFT_NODES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Nodes `path` are output at positions `base`, `base + 1`, ...; the last of them is the root.

    Cumulative back to `base`, the committed length that every stage is known to have, so a lost Commit heals.
    """

    request: int
    epoch: int
    base: int
    path: tuple[int, ...]

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)
        check_range("base", self.base, 1, limits.CONTEXT_MAX)
        check_all("path", self.path, 0, limits.ID_MAX, limits.COMMIT_PATH_MAX)

    @property
    def length(self) -> int:
        """Committed length after this Commit."""
        return self.base + len(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one request in a segment; `opening` rides along until every stage is known to have it."""

    commit: Commit
    opening: Open | None
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    committed: tuple[bool, ...]

    def __post_init__(self) -> None:
        count = len(self.ids)
        check_all("ids", self.ids, 0, limits.ID_MAX, limits.NODES_PER_SEGMENT_MAX)
        check_all("parents", self.parents, -1, limits.ID_MAX, limits.NODES_PER_SEGMENT_MAX)
        check_all("tokens", self.tokens, 0, limits.VOCABULARY_MAX, limits.NODES_PER_SEGMENT_MAX)
        check_all("positions", self.positions, 0, limits.CONTEXT_MAX, limits.NODES_PER_SEGMENT_MAX)
        for name in ("parents", "tokens", "positions", "committed"):
            check(len(getattr(self, name)) == count, name, len(getattr(self, name)), f"{count} entries, one for every id")
        is_ordered = all(parent < node for parent, node in zip(self.parents, self.ids, strict=True))
        check(is_ordered, "parents", self.parents, "each below its own id")
        if self.opening is not None:
            same = (self.opening.request, self.opening.epoch) == (self.commit.request, self.commit.epoch)
            check(same, "opening", self.opening.request, "the request and epoch of the part")

    def select(self, rows: Sequence[int]) -> Part:
        """The same part with only these of its rows."""
        return Part(
            commit=self.commit,
            opening=self.opening,
            ids=tuple(self.ids[r] for r in rows),
            parents=tuple(self.parents[r] for r in rows),
            tokens=tuple(self.tokens[r] for r in rows),
            positions=tuple(self.positions[r] for r in rows),
            committed=tuple(self.committed[r] for r in rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """When a segment came, by the stage's own clock, and what it spent there: waiting behind others, computing, the framework's own work.

    `rows` began to run. Dead rows left in the queue (before they ran; not in `rows`), between layers, or late, after all layers had run.
    """

    received_s: float
    queued_s: float
    compute_s: float
    own_s: float
    rows: int
    dead_in_queue: int = 0
    dead_between_layers: int = 0
    dead_late: int = 0

    def __post_init__(self) -> None:
        for field, most in (("received_s", 1e12), ("queued_s", 1e6), ("compute_s", 1e6), ("own_s", 1e6)):
            check_range(field, getattr(self, field), 0, most)
        for field in ("rows", "dead_in_queue", "dead_between_layers", "dead_late"):
            check_range(field, getattr(self, field), 0, limits.NODES_PER_SEGMENT_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one pipeline slot carries: rows of one or more requests, and beside them a payload `[rows, hidden]`.

    The payload (absent on the first hop) travels as a frame of its own. A segment that lost all its rows still passes
    on, so that order and credit hold.
    """

    segment: int
    parts: tuple[Part, ...]
    hops: tuple[Hop, ...] = ()

    def __post_init__(self) -> None:
        check_range("segment", self.segment, 0, limits.ID_MAX)
        check(len(self.parts) <= limits.PARTS_PER_SEGMENT_MAX, "parts", len(self.parts), f"at most {limits.PARTS_PER_SEGMENT_MAX}")
        check(len(self.hops) <= limits.STAGES_MAX, "hops", len(self.hops), f"at most {limits.STAGES_MAX}")
        check(self.row_count <= limits.NODES_PER_SEGMENT_MAX, "rows", self.row_count, f"at most {limits.NODES_PER_SEGMENT_MAX}")
        requests = [part.commit.request for part in self.parts]
        check(len(set(requests)) == len(requests), "parts", requests, "one part for each request")

    @property
    def row_count(self) -> int:
        return sum(len(part.ids) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPart:
    """Next tokens of the nodes of one request that the last stage found on the output's path, -1 where none was asked for.

    Those without a next token are rows of a prompt; they are named only where features travel with the message.
    """

    request: int
    epoch: int
    ids: tuple[int, ...]
    next_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)
        check_all("ids", self.ids, 0, limits.ID_MAX, limits.NODES_PER_SEGMENT_MAX)
        check_all("next_tokens", self.next_tokens, -1, limits.VOCABULARY_MAX, limits.NODES_PER_SEGMENT_MAX)
        check(len(self.ids) == len(self.next_tokens), "next_tokens", len(self.next_tokens), f"{len(self.ids)} entries")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The last stage's word on a segment; one for every segment, empty ones too: it is the credit.

    Where a drafter asked for features, their rows (one for every id, in order) travel as a frame of their own.
    """

    segment: int
    parts: tuple[VerifiedPart, ...]
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        check_range("segment", self.segment, 0, limits.ID_MAX)
        check(len(self.parts) <= limits.PARTS_PER_SEGMENT_MAX, "parts", len(self.parts), f"at most {limits.PARTS_PER_SEGMENT_MAX}")
        check(len(self.hops) <= limits.STAGES_MAX, "hops", len(self.hops), f"at most {limits.STAGES_MAX}")
        check(self.row_count <= limits.NODES_PER_SEGMENT_MAX, "rows", self.row_count, f"at most {limits.NODES_PER_SEGMENT_MAX}")

    @property
    def row_count(self) -> int:
        return sum(len(part.ids) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A request is over for good: its cache may go."""

    request: int

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)


ClusterMessage = Hello | Welcome | Assign | Loading | Ready | Reset | Ping | Pong | Error
Message = ClusterMessage | Open | Commit | Segment | Verified | Release | WeightQuestion | WeightAnswer | AskFacts | Facts
