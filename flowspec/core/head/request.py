"""A conversation as the head knows it: its tree, how far the stages are, and the messages that follow from
both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from flowspec.core.head.candidates import Candidates
from flowspec.core.head.drafter_state import DrafterState
from flowspec.core.head.events import Submit
from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Logprobs, Open, SegmentPart
from flowspec.core.protocol.model_spec import HeldPositions, SlidingWindow
from flowspec.tree import TokenTree

Ids = NDArray[np.int64]
PREDICTED_MAX = 8
"""A drafter guesses little that is right from predictions of so many predictions, and each is a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A prompt shares its first `count` tokens with what conversation `number` begins with in this epoch; all
    stages have computed them if it `is_ready`."""

    number: int
    epoch: int
    count: int
    is_ready: bool


@dataclass(slots=True)
class Request:
    """A conversation: its tree lives on between answers, `submit` is the answer under way (None between
    answers).

    `unsent` is the next prompt position to send; positions below `computed` have passed every stage. Where it
    `wants_features`, drafters have those of positions below `featured`; others are waited for until `due_s`
    (infinity before the first verdict), and from then on `is_overdue` says so, until all have come.
    `known_length` is the committed length that every stage has been told, so Commits begin there. `held` are
    tokens verified that the method has not walked yet, `logprobs` those of the tokens after living nodes,
    `plan` is the method's own note. `reused` prompt tokens were cached when the answer began.
    `drafter_states` and `weights` are by drafter: what it has, and how much its word counts among its like;
    `candidates` is what they propose. `is_end_told` says that the stages have heard that the answer is over.
    `windowed` is the least that any stage's layers with a window hold when the answer begins; `is_read_anew`
    where nothing was kept because of that. `text` are the tokens that were known then. What it `awaits` is to
    be copied from another conversation before anything of it is sent. `certain` gives the tokens that alone
    can follow an answer, where it is bound; `settled` has the nodes for which that was looked up, and whether
    there is one.
    """

    tree: TokenTree
    submit: Submit | None
    opening: Open
    context: int
    unsent: int
    computed: int
    known_length: int
    statistics: Statistics
    wants_features: bool = False
    featured: int = 0
    due_s: float = float("inf")
    is_overdue: bool = False
    drafter_states: list[DrafterState] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    candidates: Candidates = field(default_factory=Candidates)
    reused: int = 0
    text: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    awaits: Source | None = None
    windowed: HeldPositions | None = None
    is_read_anew: bool = False
    opened: bool = False
    new_tokens: list[int] = field(default_factory=list)
    next_tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    held: deque[dict[int, int]] = field(default_factory=deque)
    root_sent: bool = False
    in_flight: int = 0
    served: int = 0
    is_end_told: bool = False
    plan: Any = None
    certain: Callable[[Sequence[int]], Sequence[int]] | None = None
    settled: dict[int, bool] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.opening.request

    @property
    def is_prefilled(self) -> bool:
        """Whether all of the prompt is on its way."""
        return self.unsent >= self.opening.length

    @property
    def is_decoding(self) -> bool:
        return self.submit is not None and self.is_prefilled

    @property
    def why_over(self) -> str:
        """`stop` or `length` if the answer ends with its newest token, nothing if it goes on."""
        assert self.submit is not None
        if self.submit.stop_rule is not None and self.submit.stop_rule.stops_at(self.new_tokens):
            return "stop"
        is_full = self.tree.committed_length == self.context
        return "length" if is_full or len(self.new_tokens) == self.submit.new_tokens_max else ""

    def validate(self) -> None:
        tree, number = self.tree, self.number
        tree.validate()
        assert tree.sent_alive <= limits.TREE_NODES_MAX, (
            f"{tree.sent_alive} living nodes of request {number} are sent"
        )
        alive_max = limits.DRAFT_NODES_MAX + 1
        assert tree.alive_count <= alive_max, f"{tree.alive_count} living nodes of request {number}"
        lengths = {
            "computed": self.computed,
            "told": self.known_length,
            "sent": self.unsent,
            "featured": self.featured,
        }
        for name, length in lengths.items():
            assert length <= tree.committed_length, (
                f"request {number}: {length} positions are {name}, more than committed"
            )
        assert self.in_flight >= 0, f"request {number} is in {self.in_flight} segments"
        assert tree.committed_length <= self.context, f"request {number} is longer than its context"
        if self.submit is None:
            assert not self.held, f"a verified segment of request {number} waits, and nobody asks"
        else:
            most = self.submit.new_tokens_max
            assert len(self.new_tokens) <= most, (
                f"request {number} has {len(self.new_tokens)} tokens of {most}"
            )
        for drafter_state in self.drafter_states:
            drafter_state.validate(tree)

    def is_living(self, node: int) -> bool:
        """Whether a node is the root or hangs below it."""
        return node == self.tree.root or self.tree.is_alive(node)

    def has_room_below(self, node: int) -> bool:
        """Whether a child of this node would have to be run: the answer goes on after it, and the context has
        room."""
        assert self.submit is not None
        child = self.tree.position(node) + 1
        is_last = child - len(self.submit.prompt) + 1 >= self.submit.new_tokens_max
        return not is_last and child + 1 < self.context

    @property
    def awaits_features(self) -> bool:
        """Whether features are on their way without which drafters cannot go on from the root."""
        return self.wants_features and self.featured < self.tree.committed_length - 1 and not self.is_overdue

    @property
    def predicted_max(self) -> int:
        """How many features before the root drafters may put up their own predictions for."""
        return PREDICTED_MAX if self.is_overdue and self.featured else 0

    def is_pending(self, node: int) -> bool:
        """Whether a model is about to tell what comes after a node."""
        is_asked = any(node in drafter_state.pending for drafter_state in self.drafter_states)
        return is_asked or (node == self.tree.root and self.awaits_features)

    def forget(self, dead: Sequence[int]) -> None:
        for node in dead:
            self.next_tokens.pop(node, None)
            self.logprobs.pop(node, None)
            self.settled.pop(node, None)
        for drafter_state in self.drafter_states:
            drafter_state.forget(dead)
        self.candidates.forget(dead)

    def revalue(self, node: int, chance: float) -> None:
        """A living node has another chance: it and what hangs below it come up where they are worth it."""
        for moved in self.tree.revalue(node, chance):
            for drafter_state in self.drafter_states:
                if not drafter_state.knows(moved):
                    drafter_state.offer(self.tree, moved)
            if moved in self.candidates.next_value:
                self.candidates.push(moved, self.tree.log_value(moved))

    def reopen(self) -> None:
        """The stages are gone: an answer under way begins again where it stands, its committed tokens being
        the prompt now.

        The nodes of the path keep their ids; the new epoch tells the old stages' words from those of the new
        ones.
        """
        length = self.tree.committed_length
        self.tree.rewind(length)
        self.opening = structs.replace(
            self.opening, epoch=self.opening.epoch + 1, keep=0, length=length, root=self.tree.root, source=-1
        )
        self.awaits = None
        self.unsent = self.computed = self.in_flight = 0
        self.known_length = length
        if self.windowed is not None:
            self.windowed = self.windowed.keep(0, length)
        self.opened = self.root_sent = self.is_end_told = False
        self.next_tokens.clear()
        self.logprobs.clear()
        self.settled.clear()
        self.held.clear()

    def begin_with(self, source: int, count: int) -> None:
        """The stages copy the first `count` tokens from another conversation when they open this one; nothing
        of it was sent yet."""
        assert not self.opened, "the stages have opened it"
        assert not self.in_flight, "the stages are opening it"
        self.opening = structs.replace(self.opening, keep=count, source=source)
        self.unsent = self.computed = count
        self.awaits = None
        if self.submit is not None:
            self.reused = min(count, len(self.submit.prompt))

    @property
    def run_length(self) -> int:
        """Positions of the path that some stage may have run, at most."""
        return self.tree.committed_length if self.is_prefilled else self.unsent

    @property
    def kept_everywhere(self) -> int:
        """Path nodes that an Open may keep: every stage has run them, and been told that they are committed
        (else they die there)."""
        return min(self.computed, self.known_length)

    @property
    def copyable(self) -> int:
        """Path nodes that another conversation may begin with a copy of."""
        return min(self.kept_everywhere, self.featured) if self.wants_features else self.kept_everywhere

    def fitting(self, nodes: list[int]) -> list[int]:
        """As many of the nodes as the stages have slots for; the root's is reserved with the context."""
        return nodes[: limits.TREE_NODES_MAX - self.tree.sent_alive + (nodes[0] == self.tree.root)]

    def next_chunk(self, rows_max: int) -> list[int]:
        """The next nodes of the prompt; they count as sent."""
        nodes = self.tree.path[self.unsent : min(self.unsent + rows_max, self.opening.length)]
        self.unsent += len(nodes)
        self.root_sent = self.is_prefilled
        return nodes

    def commit(self, *, is_over: bool = False) -> Commit:
        """The newest Commit, back to what every stage is known to have."""
        path = tuple(self.tree.path[self.known_length :])
        return Commit(
            request=self.number, epoch=self.opening.epoch, base=self.known_length, path=path, is_over=is_over
        )

    def part(self, nodes: list[int], *, is_prompt: bool) -> SegmentPart:
        """These nodes as they travel in a segment, parents first."""
        tree = self.tree
        return SegmentPart(
            commit=self.commit(),
            opening=None if self.opened else self.opening,
            ids=tuple(nodes),
            parents=tuple(tree.parent(n) for n in nodes),
            tokens=tuple(tree.token(n) for n in nodes),
            positions=tuple(tree.position(n) for n in nodes),
            committed=(is_prompt,) * len(nodes),
        )


def begin(
    old: Request | None,
    submit: Submit,
    *,
    context: int,
    stage_count: int,
    sliding_window: SlidingWindow | None,
    wants_features: bool = False,
    now_s: float,
) -> Request:
    """A new answer, in the conversation `old` if there is one, of which everything is kept that the stages
    hold of the prompt: nothing, where layers with a `sliding_window` have given back what goes before the
    rest.

    What is known of the answer goes to the stages as a part of the prompt, as it does in `Request.reopen`.
    """
    tree = TokenTree() if old is None else old.tree
    known = submit.prompt + submit.answered
    count = len(known)
    keep = (
        0
        if old is None
        else min(common_prefix(tree.committed_tokens(), known), old.kept_everywhere, count - 1)
    )
    windowed = None if sliding_window is None else sliding_window.nothing_run(count)
    is_read_anew = False
    if old is not None and old.windowed is not None and keep:
        held = old.windowed.run(old.run_length)
        is_read_anew = (keep := held.keepable(keep)) == 0
        windowed = held.keep(keep, count)
    drafter_states = [] if old is None else old.drafter_states
    for drafter_state in drafter_states:
        drafter_state.advance(tree)
    tree.rewind(keep)
    tree.extend_path(known[keep:])
    return Request(
        tree=tree,
        submit=submit,
        opening=Open(
            request=submit.request,
            epoch=0 if old is None else old.opening.epoch + 1,
            keep=keep,
            length=count,
            root=tree.root,
            slots=context + limits.TREE_NODES_MAX,
            sampling=submit.sampling,
            top_logprobs=submit.top_logprobs,
            answer_start=len(submit.prompt),
        ),
        context=context,
        unsent=keep,
        computed=keep,
        known_length=count,
        reused=min(keep, len(submit.prompt)),
        text=np.asarray(known, dtype=np.int64),
        windowed=windowed,
        is_read_anew=is_read_anew,
        drafter_states=drafter_states,
        wants_features=wants_features,
        featured=0 if old is None else min(old.featured, keep),
        new_tokens=list(submit.answered),
        statistics=Statistics(stage_count=stage_count, submitted_s=now_s),
    )


def common_prefix(first: Sequence[int] | Ids, second: Sequence[int] | Ids) -> int:
    """How many tokens both begin with."""
    count = min(len(first), len(second))
    different = np.flatnonzero(np.asarray(first[:count]) != np.asarray(second[:count]))
    return int(different[0]) if len(different) else count
