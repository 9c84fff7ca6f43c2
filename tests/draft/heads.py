"""Small EAGLE heads with random weights, in published layouts, for a target of `bench.checkpoints`.

`test_eagle_layouts.py` has all layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE

DRAFT_VOCABULARY = 120


def make_head(folder: Path, kind: str, **changes: Any) -> Path:
    """A folder with a head of kind `eagle` or `eagle3`, or one of EAGLE-3 with `two layers` and an output
    after the norm; `changes` go into its config."""
    width, inner, heads = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["num_attention_heads"]
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    layer_count = 2 if kind == "two layers" else 1
    tensors = {}
    for index in range(layer_count):
        reads_embedding = kind != "eagle" and index == 0
        read = 2 * width if reads_embedding else width
        prefix = "midlayer" if kind == "eagle3" else f"layers.{index}"
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] if kind != "eagle" else []
        norms += ["hidden_norm"] if reads_embedding else []
        layer = {
            "self_attn.q_proj.weight": weight(width, read),
            "self_attn.k_proj.weight": weight(width // 2, read),
            "self_attn.v_proj.weight": weight(width // 2, read),
            "self_attn.o_proj.weight": weight(width, width),
            "mlp.gate_proj.weight": weight(inner, width),
            "mlp.up_proj.weight": weight(inner, width),
            "mlp.down_proj.weight": weight(width, inner),
            **{f"{norm}.weight": 1 + weight(width) for norm in norms},
        }
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in layer.items()}
    if kind != "eagle":
        chosen = torch.randperm(VOCABULARY_SIZE, generator=generator)[:DRAFT_VOCABULARY].sort().values
        tensors |= {
            "fc.weight": weight(width, 3 * width),
            "norm.weight": 1 + weight(width),
            "lm_head.weight": weight(DRAFT_VOCABULARY, width),
            "d2t": chosen - torch.arange(DRAFT_VOCABULARY),
        }
    else:
        tensors |= {"fc.weight": weight(width, 2 * width), "fc.bias": weight(width)}
    config = {
        **SMALL,
        "model_type": "llama",
        "num_hidden_layers": layer_count,
        "norm_output": layer_count == 2,
        "num_key_value_heads": heads // 2,
        "draft_vocab_size": VOCABULARY_SIZE if kind == "eagle" else DRAFT_VOCABULARY,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
