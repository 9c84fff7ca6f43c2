"""Models of random weights, to be timed: a Llama, or a mixture in Qwen3's layout. They have a config in a
folder, and each tensor is drawn when it is read.

Matrices are also packed as in GGUF files, of random levels: in the mix Q4_K_M.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.arithmetic.packed import FORMS, PANEL, Form
from flowspec.model.files import ModelFiles
from flowspec.model.tensors import Panels, Tensors
from flowspec.plan.shape import ModelShape

SIGN_AND_FRACTION, SMALL = 0x807F, 0x3C80
"""Bits of bfloat16 that are drawn, and those of an exponent: from 1/64 to 1/32, of either sign."""
SCALE, EXPONENT = 1e-3, 118
"""Of all packed weights, as a number or as the byte of a power of two, so that nothing overflows; what
numbers they are changes no time."""
ROUNDER, FINER = ("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")
"""Forms of the usual mix Q4_K_M, each with what llama.cpp takes where rows are no whole blocks of it."""


def random_panels(form: Form, outputs: int, inputs: int, random: np.random.Generator) -> Panels:
    """Panels `[panels, units, unit_bytes]` of a matrix, with random levels and whole scales."""
    size = -(-outputs // PANEL), inputs // form.unit, form.unit_bytes
    panels = random.integers(0, 256, size, np.uint8)
    if form.has_exponents:
        panels[..., -PANEL:] = EXPONENT
        return panels
    ends = PANEL * (1 + form.has_minimum)
    panels[..., -2 * ends :] = np.full(ends, SCALE, np.float16).view(np.uint8)
    return panels


class RandomFiles(ModelFiles):
    """A model of a shape for texts of a length; its lm_head is the embedding."""

    def __init__(self, folder: Path, shape: ModelShape, context: int) -> None:
        config = {
            "model_type": "qwen3_moe" if shape.experts > 1 else "llama",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": context,
            "tie_word_embeddings": True,
        }
        if shape.experts > 1:
            config |= {
                "moe_intermediate_size": shape.intermediate // shape.experts_per_row,
                "num_experts": shape.experts,
                "num_experts_per_tok": shape.experts_per_row,
                "norm_topk_prob": True,
            }
        (folder / "config.json").write_text(json.dumps(config))
        super().__init__(str(folder))
        self._shape = shape

    def tensors(self) -> Tensors:
        return _RandomTensors(self._shape)


class _RandomTensors(Tensors):
    def __init__(self, shape: ModelShape) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
            "model.norm.weight": (shape.hidden,),
        }
        for layer in range(shape.layers):
            for name, size in _layer(shape):
                self._shapes[f"model.layers.{layer}.{name}.weight"] = size
        self._random = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        drawn = self._random.integers(0, 1 << 16, shape, np.uint16)
        drawn &= SIGN_AND_FRACTION
        drawn |= SMALL
        return drawn

    def form(self, name: str) -> str:
        """Half of the layers have values and `down_proj` in the finer form, and so has the embedding."""
        if len(self.shape(name)) != 2:
            return ""
        _, _, after = name.partition(".layers.")
        is_finer = not after or (
            int(after.partition(".")[0]) % 2 == 1 and after.endswith(("v_proj.weight", "down_proj.weight"))
        )
        whole, other = FINER if is_finer else ROUNDER
        return other if self.shape(name)[1] % FORMS[whole].unit else whole

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        outputs, inputs = shape
        return random_panels(FORMS[self.form(name)], outputs, inputs, self._random)


def _layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of one, as files call them, and their shapes."""
    hidden, width = shape.hidden, shape.head_dim
    queries, keys, is_mixture = shape.heads * width, shape.kv_heads * width, shape.experts > 1
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield name, (hidden,)
    yield from (("self_attn.q_proj", (queries, hidden)), ("self_attn.o_proj", (hidden, queries)))
    yield from ((f"self_attn.{name}_proj", (keys, hidden)) for name in "kv")
    if is_mixture:
        yield from ((f"self_attn.{name}_norm", (width,)) for name in "qk")
        yield "mlp.gate", (shape.experts, hidden)
    neurons = shape.intermediate // shape.experts_per_row
    for stem in [f"mlp.experts.{expert}" for expert in range(shape.experts)] if is_mixture else ["mlp"]:
        yield from ((f"{stem}.{name}_proj", (neurons, hidden)) for name in ("gate", "up"))
        yield f"{stem}.down_proj", (hidden, neurons)


def layer_bytes(tensors: Tensors) -> float:
    """What a weight of a layer takes on average as it is packed."""
    names = [name for name in tensors if ".layers." in name and tensors.form(name)]
    return sum(map(tensors.packed_bytes, names)) / sum(map(tensors.element_count, names))
