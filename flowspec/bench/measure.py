"""How fast this machine runs layers, `lm_head` and a drafter: the times that a device profile is fitted to
(`bench.fitting`).

Measured are real slices of models made for it: wide ones that fit no cache, whose time is reading weights and
computing, and tiny ones, whose time is everything else, with and without experts. Wide ones are also measured
in packed precisions, by the kernels that a stage would use here. The tasks take turns, round after round, and
of each the second fastest run counts: what else runs on a machine only ever adds time.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.bench.console import Step
from flowspec.bench.random_models import RandomFiles, layer_bytes
from flowspec.core.protocol.messages import Commit, Open, Release, Sampling, Segment, SegmentPart
from flowspec.core.protocol.precision import FILED
from flowspec.core.stage.events import JobPart, RunLayers
from flowspec.draft.kinds import open_drafter
from flowspec.draft.protocol import Drafter
from flowspec.errors import ClusterError
from flowspec.model.accelerator import accelerator_of
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span
from flowspec.plan.cost import read_bytes
from flowspec.plan.memory import mib
from flowspec.plan.shape import ModelShape

Task = Callable[[], None]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROWS_QUICK = (1, 8, 32, 64)
SLOTS = 256
VOCABULARY = 32000
VOCABULARY_TINY = 256
WIDTH_TINY = 64
EXPERTS_TINY, EXPERT_WIDTH_TINY = 16, 16
"""Of a tiny mixture, and neurons of each."""
SHORT_S = 0.02
RUNS_MAX = 8
"""A task that is shorter than `SHORT_S` has so many runs in each round: an interrupt counts for more there.
"""
MEMORY_SHARE_MAX = 0.4
"""Of the memory that is free: making a model takes more for a moment."""
REQUEST = 1
CONTEXT = 64
WIDTH = 8
"""Guesses below a node that a drafter is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """Where and how layers run: in `dtype`, and in `packed` precisions beside it."""

    device: str
    dtype: str
    packed: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """Of a weight in all precisions together."""
        return sum(map(read_bytes, (self.dtype, *self.packed)))

    @property
    def experts_dtype(self) -> str:
        """In which tiny mixtures are measured: int4 where it is measured at all. Mixtures are large, so most
        run packed, and there each product takes a few calls more."""
        return "int4" if "int4" in self.packed else self.dtype

    def free_bytes(self) -> int:
        return accelerator_of(self.device).free_bytes()

    def total_bytes(self) -> int:
        return accelerator_of(self.device).total_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What is measured, and how often."""

    rows: tuple[int, ...] = ROWS
    widths: tuple[tuple[int, int], ...] = ((2048, 2), (1024, 6))
    """Hidden sizes with layers: so many that together they fit no cache."""
    tiny: tuple[int, int] = (2, 12)
    """Numbers of layers of the tiny models: one layer more costs what a layer costs beside its weights."""
    tiny_experts: tuple[int, int] = (2, EXPERTS_TINY - 2)
    """Experts a row of the tiny mixtures: one more costs what an expert costs beside its weights."""
    rounds: int = 12

    def fitting(self, machine: MeasuredMachine) -> Effort:
        """The same with layers as wide as this machine has memory for; raises `ClusterError` when there is
        next to none."""
        for halved in range(4):
            widths = tuple((hidden >> halved, layers) for hidden, layers in self.widths)
            need = sum(made_shape(hidden, layers).params for hidden, layers in widths) * machine.weight_bytes
            if need < MEMORY_SHARE_MAX * machine.free_bytes():
                return replace(self, widths=widths)
        raise ClusterError(
            f"measuring needs {mib(int(need / MEMORY_SHARE_MAX))} of free memory, but "
            f"{mib(machine.free_bytes())} are free here"
        )


QUICK = Effort(rows=ROWS_QUICK, widths=((2048, 1), (1024, 3)), rounds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """A pass of `rows` rows over `layers` layers took so long."""

    shape: ModelShape
    layers: int
    rows: int
    s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTimes:
    """All of a machine: `layers` by precision, times of `lm_head` and of a pass of the bundled drafter by
    rows."""

    layers: Mapping[str, tuple[LayerPoint, ...]]
    tiny: tuple[LayerPoint, ...]
    tiny_mixtures: tuple[LayerPoint, ...]
    lm_head_s: Mapping[int, float]
    lm_head_shape: ModelShape
    drafter_s: Mapping[int, float]


def fast_times(
    tasks: Mapping[Any, Task],
    rounds: int,
    step: Step,
    names: Callable[[Any], str],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, float]:
    """The second fastest run of each task, in seconds by `clock`; the tasks take turns, short ones with
    several runs in each round after the first. No task runs twice in a row: a cache may hold packed
    weights."""
    spent: dict[Any, list[float]] = {key: [] for key in tasks}
    runs = dict.fromkeys(tasks, 1)
    for number in range(rounds + 1):
        for turn in range(max(runs.values())):
            for key, task in tasks.items():
                if turn < runs[key]:
                    started_s = clock()
                    task()
                    spent[key].append(clock() - started_s)
                if not turn:
                    step(names(key))
        if not number:
            runs = {key: min(RUNS_MAX, 1 + int(SHORT_S / found.pop())) for key, found in spent.items()}
    return {key: sorted(found)[min(1, len(found) - 1)] for key, found in spent.items()}


def made_shape(hidden: int, layers: int, vocabulary: int = VOCABULARY) -> ModelShape:
    """A Llama of TinyLlama's proportions, with heads of 64."""
    heads = max(1, hidden // 64)
    intermediate = hidden * 11 // 4
    return ModelShape(
        name=f"{hidden}-wide",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        vocabulary=vocabulary,
    )


def tiny_mixture(layers: int, experts_per_row: int) -> ModelShape:
    """Tiny layers with `EXPERTS_TINY` experts."""
    return replace(
        made_shape(WIDTH_TINY, layers, VOCABULARY_TINY),
        intermediate=EXPERT_WIDTH_TINY * experts_per_row,
        experts=EXPERTS_TINY,
        experts_per_row=experts_per_row,
    )


def made_slices(
    machine: MeasuredMachine, shape: ModelShape, dtypes: Sequence[str]
) -> dict[str, tuple[ModelShape, Slice]]:
    """A whole model of random weights in these precisions, loaded as any stage loads its slice; each with its
    shape, which says what its weights take."""
    whole, found = Span(first=0, end=shape.layers, count=shape.layers), {}
    with tempfile.TemporaryDirectory() as folder:
        files = RandomFiles(Path(folder), shape, 4 * SLOTS)
        for dtype in dtypes:
            filed_bytes = layer_bytes(files.tensors()) if dtype == FILED else shape.filed_bytes
            own = replace(shape, filed_bytes=filed_bytes)
            found[dtype] = own, Slice.load(files, whole, dtype, machine.device)
    return found


def pass_task(machine: MeasuredMachine, part: Slice, rows: int) -> Task:
    """A pass of so many rows over all layers: a chain, as in a prompt's chunk."""
    part.open_cache(REQUEST, SLOTS)
    numbers = np.arange(rows)
    segment = JobPart(
        request=REQUEST,
        slots=numbers,
        tokens=numbers,
        positions=numbers,
        key_positions=numbers.astype(np.int32),
        visible=np.tril(np.ones((rows, rows), dtype=np.bool_)),
        sampled=np.zeros(rows, dtype=np.bool_),
        sampling=Sampling(),
    )
    job = RunLayers(job=0, parts=(segment,), payload=None, rows=tuple(range(rows)))
    wait = accelerator_of(machine.device).wait

    def run() -> None:
        part.forward(job, None)
        wait()

    return run


def head_task(part: Slice, rows: int) -> Task:
    """`lm_head` over so many rows, logits on the CPU at the end."""
    drawn = np.random.default_rng(0).standard_normal((rows, part.spec.hidden), np.float32)
    hidden = part.engine.cast(drawn)

    def run() -> None:
        part.logits(hidden)

    return run


def drafter_task(drafter: Drafter, rows: int) -> Task:
    """A pass of so many new nodes, children of the root, through a drafter."""
    requests = itertools.count(1000 * rows)

    def segment(request: int, ids: Sequence[int], parents: Sequence[int], committed: bool) -> Segment:
        opening = Open(
            request=request,
            epoch=0,
            keep=0,
            length=1,
            root=0,
            slots=SLOTS,
            sampling=Sampling(),
            answer_start=1,
        )
        part = SegmentPart(
            commit=Commit(request=request, epoch=0, base=1, path=()),
            opening=opening if committed else None,
            ids=tuple(ids),
            parents=tuple(parents),
            tokens=tuple(2 + node for node in ids),
            positions=(0 if committed else 1,) * len(ids),
            committed=(committed,) * len(ids),
        )
        return Segment(segment=0, parts=(part,))

    ready: list[int] = []

    def prepare() -> None:
        request = next(requests)
        drafter.draft(segment(request, [0], [-1], committed=True), WIDTH)
        ready.append(request)

    def run() -> None:
        request = ready.pop()
        drafter.draft(segment(request, range(1, rows + 1), [0] * rows, committed=False), WIDTH)
        drafter.release(Release(request=request))
        prepare()

    prepare()
    return run


def step_count(machine: MeasuredMachine, effort: Effort, beside: int = 0) -> int:
    count = len(effort.rows) * (len(effort.widths) * (1 + len(machine.packed)) + 2)
    count += len(effort.tiny) + len(effort.tiny_experts)
    return (effort.rounds + 1) * (count + beside)


def measure_beside(
    machine: MeasuredMachine,
    effort: Effort,
    beside: Mapping[Any, Task],
    step: Step,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[MachineTimes, dict[Any, float]]:
    """Measures this machine, and in the same rounds the tasks `beside`, whose times come second; takes
    `step_count` steps."""
    narrowest = min(hidden for hidden, _ in effort.widths)
    shapes = {
        hidden: made_shape(hidden, layers, VOCABULARY if hidden == narrowest else VOCABULARY_TINY)
        for hidden, layers in effort.widths
    }
    dtypes = (machine.dtype, *machine.packed)
    slices = {hidden: made_slices(machine, shape, dtypes) for hidden, shape in shapes.items()}
    drafter = open_drafter(BUNDLED, ModelFiles(BUNDLED), machine.dtype, machine.device, context=CONTEXT)
    assert drafter is not None
    tasks: dict[Any, Task] = {}
    for rows in effort.rows:
        for hidden, by_dtype in slices.items():
            for dtype, (_, part) in by_dtype.items():
                tasks["layers", (dtype, hidden), rows] = pass_task(machine, part, rows)
        tasks["lm_head", narrowest, rows] = head_task(slices[narrowest][machine.dtype][1], rows)
        tasks["drafter", 0, rows] = drafter_task(drafter, rows)
    tiny = {layers: made_shape(WIDTH_TINY, layers, VOCABULARY_TINY) for layers in effort.tiny}
    for layers, shape in tiny.items():
        ((_, part),) = made_slices(machine, shape, [machine.dtype]).values()
        tasks["tiny", layers, 1] = pass_task(machine, part, 1)
    mixtures = {chosen: tiny_mixture(max(effort.tiny), chosen) for chosen in effort.tiny_experts}
    for chosen, shape in mixtures.items():
        ((_, part),) = made_slices(machine, shape, [machine.experts_dtype]).values()
        tasks["tiny experts", chosen, 1] = pass_task(machine, part, 1)
    tasks.update({("beside", key, 0): task for key, task in beside.items()})
    spent = fast_times(tasks, effort.rounds, step, _name, clock)
    measured = MachineTimes(
        layers={
            dtype: tuple(
                LayerPoint(
                    shape=by_dtype[dtype][0],
                    layers=by_dtype[dtype][0].layers,
                    rows=rows,
                    s=spent["layers", (dtype, hidden), rows],
                )
                for hidden, by_dtype in slices.items()
                for rows in effort.rows
            )
            for dtype in dtypes
        },
        tiny=tuple(
            LayerPoint(shape=shape, layers=layers, rows=1, s=spent["tiny", layers, 1])
            for layers, shape in tiny.items()
        ),
        tiny_mixtures=tuple(
            LayerPoint(shape=shape, layers=shape.layers, rows=1, s=spent["tiny experts", chosen, 1])
            for chosen, shape in mixtures.items()
        ),
        lm_head_s={rows: spent["lm_head", narrowest, rows] for rows in effort.rows},
        lm_head_shape=shapes[narrowest],
        drafter_s={rows: spent["drafter", 0, rows] for rows in effort.rows},
    )
    return measured, {key: spent["beside", key, 0] for key in beside}


def _name(key: tuple[str, Any, int]) -> str:
    kind, what, rows = key
    if kind == "layers":
        dtype, hidden = what
        return f"layers {hidden} wide in {dtype}, {rows} rows"
    return {
        "lm_head": f"lm_head, {rows} rows",
        "drafter": f"drafter, {rows} rows",
        "tiny": f"{what} tiny layers",
        "tiny experts": f"tiny layers of {what} experts a row",
        "beside": f"{what}",
    }[kind]
