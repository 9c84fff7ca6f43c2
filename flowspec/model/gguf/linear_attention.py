"""What llama.cpp's converter does to the tensors of a model with linear attention (Qwen3.5), taken back.

Several heads of values share one of keys. In transformers they lie beside each other; in a file all that are
the first of their head of keys come first, then all that are the second. Rows of matrices, convolutions and
vectors are brought back in order; so are the inputs of the last matrix where it is unpacked, while one that
stays packed takes its inputs in the file's order (`GgufLinear`), since a block may hold several heads'. Norms
are one larger in a file. How fast a state fades, A_log, is there as -e^A_log, which has no exact logarithm:
layers compute with it as it is (`linear_attention.stored_fading`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.model.linear_attention import STORED_FADING

ARCHITECTURES = ("qwen35", "qwen35moe")
CONVOLUTION = ".ssm_conv1d.weight"
_FADING = "linear_attn.A_log"
_LAST = ".ssm_out.weight"
_NORMS = ("_norm.weight", ".enorm.weight", ".hnorm.weight")
_OWN_NORM = ".ssm_norm.weight"
"""Which transformers, too, has as it is multiplied with."""
_BEHIND_KEYS = (".attn_qkv.weight", CONVOLUTION)
"""What has rows for queries and keys before those for values."""
_HEADS = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")
"""What has one row for each head."""


class LinearAttention:
    """In the place of one of transformers' tensor processors."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._key_heads, self._heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self._keys = 2 * self._key_heads * config["linear_key_head_dim"]
        self._width = config["linear_value_head_dim"]

    def preprocess_name(self, name: str) -> str:
        """As llama.cpp's converter looks it up."""
        if name.endswith(STORED_FADING):
            return name.removesuffix(STORED_FADING) + _FADING
        return name.replace(".dt_bias", ".dt_proj.bias")

    def perform_fallback_tensor_mapping(self, *_unused: Any) -> None:
        """Every tensor has a name."""

    def process(self, weights: npt.NDArray[Any], name: str) -> Any:
        """`weights` as transformers has them."""
        if name.endswith(_NORMS) and not name.endswith(_OWN_NORM):
            weights = weights - 1
        elif name.endswith(_BEHIND_KEYS):
            weights = np.concatenate(
                [weights[: self._keys], weights[self._keys :][self._places(self._width)]]
            )
        elif name.endswith(".attn_gate.weight"):
            weights = weights[self._places(self._width)]
        elif name.endswith(_HEADS):
            weights = weights[self._places(1)]
        return SimpleNamespace(weights=weights)

    def input_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Where in a row of a matrix each of transformers' inputs is; None where it is in its place."""
        return self._places(self._width) if name.endswith(_LAST) else None

    def _places(self, width: int) -> npt.NDArray[np.int64]:
        """Where each of transformers' rows of values is in a file, `width` of them for a head."""
        rows = np.arange(self._heads * width).reshape(-1, self._key_heads, width)
        return rows.swapaxes(0, 1).reshape(-1)
