"""Arrays of numbers: conversions between the dtypes that weights have, and what numpy and torch call by
different names.

numpy has no bfloat16: its bits are held as uint16. A definition is written once, for arrays of either
library.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any  # a tensor of torch, or an array of numpy, which has the same methods by these names
Numbers = npt.NDArray[Any]  # float32, float16 or float64, or bfloat16 as uint16
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
"""In which numpy holds numbers, by the name of the dtype that a layer computes in."""
_NAN = 0xFFFF  # of bfloat16, as torch has it
_BLOCK = 1 << 16  # numbers that are converted at once, so that they stay in a processor's cache
_LINE_BYTES = 64


def widened(x: Numbers) -> F32:
    """As float32; what has it already is not copied."""
    if x.dtype != np.uint16:
        return x.astype(np.float32, copy=False)
    wide = x.astype(np.uint32)
    wide <<= np.uint32(16)  # else numpy 1 takes a single number for another kind
    return wide.view(np.float32)


@np.errstate(all="ignore")  # what is too large becomes infinite
def narrowed(x: Numbers, dtype: str) -> Numbers:
    """In the dtype of that name; what has it already is not copied. float32 is rounded to nearest, ties to
    even, and what is wider by way of float32."""
    if x.dtype == DTYPES[dtype]:
        return x
    wide = widened(x)
    if dtype != "bfloat16":
        return wide.astype(DTYPES[dtype], copy=False)
    bits = np.asarray(wide, order="C").view(np.uint32)
    found = bits >> 16
    found &= 1
    found += 0x7FFF
    found += bits
    found >>= 16
    return np.where(np.isnan(wide), np.uint16(_NAN), found.astype(np.uint16))


def fill(part: Numbers, numbers: Numbers) -> None:
    """Copies `numbers` of the same shape into `part`, in its dtype; whole numbers stay such."""
    name = {dtype: name for name, dtype in DTYPES.items()}.get(part.dtype)
    if name is None or part.dtype == numbers.dtype:
        part[...] = numbers
        return
    part, numbers = np.atleast_1d(part, numbers)
    step = max(1, _BLOCK // max(1, math.prod(part.shape[1:])))
    for first in range(0, len(part), step):
        part[first : first + step] = narrowed(numbers[first : first + step], name)


def room(
    shape: tuple[int, ...], dtype: npt.DTypeLike, made: Callable[..., npt.NDArray[Any]] = np.empty
) -> npt.NDArray[Any]:
    """An array, without values or as it is `made`, that begins with a line of the cache."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    whole = made(size + _LINE_BYTES, np.uint8)
    first = -whole.ctypes.data % _LINE_BYTES
    return whole[first : first + size].view(dtype).reshape(shape)


def in_room(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy in `room`."""
    found = room(x.shape, x.dtype)
    found[...] = x
    return found


def namespace(x: Array) -> Any:
    """The library that an array is of."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def cast(x: Array, dtype: Any) -> Array:
    """As numbers of a dtype, of the library's own or by its name."""
    dtype = getattr(namespace(x), dtype) if isinstance(dtype, str) else dtype
    return x.astype(dtype) if isinstance(x, np.ndarray) else x.to(dtype)


def zeros(x: Array, *shape: int) -> Array:
    """Of the dtype of `x`, where it is."""
    return room(shape, x.dtype, np.zeros) if isinstance(x, np.ndarray) else x.new_zeros(shape)


def indices(x: Array, count: int) -> Array:
    """The numbers below `count`, where `x` is."""
    return np.arange(count) if isinstance(x, np.ndarray) else x.new_ones(count).cumsum(0) - 1


def repeat(x: Array, count: int, axis: int) -> Array:
    """Each entry so many times in a row."""
    return np.repeat(x, count, axis) if isinstance(x, np.ndarray) else x.repeat_interleave(count, axis)


def order(x: Array) -> Array:
    """Where the numbers are, the smallest first, by the last dimension; of two alike the first one first."""
    return np.argsort(x, -1, kind="stable") if isinstance(x, np.ndarray) else x.argsort(dim=-1, stable=True)


def contiguous(x: Array) -> Array:
    """As it is read, one number after another."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def fill_up(x: Array, multiple: int, value: float = 0) -> Array:
    """The last dimension, with a value behind it, up to a multiple."""
    missing = -x.shape[-1] % multiple
    return namespace(x).concatenate([x, zeros(x, *x.shape[:-1], missing) + value], -1) if missing else x


class Memory(Protocol):
    """Arrays of a device where layers compute, whose rows are in a `dtype`."""

    dtype: str

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array: ...
    def array(self, x: Numbers) -> Array:
        """There, as it is; bfloat16 is uint16 in numpy."""

    def numpy(self, x: Array) -> Numbers:
        """Here again."""

    def copied(self, x: Array) -> Array: ...
    def wide(self, x: Array) -> Array:
        """In float32."""

    def narrow(self, x: Array) -> Array:
        """In the dtype of rows."""

    def cast(self, x: Numbers) -> Array:
        return self.narrow(self.array(x))

    def scaled(self, x: Array, factor: float) -> Array:
        """Times a factor, rounded once."""
        with np.errstate(all="ignore"):  # what is too large shows in logits
            return self.narrow(self.wide(x) * factor)

    def joined(self, parts: Sequence[Array]) -> Array:
        """`[rows, numbers]` of several, one after another."""
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts, 1)
