"""A recording of an answer as `flowspec serve` makes them: four stages, a drafter that is right mostly, and
corrections where it is not."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

Frame = dict[str, Any]

STAGES = ("jetson-a", "jetson-b", "pi-5", "laptop")
LAYERS = ((0, 3), (3, 6), (6, 8), (8, 10))
SLOT_S, PASS_S, LINK_S = 0.05, 0.03, 0.004
AHEAD = 3
"""Positions that a segment brings; the trip behind it brings the next ones."""
MISS_EVERY = 5
ANSWER = (
    "The pipeline stays full while wrong guesses die inside it; every device computes what it holds, and "
    "the answer is exact."
)


class Maker:
    """One answer, slot by slot: a segment leaves in each, and is back `TRIP_S` later."""

    TRIP_S = len(STAGES) * PASS_S + (len(STAGES) + 1) * LINK_S

    def __init__(self, tokens: list[str], request: int, seed: int) -> None:
        self.tokens, self.request = tokens, request
        self.random = random.Random(seed)
        self.frames: list[Frame] = []
        self.node = 0

    def new(self) -> int:
        self.node += 1
        return self.node

    def add(self, t: float, kind: str, **fields: Any) -> None:
        self.frames.append({"t": round(t, 6), "kind": kind, **fields})

    def trip(self, segment: int, sent_s: float, alive: int, dead: int) -> None:
        stays, at_s = [], sent_s
        for stage in range(len(STAGES)):
            arrived_s = at_s + LINK_S
            ended_s = arrived_s + PASS_S
            late = stage == len(STAGES) - 1
            stays.append(
                {
                    "stage": stage,
                    "arrived_s": round(arrived_s, 6),
                    "started_s": round(arrived_s + 0.002, 6),
                    "ended_s": round(ended_s, 6),
                    "left_s": round(ended_s, 6),
                    "alive": alive if late else alive + dead // 2,
                    "dead": dead // 2 if late or stage == 1 else 0,
                    "dropped": 1 if stage == 2 and dead > 2 else 0,
                }
            )
            at_s = ended_s
        self.add(
            at_s + LINK_S,
            "trip",
            segment=segment,
            sent_s=round(sent_s, 6),
            back_s=round(at_s + LINK_S, 6),
            stays=stays,
        )

    def make(self, begin_s: float = 0.3) -> float:
        """Frames of the answer; returns when it is over."""
        self.add(
            begin_s,
            "begin",
            request=self.request,
            prompt_tokens=12,
            reused=0,
            text="Why is the pipeline full?\n",
        )
        root = self.new()
        self.add(begin_s, "root", request=self.request, node=root, token="\n", position=11)
        at_s, position, segment = begin_s + 0.05, 0, 0
        while position < len(self.tokens):
            segment += 1
            missed = segment % MISS_EVERY == 0
            right = self.tokens[position : position + AHEAD]
            guesses, ids, parent, value = [], [], root, 0.95
            for place, token in enumerate(right):
                node, wrong = self.new(), self.new()
                chance = self.random.uniform(0.6, 0.95)
                guesses.append(
                    [
                        node,
                        parent,
                        token if not (missed and place == 1) else " maybe",
                        round(value * chance, 4),
                    ]
                )
                guesses.append(
                    [
                        wrong,
                        parent,
                        self.random.choice([" a", " not", " or", " some"]),
                        round(value * (1 - chance), 4),
                    ]
                )
                below = self.new()
                guesses.append([below, wrong, " thing", round(value * (1 - chance) * 0.4, 4)])
                ids.append(node)
                parent, value = node, value * chance
            self.add(at_s, "draft", drafter=0, started_s=round(at_s - 0.015, 6), ended_s=round(at_s, 6))
            self.add(at_s, "nodes", request=self.request, nodes=guesses)
            sent = [guess[0] for guess in guesses]
            self.add(at_s, "sent", segment=segment, parts=[[self.request, sent]], prompt_rows=0)
            back_s = at_s + self.TRIP_S
            self.trip(segment, at_s, len(ids), len(sent) - len(ids))
            done = (
                [[ids[0], right[0]], [self.new(), right[1]]]
                if missed and len(right) > 1
                else [[*pair] for pair in zip(ids, right, strict=True)]
            )
            self.add(back_s, "tokens", request=self.request, nodes=done)
            root, position = done[-1][0], position + len(done)
            if segment % 2 == 0:
                self.add(back_s, "figures", **self.figures(position, back_s - begin_s, segment))
            at_s = back_s + 0.002
        statistics = {
            "segments": segment,
            "tokens_per_commit": 2.5,
            "share_in_flight": 0.8,
            "decode_s": round(at_s - begin_s, 6),
            "recoveries": 0,
        }
        self.add(at_s, "end", request=self.request, reason="stop", statistics=statistics)
        return at_s

    def figures(self, tokens: int, seconds: float, segments: int) -> dict[str, Any]:
        busy = [round(self.random.uniform(0.6, 0.9), 3) for _ in STAGES]
        rate = round(tokens / seconds, 6)
        return {
            "tokens_per_s": rate,
            "S": 2.5,
            "rho": 0.8,
            "acceptance": round(tokens / segments, 4),
            "busy": busy,
            "dropped_rows": 3 * segments,
        }


def devices(t: float) -> Frame:
    known = [
        {
            "name": name,
            "memory_bytes": 2**30 + at * 2**28,
            "temperature_c": None if at == 3 else 48.5 + at,
            "queued": 0,
            "done": 7,
            "running_s": 0.0,
            "present": True,
            "loading": None,
        }
        for at, name in enumerate(STAGES)
    ]
    return {"t": t, "kind": "devices", "devices": known}


def stages() -> list[Frame]:
    return [{"name": name, "layers": list(layers)} for name, layers in zip(STAGES, LAYERS, strict=True)]


def document(frames: Iterable[Frame], **changes: Any) -> dict[str, Any]:
    return {
        "format": "flowspec-recording",
        "version": 1,
        "world": "cluster",
        "model": "bundled",
        "method": "continuous",
        "drafters": ["draft"],
        "stages": stages(),
        "created": "",
        "frames": list(frames),
    } | changes


def recording(tokens: list[str] | None = None, *, request: int = 1, seed: int = 1) -> dict[str, Any]:
    """One answer of `tokens`, begun at .3 s."""
    maker = Maker(re.findall(r" ?\w+|\W", ANSWER) if tokens is None else tokens, request, seed)
    maker.make()
    frames = [{"t": 0.0, "kind": "stages", "stages": stages()}, devices(0.0), *maker.frames]
    return document(sorted(frames, key=lambda frame: frame["t"]))


def text_of(found: dict[str, Any]) -> str:
    """What a recording's answer says."""
    return "".join(
        token for frame in found["frames"] if frame["kind"] == "tokens" for _, token in frame["nodes"]
    )
