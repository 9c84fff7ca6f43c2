"""The canonical arithmetic in C, called by ctypes; `build.py` makes it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

from flowspec.model.arithmetic import build

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""Of numbers, as the source counts them; int8 are levels, of a cache alone."""
FUNCTIONS = ("silu", "gelu_tanh", "tanh", "sigmoid", "relu")
"""In the source's order."""
KEY_WIDTH_MAX = 256
"""Numbers of a key of linear attention for which the source has room."""
_Fields = tuple[tuple[str, type], ...]


@functools.cache
def kind_of(dtype: Any) -> int:
    """Of torch or numpy, which has no bfloat16: its bits are uint16 there. -1: of what is none of them."""
    name = str(dtype).rpartition(".")[2]
    return KINDS.get("bfloat16" if name == "uint16" else name, -1)


def address(x: Any) -> int:
    """Of the numbers of a tensor or an array."""
    found: int = x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data
    return found


def threads() -> int:
    """How many compute: as torch says, where it is there."""
    torch = sys.modules.get("torch")
    return (os.cpu_count() or 1) if torch is None else int(torch.get_num_threads())


def fields(kind: type, names: str) -> _Fields:
    """Of a structure: all of a kind, with these names."""
    return tuple((name, kind) for name in names.split())


class AttentionFields(ctypes.Structure):
    """As in the source, as the other structures are."""

    _fields_ = (
        *fields(ctypes.c_void_p, "queries keys values key_steps value_steps seen order ends sinks found"),
        *fields(ctypes.c_int64, "rows heads kv_heads width value_width slots high blocks"),
        *fields(ctypes.c_float, "scale cap cap_inverse"),
        *fields(ctypes.c_int32, "kind cache_kind threads"),
    )


class StoredFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "keys values places to_keys to_values key_steps value_steps"),
        *fields(ctypes.c_int64, "rows kv_heads width value_width slots"),
        *fields(ctypes.c_int64, "between_keys between_key_heads between_values between_value_heads"),
        *fields(ctypes.c_int32, "kind cache_kind"),
    )


class PackedFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x panels y"),
        *fields(ctypes.c_int64, "rows inputs outputs"),
        *fields(ctypes.c_int32, "kind form threads"),
    )


class PairsFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x weights y"),
        *fields(ctypes.c_int64, "rows inputs outputs"),
        *fields(ctypes.c_int32, "kind threads"),
    )


class DigitsFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x scales panels y"),
        *fields(ctypes.c_int64, "rows inputs outputs"),
        *fields(ctypes.c_int32, "threads"),
    )


class DeltaFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "queries keys values decays shares first states steps found"),
        *fields(ctypes.c_int64, "count key_heads heads key_width value_width"),
        *fields(ctypes.c_int32, "threads"),
    )


class HalvesFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x weights y"),
        *fields(ctypes.c_int64, "rows inputs outputs"),
        *fields(ctypes.c_int32, "threads"),
    )


class NormFields(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x weights y"),
        *fields(ctypes.c_int64, "rows width"),
        *fields(ctypes.c_float, "share eps"),
        *fields(ctypes.c_int32, "kind how"),
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
        # What was compiled calls the pool of threads that torch has, rather than one of its own beside it.
        pool = build.openmp()
        if pool:
            ctypes.CDLL(pool, ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        number, pointer, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        self.linear, self.packed = library.flowspec_linear, library.flowspec_packed
        self.norm, self.attention = library.flowspec_norm, library.flowspec_attention
        self.function, self.levels = library.flowspec_function, library.flowspec_levels
        self.packed_rows = library.flowspec_packed_rows
        self.turn, self.store = library.flowspec_turn, library.flowspec_store
        self.delta, self.halves = library.flowspec_delta, library.flowspec_halves
        self.shares, self.angles = library.flowspec_shares, library.flowspec_angles
        self.run = library.flowspec_run
        """Of pointers to a `ProgramFields` and a `Call`; gives 0, or how many bytes of room that needs, where
        it has less and nothing was done."""
        self.run.argtypes, self.run.restype = (pointer, pointer), number
        self.digits = library.flowspec_digits
        self.digits.argtypes = (ctypes.POINTER(DigitsFields),)
        self.pairs = getattr(library, "flowspec_pairs", None)
        if self.pairs is not None:
            self.pairs.argtypes = (ctypes.POINTER(PairsFields),)
        self.linear.argtypes = (pointer, small, number, number, pointer, small, number, pointer, small)
        self.packed.argtypes = (ctypes.POINTER(PackedFields),)
        self.packed_rows.argtypes = (pointer, small, number, pointer, number, pointer)
        self.function.argtypes = (pointer, small, number, small, pointer, pointer)
        self.norm.argtypes = (ctypes.POINTER(NormFields),)
        self.halves.argtypes = (ctypes.POINTER(HalvesFields),)
        self.shares.argtypes = (pointer, number, number, small, pointer)
        self.angles.argtypes = (pointer, number, pointer, number, ctypes.c_float, small, pointer, pointer)
        self.turn.argtypes = (ctypes.POINTER(TurnFields),)
        self.store.argtypes = (ctypes.POINTER(StoredFields),)
        self.attention.argtypes = (ctypes.POINTER(AttentionFields),)
        self.delta.argtypes = (ctypes.POINTER(DeltaFields),)
        self.levels.argtypes = (pointer, number, number, pointer, pointer)
        for each in (
            self.function,
            self.turn,
            self.store,
            self.packed_rows,
            self.levels,
            self.delta,
            self.angles,
        ):
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
