"""The canonical arithmetic on a GPU: `canonical.cu`, compiled by NVRTC where it runs.

NVRTC comes with CUDA and with torch's builds for it, so no compiler need be installed. Kernels are started
through CUDA's driver, in the stream that torch uses, so that they run between torch's own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flowspec.core.protocol.model_spec import NORMS, Norm
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.compiled import FUNCTIONS, StoredFields, TurnFields, fields, kind_of
from flowspec.model.arithmetic.plain import BLOCK, Held

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


def _structure(*names: str) -> Any:
    """As in the source (`compiled.fields`)."""
    return type("Given", (ctypes.Structure,), {"_fields_": fields(*names)})


KERNELS = {
    "function": _structure("x times y", "count", "function"),
    "norm": _structure("x weights y", "rows width", "how", "share eps"),
    "shares": _structure("x y", "width", "are_powers"),
    "halves": _structure("x w y", "inputs outputs"),
    "turn": TurnFields,
    "store": StoredFields,
} | dict.fromkeys(
    ("scores", "weigh", "sums", "values"),
    _structure(
        "queries keys values paths sinks shares weights sums found",
        "rows heads kv_heads width value_width slots positions",
        "cache_kind",
        "scale cap cap_inverse",
    ),
)
"""Of the source, where their names begin with `flowspec_`, and what they are given."""
Start = Callable[[str, ctypes.Structure, int, int], None]
"""Starts a kernel of so many blocks, each with room for so many float32 numbers."""


class CudaLibrary:
    """Functions of `plain`, by its names, by the kernels of the source on one GPU, where tensors are. What
    the kernels have no room for, and what lies in another way than they read it, is left to `plain`."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def function(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.gated(x, None, name)

    def gated(self, gate: torch.Tensor, up: torch.Tensor | None, name: str) -> torch.Tensor:
        x, found = gate.contiguous(), gate.new_empty(gate.shape)
        given = x, None if up is None else up.contiguous(), found
        self._for_all("function", x.numel(), given, x.numel(), FUNCTIONS.index(name))
        return found

    def norm(self, x: torch.Tensor, weights: torch.Tensor, eps: float, how: Norm) -> torch.Tensor:
        width = x.shape[-1]
        if width > WIDTH_MAX:
            return plain.norm(x, weights, eps, how)
        x, found, rows = x.contiguous(), x.new_empty(x.shape), x.numel() // width
        shape = rows, width, NORMS.index(how), 1 / width, eps
        self._by_block("norm", rows, width, (x, weights, found), *shape)
        return found

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return self._shares(x, True) if x.shape[-1] <= WIDTH_MAX else plain.softmax(x)

    def over_their_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._shares(x, False) if x.shape[-1] <= WIDTH_MAX else plain.over_their_sum(x)

    def _shares(self, x: torch.Tensor, are_powers: bool) -> torch.Tensor:
        x, found, width = x.contiguous(), x.new_empty(x.shape), x.shape[-1]
        self._by_block("shares", x.numel() // width, width, (x, found), width, are_powers)
        return found

    def product(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (rows, inputs), outputs = x.shape, len(weights)
        if inputs > WIDTH_MAX:
            return plain.product(x, weights)
        x, weights, found = x.contiguous(), weights.contiguous(), x.new_empty((rows, outputs))
        self._by_block("halves", rows * outputs, inputs, (x, weights, found), inputs, outputs)
        return found

    def turned(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        between_rows, between_heads, between = x.stride()
        if between != 1:
            return plain.turned(x, cosine, sine)
        assert all(each.is_contiguous() for each in (cosine, sine)), "the source reads them so"
        found = x.new_empty(x.shape)
        shape = *x.shape, cosine.shape[-1], between_rows, between_heads
        self._for_all("turn", x.numel(), (x, cosine, sine, found), *shape)
        return found

    def store(self, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, held: Held) -> None:
        to_keys, to_values, steps = held
        if steps is not None or keys.stride(2) != 1 or values.stride(2) != 1:
            plain.store(places, keys, values, held)
            return
        (kv_heads, rows, width), (_, slots, value_width) = keys.shape, to_values.shape
        (key_heads, key_rows, _), (value_heads, value_rows, _) = keys.stride(), values.stride()
        given = keys, values, places, to_keys, to_values, None, None
        shape = rows, kv_heads, width, value_width, slots, key_rows, key_heads, value_rows, value_heads
        self._for_all("store", keys.numel(), given, *shape, kind_of(to_keys.dtype))

    def attention(
        self,
        queries: torch.Tensor,
        held: Held,
        paths: torch.Tensor,
        scale: float,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (keys, values, steps), positions = held, paths.shape[1]
        if steps is not None or positions > POSITIONS_MAX:
            return plain.attention(queries, held, paths, scale, cap, sinks)
        assert all(each.is_contiguous() for each in (keys, values, paths)), "the source reads them so"
        queries, found = queries.contiguous(), queries.new_empty(queries.shape)
        (rows, heads, width), blocks = queries.shape, -(-positions // BLOCK)
        most = max(1, min(rows, SCORES_MAX // max(1, heads * positions)))
        scratch = (most, heads, positions), (most, heads), (most, heads, blocks, width)
        shares, weights, sums = (queries.new_empty(shape) for shape in scratch)
        for first in range(0, rows, most):
            own, parts, to = (each[first : first + most] for each in (paths, queries, found))
            each = len(own) * heads
            tensors = parts, keys, values, own, sinks, shares, weights, sums, to
            shape = len(own), heads, len(keys), width, values.shape[2], values.shape[1], positions
            given = tensors, *shape, kind_of(keys.dtype), scale, cap, 1 / cap if cap else 0.0
            self._for_all("scores", each * positions, *given)
            self._run("weigh", each, max(THREADS, blocks), *given)
            self._for_all("sums", each * blocks * width, *given)
            self._for_all("values", each * width, *given)
        return found

    def _for_all(self, name: str, count: int, *given: Any) -> None:
        """With a thread for each of so many numbers, or for several."""
        self._run(name, min(BLOCKS_MAX, -(-count // THREADS)), 0, *given)

    def _by_block(self, name: str, blocks: int, width: int, *given: Any) -> None:
        """With room for half of the power of two that `width` is filled up to, and one number a thread."""
        self._run(name, blocks, max(THREADS, (1 << max(0, width - 1).bit_length()) // 2), *given)

    def _run(
        self, name: str, blocks: int, room: int, tensors: Sequence[torch.Tensor | None], *numbers: float
    ) -> None:
        if blocks:
            addresses = (None if each is None else each.data_ptr() for each in tensors)
            self._start(name, KERNELS[name](*addresses, *numbers), blocks, room)


class _Module:
    """The kernels of the source, built for a GPU and loaded there."""

    def __init__(self, device: torch.device, capability: tuple[int, int]) -> None:
        self._index = device.index or 0
        self._driver = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        self._driver.cuLaunchKernel.argtypes = [pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer]
        code, module = _compiled(capability), ctypes.c_void_p()
        self._call("loading", self._driver.cuModuleLoadData, ctypes.byref(module), code)
        self._functions = {name: ctypes.c_void_p() for name in KERNELS}
        for name, function in self._functions.items():
            asked = ctypes.byref(function), module, f"flowspec_{name}".encode()
            self._call(name, self._driver.cuModuleGetFunction, *asked)

    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        """In the order in which torch starts its own."""
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._index))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        shape = blocks, 1, 1, THREADS, 1, 1, 4 * room  # of the grid and of a block, and the room
        self._call(name, self._driver.cuLaunchKernel, self._functions[name], *shape, stream, arguments, None)

    def _call(self, what: str, function: Any, *given: Any) -> None:
        """A function of CUDA's driver, which does it in this thread's context. Raises `RuntimeError` in the
        words in which torch does."""
        before = torch._C._cuda_exchangeDevice(self._index)
        try:
            status = function(*given)
        finally:
            torch._C._cuda_exchangeDevice(before)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            said = (text.value or f"error {status}".encode()).decode("utf-8", "replace")
            raise RuntimeError(f"CUDA error: {said} (at {what})")


@functools.cache
def library_of(device: torch.device, capability: tuple[int, int]) -> CudaLibrary:
    """For a GPU; built once. Raises `OSError` where that cannot be done."""
    torch.zeros(1, device=device)  # so that torch's context is there, which is the driver's, too
    try:
        return CudaLibrary(_Module(device, capability).start)
    except RuntimeError as error:
        raise OSError(f"CUDA's driver does not load it: {error}") from error


def _compiled(capability: tuple[int, int]) -> bytes:
    """The source for such a GPU."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    source, name = SOURCE.read_bytes(), SOURCE.name.encode()
    words = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), *map(str.encode, FLAGS)]
    done = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    done = done or nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    try:
        if done:
            said = _text(nvrtc, "ProgramLog", program).decode("utf-8", "replace").strip("\0 \n").splitlines()
            raise OSError(f"NVRTC ended with {done}" + "".join(f": {line}" for line in said[:1]))
        return _text(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"libnvrtc.so.{major} is not there")


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, room)
    return room.raw
