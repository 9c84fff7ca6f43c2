"""What devices say to each other. Every message is frozen and validated when built, on either end.

`Segment`, `Verified`, `Open`, `Commit` and `Release`, which are here, make up the protocol of the token
trees, `Expand` and `Proposed` that of drafters on devices of their own; `cluster_messages` set a cluster up
and watch it, with `weight_messages` and `facts`. A broken rule raises `ValueError`: our own bug when we build
a message, a peer's when the codec does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import get_type_hints

from flowspec.core.protocol import limits
from flowspec.core.protocol.checks import check, check_all, check_most, check_range
from flowspec.core.protocol.cluster_messages import (
    Arithmetics,
    AskArithmetics,
    Assign,
    Error,
    Hello,
    Loading,
    Ping,
    Pong,
    Ready,
    Reset,
    Welcome,
)
from flowspec.core.protocol.facts import AskFacts, Facts
from flowspec.core.protocol.weight_messages import WeightAnswer, WeightQuestion

PROTOCOL_VERSION = 25
"""Counts up when a message gets or loses a field, or means something else: both ends must have the same."""


GRAMMAR_KINDS = ("json_schema", "regex", "lark", "reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer's text must be: a JSON document that a schema allows, what a regular expression matches
    as a whole, what llguidance's Lark-like grammar derives, or such a grammar of a whole reply, with thoughts
    and calls; `text` is the schema, expression or grammar.

    Where it may end one of the tokens `ends` is drawn, and nowhere else; these ascend. `marks` are tokens
    that stand for no text, of a reply's grammar, which names them `mark_0` and so on, in this order: nowhere
    else may they be drawn.
    """

    kind: str
    text: str
    ends: tuple[int, ...]
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self.kind in GRAMMAR_KINDS, "grammar", self.kind, f"one of {', '.join(GRAMMAR_KINDS)}")
        size = len(self.text.encode())
        check(
            size <= limits.GRAMMAR_BYTES_MAX,
            self.kind,
            f"{size} bytes",
            f"at most {limits.GRAMMAR_BYTES_MAX}",
        )
        check(bool(self.ends), "ends", self.ends, "a token that ends the answer")
        check_all("ends", self.ends, 0, limits.VOCABULARY_MAX, limits.GRAMMAR_ENDS_MAX)
        check(all(map(operator.lt, self.ends, self.ends[1:])), "ends", self.ends, "ascending token ids")
        check(self.kind == "reply" or not self.marks, "marks", self.marks, "none but in a reply")
        check_all("marks", self.marks, 0, limits.VOCABULARY_MAX, limits.GRAMMAR_MARKS_MAX)
        check(
            len({*self.marks, *self.ends}) == len(self.marks) + len(self.ends),
            "marks",
            self.marks,
            "token ids, each once, that end no answer",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a next token is drawn; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off.

    Before anything else `logit_bias` is added to the logits of its tokens; `suppress_tokens` are never drawn
    (docs/design/exactness.md). Both ascend, and ids that the model does not have mean nothing. Then logits of
    tokens that stand in the text already are changed (`model.sampler`): `repetition_penalty` counts prompt
    and answer, 1 switches it off; `frequency_penalty` and `presence_penalty` count the answer alone, 0
    switches them off. Last, only tokens stay that the `grammar` allows behind the answer so far.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    suppress_tokens: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        least, most = limits.TEMPERATURE_MIN, limits.TEMPERATURE_MAX
        check(
            self.temperature == 0 or least <= self.temperature <= most,
            "temperature",
            self.temperature,
            f"0, or {least} to {most}",
        )
        check_range("top_k", self.top_k, 0, limits.VOCABULARY_MAX)
        check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        check(0 <= self.min_p < 1, "min_p", self.min_p, "0 or more and below 1")
        for name in ("presence_penalty", "frequency_penalty"):
            check_range(name, getattr(self, name), -limits.PENALTY_MAX, limits.PENALTY_MAX)
        check_range(
            "repetition_penalty",
            self.repetition_penalty,
            limits.REPETITION_PENALTY_MIN,
            limits.REPETITION_PENALTY_MAX,
        )
        check_range("seed", self.seed, 0, limits.ID_MAX)
        biased = [token for token, _ in self.logit_bias]
        for name, tokens, most in (
            ("suppress_tokens", self.suppress_tokens, limits.SUPPRESS_TOKENS_MAX),
            ("logit_bias", biased, limits.LOGIT_BIAS_MAX),
        ):
            check_all(name, tokens, 0, limits.VOCABULARY_MAX, most)
            check(all(map(operator.lt, tokens, tokens[1:])), name, tokens, "ascending token ids, each once")
        for _, bias in self.logit_bias:
            check_range("logit_bias", bias, -limits.BIAS_MAX, limits.BIAS_MAX)

    @property
    def is_biased(self) -> bool:
        """Whether it changes logits of tokens that it names."""
        return bool(self.suppress_tokens or self.logit_bias)

    @property
    def needs_text(self) -> bool:
        """Whether what is drawn depends on which tokens stand before it."""
        is_penalised = bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1
        return is_penalised or self.grammar is not None

    @property
    def is_shaped(self) -> bool:
        """Whether it draws from other logits than the model's own."""
        return self.is_biased or self.needs_text


SAMPLING_FIELDS: Mapping[str, type[int | float]] = {
    name: kind for name, kind in get_type_hints(Sampling).items() if kind in (int, float)
}
"""Name and type of each field that is a number. Flags, requests, journals and what a model recommends are
read by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, before temperature and filters: of the token
    drawn, and of the likeliest tokens.

    `ids` are the likeliest ones, likeliest first and of equals the lowest first, and `values` theirs.
    """

    chosen: float
    ids: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        check_all("ids", self.ids, 0, limits.VOCABULARY_MAX, limits.TOP_LOGPROBS_MAX)
        check(len(self.values) == len(self.ids), "values", len(self.values), f"{len(self.ids)} entries")
        for name, value in (("chosen", self.chosen), *(("values", value) for value in self.values)):
            check(math.isfinite(value) and value <= 0, name, value, "a finite number, 0 or less")


# -------------------------------------------------------------------------------------------- token trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Begins epoch `epoch` of a request: keep the first `keep` tokens of the last epoch, forget everything
    else. With a `source` (-1: none) the tokens kept are copies of those that this other request begins with,
    and of its own last epoch the request keeps nothing.

    `length` tokens are committed from the start (the prompt); its last one is node `root`. A new chat turn is
    an Open of the next epoch, so this also is the design's Rewind. With `top_logprobs` (-1: none are wanted)
    the log-probabilities of each token drawn come with it, and those of so many of the likeliest. The answer
    begins at position `answer_start`: before `length` where some of it is known already.
    """

    request: int
    epoch: int
    keep: int
    length: int
    root: int
    slots: int
    sampling: Sampling
    top_logprobs: int = -1
    answer_start: int
    source: int = -1

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("source", self.source, -1, limits.ID_MAX)
        is_copied = self.source >= 0
        check(not is_copied or self.source != self.request, "source", self.source, "another request")
        check(not is_copied or self.keep > 0, "keep", self.keep, "tokens to copy, where there is a source")
        check_range("top_logprobs", self.top_logprobs, -1, limits.TOP_LOGPROBS_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)
        check_range("length", self.length, 1, limits.CONTEXT_MAX)
        check_range("keep", self.keep, 0, self.length - 1)
        check_range("answer_start", self.answer_start, 1, self.length)
        check_range("root", self.root, 0, limits.ID_MAX)
        check_range("slots", self.slots, self.length, limits.CONTEXT_MAX + limits.DRAFT_NODES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Nodes `path` are output at positions `base`, `base + 1`, ...; the last of them is the root.

    Cumulative back to `base`, the committed length that every stage is known to have, so a lost Commit heals.
    With `is_over` the answer has ended: nothing below the root will be asked about again in this epoch.
    """

    request: int
    epoch: int
    base: int
    path: tuple[int, ...]
    is_over: bool = False

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
class SegmentPart:
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
            check(
                len(getattr(self, name)) == count,
                name,
                len(getattr(self, name)),
                f"{count} entries, one for every id",
            )
        is_ordered = all(parent < node for parent, node in zip(self.parents, self.ids, strict=True))
        check(is_ordered, "parents", self.parents, "each below its own id")
        if self.opening is not None:
            same = (self.opening.request, self.opening.epoch) == (self.commit.request, self.commit.epoch)
            check(same, "opening", self.opening.request, "the request and epoch of the part")

    def select(self, rows: Sequence[int]) -> SegmentPart:
        """The same part with only these of its rows."""
        return SegmentPart(
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
    """When a segment came, by the stage's own clock, and what it spent there: waiting behind others,
    computing, the framework's own work.

    `rows` began to run. Dead rows left in the queue (before they ran; not in `rows`), between layers, or
    late, after all layers had run. A field that people are `told` of is a figure: it is summed, and shown
    wherever figures are. Its name ends in `_s` where it is seconds, else it is rows.
    """

    received_s: float
    queued_s: float = field(metadata={"told": "waiting"})
    compute_s: float = field(metadata={"told": "computing"})
    own_s: float = field(metadata={"told": "own work"})
    rows: int = field(metadata={"told": "run by the stages"})
    dead_in_queue: int = field(default=0, metadata={"told": "in queues"})
    dead_between_layers: int = field(default=0, metadata={"told": "between layers"})
    dead_late: int = field(default=0, metadata={"told": "after the last layer"})

    def __post_init__(self) -> None:
        check_range("received_s", self.received_s, 0, 1e12)
        for name in HOP_SECONDS:
            check_range(name, getattr(self, name), 0, 1e6)
        for name in HOP_ROWS:
            check_range(name, getattr(self, name), 0, limits.NODES_PER_SEGMENT_MAX)

    @property
    def spent_s(self) -> float:
        """From its arrival until it was sent on."""
        return self.queued_s + self.compute_s + self.own_s

    @property
    def left_s(self) -> float:
        """When it was sent on, by the stage's own clock."""
        return self.received_s + self.queued_s + self.compute_s + self.own_s


_HOP_FIGURES = {each.name: each.metadata["told"] for each in fields(Hop) if "told" in each.metadata}
HOP_SECONDS: Mapping[str, str] = {name: told for name, told in _HOP_FIGURES.items() if name.endswith("_s")}
HOP_ROWS: Mapping[str, str] = {name: told for name, told in _HOP_FIGURES.items() if name not in HOP_SECONDS}
"""Figures of a hop, and what they are called for people. Rows that were dropped are `dead_`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A request's cache may go. One that was opened again behind it, in a later epoch than `epoch`, stays."""

    request: int
    epoch: int = limits.ID_MAX

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)


def _check_rows(message: Segment | Verified) -> None:
    """What holds for a segment on its way and back."""
    check_range("segment", message.segment, 0, limits.ID_MAX)
    check_most("parts", len(message.parts), limits.PARTS_PER_SEGMENT_MAX)
    check_most("hops", len(message.hops), limits.STAGES_MAX)
    check_most("rows", message.row_count, limits.NODES_PER_SEGMENT_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one pipeline slot carries: rows of one or more requests, and beside them a payload `[rows,
    hidden]`.

    The payload (absent on the first hop) travels as a frame of its own. A segment that lost all its rows
    still passes on, so that order and credit hold. `releases` are those that some stage may not have yet: the
    rows may need their room.
    """

    segment: int
    parts: tuple[SegmentPart, ...]
    hops: tuple[Hop, ...] = ()
    releases: tuple[Release, ...] = ()

    def __post_init__(self) -> None:
        _check_rows(self)
        requests = [part.commit.request for part in self.parts]
        check(len(set(requests)) == len(requests), "parts", requests, "one part for each request")
        check_most("releases", len(self.releases), limits.LIST_MAX)

    @property
    def row_count(self) -> int:
        return sum(len(part.ids) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPart:
    """Next tokens of the nodes of one request that the last stage found on the output's path.

    `logprobs` are one for each next token, in order, or none at all.
    """

    request: int
    epoch: int
    ids: tuple[int, ...]
    next_tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)
        check_all("ids", self.ids, 0, limits.ID_MAX, limits.NODES_PER_SEGMENT_MAX)
        check_all("next_tokens", self.next_tokens, 0, limits.VOCABULARY_MAX, limits.NODES_PER_SEGMENT_MAX)
        check(
            len(self.ids) == len(self.next_tokens),
            "next_tokens",
            len(self.next_tokens),
            f"{len(self.ids)} entries",
        )
        count = len(self.ids)
        check(
            len(self.logprobs) in (0, count), "logprobs", f"{len(self.logprobs)} entries", f"none, or {count}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The last stage's word on a segment; one for every segment, empty ones too: it is the credit."""

    segment: int
    parts: tuple[VerifiedPart, ...]
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        _check_rows(self)

    @property
    def row_count(self) -> int:
        return sum(len(part.ids) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a stage captured of nodes of one request that are committed, for drafters at the head: a row for
    each, in order, as a frame of its own (`Assign.captures`)."""

    request: int
    epoch: int
    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_range("request", self.request, 0, limits.ID_MAX)
        check_range("epoch", self.epoch, 0, limits.ID_MAX)
        check(bool(self.ids), "ids", self.ids, "a node")
        check_all("ids", self.ids, 0, limits.ID_MAX, limits.FEATURES_ROWS_MAX)

    @property
    def row_count(self) -> int:
        return len(self.ids)


# ------------------------------------------------------------------------------------------------- drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class Expand:
    """Run these rows through the drafter that the daemon holds, and propose up to `width` children for each
    root or uncommitted one.

    The segment's number is the job's. Openings and commits are in it, as for a stage; the control connection
    carries it, in order with `Release`.
    """

    segment: Segment
    width: int

    def __post_init__(self) -> None:
        check_range("width", self.width, 1, limits.DRAFT_WIDTH_MAX)
        check(not self.segment.hops, "hops", len(self.segment.hops), "none: a drafter is no stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a drafter proposes below one node: `tokens`, likeliest first, with its own confidence in each (0
    to 1).

    Drafters at the head make many of them that go nowhere, so it is `Proposed` that checks them.
    """

    request: int
    epoch: int
    node: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A daemon's answer to `Expand`: what its drafter proposes, and how long that took by its clock."""

    job: int
    proposals: tuple[Proposal, ...]
    compute_s: float

    def __post_init__(self) -> None:
        check_range("job", self.job, 0, limits.ID_MAX)
        check_range("compute_s", self.compute_s, 0, 1e6)
        check_most("proposals", len(self.proposals), limits.NODES_PER_SEGMENT_MAX)
        for proposal in self.proposals:
            for name in ("request", "epoch", "node"):
                check_range(name, getattr(proposal, name), 0, limits.ID_MAX)
            check_all("tokens", proposal.tokens, 0, limits.VOCABULARY_MAX, limits.DRAFT_WIDTH_MAX)
            check(
                len(proposal.confidences) == len(proposal.tokens),
                "confidences",
                len(proposal.confidences),
                f"{len(proposal.tokens)} entries",
            )
            check(
                all(0 <= each <= 1 for each in proposal.confidences),
                "confidences",
                proposal.confidences,
                "each from 0 to 1",
            )


ClusterMessage = Hello | Welcome | Assign | Loading | Ready | Reset | Ping | Pong | Error
Message = (
    ClusterMessage
    | Open
    | Commit
    | Segment
    | Verified
    | Release
    | WeightQuestion
    | WeightAnswer
    | AskFacts
    | Facts
    | Expand
    | Proposed
    | AskArithmetics
    | Arithmetics
    | Features
)
