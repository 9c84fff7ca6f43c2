"""The canonical arithmetic in C, called by ctypes; `build.py` makes it. Imports no torch."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.packed import FORMS, GROUP, Levels

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""Of numbers, as the source counts them; int8 are levels, of a cache alone."""
FUNCTIONS = tuple(plain.FUNCTIONS)


@functools.cache
def kind_of(dtype: Any) -> int:
    """Of torch or numpy, which has no bfloat16: its bits are uint16 there. -1: of what is none of them."""
    name = str(dtype).rpartition(".")[2]
    return KINDS.get("bfloat16" if name == "uint16" else name, -1)


def address(x: Any) -> int:
    """Of an array's numbers."""
    found: int = x.__array_interface__["data"][0]
    return found


_threads = 0


def use_threads(count: int) -> None:
    """So many compute from now on in this process."""
    global _threads
    _threads = count


def threads() -> int:
    """How many compute: as many as were told, or as `OMP_NUM_THREADS` says, or one on each core."""
    if not _threads:
        told = os.environ.get("OMP_NUM_THREADS", "")
        cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
        use_threads((int(told) if told.isdecimal() else 0) or cores)
    return _threads


def fields(pointers: str, longs: str, ints: str = "", floats: str = "") -> tuple[tuple[str, type], ...]:
    """Of a structure: names of those of each kind, in this order."""
    kinds = (
        (ctypes.c_void_p, pointers),
        (ctypes.c_int64, longs),
        (ctypes.c_int32, ints),
        (ctypes.c_float, floats),
    )
    return tuple((name, kind) for kind, names in kinds for name in names.split())


class StoredFields(ctypes.Structure):
    """As in the sources, as the other structures are."""

    _fields_ = fields(
        "keys values places to_keys to_values key_steps value_steps",
        "rows kv_heads width value_width slots"
        " between_keys between_key_heads between_values between_value_heads",
        "cache_kind",
    )


class TurnFields(ctypes.Structure):
    _fields_ = fields("x cosine sine y", "rows heads width turned between_rows between_heads")


class Operation(ctypes.Structure):
    _fields_ = fields(
        "weights bias scales",
        "from_at with_at to_at inputs outputs",
        "code source other to waits how kind heads kv_heads spread experts",
        "factor eps cap",
    )


class ProgramFields(ctypes.Structure):
    _fields_ = fields(
        "operations widths starts", "count registers numbers sums products", "kind experts chosen"
    )


class Cache(ctypes.Structure):
    _fields_ = fields("keys values key_steps value_steps inputs state", "slots inputs_width", "kind")


class Part(ctypes.Structure):
    _fields_ = fields(
        "cache slots seen order ends lines steps", "first rows high blocks nodes steps_count places"
    )


class Call(ctypes.Structure):
    _fields_ = fields(
        "hidden going cosine sine embedding tokens parts room",
        "rows parts_count room_bytes angles between_embeddings between_going",
        "threads",
    )


class Library:
    """The functions of the source, built at a `path`, with what they take and give."""

    def __init__(self, path: Path) -> None:
        library, self.path = ctypes.CDLL(str(path)), path
        number, pointer, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int

        def of(name: str, *given: Any, gives: Any = None) -> Any:
            found = library[f"flowspec_{name}"]
            found.argtypes, found.restype = given, gives
            return found

        self.run = of("run", pointer, pointer, gives=number)
        """Of pointers to a `ProgramFields` and a `Call`; gives 0, or how many bytes of room that needs, where
        it has less and nothing was done."""
        self.function = of("function", pointer, number, small, pointer, pointer)
        self.levels = of("levels", pointer, number, number, pointer, pointer)
        self.packed_rows = of("packed_rows", pointer, small, number, pointer, number, pointer)
        self.angles = of("angles", pointer, number, pointer, number, ctypes.c_float, pointer, pointer)
        self.turn = of("turn", ctypes.POINTER(TurnFields))
        self.store = of("store", ctypes.POINTER(StoredFields))


_library: Library | None = None


def use(library: Library | None) -> None:
    """From now on this process computes by a library that was tried (`trials.py`); None: by none."""
    global _library
    _library = library


def library() -> Library | None:
    """What this process computes by."""
    return _library


def as_q8_0(numbers: Numbers) -> Levels:
    """Of a matrix `[out, in]` that is rounded to the form Q8_0, group by group, also where there is no
    library."""
    x = np.ascontiguousarray(widened(numbers))
    rows, width = x.shape
    if _library is None:
        levels, steps = plain.levels(x)
    else:
        levels, steps = np.empty(x.shape, np.int8), np.empty((rows, -(-width // GROUP)), np.float32)
        _library.levels(address(x), rows, width, address(levels), address(steps))
    filled = fill_up(levels, GROUP).view(np.uint8) ^ FORMS["Q8_0"].offset
    return Levels(levels=filled.reshape(rows, -1, GROUP), scales=narrowed(steps, "float16"))
