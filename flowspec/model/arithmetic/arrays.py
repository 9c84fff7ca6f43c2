"""What numpy and torch call by different names. A definition is written once, for arrays of either."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = torch.Tensor
else:
    Array = object
"""A tensor of torch, or an array of numpy, which has the same methods by these names."""


def namespace(x: Array) -> Any:
    """The library that an array is of."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def cast(x: Array, dtype: Any) -> Array:
    """As numbers of a dtype, of the library's own or by its name."""
    dtype = getattr(namespace(x), dtype) if isinstance(dtype, str) else dtype
    return x.astype(dtype) if isinstance(x, np.ndarray) else x.to(dtype)


def zeros(x: Array, *shape: int) -> Array:
    """Of the dtype of `x`, where it is."""
    return np.zeros(shape, x.dtype) if isinstance(x, np.ndarray) else x.new_zeros(shape)


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
