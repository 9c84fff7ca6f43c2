"""Small block drafters with random weights, in the published layout, for targets of `bench.checkpoints`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE

LAYERS, INNER, HEADS, KEY_HEADS, HEAD = 3, 96, 4, 2, 24
SIZE, MASK, IDS = 6, 299, (1, 4, 6)
RANK = 10


def make_dspark(folder: Path, *, is_gated: bool = False, **changes: Any) -> Path:
    """As `make_block_drafter`, a DSpark with an embedding and an `lm_head` of its own."""
    generator = torch.Generator().manual_seed(17)
    width = SMALL["hidden_size"]

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {
        "embed_tokens.weight": weight(VOCABULARY_SIZE, width),
        "lm_head.weight": weight(VOCABULARY_SIZE, width),
        "markov_head.markov_w1.weight": weight(VOCABULARY_SIZE, RANK),
        "markov_head.markov_w2.weight": 4 * weight(VOCABULARY_SIZE, RANK),
        "confidence_head.proj.weight": weight(1, width + RANK),
        "confidence_head.proj.bias": weight(1),
    }
    if is_gated:
        tensors["markov_head.gate_proj.weight"] = weight(RANK, width + RANK)
        tensors["markov_head.gate_proj.bias"] = weight(RANK)
    fields: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "auto_map": None,
        "dflash_config": None,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 3, 7],
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": RANK,
        "markov_head_type": "gated" if is_gated else "vanilla",
    }
    return make_block_drafter(folder, extra=tensors, **{**fields, **changes})


def make_block_drafter(
    folder: Path,
    *,
    drop: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
    own: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A folder with a block drafter; `own` go into its config's `dflash_config`, `changes` beside it."""
    generator = torch.Generator().manual_seed(13)
    width = SMALL["hidden_size"]

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": weight(width, len(IDS) * width),
        "hidden_norm.weight": 1 + weight(width),
        "norm.weight": 1 + weight(width),
    }
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj.weight": weight(HEADS * HEAD, width),
            "self_attn.k_proj.weight": weight(KEY_HEADS * HEAD, width),
            "self_attn.v_proj.weight": weight(KEY_HEADS * HEAD, width),
            "self_attn.o_proj.weight": weight(width, HEADS * HEAD),
            "self_attn.q_norm.weight": 1 + weight(HEAD),
            "self_attn.k_norm.weight": 1 + weight(HEAD),
            "mlp.gate_proj.weight": weight(INNER, width),
            "mlp.up_proj.weight": weight(INNER, width),
            "mlp.down_proj.weight": weight(width, INNER),
            "input_layernorm.weight": 1 + weight(width),
            "post_attention_layernorm.weight": 1 + weight(width),
        }
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    for name in drop:
        del tensors[name]
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": SMALL["max_position_embeddings"],
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY_SIZE,
        "block_size": SIZE,
        "num_target_layers": SMALL["num_hidden_layers"],
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(IDS), **(own or {})},
        **changes,
    }
    config = {name: value for name, value in config.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
