"""What llama.cpp's converter does to the tensors of a checkpoint, taken back.

*Llama's* heads turn pairs of numbers with the position. In a file the two of a pair are neighbours, in
a checkpoint half a head apart. *Norms* whose weights are added to 1 are stored with it.

*Linear attention* (Qwen3.5): several heads of values share one of keys. In transformers they lie beside each
other; in a file all that are the first of their head of keys come first, then all that are the second. Rows
of matrices, convolutions and vectors are brought back in order; so are the inputs of the last matrix where it
is unpacked, while one that stays packed takes its inputs in the file's order, since a block may hold several
heads'. How fast a state fades, A_log, is there as -e^A_log, which has no exact logarithm: layers compute with
it as it is (`names.STORED_FADING`).
"""

from __future__ import annotations

import numpy as np

from flowspec.core.protocol.model_spec import DeltaRule, ModelSpec
from flowspec.model.arithmetic.arrays import I64, Numbers

_TURNED = ("llama", "smollm3", "granite")
_OF_VALUES = (".attn_gate.weight", ".attn_qkv.weight", ".ssm_conv1d.weight")
"""What has rows for values; before them some have rows for queries and keys."""
_OF_HEADS = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")
"""What has one row for each head."""
_OWN_NORM = ".ssm_norm.weight"
"""Which checkpoints, too, have as it is multiplied with."""


class Conversion:
    """Of an architecture's tensors, for a model of that spec."""

    def __init__(self, architecture: str, spec: ModelSpec) -> None:
        self._is_one_larger = spec.norm == "scale by 1 + w, cast"
        layer = spec.layers[0]
        is_turned = architecture in _TURNED
        self._turned = {".attn_q.": layer.heads, ".attn_k.": layer.kv.count} if is_turned else {}
        mixers = [each.dense.mixer for each in spec.layers if each.dense is not None]
        self._rule = next((mixer for mixer in mixers if isinstance(mixer, DeltaRule)), None)

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        """The numbers of a file's `tensor` as checkpoints have them. What is done to a matrix is an order of
        its rows."""
        if self._is_one_larger and tensor.endswith("norm.weight") and not tensor.endswith(_OWN_NORM):
            return numbers - 1
        for part, heads in self._turned.items():
            if part in tensor:
                pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
                return pairs.swapaxes(1, 2).reshape(numbers.shape)
        if self._rule is not None and tensor.endswith((*_OF_VALUES, *_OF_HEADS)):
            order = _order(self._rule, 1 if tensor.endswith(_OF_HEADS) else self._rule.value_width)
            first = len(numbers) - len(order)
            return np.concatenate([numbers[:first], numbers[first:][order]])
        return numbers

    def input_order(self, tensor: str) -> I64 | None:
        """Where in a row of the file each of a checkpoint's inputs is; None where it is in its place."""
        if self._rule is None or not tensor.endswith(".ssm_out.weight"):
            return None
        return _order(self._rule, self._rule.value_width)


def _order(rule: DeltaRule, width: int) -> I64:
    """Where each of a checkpoint's rows of values is in a file, of which each head has so many."""
    rows = np.arange(rule.heads * width).reshape(-1, rule.key_heads, width)
    return rows.swapaxes(0, 1).reshape(-1)
