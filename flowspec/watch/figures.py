"""How a pipeline does over the last seconds: tokens per second, S, rho, acceptance, busy shares, dropped
rows. Reckoned from frames alone."""

from __future__ import annotations

from collections import deque
from typing import Any

Frame = dict[str, Any]
"""One thing that happened; `docs/watching.md` lists the kinds."""
WINDOW_S = 5.0
EVERY_S = 0.5


class Figures:
    """Takes frames in order; `frame` gives figures at an instant. A burst lasts from the first answer that
    begins until none is under way."""

    def __init__(self) -> None:
        self._answers: dict[int, set[int]] = {}  # by request the nodes that were sent and may come true
        self._waiting: set[int] = set()
        """Those that have no token yet: what their prompts' segments give is the rate's alone."""
        self._tokens: deque[tuple[float, int, int, bool]] = deque()
        """When, how many, how many of them were in flight, and whether a prompt's segment gave them."""
        self._sent: deque[tuple[float, int]] = deque()
        self._dropped: deque[tuple[float, int]] = deque()
        self._busy: list[deque[tuple[float, float]]] = []
        self._begun_s = 0.0
        self._first_s: float | None = None

    def take(self, frame: Frame) -> None:
        t, kind = frame["t"], frame["kind"]
        if kind == "begin":
            if not self._answers:
                self._clear(t)
            self._answers[frame["request"]] = set()
            self._waiting.add(frame["request"])
        elif kind == "end":
            self._answers.pop(frame["request"], None)
            self._waiting.discard(frame["request"])
        elif kind == "missed":
            self._answers.clear()
            self._waiting.clear()
        elif kind == "sent":
            for request, nodes in frame["parts"]:
                self._answers.get(request, set()).update(nodes)
            self._sent.append((t, sum(bool(nodes) for _, nodes in frame["parts"])))
        elif kind == "tokens":
            sent = self._answers.get(frame["request"], set())
            nodes = [node for node, _ in frame["nodes"]]
            is_prompts = frame["request"] in self._waiting
            self._waiting.discard(frame["request"])
            self._tokens.append((t, len(nodes), sum(node in sent for node in nodes), is_prompts))
            self._first_s = t if self._first_s is None else self._first_s
            sent.difference_update([node for node in sent if node <= nodes[-1]])
        elif kind == "trip":
            self._take_trip(frame)
        elif kind == "stages":
            self._busy = [deque() for _ in frame["stages"]]

    def _take_trip(self, frame: Frame) -> None:
        rows = 0
        for stay in frame["stays"]:
            rows += stay["dead"] + stay["dropped"]
            if stay["stage"] < len(self._busy) and stay["ended_s"] > stay["started_s"]:
                self._busy[stay["stage"]].append((stay["started_s"], stay["ended_s"]))
        if rows:
            self._dropped.append((frame["t"], rows))

    def _clear(self, now_s: float) -> None:
        """A burst begins: what was before does not count in it."""
        for past in (self._tokens, self._sent, self._dropped, *self._busy):
            past.clear()  # type: ignore[attr-defined]
        self._begun_s, self._first_s = now_s, None

    def frame(self, t: float) -> Frame | None:
        """The figures at `t`; None where nothing is under way."""
        if not self._answers:
            return None
        since_s = t - WINDOW_S
        for past in (self._tokens, self._sent, self._dropped):
            while past and past[0][0] < since_s:
                past.popleft()
        for lane in self._busy:
            while lane and lane[0][1] < since_s:
                lane.popleft()
        later = [(count, known) for _, count, known, is_prompts in self._tokens if not is_prompts]
        tokens = sum(count for count, _ in later)
        segments = sum(count for _, count in self._sent)
        return {
            "t": t,
            "kind": "figures",
            "tokens_per_s": self._rate(t, since_s),
            "S": _ratio(tokens, len(later)),
            "rho": _ratio(sum(known for _, known in later), tokens),
            "acceptance": _ratio(tokens, segments),
            "busy": [self._share(lane, max(since_s, self._begun_s), t) for lane in self._busy],
            "dropped_rows": sum(rows for _, rows in self._dropped),
        }

    def _rate(self, at_s: float, since_s: float) -> float:
        """Tokens per second; of an answer's beginning, from its first tokens on, which then do not count."""
        if self._first_s is None:
            return 0.0
        start_s = max(since_s, self._first_s)
        tokens = sum(count for known_s, count, *_ in self._tokens if known_s > start_s)
        return round(tokens / (at_s - start_s), 3) if at_s > start_s else 0.0

    @staticmethod
    def _share(lane: deque[tuple[float, float]], start_s: float, end_s: float) -> float:
        filled_s = sum(max(0.0, min(ended_s, end_s) - max(started_s, start_s)) for started_s, ended_s in lane)
        return round(min(1.0, filled_s / (end_s - start_s)), 4) if end_s > start_s else 0.0


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
