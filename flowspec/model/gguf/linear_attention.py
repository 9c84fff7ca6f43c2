"""What llama.cpp's converter does to the tensors of a model with linear attention (Qwen3.5), taken back.

Several heads of values share one of keys. In transformers they lie beside each other; in a file all that are
the first of their head of keys come first, then all that are the second. Rows of matrices, convolutions and
vectors are brought back in order; so are the inputs of the last matrix where it is unpacked, while one that
stays packed takes its inputs in the file's order (`GgufLinear`), since a block may hold several heads'. Norms
are one larger in a file. How fast a state fades, A_log, is there as -e^A_log, which has no exact logarithm:
layers compute with it as it is (`names.STORED_FADING`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import DeltaRule, ModelSpec
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.gguf.conversions import Conversion

ARCHITECTURES = ("qwen35", "qwen35moe")
CONVOLUTION = ".ssm_conv1d.weight"
_LAST = ".ssm_out.weight"
_NORMS = ("_norm.weight", ".enorm.weight", ".hnorm.weight")
_OWN_NORM = ".ssm_norm.weight"
"""Which checkpoints, too, have as it is multiplied with."""
_BEHIND_KEYS = (".attn_qkv.weight", CONVOLUTION)
"""What has rows for queries and keys before those for values."""
_HEADS = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")
"""What has one row for each head."""


class LinearAttention(Conversion):
    """See the module."""

    def __init__(self, spec: ModelSpec) -> None:
        dense = [layer.dense for layer in spec.layers if layer.dense is not None]
        self._mixer = next((each.mixer for each in dense if isinstance(each.mixer, DeltaRule)), None)

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        if tensor.endswith(_NORMS) and not tensor.endswith(_OWN_NORM):
            return numbers - 1
        if tensor.endswith(_HEADS):
            return numbers[self._places(of_heads=True)]
        if tensor.endswith(".attn_gate.weight"):
            return numbers[self._places()]
        if tensor.endswith(_BEHIND_KEYS):
            first = len(numbers) - len(self._places())
            return np.concatenate([numbers[:first], numbers[first:][self._places()]])
        return numbers

    def input_order(self, tensor: str) -> npt.NDArray[np.int64] | None:
        return self._places() if tensor.endswith(_LAST) else None

    def _places(self, of_heads: bool = False) -> npt.NDArray[np.int64]:
        """Where each of a checkpoint's rows of values is in a file, or each head's."""
        assert self._mixer is not None, "a model of layers that all attend has no such tensors"
        width = 1 if of_heads else self._mixer.value_width
        rows = np.arange(self._mixer.heads * width).reshape(-1, self._mixer.key_heads, width)
        return rows.swapaxes(0, 1).reshape(-1)
