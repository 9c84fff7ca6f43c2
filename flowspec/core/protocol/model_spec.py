"""What a model computes, layer by layer, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
QueryNorm = Literal["", "head", "width"]
"""How queries and keys are normalised: not at all, each head alone, or all heads together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A decoder layer: attention, then an MLP with a gate, each added to the hidden state.

    `window`: how many positions a row sees, itself counted; 0: all. `is_turned`: whether position embeddings
    turn queries and keys. `scale` and `cap` are of scores; cap 0: they have no bound. `norm_before...`: which
    of the four places have a norm. `added_scale`: of what is added to the hidden state.
    """

    heads: int
    kv_heads: int
    head_width: int
    window: int = 0
    is_turned: bool = True
    scale: float
    cap: float = 0.0
    query_norm: QueryNorm = ""
    activation: Activation = "silu"
    norm_before_attention: str = "input_layernorm"
    norm_after_attention: str = ""
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_mlp: str = ""
    added_scale: float = 1.0
