"""A head whose stages and drafter are played by hand: what is told comes in, what goes out is said in short
tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    Cancel,
    Draft,
    Drafted,
    Emit,
    Finished,
    HeadCommand,
    HeadEvent,
    SegmentTimed,
    SendToDrafter,
    SendToFirstStage,
    SendToStages,
    SetTimer,
    Submit,
    TimerFired,
    VerifiedArrived,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.head.request import Request
from flowspec.core.methods import make_method
from flowspec.core.methods.base import Method
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import (
    Commit,
    Hop,
    Open,
    Proposal,
    Sampling,
    Segment,
    Verified,
    VerifiedPart,
)
from flowspec.tree import TokenTree

Children = Sequence[tuple[int, float]]
"""Tokens proposed below a node, each with the drafter's confidence."""
Said = tuple[Any, ...]
TRAITS = DrafterTraits(context=1000)


def opens(request: int = 1, *, epoch: int = 0, keep: int = 0) -> Said:
    return ("open", request, epoch, keep)


def sends(*nodes: int, request: int = 1) -> Said:
    return sends_all({request: nodes})


def sends_all(nodes: Mapping[int, Iterable[int]]) -> Said:
    return ("send", {request: tuple(some) for request, some in nodes.items()})


def drafts(*nodes: int, request: int = 1) -> Said:
    return ("draft", {request: nodes})


def commits(*path: int, base: int, request: int = 1) -> Said:
    return ("commit", request, base, path)


def over(*path: int, base: int, request: int = 1) -> Said:
    """The stages learn that an answer has ended, with its path up to the end."""
    return ("over", request, base, path)


def emits(*tokens: int, request: int = 1) -> Said:
    return ("emit", request, tokens)


def ends(reason: str, request: int = 1) -> Said:
    return ("end", request, reason)


def wakes(at_s: float) -> Said:
    return ("timer", at_s)


def say(command: HeadCommand) -> Said:
    if isinstance(command, SendToFirstStage):
        return sends_all({part.commit.request: part.ids for part in command.segment.parts})
    if isinstance(command, Draft):
        return ("draft", {part.commit.request: part.ids for part in command.segment.parts})
    if isinstance(command, SendToStages):
        message = command.message
        if isinstance(message, Open):
            return opens(message.request, epoch=message.epoch, keep=message.keep)
        if isinstance(message, Commit):
            told = over if message.is_over else commits
            return told(*message.path, base=message.base, request=message.request)
        return ("release", message.request)
    if isinstance(command, SendToDrafter):
        return ("drafter forgets", command.message.request)
    if isinstance(command, Emit):
        return emits(*command.tokens, request=command.request)
    if isinstance(command, Finished):
        return ends(command.reason, command.request)
    assert isinstance(command, SetTimer)
    return wakes(command.at_s)


class ScriptedHead:
    """`segments` are in flight, oldest first; `job` is what the drafter works on."""

    def __init__(
        self,
        method: Method | str,
        *,
        stages: int = 4,
        context: int = 1000,
        drafter: DrafterTraits | None = TRAITS,
    ) -> None:
        made = make_method(method) if isinstance(method, str) else method
        self.core = HeadCore(
            context=context, stage_count=stages, method=made, drafters=() if drafter is None else (drafter,)
        )
        self.now_s = 0.0
        self.segments: list[Segment] = []
        self.sent: list[Segment] = []
        self.job: Draft | None = None
        self.tokens: dict[int, list[int]] = {}
        self.ends: list[Finished] = []

    def give(self, event: HeadEvent) -> list[Said]:
        commands = self.core.handle(event, self.now_s)
        for command in commands:
            if isinstance(command, SendToFirstStage):
                self.segments.append(command.segment)
                self.sent.append(command.segment)
            elif isinstance(command, Draft):
                assert self.job is None, "one job at a time"
                self.job = command
            elif isinstance(command, Emit):
                self.tokens.setdefault(command.request, []).extend(command.tokens)
            elif isinstance(command, Finished):
                self.ends.append(command)
        return [say(command) for command in commands if not isinstance(command, SegmentTimed)]

    def ask(
        self, request: int = 1, prompt: Sequence[int] = (5, 6, 7), count: int = 100, **extra: Any
    ) -> list[Said]:
        """A question; the nodes of a first prompt are 0, 1, ..., its last one the root."""
        fields = {"sampling": Sampling(), "stop_ids": frozenset(), **extra}
        self.tokens.pop(request, None)
        return self.give(Submit(request=request, prompt=tuple(prompt), new_tokens_max=count, **fields))

    def back(
        self, drawn: Mapping[int, int] | None = None, *, hops: tuple[Hop, ...] = (), request: int = 1
    ) -> list[Said]:
        """The oldest segment comes back with the tokens drawn after some of its nodes."""
        return self.back_all({request: drawn or {}}, hops=hops)

    def back_all(self, drawn: Mapping[int, Mapping[int, int]], *, hops: tuple[Hop, ...] = ()) -> list[Said]:
        segment = self.segments.pop(0)
        parts = []
        for part in segment.parts:
            found = {
                node: token for node, token in drawn.get(part.commit.request, {}).items() if node in part.ids
            }
            if found:
                epoch = part.commit.epoch
                parts.append(
                    VerifiedPart(
                        request=part.commit.request,
                        epoch=epoch,
                        ids=tuple(found),
                        next_tokens=tuple(found.values()),
                    )
                )
        return self.give(
            VerifiedArrived(verified=Verified(segment=segment.segment, parts=tuple(parts), hops=hops))
        )

    def propose(self, children: Mapping[int, Children] | Callable[[int], Children]) -> list[Said]:
        """The drafter is done: what it proposes below the nodes that it was asked about, by node (of the
        first part's request)."""
        job, self.job = self.job, None
        assert job is not None, "nothing was asked of the drafter"
        proposals = []
        for part in job.segment.parts:
            for node, is_path in zip(part.ids, part.committed, strict=True):
                if not is_path:
                    found = children(node) if callable(children) else children.get(node, ())
                    proposals.append(
                        Proposal(
                            request=part.commit.request,
                            epoch=part.commit.epoch,
                            node=node,
                            tokens=tuple(token for token, _ in found),
                            confidences=tuple(confidence for _, confidence in found),
                        )
                    )
        return self.give(
            Drafted(job=job.job, proposals=tuple(proposals), started_s=self.now_s, ended_s=self.now_s)
        )

    def wake(self, at_s: float) -> list[Said]:
        self.now_s = at_s
        return self.give(TimerFired())

    def request(self, number: int = 1) -> Request:
        (found,) = [request for request in self.core.requests() if request.number == number]
        return found

    def tree(self, number: int = 1) -> TokenTree:
        return self.request(number).tree

    def rows(self) -> list[int]:
        """Rows of each segment that was ever sent."""
        return [segment.row_count for segment in self.sent]


def is_ordered(tree: TokenTree, nodes: Sequence[int]) -> bool:
    """Whether no node comes before its parent."""
    return all(tree.parent(node) not in nodes[index:] for index, node in enumerate(nodes))


MISS = 999
"""A token that no drafter here proposes."""
CLOCK_S = 1e6
"""What the stages' clocks show when the head's shows 0."""
NOTHING = Cancel(request=1000)
"""An event that concerns nobody, upon which a head may change its mind all the same."""


def falling(width: int, first: float = 0.5) -> Callable[[int], Children]:
    """Below every node the same: `width` tokens, each half as likely as the one before it."""
    return lambda node: [(rank, first / 2**rank) for rank in range(width)]


def hops(stages: int, rows: int, seconds: float) -> tuple[Hop, ...]:
    """Reports of stages that all take so long, on links that take no time; the last one is done at 0."""
    return tuple(
        Hop(
            received_s=(stage - stages) * seconds + CLOCK_S, queued_s=0, compute_s=seconds, own_s=0, rows=rows
        )
        for stage in range(stages)
    )


def kinds(said: list[Said]) -> list[str]:
    return [each[0] for each in said]


def guessing(**extra: Any) -> ScriptedHead:
    """A prompt of three and two guesses below it in flight, and the drafter asked about both: nodes 3 (token
    10) and 4 (token 11)."""
    head = ScriptedHead(Continuous(window=9))
    assert head.ask(**extra) == [opens(), sends(0, 1, 2), drafts(0, 1, 2)]
    assert head.propose({2: [(10, 0.5), (11, 0.3)]}) == [sends(3, 4), drafts(3, 4)]
    return head
