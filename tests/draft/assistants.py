"""Small assistants of Gemma 4 with random weights, in the published layout, for targets of
`bench.checkpoints`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE

LAYERS, WIDTH, INNER, HEADS = 3, 32, 48, 4
WIDTHS = {"sliding_attention": 24, "full_attention": 40}
"""Of the heads of targets in `bench.checkpoints`."""
CLUSTERS, CHOSEN = 20, 3


def make_assistant(
    folder: Path,
    *,
    target: str = "gemma4",
    ordered: bool = True,
    drop: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
    decoder: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A folder with an assistant; `changes` go into its config, `decoder` into that of the decoder within."""
    generator = torch.Generator().manual_seed(11)
    types = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY_SIZE, WIDTH),
        "model.norm.weight": 1 + weight(WIDTH),
        "pre_projection.weight": weight(WIDTH, 2 * SMALL["hidden_size"]),
        "post_projection.weight": weight(SMALL["hidden_size"], WIDTH),
    }
    for layer, kind in enumerate(types):
        own = {
            "layer_scalar": torch.tensor([0.7]),
            "self_attn.q_proj.weight": weight(HEADS * WIDTHS[kind], WIDTH),
            "self_attn.q_norm.weight": 1 + weight(WIDTHS[kind]),
            "self_attn.o_proj.weight": weight(WIDTH, HEADS * WIDTHS[kind]),
            "mlp.gate_proj.weight": weight(INNER, WIDTH),
            "mlp.up_proj.weight": weight(INNER, WIDTH),
            "mlp.down_proj.weight": weight(WIDTH, INNER),
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        for norm in (*norms, "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            own[f"{norm}.weight"] = 1 + weight(WIDTH)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    if ordered:
        tensors["masked_embedding.centroids.weight"] = weight(CLUSTERS, WIDTH)
        tensors["masked_embedding.token_ordering"] = torch.randperm(VOCABULARY_SIZE, generator=generator)
    for name in drop:
        del tensors[name]
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": f"{target}_assistant",
        "backbone_hidden_size": SMALL["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": CLUSTERS,
        "centroid_intermediate_top_k": CHOSEN,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": f"{target}_text",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_kv_shared_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "head_dim": WIDTHS["sliding_attention"],
            "global_head_dim": WIDTHS["full_attention"],
            "vocab_size": VOCABULARY_SIZE,
            "sliding_window": 16,
            "layer_types": types,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": SMALL["max_position_embeddings"],
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
            },
            **(
                {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
                if target == "gemma4"
                else {}
            ),
            **(decoder or {}),
        },
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
