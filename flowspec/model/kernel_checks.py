"""Tries kernels on this processor: `python -m flowspec.model.kernel_checks DTYPE DEVICE`.

Run by `trials.py` in a process of its own, which may die of it. Prints a JSON line before and after each
kernel; of each arithmetic the first that is right is enough. What is expected is computed here, by numpy in
float64: it shares neither code nor kernel with what is tried. There are whole numbers, which every precision
holds and sums exactly, and others, as models have them. Rows come in changing numbers from 1 to 32, alone and
together, with one thread and with all: kernels were seen that are right only for some of these.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from flowspec.core.protocol.model_spec import Dense, Heads, LayerSpec, Mixture, QueryNorm
from flowspec.core.protocol.precision import ACTIVATIONS, FILED
from flowspec.errors import InputError, first_line
from flowspec.model.accelerator import compute_precisely
from flowspec.model.arithmetic import build, compiled, compiled_cuda, plain
from flowspec.model.arithmetic.compiled_cuda import CudaLibrary
from flowspec.model.arithmetic.delta import DeltaRows
from flowspec.model.arithmetic.norms import NORMS, Norm
from flowspec.model.arithmetic.operations import Sight
from flowspec.model.arithmetic.packed import FORMS, GROUP, Q4_0, Form, Levels, groups_of, packed
from flowspec.model.arithmetic.plain import LANES
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows, tree_attention
from flowspec.model.device_errors import is_out_of_memory
from flowspec.model.gguf_layers import GgufLinear, Part, stay_packed
from flowspec.model.kernels import DTYPES, PAIRS16, Kernel, allow_gpu_library, kernels_of
from flowspec.model.products import IN_ONE_CALL, lanes16, products
from flowspec.model.program import ROUTERS, Pass, Room, program_of
from flowspec.model.quantised import (
    LINEARS,
    SMALL,
    PanelInt4Linear,
    PanelInt8Linear,
    PlainInt8Linear,
    QuantisedLinear,
    exact_rows,
    powers,
    quantise,
)
from flowspec.model.trials import ATTENTION, COMPILED, COMPILED_GPU, TRIAL_S, loaded_libraries

F64 = NDArray[np.float64]

FORM_SHAPES = ((512, 48), (4096, 34))
"""Of matrices that stay as a file packs them, in each form."""
SHAPES = ((64, 48), (160, 21), (512, 320), (2080, 34), (4096, 32))
"""Inputs and outputs of matrices: blocks with and without a rest, sums of one block and of several."""
MANY_SHAPE = (1536, 576)
"""Of the matrix that many rows are multiplied with."""
MANY_ROW_COUNTS = (129, 17, 33, 64)
"""As prompts bring them, the most first."""
PAIRS_SHAPES = ((64, 48), (75, 21), (2080, 10))
ROW_COUNTS = (1, 32, 2, 17, 3, 16, 8, 1, 31, 5, 32, 4, 7, 12)
"""How many rows run at once, one call after another."""
ROWS = max(ROW_COUNTS)
WIDTHS = (1, 5, 64, 100, 896, 4096)
"""Of rows whose norms, turns and levels are tried."""
TREES: tuple[tuple[int, int, float | None, int | None, bool], ...] = (
    (1, 8, None, None, False),
    (2, 64, None, 30, True),
    (4, 80, 30.0, None, False),
    (3, 24, None, None, True),
)
"""Of trees that attend: heads of keys, their width, cap, window, and whether there are sinks."""
COMPILED_SHARE = 0.5
GPU_SHARE = 0.2
"""What part of all trials is that of a library, as far as it takes as long."""
EPSILONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="flowspec-kernel-checks", description=__doc__)
    parser.add_argument("dtype", choices=tuple(ACTIVATIONS))
    parser.add_argument("device")
    parser.add_argument("--skip", action="append", default=[], help="a kernel that was found wrong already")
    parser.add_argument("--right", action="append", default=[], help="a kernel that was found right already")
    parser.add_argument("--built", type=Path, help="what was built of canonical.c")
    args = parser.parse_args()
    compute_precisely()  # as slices are computed
    device = torch.device(args.device)
    begun = 0.0
    if args.built is not None and COMPILED not in args.skip:
        progress = _Part(begun, COMPILED_SHARE, compiled_steps())
        if COMPILED not in args.right:
            _say(at=COMPILED, share=begun)
        build.allow(args.built)
        if COMPILED not in args.right:
            try:
                fault = compiled_fault(progress)
            except OSError as error:
                fault = f"cannot be loaded: {first_line(error)}"
            _say(fault=fault)
            build.allow(None if fault else args.built)
    begun += COMPILED_SHARE * (args.built is not None)
    if device.type == "cuda" and COMPILED_GPU not in args.skip:
        _say(at=COMPILED_GPU, share=begun)
        try:
            library, is_known = allow_gpu_library(device), COMPILED_GPU in args.right
            fault = "" if is_known else gpu_fault(library, device, _Part(begun, GPU_SHARE, gpu_steps()))
        except OSError as error:
            fault = f"cannot be built: {first_line(error)}"
        except RuntimeError as error:
            _say(fault="fails: " + first_line(error), may_pass=is_out_of_memory(error))
            _say(again=True)  # as below
            return
        if fault or not is_known:
            _say(fault=fault)
        if fault:
            compiled_cuda.allow(device, None)
    begun += GPU_SHARE * (device.type == "cuda")
    try:
        kernels = kernels_of(args.dtype, device)
    except InputError as error:
        _say(error=str(error))
        return
    found = {kernel.arithmetic for kernel in kernels if kernel.name in args.right}
    tries: list[Kernel | None] = [None, *kernels]  # None: attention
    size = (1 - begun) / len(tries)
    for place, kernel in enumerate(tries):
        name = ATTENTION if kernel is None else kernel.name
        if name in (*args.skip, *args.right) or (kernel is not None and kernel.arithmetic in found):
            continue
        share, bits = begun + place * size, hashlib.sha256()
        _say(at=name, share=share)
        try:
            if kernel is None:
                fault = attention_fault(args.dtype, device, _Part(share, size, attention_steps(device)))
            else:
                progress = _Part(share, size, linear_steps(kernel, device))
                fault = linear_fault(args.dtype, kernel, device, progress, bits)
        except (RuntimeError, MemoryError, InputError) as error:  # how torch tells what it cannot do here
            _say(fault="fails: " + first_line(error), may_pass=is_out_of_memory(error))
            if device.type != "cpu":  # after some of CUDA's errors nothing works any more in this process
                _say(again=True)
                return
            continue
        if kernel is None or fault:
            _say(fault=fault)
            continue
        found.add(kernel.arithmetic)
        _say(fault="", arithmetic=named(kernel, bits))
    _say(done=True, libraries=loaded_libraries())


def named(kernel: Kernel, bits: hashlib._Hash) -> str:
    """The arithmetic of a kernel by which devices agree.

    Bits that belong to a processor and a torch may depend on more of them than the name tells, such as the
    sizes of caches, so a hash of what was computed ends it.
    """
    return f"{kernel.arithmetic}-{bits.hexdigest()[:8]}" if "@" in kernel.arithmetic else kernel.arithmetic


def _say(**word: object) -> None:
    """A line for the parent. A kernel that hangs long after it was to be given up has no parent: it ends."""
    signal.alarm(int(2 * TRIAL_S))
    print(json.dumps(word), flush=True)


class _Part:
    """A sign of life from one part of the trials, which begins at a share of all and is a `size` of it: with
    each of its `steps` it is further."""

    def __init__(self, begins: float, size: float, steps: int) -> None:
        self._begins, self._size, self._steps = begins, size, steps
        self._done = 0

    def __call__(self) -> None:
        _say(share=round(self._begins + self._size * min(1.0, self._done / self._steps), 3))
        self._done += 1


# ----------------------------------------------------------------------- what was built of canonical.c


def compiled_steps() -> int:
    """How often `compiled_fault` calls its `progress`, where nothing is wrong; so of the others below."""
    cases = sum(1 for _ in _packed_cases())
    return cases + len(_thread_counts(torch.device("cpu"))) * (1 + len(TREES) * len(compiled.KINDS))


@torch.inference_mode()
def compiled_fault(progress: Callable[[], None] = lambda: None) -> str:
    """Where it gives other bits than the definitions in `plain.py`, or nothing."""
    library = compiled.library()
    assert library is not None
    generator = torch.Generator().manual_seed(1)
    fault = _numbers_fault(library, generator) or _levels_fault(library, generator)
    if fault:
        return fault
    for form_name, form, inputs, outputs in _packed_cases():
        progress()
        rows, panels = _packed_numbers(form, inputs, outputs, generator)
        expected = plain.packed_product(rows, form, panels, outputs)
        for threads in _thread_counts(torch.device("cpu")):
            torch.set_num_threads(threads)
            for count, first in _portions():
                found = library.packed(rows[first : first + count], form, panels, outputs)
                if not torch.equal(found, expected[first : first + count]):
                    return (
                        f"differs from the definition of a product in {form_name} of {count} rows of "
                        f"{inputs} x {outputs} with {threads} threads"
                    )
        short = rows.bfloat16()
        if not torch.equal(
            library.packed(short, form, panels, outputs),
            plain.packed_product(short.float(), form, panels, outputs).bfloat16(),
        ):
            return f"differs from the definition of a product in {form_name} of rows in bfloat16"
        if inputs % form.unit == 0:
            ids = torch.randint(0, outputs, (7,), generator=generator)
            if not torch.equal(library.packed_rows(form, panels, ids), plain.packed_rows(form, panels, ids)):
                return f"differs from the definition of rows in {form_name}"
    fault = _store_fault(library, generator, compiled.KINDS) or _digits_fault(library, generator)
    if fault:
        return fault
    for threads in _thread_counts(torch.device("cpu")):
        torch.set_num_threads(threads)
        progress()
        fault = _delta_fault(library, generator)
        fault = fault or _halves_fault(library, generator)
        if fault:
            return f"{fault} with {threads} threads"
        for case in _attention_cases(generator, compiled.KINDS):
            progress()
            seen = case.sight.seen, *case.sight.order()
            found = library.attention(
                case.queries, case.keys, case.values, case.steps, *seen, case.scale, case.cap, case.sinks
            )
            if not torch.equal(found, case.expected()):
                return f"differs from the definition of {case.name} with {threads} threads"
        if fault := _program_fault(generator):
            return f"{fault} with {threads} threads"
    return ""


def gpu_steps() -> int:
    return 3 + len(TREES) * len(DTYPES)


@torch.inference_mode()
def gpu_fault(library: CudaLibrary, device: torch.device, progress: Callable[[], None] = lambda: None) -> str:
    """As `compiled_fault`, of what was built of `canonical.cu`; what is expected is computed on the CPU."""
    generator, there = torch.Generator().manual_seed(1), _There(library, device)
    kinds = DTYPES.values()
    for check in (_numbers_fault, partial(_store_fault, held_as=kinds), _halves_fault):
        progress()
        if fault := check(there, generator):
            return fault
    for case in _attention_cases(generator, kinds):
        progress()
        paths = case.sight.paths()
        found = there.attention(case.queries, case.keys, case.values, paths, case.scale, case.cap, case.sinks)
        if not torch.equal(found, case.expected()):
            return f"differs from the definition of {case.name}"
    return ""


class _There:
    """A GPU's library for tensors of the CPU: they go there and come back, also where they are changed."""

    def __init__(self, library: CudaLibrary, device: torch.device) -> None:
        self._library, self._device = library, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            moved = [each.to(self._device) if isinstance(each, torch.Tensor) else each for each in given]
            found = getattr(self._library, name)(*moved, **named)
            for each, other in zip(given, moved, strict=True):
                if isinstance(each, torch.Tensor) and other is not each:
                    each.copy_(other)
            return found.cpu() if isinstance(found, torch.Tensor) else found

        return call


def _numbers_fault(library: Any, generator: torch.Generator) -> str:
    """Where functions, norms, turns or shares differ from their definitions, or nothing."""
    special = torch.tensor(
        [0.0, -0.0, 1e-40, -86.0, -86.1, 88.0, 89.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]
    )
    # Also in front: there several vectors are computed together, at the end one and what fills none.
    numbers = torch.cat([special, 20 * torch.randn(10007, generator=generator), special])
    for dtype in DTYPES.values():
        given = numbers.to(dtype)
        for name in compiled.FUNCTIONS:
            expected = plain.FUNCTIONS[name](given.float()).to(dtype)
            if not torch.equal(_bits(library.function(given, name)), _bits(expected)):
                return f"differs from the definition of {name} in {str(dtype)[6:]}"
            gates, by = given.roll(5), given.roll(3)  # and one number beside another that is none
            expected = plain.FUNCTIONS[name](gates.float()).to(dtype) * by
            if not torch.equal(_bits(library.function(gates, name, by)), _bits(expected)):
                return f"differs from the definition of {name} and a product in {str(dtype)[6:]}"
        for width in WIDTHS:
            fault = _rows_fault(library, torch.randn((7, width), generator=generator).to(dtype), generator)
            if fault:
                return f"differs from the definition of {fault} of {width} in {str(dtype)[6:]}"
    return _shares_fault(library, special, generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionCase:
    """Rows of a tree that attend, and what comes of it."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    steps: tuple[torch.Tensor, torch.Tensor] | None
    sight: Sight
    cap: float | None
    sinks: torch.Tensor | None
    kind: torch.dtype

    @property
    def scale(self) -> float:
        return float(self.queries.shape[2] ** -0.5)

    @property
    def name(self) -> str:
        return f"attention, of heads of {self.queries.shape[2]} in {str(self.kind)[6:]}"

    def expected(self) -> torch.Tensor:
        keys, values = self.keys, self.values
        if self.steps is not None:
            keys, values = plain.of_levels(keys, self.steps[0], 2), plain.of_levels(values, self.steps[1], 2)
        values = values[..., : self.queries.shape[2]]
        paths = self.sight.paths()
        found = plain.attention(self.queries.float(), keys, values, paths, self.scale, self.cap, self.sinks)
        return found.to(self.queries.dtype)


def _attention_cases(generator: torch.Generator, kinds: Iterable[torch.dtype]) -> Iterator[_AttentionCase]:
    """In caches of these `kinds`."""
    for kind in kinds:
        for heads, width, cap, window, has_sinks in TREES:
            sinks = 3 * torch.randn(2 * heads, generator=generator) if has_sinks else None
            queries, keys, values, steps, sight = _tree(heads, width, kind, window, generator)
            yield _AttentionCase(
                queries=queries.to(torch.bfloat16 if steps is not None else kind),
                keys=keys,
                values=values,
                steps=steps,
                sight=sight,
                cap=cap,
                sinks=sinks,
                kind=kind,
            )


def _delta_fault(library: compiled.Library, generator: torch.Generator) -> str:
    """Where steps of linear attention differ from their definition, or nothing: along a path, to two branches
    of it, and one that nothing is read from."""
    steps = torch.tensor([[0, 0, 0, 1], [1, 0, 0, -1], [2, 0, 1, 0], [3, 1, 1, 2], [4, 0, 2, 3]]).int()
    for key_heads, width, value_width in ((1, 1, 5), (3, 20, 33), (2, 128, 96)):
        heads = 2 * key_heads
        queries, keys = (torch.randn((5, key_heads, width), generator=generator) for _ in range(2))
        values = torch.randn((5, heads, value_width), generator=generator)
        decays, shares = (torch.rand((5, heads), generator=generator) for _ in range(2))
        given = DeltaRows(queries, plain.unit(keys, 1e-6), values, decays, shares)
        states = torch.randn((3, heads, width, value_width), generator=generator)
        expected_states = states.clone()
        expected = plain.delta_rule(given, expected_states, steps)
        found = library.delta_rule(given, states, steps)
        if not (torch.equal(found, expected) and torch.equal(states, expected_states)):
            return f"differs from the definition of linear attention, of heads of {width} x {value_width}"
    return ""


def _digits_fault(library: compiled.Library, generator: torch.Generator) -> str:
    """Where products of digits differ from those of the plain kernel, or nothing."""
    for inputs, outputs in ((64, 16), (75, 21), (512, 50)):
        weights = torch.randn((outputs, inputs), generator=generator)
        rows = torch.randn((ROWS, inputs), generator=generator)
        rows *= torch.tensor([1e-35, 1e-6, 1.0, 1e30]).repeat(ROWS // 4)[:, None]
        made = []
        for kind in (PanelInt8Linear, PlainInt8Linear):
            made.append(torch.nn.Linear(inputs, outputs, bias=False))
            quantise(made[-1], weights, kind)
        for count in (1, 2, 3, 5, ROWS):
            if not torch.equal(made[0](rows[:count]), made[1](rows[:count])):
                return f"differs from the plain product of digits of {count} rows, {inputs} x {outputs}"
    return ""


def _program_fault(generator: torch.Generator) -> str:
    """Where a layer that runs in one call differs from its definition, or nothing: with all norms, with
    matrices joined, apart and of experts, and of each kind."""
    hidden, heads, kv_heads, width, neurons, experts = 40, 4, 2, 16, 70, 6
    for dtype, how, place in itertools.product(DTYPES.values(), NORMS, ("apart", "joined", "experts")):
        is_joined, number = place == "joined", NORMS.index(how)
        mixture = Mixture(
            router=ROUTERS[(number + compiled.KINDS[dtype]) % len(ROUTERS)][0],
            experts=experts,
            chosen=2,
            is_normed=dtype != torch.float16,
            factor=1.5,
            groups=2,
            limit=0.7 if number == 1 else 0.0,
            slope=1.7,
        )
        norms: QueryNorm = "head" if how == NORMS[0] else "width" if how == NORMS[1] else ""
        dense = Dense(
            scale=0.3,
            cap=5.0 if is_joined else 0.0,
            query_norm="" if is_joined else norms,
            activation="gelu_tanh" if is_joined else "silu",
            norm_before_attention="first",
            norm_after_attention="second" if norms else "",
            norm_before_mlp="" if norms else "second",
            added_scale=0.7 if is_joined else 1.0,
            has_sinks=is_joined,
            clip=1.5 if place == "apart" else 0.0,
            mixture=mixture if place == "experts" else None,
        )
        spec = LayerSpec(heads=heads, kv=Heads(count=kv_heads, width=width), source=0, dense=dense)

        def norm(numbers: int, dtype: torch.dtype = dtype) -> Any:
            return SimpleNamespace(weight=torch.randn(numbers, generator=generator).to(dtype), eps=1e-6)

        def linear(inputs: int, outputs: int, kind: Any, dtype: torch.dtype = dtype) -> Any:
            return _small_linear(inputs, outputs, kind, dtype, generator)

        queries, keys = heads * width, kv_heads * width
        if is_joined:
            attention = {"qkv_proj": linear(hidden, queries + 2 * keys, PanelInt8Linear)}
            attention["sinks"] = torch.randn(heads, generator=generator).to(dtype)
            mlp = {"gate_up_proj": linear(hidden, 2 * neurons, PanelInt4Linear)}
        else:
            attention = {"q_proj": linear(hidden, queries, None), "k_proj": linear(hidden, keys, None)}
            attention["v_proj"] = linear(hidden, keys, PanelInt4Linear)
            mlp = {"gate_proj": linear(hidden, neurons, None), "up_proj": linear(hidden, neurons, None)}
        if place == "experts":
            mlp = _experts(experts, hidden, neurons, (None, PanelInt8Linear, PanelInt4Linear)[number], linear)
            mlp["gate"] = norm(hidden * experts)
            mlp["gate"].weight = mlp["gate"].weight.view(experts, hidden)
            mlp["gate"].e_score_correction_bias = torch.randn(experts, generator=generator)
        attention["o_proj"], mlp["down_proj"] = linear(queries, hidden, None), linear(neurons, hidden, None)
        many = width if norms == "head" else queries, width if norms == "head" else keys
        attention |= {name: norm(size) for name, size in zip(("q_norm", "k_norm"), many, strict=True)}
        layer = SimpleNamespace(
            self_attn=SimpleNamespace(**attention),
            mlp=SimpleNamespace(**mlp),
            first=norm(hidden),
            second=norm(hidden),
        )
        for rows in (1, 5, 40):
            if not _runs_as_defined(layer, spec, how, dtype, rows, generator):
                return f"differs from the definition of a layer of {rows} rows in {str(dtype)[6:]}, {how}"
    return ""


def _experts(
    count: int, hidden: int, neurons: int, kind: Any, linear: Callable[[int, int, Any], Any]
) -> dict[str, Any]:
    """So many, in two stacks, or packed."""
    made = {
        name: [linear(*sizes, kind) for _ in range(count)]
        for name, sizes in (("gate_up_proj", (hidden, 2 * neurons)), ("down_proj", (neurons, hidden)))
    }
    for each in itertools.chain(*made.values()):
        each.bias = None
    stacks: dict[str, Any]
    if kind is None:
        stacks = {name: torch.stack([each.weight for each in own]) for name, own in made.items()}
    else:
        stacks = {name: torch.nn.ModuleList(own) for name, own in made.items()}
    return {"experts": SimpleNamespace(**stacks, product=lanes16), "apart": made}


def _small_linear(
    inputs: int, outputs: int, kind: Any, dtype: torch.dtype, generator: torch.Generator
) -> torch.nn.Linear:
    """A layer with a bias: packed as `kind` does, or multiplied by our own kernels."""
    made = torch.nn.Linear(inputs, outputs)
    weights = torch.randn((outputs, inputs), generator=generator) * inputs**-0.5
    made.bias = torch.nn.Parameter(torch.randn(outputs, generator=generator).to(dtype), requires_grad=False)
    if kind is not None:
        quantise(made, weights, kind)
        return made
    made.weight = torch.nn.Parameter(weights.to(dtype), requires_grad=False)
    made.__dict__["product"] = lanes16
    made.forward = partial(_by_lanes, made)  # type: ignore[method-assign]
    return made


def _by_lanes(linear: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return lanes16(rows, linear.weight, linear.bias)


def _runs_as_defined(
    layer: Any, spec: LayerSpec, how: Norm, dtype: torch.dtype, rows: int, generator: torch.Generator
) -> bool:
    """With rows of a tree: each sees the first, itself, and every other before it."""
    room = -(-rows // LANES) * LANES
    cache = TreeCache(
        heads={0: spec.kv},
        slots_max=room,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.reserve(room)
    slots = torch.randperm(rows, generator=generator)
    seen = torch.zeros((rows, rows), dtype=torch.bool)
    for row in range(rows):
        seen[row, slots[: row + 1]] = True
    positions = torch.zeros(rows, dtype=torch.int32)
    positions[slots] = torch.arange(rows, dtype=torch.int32)
    part = TreeRows(cache, 0, slots, torch.arange(rows), positions, seen)
    hidden = torch.randn((rows, layer.self_attn.o_proj.out_features), generator=generator).to(dtype)
    turned = spec.kv.width // 2
    cosine, sine = (torch.randn((1, rows, turned), generator=generator).to(dtype) for _ in range(2))
    keys, values, _ = cache.of(0)
    held = plain.Held(keys=keys.clone(), values=values.clone(), slots=slots, paths=part.sight(None).paths())
    parts = {**vars(layer), **vars(layer.self_attn), **vars(layer.mlp)}
    products = {name: each for name, each in parts.items() if name.endswith("_proj")}
    norms = {
        name: partial(plain.norm, weights=each.weight, eps=each.eps, how=how)
        for name, each in parts.items()
        if hasattr(each, "eps")
    }
    experts: list[dict[str, Any]] = []
    if "gate" in parts:
        weight = parts["gate"].weight.float()
        mixture = None if spec.dense is None else spec.dense.mixture
        to = torch.float32 if mixture is not None and mixture.router == "sigmoid" else dtype
        products["gate"] = lambda rows: plain.product(rows.float(), weight).to(to)
        apart = parts["apart"]
        experts = [dict(zip(apart, own, strict=True)) for own in zip(*apart.values(), strict=True)]
        del norms["gate"]
    vectors = {"sinks": parts["sinks"].float()} if "sinks" in parts else {}
    if experts:
        vectors["e_score_correction_bias"] = parts["gate"].e_score_correction_bias
    expected = plain.layer(spec, products, norms, hidden.clone(), (cosine, sine), held, experts, vectors)
    found = hidden.clone()[None]
    inner = {
        f"{name}.{leaf}": each
        for name in ("self_attn", "mlp")
        for leaf, each in vars(vars(layer)[name]).items()
    }
    program = program_of({**vars(layer), **inner}, spec, how, dtype)
    Pass(Room(), found, TreeBatch([part], 0)).run(program, (cosine, sine))
    return (
        torch.equal(found[0], expected) and torch.equal(keys, held.keys) and torch.equal(values, held.values)
    )


def _halves_fault(library: Any, generator: torch.Generator) -> str:
    """Where products with small matrices differ from their definition, or nothing; a row is all zeros."""
    for inputs, outputs in ((1, 3), (2, 1), (5, 7), (64, 40), (100, 128), (2880, 33)):
        rows = torch.randn((3, inputs), generator=generator)
        rows[1] = 0.0
        weights = torch.randn((outputs, inputs), generator=generator)
        if not torch.equal(_bits(library.halves(rows, weights)), _bits(plain.product(rows, weights))):
            return f"differs from the definition of products in halves, {inputs} x {outputs}"
    return ""


def _shares_fault(library: Any, special: torch.Tensor, generator: torch.Generator) -> str:
    """Where a mixture's shares and the sums of its experts differ from their definition, or nothing."""
    for width in (1, 2, 7, 64, 128):
        rows = 20 * torch.randn((len(special) + 1, width), generator=generator)
        rows[:-1, 0] = special
        for are_powers, define in ((True, plain.softmax), (False, plain.over_their_sum)):
            if not torch.equal(_bits(library.shares(rows, are_powers)), _bits(define(rows))):
                return f"differs from the definition of shares of {width} numbers"
        owners = torch.randint(0, 3, (len(rows),), generator=generator)
        for dtype in DTYPES.values():
            found, expected = (torch.ones((3, width), dtype=dtype) for _ in range(2))
            library.add_rows(found, owners, rows.to(dtype))
            for owner, row in zip(owners.tolist(), rows.to(dtype), strict=True):
                expected[owner] += row
            if not torch.equal(_bits(found), _bits(expected)):
                return f"differs from sums of rows of {width} in {str(dtype)[6:]}"
    return ""


def _rows_fault(library: Any, rows: torch.Tensor, generator: torch.Generator) -> str:
    """What of norms and turns differs from its definition for rows `[rows, width]`, or nothing."""
    count, width = rows.shape
    weights = torch.randn(width, generator=generator).to(rows.dtype)
    for how in NORMS:
        if not torch.equal(library.norm(rows, weights, 1e-6, how), plain.norm(rows, weights, 1e-6, how)):
            return "a norm"
    heads = torch.randn((1, count, 3, width), generator=generator).to(rows.dtype).transpose(1, 2)
    for part in {width // 2 * 2, width // 4 * 2}:
        angles = [torch.randn((1, count, part), generator=generator).to(rows.dtype) for _ in range(2)]
        if part and not torch.equal(library.turned(heads, *angles), plain.turned(heads, *angles)):
            return "turns"
    if isinstance(library, compiled.Library):
        positions = torch.randint(0, 2**20, (1, count), generator=generator)
        given = positions, torch.rand(width, generator=generator), 1.25, rows.dtype
        if not all(map(torch.equal, library.angles(*given), plain.angles(*given))):
            return "angles"
    return ""


def _levels_fault(library: compiled.Library, generator: torch.Generator) -> str:
    """Where rows are rounded to other levels than they should be, or nothing."""
    for dtype, width in itertools.product(DTYPES.values(), WIDTHS):
        rows = torch.randn((7, width), generator=generator).to(dtype).float()
        if not all(map(torch.equal, library.levels(rows), plain.levels(rows))):
            return f"differs from the definition of levels of {width} in {str(dtype)[6:]}"
    return ""


def _store_fault(library: Any, generator: torch.Generator, held_as: Iterable[torch.dtype]) -> str:
    """Where keys and values come to lie otherwise in a cache than they should, or nothing."""
    places = torch.tensor([17, 0, 5, 31])
    for width, given, held in itertools.product((8, 64, 80), DTYPES.values(), held_as):
        new_keys, new_values = (
            torch.randn((4, 3, width), generator=generator).to(given).transpose(0, 1) for _ in range(2)
        )
        caches = []
        for store in (library.store, plain.store):
            keys, values = torch.zeros((3, 2, width, LANES), dtype=held), torch.zeros((3, 32, 80), dtype=held)
            of_keys = torch.zeros((3, 2, -(-width // GROUP), LANES), dtype=torch.float16)
            of_values = torch.zeros((3, 32, -(-width // GROUP)), dtype=torch.float16)
            steps = (of_keys, of_values) if held == torch.int8 else None
            store(places, new_keys, new_values, keys, values, steps)
            caches.append((keys, values, of_keys, of_values))
        if not all(map(torch.equal, *caches)):
            return f"stores keys or values of {width} in {str(given)[6:]} otherwise in {str(held)[6:]}"
    return ""


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """What is no number has one sign: torch's versions give it either."""
    return torch.where(numbers.isnan(), torch.nan, numbers.float()).view(torch.int32)


def _packed_cases() -> Iterator[tuple[str, Form, int, int]]:
    """Each form, of ggml's type `kind`, with inputs and outputs of a matrix; in some a group is not full."""
    for kind, form in FORMS.items():
        for inputs, outputs in (*(SHAPES if form is Q4_0 else FORM_SHAPES), (75, 21)):
            if inputs % form.unit == 0 or form.unit == GROUP:
                yield kind, form, inputs, outputs


def _packed_numbers(
    form: Form, inputs: int, outputs: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all sizes, and panels of levels whose products are as large as they can be, and of others."""
    rows = torch.randn((ROWS, inputs), generator=generator)
    rows *= torch.tensor([1e-35, 1e-6, 1.0, 1e30]).repeat(ROWS // 4)[:, None]
    rows[2], rows[6, ::3] = 1.0, 0.0
    between = torch.randint(-126, 126, (3, inputs), generator=generator) + 0.5
    rows[9:12] = between * torch.rand((3, 1), generator=generator)
    rows[9:12, ::GROUP] = 127 * (
        rows[9:12, 1::GROUP] / between[:, 1::GROUP]
    )  # so that others lie between levels
    return rows, _panels(form, inputs, outputs, generator)


def _panels(form: Form, inputs: int, outputs: int, generator: torch.Generator) -> torch.Tensor:
    """A random matrix; of its outputs the first two have the least and the largest levels only, and the third
    scales that are below the smallest normal number, or about it."""
    units = -(-inputs // form.unit)
    groups = units * form.groups

    def below(end: int, *shape: int) -> torch.Tensor:
        numbers = torch.randint(0, end, (outputs, *shape), generator=generator, dtype=torch.int16)
        return numbers.to(torch.uint8)

    levels = below(1 << form.bits, groups, GROUP)
    levels[0], levels[1] = 0, (1 << form.bits) - 1
    scales, minimums = (torch.randn((outputs, units), generator=generator).half() for _ in range(2))
    scales[2] *= 2.0**-20
    if form.has_exponents:
        scales = 118 + below(20, units)
        scales[2] = below(3, units)[2]
    whole = below(256, groups, 2).view(torch.int8) if form.halves == 2 else below(64, groups, 1)
    given = Levels(
        levels=levels,
        scales=scales,
        minimums=minimums if form.has_minimum else None,
        whole_scales=whole if form.groups > 1 else None,
        whole_minimums=below(64, groups) if form.groups > 1 and form.has_minimum else None,
    )
    return packed(form, given)


def _tree(
    group: int, width: int, kind: torch.dtype, window: int | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None, Sight]:
    """Queries, keys and values of 17 nodes of a random tree below 160 committed ones, all in random slots;
    with the steps between levels where they are levels. Sixteen rows share what is looked up, and blocks of
    slots may be taken in pairs: there is one more of each."""
    committed, count, kv_heads = 160, 17, 2
    high = committed + count + 20
    slots = torch.randperm(high, generator=generator)[: committed + count]
    positions = torch.full((high,), -1, dtype=torch.int32)
    positions[slots[:committed]] = torch.arange(committed, dtype=torch.int32)
    seen = torch.zeros((count, high), dtype=torch.bool)
    for row, slot in enumerate(slots[committed:].tolist()):
        above = int(torch.randint(-1, row, (1,), generator=generator)) if row else -1
        if above < 0:
            seen[row, slots[:committed]] = True
        else:
            seen[row] = seen[above]
        positions[slot] = committed if above < 0 else positions[slots[committed + above]] + 1
        seen[row, slot] = True
    if window is not None:
        seen &= positions[None] > positions[slots[committed:], None] - window
    room = -(-high // LANES) * LANES
    keys = torch.randn((kv_heads, room // LANES, width, LANES), generator=generator)
    values = torch.randn((kv_heads, room, -(-width // LANES) * LANES), generator=generator)
    values[..., width:] = 0
    queries = torch.randn((count, kv_heads * group, width), generator=generator)
    if kind != torch.int8:
        return queries, keys.to(kind), values.to(kind), None, Sight(seen, positions)
    levels = [(40 * each).round().clamp(-127, 127).to(kind) for each in (keys, values)]
    groups = -(-width // GROUP)
    of_keys = torch.rand((kv_heads, room // LANES, groups, LANES), generator=generator) / 40
    of_values = torch.rand((kv_heads, room, groups), generator=generator) / 40
    return queries, levels[0], levels[1], (of_keys.half(), of_values.half()), Sight(seen, positions)


# -------------------------------------------------------------------------------- matrices of weights


def linear_steps(kernel: Kernel, device: torch.device) -> int:
    is_filed = kernel.linear is not None and issubclass(kernel.linear, GgufLinear)
    layers = len(FORMS) * len(FORM_SHAPES) if is_filed else len(SHAPES) + 1
    pairs = len(PAIRS_SHAPES) * 3 if kernel.arithmetic == PAIRS16 else 0
    return pairs + layers * len(_thread_counts(device))


@torch.inference_mode()
def linear_fault(
    dtype: str,
    kernel: Kernel,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
    bits: hashlib._Hash | None = None,
) -> str:
    """What is wrong with a kernel, or nothing. Calls `progress` now and then; `bits` takes what it
    computed."""
    if kernel.arithmetic == PAIRS16 and (fault := pairs_fault(progress)):
        return fault
    for (layer, other), weights, rows, expected, allowed in _layers(dtype, kernel, device):
        outputs, inputs = weights.shape
        given = torch.from_numpy(rows).to(DTYPES[ACTIVATIONS[dtype]]).to(device)
        uneven = torch.from_numpy(np.random.default_rng(inputs).normal(size=rows.shape)).to(given)
        uneven_expected, uneven_allowed = _uneven(dtype, weights, uneven.double().cpu().numpy())
        together: torch.Tensor | None = None
        for threads in _thread_counts(device):
            torch.set_num_threads(threads)
            progress()
            for count, first in _portions():
                own = slice(first, first + count)
                where = f"for {count} rows of {inputs} x {outputs} with {threads} threads"
                off = np.abs(layer(given[own]).double().cpu().numpy() - expected[own])
                if not (off <= allowed[own]).all():
                    return f"computes something else than it should {where}: off by {off.max():.3g}"
                found = layer(uneven[own])
                if together is None:
                    together = found
                    if bits is not None:
                        bits.update(found.float().cpu().numpy().tobytes())
                if not torch.equal(found, together[own]):
                    return f"makes a row depend on the rows beside it {where}"
                off = np.abs(found.double().cpu().numpy() - uneven_expected[own])
                if not (off <= uneven_allowed[own]).all():
                    return f"computes something else than it should {where}: off by {off.max():.3g}"
            if not _are_like_one_by_one(kernel, (layer, other), uneven):
                return f"computes several matrices of {inputs} x {outputs} otherwise with {threads} threads"
    return _many_rows_fault(dtype, kernel, device, progress)


def _many_rows_fault(dtype: str, kernel: Kernel, device: torch.device, progress: Callable[[], None]) -> str:
    """Where a row depends on how many run, or nothing. What is left of sums that cancel is their rounding
    alone, in which every other order of adding up shows."""
    if kernel.linear is not None and issubclass(kernel.linear, GgufLinear):
        return ""  # held to a definition already
    inputs, outputs = MANY_SHAPE
    generator = np.random.default_rng(5)
    one, other = generator.permutation(inputs).reshape(2, -1)
    weights, numbers = (generator.normal(size=(count, inputs)) for count in (outputs, MANY_ROW_COUNTS[0]))
    weights[:, one], numbers[:, one] = weights[:, other], -numbers[:, other]
    layer = _layer(dtype, kernel, weights, device)
    rows = torch.from_numpy(numbers).to(DTYPES[ACTIVATIONS[dtype]]).to(device)
    looked_at = range(0, len(rows), 16)
    torch.set_num_threads(1)
    alone = [layer(rows[row : row + 1])[0] for row in looked_at]
    for threads in _thread_counts(device):
        torch.set_num_threads(threads)
        progress()
        for count in MANY_ROW_COUNTS:
            found = layer(rows[:count])
            if not all(torch.equal(found[row], alone[row // 16]) for row in looked_at if row < count):
                return f"makes a row depend on {count} that run, {inputs} x {outputs}, with {threads} threads"
    return ""


def _are_like_one_by_one(kernel: Kernel, layers: Sequence[Any], rows: torch.Tensor) -> bool:
    """Whether rows go through several matrices in one call, as a mixture's do, as through each alone.

    Kernels without such a call have nothing to try: there they do so one after another."""
    if kernel.linear is None and kernel.product not in IN_ONE_CALL:
        return True
    parts = ((1, 5), (0, 1), (1, 10), (0, len(rows) - 16))
    counts = [count for _, count in parts]
    each = [layers[matrix] for matrix, _ in parts]
    if kernel.linear is None:
        found = products(kernel.product, rows, torch.stack([layer.weight for layer in layers]), parts, None)
    else:
        found = layers[0].each(each, counts, rows)
    one_by_one = zip(each, rows.split_with_sizes(counts), strict=True)
    return torch.equal(found, torch.cat([layer(part) for layer, part in one_by_one]))


def pairs_fault(progress: Callable[[], None] = lambda: None) -> str:
    """Where this processor multiplies pairs of bfloat16 otherwise than `plain.py` has it, or nothing: numbers
    as models have them, sums about the smallest normal number, and numbers that are none."""
    library = compiled.library()
    assert library is not None
    generator = torch.Generator().manual_seed(3)
    least = 2.0**-63
    # The second one of a pair comes first. The smallest normal number without half a last place below it is
    # too small, and without a quarter it is not.
    rare = torch.tensor([[-(2.0**-24), 1], [-(2.0**-25), 1], [-(2.0**-26), 1], [2.0**-8, -1], [1, -1]])
    none = torch.tensor([[1e30, 1e30], [math.inf, 1], [math.inf, -math.inf], [math.nan, 1]])
    for inputs, outputs in PAIRS_SHAPES:
        rows, weights = (torch.randn((count, inputs), generator=generator) for count in (ROWS // 4, outputs))
        sizes = least * torch.exp2(torch.randint(-5, 4, (2, inputs), generator=generator))
        for x, w in (
            (rows, weights),
            (rows * sizes[0], weights * sizes[1]),
            (F.pad(least * torch.cat([rare, none]), (0, inputs - 2)), torch.full((outputs, inputs), least)),
        ):
            progress()
            given, matrix = x.bfloat16(), w.bfloat16()
            expected = plain.pairs_product(given, matrix)
            for count, first in ((len(x), 0), (5, 0), (1, len(x) - 1)):
                found = library.pairs(given[first : first + count], matrix, torch.float32)
                if not torch.equal(_bits(found), _bits(expected[first : first + count])):
                    return (
                        f"differs from the definition of products in pairs of {count} rows of "
                        f"{inputs} x {outputs}"
                    )
    return ""


def _portions() -> Iterator[tuple[int, int]]:
    """How many rows run, and the first of them: all, every number in changing order, and each row alone."""
    yield ROWS, 0
    for turn, count in enumerate(ROW_COUNTS):
        yield count, 5 * turn % (ROWS - count + 1)
    for row in range(0, ROWS, 3):
        yield 1, row


def _thread_counts(device: torch.device) -> tuple[int, ...]:
    """One and all; a GPU's work does not depend on them."""
    most = os.cpu_count() or 1
    return (1,) if most == 1 or device.type != "cpu" else (1, most)


def _layers(
    dtype: str, kernel: Kernel, device: torch.device
) -> Iterator[tuple[list[nn.Linear], F64, F64, F64, F64]]:
    """Layers of several shapes, of a file's matrices in each form, and one beside each that is like it; with
    the weights `[out, in]` of the first, rows `[ROWS, in]`, what their product is, and by how much it may be
    missed."""
    if kernel.linear is None or not issubclass(kernel.linear, GgufLinear):
        for inputs, outputs in SHAPES:
            weights, rows, expected, allowed = _numbers(dtype, inputs, outputs)
            both = [_layer(dtype, kernel, own, device) for own in (weights, weights[::-1].copy())]
            yield both, weights, rows, expected, allowed
        return
    for kind, form in FORMS.items():
        for inputs, outputs in FORM_SHAPES:
            generator = torch.Generator().manual_seed(inputs)
            panels, others = (_panels(form, inputs, outputs, generator) for _ in range(2))
            parts = [Part(kind, own.to(device), outputs) for own in (panels, others)]
            filed = [_filed(part, dtype, kernel.linear, inputs) for part in parts]
            given = exact_rows(np.random.default_rng(inputs), ROWS, inputs)
            weights, expected, allowed = _filed_numbers(form, panels, outputs, given)
            yield filed, weights, given, expected, allowed


def _filed(part: Part, dtype: str, kind: type[GgufLinear], inputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, part.outputs, bias=False, device="meta")
    stay_packed(layer, (part,), kind, DTYPES[ACTIVATIONS[dtype]])
    return layer


def _filed_numbers(form: Form, panels: torch.Tensor, outputs: int, rows: F64) -> tuple[F64, F64, F64]:
    """As `_layers`; a level times its scale, and a minimum, may be far larger than the weight of both."""
    levels, scales, minimums = groups_of(form, panels)
    products = levels.double().numpy() * np.repeat(scales.double().numpy(), GROUP // form.halves, axis=2)
    lows = np.zeros((*products.shape[:2], 1)) if minimums is None else minimums.double().numpy()[..., None]
    found = products - lows, np.abs(products) + np.abs(lows)
    weights, sizes = (each.reshape(len(products), -1)[:outputs] for each in found)
    expected, spread = rows @ weights.T, np.abs(rows) @ sizes.T
    rounding = EPSILONS["bfloat16"] / 2 * np.abs(expected)
    return weights, expected, rounding + 4 * EPSILONS["float32"] * spread


def _layer(dtype: str, kernel: Kernel, weights: F64, device: torch.device) -> nn.Linear:
    outputs, inputs = weights.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    values = torch.from_numpy(weights).to(DTYPES[ACTIVATIONS[dtype]]).to(device)
    if kernel.linear is None:
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.forward = lambda rows: kernel.product(rows, layer.weight, None)  # type: ignore[assignment, method-assign]
    else:
        assert issubclass(kernel.linear, QuantisedLinear), "others are not made of numbers"
        quantise(layer, values, kernel.linear)
    return layer


def _numbers(dtype: str, inputs: int, outputs: int) -> tuple[F64, F64, F64, F64]:
    """Weights `[out, in]`, rows `[ROWS, in]`, what their product is, and by how much it may be missed."""
    generator = np.random.default_rng(inputs * 10007 + outputs)
    if dtype in LINEARS:
        weights, rows = LINEARS[dtype].exact_numbers(generator, (outputs, inputs), ROWS)
    else:
        make = _long_numbers if dtype == "float32" else _plain_numbers
        weights, rows = make(generator, inputs, outputs)
    if dtype == "float32":
        return weights, rows, *_uneven(dtype, weights, rows)
    expected, spread = rows @ weights.T, np.abs(rows) @ np.abs(weights.T)
    rounding = EPSILONS[ACTIVATIONS[dtype]] / 2 * np.abs(expected)  # of the result alone: sums are exact
    return weights, rows, expected, rounding + EPSILONS["float32"] * spread


def _uneven(dtype: str, weights: F64, rows: F64) -> tuple[F64, F64]:
    """What the product of these rows is, and by how much it may be missed: sums depend on their order."""
    expected, spread = rows @ weights.T, np.abs(rows) @ np.abs(weights.T)
    allowed = EPSILONS["float32"] * np.sqrt(rows.shape[1]) * spread / 4
    allowed += EPSILONS[ACTIVATIONS[dtype]] / 2 * (np.abs(expected) + allowed)
    if dtype in LINEARS or dtype == FILED:
        step = LINEARS[dtype].input_step if dtype in LINEARS else GgufLinear.input_step
        steps = np.abs(rows).max(axis=1, keepdims=True) * step
        allowed += steps / 2 * np.abs(weights).sum(axis=1)
    return expected, allowed


def _plain_numbers(generator: np.random.Generator, inputs: int, outputs: int) -> tuple[F64, F64]:
    """Whole numbers times powers of two: sums are exact in float32 in any order, and fit float16."""
    weights = generator.integers(-2 * SMALL, 2 * SMALL + 1, (outputs, inputs)).astype(np.float64)
    rows = generator.integers(-SMALL, SMALL + 1, (ROWS, inputs)).astype(np.float64)
    return weights * powers(generator, outputs) / 64, rows * powers(generator, ROWS)


def _long_numbers(generator: np.random.Generator, inputs: int, outputs: int) -> tuple[F64, F64]:
    """Numbers that need all digits of float32: TF32 and bfloat16 would compute short ones right, too."""
    weights, rows = generator.normal(size=(outputs, inputs)), generator.normal(size=(ROWS, inputs))
    return weights.astype(np.float32).astype(np.float64), rows.astype(np.float32).astype(np.float64)


# --------------------------------------------------------------------------------------- all the rest

HEADS, KV_HEADS, WIDTH = 6, 2, 32
KEYS = (1, 7, 64, 133)
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest error of what is no sum of whole numbers, beside numbers of about 1: a few roundings."""


def attention_steps(device: torch.device) -> int:
    return len(KEYS) * len(_thread_counts(device))


@torch.inference_mode()
def attention_fault(dtype: str, device: torch.device, progress: Callable[[], None] = lambda: None) -> str:
    """What is wrong with all that a layer computes without a matrix of weights, or nothing.

    Calls `progress` now and then.
    """
    kind, allowed = DTYPES[ACTIVATIONS[dtype]], TOLERANCES[ACTIVATIONS[dtype]]
    for threads in _thread_counts(device):
        torch.set_num_threads(threads)
        for keys in KEYS:
            progress()
            for softcap, has_sinks in ((None, False), (20.0, False), (None, True)):
                for count in ROW_COUNTS[:8]:
                    found, expected = _attended(keys, min(count, keys), softcap, has_sinks, kind, device)
                    off = np.abs(found - expected).max()
                    if not off <= allowed:
                        return f"is wrong for {count} rows of {keys} keys: off by {off:.3g}"
        for width in (33, 64, 257):
            values = np.random.default_rng(width).normal(size=(5, width))
            given = torch.from_numpy(values).to(kind).to(device)
            exact = given.double().cpu().numpy()
            normal = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True))
            for name, made, expected in (
                ("silu", F.silu(given), exact / (1 + np.exp(-exact))),
                ("gelu", F.gelu(given, approximate="tanh"), _gelu(exact)),
                ("rms_norm", F.rms_norm(given.float(), (width,)), normal),
                ("softmax", F.softmax(given, dim=-1, dtype=torch.float32), _softmax(exact)),
            ):
                off = np.abs(made.double().cpu().numpy() - expected).max()
                if not off <= allowed:
                    return f"is right, but {name} of {width} is off by {off:.3g}"
    return ""


def _attended(
    keys: int,
    count: int,
    softcap: float | None,
    has_sinks: bool,
    kind: torch.dtype,
    device: torch.device,
) -> tuple[F64, F64]:
    """The tree attention of the last `count` of `keys` nodes with a random mask, and what it should be.

    Both are `[rows, heads, width]`.
    """
    generator = np.random.default_rng(keys * 1009 + count)
    query, key, value = (generator.normal(size=(heads, keys, WIDTH)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    visible = generator.random((count, keys)) < 0.7
    visible[np.arange(count), keys - count + np.arange(count)] = True  # a node sees itself
    given = [torch.from_numpy(part).to(kind).to(device)[None] for part in (query[:, -count:], key, value)]
    sinks = torch.linspace(-1.0, 4.0, HEADS).to(kind)
    exact = [part[0].double().cpu().numpy() for part in given]
    cache = TreeCache(
        heads={0: Heads(count=KV_HEADS, width=WIDTH)}, slots_max=keys, dtype=kind, device=device
    )
    cache.reserve(keys)
    cache.write(0, torch.arange(keys, device=device), given[1][0], given[2][0])
    slots = torch.arange(keys - count, keys, device=device)
    positions = torch.arange(keys, dtype=torch.int32, device=device)
    rows = TreeRows(cache, 0, slots, slots, positions, torch.from_numpy(visible).to(device))
    new_keys, new_values = (part[:, :, -count:] for part in given[1:])
    found, _ = tree_attention(
        SimpleNamespace(layer_idx=0),
        given[0],
        new_keys,
        new_values,
        None,
        tree=TreeBatch([rows], 0),
        scaling=WIDTH**-0.5,
        softcap=softcap,
        s_aux=sinks.to(device) if has_sinks else None,
    )
    scores = np.einsum("hrd,hkd->hrk", exact[0], np.repeat(exact[1], HEADS // KV_HEADS, axis=0)) * WIDTH**-0.5
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    columns = [np.where(visible[None], scores, -np.inf)]
    if has_sinks:
        columns.append(np.broadcast_to(sinks.double().numpy()[:, None, None], (HEADS, count, 1)))
    shares = _softmax(np.concatenate(columns, axis=2))[..., :keys]
    expected = np.einsum("hrk,hkd->rhd", shares, np.repeat(exact[2], HEADS // KV_HEADS, axis=0))
    return found[0].double().cpu().numpy(), expected


def _softmax(scores: F64) -> F64:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: F64 = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _gelu(values: F64) -> F64:
    curved: F64 = 0.5 * values * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))
    return curved


if __name__ == "__main__":
    main()
