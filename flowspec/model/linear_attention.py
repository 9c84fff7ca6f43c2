"""Linear attention under trees: what a layer does that sums up all before a row in a *state* (the gated delta
rule, arXiv 2412.06464; Qwen3.5).

A row changes its parent's state by one step, which follows from the row's own input and those of the few
before it: its key, its value, and by how much old sums fade. So the layer keeps inputs, one in the slot of
each node, as a short convolution does, and three states: `BASE`, behind what was given back, `NEAR`, of the
output's path as far as it was run, and `SNAPSHOT`, what `BASE` once was. The state of any other node is made
anew from `NEAR`, step by step along its path. That is the same series of roundings wherever it begins, so
other rows, what was dropped and what was computed before change no bit.

Nothing is taken back from a state. A request that went back, whose rows stand before the end of `NEAR`, goes
on from `BASE`, which may be the snapshot again, or from the beginning; `core.protocol.model_spec` says
which, and how far back it may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowspec.model.arithmetic.arrays import I32, I64
from flowspec.model.attention import BASE, GAP, NEAR, TreeCache, TreeRows


def walk_past(layer: int, cache: TreeCache, passed: Sequence[int], length: int) -> Walk:
    """The steps with which `BASE` comes to the end of slots, as if they were done: the first of these hold
    what its next step looks back at."""
    lengths = cache.lengths[layer]
    beginning = [-1] * (length - 1) if lengths[BASE] == 0 else []
    slots = np.array([*beginning, *passed], np.int64)
    lines = np.lib.stride_tricks.sliding_window_view(slots, length).copy()
    steps = np.array([(row, 0, 0, -1) for row in range(len(lines))], np.int32).reshape(-1, 4)
    lengths[BASE] += len(lines)
    return Walk(lines, steps, 1, lengths[BASE])


def walk_of(rows: TreeRows, layer: int, length: int) -> Walk:
    """The steps with which `NEAR` comes to the end of the output's path, as if they were done; its steps look
    at `length` positions."""
    cache, lowest = rows.cache, int(rows.positions.min())
    lengths = cache.lengths[layer]
    if lowest < lengths[BASE]:  # the text is read again from its beginning
        cache.states[layer][:] = 0
        lengths[:] = [0] * len(lengths)
    elif lowest < lengths[NEAR] or lengths[NEAR] < lengths[BASE]:
        cache.copy_state(layer, BASE, NEAR)
    start = lengths[NEAR]
    if start not in rows.walks:
        rows.walks[start] = walk_from(rows, start, length)
    walk: Walk = rows.walks[start]
    lengths[NEAR] = walk.length
    return walk


@dataclass(frozen=True, slots=True)
class Walk:
    """From the state of a path's first so many positions to those of a request's rows.

    `lines` `[nodes, length]` int64 are the slots of each node's input and of those before it, its own last,
    -1 where the text has not begun. `steps` are `plain.delta_rule`'s, over so many `places`. At the first
    place the walk begins, and in the end the state of `length` positions is there, all of the output's path.
    """

    lines: I64
    steps: I32
    places: int
    length: int


def walk_from(rows: TreeRows, start: int, length: int) -> Walk:
    """The steps from the state of the first `start` positions to each row's own; a step looks at `length`
    positions."""
    before = length - 1
    first = start - before
    paths = rows.sight(None).paths_from(first)  # columns: positions from there on
    assert np.array_equal((paths >= 0).sum(axis=1), rows.positions + 1 - max(first, 0)), GAP
    _, firsts = np.unique(paths[:, before:], return_index=True)
    places = np.stack(np.unravel_index(firsts, paths[:, before:].shape), axis=1)
    places = places[paths[places[:, 0], places[:, 1] + before] >= 0]
    places = places[np.argsort(places[:, 1], kind="stable")]  # of each node a row that sees it, by position
    lines = np.stack([paths[row, column : column + length] for row, column in places])
    nodes = lines[:, -1].tolist()
    index = {slot: number for number, slot in enumerate(nodes)}
    children: dict[int, list[int]] = {}
    for number, (line, column) in enumerate(zip(lines.tolist(), places[:, 1].tolist(), strict=True)):
        children.setdefault(index[line[-2]] if column else -1, []).append(number)
    outputs = {slot: row for row, slot in enumerate(rows.slots.tolist())}
    steps: list[tuple[int, int, int, int]] = []

    def step(node: int, source: int, target: int) -> None:
        steps.append((node, source, target, outputs.get(nodes[node], -1)))

    end, committed = -1, max(0, rows.committed - start)
    while len(below := children.get(end, [])) == 1 and places[below[0], 1] < committed:
        end = below[0]
        step(end, 0, 0)
    reached = start + len(steps)
    count, free = 1, list[int]()
    waiting = {0: len(children.get(end, [])) + 1}  # the first place stays as it is
    todo = [(child, 0) for child in children.get(end, [])]
    while todo:
        node, source = todo.pop()
        waiting[source] -= 1
        if not waiting[source]:
            target = source
        elif free:
            target = free.pop()
        else:
            target, count = count, count + 1
        step(node, source, target)
        if node in children:
            waiting[target] = len(children[node])
            leaves_last = sorted(children[node], key=lambda child: child not in children)
            todo += [(child, target) for child in leaves_last]  # and so they are taken first
        else:
            free.append(target)
    return Walk(lines, np.array(steps, np.int32).reshape(-1, 4), count, reached)
