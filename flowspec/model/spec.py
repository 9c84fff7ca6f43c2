"""What a config says: whether a model is of a supported family and asks for nothing that is not handled, and
its `ModelSpec`, from the transformers config of its decoder.

Refused are sizes that would take memory without end (a config may come from a head on the network, and
transformers builds whatever it says: position embeddings of any width, names for the tensors of a million
experts), fields that transformers' class of the family does not know (it keeps and ignores them), what
depends on the batch, and fields at odds with each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import (
    CONVOLUTION,
    LINEAR,
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
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.families import FAMILIES, Family, check_family
from flowspec.model.prequantised import QUANTISED, scheme_of
from flowspec.validation import checked

ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh"),
    "relu": "relu",
}
"""By what a config calls them."""
FULL, SLIDING = "full_attention", "sliding_attention"
PI2 = np.float32(2 * math.pi)

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
_NEUTRAL_AT: dict[tuple[Any, ...], tuple[str, ...]] = {
    (): (
        *("attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "clip_qkv"),
        *("final_logit_softcapping", "global_head_dim", "hidden_activation", "kv_lora_rank"),
        *("layer_types", "num_global_key_value_heads", "query_pre_attn_scalar", "scale_depth"),
        *("sliding_window", "swiglu_alpha", "swiglu_limit"),
    ),
    (0,): (
        *("alibi", "attention_k_eq_v", "attn_output_gate", "enable_moe_block", "qk_layernorm"),
        *("attn_temperature_tuning", "use_bidirectional_attention", "use_double_wide_mlp"),
        *("use_qk_norm", "hidden_size_per_layer_input", "n_routed_experts", "num_experts"),
        *("num_kv_shared_layers", "num_local_experts"),
    ),
    (1,): (
        *("block_use_swiglu", "is_causal", "use_pos_enc", "embedding_multiplier"),
        *("logit_scale", "logits_scaling", "residual_multiplier", "scale_emb"),
    ),
    (0, 1): ("n_group", "topk_group"),
}
NEUTRAL = {name: (None, *values) for values, names in _NEUTRAL_AT.items() for name in names}
NEUTRAL["no_rope_layers"] = (None, [])
"""Fields by which a config changes the arithmetic, each with its values that change nothing; False is 0."""


def spec_of(config: Any, source: str = "the model's config") -> ModelSpec:
    """Raises `InputError`, which names the `source`, for a function that is not computed, and for fields that
    do not fit together."""
    family = FAMILIES[type(config).model_type]
    scale = _field(config, "embedding_multiplier", 1)
    if family.is_embedding_scaled:
        scale = config.hidden_size**0.5
    try:
        found = ModelSpec(
            family=type(config).model_type,
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            context_max=context_max(config),
            is_tied=bool(_field(config, "tie_word_embeddings")),
            layer_inputs=_field(config, "hidden_size_per_layer_input"),
            layer_input_tokens=_field(config, "vocab_size_per_layer_input"),
            norm=family.norm,
            eps=float(getattr(config, family.norm_eps, 1e-6)),
            embedding_scale=float(scale),
            logit_divisor=float(_field(config, "logits_scaling", 1)),
            logit_cap=float(_field(config, "final_logit_softcapping")),
            rotaries=_rotaries(config, family),
            layers=tuple(_layers(config, family)),
        )
        return checked(found)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{source}: {error}; correct it, or give another model") from None


def _field(config: Any, name: str, default: Any = 0) -> Any:
    """The default where the config has no such field, or nothing in it."""
    value = getattr(config, name, None)
    return default if value is None else value


def _known(config: Any, name: str) -> Any:
    return hasattr(type(config), name) and _field(config, name)


def _layers(config: Any, family: Family) -> Iterator[LayerSpec]:
    types = _field(config, "layer_types", (SLIDING,) * config.num_hidden_layers)  # a window is of all
    heads, sources = heads_of(config), _sources(config)
    for layer, kind in enumerate(types):
        dense = _dense(config, family, layer, kind, heads[layer], is_own=sources[layer] == layer)
        mixer, window, inputs, state = dense.mixer, 0, 0, 0
        if isinstance(mixer, DeltaRule):
            window, inputs = mixer.length, mixer.inputs
            state = mixer.heads * mixer.key_width * mixer.value_width
        elif mixer is not None:
            window, inputs = mixer.length, config.hidden_size
        elif kind == SLIDING:
            window = _field(config, "sliding_window")
        yield LayerSpec(
            heads=config.num_attention_heads,
            kv=heads[layer],
            source=sources[layer],
            rotary=[*dict.fromkeys(types)].index(kind) if family.rotary_by_layer_type else 0,
            window=window,
            inputs=inputs,
            state=state,
            dense=dense,
        )


def _rotaries(config: Any, family: Family) -> tuple[Rotary, ...]:
    """One of all layers, or one of each type of layers, in the order of the first of each."""
    rope = config.rope_parameters
    if not rope:
        return ()
    if not family.rotary_by_layer_type:
        return (rotary_of(config, rope, _head_width(config), family.rotary_is_partial),)
    widths = {kind: heads.width for kind, heads in zip(config.layer_types, heads_of(config), strict=True)}
    return tuple(rotary_of(config, rope[kind], width, False) for kind, width in widths.items())


def _dense(config: Any, family: Family, layer: int, kind: str, heads: Heads, *, is_own: bool) -> Dense:
    """`is_own`: the layer has keys and values of its own."""
    field = "hidden_activation" if _field(config, "hidden_activation") else "hidden_act"
    activation = family.dense.get("activation", getattr(config, field, None))
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{field}: expected {', '.join(ACTIVATIONS)}, got {activation!r:.80}")
    scale = _field(config, "query_pre_attn_scalar", max(1, heads.width)) ** -0.5
    is_double = _field(config, "use_double_wide_mlp") and not is_own
    mixture, neurons = _mixture(config, family, layer), _mlp_width(config)
    if mixture is None and not neurons:
        raise ValueError("intermediate_size: expected a number from 1, got 0")
    fields = {
        "scale": float(_field(config, "attention_multiplier", scale)),
        "neurons": neurons * (2 if is_double else 1),
        "is_turned": _field(config, "no_rope_layers", [])[layer : layer + 1] != [0],
        "has_values": not (_field(config, "attention_k_eq_v") and kind == FULL),
        "mixer": _mixer(config, kind),
        "mixture": mixture,
        "biases": _biases(config, family),
        "cap": float(_field(config, "attn_logit_softcapping")),
        "clip": float(_field(config, "clip_qkv")),
        "added_scale": float(_field(config, "residual_multiplier", 1)),
        "input_width": _field(config, "hidden_size_per_layer_input"),
        **family.dense,
        "activation": ACTIVATIONS[activation],
    }
    if _field(config, "use_qk_norm"):
        fields["query_norm"] = "head"
    return Dense(**fields)


def _biases(config: Any, family: Family) -> tuple[str, ...]:
    found = list[str]()
    if _known(config, "attention_bias"):
        found += [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")[: 3 + family.has_output_bias]]
    if _known(config, "mlp_bias"):
        found += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    if _known(config, "conv_bias"):
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
    every, first = _known(config, "decoder_sparse_step") or 1, _known(config, "first_k_dense_replace")
    is_dense = layer < first or (layer + 1) % every or layer in (_known(config, "mlp_only_layers") or ())
    if is_dense or not family.stacked or not experts_of(config):
        return None
    is_parallel = bool(_field(config, "enable_moe_block"))
    has_own = hasattr(type(config), "moe_intermediate_size")
    field = "moe_intermediate_size" if has_own else "intermediate_size"
    if not (neurons := _field(config, field)):
        raise ValueError(f"{field}: expected a number from 1, got 0")
    shared_neurons = _field(config, "shared_expert_intermediate_size")
    is_gated, shared = shared_neurons > 0, _field(config, "n_shared_experts")
    return Mixture(
        router=family.router,
        experts=experts_of(config),
        chosen=config.top_k_experts if is_parallel else config.num_experts_per_tok,
        neurons=neurons,
        shared_neurons=shared_neurons or shared * neurons,
        has_biases=family.joins_experts,
        is_normed=is_gated or not hasattr(type(config), "norm_topk_prob") or bool(config.norm_topk_prob),
        factor=float(_known(config, "routed_scaling_factor") or 1),
        groups=_known(config, "n_group") or 1,
        open=_known(config, "topk_group") or 1,
        has_shared=is_gated or shared > 0,
        is_shared_gated=is_gated,
        is_parallel=is_parallel,
        limit=float(_field(config, "swiglu_limit", family.built_in.get("swiglu_limit", 0))),
        slope=float(_field(config, "swiglu_alpha", family.built_in.get("swiglu_alpha", 0))),
    )


def _mlp_width(config: Any) -> int:
    width = _field(config, "intermediate_size")  # a mixture may have experts alone
    if not _known(config, "block_auto_adjust_ff_dim"):
        return int(width)
    width = int(2 * width / 3)  # as transformers' Lfm2MLP has it
    factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    return width if factor is None else int(-(-int(factor * width) // multiple) * multiple)


def experts_of(config: Any) -> int:
    """Those among which a row chooses; 0 where the model is no mixture, as most of Gemma 4's. Classes call it
    by different names."""
    if getattr(config, "enable_moe_block", None) is False:
        return 0
    return int(_field(config, "num_local_experts") or _field(config, "num_experts"))


# ----------------------------------------------------------------------------------- keys and values


def heads_of(config: Any) -> tuple[Heads, ...]:
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
    return frozenset(_field(config, "per_layer_attributes", ()))


def _head_width(config: Any) -> int:
    return int(_field(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def _sources(config: Any) -> tuple[int, ...]:
    count, shared = config.num_hidden_layers, _field(config, "num_kv_shared_layers")
    own = range(count - shared)
    last = {config.layer_types[layer]: layer for layer in own} if shared else {}
    sources = [*own, *(last.get(config.layer_types[layer]) for layer in range(len(own), count))]
    if None in sources:
        raise ValueError(
            f"num_kv_shared_layers: expected a layer of the type {config.layer_types[sources.index(None)]} "
            f"before the last {shared}, whose keys and values these share"
        )
    return tuple(sources)


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


# ------------------------------------------------------------------------------- position embeddings
#
# After `modeling_rope_utils` of transformers. Frequencies are in float32, each step rounded as there; but a
# power is the right one, rounded once, where libraries differ in the last place.


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Those of all layers, or of each type of layers."""
    parameters = config.rope_parameters or {}
    by_type = [each for each in parameters.values() if isinstance(each, dict)]
    yield from by_type or [parameters]


def rotary_of(config: Any, rope: Mapping[str, Any], width: int, is_partial: bool) -> Rotary:
    """Of heads of a width, of which in families with that `is_partial` a part turns."""
    kind, part = rope.get("rope_type", "default"), float(rope.get("partial_rotary_factor", 1.0))
    turned = int(width * part) if is_partial or kind != "default" else width
    if kind == "proportional":
        turned = 2 * int(part * width // 2)
    exponents = np.arange(0, turned, 2).astype(np.float32)
    exponents /= np.float32(width if kind == "proportional" else turned)
    base = np.float64(np.float32(rope["rope_theta"]))
    powers = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    found: Any = 1 / powers
    scale = 1.0
    if kind == "proportional":
        found = np.pad(found / np.float32(rope.get("factor", 1.0)), (0, width // 2 - len(found)))
    elif kind == "linear":
        found /= np.float32(rope["factor"])
    elif kind == "llama3":
        found = _llama3(rope, found)
    elif kind in ("yarn", "longrope"):
        factor, context = rope.get("factor"), rope["original_max_position_embeddings"]
        if factor is None:
            factor = config.max_position_embeddings / context
        if kind == "longrope":
            found = 1 / (np.array(rope["short_factor"], np.float32) * powers)
            scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
        else:
            is_truncated = config.rope_parameters.get("truncate", True)
            found, scale = _yarn(rope, powers, turned, factor, is_truncated), _yarn_scale(rope, factor)
        if rope.get("attention_factor") is not None:
            scale = rope["attention_factor"]
    return Rotary(frequencies=tuple(np.asarray(found, np.float32).tolist()), scale=float(scale))


def _llama3(rope: Mapping[str, Any], frequencies: F32) -> F32:
    factor, low = np.float32(rope["factor"]), np.float32(rope["low_freq_factor"])
    context = rope["original_max_position_embeddings"]
    longest, shortest = (np.float32(context / rope[f"{name}_freq_factor"]) for name in ("low", "high"))
    lengths = PI2 / frequencies
    found = np.where(lengths > longest, frequencies / factor, frequencies)
    smooth = (np.float32(context) / lengths - low) / np.float32(
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = (1 - smooth) * found / factor + smooth * found
    is_between = ~(lengths < shortest) & ~(lengths > longest)
    return np.where(is_between, between, found)


def _yarn(rope: Mapping[str, Any], powers: F32, width: int, factor: float, is_truncated: bool) -> F32:
    def place(turns: float) -> float:
        """Of the pair that turns so often in the original context."""
        lengths = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return width * math.log(lengths) / (2 * math.log(rope["rope_theta"]))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = 1 - ramp
    return np.asarray(1 / (np.float32(factor) * powers) * (1 - kept) + 1 / powers * kept, np.float32)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    own, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(own) / scale(all_dims) if own and all_dims else scale(1)


# ------------------------------------------------------------------------------------ refusals


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
    if (experts := config.num_hidden_layers * experts_of(config)) > EXPERTS_MAX:
        wanted = f"expected at most {EXPERTS_MAX}, got {experts}"
        raise InputError(f"model {model!r}: num_hidden_layers times num_experts: {wanted}")


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
    for problem in itertools.chain(_faults_of_fields(config, family), _faults_of_layers(config, family)):
        raise InputError(f"model {model!r}{problem}")
    return family


def check_rotary(config: Any, family: Family, model: str) -> None:
    """Raises `InputError` for position embeddings that depend on more than the position, or do not fit the
    family's layers."""
    for problem in _faults_of_rotary(config, family):
        raise InputError(f"model {model!r}{problem}")


def _faults_of_rotary(config: Any, family: Family) -> Iterator[str]:
    for layer_type in dict.fromkeys(config.layer_types) if family.rotary_by_layer_type else ():
        if not isinstance((config.rope_parameters or {}).get(layer_type), dict):
            yield f": rope_parameters: expected those of {layer_type}, got none"
    for rope in rope_parameters(config):
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            yield f" uses {kind!r:.40} position embeddings, but FlowSpec runs {', '.join(_ROPE_TYPES)}"
        name = "original_max_position_embeddings"
        if kind == "longrope" and type(rope.get(name)) is not int:
            yield f": expected longrope position embeddings to have a number as {name}"
        part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
        least = 0 if family.rotary_is_partial or kind == "proportional" else 1
        if part not in (None, 1) and not (type(part) is float and least < part < 1):
            expected = f"{'1' if least else 'a number above 0, up to 1'} of a {config.model_type}"
            yield f": partial_rotary_factor: expected {expected}, got {part!r:.40}"


def _faults_of_fields(config: Any, family: Family) -> Iterator[str]:
    """Fields that would change the arithmetic of another class, but that this one does not know, and those
    that are at odds with another."""
    # With "vision" only what stands for pictures looks both ways, and text has none (Gemma 4).
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        both = "(use_bidirectional_attention), so it does not generate text one by one"
        yield f" attends to later tokens {both}"
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
            unknown = f"which transformers' {config.model_type} does not know; expected none"
            yield f" sets {name} to {value!r:.40}, {unknown}"
    varying = varying_of(config) - {"head_dim", "num_key_value_heads"}
    if varying or isinstance(getattr(config, "per_layer_config", None), dict):  # transformers before 5.20
        fields = min(varying, default="fields")
        yield f" sets {fields} for single layers (per_layer_config); expected one for all"
    for name, same in family.repeated.items():
        value = getattr(config, name, None)
        expected = getattr(config, same, None) or (config.rope_parameters or {}).get(same)
        if value not in (None, expected):
            yield f" sets {name} to {value!r:.40} and {same} to {expected!r:.40}; expected one value"
    has_experts = getattr(config, "enable_moe_block", None)
    if (bool(family.stacked) if has_experts is None else has_experts) and not experts_of(config):
        yield ": number of experts: expected 1 or more, got 0"


def _faults_of_layers(config: Any, family: Family) -> Iterator[str]:
    """Masks go by a layer's type and attention by its window: they must mean the same."""
    window = getattr(config, "sliding_window", None)
    if window == 0:
        yield ": sliding_window: expected a number from 1, got 0"
    types = getattr(config, "layer_types", None)
    if types is None:
        return
    expected = (FULL, family.other_layers or SLIDING)
    if len(types) != config.num_hidden_layers or not set(types) <= set(expected):
        wanted = f"{config.num_hidden_layers} of {' and '.join(expected)}"
        yield f": layer_types: expected {wanted}, got {types!r:.80}"
    if SLIDING in types and (window is None or not getattr(config, "use_sliding_window", True)):
        unused = "no sliding_window that is in use; correct its config.json"
        yield f" has layers of the type {SLIDING}, but {unused}"
    interval, field, stated = getattr(config, "full_attention_interval", None), "", None
    if family.other_layers == CONVOLUTION:
        field, stated = "full_attn_idxs", config.full_attn_idxs
    elif family.other_layers == LINEAR and interval is not None:
        field, stated = "full_attention_interval", range(interval - 1, len(types), interval)
    attending = [place for place, kind in enumerate(types) if kind == FULL]
    if stated is not None and {*stated} != {*attending}:
        wanted = f"the layers that layer_types has as {FULL}, {attending!r:.80}"
        yield f": {field}: expected {wanted}, got {[*stated]!r:.80}"
