"""A model's `ModelSpec` from the transformers config of its decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowspec.core.protocol.model_spec import (
    Activation,
    Convolution,
    DeltaRule,
    Dense,
    Heads,
    LayerSpec,
    Mixture,
    ModelSpec,
    Rotary,
)
from flowspec.core.protocol.sliding_window import CONVOLUTION, LINEAR
from flowspec.errors import InputError
from flowspec.model.families import FAMILIES, Family
from flowspec.model.rotary import rope_parameters, rotary_of

ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh"),
    "relu": "relu",
}
"""By what a config calls them."""
FULL, SLIDING = "full_attention", "sliding_attention"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def check_activation(config: Any, layers: Iterable[LayerSpec]) -> None:
    """Raises `InputError` where layers apply a function that is not computed."""
    if any(spec.dense is None for spec in layers):
        name = getattr(config, "hidden_activation", None) or config.hidden_act
        known = ", ".join(ACTIVATIONS)
        raise InputError(f"the model's layers apply {name!r:.80}, but FlowSpec computes {known}")


def spec_of(config: Any) -> ModelSpec:
    heads, windows, inputs, states = heads_of(config), _windows(config), inputs_of(config), _states(config)
    family = FAMILIES.get(getattr(type(config), "model_type", ""))  # what a file says may be no name
    sources, params = _sources(config), _params(config)
    dense = _dense(config, family, sources)
    rotaries, of_layer = _rotaries(config, family)
    return ModelSpec(
        family="" if family is None else type(config).model_type,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        context_max=context_max(config),
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        neurons=_neurons(config),
        experts=experts_of(config),
        experts_per_row=_experts_per_row(config),
        shared_neurons=_shared_neurons(config),
        layer_inputs=getattr(config, "hidden_size_per_layer_input", None) or 0,
        layer_input_tokens=getattr(config, "vocab_size_per_layer_input", None) or 0,
        mixer_params=_mixer_params(config),
        norm="cast, scale" if family is None else family.norm,
        eps=float(getattr(config, "rms_norm_eps" if family is None else family.norm_eps, 1e-6)),
        embedding_scale=_embedding_scale(config, family),
        is_scale_rounded=family is not None and family.embedding_scale == "root of hidden",
        logit_divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        rotaries=rotaries,
        layers=tuple(
            LayerSpec(
                heads=config.num_attention_heads,
                kv=heads[layer],
                source=sources[layer],
                rotary=of_layer[layer],
                window=windows[layer],
                inputs=inputs[layer],
                state=states[layer],
                params=params[layer],
                dense=dense[layer],
            )
            for layer in range(config.num_hidden_layers)
        ),
    )


def _embedding_scale(config: Any, family: Family | None) -> float:
    if family is None or not family.embedding_scale:
        return 1.0
    is_root = family.embedding_scale == "root of hidden"
    return float(config.hidden_size**0.5 if is_root else config.embedding_multiplier)


def _rotaries(config: Any, family: Family | None) -> tuple[tuple[Rotary, ...], tuple[int, ...]]:
    """Those of the model, and which of them each layer has."""
    heads, none = heads_of(config), (0,) * config.num_hidden_layers
    if family is None or not config.rope_parameters:
        return (), none
    if not family.rotary_by_layer_type:
        width = _head_width(config)
        return (rotary_of(config, config.rope_parameters, width, family.rotary_is_partial),), none
    types = list(dict.fromkeys(config.layer_types))
    width_of = {kind: own.width for kind, own in zip(config.layer_types, heads, strict=True)}
    found = [rotary_of(config, config.rope_parameters[kind], width_of[kind], False) for kind in types]
    return tuple(found), tuple(map(types.index, config.layer_types))


def _dense(config: Any, family: Family | None, sources: tuple[int, ...]) -> list[Dense | None]:
    """Of each layer."""
    own = {} if family is None else family.dense
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    name = own.get("activation", name)
    if family is None or not isinstance(name, str) or name not in ACTIVATIONS:
        return [None] * config.num_hidden_layers
    if getattr(config, "use_qk_norm", False):
        own = {**own, "query_norm": "head"}
    turned = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    scaled_by, multiplier = (
        getattr(config, name, None) for name in ("query_pre_attn_scalar", "attention_multiplier")
    )
    every = {
        "biases": _biases(config, family),
        "cap": float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        "clip": float(getattr(config, "clip_qkv", None) or 0.0),
        "activation": ACTIVATIONS[name],
        "added_scale": float(getattr(config, "residual_multiplier", 1.0)),
        "input_width": getattr(config, "hidden_size_per_layer_input", None) or 0,
        **own,
    }
    found: list[Dense | None] = []
    for layer, (kind, heads) in enumerate(zip(_types(config, ""), heads_of(config), strict=True)):
        scale = (scaled_by or heads.width) ** -0.5 if multiplier is None else multiplier
        is_double = bool(getattr(config, "use_double_wide_mlp", False)) and sources[layer] != layer
        of_layer = {
            "scale": float(scale),
            "neurons": _mlp_width(config) * (1 + is_double),
            "is_turned": bool(turned[layer]),
            "has_values": not (getattr(config, "attention_k_eq_v", False) and kind == FULL),
            "mixer": _mixer(config, kind),
            "mixture": _mixture(config, family, layer),
        }
        found.append(Dense(**{**of_layer, **every}))
    return found


def _biases(config: Any, family: Family) -> tuple[str, ...]:
    """The linear layers that add one."""
    which, found = family.attention_biases, list[str]()
    if which.startswith("always") or (which and getattr(config, "attention_bias", False)):
        found += [*_QKV, *(["self_attn.o_proj"] if which == "all" else [])]
    if family.has_mlp_biases and getattr(config, "mlp_bias", False):
        found += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    if getattr(config, "conv_bias", False):
        found += ["conv.in_proj", "conv", "conv.out_proj"]
    return tuple(found)


def _mixer(config: Any, kind: str) -> Convolution | DeltaRule | None:
    if kind == CONVOLUTION:
        return Convolution(length=config.conv_L_cache)
    if kind != LINEAR:
        return None
    return DeltaRule(
        key_heads=config.linear_num_key_heads,
        heads=config.linear_num_value_heads,
        key_width=config.linear_key_head_dim,
        value_width=config.linear_value_head_dim,
        length=config.linear_conv_kernel_dim,
    )


def _mixture(config: Any, family: Family, layer: int) -> Mixture | None:
    every, first = getattr(config, "decoder_sparse_step", 1), getattr(config, "first_k_dense_replace", 0)
    is_dense = layer < first or (layer + 1) % every or layer in getattr(config, "mlp_only_layers", ())
    if is_dense or not experts_of(config):
        return None
    is_shared_gated = bool(getattr(config, "shared_expert_intermediate_size", None))
    return Mixture(
        router=family.router,
        experts=experts_of(config),
        chosen=_experts_per_row(config),
        neurons=_expert_width(config) or config.intermediate_size,
        shared_neurons=0 if getattr(config, "enable_moe_block", None) else _shared_neurons(config),
        has_biases=family.joins_experts,
        is_normed=is_shared_gated or bool(getattr(config, "norm_topk_prob", True)),  # Qwen3.5: always
        factor=float(getattr(config, "routed_scaling_factor", 1.0)),
        groups=getattr(config, "n_group", 1),
        open=getattr(config, "topk_group", 1),
        has_shared=is_shared_gated or bool(getattr(config, "n_shared_experts", 0)),
        is_shared_gated=is_shared_gated,
        is_parallel=bool(getattr(config, "enable_moe_block", False)),
        limit=float(getattr(config, "swiglu_limit", None) or 0.0),
        slope=float(getattr(config, "swiglu_alpha", None) or 0.0),
    )


# ----------------------------------------------------------------------------------- keys and values


def heads_of(config: Any) -> tuple[Heads, ...]:
    """Those of each layer."""
    count = config.num_hidden_layers
    by_layer = [config] * count
    if varying_of(config):
        by_layer = [config.per_layer_config[layer] for layer in range(count)]
    found = [Heads(count=_key_heads(each), width=_head_width(each)) for each in by_layer]
    if getattr(config, "global_head_dim", None):  # before transformers 5.20 two fields said it
        wide = config.num_global_key_value_heads if config.attention_k_eq_v else None
        whole = Heads(count=int(wide or found[0].count), width=int(config.global_head_dim))
        found = [whole if config.layer_types[layer] == FULL else found[layer] for layer in range(count)]
    return tuple(found)


def varying_of(config: Any) -> frozenset[str]:
    """The fields that a transformers config states for single layers."""
    return frozenset(getattr(config, "per_layer_attributes", None) or ())


def inputs_of(config: Any) -> tuple[int, ...]:
    """How many numbers each layer holds of a token in the place of keys and values."""
    kinds = {CONVOLUTION: config.hidden_size}
    if getattr(config, "linear_num_value_heads", None):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads = config.linear_num_value_heads
        kinds[LINEAR] = 2 * keys + heads * config.linear_value_head_dim + 2 * heads
    return tuple(kinds.get(kind, 0) for kind in _types(config, ""))


def _windows(config: Any) -> tuple[int, ...]:
    seen = {
        SLIDING: getattr(config, "sliding_window", None) or 0,
        CONVOLUTION: getattr(config, "conv_L_cache", 0),
        LINEAR: getattr(config, "linear_conv_kernel_dim", 0),
    }
    return tuple(seen.get(kind, 0) for kind in _types(config, SLIDING))


def _states(config: Any) -> tuple[int, ...]:
    types = _types(config, "")
    if LINEAR not in types:
        return (0,) * len(types)
    heads, width = config.linear_num_value_heads, config.linear_key_head_dim
    size = heads * width * config.linear_value_head_dim
    return tuple(size * (kind == LINEAR) for kind in types)


def _sources(config: Any) -> tuple[int, ...]:
    count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
    own = range(count - shared)
    if not shared:
        return tuple(own)
    last = {config.layer_types[layer]: layer for layer in own}
    return (*own, *(last[config.layer_types[layer]] for layer in range(count - shared, count)))


def _types(config: Any, usual: str) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or (usual,) * config.num_hidden_layers)


def _key_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


# ----------------------------------------------------------------------------------------- positions


def context_max(config: Any) -> int:
    """The most positions that the model runs with one and the same arithmetic.

    Beyond its original context longrope switches all positions to other angles, the cached ones too: there a
    token's logits would depend on how many came after it in the same pass.
    """
    limits = [
        rope["original_max_position_embeddings"]
        for rope in rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    return int(min([config.max_position_embeddings, *limits]))


# ------------------------------------------------------------------------------------------- weights


def experts_of(config: Any) -> int:
    """Those among which a row chooses; 0 where the model is no mixture, as most of Gemma 4's. Classes call it
    by different names."""
    if getattr(config, "enable_moe_block", None) is False:
        return 0
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


def _mixer_params(config: Any) -> int:
    """Weights of what a layer without keys and values has in the place of attention."""
    if LINEAR not in (getattr(config, "layer_types", None) or ()):
        return 4 * int(config.hidden_size) ** 2  # a short convolution's three inputs and its output
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    return int(config.hidden_size * (2 * keys + 3 * values + 2 * heads))


def _params(config: Any) -> list[int]:
    """Weights of each layer of Gemma 4 that a row runs through; 0 in families whose layers are alike."""
    if not hasattr(config, "num_kv_shared_layers"):
        return [0] * config.num_hidden_layers
    has_one, is_double = (
        bool(getattr(config, name, None)) for name in ("attention_k_eq_v", "use_double_wide_mlp")
    )
    heads, hidden = heads_of(config), config.hidden_size
    inputs = getattr(config, "hidden_size_per_layer_input", None) or 0
    found = []
    for layer, source in enumerate(_sources(config)):
        is_own, sees_all = source == layer, config.layer_types[layer] == FULL
        matrices = is_own * (1 if has_one and sees_all else 2)  # of keys and of values
        own = 2 * config.num_attention_heads + matrices * heads[layer].count
        width = _neurons(config) + config.intermediate_size * (is_double and not is_own)
        found.append(hidden * (own * heads[layer].width + 3 * width + 3 * inputs))
    return found


def _neurons(config: Any) -> int:
    """Neurons that a row runs through in a layer; of a mixture those of the row's experts."""
    width = _expert_width(config) or _mlp_width(config)
    return int(width * _experts_per_row(config)) + _shared_neurons(config)


def _mlp_width(config: Any) -> int:
    """Neurons of an MLP that is no expert."""
    width = getattr(config, "intermediate_size", None) or 0  # a mixture may have experts alone
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = _adjusted(width, config.block_ffn_dim_multiplier, config.block_multiple_of)
    return int(width)


def _adjusted(width: int, factor: float | None, multiple: int) -> int:
    """What transformers' Lfm2MLP makes of a width: two thirds of it, times a factor, filled up to a
    multiple."""
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _experts_per_row(config: Any) -> int:
    named = (getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts"))
    return next(filter(None, named), 1) if experts_of(config) else 1


def _shared_neurons(config: Any) -> int:
    """Neurons of what every row of a mixture runs through, beside the experts that it chooses."""
    if getattr(config, "enable_moe_block", None):
        return int(config.intermediate_size)  # Gemma 4's own network
    count = getattr(config, "n_shared_experts", None) or 0
    return count * _expert_width(config) + (getattr(config, "shared_expert_intermediate_size", None) or 0)


def _expert_width(config: Any) -> int:
    """Neurons of one expert, where a field says it."""
    return (getattr(config, "moe_intermediate_size", None) or 0) if experts_of(config) else 0
