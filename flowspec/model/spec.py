"""A model's `ModelSpec` from the transformers config of its decoder, which is of a family in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
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


def spec_of(config: Any) -> ModelSpec:
    """Raises `InputError` where layers apply a function that is not computed."""
    family = FAMILIES[type(config).model_type]
    heads, sources, params = heads_of(config), _sources(config), _params(config)
    rotaries, rotary_of_layer = _rotaries(config, family)
    layers = []
    for layer, kind in enumerate(_types(config)):
        dense = _dense(config, family, layer, kind, heads[layer], is_own=sources[layer] == layer)
        mixer, window, inputs, state = dense.mixer, 0, 0, 0
        if isinstance(mixer, DeltaRule):
            window, inputs = mixer.length, mixer.inputs
            state = mixer.heads * mixer.key_width * mixer.value_width
        elif mixer is not None:
            window, inputs = mixer.length, config.hidden_size
        elif kind == SLIDING:
            window = _field(config, "sliding_window")
        layers.append(
            LayerSpec(
                heads=config.num_attention_heads,
                kv=heads[layer],
                source=sources[layer],
                rotary=rotary_of_layer[layer],
                window=window,
                inputs=inputs,
                state=state,
                params=params[layer],
                dense=dense,
            )
        )
    is_root, scale = family.embedding_scale == "root of hidden", 1.0
    if family.embedding_scale:
        scale = config.hidden_size**0.5 if is_root else config.embedding_multiplier
    return ModelSpec(
        family=type(config).model_type,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        context_max=context_max(config),
        is_tied=bool(_field(config, "tie_word_embeddings")),
        neurons=_neurons(config),
        experts=experts_of(config),
        experts_per_row=_experts_per_row(config),
        shared_neurons=_shared_neurons(config),
        layer_inputs=_field(config, "hidden_size_per_layer_input"),
        layer_input_tokens=_field(config, "vocab_size_per_layer_input"),
        mixer_params=_mixer_params(config),
        norm=family.norm,
        eps=float(getattr(config, family.norm_eps, 1e-6)),
        embedding_scale=float(scale),
        is_scale_rounded=is_root,
        logit_divisor=float(_field(config, "logits_scaling", 1.0)),
        logit_cap=float(_field(config, "final_logit_softcapping")),
        rotaries=rotaries,
        layers=tuple(layers),
    )


def _field(config: Any, name: str, default: Any = 0) -> Any:
    """The default where the config's class has no such field, or nothing in it."""
    return getattr(config, name, None) or default


def _types(config: Any) -> tuple[str, ...]:
    """Of layers; where a config states none, a window is of all."""
    return tuple(_field(config, "layer_types", (SLIDING,) * config.num_hidden_layers))


def _rotaries(config: Any, family: Family) -> tuple[tuple[Rotary, ...], tuple[int, ...]]:
    """Those of the model, and which of them each layer has."""
    heads, none = heads_of(config), (0,) * config.num_hidden_layers
    if not config.rope_parameters:
        return (), none
    if not family.rotary_by_layer_type:
        width = _head_width(config)
        return (rotary_of(config, config.rope_parameters, width, family.rotary_is_partial),), none
    types = list(dict.fromkeys(config.layer_types))
    width_of = {kind: own.width for kind, own in zip(config.layer_types, heads, strict=True)}
    rotaries = [rotary_of(config, config.rope_parameters[kind], width_of[kind], False) for kind in types]
    return tuple(rotaries), tuple(map(types.index, config.layer_types))


def _dense(config: Any, family: Family, layer: int, kind: str, heads: Heads, *, is_own: bool) -> Dense:
    """`is_own`: the layer has keys and values of its own."""
    activation = _field(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    activation = family.dense.get("activation", activation)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InputError(f"the model's layers apply {activation!r:.80}, but FlowSpec computes {known}")
    multiplier = getattr(config, "attention_multiplier", None)
    scale = (_field(config, "query_pre_attn_scalar") or heads.width) ** -0.5
    is_double = _field(config, "use_double_wide_mlp") and not is_own
    fields = {
        "scale": float(scale if multiplier is None else multiplier),
        "neurons": _mlp_width(config) * (2 if is_double else 1),
        "is_turned": bool(_field(config, "no_rope_layers", [1] * config.num_hidden_layers)[layer]),
        "has_values": not (_field(config, "attention_k_eq_v") and kind == FULL),
        "mixer": _mixer(config, kind),
        "mixture": _mixture(config, family, layer),
        "biases": _biases(config, family),
        "cap": float(_field(config, "attn_logit_softcapping")),
        "clip": float(_field(config, "clip_qkv")),
        "added_scale": float(getattr(config, "residual_multiplier", 1.0)),
        "input_width": _field(config, "hidden_size_per_layer_input"),
        **family.dense,
        "activation": ACTIVATIONS[activation],
    }
    if _field(config, "use_qk_norm"):
        fields["query_norm"] = "head"
    return Dense(**fields)


def _biases(config: Any, family: Family) -> tuple[str, ...]:
    """The linear layers that add one."""
    which, found = family.attention_biases, list[str]()
    if which.startswith("always") or (which and _field(config, "attention_bias")):
        found += [*_QKV, *(["self_attn.o_proj"] if which == "all" else [])]
    if family.has_mlp_biases and _field(config, "mlp_bias"):
        found += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    if _field(config, "conv_bias"):
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
    is_parallel = bool(_field(config, "enable_moe_block"))
    is_shared_gated = bool(_field(config, "shared_expert_intermediate_size"))
    return Mixture(
        router=family.router,
        experts=experts_of(config),
        chosen=_experts_per_row(config),
        neurons=_expert_width(config) or config.intermediate_size,
        shared_neurons=0 if is_parallel else _shared_neurons(config),
        has_biases=family.joins_experts,
        is_normed=is_shared_gated or bool(getattr(config, "norm_topk_prob", True)),  # Qwen3.5: always
        factor=float(getattr(config, "routed_scaling_factor", 1.0)),
        groups=getattr(config, "n_group", 1),
        open=getattr(config, "topk_group", 1),
        has_shared=is_shared_gated or bool(_field(config, "n_shared_experts")),
        is_shared_gated=is_shared_gated,
        is_parallel=is_parallel,
        limit=float(_field(config, "swiglu_limit")),
        slope=float(_field(config, "swiglu_alpha")),
    )


# ----------------------------------------------------------------------------------- keys and values


def heads_of(config: Any) -> tuple[Heads, ...]:
    """Those of each layer."""
    count = config.num_hidden_layers
    by_layer = [config.per_layer_config[layer] if varying_of(config) else config for layer in range(count)]
    heads = [
        Heads(count=_field(each, "num_key_value_heads", each.num_attention_heads), width=_head_width(each))
        for each in by_layer
    ]
    if getattr(config, "global_head_dim", None):  # before transformers 5.20 two fields said it
        wide = config.num_global_key_value_heads if config.attention_k_eq_v else None
        whole = Heads(count=int(wide or heads[0].count), width=int(config.global_head_dim))
        heads = [whole if config.layer_types[layer] == FULL else heads[layer] for layer in range(count)]
    return tuple(heads)


def varying_of(config: Any) -> frozenset[str]:
    """The fields that a transformers config states for single layers."""
    return frozenset(_field(config, "per_layer_attributes", ()))


def _head_width(config: Any) -> int:
    return int(_field(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def _sources(config: Any) -> tuple[int, ...]:
    count, shared = config.num_hidden_layers, _field(config, "num_kv_shared_layers")
    own = range(count - shared)
    if not shared:
        return tuple(own)
    last = {config.layer_types[layer]: layer for layer in own}
    return (*own, *(last[config.layer_types[layer]] for layer in range(count - shared, count)))


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
    return int(_field(config, "num_local_experts") or _field(config, "num_experts"))


def _mixer_params(config: Any) -> int:
    """Weights of what a layer without keys and values has in the place of attention."""
    if LINEAR not in _types(config):
        return 4 * int(config.hidden_size) ** 2  # a short convolution's three inputs and its output
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    return int(config.hidden_size * (2 * keys + 3 * values + 2 * heads))


def _params(config: Any) -> list[int]:
    """Weights of each layer of Gemma 4 that a row runs through; 0 in families whose layers are alike."""
    if not hasattr(config, "num_kv_shared_layers"):
        return [0] * config.num_hidden_layers
    heads, inputs = heads_of(config), _field(config, "hidden_size_per_layer_input")
    found = []
    for layer, source in enumerate(_sources(config)):
        is_own, sees_all = source == layer, config.layer_types[layer] == FULL
        has_one = _field(config, "attention_k_eq_v") and sees_all  # matrix, of keys and of values
        attention = 2 * config.num_attention_heads + is_own * (1 if has_one else 2) * heads[layer].count
        is_double = _field(config, "use_double_wide_mlp") and not is_own
        width = _neurons(config) + (config.intermediate_size if is_double else 0)
        found.append(config.hidden_size * (attention * heads[layer].width + 3 * width + 3 * inputs))
    return found


def _neurons(config: Any) -> int:
    """Neurons that a row runs through in a layer; of a mixture those of the row's experts."""
    width = _expert_width(config) or _mlp_width(config)
    return int(width * _experts_per_row(config)) + _shared_neurons(config)


def _mlp_width(config: Any) -> int:
    """Neurons of an MLP that is no expert."""
    width = int(_field(config, "intermediate_size"))  # a mixture may have experts alone
    if not _field(config, "block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)  # as transformers' Lfm2MLP has it
    factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    return width if factor is None else int(-(-int(factor * width) // multiple) * multiple)


def _experts_per_row(config: Any) -> int:
    chosen = _field(config, "num_experts_per_tok") or _field(config, "top_k_experts", 1)
    return int(chosen) if experts_of(config) else 1


def _shared_neurons(config: Any) -> int:
    """Neurons of what every row of a mixture runs through, besides the experts that it chooses."""
    if _field(config, "enable_moe_block"):
        return int(config.intermediate_size)  # Gemma 4's own network
    of_shared = _field(config, "n_shared_experts") * _expert_width(config)
    return int(of_shared + _field(config, "shared_expert_intermediate_size"))


def _expert_width(config: Any) -> int:
    """Neurons of one expert, where a field says it."""
    return int(_field(config, "moe_intermediate_size")) if experts_of(config) else 0
