"""What devices say to each other. A message is frozen; the codec checks what comes (`types`).

`Segment`, `Verified`, `Open`, `Commit` and `Release`, which are here, make up the protocol of the token
trees, `Expand` and `Proposed` that of drafters on devices of their own; `cluster_messages` set a cluster up
and watch it, with `weight_messages` and `facts`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, get_type_hints

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.types import (
    Flags,
    Id,
    IdOrNone,
    Ids,
    Instant,
    Length,
    Message,
    Parents,
    Position,
    Positions,
    Record,
    RowCount,
    Seconds,
    Share,
    Token,
    Tokens,
    one_of,
)
from flowspec.validation import expect

PROTOCOL_VERSION = 26
"""Counts up when a message gets or loses a field, or means something else: both ends must have the same."""


GRAMMAR_KINDS = ("json_schema", "regex", "lark", "reply")
_TEMPERATURES = f"0, or {limits.TEMPERATURE_MIN} to {limits.TEMPERATURE_MAX}"
_BIASES = (
    f"{-limits.BIAS_MAX} to {limits.BIAS_MAX} for token ids, for at most {limits.LOGIT_BIAS_MAX} of them"
)
Penalty = Annotated[float, Meta(ge=-limits.PENALTY_MAX, le=limits.PENALTY_MAX)]
Bias = Annotated[float, Meta(ge=-limits.BIAS_MAX, le=limits.BIAS_MAX)]
TopLogprobs = Annotated[int, Meta(ge=-1, le=limits.TOP_LOGPROBS_MAX)]
Logprob = Annotated[float, Meta(le=0)]


def _expect_ascending(name: str, tokens: Sequence[int]) -> None:
    is_ascending = all(map(operator.lt, tokens, tokens[1:]))
    expect(is_ascending, name, tokens, "ascending token ids, each once")


class Grammar(Record, frozen=True, kw_only=True):
    """What an answer's text must be: a JSON document that a schema allows, what a regular expression matches
    as a whole, what llguidance's Lark-like grammar derives, or such a grammar of a whole reply, with thoughts
    and calls; `text` is the schema, expression or grammar.

    Where it may end one of the tokens `ends` is drawn, and nowhere else; these ascend. `marks` are tokens
    that stand for no text, of a reply's grammar, which names them `mark_0` and so on, in this order: nowhere
    else may they be drawn.
    """

    kind: Annotated[str, one_of(*GRAMMAR_KINDS)]
    text: str
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
    """How a next token is drawn; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off.

    Before anything else `logit_bias` is added to the logits of its tokens; `suppress_tokens` are never drawn
    (docs/design/exactness.md). Both ascend, and ids that the model does not have mean nothing. Then logits of
    tokens that stand in the text already are changed (`model.sampler`): `repetition_penalty` counts prompt
    and answer, 1 switches it off; `frequency_penalty` and `presence_penalty` count the answer alone, 0
    switches them off. Last, only tokens stay that the `grammar` allows behind the answer so far.
    """

    temperature: Annotated[float, Meta(ge=0, le=limits.TEMPERATURE_MAX, description=_TEMPERATURES)] = 0.0
    top_k: Token = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[
        float, Meta(ge=limits.REPETITION_PENALTY_MIN, le=limits.REPETITION_PENALTY_MAX)
    ] = 1.0
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


class Logprobs(Record, frozen=True, kw_only=True):
    """Natural logarithms of the model's own probabilities, before temperature and filters: of the token
    drawn, and of the likeliest tokens.

    `ids` are the likeliest ones, likeliest first and of equals the lowest first, and `values` theirs.
    """

    chosen: Logprob
    ids: Annotated[tuple[Token, ...], Meta(max_length=limits.TOP_LOGPROBS_MAX)]
    values: Annotated[tuple[Logprob, ...], Meta(max_length=limits.TOP_LOGPROBS_MAX)]

    def __post_init__(self) -> None:
        expect(len(self.values) == len(self.ids), "values", len(self.values), f"{len(self.ids)} entries")
        lowest = min(self.chosen, *self.values, 0.0)
        expect(lowest > -math.inf, "values", lowest, "finite numbers")


# -------------------------------------------------------------------------------------------- token trees


class Open(Message, frozen=True, kw_only=True):
    """Begins epoch `epoch` of a request: keep the first `keep` tokens of the last epoch, forget everything
    else. With a `source` (-1: none) the tokens kept are copies of those that this other request begins with,
    and of its own last epoch the request keeps nothing.

    `length` tokens are committed from the start (the prompt); its last one is node `root`. A new chat turn is
    an Open of the next epoch, so this also is the design's Rewind. With `top_logprobs` (-1: none are wanted)
    the log-probabilities of each token drawn come with it, and those of so many of the likeliest. The answer
    begins at position `answer_start`: before `length` where some of it is known already.
    """

    request: Id
    epoch: Id
    keep: Position
    length: Length
    root: Id
    slots: Annotated[int, Meta(ge=1, le=limits.CONTEXT_MAX + limits.DRAFT_NODES_MAX)]
    sampling: Sampling
    top_logprobs: TopLogprobs = -1
    answer_start: Length
    source: IdOrNone = -1

    def __post_init__(self) -> None:
        is_copied = self.source >= 0
        expect(not is_copied or self.source != self.request, "source", self.source, "another request")
        expect(not is_copied or self.keep > 0, "keep", self.keep, "tokens to copy, where there is a source")
        expect(self.keep < self.length, "keep", self.keep, f"less than {self.length}")
        expect(self.answer_start <= self.length, "answer_start", self.answer_start, f"1 to {self.length}")
        expect(self.slots >= self.length, "slots", self.slots, f"at least {self.length}")


class Commit(Message, frozen=True, kw_only=True):
    """Nodes `path` are output at positions `base`, `base + 1`, ...; the last of them is the root.

    Cumulative back to `base`, the committed length that every stage is known to have, so a lost Commit heals.
    With `is_over` the answer has ended: nothing below the root will be asked about again in this epoch.
    """

    request: Id
    epoch: Id
    base: Length
    path: Annotated[tuple[Id, ...], Meta(max_length=limits.COMMIT_PATH_MAX)]
    is_over: bool = False

    @property
    def length(self) -> int:
        """Committed length after this Commit."""
        return self.base + len(self.path)


class SegmentPart(Record, frozen=True, kw_only=True):
    """The rows of one request in a segment; `opening` rides along until every stage is known to have it."""

    commit: Commit
    opening: Open | None
    ids: Ids
    parents: Parents
    tokens: Tokens
    positions: Positions
    committed: Flags

    def __post_init__(self) -> None:
        count = len(self.ids)
        for name in ("parents", "tokens", "positions", "committed"):
            entries = len(getattr(self, name))
            expect(entries == count, name, entries, f"{count} entries, one for every id")
        is_ordered = all(map(operator.lt, self.parents, self.ids))
        expect(is_ordered, "parents", self.parents, "each below its own id")
        if self.opening is not None:
            is_same = (self.opening.request, self.opening.epoch) == (self.commit.request, self.commit.epoch)
            expect(is_same, "opening", self.opening.request, "the request and epoch of the part")

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


class Hop(Record, frozen=True, kw_only=True):
    """When a segment came, by the stage's own clock, and what it spent there: waiting behind others,
    computing, the framework's own work.

    `rows` began to run. Dead rows left in the queue (before they ran; not in `rows`), between layers, or
    late, after all layers had run.
    """

    received_s: Instant
    queued_s: Seconds
    compute_s: Seconds
    own_s: Seconds
    rows: RowCount
    dead_in_queue: RowCount = 0
    dead_between_layers: RowCount = 0
    dead_late: RowCount = 0

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


def _check_rows(message: Segment | Verified) -> None:
    """What holds for a segment on its way and back."""
    most = limits.NODES_PER_SEGMENT_MAX
    expect(message.row_count <= most, "rows", message.row_count, f"at most {most}")


class Segment(Message, frozen=True, kw_only=True):
    """What one pipeline slot carries: rows of one or more requests, and beside them a payload `[rows,
    hidden]`.

    The payload (absent on the first hop) travels as a frame of its own. A segment that lost all its rows
    still passes on, so that order and credit hold. `releases` are those that some stage may not have yet: the
    rows may need their room.
    """

    segment: Id
    parts: Annotated[tuple[SegmentPart, ...], Meta(max_length=limits.PARTS_PER_SEGMENT_MAX)]
    hops: Hops = ()
    releases: Annotated[tuple[Release, ...], Meta(max_length=limits.LIST_MAX)] = ()

    def __post_init__(self) -> None:
        _check_rows(self)
        requests = [part.commit.request for part in self.parts]
        expect(len(set(requests)) == len(requests), "parts", requests, "one part for each request")

    @property
    def row_count(self) -> int:
        return sum(len(part.ids) for part in self.parts)


class VerifiedPart(Record, frozen=True, kw_only=True):
    """Next tokens of the nodes of one request that the last stage found on the output's path.

    `logprobs` are one for each next token, in order, or none at all.
    """

    request: Id
    epoch: Id
    ids: Ids
    next_tokens: Tokens
    logprobs: Annotated[tuple[Logprobs, ...], Meta(max_length=limits.NODES_PER_SEGMENT_MAX)] = ()

    def __post_init__(self) -> None:
        count, tokens, logprobs = len(self.ids), len(self.next_tokens), len(self.logprobs)
        expect(count == tokens, "next_tokens", tokens, f"{count} entries")
        expect(logprobs in (0, count), "logprobs", f"{logprobs} entries", f"none, or {count}")


class Verified(Message, frozen=True, kw_only=True):
    """The last stage's word on a segment; one for every segment, empty ones too: it is the credit."""

    segment: Id
    parts: Annotated[tuple[VerifiedPart, ...], Meta(max_length=limits.PARTS_PER_SEGMENT_MAX)]
    hops: Hops

    def __post_init__(self) -> None:
        _check_rows(self)

    @property
    def row_count(self) -> int:
        return sum(len(part.ids) for part in self.parts)


class Features(Message, frozen=True, kw_only=True):
    """What a stage captured of nodes of one request that are committed, for drafters at the head: a row for
    each, in order, as a frame of its own (`Assign.captures`)."""

    request: Id
    epoch: Id
    ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=limits.FEATURES_ROWS_MAX)]

    @property
    def row_count(self) -> int:
        return len(self.ids)


# ------------------------------------------------------------------------------------------------- drafting


class Expand(Message, frozen=True, kw_only=True):
    """Run these rows through the drafter that the daemon holds, and propose up to `width` children for each
    root or uncommitted one.

    The segment's number is the job's. Openings and commits are in it, as for a stage; the control connection
    carries it, in order with `Release`.
    """

    segment: Segment
    width: Annotated[int, Meta(ge=1, le=limits.DRAFT_WIDTH_MAX)]

    def __post_init__(self) -> None:
        expect(not self.segment.hops, "hops", len(self.segment.hops), "none: a drafter is no stage")


class Proposal(Record, frozen=True, kw_only=True):
    """What a drafter proposes below one node: `tokens`, likeliest first, with its own confidence in each (0
    to 1)."""

    request: Id
    epoch: Id
    node: Id
    tokens: Annotated[tuple[Token, ...], Meta(max_length=limits.DRAFT_WIDTH_MAX)]
    confidences: Annotated[tuple[Share, ...], Meta(max_length=limits.DRAFT_WIDTH_MAX)]


class Proposed(Message, frozen=True, kw_only=True):
    """A daemon's answer to `Expand`: what its drafter proposes, and how long that took by its clock."""

    job: Id
    proposals: Annotated[tuple[Proposal, ...], Meta(max_length=limits.NODES_PER_SEGMENT_MAX)]
    compute_s: Seconds

    def __post_init__(self) -> None:
        for each in self.proposals:  # drafters at the head make many that go nowhere
            count, tokens = len(each.confidences), len(each.tokens)
            expect(count == tokens, "confidences", count, f"{tokens} entries")
