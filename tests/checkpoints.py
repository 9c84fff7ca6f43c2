"""Makes small checkpoints with random weights, one for each supported family and variant.

`python -m tests.checkpoints FOLDER MODEL` makes a drafter with the model's vocabulary that knows nothing.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch  # before transformers is, which else does without it

from flowspec.model.accelerator import importing
from flowspec.model.families import FAMILIES
from flowspec.model.files import ModelFiles

VOCABULARY_SIZE = 300
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide enough that logits are far apart, as a trained model's are
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4, "pad_token_id": 0}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA: dict[str, Any] = {
    **_FOUR,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
_GEMMA3_ROPE = {
    "sliding_attention": _ROPE,
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_QWEN3_5: dict[str, Any] = {
    **_FOUR,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
    "full_attention_interval": 3,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
}
_GEMMA4: dict[str, Any] = {
    **_FOUR,
    "num_hidden_layers": 7,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "global_head_dim": 40,
    "sliding_window": 16,
    "layer_types": [
        f"{each}_attention" for each in ("sliding", "full", "sliding", "full", *["sliding"] * 2, "full")
    ],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCABULARY_SIZE + 4,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": _ROPE,
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_GEMMA4_LARGE: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_UNIFIED = {name: value for name, value in _GEMMA4.items() if not name.endswith("_per_layer_input")}
_QWEN3_5_MOE = {
    **_QWEN3_5,
    **_EXPERTS,
    "shared_expert_intermediate_size": 48,
    "initializer_range": 0.05,  # states remember each expert that rounding swaps: wider, and it moves all
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN3_5_VISION: dict[str, Any] = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": SMALL["hidden_size"],
        "num_position_embeddings": 4,
    }
}
_OTHER_PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _VISION, "mm_tokens_per_image": 4},
    "gemma4": {},
    "gemma4_unified": {},
    "qwen3_5": _QWEN3_5_VISION,
    "qwen3_5_moe": _QWEN3_5_VISION,
}
"""What a multimodal model's config has beside the decoder."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
"""Position embeddings of small checkpoints of GPT-OSS, whose published ones do not round YaRN's range."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("llama", {"num_key_value_heads": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-rope3": (
        "llama",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("qwen2", {**_FOUR, "num_key_value_heads": 2}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 4}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "mistral-sliding": ("mistral", {**_FOUR, "num_key_value_heads": 2, "sliding_window": 16}),
    # Caps low enough to bend the scores and logits of random weights, as those of trained ones are bent.
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}),
    "gemma3-text": ("gemma3_text", {**_GEMMA, "rope_parameters": _GEMMA3_ROPE}),
    "gemma3": ("gemma3", {**_GEMMA, "rope_parameters": _GEMMA3_ROPE}),
    "gemma4": ("gemma4", _GEMMA4),
    "gemma4-text": ("gemma4_text", {**_GEMMA4, "use_double_wide_mlp": False, "num_key_value_heads": 1}),
    "gemma4-mixture": (
        "gemma4",
        {
            **_GEMMA4,
            **_GEMMA4_LARGE,
            "num_hidden_layers": 4,
            "layer_types": _GEMMA4["layer_types"][:4],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-unified": ("gemma4_unified", {**_GEMMA4_UNIFIED, **_GEMMA4_LARGE}),
    "gemma4-unified-text": ("gemma4_unified_text", _GEMMA4_UNIFIED),
    "phi3": (
        "phi3",
        {
            **_FOUR,
            "num_key_value_heads": 2,
            "sliding_window": 20,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            **_FOUR,
            "original_max_position_embeddings": 480,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + step / 8 for step in range(8)],
                "long_factor": [2.0 + step for step in range(8)],
            },
        },
    ),
    "smollm3": (
        "smollm3",
        {**_FOUR, "num_key_value_heads": 2, "tie_word_embeddings": True, "no_rope_layer_interval": 2},
    ),
    "granite": (
        "granite",
        {
            **_FOUR,
            "num_key_value_heads": 2,
            "embedding_multiplier": 6.1,
            "attention_multiplier": 0.17,
            "residual_multiplier": 0.37,
            "logits_scaling": 1.7,
        },
    ),
    "olmo2": ("olmo2", {**_FOUR, "num_key_value_heads": 2}),
    "olmoe": (
        "olmoe",
        {**_FOUR, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 96, "clip_qkv": 1.5},
    ),
    "qwen3-moe": ("qwen3_moe", {**_FOUR, **_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3-moe-fused": (
        "qwen3_moe",
        {**_FOUR, **_EXPERTS, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 14},
    ),
    "mixtral": (
        "mixtral",
        {**_FOUR, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 14},
    ),
    "lfm2": (
        "lfm2",
        {
            **_FOUR,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 150,
            "block_ffn_dim_multiplier": 1.1,
            "block_multiple_of": 16,
            "conv_bias": True,
            "full_attn_idxs": [2, 5],
        },
    ),
    "qwen3.5": ("qwen3_5", _QWEN3_5),
    "qwen3.5-text": ("qwen3_5_text", {**_QWEN3_5, "linear_num_key_heads": 4, "attention_bias": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", _QWEN3_5_MOE),
    "qwen3.5-moe-fused": ("qwen3_5_moe", {**_QWEN3_5_MOE, "linear_num_key_heads": 1}),
    "glm4-moe": (
        "glm4_moe",
        {
            **_FOUR,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.4,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **_FOUR,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "sliding_window": 14,
            "rope_parameters": YARN,
        },
    ),
}


def make_checkpoint(
    folder: Path,
    family: str,
    shape: dict[str, Any],
    *,
    seed: int = 0,
    shard: str = "5GB",
    fused: bool = False,
) -> Path:
    """A folder with config and safetensors of a random model, in the hub's layout, or `fused` with a layer's
    experts in one tensor."""
    with importing():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **shape)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    kind: Any = AutoModelForImageTextToText if FAMILIES[family].part else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    for name, value in model.state_dict().items():
        if (
            name.endswith(("bias", "sinks", "scalar", ".scale", "expert_scale")) or "norm" in name
        ):  # initialised to constants, which would hide a mix-up
            value += 0.1 * torch.randn_like(value)
        if name.endswith("router.scale"):  # of rows that are divided by the root of their width
            value *= len(value) ** 0.5  # so that shares are apart, as a trained model's are
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=not fused)
    return folder


def make_variant(folder: Path, name: str) -> Path:
    family, overrides = VARIANTS[name]
    shape = {**SMALL, **overrides}
    part = FAMILIES[family].part
    if part:
        shape = {part: shape, **_OTHER_PARTS[family], "tie_word_embeddings": shape["tie_word_embeddings"]}
    return make_checkpoint(folder, family, shape, seed=sum(map(ord, name)), fused=name.endswith("-fused"))


def make_useless_drafter(folder: Path, target: ModelFiles) -> Path:
    """One layer of random weights with the target's vocabulary and tokenizer: a drafter that is right by
    chance only."""
    own = {"vocab_size": target.spec.vocabulary, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    make_checkpoint(folder, "llama", {**SMALL, **own})
    tokenizer = target.find("tokenizer.json")
    if tokenizer is not None:
        shutil.copy(tokenizer, folder)
    return folder


if __name__ == "__main__":
    print(make_useless_drafter(Path(sys.argv[1]), ModelFiles(sys.argv[2])))
