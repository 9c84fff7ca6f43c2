"""What is in flight: the segments that left the head and whose Verified is not back, in the order in which
they left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowspec.core.head.link_pacer import HOLD_S, LinkPacer
from flowspec.core.head.request import Request
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Logprobs, Release, Segment, SegmentPart, VerifiedPart
from flowspec.errors import PeerError
from flowspec.tree import NodeState

FLIGHTS_PER_STAGE_MAX = 4
"""Segments in flight per stage, dead ones included: they pass as headers, but each still passes."""
FREE_ROWS = 64
"""A link that brings over so many in time bounds nothing: nobody guesses more at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a head has in flight: segments (None: by the number of stages), and the rows of a prompt in
    one of them, at most and at first (None: no fewer, and nothing else is bounded by what links take).

    A segment keeps a link busy for about `hold_s` at most.
    """

    flights_max: int | None = None
    prefill_chunk: int = limits.PREFILL_CHUNK
    prefill_first: int | None = None
    hold_s: float = HOLD_S

    def flights(self, stage_count: int) -> int:
        """Segments that may be in flight in a pipeline of so many stages."""
        return self.flights_max or FLIGHTS_PER_STAGE_MAX * (stage_count + 2)

    def portions(self) -> LinkPacer:
        """How many rows go at once in a new pipeline; of a prompt no more than a chunk."""
        return LinkPacer(self.prefill_first, max(self.prefill_chunk, FREE_ROWS), self.hold_s)


@dataclass(frozen=True, slots=True)
class SentPart:
    """What one segment in flight carries of one request: once it is back, every stage has seen it.

    `end` is the position after its last committed row (0 without one). With it may go an Open by which the
    stages copy from a `source` (-1: none).
    """

    request: int
    epoch: int
    end: int
    committed_length: int
    nodes: tuple[int, ...]
    is_prompt: bool
    source: int = -1

    def drawn(self, part: VerifiedPart | None, vocabulary: int) -> dict[int, int]:
        """Next token by node as the last stage says; what it says of an older epoch does not count.

        Raises `PeerError` for nodes that the segment did not carry, and for tokens that the model does not
        have.
        """
        if part is None or part.epoch != self.epoch:
            return {}
        strange = set(part.ids).difference(self.nodes)
        if strange:
            raise PeerError(
                f"node {min(strange)} of request {self.request} was verified, but the segment did not carry "
                "it"
            )
        if max(part.next_tokens, default=0) >= vocabulary:
            raise PeerError(f"expected next tokens below {vocabulary}, got {max(part.next_tokens)}")
        return dict(zip(part.ids, part.next_tokens, strict=True))

    def logprobs(self, part: VerifiedPart | None, top: int, vocabulary: int) -> dict[int, Logprobs]:
        """What came with the next tokens, by node, where the answer wants those of the `top` likeliest (-1:
        none).

        Raises `PeerError` for other log-probabilities than these.
        """
        if part is None or part.epoch != self.epoch:
            return {}
        wanted = len(part.ids) if top >= 0 else 0
        if len(part.logprobs) != wanted:
            raise PeerError(
                f"expected log-probabilities of {wanted} tokens of request {self.request}, got "
                f"{len(part.logprobs)}"
            )
        for each in part.logprobs:
            if len(each.ids) > top or max(each.ids, default=0) >= vocabulary:
                raise PeerError(f"expected at most {top} likeliest tokens below {vocabulary}, got {each.ids}")
        return dict(zip(part.ids, part.logprobs, strict=False))


def embark(
    request: Request, nodes: list[int], *, is_prompt: bool, window: int
) -> tuple[SegmentPart, SentPart]:
    """What a segment carries of a request, as the stages and as the head see it; the nodes count as sent."""
    tree = request.tree
    if not is_prompt:
        request.root_sent = request.root_sent or nodes[0] == tree.root
        tree.mark_sent(nodes)
        request.statistics.sent(len(nodes), window)
    part = request.part(nodes, is_prompt=is_prompt)
    last_committed = nodes[-1] if is_prompt else nodes[0]
    end = tree.position(last_committed) + 1 if is_prompt or last_committed == tree.root else 0
    request.in_flight += 1
    return part, SentPart(
        request.number,
        request.opening.epoch,
        end,
        tree.committed_length,
        tuple(nodes),
        is_prompt,
        -1 if part.opening is None else part.opening.source,
    )


@dataclass(frozen=True, slots=True)
class SentSegment:
    """A segment in flight; its rows see `context` earlier tokens, as in `RunLayers`."""

    loads: tuple[SentPart, ...]
    sent_s: float
    rows: int
    context: int
    releases: tuple[Release, ...] = ()


class SegmentsInFlight:
    """The flights of one head, whose conversations are `requests`.

    `releases` are those that every stage is not yet known to have: each segment takes them along until one
    that did is back.
    """

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self._requests = requests
        self._flights: dict[int, SentSegment] = {}
        self._departed = 0
        self.releases: tuple[Release, ...] = ()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def rows(self) -> int:
        """Of all of them."""
        return sum(flight.rows for flight in self._flights.values())

    @property
    def oldest_s(self) -> float | None:
        """When the oldest one left; None without any."""
        return next((flight.sent_s for flight in self._flights.values()), None)

    @property
    def oldest(self) -> tuple[int, int]:
        """The number and the rows of the segment that left first of those in flight; -1 and none without
        any."""
        return next(((number, flight.rows) for number, flight in self._flights.items()), (-1, 0))

    def depart(self, loads: Sequence[tuple[Request, list[int], bool]], window: int, now_s: float) -> Segment:
        """The segment that carries these nodes of each request, which say whether they are of its prompt; it
        is in flight from now on."""
        boarded = [
            embark(request, nodes, is_prompt=is_prompt, window=window) for request, nodes, is_prompt in loads
        ]
        segment = Segment(
            segment=self._departed,
            parts=tuple(part for part, _ in boarded),
            releases=self.releases[: limits.LIST_MAX],
        )
        self._departed += 1
        context = sum(min(part.positions, default=0) for part in segment.parts)
        loaded = tuple(load for _, load in boarded)
        self._flights[segment.segment] = SentSegment(
            loaded, now_s, segment.row_count, context, segment.releases
        )
        return segment

    def land(self, segment: int) -> SentSegment:
        """The flight of a segment that is back; raises `PeerError` for one that is not in flight."""
        flight = self._flights.pop(segment, None)
        if flight is None:
            raise PeerError(f"segment {segment} was verified, but it is not in flight")
        if flight.releases:
            self.releases = tuple(release for release in self.releases if release not in flight.releases)
        return flight

    def clear(self) -> None:
        """The pipeline is gone: none of them comes back."""
        self._flights.clear()
        self.releases = ()

    def validate(self) -> None:
        """What is true between two events; raises `AssertionError`.

        Of each conversation: no node is on two segments at once, none that goes out has its parent behind it,
        and while guesses of an answer that is over are in flight, the stages know that it is.
        """
        seen: dict[int, set[int]] = {number: set() for number in self._requests}
        counts = dict.fromkeys(self._requests, 0)
        guessed: set[int] = set()
        for flight in self._flights.values():
            assert flight.rows, "a segment without rows is in flight"
            for load in flight.loads:
                request = self._requests.get(load.request)
                if request is None or request.opening.epoch != load.epoch:
                    continue
                counts[load.request] += 1
                tree, known = request.tree, seen[load.request]
                for node in load.nodes:
                    assert node not in known, f"node {node} of request {load.request} is in flight twice"
                    known.add(node)
                    state = tree.state(node)
                    assert state is not NodeState.DRAFTED, (
                        f"node {node} of request {load.request} is in flight, and not sent"
                    )
                    if state is not NodeState.COMMITTED:
                        guessed.add(load.request)
                    if state is NodeState.SENT:
                        above = tree.state(tree.parent(node))
                        is_out = above in (NodeState.SENT, NodeState.COMMITTED)
                        assert is_out, f"node {node} of request {load.request} is sent before its parent"
        for number, request in self._requests.items():
            assert request.in_flight == counts[number], (
                f"request {number} is in {counts[number]} segments, not {request.in_flight}"
            )
            is_known = request.submit is not None or request.is_end_told or number not in guessed
            assert is_known, f"no stage is told of the end of request {number}, which has guesses in flight"

    def carry(self, request: int) -> bool:
        """Whether any of them carries something of a request, or an Open that copies from it."""
        return any(
            request in (load.request, load.source)
            for flight in self._flights.values()
            for load in flight.loads
        )

    def copy(self, request: int) -> bool:
        """Whether any of them carries an Open that copies from a request, or to it."""
        return any(
            load.source >= 0 and request in (load.request, load.source)
            for flight in self._flights.values()
            for load in flight.loads
        )

    def have_guesses(self, request: Request) -> bool:
        """Whether any of them carries nodes of an answer that are not its output; they may be dead, but the
        stages may not know it yet."""
        number, epoch, tree = request.number, request.opening.epoch, request.tree
        loads = (
            load
            for flight in self._flights.values()
            for load in flight.loads
            if (load.request, load.epoch) == (number, epoch)
        )
        return any(tree.state(node) is not NodeState.COMMITTED for load in loads for node in load.nodes)

    def count_living(self) -> int:
        """Those that carry anything that can still matter; what is dead passes the stages as a header."""
        return sum(self._is_living(flight) for flight in self._flights.values())

    def _is_living(self, flight: SentSegment) -> bool:
        for load in flight.loads:
            request = self._requests.get(load.request)
            is_current = (
                request is not None and request.submit is not None and request.opening.epoch == load.epoch
            )
            if (
                request is not None
                and is_current
                and (load.is_prompt or any(map(request.is_living, load.nodes)))
            ):
                return True
        return False
