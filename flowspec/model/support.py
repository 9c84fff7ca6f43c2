"""What a supported family's config may not ask for: everything that would change the arithmetic and is not
handled.

`spec.py` says what of a family's config layers compute. Refused here: fields that transformers' class of the
family does not know (it keeps and ignores them), what layers compute in one way only, features that depend
on the batch, quantised weights, and fields at odds with each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from flowspec.core.protocol.sliding_window import CONVOLUTION, LINEAR
from flowspec.errors import InputError
from flowspec.model.families import Family, check_family
from flowspec.model.prequantised.scheme import QUANTISED, scheme_of
from flowspec.model.rotary import rope_parameters
from flowspec.model.spec import FULL, SLIDING, experts_of, heads_of, inputs_of, varying_of

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""Position embeddings that depend on the position alone, longrope up to `context_max`; others look at the
whole batch."""
CONVOLUTION_MAX = 64
"""Positions that a short convolution sees at most; of published models 3 and 4."""
KEY_WIDTH_MAX, VALUE_WIDTH_MAX = 256, 1024
"""Of a head's key and value in linear attention; of published models 128."""
_PICTURES = "vision"
"""Only what stands for pictures looks both ways, and text has none (Gemma 4)."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_k_eq_v": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attn_output_gate": (None, False),
    "attn_temperature_tuning": (None, False, 0),
    "block_use_swiglu": (None, True),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "enable_moe_block": (None, False),
    "final_logit_softcapping": (None,),
    "global_head_dim": (None,),
    "hidden_activation": (None,),
    "hidden_size_per_layer_input": (None, 0),
    "is_causal": (None, True),
    "kv_lora_rank": (None,),
    "layer_types": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "n_group": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_global_key_value_heads": (None,),
    "num_kv_shared_layers": (None, 0),
    "num_local_experts": (None, 0),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "scale_depth": (None,),
    "scale_emb": (None, 1),
    "sliding_window": (None,),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "topk_group": (None, 0, 1),
    "use_bidirectional_attention": (None, False),
    "use_double_wide_mlp": (None, False),
    "use_pos_enc": (None, True),
    "use_qk_norm": (None, False),
}
"""Fields by which a config changes the arithmetic, each with its values that change nothing."""


def family_of(config: Any, model: str) -> Family:
    """The family of a decoder's config (`ModelFiles.config`); raises `InputError` for anything about it that
    is not supported."""
    family = check_family(config.to_dict(), model)
    named = config.architectures or []
    if named and not any(family.accepts(str(name)) for name in named):
        raise InputError(
            f"model {model!r} is a {named[0]}, which is more or other than a {family.prefix} that generates "
            f"text; expected {family.prefix}ForCausalLM"
        )
    scheme_of({name: getattr(config, name, None) for name in QUANTISED}, model)
    check_rotary(config, family, model)
    _check_fields(config, family, model)
    _check_repeated(config, family, model)
    _check_heads(config, model)
    _check_experts(config, model, family)
    _check_layer_types(config, family, model)
    _check_layer_inputs(config, model)
    _check_shared_keys(config, model)
    if getattr(config, "enable_moe_block", None):
        _check_experts_beside(config, model)
    if family.other_layers == CONVOLUTION:
        _check_convolutions(config, model)
    elif family.other_layers == LINEAR:
        _check_linear_attention(config, model)
    return family


def check_rotary(config: Any, family: Family, model: str) -> None:
    """Raises `InputError` for position embeddings that depend on more than the position, or do not fit the
    family's layers."""
    if family.rotary_by_layer_type:
        for layer_type in dict.fromkeys(config.layer_types):
            if not isinstance((config.rope_parameters or {}).get(layer_type), dict):
                raise InputError(
                    f"model {model!r}: rope_parameters: expected those of {layer_type}, got none"
                )
    for rope in rope_parameters(config):
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise InputError(
                f"model {model!r} uses {kind!r:.40} position embeddings, but FlowSpec runs "
                f"{', '.join(_ROPE_TYPES)}"
            )
        if kind == "longrope" and type(rope.get("original_max_position_embeddings")) is not int:
            raise InputError(
                f"model {model!r}: expected longrope position embeddings to have a number as "
                "original_max_position_embeddings"
            )
        own = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
        if own is not None and not (type(own) in (int, float) and 0 < own <= 1):
            raise InputError(
                f"model {model!r}: partial_rotary_factor: expected a number above 0, up to 1, got {own!r:.40}"
            )
        if not family.rotary_is_partial and kind != "proportional" and own not in (None, 1):
            raise InputError(
                f"model {model!r} sets partial_rotary_factor, which transformers' {config.model_type} does "
                "not apply; expected 1"
            )


def _check_fields(config: Any, family: Family, model: str) -> None:
    """Refuses fields that would change the arithmetic of another class, but that this one does not know."""
    kind = type(config)
    known = {field.name for field in dataclasses.fields(kind)} | {
        *kind.attribute_map,
        *kind.attribute_map.values(),
    }
    built_in = family.built_in
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, _PICTURES):
        raise InputError(
            f"model {model!r} attends to later tokens (use_bidirectional_attention), so it does not generate "
            "text one by one"
        )
    if isinstance(getattr(config, "per_layer_config", None), dict):
        raise InputError(
            f"model {model!r} sets per_layer_config, which this version of transformers does not know; "
            "expected none, or transformers 5.20 or later"
        )
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        neutral = (*neutral, built_in[name]) if name in built_in else neutral
        if name not in known and value not in neutral and not _is_idle(config, name, value):
            raise InputError(
                f"model {model!r} sets {name} to {value!r:.40}, which transformers' {config.model_type} does "
                "not know; expected none"
            )


def _check_repeated(config: Any, family: Family, model: str) -> None:
    for name, same in family.repeated.items():
        value = getattr(config, name, None)
        expected = getattr(config, same, None) or (config.rope_parameters or {}).get(same)
        if value not in (None, expected):
            raise InputError(
                f"model {model!r} sets {name} to {value!r:.40} and {same} to {expected!r:.40}; expected one "
                "value"
            )


def _is_idle(config: Any, name: str, value: Any) -> bool:
    """Whether a window is too wide, or types of layers too plain, to change anything."""
    if name == "sliding_window":
        return type(value) is int and value >= config.max_position_embeddings
    return name == "layer_types" and isinstance(value, list) and set(value) == {FULL}


def _check_heads(config: Any, model: str) -> None:
    varying = varying_of(config) - {"head_dim", "num_key_value_heads"}
    if varying:
        raise InputError(
            f"model {model!r} sets {min(varying)} for single layers (per_layer_config); expected one for all"
        )
    heads = config.num_attention_heads
    for own in heads_of(config):
        if own.count < 1 or own.width < 1 or heads % own.count:
            raise InputError(
                f"model {model!r}: expected num_attention_heads to be a multiple of num_key_value_heads, got "
                f"{heads} and {own.count} of the width {own.width}"
            )


def _check_shared_keys(config: Any, model: str) -> None:
    count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
    if type(shared) is not int or not 0 <= shared < count:
        raise InputError(
            f"model {model!r}: num_kv_shared_layers: expected a number from 0 to {count - 1}, got "
            f"{shared!r:.40}"
        )
    if not shared:
        return
    own, sharing = set(config.layer_types[: count - shared]), set(config.layer_types[count - shared :])
    if not sharing <= own:
        raise InputError(
            f"model {model!r}: num_kv_shared_layers: expected a layer of the type {min(sharing - own)} "
            f"before the last {shared}, whose keys and values these share"
        )


def _check_layer_inputs(config: Any, model: str) -> None:
    rows = getattr(config, "vocab_size_per_layer_input", None)
    if getattr(config, "hidden_size_per_layer_input", None) and rows < config.vocab_size:
        raise InputError(
            f"model {model!r}: vocab_size_per_layer_input: expected a number from vocab_size, "
            f"{config.vocab_size}, got {rows}"
        )


def _check_experts_beside(config: Any, model: str) -> None:
    for name, most in (
        ("num_experts", 1 << 12),
        ("top_k_experts", config.num_experts),
        ("moe_intermediate_size", 1 << 20),
    ):
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(
                f"model {model!r}: {name}: expected a number from 1 to {most}, got {value!r:.40}"
            )


def _check_experts(config: Any, model: str, family: Family) -> None:
    experts = experts_of(config)
    if (
        not experts
        and family.stacked
        and 0 in (getattr(config, name, None) for name in ("num_local_experts", "num_experts"))
    ):
        raise InputError(f"model {model!r}: number of experts: expected 1 or more, got 0")
    if not experts or getattr(config, "enable_moe_block", None):  # Gemma 4 calls its fields otherwise
        return
    for name in ("swiglu_alpha", "swiglu_limit"):
        value = getattr(config, name, None)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise InputError(f"model {model!r}: {name}: expected a number above 0, got {value!r:.40}")
    chosen = getattr(config, "num_experts_per_tok", None)
    if type(chosen) is not int or not 1 <= chosen <= experts:
        raise InputError(
            f"model {model!r}: num_experts_per_tok: expected a number from 1 to {experts}, got {chosen!r:.40}"
        )
    groups, open_groups = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
    if (
        not (type(groups) is type(open_groups) is int and 1 <= open_groups <= groups)
        or experts % groups
        or experts // groups * open_groups < chosen
        or (groups > 1 and experts // groups < 2)
    ):
        raise InputError(
            f"model {model!r}: n_group and topk_group: expected equal groups of its {experts} experts, as "
            f"many as have {chosen}, got {groups!r:.40} and {open_groups!r:.40}"
        )


def _check_convolutions(config: Any, model: str) -> None:
    length = config.conv_L_cache
    if type(length) is not int or not 1 <= length <= CONVOLUTION_MAX:
        raise InputError(
            f"model {model!r}: conv_L_cache: expected a number from 1 to {CONVOLUTION_MAX}, got "
            f"{length!r:.40}"
        )
    for name, least, most in (("block_multiple_of", 1, 1 << 20), ("block_ffn_dim_multiplier", 1e-3, 1e3)):
        value = getattr(config, name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise InputError(
                f"model {model!r}: {name}: expected a number from {least} to {most}, got {value!r:.40}"
            )
    stated = config.full_attn_idxs
    attending = [place for place, width in enumerate(inputs_of(config)) if not width]
    if stated is not None and set(stated) != set(attending):
        raise InputError(
            f"model {model!r}: full_attn_idxs: expected the layers that layer_types has as {FULL}, "
            f"{attending!r:.80}, got {stated!r:.80}"
        )


def _check_linear_attention(config: Any, model: str) -> None:
    fields = {
        "linear_conv_kernel_dim": CONVOLUTION_MAX,
        "linear_num_key_heads": 1 << 12,
        "linear_num_value_heads": 1 << 12,
        "linear_key_head_dim": KEY_WIDTH_MAX,
        "linear_value_head_dim": VALUE_WIDTH_MAX,
    }
    for name, most in fields.items():
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(
                f"model {model!r}: {name}: expected a number from 1 to {most}, got {value!r:.40}"
            )
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise InputError(
            f"model {model!r}: expected linear_num_value_heads to be a multiple of linear_num_key_heads, got "
            f"{values} and {keys}"
        )
    built_in = {
        "attn_output_gate": True,
        "hidden_act": "silu",
        "mamba_ssm_dtype": "float32",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    for name, only in built_in.items():
        if getattr(config, name, only) != only:
            raise InputError(
                f"model {model!r} sets {name} to {getattr(config, name)!r:.40}, but FlowSpec runs "
                f"{config.model_type} with {json.dumps(only)} alone"
            )
    interval = getattr(config, "full_attention_interval", None)
    if interval is None:
        return
    places = range(1, len(config.layer_types) + 1)
    is_number = type(interval) is int and interval >= 1
    stated = [LINEAR if place % interval else FULL for place in places] if is_number else None
    if stated != list(config.layer_types):
        raise InputError(
            f"model {model!r}: full_attention_interval: expected what layer_types says, "
            f"{config.layer_types!r:.80}, got {interval!r:.40}"
        )


def _check_layer_types(config: Any, family: Family, model: str) -> None:
    """Masks go by a layer's type and attention by its window: they must mean the same."""
    window = getattr(config, "sliding_window", None)
    if window is not None and (type(window) is not int or window < 1):
        raise InputError(f"model {model!r}: sliding_window: expected a number from 1, got {window!r:.40}")
    types = getattr(config, "layer_types", None)
    if types is None:
        return
    expected = (FULL, family.other_layers or SLIDING)
    if len(types) != config.num_hidden_layers or not set(types) <= set(expected):
        raise InputError(
            f"model {model!r}: layer_types: expected {config.num_hidden_layers} of {' and '.join(expected)}, "
            f"got {types!r:.80}"
        )
    if SLIDING in types and (window is None or not getattr(config, "use_sliding_window", True)):
        raise InputError(
            f"model {model!r} has layers of the type {SLIDING}, but no sliding_window that is in use; "
            "correct its config.json"
        )
