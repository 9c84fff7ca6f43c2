"""A program's steps as operations that C runs in one call (`flowspec_run` in `arithmetic/canonical.c`), which
refer to memory by addresses."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowspec.core.protocol.model_spec import NORMS, Convolution, DeltaRule, Router
from flowspec.model.arithmetic.arrays import DTYPES
from flowspec.model.arithmetic.compiled import (
    FUNCTIONS,
    KINDS,
    Call,
    Library,
    Operation,
    ProgramFields,
    address,
    kind_of,
    threads,
)
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.arithmetic.plain import UNIT_EPS
from flowspec.model.parts import Linear, Packed, Stack
from flowspec.model.program import NOWHERE, Program, Step, View

_NAMES = (
    *("norm", "divide", "pair", "round", "linear", "pairs", "packed", "halves"),
    *("turn", "store", "attend", "gate", "add", "copy", "clip", "choose", "sort", "gather", "mix"),
    *("multiply", "scale", "hold", "convolve", "recall", "step_states", "load", "load_embedding"),
    *("look_up", "carry", "leave", "narrow"),
)
CODES = {name: code for code, name in enumerate(_NAMES)}
"""In the source's order."""
PREPARED_BY = {"linear": "divide", "pairs": "pair", "packed": "round"}
"""What rows are made of before they are multiplied, by how they are."""
STAGES = {
    **dict.fromkeys((*PREPARED_BY, "halves"), "outputs"),
    **{name: name for name in ("attend", "store", "sort", "convolve", "recall", "step_states")},
}
"""What threads divide in operations that do not go by rows, or that need others' rows."""
TOGETHER = {("rows", "store"), ("store", "rows"), ("convolve", "rows")}
"""Stages of which a thread goes on to the second with the rows of the first."""
HOW_CHOSEN: tuple[tuple[Router, ...], ...] = (
    ("softmax",),
    ("softmax to 1", "scaled softmax to 1"),
    ("softmax of chosen",),
    ("sigmoid",),
)
"""In the source's order."""
_HOW = {name: place for names in (NORMS, FUNCTIONS) for place, name in enumerate(names)}
_HOW |= {name: place for place, names in enumerate(HOW_CHOSEN) for name in names}
REGISTERS_MAX = 48
ALIGNMENT, FLOAT_BYTES = 64, 4


class Operations(ProgramFields):
    """Those of a program as the source reads them, and `held`, what has to stay in memory for them. A layer's
    attends to keys and values of a `source`; layers with one `view` see the same of what a request holds. One
    with states has those of their steps alone, for rows that are `past`."""

    at = 0
    """Their address."""
    held: tuple[Any, ...]
    source: int
    view: tuple[int | None, Convolution | DeltaRule | None]
    past: Operations


class Room:
    """Memory that calls are lent, one after another; it grows."""

    def __init__(self, library: Library) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._at = self._size = 0
        self._run = library.run

    def run(self, operations: Operations, call: Call) -> None:
        call.room, call.room_bytes = self._at, self._size
        while needed := self._run(operations.at, ctypes.byref(call)):
            self._bytes, self._size = np.empty(0, np.uint8), 0  # before there is more: both would not fit
            size = needed + needed // 16
            self._bytes = np.empty(size + ALIGNMENT, np.uint8)
            self._at, self._size = -(-address(self._bytes) // ALIGNMENT) * ALIGNMENT, size
            call.room, call.room_bytes = self._at, self._size


class Rows:
    """Makes rows `[rows, outputs]` of rows `[rows, inputs]` by a program that carries them on, last."""

    def __init__(self, room: Room, program: Program) -> None:
        last = program.steps[-1]
        self._room, self._operations, self.outputs = room, operations_of(program), last.source.width
        self._call, self._dtype = Call(between_going=self.outputs), DTYPES[last.how]

    def __call__(self, x: Any) -> Any:
        found = np.empty((len(x), self.outputs), self._dtype)
        if len(x):
            call, given = self._call, np.ascontiguousarray(x)
            call.hidden, call.rows = address(given), len(given)
            call.going, call.threads = address(found), threads()
            self._room.run(self._operations, call)
        return found


def operations_of(program: Program) -> Operations:
    found = _Lowering(program).operations(program.steps)
    found.source, found.view = program.source, (program.window, program.mixer)
    if isinstance(program.mixer, DeltaRule):
        of_states = [step for step in program.steps if step.name == "sum_up"]
        found.past = _Lowering(program).operations(of_states)
    return found


class _Operand(NamedTuple):
    """A matrix as the source reads it: outputs of a linear layer from number `first` on; `prepared`: how it
    is multiplied, and which rows it takes, rounded so many `times`."""

    prepared: tuple[str, int, int, bool]
    kind: int
    weights: int
    inputs: int
    outputs: int
    first: int
    experts: int = 0


class _Lowering:
    """Where registers lie, and when threads wait."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._operations: list[Operation] = []
        self._tables: list[Any] = []
        self._starts: dict[int, int] = {}
        self._end = self._numbers = self._products = 0
        self._stage = ""

    def operations(self, steps: Sequence[Step]) -> Operations:
        for (name, source), each in itertools.groupby(steps, lambda step: (step.name, step.source)):
            if name == "products":
                self._multiply([*each])
            elif name == "forget":  # what comes lies where all others did
                self._end, self._stage = 0, "anew"
                self._place(source)  # which is the first
            else:
                for step in itertools.chain.from_iterable(map(self._divided, each)):
                    self._lower(step)
        program, count, registers = self._program, len(self._operations), len(self._program.widths)
        assert registers <= REGISTERS_MAX, "the source has no more room"
        numbers, starts = ctypes.c_int64 * registers, [self._starts.get(r, 0) for r in range(registers)]
        lists = (Operation * count)(*self._operations), numbers(*program.widths), numbers(*starts)
        where, mixture = [ctypes.addressof(each) for each in lists], program.mixture
        experts, chosen = (0, 0) if mixture is None else (mixture.experts, mixture.chosen)
        sizes = self._numbers, experts, self._products, KINDS[program.dtype]
        found = Operations(*where, count, registers, *sizes, experts, chosen)
        found.at, found.held = ctypes.addressof(found), (*lists, self._tables, program)
        return found

    def _place(self, to: View) -> None:
        """A register lies behind those before it."""
        width = self._program.widths[to.register]
        self._starts[to.register] = self._end
        self._end += -(-width // ALIGNMENT) * ALIGNMENT
        self._numbers = max(self._numbers, self._end)

    def _add(self, name: str, step: Step, to: View, where: Sequence[int | None], **more: Any) -> None:
        """Threads wait for each other between operations that go by rows, by outputs and by heads."""
        stage = STAGES.get(name, "rows" if step.spread == 1 else "rows of experts")
        before, self._stage = self._stage, stage
        waits = before not in ("", stage) and (before, stage) not in TOGETHER
        if to is not NOWHERE and to.register not in self._starts:
            self._place(to)
        (source, at, width), (other, other_at, _) = step.source, step.other
        shape = at, other_at, to.at, step.inputs or width or to.width, step.outputs
        views = CODES[name], max(0, source), other, max(0, to.register), waits
        how = _HOW.get(step.how, 0), 0, step.heads, step.kv_heads, step.spread, 0
        found = Operation(*where, *shape, *views, *how, step.factor, step.eps, step.cap)
        for field, value in more.items():
            setattr(found, field, value)
        self._operations.append(found)

    def _lower(self, step: Step) -> None:
        more = self._more(step)
        arrays = more.pop("weights", step.weights), step.bias, step.scales
        self._add(step.name, step, step.to, [*map(_address, arrays)], **more)

    def _divided(self, step: Step) -> list[Step]:
        """What the source does of a step one after another."""
        mixture, mixer, weights = self._program.mixture, self._program.mixer, step.weights
        shape: dict[str, Any]
        if step.name == "route" and mixture is not None:
            scores = step._replace(name="halves", weights=weights.weights, bias=weights.bias)
            shape = {"inputs": mixture.experts, "outputs": mixture.open, "factor": mixture.factor}
            shape |= {"how": mixture.router, "heads": mixture.is_normed, "kv_heads": mixture.groups}
            choice = Step("choose", weights=weights.correction, scales=weights.scales, **shape)
            return [scores, choice, Step("sort")]
        if step.name == "sum_up" and isinstance(mixer, DeltaRule):
            shape = {"inputs": mixer.key_width, "outputs": mixer.value_width}
            shape |= {"heads": mixer.heads, "kv_heads": mixer.key_heads}
            recalled = {"name": "recall", "to": NOWHERE, "factor": mixer.key_width**-0.5, "eps": UNIT_EPS}
            return [step._replace(**recalled, **shape), Step("step_states", to=step.to, **shape)]
        return [step]

    def _more(self, step: Step) -> dict[str, Any]:
        """What the source wants to know that a step does not say, or says in another way."""
        weights = step.weights
        match step.name:
            case "norm":
                width = len(weights)
                return {"inputs": width, "heads": step.source.width // width, "factor": 1 / width}
            case "copy":
                return {"heads": step.heads or 1}
            case "halves" | "convolve":
                return {"outputs": len(weights)}
            case "carry":
                return {"kind": KINDS[step.how]}
            case "look_up" if isinstance(weights, Packed):
                return {"weights": weights.panels, "kind": FORMS[weights.form].number, "how": True}
            case "look_up":
                return {"weights": weights.weights, "kind": kind_of(weights.weights.dtype)}
            case "recall":
                return {"how": len(weights)}
        return {}

    def _multiply(self, steps: Sequence[Step]) -> None:
        """The same rows, which are prepared once for all that take them alike."""
        given = [(step, each) for step in steps for each in self._operands(step.weights)]
        for prepared in dict.fromkeys(each.prepared for _, each in given):
            alike = [(step, each) for step, each in given if each.prepared == prepared]
            (step, first), (name, times, *_) = alike[0], prepared
            whole = View(step.source.register, 0, first.inputs), step.spread * first.inputs
            lies = step.source, self._program.widths[step.source.register]
            assert lies == whole, "rows are read as they lie"
            how = {"experts": first.experts, "how": times}
            self._add(PREPARED_BY[name], step, NOWHERE, (None,) * 3, kind=first.kind, **how)
            for step, each in alike:
                bias = _address(step.weights.bias)
                bias = None if bias is None else bias + each.first * FLOAT_BYTES
                to = View(step.to.register, step.to.at + each.first, each.outputs)
                where = each.weights, bias, None
                self._add(name, step, to, where, kind=each.kind, outputs=each.outputs, **how)
                self._products += step.spread * each.inputs * each.outputs

    def _operands(self, part: Linear | Stack) -> list[_Operand]:
        """Of experts' matrices, which lie elsewhere and are alike but for that, a table of their places."""
        if isinstance(part, Linear):
            return _operands(part)
        found = []
        for alike in zip(*map(_operands, part.linears), strict=True):
            assert len({each._replace(weights=0) for each in alike}) == 1, "they are packed alike"
            table = (ctypes.c_void_p * len(alike))(*(each.weights for each in alike))
            self._tables.append(table)
            found.append(alike[0]._replace(weights=ctypes.addressof(table), experts=len(alike)))
        return found


def _operands(linear: Linear) -> list[_Operand]:
    found, first = [], 0
    for matrix in linear.matrices:
        if isinstance(matrix, Packed):
            form = FORMS[matrix.form]
            is_signed = bool(form.table) or form.bits == 8
            prepared = "packed", 1 + linear.is_fine, -1 if is_signed else form.offset, form.halves > 1
            kind, weights = form.number, matrix.panels
        else:
            weights = matrix.weights
            kind = kind_of(weights.dtype)
            prepared = "pairs" if kind == KINDS["bfloat16"] else "linear", 1, 0, False
        found.append(_Operand(prepared, kind, address(weights), linear.inputs, matrix.outputs, first))
        first += matrix.outputs
    return found


def _address(x: Any) -> int | None:
    """Where an array lies, if there is one."""
    assert x is None or x.flags.c_contiguous, "the source reads one number after another"
    return None if x is None else address(x)
