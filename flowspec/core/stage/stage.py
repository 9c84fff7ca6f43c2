"""A stage's mind: what is committed, alive or dead here, what runs next, what goes on to the next hop.

Owns the order of segments, the life of nodes and their slots. Never sees a tensor: payloads are handles,
computing is a command. The rules (docs/architecture.md):

- A row flagged `committed`, or named by a Commit, is committed. Any other row is alive iff its parent is the
  root or alive; an unknown parent means dead, never an error.
- Commits may come early (they wait for their nodes), late or twice. They are cumulative, and every segment
  repeats the newest one. A late Commit costs wasted rows, never a wrong token.
- Dead rows leave before a segment runs, between the layers of the running one (`Trim`), and before it is sent
  on.
- The last stage draws the next tokens, so it learns first: a row whose parent drew another token is dead here
  at once. Segments come in order and parents before children, so what it reports is always a piece of the
  output's path.
- A Commit that says that the answer is over kills whatever is not committed, and nothing but committed rows
  is admitted in that epoch any more: the keys and values of these are for the next turn. All else that it
  says counts as ever, and repeats change nothing.
- Messages of an older epoch are dropped, an Open of one that was released, too; an Open of a newer one
  rewinds. One with a source begins with a copy of the path of that other request, as far as it says.
- What is captured of a row for drafters at the head is kept with its node, and goes there once that is known
  to be committed: with the job that ran a committed row, with the Commit that names a guess, and on the last
  stage, which knows first, with what it reports. What is dead takes it along.
- Layers with a sliding window hold what rows to come may see, and how far a request may go back
  (`sliding_window`). The rest is given back before a segment runs.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Open, Release, SegmentPart
from flowspec.core.protocol.model_spec import HeldPositions, SlidingWindow
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    Copied,
    JobPart,
    LayerEnded,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendFeatures,
    SendSegment,
    SendVerified,
    StageCommand,
    StageEvent,
    Trim,
    WindowPart,
)
from flowspec.core.stage.job import Job, features, hop_of, onward, verified
from flowspec.core.stage.path import living_below, newly_committed
from flowspec.core.stage.slots import SlotMap, WindowSlots
from flowspec.errors import PeerError

RULES = {
    "released": "an Open of a conversation that was released is ignored",
    "rewound": "an Open of a newer epoch ends the older one",
    "copied": "a request begins with a copy of what another one begins with",
    "stale": "a Commit of another epoch, or of what is not held here, is ignored",
    "early": "a Commit names a node that has not come yet",
    "over": "guesses of an answer that is over are dropped",
    "dead on arrival": (
        "a row is dropped before it runs: nothing above it lives, or it holds another token than was drawn"
    ),
    "trimmed": "rows leave a segment that runs",
    "further": (
        "a segment that runs has got further by a layer: how long it has been running counts from there"
    ),
    "drawn otherwise": "the last stage drew another token than a guess holds",
    "passed on": "a segment of which nothing lives passes on at once",
    "dead late": "rows that ran are dropped before they are sent on",
    "given back": "layers with a sliding window give back what no row to come sees",
    "features": "what was captured of committed rows goes to the head with the job that ran them",
    "features later": "what was captured of guesses goes to the head once these are committed",
    "restored": "a prompt goes on within the one before, whose end layers with a sliding window kept",
}
"""What is decided here, by name; `StageCore.fired` counts."""


@dataclass(slots=True)
class _Node:
    """`drawn` is the next token after this node, -1 while the last stage does not know it (other stages never
    do). `captured` is what drafters want of a guess that has run, until it is sent (None: nothing)."""

    parent: int
    token: int
    slot: int
    committed: bool
    drawn: int = -1
    captured: Any = None


@dataclass(slots=True)
class _Windowed:
    """The slots of layers with a sliding window, and which positions of the output's path they hold."""

    slots: WindowSlots
    held: HeldPositions


@dataclass(slots=True)
class _Request:
    """One request's state at this stage. `nodes` holds the root and the living nodes below it, no others;
    once `is_over`, the root at most.

    `run_length` positions of the output's path are in its slots.
    """

    opening: Open
    slots: SlotMap
    windowed: _Windowed | None
    committed_length: int
    root: int
    run_length: int
    nodes: dict[int, _Node] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)
    is_over: bool = False

    def branch(self, node: int, slot: int) -> list[int]:
        """The node's own slot and those of its ancestors that are not committed."""
        found = [slot]
        known = self.nodes.get(node)
        while known is not None and not known.committed:
            known = self.nodes.get(known.parent)
            if known is not None and not known.committed:
                found.append(known.slot)
        return found


class StageCore:
    """Event in, commands out; see the module for the rules and `events` for the vocabulary."""

    def __init__(
        self,
        *,
        is_last: bool,
        slots_max: int,
        queued_max: int = limits.QUEUED_SEGMENTS_MAX,
        sliding_window: SlidingWindow | None = None,
    ) -> None:
        """`sliding_window` is that of the layers that have one (None: all hold all)."""
        self.is_last = is_last
        self.sliding_window = sliding_window
        self.queued_max = queued_max
        self.slots_max = slots_max
        self.fired: Counter[str] = Counter()
        self._requests: dict[int, _Request] = {}
        self._released: dict[int, int] = {}
        self._queue: deque[SegmentArrived] = deque()
        self._queued_bytes = 0
        self._job: Job | None = None
        self._jobs_done = 0
        self._free_since_s = 0.0
        self._further_s = 0.0
        self.arrived = -1

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def done(self) -> int:
        return self._jobs_done

    def running_s(self, now_s: float) -> float:
        """How long ago the segment that runs began, or last got further by a layer; 0 while none runs."""
        return 0.0 if self._job is None else max(0.0, now_s - max(self._job.started_s, self._further_s))

    def requests(self) -> list[int]:
        return list(self._requests)

    def slot_maps(self) -> dict[int, SlotMap]:
        """Which slot of each cache holds what, by request; for those who watch."""
        return {number: request.slots for number, request in self._requests.items()}

    def handle(self, event: StageEvent, now_s: float) -> list[StageCommand]:
        """The only mutator. Raises `PeerError` when a message breaks the protocol."""
        commands: list[StageCommand] = []
        if isinstance(event, SegmentArrived):
            if len(self._queue) >= self.queued_max:
                raise PeerError(f"expected at most {self.queued_max} segments in the queue, one more came")
            self._queued_bytes += event.payload_bytes
            self.arrived = event.segment.segment
            if self._queued_bytes > limits.QUEUED_BYTES_MAX:
                raise PeerError(
                    f"expected payloads of at most {limits.QUEUED_BYTES_MAX} bytes in the queue, got "
                    f"{self._queued_bytes}"
                )
            for release in event.segment.releases:
                self._control(release, commands)
            for part in event.segment.parts:
                self._learn(part, commands)
            self._queue.append(event)
        elif isinstance(event, ControlArrived):
            self._control(event.message, commands)
        elif isinstance(event, LayerEnded):
            if self._job is not None and self._job.number == event.job:
                self.fired["further"] += 1
                self._further_s = event.at_s
        else:
            self._finish(event, now_s, commands)
        while self._job is None and self._queue:
            self._start(self._queue.popleft(), now_s, commands)
        return commands

    def validate(self, *, is_honest: bool = True) -> None:
        """What is true between two events; raises `AssertionError`. Of a head that is not `is_honest` less
        can be said."""
        assert len(self._queue) <= self.queued_max, f"{len(self._queue)} segments wait"
        assert not self._queue or self._job is not None, "segments wait, and nothing runs"
        queued_bytes = sum(each.payload_bytes for each in self._queue)
        assert queued_bytes == self._queued_bytes, (
            f"{queued_bytes} bytes wait, {self._queued_bytes} are counted"
        )
        assert len(self._requests) <= limits.REQUESTS_MAX, f"{len(self._requests)} requests are open"
        for number, request in self._requests.items():
            slots = request.slots
            slots.validate()
            if request.windowed is not None:
                request.windowed.slots.validate()
            position, is_committed = slots.position[: slots.high], slots.committed[: slots.high]
            living = sorted(node.slot for node in request.nodes.values() if not node.committed)
            assert all(node.captured is None for node in request.nodes.values() if node.committed), (
                f"features of committed nodes of request {number} were not sent"
            )
            assert not (request.is_over and living), (
                f"guesses are kept of an answer of request {number} that is over"
            )
            guesses = np.flatnonzero(~is_committed & (position >= 0)).tolist()
            assert guesses == living, f"the slots of request {number} and its living nodes differ"
            path = position[is_committed]
            if not is_honest:
                continue
            assert len(np.unique(path)) == len(path), (
                f"two committed nodes of request {number} at one position"
            )
            assert path.max(initial=-1) < request.committed_length, (
                f"request {number} is committed past its path"
            )
            if (windowed := request.windowed) is not None:
                held, of = windowed.held, windowed.slots.held[: windowed.slots.high]
                expected = [
                    slot
                    for slot in slots.from_position(min(held.given_back, held.snapshot))
                    if position[slot] >= held.given_back or position[slot] in held.prompt
                ]
                assert sorted(of[of >= 0].tolist()) == expected, (
                    f"layers with a window hold other slots of request {number} than those from position "
                    f"{held.given_back} on, and of the prompt from {held.snapshot} on"
                )

    # ------------------------------------------------------------------------------------------- control

    def _control(self, message: Open | Commit | Release, commands: list[StageCommand]) -> None:
        if isinstance(message, Open):
            self._open(message, commands)
        elif isinstance(message, Commit):
            self._commit(message, commands)
        else:
            self._released[message.request] = max(message.epoch, self._released.pop(message.request, -1))
            if len(self._released) > limits.REQUESTS_MAX:
                del self._released[next(iter(self._released))]  # the oldest
            if (
                known := self._requests.get(message.request)
            ) is not None and known.opening.epoch <= message.epoch:
                del self._requests[message.request]
                commands.append(CloseCache(request=message.request))

    def _learn(self, part: SegmentPart, commands: list[StageCommand]) -> None:
        if part.opening is not None:
            self._open(part.opening, commands)
        self._commit(part.commit, commands)

    def _open(self, opening: Open, commands: list[StageCommand]) -> None:
        if opening.epoch <= self._released.get(opening.request, -1):
            self.fired["released"] += 1
            return  # a segment that brought the Release was faster
        known = self._requests.get(opening.request)
        if opening.source >= 0 and (known is None or opening.epoch > known.opening.epoch):
            self._open_copy(opening, known, commands)
        elif known is None:
            if opening.keep:
                raise PeerError(
                    f"request {opening.request} keeps {opening.keep} tokens, but nothing of it is held here"
                )
            self._check_room(opening)
            slots, windowed = SlotMap(opening.slots), None
            if (window := self.sliding_window) is not None:
                window_slots = WindowSlots(min(opening.slots, window.slots))
                windowed = _Windowed(window_slots, window.nothing_run(opening.length))
            self._requests[opening.request] = _Request(
                opening, slots, windowed, opening.length, opening.root, run_length=0
            )
            commands.append(
                OpenCache(
                    request=opening.request,
                    slots=opening.slots,
                    window_slots=0 if windowed is None else windowed.slots.capacity,
                )
            )
        elif opening.epoch > known.opening.epoch:
            if opening.slots != known.slots.capacity:
                raise PeerError(
                    f"expected {known.slots.capacity} slots as when request {opening.request} was opened, "
                    f"got {opening.slots}"
                )
            if (windowed := known.windowed) is not None:
                _check_keepable(opening, windowed.held)
            self.fired["rewound"] += 1
            self._kill(known, opening.request, set(known.nodes), commands)
            _free(known, known.slots.from_position(opening.keep), commands)
            request = self._requests[opening.request] = _Request(
                opening,
                known.slots,
                known.windowed,
                opening.length,
                opening.root,
                run_length=opening.keep,
            )
            if windowed is not None:
                first = windowed.held.given_back
                windowed.held = windowed.held.keep(opening.keep, opening.length)
                self._go_back(request, windowed, first, commands)

    def _check_room(self, opening: Open, *, is_new: bool = True) -> None:
        """Raises `PeerError` for a request that is one too many, or too large."""
        if is_new and len(self._requests) >= limits.REQUESTS_MAX:
            raise PeerError(f"expected at most {limits.REQUESTS_MAX} requests at once, one more came")
        if opening.slots > self.slots_max:
            raise PeerError(
                f"expected at most {self.slots_max} slots for a request, as assigned, got {opening.slots}"
            )

    def _open_copy(self, opening: Open, known: _Request | None, commands: list[StageCommand]) -> None:
        """A request begins with a copy of what its source begins with; of its own last epoch, which is
        `known`, it keeps nothing."""
        source = self._requests.get(opening.source)
        if source is None:
            raise PeerError(
                f"request {opening.request} keeps {opening.keep} tokens of request {opening.source}, but "
                "nothing of that is held here"
            )
        if source.run_length < opening.keep:
            raise PeerError(
                f"request {opening.request} keeps {opening.keep} tokens of {opening.source}, of which "
                f"{source.run_length} have run here"
            )
        if source.windowed is not None:
            _check_keepable(opening, source.windowed.held)
        self._check_room(opening, is_new=known is None)
        slots, of = source.slots.copy_path(opening.keep, opening.slots)
        if known is not None:
            self._kill(known, opening.request, set(known.nodes), commands)
            commands.append(CloseCache(request=opening.request))
        self.fired["copied"] += 1
        windowed, window_of = None, np.zeros(0, dtype=np.int64)
        if source.windowed is not None:
            held = source.windowed.held
            window_slots, window_of = source.windowed.slots.copy_path(
                of, min(opening.slots, held.window.slots)
            )
            windowed = _Windowed(window_slots, held.keep(opening.keep, opening.length))
        request = self._requests[opening.request] = _Request(
            opening, slots, windowed, opening.length, opening.root, run_length=opening.keep
        )
        commands.append(
            OpenCache(
                request=opening.request,
                slots=opening.slots,
                window_slots=0 if windowed is None else windowed.slots.capacity,
                copied=Copied(source=opening.source, slots=of, window_slots=window_of),
            )
        )
        if source.windowed is not None and windowed is not None:
            self._go_back(request, windowed, source.windowed.held.given_back, commands)

    def _go_back(
        self, request: _Request, windowed: _Windowed, first: int, commands: list[StageCommand]
    ) -> None:
        """An answer begins; until now positions before `first` had been given back."""
        is_restored = request.opening.keep > 0 and windowed.held.given_back < first
        self.fired["restored"] += is_restored
        gone = _free_below(request, windowed, windowed.held.given_back)
        if gone or is_restored:
            commands.append(
                ClearSlots(
                    request=request.opening.request,
                    slots=(),
                    window_slots=gone,
                    snapshot="restore" if is_restored else "",
                )
            )

    def _commit(self, commit: Commit, commands: list[StageCommand]) -> None:
        request = self._requests.get(commit.request)
        if request is None or commit.epoch != request.opening.epoch:
            self.fired["stale"] += 1
            return
        if commit.length > request.committed_length:
            self._extend(request, commit, commands)
        if commit.is_over:
            self.fired["over"] += not request.is_over
            request.is_over = True
            self._kill(
                request,
                commit.request,
                {node for node, known in request.nodes.items() if not known.committed},
                commands,
            )

    def _extend(self, request: _Request, commit: Commit, commands: list[StageCommand]) -> None:
        fresh = newly_committed(commit, request.committed_length)
        if commit.length > request.slots.capacity:
            raise PeerError(
                f"a Commit of {commit.length} tokens of a request that reserved {request.slots.capacity} "
                "slots"
            )
        captured: list[tuple[int, Any]] = []
        for node in fresh:
            known = request.nodes.get(node)
            if known is None:
                self.fired["early"] += 1
                request.early.add(node)
            else:
                known.committed = True
                if known.captured is not None:
                    captured.append((node, known.captured))
                    known.captured = None
                request.slots.committed[known.slot] = True
                request.run_length = max(request.run_length, int(request.slots.position[known.slot]) + 1)
        request.committed_length = commit.length
        request.root = fresh[-1]
        if captured:
            self.fired["features later"] += 1
            commands += features(commit.request, commit.epoch, captured)
        self._prune(request, commit.request, commands)

    def _prune(self, request: _Request, number: int, commands: list[StageCommand]) -> None:
        """Keep the root and what lives below it."""
        living = living_below(request.root, ((node, known.parent) for node, known in request.nodes.items()))
        passed = [n for n, known in request.nodes.items() if known.committed and n not in living]
        for node in passed:
            del request.nodes[node]
        self._kill(request, number, {n for n in request.nodes if n not in living}, commands)

    def _kill(self, request: _Request, number: int, nodes: set[int], commands: list[StageCommand]) -> None:
        """Nodes are dead: free the slots of those that are not committed, and trim them from the running
        job."""
        gone = [request.nodes[n].slot for n in sorted(nodes) if not request.nodes[n].committed]
        for node in nodes:
            del request.nodes[node]
        _free(request, gone, commands)
        job = self._job
        if job is None:
            return
        rows = [
            row
            for row, (part, index) in enumerate(job.rows)
            if row not in job.dead
            and job.segment.parts[part].commit.request == number
            and job.segment.parts[part].ids[index] in nodes
            and not job.segment.parts[part].committed[index]
        ]
        if rows:
            self.fired["trimmed"] += 1
            job.dead.update(rows)
            commands.append(Trim(job=job.number, rows=tuple(rows)))

    # ------------------------------------------------------------------------------------------ segments

    def _start(self, arrived: SegmentArrived, now_s: float, commands: list[StageCommand]) -> None:
        """Begin the oldest segment with the rows that live; one without such rows passes on at once."""
        segment = arrived.segment
        self._queued_bytes -= arrived.payload_bytes
        queued_s = max(0.0, self._free_since_s - arrived.received_s)
        rows: list[tuple[int, int]] = []
        payload_rows: list[int] = []
        parts: list[JobPart] = []
        offset = 0
        for number, part in enumerate(segment.parts):
            request = self._requests.get(part.commit.request)
            if request is not None and part.commit.epoch == request.opening.epoch:
                self._give_back(request, commands)
                admitted = [
                    (row, slot)
                    for row in range(len(part.ids))
                    if (slot := self._admit(request, part, row)) is not None
                ]
                if admitted:
                    parts.append(_job_part(request, part, admitted, draws=self.is_last))
                    rows += [(number, row) for row, _ in admitted]
                    payload_rows += [offset + row for row, _ in admitted]
            offset += len(part.ids)
        job = Job(self._jobs_done + 1, segment, rows, set(), arrived.received_s, queued_s, now_s)
        if rows:
            self._job = job
            commands.append(
                RunLayers(
                    job=job.number, parts=tuple(parts), payload=arrived.payload, rows=tuple(payload_rows)
                )
            )
        else:
            self.fired["passed on"] += 1
            done = LayersDone(
                job=job.number, rows=(), payload=None, next_tokens=(), started_s=now_s, ended_s=now_s
            )
            commands.append(self._pass_on(job, done, now_s))

    def _give_back(self, request: _Request, commands: list[StageCommand]) -> None:
        """Rows to come follow what was run of the output's path: layers with a window keep what these see,
        and how far the request may go back."""
        if (windowed := request.windowed) is None:
            return
        first, held = windowed.held.given_back, windowed.held.run(request.run_length)
        windowed.held = held
        if held.given_back == first:
            return
        self.fired["given back"] += 1
        is_at_snapshot = bool(held.prompt) and first <= held.snapshot < held.given_back
        if is_at_snapshot and first < held.snapshot:
            commands.append(_pass_by(request, windowed, first, held.snapshot, ""))
            first = held.snapshot
        commands.append(_pass_by(request, windowed, first, held.given_back, "take" if is_at_snapshot else ""))

    def _admit(self, request: _Request, part: SegmentPart, row: int) -> int | None:
        """The slot of a row that lives, or None."""
        node, parent = part.ids[row], part.parents[row]
        committed = part.committed[row] or node in request.early or node == request.root
        position, slots, run = part.positions[row], request.slots, request.run_length
        if committed:
            is_next = position == run or (position < run and not slots.is_committed_at(position))
        else:
            above = request.nodes.get(parent)
            if request.is_over or above is None or above.drawn not in (-1, part.tokens[row]):
                self.fired["dead on arrival"] += 1
                return None
            is_next = position == slots.position[above.slot] + 1
        if node in request.nodes:
            raise PeerError(f"node {node} of request {part.commit.request} came twice")
        request.early.discard(node)
        if position >= slots.capacity:
            raise PeerError(
                f"node {node} at position {position} of a request that reserved {slots.capacity} slots"
            )
        if not is_next:
            raise PeerError(
                f"node {node} of request {part.commit.request} at position {position}, which does not follow "
                "its parent's"
            )
        slot = slots.allocate(position, committed=committed, token=part.tokens[row])
        if committed:
            request.run_length = max(run, position + 1)
        if node == request.root or not committed:
            request.nodes[node] = _Node(parent, part.tokens[row], slot, committed)
        return slot

    def _finish(self, event: LayersDone, now_s: float, commands: list[StageCommand]) -> None:
        job, self._job = self._job, None
        assert job is not None, f"job {event.job} ended, but none runs"
        assert job.number == event.job, f"job {event.job} ended, but {job.number} runs"
        self._jobs_done += 1
        self._free_since_s = now_s
        if self.is_last:
            self._walk(job, event, commands)
        commands += self._captured(job, event)
        commands.append(self._pass_on(job, event, now_s))

    def _captured(self, job: Job, done: LayersDone) -> list[SendFeatures]:
        """What was captured of rows that are committed, or that the last stage found on the path, goes to the
        head; the other living nodes keep it."""
        found: dict[int, list[tuple[int, Any]]] = {}
        for row, captured in zip(done.rows, done.captured, strict=bool(done.captured)):
            number, index = job.rows[row]
            part = job.segment.parts[number]
            if row in job.dead or not self._is_current(part):
                continue
            known = self._requests[part.commit.request].nodes.get(part.ids[index])
            if known is None or known.committed or self.is_last:  # a committed row above the root is not kept
                found.setdefault(number, []).append((part.ids[index], captured))
            else:
                known.captured = captured
        self.fired["features"] += bool(found)
        commits = {number: job.segment.parts[number].commit for number in found}
        return [
            sent
            for at, own in found.items()
            for sent in features(commits[at].request, commits[at].epoch, own)
        ]

    def _walk(self, job: Job, done: LayersDone, commands: list[StageCommand]) -> None:
        """Note the tokens drawn; the children that hold others are dead, rows of this job among them."""
        wrong: dict[int, set[int]] = {}
        for row, token in zip(done.rows, done.next_tokens, strict=True):
            part = job.segment.parts[job.rows[row][0]]
            request = self._requests.get(part.commit.request)
            if request is not None and self._is_current(part) and token >= 0:
                known = request.nodes.get(part.ids[job.rows[row][1]])
                if known is not None:
                    known.drawn = token
                    wrong.setdefault(part.commit.request, set())
        for number, dead in wrong.items():
            request = self._requests[number]
            for node in sorted(request.nodes):
                known = request.nodes[node]
                above = request.nodes.get(known.parent)
                if above is not None and (known.parent in dead or above.drawn not in (-1, known.token)):
                    dead.add(node)
            job.dead |= {
                row
                for row, (part_number, index) in enumerate(job.rows)
                if job.segment.parts[part_number].commit.request == number
                and job.segment.parts[part_number].ids[index] in dead
            }
            self.fired["drawn otherwise"] += bool(dead)
            self._kill(request, number, dead, commands)

    def _pass_on(self, job: Job, done: LayersDone, now_s: float) -> SendSegment | SendVerified:
        """What leaves this stage: the rows that survived the layers and are still alive."""
        segment = job.segment
        alive = [
            (index, job.rows[row])
            for index, row in enumerate(done.rows)
            if row not in job.dead and self._is_current(segment.parts[job.rows[row][0]])
        ]
        self.fired["dead late"] += len(alive) < len(done.rows)
        hops = (*segment.hops, hop_of(job, done, len(alive), now_s))
        return verified(job, done, alive, hops) if self.is_last else onward(job, done, alive, hops)

    def _is_current(self, part: SegmentPart) -> bool:
        request = self._requests.get(part.commit.request)
        return request is not None and request.opening.epoch == part.commit.epoch


def _check_keepable(opening: Open, held: HeldPositions) -> None:
    """Raises `PeerError` where layers with a window have given back what rows behind the kept ones see."""
    if held.keepable(opening.keep) < opening.keep:
        raise PeerError(
            f"request {opening.request} keeps {opening.keep} tokens, but layers with a window of "
            f"{held.window.tokens} hold nothing before {held.given_back} here"
        )


def _free(request: _Request, slots: list[int], commands: list[StageCommand]) -> None:
    """Frees slots of a request, in layers with a window, too."""
    if slots:
        request.slots.free(slots)
        window_slots = [] if request.windowed is None else request.windowed.slots.free_of(slots)
        commands.append(
            ClearSlots(request=request.opening.request, slots=tuple(slots), window_slots=tuple(window_slots))
        )


def _free_below(request: _Request, windowed: _Windowed, position: int) -> tuple[int, ...]:
    """The slots that layers with a window held of earlier positions, but for the prompt's end; they are
    free."""
    return tuple(windowed.slots.free_below(position, request.slots.position, windowed.held.prompt))


def _pass_by(
    request: _Request, windowed: _Windowed, first: int, below: int, snapshot: Literal["", "take"]
) -> ClearSlots:
    """Positions from `first` on and before `below` are given back."""
    seen = range(first, below + windowed.held.window.tokens - 1)
    return ClearSlots(
        request=request.opening.request,
        slots=(),
        passed=tuple(windowed.slots.path_in(seen, request.slots)),
        window_slots=_free_below(request, windowed, below),
        snapshot=snapshot,
    )


def _job_part(
    request: _Request, part: SegmentPart, admitted: list[tuple[int, int]], *, draws: bool
) -> JobPart:
    """The rows of one request as the executor needs them; called once all of them have their slots. Whoever
    `draws` is told the text, too, where it is needed for that."""
    rows = [row for row, _ in admitted]
    slots = [slot for _, slot in admitted]
    nodes = [part.ids[row] for row in rows]
    positions = [part.positions[row] for row in rows]
    branches = [request.branch(node, slot) for node, slot in zip(nodes, slots, strict=True)]
    known = [request.nodes.get(node) for node in nodes]
    sampled = [
        node == request.root or (entry is not None and not entry.committed)
        for node, entry in zip(nodes, known, strict=True)
    ]
    window = None
    if request.windowed is not None:
        of = request.windowed.slots
        own = np.array(of.give(slots), dtype=np.int64)
        window = WindowPart(slots=own, held=of.held[: of.high].copy())
    return JobPart(
        request=part.commit.request,
        slots=np.array(slots, dtype=np.int64),
        tokens=np.array([part.tokens[row] for row in rows], dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        key_positions=request.slots.position[: request.slots.high].copy(),
        visible=request.slots.visible(positions, branches),
        sampled=np.array(sampled, dtype=bool),
        sampling=request.opening.sampling,
        top_logprobs=request.opening.top_logprobs,
        window=window,
        committed=request.run_length,
        slot_tokens=request.slots.tokens[: request.slots.high].copy()
        if draws and request.opening.sampling.needs_text
        else None,
        answer_start=request.opening.answer_start,
    )
