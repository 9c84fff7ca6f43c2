"""What frames add up to: the pipeline, the tree of each answer under way, the newest figures and devices.

Whoever begins to watch in mid-answer is told the present first; a chat's live line shows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowspec.watch.figures import Frame


@dataclass(slots=True)
class LiveAnswer:
    """An answer under way: how it began, its root, and the living guesses below it by id, parents first:
    `[id, parent, text, value]`."""

    begin: Frame
    root: Frame | None = None
    nodes: dict[int, list[Any]] = field(default_factory=dict)

    def advance(self, committed: list[list[Any]]) -> None:
        """The last of these is the root now; what is not below it is dead."""
        assert self.root is not None
        node, text = committed[-1]
        self.root = {
            **self.root,
            "node": node,
            "token": text,
            "position": self.root["position"] + len(committed),
        }
        below = {node}
        nodes = {}
        for each, row in self.nodes.items():
            if row[1] in below:
                below.add(each)
                nodes[each] = row
        self.nodes = nodes


class WatchState:
    def __init__(self) -> None:
        self.t = 0.0
        self.stages: list[dict[str, Any]] = []
        self.lost: Frame | None = None
        self.failed: Frame | None = None
        self.answers: dict[int, LiveAnswer] = {}
        self.figures: Frame | None = None
        self.devices: Frame | None = None

    def take(self, frame: Frame) -> None:
        kind, answer = frame["kind"], self.answers.get(frame.get("request", -1))
        self.t = frame["t"]
        if kind == "stages":
            self.stages, self.lost = frame["stages"], None
        elif kind == "lost":
            self.lost = frame
        elif kind == "missed":
            self.answers.clear()
        elif kind == "begin":
            self.answers[frame["request"]] = LiveAnswer(begin=frame)
        elif kind in ("figures", "devices", "failed"):
            setattr(self, kind, frame)
        elif answer is not None:
            self._of_answer(answer, kind, frame)

    def _of_answer(self, answer: LiveAnswer, kind: str, frame: Frame) -> None:
        if kind == "root":
            answer.root = frame
            answer.nodes.clear()
        elif kind == "nodes":
            answer.nodes.update((row[0], row) for row in frame["nodes"])
        elif kind == "tokens" and frame["nodes"] and answer.root is not None:
            answer.advance(frame["nodes"])
        elif kind == "dead":
            for node in frame["nodes"]:
                answer.nodes.pop(node, None)
        elif kind == "end":
            del self.answers[frame["request"]]

    def frames(self) -> list[Frame]:
        """From these another watcher goes on: nothing that is over is in them."""
        t = self.t
        found: list[Frame] = [{"t": t, "kind": "stages", "stages": self.stages}]
        if self.lost is not None:
            found.append({**self.lost, "t": t})
        for request, answer in self.answers.items():
            found.append({**answer.begin, "t": t})
            if answer.root is not None:
                found.append({**answer.root, "t": t})
            if answer.nodes:
                found.append(
                    {"t": t, "kind": "nodes", "request": request, "nodes": list(answer.nodes.values())}
                )
        found += [
            {**frame, "t": t} for frame in (self.devices, self.figures, self.failed) if frame is not None
        ]
        return found

    @property
    def living(self) -> int:
        """Guesses in all trees; also for a thread that does not take the frames."""
        return sum(len(answer.nodes) for answer in list(self.answers.values()))
