"""A model's config from the metadata of its GGUF file.

All that a file states about the model's arithmetic is read, with llama.cpp's defaults, and a file that states
anything else about it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import CONVOLUTION, LINEAR
from flowspec.errors import InputError
from flowspec.model.families import FAMILIES
from flowspec.model.gguf.file import (
    COUNT,
    NEEDED,
    NUMBER,
    TEXT,
    TRUTH,
    GgufFile,
    Kind,
    Stated,
    count_where,
    list_of,
)
from flowspec.model.spec import FULL, SLIDING

_STILL = 1e30
"""Frequencies that are divided by it, or by more, do not turn."""
_FREQUENCIES = "rope_freqs.weight"
FACTORS = (_FREQUENCIES, "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the config: divisors of the position embeddings' frequencies."""
LAYER_TABLE = "per_layer_token_embd.weight"
_KEY_HEADS, _NEURONS = "attention.head_count_kv", "feed_forward_length"
_SHARED_NEURONS = "expert_shared_feed_forward_length"
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    _NEURONS: "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Entries that files have, by the names of config.json."""
_KINDS = {
    "block_count": count_where(f"a whole number from 1 to {limits.LAYERS_MAX}", limits.LAYERS_MAX.__ge__),
    "attention.layer_norm_rms_epsilon": NUMBER,
}
"""Of those that are no whole numbers of any size."""
_MAY_HAVE_BIASES = ("gemma4_text", "glm4_moe", "gpt_oss", "qwen3_5_moe_text", "qwen3_5_text")
Raw = dict[str, Any]
"""What config.json would hold, or a part of it."""


def config_of(file: GgufFile) -> Raw:
    """What config.json would hold. Raises `InputError` for a model that is not supported, before a weight is
    read."""
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in MODEL_TYPES:
        known = f"but FlowSpec runs GGUF files of {', '.join(MODEL_TYPES)}"
        raise InputError(f"{file.path} is of the architecture {architecture!r:.80}, {known}")
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no tensor token_embd.weight; convert the model again")
    own, stated = ARCHITECTURES[architecture], Stated(file, f"{architecture}.")
    stops = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [*dict.fromkeys(token for token in stops if type(token) is int)]
    kinds = {tensor.dtype for tensor in file.tensors.values()}
    raw: Raw = {
        "model_type": own.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16" if not kinds <= {"F32", "F16"} else "float16" if "F16" in kinds else "float32",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": None,  # no answer is padded
    }
    if own.model_type in _MAY_HAVE_BIASES:
        raw["attention_bias"] = any(name.endswith(".attn_q.bias") for name in file.tensors)
    for key, name in {**FIELDS, **own.needed}.items():
        if name:
            raw[name] = stated.take(key, kind=_KINDS.get(key, COUNT))
    if architecture == "gemma4":
        raw |= _gemma4(stated, raw)
    else:
        raw |= _heads(stated, raw)
        raw |= own.more(stated, raw)
        raw |= _rotary(stated, raw)
    stated.check_all_taken()
    return raw


def _of_layers(stated: Stated, key: str, layers: int, default: Any = NEEDED) -> list[int]:
    """Whole numbers that a file states once, or of each layer."""

    def each(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value] * layers

    def accepts(value: Any) -> bool:
        return len(each(value)) == layers and all(map(COUNT.accepts, each(value)))

    return each(stated.take(key, default, Kind(f"a number for each of {layers} layers", accepts)))


def _width(width: int) -> Kind:
    return Kind(f"the width of a head, {width}", lambda value: value == width)


def _heads(stated: Stated, raw: Raw) -> Raw:
    """How many heads of keys and how wide a head is, and the part of it that turns with the position."""
    width = max(1, raw["hidden_size"] // raw["num_attention_heads"])
    width = stated.take("attention.key_length", width, COUNT)
    stated.take("attention.value_length", width, _width(width))
    is_partial = FAMILIES[raw["model_type"]].rotary_is_partial
    turned = stated.take("rope.dimension_count", width, NUMBER if is_partial else _width(width))
    found: Raw = {"head_dim": width, **({"partial_rotary_factor": turned / width} if is_partial else {})}
    if raw["model_type"] != "lfm2":
        return found | {"num_key_value_heads": stated.take(_KEY_HEADS, raw["num_attention_heads"])}
    layers = raw["num_hidden_layers"]  # of each one, 0 for a short convolution
    counts = f"one number of heads for {layers} layers, or 0"
    heads = stated.take(_KEY_HEADS, kind=list_of(counts, layers, lambda value: len({*value} - {0}) == 1))
    types = [FULL if count else CONVOLUTION for count in heads]
    return found | {"num_key_value_heads": max(heads), "layer_types": types}


def _rotary(stated: Stated, raw: Raw) -> Raw:
    """`rope_parameters`: with divisors of single frequencies, they are those of longrope, for Llama 3's
    scaling, too."""
    context, part = raw["max_position_embeddings"], raw.get("partial_rotary_factor")
    kind = stated.take("rope.scaling.type", "linear", TEXT)
    factor = float(stated.take("rope.scaling.factor", 1.0))
    attention_factor = float(stated.take("rope.scaling.attn_factor", 1.0))
    original = stated.take("rope.scaling.original_context_length", context, COUNT)
    rope = _plain_rope(stated.take("rope.freq_base", 10000.0))
    if part is not None:
        rope["partial_rotary_factor"] = part
    found: Raw = {"rope_parameters": rope}
    pairs = int(raw["head_dim"] * (part or 1.0)) // 2
    both, short, long = (_divisors(stated.file, name, pairs) for name in FACTORS)
    if both is not None:
        short, long, original = both, both, context
    if short is not None and long is not None:
        if kind == "yarn" or factor != 1:
            stated.refuse("rope.scaling.type", "none beside divisors of frequencies", f"{kind} by {factor}")
        found["original_max_position_embeddings"] = original
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": context / original,
            "original_max_position_embeddings": original,
            "attention_factor": attention_factor,
        }
    elif attention_factor != 1:
        stated.refuse("rope.scaling.attn_factor", "1 without divisors of frequencies", f"{attention_factor}")
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (beta := stated.take(f"rope.scaling.yarn_{name}", None)) is not None:
                rope[name] = float(beta)
        if raw["model_type"] == "gpt_oss":  # between whole numbers of frequencies; no file states it
            rope["truncate"] = False
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        stated.refuse("rope.scaling.type", "linear, yarn or none without divisors", f"{kind!r:.40}")
    if raw["model_type"] == "gemma3_text":
        near = _plain_rope(stated.take("rope.freq_base_swa", 10000.0))
        found["rope_parameters"] = {FULL: rope, SLIDING: near}
    return found


def _plain_rope(theta: float) -> Raw:
    return {"rope_type": "default", "rope_theta": float(theta)}


def _divisors(file: GgufFile, name: str, count: int) -> list[float] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.shape != (count,):
        wrong = f"expected {count} divisors, got shape {list(tensor.shape)}"
        raise InputError(f"{file.path}: tensor {name}: {wrong}")
    return [float(value) for value in tensor.numbers()]


def _gemma(stated: Stated, raw: Raw) -> Raw:
    """Windows on all layers but each second or sixth, and scores scaled by the width of heads, which the
    largest models do otherwise."""
    is_gemma2, layers, width = raw["model_type"] == "gemma2", raw["num_hidden_layers"], raw["head_dim"]
    if layers == (46 if is_gemma2 else 62):  # of 27 billion parameters
        width = raw["hidden_size"] // raw["num_attention_heads"]
    found = {"final_logit_softcapping": stated.take("final_logit_softcapping", 30.0 if is_gemma2 else None)}
    if is_gemma2:
        found["attn_logit_softcapping"] = stated.take("attn_logit_softcapping", 50.0)
    pattern = stated.take("attention.sliding_window_pattern", 2 if is_gemma2 else 6, COUNT)
    types = [SLIDING if layer % pattern else FULL for layer in range(1, layers + 1)]
    return found | {"query_pre_attn_scalar": width, "layer_types": types}


def _llama(stated: Stated, raw: Raw) -> Raw:
    """Llama with a window is Mistral, and with experts Mixtral."""
    window, experts = stated.take("attention.sliding_window", None), stated.take("expert_count", None)
    if experts is not None:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": stated.take("expert_used_count")}
        return {"model_type": "mixtral", "sliding_window": window, **mixture}
    return {} if window is None else {"model_type": "mistral", "sliding_window": window}


def _guessing(stated: Stated, raw: Raw) -> int:
    """How many of a file's blocks, the last ones, are no layers and guess the tokens after the next one."""
    blocks = raw["num_hidden_layers"]
    fewer = f"a whole number, fewer than the {blocks} of block_count"
    return int(stated.take("nextn_predict_layers", 0, count_where(fewer, lambda value: value < blocks)))


def _glm4_moe(stated: Stated, raw: Raw) -> Raw:
    guessing = _guessing(stated, raw)
    stated.take("expert_gating_func", 2, count_where("2, which is the sigmoid", lambda value: value == 2))
    return {
        "num_hidden_layers": raw["num_hidden_layers"] - guessing,
        "num_nextn_predict_layers": guessing,
        "first_k_dense_replace": stated.take("leading_dense_block_count", 0),
        "n_group": stated.take("expert_group_count", 1),
        "topk_group": stated.take("expert_group_used_count", 1),
        "routed_scaling_factor": float(stated.take("expert_weights_scale", 1.0)),
        "norm_topk_prob": stated.take("expert_weights_norm", False, TRUTH),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in stated.file.tensors,
    }


def _qwen35(stated: Stated, raw: Raw) -> Raw:
    """Which layers attend follows from an interval."""
    guessing, heads = _guessing(stated, raw), raw["linear_num_value_heads"]
    layers, interval = raw["num_hidden_layers"] - guessing, stated.take("full_attention_interval", 4, COUNT)
    has_three = Kind("no fourth section", lambda value: type(value) is list and not any(value[3:]))
    stated.take("rope.dimension_sections", None, has_three)
    stated.take(_NEURONS, None)  # nothing is as wide in a mixture
    multiple = count_where(f"a multiple of ssm.time_step_rank, {heads}", lambda value: not value % heads)
    return {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": guessing,
        "layer_types": [LINEAR if place % interval else FULL for place in range(1, layers + 1)],
        "linear_value_head_dim": stated.take("ssm.inner_size", kind=multiple) // heads,
    }


def _granite(stated: Stated, raw: Raw) -> Raw:
    return {
        "attention_multiplier": stated.take("attention.scale", raw["head_dim"] ** -0.5),
        "embedding_multiplier": stated.take("embedding_scale", 1.0),
        "residual_multiplier": stated.take("residual_scale", 1.0),
        "logits_scaling": stated.take("logit_scale", 1.0),
    }


def _gemma4(stated: Stated, raw: Raw) -> Raw:
    """Heads of layers that see all are wider than those of layers with a window. By the tensors alone shows
    where values are keys (there are no matrices for values)."""
    file, layers = stated.file, raw["num_hidden_layers"]
    last = f"true or false for {layers} layers, at last false"
    pattern = list_of(last, layers, lambda value: {*map(type, value)} == {bool} and not value[-1])
    windows = stated.take("attention.sliding_window_pattern", kind=pattern)
    types = [SLIDING if each else FULL for each in windows]
    shared = stated.take("attention.shared_kv_layers", 0, COUNT)
    inputs, table = stated.take("embedding_length_per_layer_input", 0, COUNT), file.tensors.get(LAYER_TABLE)
    for suffix, name in (("", "global_head_dim"), ("_swa", "head_dim")):
        width = raw[name] = stated.take(f"attention.key_length{suffix}", kind=COUNT)
        for key in ("attention.value_length", "rope.dimension_count"):
            stated.take(key + suffix, width, _width(width))
    heads = _of_layers(stated, _KEY_HEADS, layers, raw["num_attention_heads"])
    by_type = dict(zip(types, heads, strict=True))
    if [by_type[kind] for kind in types] != heads:
        stated.refuse(_KEY_HEADS, "one number for layers with a window, and one for the others", f"{heads}")
    neurons = _of_layers(stated, _NEURONS, layers)
    narrow = neurons[0]
    is_doubled = set(neurons) != {narrow}
    if is_doubled and neurons != [narrow] * (layers - shared) + [2 * narrow] * shared:
        expected = f"{narrow} for all layers, or {2 * narrow} for the last {shared}"
        stated.refuse(_NEURONS, expected, f"{neurons!r:.80}")
    own = [layer for layer, kind in enumerate(types[: layers - shared]) if kind == FULL]
    have_values = any(f"blk.{layer}.attn_v.weight" in file.tensors for layer in own)
    experts = stated.take("expert_count", None)
    if experts is not None:
        raw |= {
            "num_experts": experts,
            "top_k_experts": stated.take("expert_used_count"),
            "moe_intermediate_size": stated.take("expert_feed_forward_length"),
        }
    return {
        "num_key_value_heads": by_type.get(SLIDING, by_type[FULL]),
        "num_global_key_value_heads": by_type[FULL],
        "intermediate_size": narrow,
        "use_double_wide_mlp": is_doubled,
        "enable_moe_block": experts is not None,
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": table.shape[0] if inputs and table else raw["vocab_size"],
        "sliding_window": stated.take("attention.sliding_window"),
        "final_logit_softcapping": stated.take("final_logit_softcapping", None),
        "attention_k_eq_v": bool(own) and not have_values,
        "rope_parameters": {
            SLIDING: _plain_rope(stated.take("rope.freq_base_swa")),
            FULL: {
                **_plain_rope(stated.take("rope.freq_base")),
                "rope_type": "proportional",
                "partial_rotary_factor": _turning(file, raw["global_head_dim"]),
            },
        },
    }


def _turning(file: GgufFile, width: int) -> float:
    """The part of a wide head that turns. Files have no word for it: they divide the frequencies of the rest
    by a number so large that these stand still."""
    divisors = np.array(_divisors(file, _FREQUENCIES, width // 2) or [0.0])
    turning = int((divisors < _STILL).sum())
    if np.any(divisors[:turning] != 1):
        raise InputError(
            f"{file.path}: tensor {_FREQUENCIES}: expected {width // 2} divisors, 1 and then from {_STILL:g} "
            "on, got others or none; convert the model again"
        )
    return 2 * turning / width


class _Architecture(NamedTuple):
    """How transformers calls it; entries that its files have beside `FIELDS`, by the names of config.json, or
    with an empty one have not; and what else they state."""

    model_type: str
    needed: Mapping[str, str] = {}
    more: Callable[[Stated, Raw], Raw] = lambda stated, raw: {}


_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_MIXTURE = {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}
_SLIDING = {"attention.sliding_window": "sliding_window"}
_STATES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
ARCHITECTURES = {
    "llama": _Architecture("llama", more=_llama),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", _MIXTURE, lambda stated, raw: {"norm_topk_prob": True}),
    "gemma2": _Architecture("gemma2", _SLIDING, _gemma),
    "gemma3": _Architecture("gemma3_text", _SLIDING, _gemma),
    "gemma4": _Architecture("gemma4_text", {_NEURONS: ""}),
    "phi3": _Architecture(
        "phi3", more=lambda stated, raw: {"sliding_window": stated.take("attention.sliding_window", None)}
    ),
    "smollm3": _Architecture(  # each fourth layer has no positions, as llama.cpp has it; no file states it
        "smollm3",
        more=lambda stated, raw: {
            "no_rope_layers": [int(layer % 4 != 3) for layer in range(raw["num_hidden_layers"])],
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
        },
    ),
    "granite": _Architecture("granite", more=_granite),
    "olmo2": _Architecture("olmo2"),
    "olmoe": _Architecture("olmoe", _EXPERTS, lambda stated, raw: {"norm_topk_prob": False}),
    "glm4moe": _Architecture(
        "glm4_moe",
        {**_MIXTURE, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts"},
        _glm4_moe,
    ),
    "lfm2": _Architecture(  # the width of the feed-forward networks is what they have
        "lfm2",
        {"shortconv.l_cache": "conv_L_cache"},
        lambda stated, raw: {"norm_eps": raw["rms_norm_eps"], "block_auto_adjust_ff_dim": False},
    ),
    "gpt-oss": _Architecture(  # every second layer has a window, the first one, too; no file states it
        "gpt_oss",
        {**_SLIDING, **_EXPERTS, "expert_count": "num_local_experts"},
        lambda stated, raw: {
            "intermediate_size": stated.take("expert_feed_forward_length", raw["intermediate_size"])
        },
    ),
    "qwen35": _Architecture("qwen3_5_text", _STATES, _qwen35),
    "qwen35moe": _Architecture(
        "qwen3_5_moe_text",
        {**_STATES, **_MIXTURE, _NEURONS: "", _SHARED_NEURONS: "shared_expert_intermediate_size"},
        _qwen35,
    ),
}
"""By the names that our families have in GGUF files; Mistral's models call themselves llama, mixtures too."""
MODEL_TYPES = {name: own.model_type for name, own in ARCHITECTURES.items()}
