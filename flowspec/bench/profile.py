"""How fast this machine runs layers, `lm_head` and a drafter, and the device profile that fits these times:
bandwidth and computing of the cost model (`plan.cost`), and overheads.

Measured are real slices of models of random weights: wide ones that fit no cache, in each precision by the
kernels that a stage would use here, whose time is reading weights and computing, and tiny ones, whose time is
everything else. Of each task the second fastest run counts: what else runs on a machine only adds time.

The fit is one of least squares, of relative errors. The overheads come first, from the tiny models. Then the
two rates are searched on a grid that closes in, for each share of the computing that reading may fail to
hide: the model has corners, so gradients would mislead.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.bench.console import Step
from flowspec.core.protocol.device_messages import LinkFacts
from flowspec.core.protocol.messages import Commit, Open, Release, Sampling, Segment, SegmentPart
from flowspec.core.protocol.precision import FILED
from flowspec.draft.base import Drafter
from flowspec.draft.registry import find_drafter
from flowspec.errors import ClusterError
from flowspec.model.accelerator import accelerator_of
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.arithmetic.packed import FORMS, PANEL, Form, Panels
from flowspec.model.engines import run_trial
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import REQUEST, chain_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import Span, weights_of
from flowspec.plan.cost import OPERATIONS, layers_curve
from flowspec.plan.memory import mib, read_bytes
from flowspec.plan.profile import DeviceProfile, KernelRates
from flowspec.plan.shape import ModelShape

Run = Callable[[], object]
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
LM_HEAD, DRAFTER, TINY, TINY_MIXTURE = "lm_head", "drafter", "tiny layers", "tiny mixture"
"""Kinds of tasks, apart from the precisions of wide layers."""
CONTEXT = 64
WIDTH = 8
"""Guesses below a node that a drafter is asked for."""
SIGN_AND_FRACTION, SMALL = 0x807F, 0x3C80
"""Bits of bfloat16 that are drawn, and those of an exponent: from 1/64 to 1/32, of either sign."""
SCALE, EXPONENT = 1e-3, 118
"""Of all packed weights, as a number or as the byte of a power of two, so that nothing overflows; what
numbers they are changes no time."""
ROUNDER, FINER = ("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")
"""Forms of the usual mix Q4_K_M, each with what llama.cpp takes where rows are no whole blocks of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """Where and how layers run: in `dtype`, and in `packed` precisions as well."""

    device: str
    dtype: str
    packed: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (self.dtype, *self.packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What is measured, and how often."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    widths: tuple[tuple[int, int], ...] = ((2048, 2), (1024, 6))
    """Hidden sizes with layers: so many that together they fit no cache."""
    tiny: tuple[int, int] = (2, 12)
    """Numbers of layers of the tiny models: one more costs what a layer costs apart from its weights."""
    tiny_experts: tuple[int, int] = (2, EXPERTS_TINY - 2)
    """Experts a row of the tiny mixtures: one more costs what an expert costs apart from its weights."""
    rounds: int = 12

    def fitting(self, machine: MeasuredMachine) -> Effort:
        """The same with layers as wide as this machine has memory for; raises `ClusterError` when there is
        next to none."""
        weight_bytes = sum(map(read_bytes, machine.dtypes))
        free_bytes = accelerator_of(machine.device).free_bytes()
        for halved in range(4):
            widths = tuple((hidden >> halved, layers) for hidden, layers in self.widths)
            need = sum(made_shape(hidden, layers).params for hidden, layers in widths) * weight_bytes
            if need < MEMORY_SHARE_MAX * free_bytes:
                return replace(self, widths=widths)
        raise ClusterError(
            f"measuring needs {mib(int(need / MEMORY_SHARE_MAX))} of free memory, but {mib(free_bytes)} are "
            "free here"
        )

    def step_count(self, machine: MeasuredMachine) -> int:
        """Of `measure`."""
        tasks = len(self.rows) * (len(self.widths) * len(machine.dtypes) + 2)
        return (self.rounds + 1) * (tasks + len(self.tiny) + len(self.tiny_experts))


QUICK = Effort(rows=(1, 8, 32, 64), widths=((2048, 1), (1024, 3)), rounds=5)


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """Passes of so many rows over all layers of a shape, its `lm_head`, or a drafter, and the seconds that
    they took. `kind` is the precision in which wide layers run, or what is measured else."""

    kind: str
    name: str
    shape: ModelShape
    rows: int
    run: Run
    spent: list[float] = field(default_factory=list)

    @property
    def s(self) -> float:
        """The second fastest pass."""
        return sorted(self.spent)[min(1, len(self.spent) - 1)]


Times = Mapping[str, Sequence[Task]]
"""All of a machine, by kind: layers by precision, and others."""


def measure(machine: MeasuredMachine, effort: Effort, step: Step) -> Times:
    """Takes `effort.step_count` steps."""
    device, dtypes, narrowest = machine.device, machine.dtypes, min(effort.widths)[0]
    wide: list[tuple[str, ModelShape, Slice]] = []
    for hidden, layers in effort.widths:
        shape = made_shape(hidden, layers, VOCABULARY if hidden == narrowest else VOCABULARY_TINY)
        wide += [(dtype, *random_slice(shape, dtype, device)) for dtype in dtypes]
    _, head_shape, head = next(each for each in wide if each[1].hidden == narrowest)
    drafter = find_drafter(BUNDLED).open(ModelFiles(BUNDLED), machine.dtype, device, context=CONTEXT)
    tasks: list[Task] = []

    def add(kind: str, name: str, shape: ModelShape, run: Run, rows: int = 1) -> None:
        tasks.append(Task(kind=kind, name=name, shape=shape, rows=rows, run=run))

    for rows in effort.rows:
        for dtype, shape, part in wide:
            name = f"layers {shape.hidden} wide in {dtype}, {rows} rows"
            add(dtype, name, shape, pass_task(part, rows), rows)
        add(LM_HEAD, f"lm_head, {rows} rows", head_shape, head_task(head, rows), rows)
        add(DRAFTER, f"drafter, {rows} rows", head_shape, drafter_task(drafter, rows), rows)
    for layers in effort.tiny:
        shape, part = random_slice(made_shape(WIDTH_TINY, layers, VOCABULARY_TINY), machine.dtype, device)
        add(TINY, f"{layers} tiny layers", shape, pass_task(part, 1))
    # Mixtures are large, so most run packed, and there each product takes a few calls more.
    dtype = "int4" if "int4" in machine.packed else machine.dtype
    for chosen in effort.tiny_experts:
        shape = replace(
            made_shape(WIDTH_TINY, max(effort.tiny), VOCABULARY_TINY),
            intermediate=EXPERT_WIDTH_TINY * chosen,
            experts=EXPERTS_TINY,
            experts_per_row=chosen,
        )
        _, part = random_slice(shape, dtype, device)
        add(TINY_MIXTURE, f"tiny layers of {chosen} experts a row", shape, pass_task(part, 1))
    take_times(tasks, effort.rounds, step)
    times: dict[str, list[Task]] = {}
    for task in tasks:
        times.setdefault(task.kind, []).append(task)
    return times


def take_times(tasks: Sequence[Task], rounds: int, step: Step) -> None:
    """Tasks take turns, short ones with several runs in each round after the first. None runs twice in a row:
    a cache may hold packed weights."""
    runs = dict.fromkeys(tasks, 1)
    for number in range(rounds + 1):
        for turn in range(max(runs.values())):
            for task in tasks:
                if turn < runs[task]:
                    started_s = time.perf_counter()
                    task.run()
                    task.spent.append(time.perf_counter() - started_s)
                if not turn:
                    step(task.name)
        if not number:
            runs = {task: min(RUNS_MAX, 1 + int(SHORT_S / task.spent.pop())) for task in tasks}


def report(machine: MeasuredMachine, times: Times, links: Mapping[str, LinkFacts]) -> dict[str, Any]:
    """What was measured: milliseconds by rows (of a layer by precision and width, too), links by device name,
    and which kernels those of packed precisions are."""

    def ms(kind: str, key: Callable[[Task], int]) -> dict[str, float]:
        return {str(key(task)): round(1e3 * task.s, 4) for task in times[kind]}

    layers: dict[str, dict[str, dict[str, float]]] = {dtype: {} for dtype in machine.dtypes}
    for dtype, by_width in layers.items():
        for task in times[dtype]:
            found = by_width.setdefault(str(task.shape.hidden), {})
            found[str(task.rows)] = round(1e3 * task.s / task.shape.layers, 4)
    return {
        "dtype": machine.dtype,
        "device": machine.device,
        "kernels": {dtype: run_trial(dtype, machine.device).arithmetics[0] for dtype in machine.packed},
        "layer_ms": layers,
        "tiny_pass_ms": ms(TINY, lambda task: task.shape.layers),
        "tiny_experts_pass_ms": ms(TINY_MIXTURE, lambda task: task.shape.experts_per_row),
        "lm_head_ms": ms(LM_HEAD, lambda task: task.rows),
        "drafter_ms": ms(DRAFTER, lambda task: task.rows),
        "links": {
            name: {"latency_ms": round(1e3 * link.latency_s, 3), "mbit_per_s": round(link.bandwidth_mbps, 1)}
            for name, link in links.items()
        },
    }


# ------------------------------------------------------------------------------------------------------ tasks


def pass_task(part: Slice, rows: int) -> Run:
    """A pass of so many rows over all layers: a chain, as in a prompt's chunk."""
    part.open_cache(REQUEST, SLOTS)
    job, wait = chain_of(range(rows)), accelerator_of(part.device).wait

    def run() -> None:
        part.forward(job, None)
        wait()

    return run


def head_task(part: Slice, rows: int) -> Run:
    """`lm_head` over so many rows, logits on the CPU at the end."""
    drawn = np.random.default_rng(0).standard_normal((rows, part.spec.hidden), np.float32)
    return partial(part.logits, part.engine.cast(drawn))


def drafter_task(drafter: Drafter, rows: int) -> Run:
    """A pass of so many new nodes, children of the root, through a drafter; each of a request of its own."""

    def draft(request: int, ids: Sequence[int], parent: int, opening: Open | None = None) -> None:
        part = SegmentPart(
            commit=Commit(request=request, epoch=0, base=1, path=()),
            opening=opening,
            ids=tuple(ids),
            parents=(parent,) * len(ids),
            tokens=tuple(2 + node for node in ids),
            positions=(parent + 1,) * len(ids),
            committed=(opening is not None,) * len(ids),
        )
        drafter.draft(Segment(segment=0, parts=(part,)), WIDTH)

    def passes() -> Iterator[None]:
        begun = {"epoch": 0, "keep": 0, "length": 1, "root": 0, "slots": SLOTS, "answer_start": 1}
        for request in itertools.count(1000 * rows):
            draft(request, [0], -1, Open(request=request, sampling=Sampling(), **begun))
            yield
            draft(request, range(1, rows + 1), 0)
            drafter.release(Release(request=request))

    run = passes()
    next(run)
    return partial(next, run)


# ----------------------------------------------------------------------------------- models of random weights


def made_shape(hidden: int, layers: int, vocabulary: int = VOCABULARY) -> ModelShape:
    """A Llama of TinyLlama's proportions, with heads of 64."""
    heads = max(1, hidden // 64)
    return ModelShape(
        name=f"{hidden}-wide",
        layers=layers,
        hidden=hidden,
        intermediate=hidden * 11 // 4,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        vocabulary=vocabulary,
    )


def random_slice(shape: ModelShape, dtype: str, device: str) -> tuple[ModelShape, Slice]:
    """A whole model of random weights, loaded as any stage loads its slice; with its shape, which says what
    its weights take."""
    with tempfile.TemporaryDirectory() as folder:
        model = RandomModel(Path(folder), shape)
        if dtype == FILED:
            names = [name for name in model if ".layers." in name and model.form(name)]
            weights = sum(map(model.element_count, names))
            shape = replace(shape, filed_bytes=sum(map(model.packed_bytes, names)) / weights)
        return shape, Slice.load(model, model.span, dtype, device)


class RandomModel(ModelFiles, Tensors):
    """A model of a shape for short texts: a Llama, or a mixture in Qwen3's layout. It has a config in a
    folder, and each tensor is drawn when it is read; its lm_head is the embedding. Matrices are also packed
    as in GGUF files, of random levels: in the mix Q4_K_M."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        config = {
            "model_type": "qwen3_moe" if shape.experts > 1 else "llama",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 4 * SLOTS,
            "tie_word_embeddings": True,
        }
        if shape.experts > 1:
            config |= {
                "moe_intermediate_size": shape.intermediate // shape.experts_per_row,
                "num_experts": shape.experts,
                "num_experts_per_tok": shape.experts_per_row,
                "norm_topk_prob": True,
            }
        (folder / "config.json").write_text(json.dumps(config))
        super().__init__(str(folder))
        self.span = Span(first=0, end=shape.layers, count=shape.layers)
        self._random = np.random.default_rng(0)
        self.names = self._shapes = {
            name: np.broadcast_to(np.uint8(0), weight.shape)[part].shape
            for weight in weights_of(self.spec, self.span, self)
            for name, part in weight.parts.items()
        }

    def tensors(self) -> Tensors:
        return self

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        drawn = self._random.integers(0, 1 << 16, shape, np.uint16)
        drawn &= SIGN_AND_FRACTION
        drawn |= SMALL
        return drawn

    def form(self, name: str) -> str:
        """Half of the layers have values and `down_proj` in the finer form, and so has the embedding."""
        if len(self.shape(name)) != 2:
            return ""
        _, _, after = name.partition(".layers.")
        is_finer = not after or (
            int(after.partition(".")[0]) % 2 == 1 and after.endswith(("v_proj.weight", "down_proj.weight"))
        )
        whole, other = FINER if is_finer else ROUNDER
        return other if self.shape(name)[1] % FORMS[whole].unit else whole

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        outputs, inputs = shape
        return random_panels(FORMS[self.form(name)], outputs, inputs, self._random)


def random_panels(form: Form, outputs: int, inputs: int, random: np.random.Generator) -> Panels:
    """Panels `[panels, units, unit_bytes]` of a matrix, with random levels and whole scales."""
    size = -(-outputs // PANEL), inputs // form.unit, form.unit_bytes
    panels = random.integers(0, 256, size, np.uint8)
    if form.has_exponents:
        panels[..., -PANEL:] = EXPONENT
        return panels
    ends = PANEL * (1 + form.has_minimum)
    panels[..., -2 * ends :] = np.full(ends, SCALE, np.float16).view(np.uint8)
    return panels


# ------------------------------------------------------------------------------------------ the fit

SERIAL = (0.0, 0.25, 0.5, 0.75, 1.0)
HIDDEN = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of a tiny layer's time that a large one's takes, too, where launching runs ahead of computing."""
GRID = 41
ROUNDS = 5
LEAST_US = 0.1


def fit(times: Times, machine: MeasuredMachine, name: str, basis: str) -> DeviceProfile:
    """The profile under which the cost model comes closest to what was measured; `basis` as in
    `KernelRates`."""
    few, many = sorted(times[TINY], key=lambda task: task.shape.layers)
    layer_s = max(0.0, (many.s - few.s) / (many.shape.layers - few.shape.layers))
    pass_s = max(0.0, few.s - few.shape.layers * layer_s)
    few, many = sorted(times[TINY_MIXTURE], key=lambda task: task.shape.experts_per_row)
    more = many.shape.layers * (many.shape.experts_per_row - few.shape.experts_per_row)
    expert_s = max(0.0, (many.s - few.s) / more)
    here = accelerator_of(machine.device)
    shares = HIDDEN[:1] if here.is_cpu else HIDDEN
    fits = [(_rates(times[machine.dtype], share * layer_s, pass_s, basis), share) for share in shares]
    (_, own), share = min(fits, key=lambda each: each[0][0])
    return DeviceProfile(
        name=name,
        memory_gb=here.total_bytes() / 1e9,
        memory_gb_per_s=own.gb_per_s,
        memory_efficiency=1.0,
        tflops={machine.dtype: own.tflops},
        compute_efficiency=1.0,
        serial=own.serial,
        packed={dtype: _rates(times[dtype], share * layer_s, pass_s, basis)[1] for dtype in machine.packed},
        layer_us=max(LEAST_US, 1e6 * share * layer_s),
        expert_us=max(LEAST_US, 1e6 * share * expert_s),
        pass_us=max(LEAST_US, 1e6 * pass_s),
    )


def error(profile: DeviceProfile, layers: Sequence[Task]) -> float:
    """The root mean square of the relative errors of the cost model over what was measured."""
    curves = [(layers_curve(profile, task.shape, task.kind, task.shape.layers), task) for task in layers]
    return float(np.sqrt(np.mean([(curve.seconds(task.rows) / task.s - 1) ** 2 for curve, task in curves])))


def _rates(layers: Sequence[Task], layer_s: float, pass_s: float, basis: str) -> tuple[float, KernelRates]:
    """The least error, and the rates that have it; the overheads of a layer and a pass are known."""
    shapes = [task.shape for task in layers]
    params = np.array([shape.layers * shape.layer_params for shape in shapes], dtype=np.float64)
    weight_bytes = params * [read_bytes(task.kind, task.shape.filed_bytes) for task in layers]
    work = OPERATIONS * params * [task.rows for task in layers]
    spent = np.array([task.s for task in layers])
    fixed = layer_s * np.array([shape.layers for shape in shapes]) + pass_s
    fits = []
    for serial in SERIAL:
        off, width = float("inf"), 8.0
        byte_s, work_s = float((spent / weight_bytes).min()), float((spent / work).min())
        for _ in range(ROUNDS):
            factors = np.geomspace(1 / width, width, GRID)
            bytes_s, works_s = byte_s * factors, work_s * factors
            reading = bytes_s[:, None, None] * weight_bytes  # [bytes, 1, tasks]
            computing = works_s[None, :, None] * work  # [1, works, tasks]
            told = np.maximum(reading, (1 - serial) * computing) + serial * computing + fixed
            errors = np.sqrt((((told - spent) / spent) ** 2).mean(axis=2))  # [bytes, works]
            at = np.unravel_index(int(errors.argmin()), errors.shape)
            off, byte_s, work_s = float(errors[at]), float(bytes_s[at[0]]), float(works_s[at[1]])
            width = width ** (4 / GRID)
        fits.append((off, byte_s, work_s, serial))
    off, byte_s, work_s, serial = min(fits)
    return off, KernelRates(gb_per_s=1e-9 / byte_s, tflops=1e-12 / work_s, serial=serial, basis=basis)
