"""Gemma 4 in GGUF files: what they state of its layers, and where its tensors are.

Heads of layers that see all are wider than those of layers with a window, and of the wide ones only the first
frequencies turn. Files have no word for that: they divide the others by 1e30, so that they stand still. Two
more things show by the tensors alone: where values are keys (there are no matrices for values), and of what a
layer's own inputs are made, which for all layers is one table (`layer_by_layer.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowspec.errors import InputError
from flowspec.model.gguf.names import LAYER_TABLE
from flowspec.model.gguf.stated import LIST, Stated

FREQUENCIES = "rope_freqs.weight"
_STILL = 1e30
"""Frequencies are divided by it, or more, that do not turn."""
_PLAIN, _WINDOW = "full_attention", "sliding_attention"


def layers_of(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """What config.json would hold in addition to `raw`."""
    layers = raw["num_hidden_layers"]
    windows = stated.take("attention.sliding_window_pattern", None, LIST)
    if not windows or len(windows) != layers or {*map(type, windows)} != {bool} or windows[-1]:
        stated.refuse(
            "attention.sliding_window_pattern", windows, f"true or false for {layers} layers, at last false"
        )
    types = [_WINDOW if each else _PLAIN for each in windows]
    shared, inputs = (
        stated.count(key) for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input")
    )
    widths, table = _widths(stated), stated.file.tensors.get(LAYER_TABLE)
    return {
        **widths,
        **_key_heads(stated, raw, types),
        **_networks(stated, layers, shared),
        **_experts(stated),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": table.shape[0] if inputs and table else raw["vocab_size"],
        "sliding_window": stated.need("attention.sliding_window"),
        "final_logit_softcapping": stated.take("final_logit_softcapping"),
        "attention_bias": stated.has_tensor("blk.0.attn_q.bias"),
        "attention_k_eq_v": _has_keys_for_values(stated, types, shared),
        "rope_parameters": {
            _WINDOW: {"rope_type": "default", "rope_theta": float(stated.need("rope.freq_base_swa"))},
            _PLAIN: {
                "rope_type": "proportional",
                "rope_theta": float(stated.need("rope.freq_base")),
                "partial_rotary_factor": _turning(stated, widths["global_head_dim"]),
            },
        },
    }


def _widths(stated: Stated) -> dict[str, int]:
    """Of heads; values are as wide as keys, and all of a head is turned."""
    found = {}
    for name, suffix in (("global_head_dim", ""), ("head_dim", "_swa")):
        width = found[name] = stated.need(f"attention.key_length{suffix}")
        for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            other = stated.take(key, width)
            if other != width:
                stated.refuse(key, other, f"the width of a head, {width}")
    return found


def _key_heads(stated: Stated, raw: dict[str, Any], types: list[str]) -> dict[str, Any]:
    key = "attention.head_count_kv"
    counts = stated.by_layer(key, len(types), raw["num_attention_heads"])
    pairs = set(zip(types, counts, strict=True))
    by_type = dict(pairs)
    if len(pairs) != len(by_type):
        stated.refuse(key, counts, "one number for layers with a window, and one for the others")
    whole = by_type[_PLAIN]
    return {"num_key_value_heads": by_type.get(_WINDOW, whole), "num_global_key_value_heads": whole}


def _networks(stated: Stated, layers: int, shared: int) -> dict[str, Any]:
    """The widths of feed-forward networks: twice the others' in layers that share keys and values, or not."""
    key = "feed_forward_length"
    widths = stated.by_layer(key, layers)
    narrow = widths[0]
    is_doubled = widths == [narrow] * (layers - shared) + [2 * narrow] * shared and shared > 0
    if not is_doubled and set(widths) != {narrow}:
        stated.refuse(key, widths, f"{narrow} for all layers, or {2 * narrow} for the last {shared}")
    return {"intermediate_size": narrow, "use_double_wide_mlp": is_doubled}


def _experts(stated: Stated) -> dict[str, Any]:
    count = stated.take("expert_count")
    if count is None:
        return {"enable_moe_block": False}
    used, neurons = stated.need("expert_used_count"), stated.need("expert_feed_forward_length")
    sizes = {"num_experts": count, "top_k_experts": used, "moe_intermediate_size": neurons}
    return {"enable_moe_block": True, **sizes}


def _has_keys_for_values(stated: Stated, types: list[str], shared: int) -> bool:
    """Whether layers that see all have no values but their keys."""
    own = [layer for layer, kind in enumerate(types[: len(types) - shared]) if kind == _PLAIN]
    return bool(own) and not any(stated.has_tensor(f"blk.{layer}.attn_v.weight") for layer in own)


def _turning(stated: Stated, width: int) -> float:
    """The part of a wide head that turns, by what its frequencies are divided by."""
    tensor = stated.file.tensors.get(FREQUENCIES)
    if tensor is None:
        raise InputError(f"{stated.file.path} has no tensor {FREQUENCIES}; convert the model again")
    divisors = tensor.numbers() if tensor.shape == (width // 2,) else np.zeros(0)
    turning = int((divisors < _STILL).sum())
    if len(divisors) == 0 or np.any(divisors[:turning] != 1) or np.any(divisors[turning:] < _STILL):
        raise InputError(
            f"{stated.file.path}: tensor {FREQUENCIES}: expected {width // 2} divisors, 1 and then from "
            f"{_STILL:g} on, got {list(tensor.shape)} others"
        )
    return 2 * turning / width
