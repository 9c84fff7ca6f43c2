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

from flowspec.core.protocol.model_spec import NORMS, Norm
from flowspec.model.arithmetic.compiled import FUNCTIONS, TurnFields, fields, kind_of
from flowspec.model.arithmetic.plain import BLOCK

SOURCE = Path(__file__).with_name("canonical.cu")
FLAGS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Each operation rounds by itself, as IEEE 754 has it, and small numbers stay what they are."""
THREADS = 128
"""Of a block."""
BLOCKS_MAX = 1 << 16
"""Where threads divide all numbers among themselves; where each block has its own, there are more."""
ROOM_MAX = 12288
"""Numbers that a block has room for on every GPU, 48 KiB."""
WIDTH_MAX = 16384
"""Numbers that are summed in halves: half of the power of two that they are filled up to needs room."""
POSITIONS_MAX = ROOM_MAX * BLOCK
"""Of attention, where each block of positions needs room for its sum."""
SCORES_MAX = 1 << 22
"""Numbers of rows, heads and positions that are held at once; of sums of values there are twice as many, with
heads of 128."""


class _Function(ctypes.Structure):
    """As in the source, as the other structures are."""

    _fields_ = (
        *fields(ctypes.c_void_p, "x times y"),
        *fields(ctypes.c_int64, "count"),
        *fields(ctypes.c_int32, "kind function"),
    )


class _Shares(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x y"),
        *fields(ctypes.c_int64, "width"),
        *fields(ctypes.c_int32, "are_powers"),
    )


class _Norm(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "x weights y"),
        *fields(ctypes.c_int64, "rows width"),
        *fields(ctypes.c_float, "share eps"),
        *fields(ctypes.c_int32, "kind how"),
    )


class _Halves(ctypes.Structure):
    _fields_ = (*fields(ctypes.c_void_p, "x w y"), *fields(ctypes.c_int64, "inputs outputs"))


class _Stored(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "keys values places to_keys to_values"),
        *fields(ctypes.c_int64, "rows kv_heads width value_width slots"),
        *fields(ctypes.c_int64, "between_keys between_key_heads between_values between_value_heads"),
        *fields(ctypes.c_int32, "kind cache_kind"),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "queries keys values paths sinks shares weights sums found"),
        *fields(ctypes.c_int64, "rows heads kv_heads width value_width slots positions"),
        *fields(ctypes.c_float, "scale cap cap_inverse"),
        *fields(ctypes.c_int32, "kind cache_kind"),
    )


NAMES = ("function", "norm", "shares", "halves", "turn", "store", "scores", "weigh", "sums", "values")
"""Of the source's kernels, which begin with `flowspec_` there."""


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
        how = x.numel(), kind_of(x.dtype), FUNCTIONS.index(name)
        self._for_all("function", _Function(x.data_ptr(), by, found.data_ptr(), *how), x.numel())
        return found

    def norm(self, x: torch.Tensor, weights: torch.Tensor, eps: float, how: Norm) -> torch.Tensor:
        """As `plain.norm`; of rows of at most `WIDTH_MAX`."""
        assert weights.dtype == x.dtype, "the source reads both alike"
        width, found = x.shape[-1], torch.empty_like(x)
        rows = x.numel() // width
        where = x.data_ptr(), weights.data_ptr(), found.data_ptr()
        given = _Norm(*where, rows, width, 1 / width, eps, kind_of(x.dtype), NORMS.index(how))
        self._by_block("norm", given, rows, width)
        return found

    def shares(self, x: torch.Tensor, are_powers: bool) -> torch.Tensor:
        """As `compiled.Library.shares`."""
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        width, found = x.shape[-1], torch.empty_like(x)
        rows = x.numel() // width
        given = _Shares(x.data_ptr(), found.data_ptr(), width, are_powers)
        self._by_block("shares", given, rows, width)
        return found

    def halves(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `plain.product`, of at least one input."""
        (rows, inputs), outputs = x.shape, len(weights)
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in (x, weights))
        assert weights.shape == (outputs, inputs)
        assert inputs, "the source reads the first"
        found = x.new_empty((rows, outputs))
        given = _Halves(x.data_ptr(), weights.data_ptr(), found.data_ptr(), inputs, outputs)
        self._by_block("halves", given, rows * outputs, inputs)
        return found

    def turned(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """As `compiled.Library.turned`."""
        _, heads, rows, width = x.shape
        for each in (cosine, sine):
            assert each.dtype == x.dtype, "the source reads both alike"
            assert each.is_contiguous()
            assert each.shape == (1, rows, cosine.shape[-1])
        found = x.new_empty((1, rows, heads, width))
        where = x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), found.data_ptr()
        _, between_heads, between_rows, _ = x.stride()
        shape = rows, heads, width, cosine.shape[-1], between_rows, between_heads
        self._for_all("turn", TurnFields(*where, *shape, kind_of(x.dtype)), x.numel())
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
        shape = rows, kv_heads, width, value_width, slots
        between = key_rows, key_heads, value_rows, value_heads
        given = _Stored(*where, *shape, *between, kind_of(keys.dtype), kind_of(to_keys.dtype))
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
        """As `plain.attention`, of queries of any dtype, in which the result is, and of at most
        `POSITIONS_MAX`; `paths` are contiguous."""
        rows, heads, width = queries.shape
        found, positions = torch.empty_like(queries), paths.shape[1]
        blocks = -(-positions // BLOCK)
        assert positions <= POSITIONS_MAX, "a block has no more room"
        assert all(each.is_contiguous() for each in (queries, keys, values, paths))
        assert (len(paths), paths.dtype, heads % len(keys)) == (rows, torch.int64, 0)
        most = max(1, min(rows, SCORES_MAX // max(1, heads * positions)))
        scratch = (most, heads, positions), (most, heads), (most, heads, blocks, width)
        shares, weights, sums = (queries.new_empty(shape, dtype=torch.float32) for shape in scratch)
        for first in range(0, rows, most):
            own, parts = paths[first : first + most], queries[first : first + most]
            count = len(own)
            given = _Attention(
                queries=parts.data_ptr(),
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                paths=own.data_ptr(),
                sinks=None if sinks is None else sinks.data_ptr(),
                shares=shares.data_ptr(),
                weights=weights.data_ptr(),
                sums=sums.data_ptr(),
                found=found[first : first + most].data_ptr(),
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
                kind=kind_of(queries.dtype),
                cache_kind=kind_of(keys.dtype),
            )
            self._for_all("scores", given, count * heads * positions)
            self._kernels.start("weigh", given, count * heads, max(THREADS, blocks))
            self._for_all("sums", given, count * heads * blocks * width)
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


class CudaModule:
    """The kernels of the source, built for a GPU and loaded there; raises `OSError` where that cannot be
    done."""

    def __init__(self, device: torch.device, capability: tuple[int, int]) -> None:
        self._index = device.index or 0
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device=device)  # so that torch's context is there, which is the driver's, too
        code = _compiled(_nvrtc(), capability)
        module, self._functions = ctypes.c_void_p(), {name: ctypes.c_void_p() for name in NAMES}
        before = torch._C._cuda_exchangeDevice(self._index)
        try:
            status = self._driver.cuModuleLoadData(ctypes.byref(module), code)
            for name, function in self._functions.items():
                asked = ctypes.byref(function), module, f"flowspec_{name}".encode()
                status = status or self._driver.cuModuleGetFunction(*asked)
        finally:
            torch._C._cuda_exchangeDevice(before)
        if status:
            raise OSError(f"CUDA's driver does not load it: {self._said(status)}")
        self._driver.cuLaunchKernel.argtypes = _LAUNCH

    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        """In the order in which torch starts its own."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        shape = blocks, 1, 1, THREADS, 1, 1, 4 * room
        before = torch._C._cuda_exchangeDevice(self._index)  # the driver starts it in this thread's context
        try:
            status = self._driver.cuLaunchKernel(self._functions[name], *shape, stream, arguments, None)
        finally:
            torch._C._cuda_exchangeDevice(before)
        if status:
            raise RuntimeError(f"CUDA error: {self._said(status)} (at {name})")

    def _said(self, status: int) -> str:
        """What the driver says of an error, in the words in which torch tells it, too."""
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or f"error {status}".encode()).decode("utf-8", "replace")


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
    try:
        if done:
            said = _text(nvrtc, "ProgramLog", program).decode("utf-8", "replace").strip("\0 \n").splitlines()
            raise OSError(f"NVRTC ended with {done}" + "".join(f": {line}" for line in said[:1]))
        return _text(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


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
    """What may be used on a device in this process: nothing where that is no GPU."""
    return _allowed.get(device.index or 0) if device.type == "cuda" else None
