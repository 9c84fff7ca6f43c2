"""A model's `LayerSpec`s from its transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowspec.core.protocol.model_spec import Activation, LayerSpec
from flowspec.core.protocol.shared_keys import heads_of
from flowspec.core.protocol.sliding_window import windows_of

ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh"),
}
"""By what a config calls them."""
_SANDWICH = {
    "norm_after_attention": "post_attention_layernorm",
    "norm_before_mlp": "pre_feedforward_layernorm",
    "norm_after_mlp": "post_feedforward_layernorm",
}
_NORMS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"query_norm": "head"},
    "phi3": {},
    "smollm3": {},
    "granite": {},
    "olmo2": {**_SANDWICH, "norm_before_attention": "", "norm_before_mlp": "", "query_norm": "width"},
    "gemma2": _SANDWICH,
    "gemma3": {**_SANDWICH, "query_norm": "head"},
    "gemma3_text": {**_SANDWICH, "query_norm": "head"},
}
"""By family, where its layers have other norms than most."""


def layers_of(config: Any) -> tuple[LayerSpec, ...]:
    """Those of a decoder's config; none where it is of a family, or has an activation, that has no
    `LayerSpec`."""
    norms = _NORMS.get(config.model_type)
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if norms is None or not isinstance(name, str) or name not in ACTIVATIONS:
        return ()
    heads, windows = heads_of(config), windows_of(config)
    turned = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    scaled_by = getattr(config, "query_pre_attn_scalar", None) or heads[0].width
    multiplier = getattr(config, "attention_multiplier", None)
    return tuple(
        LayerSpec(
            heads=config.num_attention_heads,
            kv_heads=heads[layer].count,
            head_width=heads[layer].width,
            window=windows[layer],
            is_turned=bool(turned[layer]),
            scale=float(multiplier if multiplier is not None else scaled_by**-0.5),
            cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
            activation=ACTIVATIONS[name],
            added_scale=float(getattr(config, "residual_multiplier", None) or 1.0),
            **norms,
        )
        for layer in range(config.num_hidden_layers)
    )
