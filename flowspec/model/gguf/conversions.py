"""What llama.cpp's converter does to the tensors of a checkpoint, taken back.

*Llama's* heads turn pairs of numbers with the position. In a file the two of a pair are neighbours, in
a checkpoint half a head apart. *Gemma's* norms are one larger in a file.

*Linear attention* (Qwen3.5): several heads of values share one of keys. In transformers they lie beside each
other; in a file all that are the first of their head of keys come first, then all that are the second. Rows
of matrices, convolutions and vectors are brought back in order; so are the inputs of the last matrix where it
is unpacked, while one that stays packed takes its inputs in the file's order, since a block may hold several
heads'. Norms are one larger. How fast a state fades, A_log, is there as -e^A_log, which has no exact
logarithm: layers compute with it as it is (`names.STORED_FADING`).
"""

from __future__ import annotations

import numpy as np

from flowspec.core.protocol.model_spec import DeltaRule, ModelSpec
from flowspec.model.arithmetic.arrays import I64, Numbers

CONVOLUTIONS = (".shortconv.conv.weight", ".ssm_conv1d.weight")
"""How names end of a convolution's weights: `[width, length]` in a file, `[width, 1, length]` in
transformers."""
_LINEAR = ("qwen35", "qwen35moe")
_NORMS = {
    **dict.fromkeys(("gemma2", "gemma3"), ("norm.weight",)),
    **dict.fromkeys(_LINEAR, ("_norm.weight", ".enorm.weight", ".hnorm.weight")),
}
"""How names of norms end that are one larger in a file, by architecture."""
_OWN_NORM = ".ssm_norm.weight"
"""Which checkpoints, too, have as it is multiplied with."""
_TURNED = ("llama", "smollm3", "granite")
_OF_VALUES = (".attn_gate.weight", ".attn_qkv.weight", ".ssm_conv1d.weight")
"""What has rows for values; before them some have rows for queries and keys."""
_OF_HEADS = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")
"""What has one row for each head."""


class Conversion:
    """Of an architecture's tensors, for a model of that spec."""

    def __init__(self, architecture: str, spec: ModelSpec) -> None:
        self._norms = _NORMS.get(architecture, ())
        layer = spec.layers[0]
        is_turned = architecture in _TURNED
        self._turned = {".attn_q.": layer.heads, ".attn_k.": layer.kv.count} if is_turned else {}
        dense = [layer.dense for layer in spec.layers if layer.dense is not None]
        mixers = (each.mixer for each in dense if isinstance(each.mixer, DeltaRule))
        self._mixer = next(mixers, None) if architecture in _LINEAR else None

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        """The numbers of a file's `tensor` as checkpoints have them. What is done to a matrix is an order of
        its rows."""
        if tensor.endswith(self._norms) and not tensor.endswith(_OWN_NORM):
            return numbers - 1
        for part, heads in self._turned.items():
            if part in tensor:
                pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
                return pairs.swapaxes(1, 2).reshape(numbers.shape)
        if self._mixer is not None and tensor.endswith((*_OF_VALUES, *_OF_HEADS)):
            order = _order(self._mixer, of_heads=tensor.endswith(_OF_HEADS))
            first = len(numbers) - len(order)
            return np.concatenate([numbers[:first], numbers[first:][order]])
        return numbers

    def input_order(self, tensor: str) -> I64 | None:
        """Where in a row of the file each of a checkpoint's inputs is; None where it is in its place."""
        is_last = self._mixer is not None and tensor.endswith(".ssm_out.weight")
        return _order(self._mixer) if self._mixer is not None and is_last else None


def _order(mixer: DeltaRule, of_heads: bool = False) -> I64:
    """Where each of a checkpoint's rows of values is in a file, or each head's."""
    width = 1 if of_heads else mixer.value_width
    rows = np.arange(mixer.heads * width).reshape(-1, mixer.key_heads, width)
    return rows.swapaxes(0, 1).reshape(-1)
