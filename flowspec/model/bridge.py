"""Arrays of numpy as tensors of torch, and tensors as arrays, over the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.tensors import Tensors


def tensor_of(array: Numbers) -> torch.Tensor:
    """uint16 are the bits of bfloat16. What is read-only (a mapped file) must not be written to."""
    if not array.flags.writeable:
        array = _as_if_writeable(array)
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_if_writeable(array: Numbers) -> Numbers:
    """torch warns of others. A buffer over the same memory keeps the array."""
    if not array.size or not array.flags.c_contiguous:
        return array.copy()
    buffer: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    buffer.array = array
    return np.frombuffer(buffer, array.dtype).reshape(array.shape)


def array_of(tensor: torch.Tensor) -> Numbers:
    """Of a tensor on the CPU; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


def read_into(tensors: Tensors, name: str, part: torch.Tensor) -> None:
    """`Tensors.copy_into`, wherever `part` is."""
    own = part if part.device.type == "cpu" else torch.empty(part.shape, dtype=part.dtype)
    tensors.copy_into(name, array_of(own))
    if own is not part:
        part.copy_(own)
