"""The names of GGUF files, and of the tensors in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file, here or on the hub."""
    return model.lower().endswith(".gguf")


def parts_of(gguf: str) -> list[str]:
    """The names of all files of a GGUF model by one's name: `m-00001-of-00003.gguf` has two others, other
    names have none."""
    found = _PART.fullmatch(gguf)
    if found is None:
        return [gguf]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


NEXTN = "nextn."
"""How names begin, in a block behind the last layer, of what an MTP layer has beside a decoder layer."""
NEXTN_NAMES = {
    "embedding": "enorm",
    "feature": "hnorm",
    "projection": "eh_proj",
    "last_norm": "shared_head_norm",
    "own_embedding": "embed_tokens",
    "own_lm_head": "shared_head_head",
}
"""What follows, by what `MtpLayout` calls it."""
LAYER_TABLE = "per_layer_token_embd.weight"
OF_ALL_LAYERS = {
    LAYER_TABLE: "table",
    "per_layer_model_proj.weight": "projection",
    "per_layer_proj_norm.weight": "norm",
}
"""Of what the inputs are made that layers of Gemma 4 have of their own, and what a layer's part is called:
columns of the table, rows of the projection, and the norm, which is the same for all."""
OF_KEYS_AND_VALUES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
STORED_FADING = "linear_attn.A"
"""What a checkpoint's tensor of a layer is called here that holds -e^A_log in the place of A_log."""

_HEADS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_ATTENTION = {**_HEADS, "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BEFORE_MLP = {"ffn_norm": "post_attention_layernorm"}
_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
_BETWEEN = {
    **_AFTER_ATTENTION,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EACH_EXPERT = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", **_EACH_EXPERT}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_LLAMA = {**_ATTENTION, **_BEFORE_MLP, **_MLP}
_GEMMA = {**_ATTENTION, **_BETWEEN, **_MLP}
_QWEN35 = {
    **_ATTENTION,
    **_HEAD_NORMS,
    **_AFTER_ATTENTION,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MODULES: Mapping[str, Mapping[str, str]] = {
    "llama": {**_LLAMA, **_MIXTRAL},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "qwen3moe": {**_ATTENTION, **_HEAD_NORMS, **_BEFORE_MLP, **_EXPERTS},
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, **_HEAD_NORMS},
    "gemma4": {
        **_GEMMA,
        **_HEAD_NORMS,
        "ffn_gate_inp": "router.proj",
        "ffn_gate_up_exps": "experts.{}.gate_up_proj",
        "ffn_down_exps": "experts.{}.down_proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    "phi3": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        **_BEFORE_MLP,
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "olmo2": {
        **_HEADS,
        "attn_output": "self_attn.o_proj",
        **_HEAD_NORMS,
        **_AFTER_ATTENTION,
        "post_ffw_norm": "post_feedforward_layernorm",
        **_MLP,
    },
    "olmoe": {**_ATTENTION, **_HEAD_NORMS, **_BEFORE_MLP, **_EXPERTS},
    "glm4moe": {
        **_ATTENTION,
        **_HEAD_NORMS,
        **_AFTER_ATTENTION,
        **_MLP,
        **_EXPERTS,
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "lfm2": {
        **_HEADS,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    "gpt-oss": {**_ATTENTION, **_AFTER_ATTENTION, "ffn_gate_inp": "mlp.router", **_EACH_EXPERT},
    "qwen35": {**_QWEN35, **_MLP},
    "qwen35moe": {
        **_QWEN35,
        **_EXPERTS,
        "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
}
"""By what llama.cpp calls a module with weights in a layer, what checkpoints call it, with `{}` for an expert
where a tensor has all of them."""
_BIASED: Mapping[str, tuple[str, ...]] = {
    "qwen2": (*_HEADS,),
    "glm4moe": (*_HEADS,),
    "gemma4": (*_HEADS, "attn_output"),
    "gpt-oss": (*_HEADS, "attn_output", "ffn_gate_inp", *_EACH_EXPERT),
    **dict.fromkeys(("qwen35", "qwen35moe"), (*_HEADS, "attn_output")),
}
"""Which of them may have biases."""
_FADING = {"ssm_a": STORED_FADING, "ssm_dt.bias": "linear_attn.dt_bias"}
_SINGLE: Mapping[str, Mapping[str, str]] = {
    "gemma4": {
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    },
    "glm4moe": {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    "gpt-oss": {"attn_sinks.weight": "self_attn.sinks"},
    **dict.fromkeys(("qwen35", "qwen35moe"), _FADING),
}
"""What is no weight or bias of a module in checkpoints, or not in files."""
_LAST_NORMS = {"lfm2": "token_embd_norm"}
"""What llama.cpp calls the norm behind the last layer, where it is not `output_norm`."""


def names_in_layers(architecture: str) -> dict[str, str]:
    """What checkpoints call the tensors of a layer, by what files call them behind `blk.N.`; with `{}` for an
    expert where a tensor has all of them."""
    modules = _MODULES[architecture]
    found = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in modules.items()}
    found |= {f"{each}.bias": f"{modules[each]}.bias" for each in _BIASED.get(architecture, ())}
    return {**found, **_SINGLE.get(architecture, {})}


def names_outside(architecture: str, last_norm: str) -> dict[str, str]:
    """As `names_in_layers`, of what is in no layer; `last_norm` as checkpoints call it."""
    return {
        "token_embd.weight": "embed_tokens.weight",
        f"{_LAST_NORMS.get(architecture, 'output_norm')}.weight": f"{last_norm}.weight",
    }
