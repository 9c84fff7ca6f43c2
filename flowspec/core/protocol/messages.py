"""What an answer takes: the messages of the token trees (`Open`, `Commit`, `Release`, `Segment`, `Verified`,
`Features`), and those of drafters on devices of their own (`Expand`, `Proposed`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, get_type_hints

from msgspec import Meta
from msgspec.structs import replace

from flowspec.core.protocol import limits
from flowspec.core.protocol.types import (
    Id,
    IdOrNone,
    Instant,
    Length,
    Message,
    Position,
    Record,
    Rows,
    Seconds,
    Share,
    Token,
    one_of,
)
from flowspec.validation import Misfit, expect

# counts up when a message gets or loses a field, or means something else: both ends must have the same
PROTOCOL_VERSION = 26
_TEMPERATURES = f"0, or {limits.TEMPERATURE_MIN} to {limits.TEMPERATURE_MAX}"
Penalty = Annotated[float, Meta(ge=-limits.PENALTY_MAX, le=limits.PENALTY_MAX)]
RepetitionPenalty = Annotated[float, Meta(ge=limits.REPETITION_PENALTY_MIN, le=limits.REPETITION_PENALTY_MAX)]
Bias = Annotated[float, Meta(ge=-limits.BIAS_MAX, le=limits.BIAS_MAX)]
TopLogprobs = Annotated[int, Meta(ge=-1, le=limits.TOP_LOGPROBS_MAX)]
RowCount = Annotated[int, Meta(ge=0, le=limits.NODES_PER_SEGMENT_MAX)]
Logprob = Annotated[float, Meta(le=0)]


def _expect_ascending(name: str, tokens: Sequence[int]) -> None:
    is_ascending = all(map(operator.lt, tokens, tokens[1:]))
    expect(is_ascending, name, tokens, "ascending token ids, each once")


class Grammar(Record, frozen=True, kw_only=True):
    """What an answer's text must be: a JSON document that a schema allows, what a regular expression matches
    as a whole, what llguidance's Lark-like grammar derives, or such a grammar of a whole reply, with thoughts
    and calls. Where it may end one of the tokens `ends`, which ascend, is drawn, and nowhere else; so are
    `marks` where a reply's grammar names them, `mark_0` and so on: they stand for no text."""

    kind: Annotated[str, one_of("json_schema", "regex", "lark", "reply")]
    text: str  # the schema, expression or grammar
    ends: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=limits.GRAMMAR_ENDS_MAX)]
    marks: Annotated[tuple[Token, ...], Meta(max_length=limits.GRAMMAR_MARKS_MAX)] = ()

    def __post_init__(self) -> None:
        size, most = len(self.text.encode()), limits.GRAMMAR_BYTES_MAX
        expect(size <= most, self.kind, f"{size} bytes", f"at most {most}")
        _expect_ascending("ends", self.ends)
        expect(self.kind == "reply" or not self.marks, "marks", self.marks, "none but in a reply")
        is_once = len({*self.marks, *self.ends}) == len(self.marks) + len(self.ends)
        expect(is_once, "marks", self.marks, "token ids, each once, that end no answer")


class Sampling(Record, frozen=True, kw_only=True):
    """How a next token is drawn (docs/design/exactness.md). First `logit_bias` is added and `suppress_tokens`
    go: both ascend, and ids that the model does not have mean nothing. Then penalties change the logits of
    tokens that stand in the text already (`model.sampler`). Last, only tokens stay that the `grammar` allows
    behind the answer so far."""

    temperature: Annotated[float, Meta(ge=0, le=limits.TEMPERATURE_MAX, description=_TEMPERATURES)] = 0.0
    top_k: Token = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # 0: off
    presence_penalty: Penalty = 0.0  # 0: off; it counts the answer alone, as the next does
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0  # 1: off; it counts prompt and answer
    seed: Id = 0
    suppress_tokens: Annotated[tuple[Token, ...], Meta(max_length=limits.SUPPRESS_TOKENS_MAX)] = ()
    logit_bias: Annotated[tuple[tuple[Token, Bias], ...], Meta(max_length=limits.LOGIT_BIAS_MAX)] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        is_possible = self.temperature == 0 or self.temperature >= limits.TEMPERATURE_MIN
        expect(is_possible, "temperature", self.temperature, _TEMPERATURES)
        _expect_ascending("suppress_tokens", self.suppress_tokens)
        _expect_ascending("logit_bias", [token for token, _ in self.logit_bias])

    @property
    def needs_text(self) -> bool:
        """Whether what is drawn depends on which tokens stand before it."""
        is_penalised = bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1
        return is_penalised or self.grammar is not None

    @property
    def is_shaped(self) -> bool:
        """Whether it draws from other logits than the model's own."""
        return bool(self.suppress_tokens or self.logit_bias) or self.needs_text


SAMPLING_FIELDS: Mapping[str, type[int | float]] = {
    name: kind for name, kind in get_type_hints(Sampling).items() if kind in (int, float)
}
"""Fields that are numbers: flags, requests, journals and what a model recommends are read by them."""


class Logprobs(Record, frozen=True, kw_only=True):
    """Natural logarithms of the model's own probabilities, before temperature and filters: of the token
    drawn, and of the likeliest tokens."""

    chosen: Logprob
    ids: Annotated[tuple[Token, ...], Meta(max_length=limits.TOP_LOGPROBS_MAX)]  # of equals the lowest first
    values: Annotated[tuple[Logprob, ...], Meta(max_length=limits.TOP_LOGPROBS_MAX)]

    def __post_init__(self) -> None:
        expect(len(self.values) == len(self.ids), "values", len(self.values), f"{len(self.ids)} entries")
        lowest = min(self.chosen, *self.values, 0.0)
        expect(lowest > -math.inf, "values", lowest, "finite numbers")


class Open(Message, frozen=True, kw_only=True):
    """Begins epoch `epoch` of a request: keep the first `keep` tokens of the last epoch, forget everything
    else. With a `source` (-1: none) the tokens kept are copies of those that this other request begins with,
    and of its own last epoch the request keeps nothing. `length` tokens are committed from the start (the
    prompt); its last one is node `root`. A new chat turn is an Open of the next epoch."""

    request: Id
    epoch: Id
    keep: Position
    length: Length
    root: Id
    slots: Annotated[int, Meta(ge=1, le=limits.CONTEXT_MAX + limits.DRAFT_NODES_MAX)]
    sampling: Sampling
    top_logprobs: TopLogprobs = -1  # of so many likeliest tokens, and of the one drawn; -1: of none
    answer_start: Length  # a position, before `length` where some of the answer is known already
    source: IdOrNone = -1

    def __post_init__(self) -> None:
        is_copied = self.source >= 0
        self.expect(
            ("source", not is_copied or self.source != self.request, "another request"),
            ("keep", not is_copied or self.keep > 0, "tokens to copy, where there is a source"),
            ("keep", self.keep < self.length, f"less than {self.length}"),
            ("answer_start", self.answer_start <= self.length, f"1 to {self.length}"),
            ("slots", self.slots >= self.length, f"at least {self.length}"),
        )


class Commit(Message, frozen=True, kw_only=True):
    """Nodes `path` are output at positions `base`, `base + 1`, ...; the last of them is the root. `base` is
    the committed length that every stage is known to have, so a lost Commit heals."""

    request: Id
    epoch: Id
    base: Length
    path: Annotated[tuple[Id, ...], Meta(max_length=limits.COMMIT_PATH_MAX)]
    is_over: bool = False  # the answer has ended: nothing below the root is asked about again in this epoch

    @property
    def length(self) -> int:
        """Committed length after this Commit."""
        return self.base + len(self.path)


_COLUMNS = ("parents", "tokens", "positions", "committed")


class SegmentPart(Record, frozen=True, kw_only=True):
    """The rows of one request in a segment; `opening` rides along until every stage is known to have it."""

    commit: Commit
    opening: Open | None
    ids: Rows[Id]
    parents: Rows[IdOrNone]
    tokens: Rows[Token]
    positions: Rows[Position]
    committed: Rows[bool]

    def __post_init__(self) -> None:
        count, opening = len(self.ids), self.opening
        for name in _COLUMNS:
            if (entries := len(getattr(self, name))) != count:
                raise Misfit((name,), f"{count} entries, one for every id", entries)
        is_ordered = all(map(operator.lt, self.parents, self.ids))
        expect(is_ordered, "parents", self.parents, "each below its own id")
        if opening is not None:
            is_same = opening.request == self.commit.request and opening.epoch == self.commit.epoch
            expect(is_same, "opening", opening.request, "the request and epoch of the part")

    def select(self, rows: Sequence[int]) -> SegmentPart:
        """The same part with only these of its rows."""
        columns = {name: getattr(self, name) for name in ("ids", *_COLUMNS)}
        return replace(self, **{name: tuple(map(each.__getitem__, rows)) for name, each in columns.items()})


class Hop(Record, frozen=True, kw_only=True):
    """What a segment spent at a stage, and which of its rows were dead."""

    received_s: Instant  # by the stage's own clock
    queued_s: Seconds  # behind others
    compute_s: Seconds
    own_s: Seconds  # the framework's own work
    rows: RowCount  # that began to run
    dead_in_queue: RowCount = 0  # before they ran; not in `rows`
    dead_between_layers: RowCount = 0
    dead_late: RowCount = 0  # after all layers had run

    @property
    def spent_s(self) -> float:
        """From its arrival until it was sent on."""
        return self.queued_s + self.compute_s + self.own_s

    @property
    def left_s(self) -> float:
        """When it was sent on, by the stage's own clock."""
        return self.received_s + self.queued_s + self.compute_s + self.own_s


HOP_SECONDS = {"queued_s": "waiting", "compute_s": "computing", "own_s": "own work"}
HOP_ROWS = {
    "rows": "run by the stages",
    "dead_in_queue": "in queues",
    "dead_between_layers": "between layers",
    "dead_late": "after the last layer",
}
"""Figures of a hop, and what they are called for people. Rows that were dropped are `dead_`."""


class Release(Message, frozen=True, kw_only=True):
    """A request's cache may go. One that was opened again behind it, in a later epoch than `epoch`, stays."""

    request: Id
    epoch: Id = limits.ID_MAX


Hops = Annotated[tuple[Hop, ...], Meta(max_length=limits.STAGES_MAX)]
_Parts = Meta(max_length=limits.PARTS_PER_SEGMENT_MAX)


def _count_rows(parts: Sequence[SegmentPart | VerifiedPart]) -> int:
    """Of a segment, on its way or back; raises `Misfit` for too many."""
    count, most = sum([len(part.ids) for part in parts]), limits.NODES_PER_SEGMENT_MAX
    expect(count <= most, "rows", count, f"at most {most}")
    return count


class Segment(Message, frozen=True, kw_only=True):
    """What one pipeline slot carries: rows of one or more requests and, but on the first hop, a payload
    `[rows, hidden]` as a frame of its own. One that lost all its rows still passes on, so that order and
    credit hold. `releases` are those that some stage may not have yet: the rows may need their room."""

    segment: Id
    parts: Annotated[tuple[SegmentPart, ...], _Parts]
    hops: Hops = ()
    releases: Annotated[tuple[Release, ...], Meta(max_length=limits.LIST_MAX)] = ()

    def __post_init__(self) -> None:
        _count_rows(self.parts)
        requests = [part.commit.request for part in self.parts]
        expect(len(set(requests)) == len(requests), "parts", requests, "one part for each request")

    @property
    def row_count(self) -> int:
        return _count_rows(self.parts)


class VerifiedPart(Record, frozen=True, kw_only=True):
    """Next tokens of the nodes of one request that the last stage found on the output's path."""

    request: Id
    epoch: Id
    ids: Rows[Id]
    next_tokens: Rows[Token]
    logprobs: Rows[Logprobs] = ()  # one for each next token, or none at all

    def __post_init__(self) -> None:
        count, tokens, logprobs = len(self.ids), len(self.next_tokens), len(self.logprobs)
        expect(count == tokens, "next_tokens", tokens, f"{count} entries")
        expect(logprobs in (0, count), "logprobs", f"{logprobs} entries", f"none, or {count}")


class Verified(Message, frozen=True, kw_only=True):
    """The last stage's word on a segment; one for every segment, empty ones too: it is the credit."""

    segment: Id
    parts: Annotated[tuple[VerifiedPart, ...], _Parts]
    hops: Hops

    def __post_init__(self) -> None:
        _count_rows(self.parts)


class Features(Message, frozen=True, kw_only=True):
    """What a stage captured of nodes of one request that are committed, for drafters at the head: a row for
    each, in order, as a frame of its own (`Assign.captures`)."""

    request: Id
    epoch: Id
    ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=limits.FEATURES_ROWS_MAX)]

    @property
    def row_count(self) -> int:
        return len(self.ids)


class Expand(Message, frozen=True, kw_only=True):
    """Run these rows through the drafter that the daemon holds, and propose up to `width` children for each
    root or uncommitted one. The segment's number is the job's; openings and commits are in it, as for a
    stage. The control connection carries it, in order with `Release`."""

    segment: Segment
    width: Annotated[int, Meta(ge=1, le=limits.DRAFT_WIDTH_MAX)]

    def __post_init__(self) -> None:
        expect(not self.segment.hops, "hops", len(self.segment.hops), "none: a drafter is no stage")


class Proposal(Record, frozen=True, kw_only=True):
    """What a drafter proposes below one node: `tokens`, likeliest first, with its own confidence in each."""

    request: Id
    epoch: Id
    node: Id
    tokens: Annotated[tuple[Token, ...], Meta(max_length=limits.DRAFT_WIDTH_MAX)]
    confidences: Annotated[tuple[Share, ...], Meta(max_length=limits.DRAFT_WIDTH_MAX)]


class Proposed(Message, frozen=True, kw_only=True):
    """A daemon's answer to `Expand`: what its drafter proposes, and how long that took by its clock."""

    job: Id
    proposals: Rows[Proposal]
    compute_s: Seconds

    def __post_init__(self) -> None:
        for each in self.proposals:  # drafters at the head make many that go nowhere
            count, tokens = len(each.confidences), len(each.tokens)
            expect(count == tokens, "confidences", count, f"{tokens} entries")
