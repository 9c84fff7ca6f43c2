"""What llama.cpp's converter does to the tensors of a checkpoint, taken back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.model.arithmetic.arrays import Numbers


class Conversion:
    """Of most architectures: nothing is done."""

    def __init__(self, spec: ModelSpec) -> None:
        """Of the model whose tensors they are."""

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        """The numbers of a file's `tensor` as checkpoints have them. What is done to a matrix is an order of
        its rows."""
        return numbers

    def input_order(self, tensor: str) -> npt.NDArray[np.int64] | None:
        """Where in a row of the file each of a checkpoint's inputs is; None where it is in its place."""
        return None


class TurnedPairs(Conversion):
    """Of Llama, whose heads turn pairs of numbers with the position. In a file the two of a pair lie beside
    each other, in a checkpoint half a head apart."""

    def __init__(self, spec: ModelSpec) -> None:
        layer = spec.layers[0]
        self._heads = {".attn_q.": layer.heads, ".attn_k.": layer.kv.count}

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        for part, heads in self._heads.items():
            if part in tensor:
                pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
                return pairs.swapaxes(1, 2).reshape(numbers.shape)
        return numbers


class LargerNorms(Conversion):
    """Of Gemma, whose norms are one larger in a file."""

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        return numbers - 1 if tensor.endswith("norm.weight") else numbers
