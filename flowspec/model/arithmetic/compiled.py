"""The canonical arithmetic in C, called by ctypes; `build.py` makes it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import psutil

from flowspec.model.arithmetic import build

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""Of numbers, as the source counts them; int8 are levels, of a cache alone."""
FUNCTIONS = ("silu", "gelu_tanh", "tanh", "sigmoid", "relu")
"""In the source's order."""
_Fields = tuple[tuple[str, type], ...]


@functools.cache
def kind_of(dtype: Any) -> int:
    """Of torch or numpy, which has no bfloat16: its bits are uint16 there. -1: of what is none of them."""
    name = str(dtype).rpartition(".")[2]
    return KINDS.get("bfloat16" if name == "uint16" else name, -1)


def address(x: Any) -> int:
    """Of an array's numbers."""
    found: int = x.__array_interface__["data"][0]
    return found


def use_threads(count: int) -> None:
    """So many compute from now on in this process."""
    global _threads
    _threads = count


def threads() -> int:
    """How many compute: as many as were told, or as `OMP_NUM_THREADS` says, or one on each core."""
    global _threads
    if not _threads:
        told = os.environ.get("OMP_NUM_THREADS", "")
        cores = psutil.cpu_count(logical=False) or 1
        _threads = int(told) if told.isdecimal() else 0
        _threads = _threads or min(cores, len(os.sched_getaffinity(0)))
    return _threads


_threads = 0


def fields(kind: type, names: str) -> _Fields:
    """Of a structure: all of a kind, with these names."""
    return tuple((name, kind) for name in names.split())


class StoredFields(ctypes.Structure):
    """As in the source, as the other structures are."""

    _fields_ = (
        *fields(ctypes.c_void_p, "keys values places to_keys to_values key_steps value_steps"),
        *fields(ctypes.c_int64, "rows kv_heads width value_width slots"),
        *fields(ctypes.c_int64, "between_keys between_key_heads between_values between_value_heads"),
        *fields(ctypes.c_int32, "kind cache_kind"),
    )


class TurnFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x cosine sine y"),
        *fields(ctypes.c_int64, "rows heads width turned between_rows between_heads"),
        *fields(ctypes.c_int32, "kind"),
    )


class Operation(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "weights bias scales"),
        *fields(ctypes.c_int64, "from_at with_at to_at inputs outputs sums_at"),
        *fields(ctypes.c_int32, "code source other to waits how kind heads kv_heads spread experts"),
        *fields(ctypes.c_float, "factor eps cap"),
    )


class ProgramFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "operations widths starts"),
        *fields(ctypes.c_int64, "count registers numbers sums products"),
        *fields(ctypes.c_int32, "kind experts chosen"),
    )


class Cache(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "keys values key_steps value_steps inputs state"),
        *fields(ctypes.c_int64, "slots inputs_width"),
        *fields(ctypes.c_int32, "kind"),
    )


class Part(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "cache slots seen order ends lines steps"),
        *fields(ctypes.c_int64, "first rows high blocks nodes steps_count places"),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "hidden going cosine sine embedding tokens parts room"),
        *fields(ctypes.c_int64, "rows parts_count room_bytes angles between_embeddings between_going"),
        *fields(ctypes.c_int32, "threads"),
    )


class Library:
    """The functions of the source, with what they take and give."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        number, pointer, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        self.has_pairs = bool(library.flowspec_has_pairs())
        """Whether this processor has products in pairs."""
        self.run = library.flowspec_run
        """Of pointers to a `ProgramFields` and a `Call`; gives 0, or how many bytes of room that needs, where
        it has less and nothing was done."""
        self.run.argtypes, self.run.restype = (pointer, pointer), number
        self.function, self.levels = library.flowspec_function, library.flowspec_levels
        self.packed_rows, self.angles = library.flowspec_packed_rows, library.flowspec_angles
        self.turn, self.store = library.flowspec_turn, library.flowspec_store
        self.function.argtypes = (pointer, small, number, small, pointer, pointer)
        self.levels.argtypes = (pointer, number, number, pointer, pointer)
        self.packed_rows.argtypes = (pointer, small, number, pointer, number, pointer)
        self.angles.argtypes = (pointer, number, pointer, number, ctypes.c_float, small, pointer, pointer)
        self.turn.argtypes = (ctypes.POINTER(TurnFields),)
        self.store.argtypes = (ctypes.POINTER(StoredFields),)
        for each in (self.function, self.levels, self.packed_rows, self.angles, self.turn, self.store):
            each.restype = None


_loaded: tuple[Path, Library] | None = None


def library() -> Library | None:
    """What was built and may be used in this process; else None."""
    global _loaded
    path = build.allowed()
    if path is None:
        return None
    if _loaded is None or _loaded[0] is not path:  # paths are slow to compare, and this is asked all the time
        _loaded = path, Library(path)
    return _loaded[1]
