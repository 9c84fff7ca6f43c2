"""The canonical arithmetic in C, called by ctypes; `build.py` makes it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from flowspec.model.arithmetic import build
from flowspec.model.arithmetic.packed import GROUP, Form

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Of numbers, as the source counts them; int8 are levels, of a cache alone."""
FUNCTIONS = ("silu", "gelu_tanh", "tanh")
"""In the source's order."""


class _Attention(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("queries", "keys", "values", "key_steps", "value_steps", "seen", "order", "ends", "found"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "kv_heads", "width", "value_width", "slots", "high", "blocks")
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap", "cap_inverse")),
        *((name, ctypes.c_int32) for name in ("kind", "threads")),
    ]


class _Packed(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "panels", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")),
        *((name, ctypes.c_int32) for name in ("form", "threads")),
    ]


class Library:
    """The functions of the source; tensors are on the CPU and contiguous. Results are new tensors in
    float32."""

    def __init__(self, path: Path) -> None:
        # What was compiled calls the pool of threads that torch has, rather than one of its own beside it.
        pool = build.openmp()
        if pool:
            ctypes.CDLL(pool, ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        number, pointer, real, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
        self._linear, self._function = library.flowspec_linear, library.flowspec_function
        self._packed = library.flowspec_packed
        self._normal, self._attention = library.flowspec_normal, library.flowspec_attention
        self._linear.argtypes = (pointer, number, number, pointer, small, number, pointer, small)
        self._packed.argtypes = (ctypes.POINTER(_Packed),)
        self._packed_rows = library.flowspec_packed_rows
        self._packed_rows.argtypes = (pointer, small, number, pointer, number, pointer)
        self._function.argtypes = (pointer, number, small, pointer)
        self._normal.argtypes = (pointer, number, number, real, real, pointer, pointer)
        self._attention.argtypes = (ctypes.POINTER(_Attention),)
        self._levels = library.flowspec_levels
        self._levels.argtypes = (pointer, number, number, pointer, pointer)
        for each in (self._function, self._normal, self._packed_rows, self._levels):
            each.restype = None

    def linear(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[rows, out]` from float32 `[rows, in]` and `[out, in]` in float32, bfloat16 or float16."""
        (rows, inputs), outputs = x.shape, len(weights)
        found = x.new_empty((rows, outputs))
        where = (
            x.data_ptr(),
            rows,
            inputs,
            weights.data_ptr(),
            KINDS[weights.dtype],
            outputs,
            found.data_ptr(),
        )
        if not self._linear(*where, torch.get_num_threads()):
            raise MemoryError("no memory for a linear layer")
        return found

    def packed(self, x: torch.Tensor, form: Form, panels: torch.Tensor, outputs: int) -> torch.Tensor:
        """As `plain.packed_product`."""
        rows, inputs = x.shape
        assert panels.numel() == form.panel_bytes(inputs, outputs), "the source reads so much"
        found = x.new_empty((rows, outputs))
        where = x.data_ptr(), panels.data_ptr(), found.data_ptr()
        if not self._packed(_Packed(*where, rows, inputs, outputs, form.number, torch.get_num_threads())):
            raise MemoryError("no memory for a packed layer")
        return found

    def packed_rows(self, form: Form, panels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As `plain.packed_rows`."""
        inputs = panels.shape[1] * form.unit
        found = torch.empty((len(ids), inputs))
        self._packed_rows(
            panels.data_ptr(), form.number, inputs, ids.contiguous().data_ptr(), len(ids), found.data_ptr()
        )
        return found

    def function(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """One of `FUNCTIONS`, number by number, of float32."""
        found = torch.empty_like(x)
        self._function(x.data_ptr(), x.numel(), FUNCTIONS.index(name), found.data_ptr())
        return found

    def normal(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """Float32 rows `[..., width]` over the root of their mean square."""
        width = x.shape[-1]
        found, room = torch.empty_like(x), x.new_empty(1 << (width - 1).bit_length())
        self._normal(
            x.data_ptr(), x.numel() // width, width, 1 / width, eps, room.data_ptr(), found.data_ptr()
        )
        return found

    def levels(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 rows `[rows, width]` as levels, int8, and the steps between them `[rows, width / 32]`."""
        rows, width = x.shape
        levels = torch.empty((rows, width), dtype=torch.int8)
        steps = x.new_empty((rows, -(-width // GROUP)))
        self._levels(x.data_ptr(), rows, width, levels.data_ptr(), steps.data_ptr())
        return levels, steps

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        steps: tuple[torch.Tensor, torch.Tensor] | None,
        seen: torch.Tensor,
        order: torch.Tensor,
        ends: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        """As `plain.attention`, but for what rows see: `seen` `[rows, high]` bool, `order` int32 the slots
        that any row sees by position, `ends` int32 where in `order` each block of positions ends."""
        rows, heads, width = queries.shape
        found = torch.empty_like(queries)
        given = _Attention(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_steps=None if steps is None else steps[0].data_ptr(),
            value_steps=None if steps is None else steps[1].data_ptr(),
            seen=seen.data_ptr(),
            order=order.data_ptr(),
            ends=ends.data_ptr(),
            found=found.data_ptr(),
            rows=rows,
            heads=heads,
            kv_heads=len(keys),
            width=width,
            value_width=values.shape[2],
            slots=values.shape[1],
            high=seen.shape[1],
            blocks=len(ends),
            scale=scale,
            cap=cap or 0.0,
            cap_inverse=1 / cap if cap else 0.0,
            kind=KINDS[keys.dtype],
            threads=torch.get_num_threads(),
        )
        if not self._attention(given):
            raise MemoryError("no memory for attention")
        return found


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
