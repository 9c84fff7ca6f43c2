"""The canonical arithmetic on a GPU: `canonical.cu`, compiled by NVRTC where it runs.

NVRTC comes with CUDA and with torch's builds for it, so no compiler need be installed. Kernels are started
through CUDA's driver, in the stream that torch uses, so that they run between torch's own.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Protocol

import torch

from flowspec.model.arithmetic.compiled import FUNCTIONS, KINDS, fields
from flowspec.model.arithmetic.norms import NORMS, Norm

SOURCE = Path(__file__).with_name("canonical.cu")
FLAGS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Each operation rounds by itself, as IEEE 754 has it, and small numbers stay what they are."""
THREADS = 128
"""Of a block."""
BLOCKS_MAX = 1 << 16
"""Where threads divide all numbers among themselves; where each block has its own, there are more."""
WIDTH_MAX = 24576
"""Numbers that are summed in halves: half of them filled up to a power of two are what a block has room for,
48 KiB on every GPU."""
SCORES_MAX = 1 << 24
"""Numbers of rows, heads and positions that are held at once."""


class _Function(ctypes.Structure):
    """As in the source, as the other structures are."""

    _fields_ = (
        *fields(ctypes.c_void_p, "x times y"),
        *fields(ctypes.c_int64, "count"),
        *fields(ctypes.c_int32, "kind function"),
    )


class _Norm(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x weights y"),
        *fields(ctypes.c_int64, "rows width"),
        *fields(ctypes.c_float, "share eps"),
        *fields(ctypes.c_int32, "kind how"),
    )


class _Shares(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x y"),
        *fields(ctypes.c_int64, "rows width"),
        *fields(ctypes.c_int32, "are_powers unused"),
    )


class _Halves(ctypes.Structure):
    _fields_ = (*fields(ctypes.c_void_p, "x w y"), *fields(ctypes.c_int64, "rows inputs outputs"))


class _Added(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x owners y"),
        *fields(ctypes.c_int64, "count width rows"),
        *fields(ctypes.c_int32, "kind unused"),
    )


class _Turn(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x cosine sine y"),
        *fields(ctypes.c_int64, "rows heads width turned between_rows between_heads"),
        *fields(ctypes.c_int32, "kind unused"),
    )


class _Stored(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "keys values places to_keys to_values"),
        *fields(ctypes.c_int64, "rows kv_heads width value_width slots"),
        *fields(ctypes.c_int64, "between_keys between_key_heads between_values between_value_heads"),
        *fields(ctypes.c_int32, "kind cache_kind"),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "queries keys values paths sinks shares weights found"),
        *fields(ctypes.c_int64, "rows heads kv_heads width value_width slots positions"),
        *fields(ctypes.c_float, "scale cap cap_inverse"),
        *fields(ctypes.c_int32, "kind cache_kind unused"),
    )


KERNELS = tuple(
    f"flowspec_{name}"
    for name in (
        "function",
        "norm",
        "shares",
        "halves",
        "add_rows",
        "turn",
        "store",
        "scores",
        "weigh",
        "values",
    )
)


class Starts(Protocol):
    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        """Starts a kernel of so many blocks, each with room for so many float32 numbers."""


class CudaLibrary:
    """The kernels of the source, for one GPU. Tensors are there, contiguous unless said otherwise, and in
    float32, bfloat16 or float16; results are new tensors of the dtype that is given."""

    def __init__(self, kernels: Starts) -> None:
        self._kernels = kernels

    def function(self, x: torch.Tensor, name: str, times: torch.Tensor | None = None) -> torch.Tensor:
        """As `compiled.Library.function`."""
        assert times is None or (times.dtype, times.shape) == (x.dtype, x.shape), "both are read alike"
        found = torch.empty_like(x)
        by = None if times is None else times.data_ptr()
        where = x.data_ptr(), by, found.data_ptr()
        self._for_all(
            "function", _Function(*where, x.numel(), KINDS[x.dtype], FUNCTIONS.index(name)), x.numel()
        )
        return found

    def norm(self, x: torch.Tensor, weights: torch.Tensor, eps: float, how: Norm) -> torch.Tensor:
        """As `plain.norm`; of rows of at most `WIDTH_MAX`."""
        assert weights.dtype == x.dtype, "the source reads both alike"
        width, found = x.shape[-1], torch.empty_like(x)
        rows = x.numel() // width
        where = x.data_ptr(), weights.data_ptr(), found.data_ptr()
        given = _Norm(*where, rows, width, 1 / width, eps, KINDS[x.dtype], NORMS.index(how))
        self._by_block("norm", given, rows, width)
        return found

    def shares(self, x: torch.Tensor, are_powers: bool) -> torch.Tensor:
        """As `compiled.Library.shares`."""
        assert x.dtype == torch.float32
        width, found = x.shape[-1], torch.empty_like(x)
        rows = x.numel() // width
        given = _Shares(x.data_ptr(), found.data_ptr(), rows, width, are_powers, 0)
        self._by_block("shares", given, rows, width)
        return found

    def halves(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `plain.product`, of at least one input."""
        (rows, inputs), outputs = x.shape, len(weights)
        assert x.dtype == weights.dtype == torch.float32
        assert weights.shape == (outputs, inputs)
        found = x.new_empty((rows, outputs))
        given = _Halves(x.data_ptr(), weights.data_ptr(), found.data_ptr(), rows, inputs, outputs)
        self._by_block("halves", given, rows * outputs, inputs)
        return found

    def add_rows(self, found: torch.Tensor, owners: torch.Tensor, rows: torch.Tensor) -> None:
        """As `compiled.Library.add_rows`."""
        (count, width), own = rows.shape, len(found)
        assert found.dtype == rows.dtype, "the source reads both alike"
        assert owners.dtype == torch.int64
        where = rows.data_ptr(), owners.data_ptr(), found.data_ptr()
        self._for_all("add_rows", _Added(*where, count, width, own, KINDS[rows.dtype], 0), own * width)

    def turned(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """As `compiled.Library.turned`."""
        _, heads, rows, width = x.shape
        assert all(each.is_contiguous() and each.dtype == x.dtype for each in (cosine, sine))
        found = x.new_empty((1, rows, heads, width))
        where = x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), found.data_ptr()
        _, between_heads, between_rows, _ = x.stride()
        shape = rows, heads, width, cosine.shape[-1]
        self._for_all(
            "turn", _Turn(*where, *shape, between_rows, between_heads, KINDS[x.dtype], 0), x.numel()
        )
        return found.transpose(1, 2)

    def store(
        self,
        places: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        to_keys: torch.Tensor,
        to_values: torch.Tensor,
        steps: None = None,
    ) -> None:
        """As `plain.store` of what is not held as levels; rows and heads of `keys` and `values` may be
        however far apart."""
        assert steps is None, "the source has no levels"
        kv_heads, rows, width = keys.shape
        _, slots, value_width = to_values.shape
        (key_heads, key_rows, _), (value_heads, value_rows, _) = keys.stride(), values.stride()
        where = (each.data_ptr() for each in (keys, values, places, to_keys, to_values))
        shape, between = (
            (rows, kv_heads, width, value_width, slots),
            (key_rows, key_heads, value_rows, value_heads),
        )
        given = _Stored(*where, *shape, *between, KINDS[keys.dtype], KINDS[to_keys.dtype])
        self._for_all("store", given, keys.numel())

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        paths: torch.Tensor,
        scale: float,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `plain.attention`, of queries of any dtype, in which the result is; `paths` are contiguous."""
        rows, heads, width = queries.shape
        found, positions = torch.empty_like(queries), paths.shape[1]
        at_once = max(1, SCORES_MAX // max(1, heads * positions))
        shares = queries.new_empty((min(rows, at_once), heads, positions), dtype=torch.float32)
        weights = queries.new_empty((min(rows, at_once), heads), dtype=torch.float32)
        for first in range(0, rows, at_once):
            own, parts = paths[first : first + at_once], queries[first : first + at_once]
            count = len(own)
            given = _Attention(
                queries=parts.data_ptr(),
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                paths=own.data_ptr(),
                sinks=None if sinks is None else sinks.data_ptr(),
                shares=shares.data_ptr(),
                weights=weights.data_ptr(),
                found=found[first : first + at_once].data_ptr(),
                rows=count,
                heads=heads,
                kv_heads=len(keys),
                width=width,
                value_width=values.shape[2],
                slots=values.shape[1],
                positions=positions,
                scale=scale,
                cap=cap or 0.0,
                cap_inverse=1 / cap if cap else 0.0,
                kind=KINDS[queries.dtype],
                cache_kind=KINDS[keys.dtype],
            )
            self._for_all("scores", given, count * heads * positions)
            self._by_block("weigh", given, count * heads, positions // 32)
            self._for_all("values", given, count * heads * width)
        return found

    def _for_all(self, name: str, given: ctypes.Structure, count: int) -> None:
        if count:
            self._kernels.start(name, given, min(BLOCKS_MAX, -(-count // THREADS)), 0)

    def _by_block(self, name: str, given: ctypes.Structure, blocks: int, width: int) -> None:
        """With room for half of the power of two that `width` is filled up to, and one number a thread."""
        assert width <= WIDTH_MAX, "a block has no more room"
        if blocks:
            self._kernels.start(name, given, blocks, max(THREADS, (1 << max(0, width - 1).bit_length()) // 2))


_LAUNCH: tuple[Any, ...] = (
    *(ctypes.c_void_p, *[ctypes.c_uint] * 7),
    *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
)
"""A function, three sizes of a grid and three of a block, room, a stream, arguments, and more of them."""


class Kernels:
    """Those of the source, built for a GPU and loaded there; raises `OSError` where that cannot be done."""

    def __init__(self, device: torch.device, capability: tuple[int, int]) -> None:
        self._index = device.index or 0
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device=device)  # so that torch's context is there, which is the driver's, too
        code = _compiled(_nvrtc(), capability)
        module = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        self._functions: dict[str, ctypes.c_void_p] = {}
        for name in KERNELS:
            function = ctypes.c_void_p()
            found = self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            self._check(found, f"cuModuleGetFunction of {name}")
            self._functions[name.removeprefix("flowspec_")] = function
        self._driver.cuLaunchKernel.argtypes = _LAUNCH

    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        """In the order in which torch starts its own."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        shape = blocks, 1, 1, THREADS, 1, 1, 4 * room
        self._check(self._driver.cuLaunchKernel(self._functions[name], *shape, stream, arguments, None), name)

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status} of the driver, at {what}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"libnvrtc.so.{major} is not there")


def _compiled(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> bytes:
    """The source for such a GPU."""
    program, source = ctypes.c_void_p(), SOURCE.read_bytes()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    words = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), *map(str.encode, FLAGS)]
    done = made or nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    if done:
        said = _text(nvrtc, "ProgramLog", program).decode("utf-8", "replace").strip().splitlines()
        raise OSError(f"NVRTC ended with {done}" + "".join(f": {line}" for line in said[:1]))
    return _text(nvrtc, "CUBIN", program)


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, room)
    return room.raw


_allowed: dict[int, CudaLibrary] = {}


def allow(device: torch.device, library: CudaLibrary | None) -> None:
    """From now on this process uses these kernels on that GPU; with None the definitions."""
    if library is None:
        _allowed.pop(device.index or 0, None)
    else:
        _allowed[device.index or 0] = library


def library(device: torch.device) -> CudaLibrary | None:
    """What may be used on that GPU in this process; else None."""
    return _allowed.get(device.index or 0)
