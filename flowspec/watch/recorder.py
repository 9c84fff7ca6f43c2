"""From what the head does to frames, things that happened, which people and pages look at
(`docs/watching.md`).

Two threads meet here. The head's calls the recorder with every event, and only copies what would change: rows
of the trees' tables that are new, what was committed. Another one calls `frames` now and then, and does what
takes time: text, values, instants of trips, figures. In virtual time both are one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flowspec.core.head.events import (
    Drafted,
    Emit,
    Finished,
    HeadCommand,
    HeadEvent,
    PipelineLost,
    PipelineReformed,
    SegmentTimed,
    SendToFirstStage,
    Submit,
)
from flowspec.core.head.request import Request
from flowspec.core.protocol.messages import Segment
from flowspec.watch.detokenizer import Decode, Detokenizer, IncrementalDetokenizer
from flowspec.watch.figures import EVERY_S, Figures, Frame
from flowspec.watch.state import WatchState
from flowspec.watch.trips import trip_of

MOMENTS_MAX = 20_000
"""Events that wait for a reader; one that comes too late begins again with the present."""
PROMPT_CHARACTERS = 200

StageRows = list[dict[str, Any]]
"""The pipeline: `{"name", "layers": [first, end]}` for each stage."""


_Extent = tuple[int, int, int, int]
"""How much of an answer is seen: rows of its table, of what was dropped, of its path; and its epoch."""


@dataclass(slots=True)
class _Look:
    """What is new of an answer. With `begun` it is all new, and `living` are its guesses; with `is_again` the
    pipeline holds nothing of it now."""

    request: int
    root: tuple[int, int, int]
    root_log_value: float
    begun: Submit | None = None
    reused: int = 0
    is_again: bool = False
    first: int = 0
    table: tuple[list[int], list[int], list[float]] = ([], [], [])
    dropped: list[int] = field(default_factory=list)
    path: list[tuple[int, int]] = field(default_factory=list)
    living: list[tuple[int, int, int, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Moment:
    """An event, what came of it, and what there was to see."""

    now_s: float
    event: HeadEvent
    commands: Sequence[HeadCommand]
    looks: list[_Look]
    reports: dict[int, dict[str, Any]]
    stages: StageRows | None
    has_missed: bool


class Recorder:
    """See the module. `requests` are the head core's, `stages` tells what runs where; both are called in the
    head's thread only.

    Instants of frames count from `origin_s` of the head's clock, None: from the first event.
    """

    def __init__(
        self,
        requests: Callable[[], Iterable[Request]],
        stages: Callable[[], StageRows],
        decode: Decode,
        origin_s: float | None = None,
    ) -> None:
        self.present = WatchState()
        self._requests = requests
        self._stages = stages
        self._first_stages: StageRows | None = stages()
        self._origin_s = origin_s
        self._moments: deque[_Moment] = deque()
        self._seen: dict[int, tuple[Submit, _Extent]] = {}
        self._detokenizer = Detokenizer(decode)
        self._figures = Figures()
        self._running: dict[int, IncrementalDetokenizer] = {}
        self._sent: set[int] = set()
        self._t = 0.0
        self._figures_due_s = EVERY_S

    # ------------------------------------------------------------------------------------- the head's thread

    def __call__(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        has_missed = len(self._moments) >= MOMENTS_MAX
        if has_missed:
            self._moments.clear()
            self._seen.clear()
        looks = []
        for request in self._requests():
            if request.submit is not None or request.number in self._seen:
                look = self._look(request)
                if look is not None:
                    looks.append(look)
        reports = {}  # of one that had ended before it began, all of it being known, nothing is told
        for command in commands:
            if isinstance(command, Finished) and self._seen.pop(command.request, None) is not None:
                reports[command.request] = command.statistics.report()
        stages = self._stages() if has_missed or isinstance(event, PipelineReformed) else None
        self._moments.append(_Moment(now_s, event, commands, looks, reports, stages, has_missed))

    def _look(self, request: Request) -> _Look | None:
        tree, submit, number = request.tree, request.submit, request.number
        extent = (len(tree), len(tree.dropped), tree.committed_length, request.opening.epoch)
        seen = self._seen.get(number)
        begun = submit if submit is not None and (seen is None or seen[0] is not submit) else None
        if begun is None and seen is not None and seen[1] == extent:
            return None
        root = (tree.root, tree.token(tree.root), tree.position(tree.root))
        look = _Look(number, root, tree.log_value(tree.root))
        if begun is not None:
            look.begun, look.reused = begun, request.reused
        else:
            assert seen is not None
            begun, (look.first, dropped, length, epoch) = seen
            look.table = tree.table(look.first)
            look.dropped = tree.dropped[dropped:]
            look.path = [(node, tree.token(node)) for node in tree.path[length:]]
            look.is_again = request.opening.epoch != epoch
        if look.begun is not None or look.is_again:
            look.living = _living(request)
        self._seen[number] = begun, extent
        return look

    # ------------------------------------------------------------------------------------ the reader's thread

    def frames(self, until_s: float | None = None) -> list[Frame]:
        """What happened since the last call, up to now, and figures up to `until_s` of the head's clock."""
        out: list[Frame] = []
        if self._first_stages is not None:
            self._tell(out, "stages", stages=self._first_stages)
            self._first_stages = None
        while True:
            try:
                moment = self._moments.popleft()
            except IndexError:
                break
            if self._origin_s is None:
                self._origin_s = moment.now_s
            self._tick(moment.now_s, out)
            self._t = max(self._t, self._at(moment.now_s))
            self._read(moment, out)
        if until_s is not None:
            self._tick(until_s, out)
        return out

    def tell(self, now_s: float, kind: str, **fields: Any) -> Frame:
        """A frame that others have to add, with its instant."""
        self._t = max(self._t, self._at(now_s))
        out: list[Frame] = []
        self._tell(out, kind, **fields)
        return out[0]

    def _at(self, instant_s: float) -> float:
        """Seconds since the recording began; what was before it is its beginning."""
        return max(0.0, round(instant_s - (self._origin_s or 0.0), 6))

    def _tell(self, out: list[Frame], kind: str, **fields: Any) -> None:
        self._add(out, {"t": self._t, "kind": kind, **fields})

    def _add(self, out: list[Frame], frame: Frame) -> None:
        self.present.take(frame)
        self._figures.take(frame)
        out.append(frame)

    def _tick(self, now_s: float, out: list[Frame]) -> None:
        """The figures that are due by now, while an answer is under way."""
        while self._figures_due_s <= self._at(now_s):
            self._t = max(self._t, round(self._figures_due_s, 6))
            frame = self._figures.frame(self._t)
            if frame is None:
                self._figures_due_s = math.floor(self._at(now_s) / EVERY_S) * EVERY_S
            else:
                self._add(out, frame)
            self._figures_due_s += EVERY_S

    def _read(self, moment: _Moment, out: list[Frame]) -> None:
        event = moment.event
        if moment.has_missed:
            self._running.clear()
            self._sent.clear()
            self._tell(out, "missed")
        if isinstance(event, Drafted):
            started_s, ended_s = self._at(event.started_s), self._at(event.ended_s)
            self._tell(out, "draft", drafter=event.drafter, started_s=started_s, ended_s=ended_s)
        elif isinstance(event, PipelineLost):
            self._sent.clear()
            self._tell(out, "lost", silent_s=round(event.silent_s, 6))
        if moment.stages is not None:
            self._tell(out, "stages", stages=moment.stages)
        for command in moment.commands:
            if isinstance(command, SegmentTimed) and command.segment in self._sent:
                self._sent.discard(command.segment)
                self._read_trip(command, moment.now_s, out)
        for look in moment.looks:
            self._read_look(look, out)
        paths = {look.request: look.path for look in moment.looks if look.path}
        for command in moment.commands:
            if isinstance(command, Emit) and command.request in paths:
                count = len(command.tokens)
                self._read_tokens(command.request, paths[command.request][:count], out)
                del paths[command.request][:count]
            elif isinstance(command, SendToFirstStage):
                self._sent.add(command.segment.segment)
                self._read_sent(command.segment, out)
            elif isinstance(command, Finished) and command.request in moment.reports:
                self._end(command, moment.reports[command.request], out)

    def _read_tokens(self, request: int, path: Sequence[tuple[int, int]], out: list[Frame]) -> None:
        running = self._running[request]
        nodes = [[node, running.push(token)] for node, token in path]
        self._tell(out, "tokens", request=request, nodes=nodes)

    def _end(self, finished: Finished, statistics: dict[str, Any], out: list[Frame]) -> None:
        if (figures := self._figures.frame(self._t)) is not None:
            self._add(out, figures)
        self._running.pop(finished.request, None)
        self._tell(out, "end", request=finished.request, reason=finished.reason, statistics=statistics)

    def _read_trip(self, timed: SegmentTimed, now_s: float, out: list[Frame]) -> None:
        stays = [
            {name: self._at(told) if name.endswith("_s") else told for name, told in asdict(stay).items()}
            for stay in trip_of(timed, now_s).visits()
        ]
        sent_s, back_s = self._at(timed.sent_s), self._at(now_s)
        self._tell(out, "trip", segment=timed.segment, sent_s=sent_s, back_s=back_s, stays=stays)

    def _read_sent(self, segment: Segment, out: list[Frame]) -> None:
        """What left the head; rows of prompts are only counted."""
        parts = [
            [
                part.commit.request,
                [node for node, is_prompt in zip(part.ids, part.committed, strict=True) if not is_prompt],
            ]
            for part in segment.parts
        ]
        prompt_rows = sum(sum(part.committed) for part in segment.parts)
        self._tell(out, "sent", segment=segment.segment, parts=parts, prompt_rows=prompt_rows)

    def _read_look(self, look: _Look, out: list[Frame]) -> None:
        request, piece = look.request, self._detokenizer.piece
        if look.begun is not None:
            self._running[request] = IncrementalDetokenizer(self._detokenizer)
            about = {"prompt_tokens": len(look.begun.prompt), "reused": look.reused}
            text = self._detokenizer.tail(look.begun.prompt, PROMPT_CHARACTERS)
            self._tell(out, "begin", request=request, **about, text=text)
        if look.dropped:
            self._tell(out, "dead", request=request, nodes=look.dropped)
        nodes = [
            [look.first + at, parent, piece(token), _value(log_value, look.root_log_value)]
            for at, (parent, token, log_value) in enumerate(zip(*look.table, strict=True))
        ]
        if nodes:
            self._tell(out, "nodes", request=request, nodes=nodes)
        if look.begun is not None or look.is_again:
            self._read_root(look, out)

    def _read_root(self, look: _Look, out: list[Frame]) -> None:
        """An answer begins, or begins again: what was guessed is dead, and the tree is its root with what is
        below it by now."""
        request, piece = look.request, self._detokenizer.piece
        dead = list(self.present.answers[request].nodes)
        if dead:
            self._tell(out, "dead", request=request, nodes=dead)
        node, token, position = look.root
        self._tell(out, "root", request=request, node=node, token=piece(token), position=position)
        if look.living:
            nodes = [
                [each, parent, piece(token), _value(log_value, look.root_log_value)]
                for each, parent, token, log_value in look.living
            ]
            self._tell(out, "nodes", request=request, nodes=nodes)


def _living(request: Request) -> list[tuple[int, int, int, float]]:
    tree = request.tree
    return [
        (node, tree.parent(node), tree.token(node), tree.log_value(node)) for node in sorted(tree.living())
    ]


def _value(log_value: float, root_log_value: float) -> float:
    return round(math.exp(min(0.0, log_value - root_log_value)), 6)
