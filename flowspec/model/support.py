"""What a config may not ask for: sizes that would take memory without end, and of a supported family all that
would change the arithmetic and is not handled.

`spec.py` says what of a family's config layers compute. Refused here: fields that transformers' class of the
family does not know (it keeps and ignores them), what layers compute in one way only, features that depend
on the batch, quantised weights, and fields at odds with each other.

A config may come from a head on the network, and transformers builds whatever it says. A width of 2^31 took
16 GiB and half a minute for position embeddings alone, a number of labels without end a list without end, and
a million experts 12 GiB for the names of their tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.sliding_window import CONVOLUTION, LINEAR
from flowspec.errors import InputError
from flowspec.model.families import Family, check_family
from flowspec.model.prequantised.scheme import QUANTISED, scheme_of
from flowspec.model.rotary import rope_parameters
from flowspec.model.spec import FULL, SLIDING, experts_of, heads_of, varying_of

_SIZES: dict[int, tuple[str, ...]] = {
    1 << 8: ("n_shared_experts",),
    1 << 10: ("linear_key_head_dim", "linear_value_head_dim"),
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
    limits.LAYERS_MAX: ("num_hidden_layers", "num_kv_shared_layers"),
    limits.VOCABULARY_MAX: ("vocab_size", "vocab_size_per_layer_input"),
}
_MOST = {name: most for most, names in _SIZES.items() for name in names}
"""The largest values of what is multiplied into memory, ten times and more above any model known."""
_ABOVE_ZERO = (
    *("hidden_size", "num_attention_heads", "query_pre_attn_scalar", "rms_norm_eps", "norm_eps"),
    *("logits_scaling", "rope_theta", "factor", "clip_qkv"),
)
"""What is divided by, or has its root or its logarithm taken."""
FLOAT_MAX = 1e15
"""The farthest that anything else may be from 0; products of two are far below float32's largest."""
EXPERTS_MAX = limits.TENSORS_MAX // 3
"""Of all layers together: a checkpoint has at least three tensors of each."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""Position embeddings that depend on the position alone, longrope up to `context_max`; others look at the
whole batch."""
CONVOLUTION_MAX = 64
"""Positions that a short convolution sees at most; of published models 3 and 4."""
_LINEAR_FIELDS = {
    "linear_conv_kernel_dim": CONVOLUTION_MAX,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 1024,
}
"""The most that linear attention is computed with; of published models heads are 128 wide."""
_LINEAR_ONLY: dict[str, Any] = {
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""Its only values of these."""
_PICTURES = "vision"
"""Only what stands for pictures looks both ways, and text has none (Gemma 4)."""
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
    """Raises `InputError` naming a field of a config.json, wherever it stands, that is too large or no number
    where one belongs; before transformers acts on it."""
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise InputError(f"{path}: architectures: expected a list of names, got {architectures!r:.80}")
    rest: list[tuple[str, Any]] = list(raw.items())
    while rest:
        name, value = rest.pop()
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(name, each) for each in value]
        elif not _fits(name, value):
            raise InputError(f"{path}: {name}: expected a number up to {_MOST[name]}, got {value!r:.80}")
        elif isinstance(value, int) and abs(value) > limits.ID_MAX:
            raise InputError(
                f"{path}: {name!r:.80}: expected a number up to {limits.ID_MAX}, got {value!r:.80}"
            )
        elif isinstance(value, float) and not abs(value) <= FLOAT_MAX:
            raise InputError(f"{path}: {name!r:.80}: expected a number up to {FLOAT_MAX:g}, got {value}")
        elif name in _ABOVE_ZERO and isinstance(value, int | float) and not value > 0:
            raise InputError(f"{path}: {name}: expected a number above 0, got {value}")


def check_built(config: Any, model: str) -> None:
    """As `check_config`, of a transformers config, whose class knows all aliases of a field, and of products
    of fields."""
    varying = varying_of(config)  # `check_config` has seen what single layers have
    for name, most in _MOST.items():
        value = None if name in varying else getattr(config, name, None)
        if not _fits(name, value):
            raise InputError(f"model {model!r}: {name}: expected a number up to {most}, got {value!r:.80}")
    experts = config.num_hidden_layers * experts_of(config)
    if experts > EXPERTS_MAX:
        raise InputError(
            f"model {model!r}: num_hidden_layers times num_experts: expected at most {EXPERTS_MAX}, got "
            f"{experts}"
        )


def _fits(name: str, value: Any) -> bool:
    return name not in _MOST or value is None or (type(value) is int and 0 <= value <= _MOST[name])


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
    _check_heads(config, model)
    _check_experts(config, model, family)
    _check_layer_types(config, family, model)
    _check_shared(config, model)
    if family.other_layers == CONVOLUTION:
        _check_convolutions(config, model)
    elif family.other_layers == LINEAR:
        _check_linear_attention(config, model)
    return family


def _check_number(
    config: Any, model: str, name: str, most: float, least: float = 1, kinds: tuple[type, ...] = (int,)
) -> None:
    value: Any = getattr(config, name, None)
    if type(value) not in kinds or not least <= value <= most:
        raise InputError(
            f"model {model!r}: {name}: expected a number from {least} to {most}, got {value!r:.40}"
        )


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
    """Refuses fields that would change the arithmetic of another class, but that this one does not know, and
    those that say something else than the field that they repeat."""
    kind = type(config)
    known = {field.name for field in dataclasses.fields(kind)}
    known |= {*kind.attribute_map, *kind.attribute_map.values()}
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
        is_same = value in (*neutral, family.built_in.get(name)) or _is_idle(config, name, value)
        if name not in known and not is_same:
            raise InputError(
                f"model {model!r} sets {name} to {value!r:.40}, which transformers' {config.model_type} does "
                "not know; expected none"
            )
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


def _check_shared(config: Any, model: str) -> None:
    """What layers of Gemma 4 share: a table of inputs, and keys and values."""
    rows = getattr(config, "vocab_size_per_layer_input", None)
    if getattr(config, "hidden_size_per_layer_input", None) and rows < config.vocab_size:
        raise InputError(
            f"model {model!r}: vocab_size_per_layer_input: expected a number from vocab_size, "
            f"{config.vocab_size}, got {rows}"
        )
    count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None)
    if not shared:
        return
    _check_number(config, model, "num_kv_shared_layers", count - 1, least=0)
    own, sharing = set(config.layer_types[: count - shared]), set(config.layer_types[count - shared :])
    if not sharing <= own:
        raise InputError(
            f"model {model!r}: num_kv_shared_layers: expected a layer of the type {min(sharing - own)} "
            f"before the last {shared}, whose keys and values these share"
        )


def _check_experts(config: Any, model: str, family: Family) -> None:
    experts = experts_of(config)
    counts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts")]
    if not experts and family.stacked and 0 in counts:
        raise InputError(f"model {model!r}: number of experts: expected 1 or more, got 0")
    if getattr(config, "enable_moe_block", None):  # Gemma 4 calls its fields otherwise
        _check_number(config, model, "num_experts", _MOST["num_experts"])
        _check_number(config, model, "top_k_experts", config.num_experts)
        _check_number(config, model, "moe_intermediate_size", _MOST["moe_intermediate_size"])
        return
    if not experts:
        return
    for name in ("swiglu_alpha", "swiglu_limit"):
        value = getattr(config, name, None)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise InputError(f"model {model!r}: {name}: expected a number above 0, got {value!r:.40}")
    _check_number(config, model, "num_experts_per_tok", experts)
    groups, open_groups = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
    if (
        not (type(groups) is type(open_groups) is int and 1 <= open_groups <= groups)
        or experts % groups
        or experts // groups * open_groups < config.num_experts_per_tok
        or (groups > 1 and experts // groups < 2)
    ):
        raise InputError(
            f"model {model!r}: n_group and topk_group: expected equal groups of its {experts} experts, as "
            f"many as have {config.num_experts_per_tok}, got {groups!r:.40} and {open_groups!r:.40}"
        )


def _check_convolutions(config: Any, model: str) -> None:
    _check_number(config, model, "conv_L_cache", CONVOLUTION_MAX)
    _check_number(config, model, "block_multiple_of", 1 << 20, kinds=(int, float))
    _check_number(config, model, "block_ffn_dim_multiplier", 1e3, 1e-3, kinds=(int, float))
    stated = config.full_attn_idxs
    attending = [place for place, kind in enumerate(config.layer_types) if kind == FULL]
    if stated is not None and set(stated) != set(attending):
        raise InputError(
            f"model {model!r}: full_attn_idxs: expected the layers that layer_types has as {FULL}, "
            f"{attending!r:.80}, got {stated!r:.80}"
        )


def _check_linear_attention(config: Any, model: str) -> None:
    for name, most in _LINEAR_FIELDS.items():
        _check_number(config, model, name, most)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise InputError(
            f"model {model!r}: expected linear_num_value_heads to be a multiple of linear_num_key_heads, got "
            f"{values} and {keys}"
        )
    for name, only in _LINEAR_ONLY.items():
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
