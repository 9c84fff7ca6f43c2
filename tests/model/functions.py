"""Operations of `canonical.c` one at a time, for numpy's arrays, by programs as layers are."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flowspec.core.protocol.model_spec import DeltaRule, Mixture
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import DTYPES
from flowspec.model.arithmetic.compiled import Cache, Call, Level, Library, Part, address, kind_of, threads
from flowspec.model.arithmetic.plain import Held
from flowspec.model.attention import Sight
from flowspec.model.cpu import FLOAT_BYTES, Cpu, Operations, Room, operations_of
from flowspec.model.engines import _processor_block
from flowspec.model.layer import Linear, Matrix, Program, RouterPart
from flowspec.model.rounding import ROUNDINGS

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
WORTH_THREADS = 1 << 30
"""Products with which a program is run by as many threads as there are."""
NEEDS = {"-march=x86-64-v4": {"avx512vl", "avx512bw"}, "-march=x86-64-v3": {"avx2", "fma"}}
"""What a processor has that runs these."""
BUILDS: list[Level] = [*compiled.LEVELS.get(platform.machine(), ((),))]
BUILDS += [(level,) for level in NEEDS if platform.machine() == "x86_64" and (level,) not in BUILDS]
"""On x86 with a product of pairs, where the processor has it, without that, without AVX-512, and without
fused steps."""
_library = functools.cache(lambda level: Library(compiled.build(level)))


@contextlib.contextmanager
def built(level: Level) -> Iterator[None]:
    """What is computed meanwhile is by this build."""
    has_all = NEEDS.get("".join(level), set()) <= {*_processor_block().split()}
    if not has_all or compiled._compiler(level) is None:
        pytest.skip("this processor has less, or no compiler knows it")
    before = compiled.library()
    compiled.use(_library(level))
    try:
        yield
    finally:
        compiled.use(before)


def are_alike(found: F32, expected: F32) -> bool:
    """To the bit; what is no number is as any other such."""
    each, other = (np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32) for x in (found, expected))
    return np.array_equal(each, other)


def room() -> Room:
    library = compiled.library()
    assert library is not None
    return Room(library)


def engine(dtype: str = "float32") -> Cpu:
    return Cpu(dtype, "weights")


def multiplied(x: Array, matrix: Matrix, bias: F32 | None = None, are_logits: bool = False) -> Array:
    """Rows by a matrix, in their dtype. Of logits, `are_logits`, rows
    are float32, and those that they are made of finely rounded where a matrix is packed."""
    linear = Linear(inputs=x.shape[1], matrices=(matrix,), bias=bias)
    found: Array = engine(_name(x.dtype)).rows(linear=linear, are_logits=are_logits)(x)
    return found


def rounded_matrix(dtype: str, weights: Array) -> Matrix:
    """As slices of that precision have it."""
    how = ROUNDINGS[dtype]
    return engine().packed_matrix(how.form, how.round(weights), len(weights))


def _name(dtype: Any) -> str:
    """By which programs know it."""
    return next(name for name, each in DTYPES.items() if each == np.dtype(dtype))


class _Few(Program):
    """A program of a few operations, whose rows come in a dtype."""

    def __init__(self, dtype: Any = np.float32) -> None:
        super().__init__(_name(dtype), "weights")

    def run(
        self,
        rows: int,
        part: Part | None = None,
        mixture: Mixture | None = None,
        mixer: DeltaRule | None = None,
        **given: int,
    ) -> tuple[Operations, Room]:
        """With what is `given` of a `Call`; gives what ran, and the room that it was lent."""
        self.mixture, self.mixer = mixture, mixer
        program = operations_of(self)
        program.products = WORTH_THREADS
        lent, call = room(), Call(rows=rows, threads=threads(), **given)
        if part is not None:
            call.parts, call.parts_count = ctypes.addressof(part), 1
        lent.run(program, call)
        return program, lent


def product(x: F32, weights: F32) -> F32:
    """In halves (`plain.product`): what a router's next operation takes, from where registers end."""
    (rows, inputs), outputs = x.shape, len(weights)
    few = _Few()
    few.add("route", few.add("load", to=few.register(inputs)), weights=RouterPart(weights=weights))
    mixture = Mixture(router="softmax", experts=outputs, chosen=1)
    program, lent = few.run(rows, mixture=mixture, hidden=address(x))
    first = lent._at - address(lent._bytes) + FLOAT_BYTES * rows * program.numbers
    return lent._bytes[first:][: FLOAT_BYTES * rows * outputs].view(np.float32).reshape(rows, outputs)


def attention(
    queries: F32, held: Held, sight: Sight, scale: float, cap: float = 0.0, sinks: F32 | None = None
) -> F32:
    """`[rows, heads, width]` of that shape (`plain.attention`)."""
    (rows, heads, width), (keys, values, steps) = queries.shape, held
    few = _Few()
    given, to = few.add("load", to=few.register(heads * width)), few.register(heads * width)
    shape = {"inputs": width, "heads": heads, "kv_heads": len(keys)}
    few.carry(few.add("attend", given, to, bias=sinks, factor=scale, cap=cap, **shape))
    of_steps = (None, None) if steps is None else tuple(map(address, steps))
    cache = Cache(address(keys), address(values), *of_steps, slots=values.shape[1], kind=kind_of(keys.dtype))
    order, ends = sight.order
    part = Part(cache=ctypes.addressof(cache), rows=rows, high=sight.seen.shape[1], blocks=len(ends))
    part.seen, part.order, part.ends = map(address, (sight.seen, order, ends))
    found = np.empty((rows, heads * width), np.float32)
    whole = np.ascontiguousarray(queries)
    few.run(rows, part, hidden=address(whole), going=address(found), between_going=heads * width)
    return found.reshape(queries.shape)


def delta_rule(
    mixer: DeltaRule, held: Array, lines: Array, taps: F32, rates: F32, state: F32, steps: Array, places: int
) -> F32:
    """What rows read after steps from a `state` `[heads, key_width, value_width]`, which is changed in place
    (`plain.delta_rows`, `plain.delta_rule`): `[rows, heads, value_width]`."""
    rows, values = 1 + int(steps[:, 3].max()), mixer.value_numbers
    few = _Few(held.dtype)
    few.carry(few.add("sum_up", to=few.register(values), weights=taps, scales=rates), dtype="float32")
    cache = Cache(inputs=address(held), state=address(state), inputs_width=held.shape[1])
    part = Part(cache=ctypes.addressof(cache), lines=address(lines), steps=address(steps), rows=rows)
    part.nodes, part.steps_count, part.places = len(lines), len(steps), places
    found = np.empty((rows, values), np.float32)
    few.run(rows, part, mixer=mixer, going=address(found), between_going=values)
    return found.reshape(rows, mixer.heads, mixer.value_width)
