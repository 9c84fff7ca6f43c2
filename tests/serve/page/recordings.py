"""A recording of an answer as `flowspec serve` makes them: four stages, a drafter that is right mostly, and
corrections where it is not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Frame = dict[str, Any]

STAGES = ("jetson-a", "jetson-b", "pi-5", "laptop")
LAYERS = ((0, 3), (3, 6), (6, 8), (8, 10))
BEGIN_S, PASS_S, LINK_S = 0.3, 0.03, 0.004
TRIP_S = len(STAGES) * PASS_S + (len(STAGES) + 1) * LINK_S
AHEAD = 3
"""Positions that a segment brings; the trip behind it brings the next ones."""
MISS_EVERY = 5
RIGHT = 0.8
ANSWER = (
    "The pipeline stays full while wrong guesses die inside it; every device computes what it holds, and "
    "the answer is exact."
)


def frame(t: float, kind: str, **fields: Any) -> Frame:
    fields = {name: round(of, 6) if isinstance(of, float) else of for name, of in fields.items()}
    return {"t": round(t, 6), "kind": kind, **fields}


def trip(segment: int, sent_s: float, alive: int, dead: int) -> Frame:
    """Half of what is dead dies at the second stage, the rest at the last one."""
    stays = []
    for stage in range(len(STAGES)):
        arrived_s = sent_s + LINK_S + stage * (LINK_S + PASS_S)
        is_last = stage == len(STAGES) - 1
        times_s = {"arrived_s": 0.0, "started_s": 0.002, "ended_s": PASS_S, "left_s": PASS_S}
        stay: dict[str, Any] = {name: round(arrived_s + since_s, 6) for name, since_s in times_s.items()}
        stay |= {"stage": stage, "alive": alive if is_last else alive + dead // 2}
        stays.append(stay | {"dead": dead // 2 if stage in (1, 3) else 0, "dropped": int(stage == 2)})
    back_s = sent_s + TRIP_S
    return frame(back_s, "trip", segment=segment, sent_s=sent_s, back_s=back_s, stays=stays)


def answer(tokens: Sequence[str], request: int) -> Iterator[Frame]:
    """Slot by slot: a segment leaves in each, and is back `TRIP_S` later."""
    new = itertools.count(1)
    root, at_s, done, segment = next(new), BEGIN_S + 0.05, 0, 0
    text = "Why is the pipeline full?\n"
    yield frame(BEGIN_S, "begin", request=request, prompt_tokens=12, reused=0, text=text)
    yield frame(BEGIN_S, "root", request=request, node=root, token="\n", position=11)
    while done < len(tokens):
        segment += 1
        is_missed = segment % MISS_EVERY == 0
        right = tokens[done : done + AHEAD]
        nodes, path, value = list[list[Any]](), [root], 0.95
        for place, token in enumerate(right):
            said = " maybe" if is_missed and place == 1 else token
            children = [[next(new), path[-1], said, RIGHT], [next(new), path[-1], " not", 1 - RIGHT]]
            nodes += [[*child, round(value * share, 4)] for *child, share in children]
            path.append(children[0][0])
            value *= RIGHT
        yield frame(at_s, "draft", drafter=0, started_s=at_s - 0.015, ended_s=at_s)
        yield frame(at_s, "nodes", request=request, nodes=nodes)
        sent = [[request, [node[0] for node in nodes]]]
        yield frame(at_s, "sent", segment=segment, parts=sent, prompt_rows=0)
        yield trip(segment, at_s, len(right), len(nodes) - len(right))
        known = list(zip(path[1:], right, strict=True))
        if is_missed and len(right) > 1:
            known = [known[0], (next(new), right[1])]
        at_s += TRIP_S
        yield frame(at_s, "tokens", request=request, nodes=[[*pair] for pair in known])
        root, done = known[-1][0], done + len(known)
        if segment % 2 == 0:
            figures = {"S": 2.5, "rho": 0.8, "acceptance": done / segment, "busy": [0.75] * len(STAGES)}
            rate = done / (at_s - BEGIN_S)
            yield frame(at_s, "figures", **figures, tokens_per_s=rate, dropped_rows=3 * segment)
        at_s += 0.002
    statistics = {"segments": segment, "tokens_per_commit": 2.5, "share_in_flight": 0.8, "recoveries": 0}
    statistics["decode_s"] = round(at_s - BEGIN_S, 6)
    yield frame(at_s, "end", request=request, reason="stop", statistics=statistics)


def devices(t: float) -> Frame:
    plain = {"queued": 0, "done": 7, "running_s": 0.0, "present": True, "loading": None}
    known = [
        {
            "name": name,
            "memory_bytes": 2**30 + at * 2**28,
            "temperature_c": None if at == 3 else 48.5 + at,
            **plain,
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


def recording(tokens: list[str] | None = None, *, request: int = 1) -> dict[str, Any]:
    """One answer of `tokens`, begun at .3 s."""
    said = re.findall(r" ?\w+|\W", ANSWER) if tokens is None else tokens
    return document([frame(0.0, "stages", stages=stages()), devices(0.0), *answer(said, request)])


def text_of(found: dict[str, Any]) -> str:
    """What a recording's answer says."""
    return "".join(
        token for frame in found["frames"] if frame["kind"] == "tokens" for _, token in frame["nodes"]
    )
