"""What a config may not ask for: sizes that would take memory without end, and of a supported family all that
would change the arithmetic and is not handled.

`spec.py` says what of a family's config layers compute. Refused here: fields that transformers' class of the
family does not know (it keeps and ignores them), what depends on the batch, quantised weights, and fields at
odds with each other.

A config may come from a head on the network, and transformers builds whatever it says: position embeddings
of any width, lists of labels without end, names for the tensors of a million experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import CONVOLUTION, LINEAR
from flowspec.errors import InputError
from flowspec.model.families import Family, check_family
from flowspec.model.prequantised.scheme import QUANTISED, scheme_of
from flowspec.model.spec import FULL, SLIDING, experts_of, rope_parameters, varying_of

_SIZES: dict[int, tuple[str, ...]] = {
    1 << 6: ("conv_L_cache", "linear_conv_kernel_dim"),
    1 << 8: ("n_shared_experts", "linear_key_head_dim"),
    1 << 10: ("linear_value_head_dim",),
    1 << 12: (
        *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts"),
    ),
    1 << 13: ("head_dim", "global_head_dim"),
    1 << 14: ("hidden_size_per_layer_input",),
    1 << 16: ("num_labels",),
    1 << 17: ("hidden_size",),
    1 << 20: ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    limits.LAYERS_MAX: ("num_hidden_layers", "num_kv_shared_layers", "full_attention_interval"),
    limits.VOCABULARY_MAX: ("vocab_size", "vocab_size_per_layer_input"),
}
_MOST = {name: most for most, names in _SIZES.items() for name in names}
"""The largest values of what is multiplied into memory, ten times and more above any model known."""
_ABOVE_ZERO = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    *("head_dim", "global_head_dim", "query_pre_attn_scalar", "rms_norm_eps", "norm_eps"),
    *("logits_scaling", "rope_theta", "factor", "clip_qkv", "swiglu_alpha", "swiglu_limit"),
    *("original_max_position_embeddings", "conv_L_cache", "linear_conv_kernel_dim"),
    *("block_multiple_of", "block_ffn_dim_multiplier", "decoder_sparse_step", "full_attention_interval"),
)
"""What is divided by, has its root or its logarithm taken, or would be switched off by 0."""
FLOAT_MAX = 1e15
"""The farthest that anything else may be from 0; products of two are far below float32's largest."""
EXPERTS_MAX = limits.TENSORS_MAX // 3
"""Of all layers together: a checkpoint has at least three tensors of each."""
_TABLES = (*QUANTISED, "rope_parameters", "rope_scaling")
"""Fields that hold one, or nothing."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""Position embeddings that depend on the position alone, longrope up to `context_max`; others look at the
whole batch."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "clip_qkv"),
            *("final_logit_softcapping", "global_head_dim", "hidden_activation", "kv_lora_rank"),
            *("layer_types", "num_global_key_value_heads", "query_pre_attn_scalar", "scale_depth"),
            *("sliding_window", "swiglu_alpha", "swiglu_limit"),
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            *("alibi", "attention_k_eq_v", "attn_output_gate", "enable_moe_block", "qk_layernorm"),
            *("attn_temperature_tuning", "use_bidirectional_attention", "use_double_wide_mlp"),
            *("use_qk_norm", "hidden_size_per_layer_input", "n_routed_experts", "num_experts"),
            *("num_kv_shared_layers", "num_local_experts"),
        ),
        (None, 0),
    ),
    **dict.fromkeys(("block_use_swiglu", "is_causal", "use_pos_enc", "embedding_multiplier"), (None, 1)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier", "scale_emb"), (None, 1)),
    **dict.fromkeys(("n_group", "topk_group"), (None, 0, 1)),
    "no_rope_layers": (None, []),
}
"""Fields by which a config changes the arithmetic, each with its values that change nothing; False is 0."""


def check_config(raw: dict[str, Any], path: Path) -> None:
    """Raises `InputError` naming a field of a config, anywhere in it, that is too large or no number where
    one belongs; before transformers acts on it."""
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise InputError(f"{path}: architectures: expected a list of names, got {architectures!r:.80}")
    for name in _TABLES:
        if not isinstance(raw.get(name), dict | None):
            raise InputError(f"{path}: {name}: expected a table, got {raw[name]!r:.80}")
    rest: list[tuple[str, Any]] = list(raw.items())
    while rest:
        name, value = rest.pop()
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(name, each) for each in value]
        elif expected := _expected(name, value):
            raise InputError(f"{path}: {name!r:.80}: expected {expected}, got {value!r:.80}")


def _expected(name: str, value: Any) -> str:
    """What a field that has no such value may have; empty where it may."""
    is_number = type(value) in (int, float)
    least = int(name in _ABOVE_ZERO)
    if name in _MOST and value is not None and not (type(value) is int and least <= value <= _MOST[name]):
        return f"a whole number from {least} to {_MOST[name]}"
    if name in ("head_dim", "global_head_dim") and value is not None and value % 2:
        return "an even number, since position embeddings turn pairs"
    if isinstance(value, int) and abs(value) > limits.ID_MAX:
        return f"a number from {-limits.ID_MAX} to {limits.ID_MAX}"
    if isinstance(value, float) and not abs(value) <= FLOAT_MAX:
        return f"a number from {-FLOAT_MAX:g} to {FLOAT_MAX:g}"
    if name in _ABOVE_ZERO and value is not None and not (is_number and value > 0):
        return "a number above 0"
    return ""


def check_built(config: Any, model: str) -> None:
    """As `check_config`, of a transformers config, whose class knows all aliases of a field, and of products
    of fields."""
    for name in _MOST.keys() - varying_of(config):  # `check_config` has seen what single layers have
        value = getattr(config, name, None)
        if expected := _expected(name, value):
            raise InputError(f"model {model!r}: {name!r}: expected {expected}, got {value!r:.80}")
    experts = config.num_hidden_layers * experts_of(config)
    if experts > EXPERTS_MAX:
        raise InputError(
            f"model {model!r}: num_hidden_layers times num_experts: expected at most {EXPERTS_MAX}, got "
            f"{experts}"
        )


def family_of(config: Any, model: str) -> Family:
    """The family of a decoder's config (`ModelFiles.config`); raises `InputError` for anything about it that
    is not supported, but what `spec_of` finds."""
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
    _check_layer_types(config, family, model)
    return family


def check_rotary(config: Any, family: Family, model: str) -> None:
    """Raises `InputError` for position embeddings that depend on more than the position, or do not fit the
    family's layers."""
    for layer_type in dict.fromkeys(config.layer_types) if family.rotary_by_layer_type else ():
        if not isinstance((config.rope_parameters or {}).get(layer_type), dict):
            raise InputError(f"model {model!r}: rope_parameters: expected those of {layer_type}, got none")
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
        part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
        least = 0 if family.rotary_is_partial or kind == "proportional" else 1
        if part not in (None, 1) and not (type(part) is float and least < part < 1):
            raise InputError(
                f"model {model!r}: partial_rotary_factor: expected "
                f"{'1' if least else 'a number above 0, up to 1'} of a {config.model_type}, got {part!r:.40}"
            )


def _check_fields(config: Any, family: Family, model: str) -> None:
    """Refuses fields that would change the arithmetic of another class, but that this one does not know, and
    those that are at odds with another."""
    # With "vision" only what stands for pictures looks both ways, and text has none (Gemma 4).
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise InputError(
            f"model {model!r} attends to later tokens (use_bidirectional_attention), so it does not generate "
            "text one by one"
        )
    kind = type(config)
    known = {field.name for field in dataclasses.fields(kind)}
    known |= {*kind.attribute_map, *kind.attribute_map.values(), *family.only}
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        is_idle = value in (*neutral, family.built_in.get(name))
        if name == "sliding_window" and type(value) is int:
            is_idle = value >= config.max_position_embeddings
        elif name == "layer_types" and isinstance(value, list):
            is_idle = all(each == FULL for each in value)
        if name not in known and not is_idle:
            raise InputError(
                f"model {model!r} sets {name} to {value!r:.40}, which transformers' {config.model_type} does "
                "not know; expected none"
            )
    varying = varying_of(config) - {"head_dim", "num_key_value_heads"}
    if varying or isinstance(getattr(config, "per_layer_config", None), dict):  # transformers before 5.20
        raise InputError(
            f"model {model!r} sets {min(varying, default='fields')} for single layers (per_layer_config); "
            "expected one for all"
        )
    for name, same in family.repeated.items():
        value = getattr(config, name, None)
        expected = getattr(config, same, None) or (config.rope_parameters or {}).get(same)
        if value not in (None, expected):
            raise InputError(
                f"model {model!r} sets {name} to {value!r:.40} and {same} to {expected!r:.40}; expected one "
                "value"
            )
    has_experts = getattr(config, "enable_moe_block", None)
    if (bool(family.stacked) if has_experts is None else has_experts) and not experts_of(config):
        raise InputError(f"model {model!r}: number of experts: expected 1 or more, got 0")


def _check_layer_types(config: Any, family: Family, model: str) -> None:
    """Masks go by a layer's type and attention by its window: they must mean the same."""
    window = getattr(config, "sliding_window", None)
    if window == 0:
        raise InputError(f"model {model!r}: sliding_window: expected a number from 1, got 0")
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
    interval, field, stated = getattr(config, "full_attention_interval", None), "", None
    if family.other_layers == CONVOLUTION:
        field, stated = "full_attn_idxs", config.full_attn_idxs
    elif family.other_layers == LINEAR and interval is not None:
        field, stated = "full_attention_interval", range(interval - 1, len(types), interval)
    attending = [place for place, kind in enumerate(types) if kind == FULL]
    if stated is not None and {*stated} != {*attending}:
        raise InputError(
            f"model {model!r}: {field}: expected the layers that layer_types has as {FULL}, "
            f"{attending!r:.80}, got {[*stated]!r:.80}"
        )
