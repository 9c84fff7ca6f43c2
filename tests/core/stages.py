"""A stage whose messages and layers are made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowspec.core.protocol.messages import Commit, Open, Release, Sampling, Segment, SegmentPart
from flowspec.core.stage.events import (
    ControlArrived,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    StageCommand,
)
from flowspec.core.stage.stage import StageCore

LIKELIEST = Sampling()
PROMPT = 3  # nodes 0, 1, 2 at positions 0, 1, 2; node 2 is the root


def opening(
    *,
    epoch: int = 0,
    keep: int = 0,
    length: int = PROMPT,
    root: int = 2,
    slots: int = 64,
    top_logprobs: int = -1,
    sampling: Sampling = LIKELIEST,
    answer_start: int | None = None,
    request: int = 1,
    source: int = -1,
) -> Open:
    return Open(
        request=request,
        source=source,
        epoch=epoch,
        keep=keep,
        length=length,
        root=root,
        slots=slots,
        sampling=sampling,
        top_logprobs=top_logprobs,
        answer_start=length if answer_start is None else answer_start,
    )


def commit(*path: int, base: int = PROMPT, epoch: int = 0, request: int = 1) -> Commit:
    return Commit(request=request, epoch=epoch, base=base, path=path)


def segment(
    number: int,
    rows: list[tuple[int, int, int]],
    *,
    newest: Commit | None = None,
    prompt: bool = False,
    opens: Open | None = None,
) -> Segment:
    """Rows are (id, parent, position); a node's token is ten times its id."""
    nodes = [(node, parent, 10 * node, position) for node, parent, position in rows]
    part = part_of(newest or commit(), nodes, opens=opens, is_prompt=prompt)
    return Segment(segment=number, parts=(part,))


def part_of(
    newest: Commit, nodes: Sequence[tuple[int, ...]], opens: Open | None = None, is_prompt: bool = False
) -> SegmentPart:
    """Of rows (id, parent, token, position)."""
    ids, parents, tokens, positions = zip(*nodes, strict=True) if nodes else ((),) * 4
    return SegmentPart(
        commit=newest,
        opening=opens,
        ids=ids,
        parents=parents,
        tokens=tokens,
        positions=positions,
        committed=(is_prompt,) * len(ids),
    )


def arrive(core: StageCore, sent: Segment) -> list[StageCommand]:
    return core.handle(SegmentArrived(segment=sent, payload=None, received_s=0.0), 0.0)


def finish(
    core: StageCore,
    job: RunLayers,
    *,
    rows: tuple[int, ...] | None = None,
    drawn: tuple[int, ...] | None = None,
    captured: tuple[object, ...] = (),
) -> list[StageCommand]:
    """Ends a job; next tokens are `drawn`, else 1000 + row."""
    count = sum(len(part.slots) for part in job.parts)
    rows = tuple(range(count)) if rows is None else rows
    sampled = np.concatenate([part.sampled for part in job.parts])
    tokens = drawn or tuple(1000 + row if sampled[row] else -1 for row in rows) if core.is_last else ()
    done = LayersDone(
        job=job.job,
        rows=rows,
        payload="hidden",
        next_tokens=tokens,
        started_s=0.0,
        ended_s=0.0,
        captured=captured,
    )
    return core.handle(done, 0.0)


def run_of(commands: list[StageCommand]) -> RunLayers:
    (job,) = [command for command in commands if isinstance(command, RunLayers)]
    return job


def opened(*, is_last: bool = False) -> StageCore:
    """A stage that has run the prompt; the last one has drawn the token of node 3."""
    core = StageCore(is_last=is_last, slots_max=64)
    commands = arrive(core, segment(0, [(0, -1, 0), (1, 0, 1), (2, 1, 2)], prompt=True, opens=opening()))
    assert commands[0] == OpenCache(request=1, slots=64)
    finish(core, run_of(commands), drawn=(-1, -1, 30))
    return core


def tell(core: StageCore, message: Open | Commit | Release) -> list[StageCommand]:
    """On its control connection."""
    return core.handle(ControlArrived(message=message), 0.0)
