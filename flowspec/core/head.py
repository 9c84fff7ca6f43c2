"""The head's mind: which nodes are sent when, and what the verified ones mean for the output.

Per request a `TokenTree`; prompts are chains of committed nodes sent in chunks, and answers grow node by node as the
stages verify them. The only method so far is `ar`, plain pipelined decoding: the root is in flight and nothing else.
Knows no sockets, no tensors and no clock.

The walk: while the next token of the root is known, make it the root. Each token is emitted the moment it is known, and
nothing past a stop is committed or emitted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flowspec.core import limits
from flowspec.core.events import (
    Cancel,
    Emit,
    Finished,
    Forget,
    HeadCommand,
    HeadEvent,
    Submit,
    Timed,
    ToPipeline,
    ToStages,
    VerifiedArrived,
)
from flowspec.core.messages import Commit, Open, Part, Release, Segment, VerifiedPart
from flowspec.errors import InputError, PeerError
from flowspec.tree import NodeState, TokenTree


@dataclass(slots=True)
class _Request:
    """A conversation: its tree lives on between answers, `submit` is the answer under way (None between answers).

    `unsent` is the next prompt position to send; positions below `computed` have passed every stage. `known_length` is
    the committed length that every stage has been told, so Commits begin there.
    """

    tree: TokenTree
    submit: Submit | None
    opening: Open
    unsent: int
    computed: int
    known_length: int
    opened: bool = False
    new_tokens: list[int] = field(default_factory=list)
    next_tokens: dict[int, int] = field(default_factory=dict)
    root_sent: bool = False


@dataclass(frozen=True, slots=True)
class _Flight:
    """What one segment in flight carries of a request: once it is back, every stage has seen it.

    `root` is the request's root if it is on board, which no stage may drop; else -1.
    """

    request: int
    epoch: int
    end: int
    committed_length: int
    root: int


class HeadCore:
    """Event in, commands out; see the module."""

    def __init__(self, *, context: int, stage_count: int) -> None:
        self.context = context
        self.window = stage_count + 1
        self._requests: dict[int, _Request] = {}
        self._flights: dict[int, _Flight] = {}
        self._leaving: set[int] = set()
        self._segments_sent = 0
        self._turns: deque[int] = deque()

    @property
    def in_flight(self) -> int:
        """Segments sent whose Verified is not back."""
        return len(self._flights)

    def handle(self, event: HeadEvent, now_s: float) -> list[HeadCommand]:
        """The only mutator. Raises `InputError` for a prompt that cannot be answered, `PeerError` for a stage's fault."""
        commands: list[HeadCommand] = []
        if isinstance(event, Submit):
            self._submit(event, commands)
        elif isinstance(event, Cancel):
            request = self._requests.get(event.request)
            if request is not None and request.submit is not None:
                self._end(request, "cancelled", commands)
        elif isinstance(event, Forget):
            self._forget(event.request, commands)
        else:
            self._verified(event, commands)
        self._fill(commands)
        return commands

    # ------------------------------------------------------------------------------------------- requests

    def _submit(self, submit: Submit, commands: list[HeadCommand]) -> None:
        count = len(submit.prompt)
        if count == 0:
            raise InputError("expected a prompt of at least one token, got an empty one")
        if count >= self.context:
            raise InputError(
                f"the prompt has {count} tokens, but the context holds {self.context} with the answer; "
                "shorten the prompt, or raise --context if the model allows more"
            )
        assert submit.new_tokens_max >= 1
        old = self._requests.get(submit.request)
        assert old is None or old.submit is None, f"request {submit.request} is being answered"
        assert submit.request not in self._leaving, f"request {submit.request} is over; its id is not used again"
        tree = TokenTree() if old is None else old.tree
        keep = 0 if old is None else min(_common_prefix(tree.committed_tokens(), submit.prompt), old.computed, count - 1)
        tree.rewind(keep)
        tree.extend_path(submit.prompt[keep:])
        opening = Open(
            request=submit.request,
            epoch=0 if old is None else old.opening.epoch + 1,
            keep=keep,
            length=count,
            root=tree.root,
            slots=self.context + limits.TREE_NODES_MAX,
            sampling=submit.sampling,
        )
        self._requests[submit.request] = _Request(tree, submit, opening, unsent=keep, computed=keep, known_length=count)
        self._turns.append(submit.request)
        commands.append(ToStages(message=opening))

    def _forget(self, number: int, commands: list[HeadCommand]) -> None:
        """Release goes out once nothing of the request is in flight: a segment behind it would open it again."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        if request.submit is not None:
            self._end(request, "cancelled", commands)
        self._leaving.add(number)
        self._release_if_landed(number, commands)

    def _release_if_landed(self, number: int, commands: list[HeadCommand]) -> None:
        if number in self._leaving and all(flight.request != number for flight in self._flights.values()):
            self._leaving.discard(number)
            commands.append(ToStages(message=Release(request=number)))

    def _end(self, request: _Request, reason: str, commands: list[HeadCommand]) -> None:
        assert request.submit is not None
        self._turns.remove(request.submit.request)
        commands.append(Finished(request=request.submit.request, reason=reason, reused=request.opening.keep))
        request.submit = None

    # ------------------------------------------------------------------------------------------- learning

    def _verified(self, event: VerifiedArrived, commands: list[HeadCommand]) -> None:
        verified = event.verified
        flight = self._flights.pop(verified.segment, None)
        if flight is None:
            raise PeerError(f"segment {verified.segment} was verified, but it is not in flight")
        commands.append(Timed(hops=verified.hops))
        request = self._requests.get(flight.request)
        if request is not None and request.opening.epoch == flight.epoch:
            request.opened = True
            request.computed = max(request.computed, flight.end)
            request.known_length = max(request.known_length, flight.committed_length)
            reported = {node for part in verified.parts for node in part.ids if part.request == flight.request}
            if request.submit is not None and flight.root == request.tree.root and flight.root not in reported:
                raise PeerError(
                    f"segment {verified.segment} came back without the root of request {flight.request}, which is never dropped"
                )
        self._release_if_landed(flight.request, commands)
        for part in verified.parts:
            request = self._requests.get(part.request)
            if request is not None and request.submit is not None and request.opening.epoch == part.epoch:
                self._walk(request, request.submit, part, commands)

    def _walk(self, request: _Request, submit: Submit, part: VerifiedPart, commands: list[HeadCommand]) -> None:
        """Follow the output from the root as far as it is known now; emit it and commit it."""
        tree = request.tree
        request.next_tokens.update(zip(part.ids, part.next_tokens, strict=True))
        emitted: list[int] = []
        reason = ""
        while not reason and (token := request.next_tokens.pop(tree.root, None)) is not None:
            if token in submit.stop_ids:
                reason = "stop"
                break
            emitted.append(token)
            request.new_tokens.append(token)
            if submit.stop_rule is not None and submit.stop_rule.stops_at(request.new_tokens):
                reason = "stop"
            elif len(request.new_tokens) == submit.new_tokens_max or tree.committed_length + 1 == self.context:
                reason = "length"
            node = tree.child(tree.root, token)
            if node is None:
                node = tree.add(tree.root, token, 1.0)
            request.root_sent = tree.state(node) is NodeState.SENT
            for dead in tree.commit(node):
                request.next_tokens.pop(dead, None)
        if emitted:
            commands.append(Emit(request=submit.request, tokens=tuple(emitted)))
        if reason:
            self._end(request, reason, commands)

    # -------------------------------------------------------------------------------------------- sending

    def _fill(self, commands: list[HeadCommand]) -> None:
        """Send while the window has room: the requests take turns, each with its next chunk or its root."""
        idle = 0
        while self._turns and idle < len(self._turns) and self.in_flight < self.window:
            number = self._turns[0]
            self._turns.rotate(-1)
            part = self._next_part(self._requests[number])
            if part is None:
                idle += 1
                continue
            idle = 0
            request = self._requests[number]
            segment = Segment(segment=self._segments_sent, parts=(part,))
            self._segments_sent += 1
            root = request.tree.root if request.tree.root in part.ids else -1
            flight = _Flight(number, request.opening.epoch, part.positions[-1] + 1, request.tree.committed_length, root)
            self._flights[segment.segment] = flight
            commands.append(ToPipeline(segment=segment))

    def _next_part(self, request: _Request) -> Part | None:
        tree, opening = request.tree, request.opening
        if request.unsent < opening.length:
            nodes = tree.path[request.unsent : min(request.unsent + limits.PREFILL_CHUNK, opening.length)]
            request.unsent += len(nodes)
            request.root_sent = request.unsent == opening.length
            return self._part(request, nodes, prompt=True)
        if request.root_sent:
            return None
        request.root_sent = True
        return self._part(request, [tree.root], prompt=False)

    def _part(self, request: _Request, nodes: list[int], *, prompt: bool) -> Part:
        tree, opening = request.tree, request.opening
        path = tuple(tree.path[request.known_length :])
        return Part(
            commit=Commit(request=opening.request, epoch=opening.epoch, base=request.known_length, path=path),
            opening=None if request.opened else opening,
            ids=tuple(nodes),
            parents=tuple(tree.parent(n) for n in nodes),
            tokens=tuple(tree.token(n) for n in nodes),
            positions=tuple(tree.position(n) for n in nodes),
            committed=(prompt,) * len(nodes),
        )


def _common_prefix(first: list[int], second: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
