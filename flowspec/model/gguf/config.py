"""A model's config from the metadata of its GGUF file.

All that a file states about the model's arithmetic is read, with llama.cpp's defaults, and a file that states
anything else about it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowspec.core.protocol.sliding_window import CONVOLUTION, LINEAR
from flowspec.errors import InputError
from flowspec.model.gguf import gemma4
from flowspec.model.gguf.file import GgufFile
from flowspec.model.gguf.stated import LIST, TEXT, TRUTH, Stated

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "glm4moe": "glm4_moe",
    "lfm2": "lfm2",
    "gpt-oss": "gpt_oss",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
"""Architectures that our families know; Mistral's models call themselves llama, mixtures too."""
_PARTLY_TURNED = ("phi3", "glm4moe", "qwen35", "qwen35moe")
"""Architectures whose heads may turn with the position in a part."""
_SIGMOID = 2
"""How llama.cpp numbers what a router makes of its logits."""
_SMOLLM3_WITHOUT_ROTARY = 4
"""Each such layer of SmolLM3 has no positions, as llama.cpp has it; no file states it."""
FACTORS = (gemma4.FREQUENCIES, "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the config: divisors of the position embeddings' frequencies."""
GUESSING = "nextn_predict_layers"
"""The entry that says how many blocks guess the tokens after the next one."""
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Entries that all files have, by the names of config.json."""
MORE_FIELDS = {
    "qwen3moe": {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    "gpt-oss": {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
}
"""Those that files of single architectures have."""
_OF_QWEN35 = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_NEEDED: Mapping[str, Mapping[str, str]] = {
    "gemma2": {"attention.sliding_window": "sliding_window"},
    "gemma3": {"attention.sliding_window": "sliding_window"},
    "glm4moe": {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gpt-oss": {"attention.sliding_window": "sliding_window"},
    "olmoe": {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen35": _OF_QWEN35,
    "qwen35moe": {
        **_OF_QWEN35,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
}
"""As `MORE_FIELDS`, what transformers does not know of."""
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that llama.cpp, too, takes for the end of an answer."""
_UNPACKED_DTYPE = "bfloat16"


def config_of(file: GgufFile) -> dict[str, Any]:
    """What config.json would hold. Raises `InputError` for a model that is not supported, before a weight is
    read."""
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in MODEL_TYPES:
        raise InputError(
            f"{file.path} is of the architecture {architecture!r:.80}, but FlowSpec runs GGUF files of "
            f"{', '.join(MODEL_TYPES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no tensor token_embd.weight; convert the model again")
    stated = Stated(file, architecture)
    raw: dict[str, Any] = {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **_special_tokens(file.metadata),
    }
    needed = {**FIELDS, **MORE_FIELDS.get(architecture, {}), **_NEEDED.get(architecture, {})}
    if architecture in ("gemma4", "qwen35moe"):  # no plain networks, or of several widths
        del needed["feed_forward_length"]
    raw |= {name: stated.need(key) for key, name in needed.items()}
    if architecture == "gemma4":
        raw |= gemma4.layers_of(stated, raw)
    else:
        raw |= _layers_of(stated, raw, architecture)
    stated.check_all_taken()
    return raw


def _layers_of(stated: Stated, raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Of all architectures whose layers have heads of one kind, if they have any."""
    found = _heads(stated, raw, architecture)
    if architecture in _OTHERS:
        found |= _OTHERS[architecture](stated, raw | found)
    return found | _rotary(stated, raw | found, architecture)


def _dtype(file: GgufFile) -> str:
    """That of the numbers as they are in the file, where none is packed."""
    kinds = {tensor.dtype for tensor in file.tensors.values()}
    if not kinds <= {"F32", "F16", "BF16"}:
        return _UNPACKED_DTYPE
    return "bfloat16" if "BF16" in kinds else "float16" if "F16" in kinds else "float32"


def _special_tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    stops = dict.fromkeys(
        metadata[key] for each in _STOPS if type(metadata.get(key := f"tokenizer.ggml.{each}")) is int
    )
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(stops) if len(stops) > 1 else next(iter(stops), None),
        "pad_token_id": None,  # no answer is padded
    }


def _heads(stated: Stated, raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """How many heads of keys and how wide a head is, and in `partial_rotary_factor` the part of it that turns
    with the position."""
    layers, path = raw["num_hidden_layers"], stated.file.path
    found: dict[str, Any] = {}
    if architecture == "lfm2":  # of each layer, 0 for one that is a short convolution
        counts = stated.take("attention.head_count_kv", None, LIST)
        some = set(counts or ()) - {0}
        if not counts or len(counts) != layers or len(some) != 1:
            stated.refuse("attention.head_count_kv", counts, f"one number of heads for {layers} layers, or 0")
        found["layer_types"] = [CONVOLUTION if count == 0 else "full_attention" for count in counts]
        found["num_key_value_heads"] = some.pop()
    else:
        heads = raw["num_attention_heads"]
        found["num_key_value_heads"] = stated.take("attention.head_count_kv", heads)
    rotated = stated.take("rope.dimension_count")
    width = stated.take("attention.key_length", raw["hidden_size"] // raw["num_attention_heads"])
    if stated.take("attention.value_length", width) != width:
        raise InputError(
            f"{path}: expected {architecture}.attention.value_length to be that of keys, {width}"
        )
    part = 1.0 if rotated is None else rotated / width
    if architecture in _PARTLY_TURNED:
        found["partial_rotary_factor"] = part
    elif part != 1.0:
        raise InputError(
            f"{path}: expected {architecture}.rope.dimension_count to be the width of a head, {width}, got "
            f"{rotated}"
        )
    return found | {"head_dim": width}


def _rotary(stated: Stated, raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """`rope_parameters`: with divisors of single frequencies, they are those of longrope, for Llama 3's
    scaling, too."""
    file = stated.file
    kind = stated.take("rope.scaling.type", "linear", TEXT)
    factor = stated.take("rope.scaling.factor", 1.0)
    attention_factor = stated.take("rope.scaling.attn_factor", 1.0)
    original = stated.take("rope.scaling.original_context_length", raw["max_position_embeddings"])
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(stated.take("rope.freq_base", 10000.0)),
    }
    rotated = int(raw["head_dim"] * raw.get("partial_rotary_factor", 1.0))
    both, short, long = (_divisors(file, name, rotated // 2) for name in FACTORS)
    own: dict[str, Any] = {}
    if both is not None or (short is not None and long is not None):
        if kind == "yarn" or factor != 1:
            raise InputError(
                f"{file.path} has divisors of frequencies (rope_freqs) and {kind} scaling by {factor}; "
                "expected one of them"
            )
        limit = int(original) if both is None else raw["max_position_embeddings"]
        own = {"original_max_position_embeddings": limit}
        rope |= own | {
            "rope_type": "longrope",
            "short_factor": both or short,
            "long_factor": both or long,
            "factor": raw["max_position_embeddings"] / limit,
            "attention_factor": float(attention_factor),
        }
    elif kind == "yarn":
        limit = int(original)
        rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": limit}
        for name in ("beta_fast", "beta_slow"):
            if (beta := stated.take(f"rope.scaling.yarn_{name}")) is not None:
                rope[name] = float(beta)
        if architecture == "gpt-oss":  # between whole numbers of frequencies; no file states it
            rope["truncate"] = False
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    elif kind not in ("linear", "none"):
        raise InputError(
            f"{file.path}: {architecture}.rope.scaling.type: expected linear, yarn or none without divisors, "
            f"got {kind!r:.40}"
        )
    if rope["rope_type"] != "longrope" and attention_factor != 1:
        raise InputError(
            f"{file.path} sets {architecture}.rope.scaling.attn_factor to {attention_factor}; expected "
            "divisors with it"
        )
    if architecture == "gemma3":
        near = {"rope_type": "default", "rope_theta": float(stated.take("rope.freq_base_swa", 10000.0))}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": near}}
    if architecture in _PARTLY_TURNED:
        rope["partial_rotary_factor"] = raw["partial_rotary_factor"]
    return {"rope_parameters": rope, **own}


def _divisors(file: GgufFile, name: str, count: int) -> list[float] | None:
    """One for each frequency, if the file has them."""
    if name not in file.tensors:
        return None
    if file.tensors[name].shape != (count,):
        raise InputError(
            f"{file.path}: tensor {name}: expected {count} divisors, got shape "
            f"{list(file.tensors[name].shape)}"
        )
    return [float(value) for value in file.tensors[name].numbers()]


def _gemma(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """Windows on all layers but each second or sixth, and scores scaled by the width of heads, which the
    largest models do otherwise."""
    is_gemma2, layers, width = raw["model_type"] == "gemma2", raw["num_hidden_layers"], raw["head_dim"]
    if layers == (46 if is_gemma2 else 62):  # of 27 billion parameters
        width = raw["hidden_size"] // raw["num_attention_heads"]
    caps = {"final_logit_softcapping": stated.take("final_logit_softcapping", 30.0 if is_gemma2 else None)}
    if is_gemma2:
        caps["attn_logit_softcapping"] = stated.take("attn_logit_softcapping", 50.0)
    pattern = stated.take("attention.sliding_window_pattern", 2 if is_gemma2 else 6)
    return caps | {
        "query_pre_attn_scalar": width,
        "layer_types": [
            "full_attention" if layer % pattern == 0 else "sliding_attention"
            for layer in range(1, layers + 1)
        ],
    }


def _llama(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """Llama with a window is Mistral, and with experts Mixtral."""
    window = stated.take("attention.sliding_window")
    experts = stated.take("expert_count")
    if experts is not None:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": stated.need("expert_used_count")}
        return {"model_type": "mixtral", "sliding_window": window, **mixture}
    return {} if window is None else {"model_type": "mistral", "sliding_window": window}


def _guessing(stated: Stated, blocks: int) -> int:
    """How many of so many blocks guess the tokens after the next one."""
    found = stated.count(GUESSING)
    if found >= blocks:
        stated.refuse(GUESSING, found, f"fewer than the {blocks} of block_count")
    return found


def _glm4_moe(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """Blocks that guess the tokens after the next one are counted in the file, and are no layers."""
    guessing = _guessing(stated, raw["num_hidden_layers"])
    gate = stated.take("expert_gating_func", _SIGMOID)
    if gate != _SIGMOID:
        stated.refuse("expert_gating_func", gate, f"{_SIGMOID} (sigmoid)")
    return {
        "num_hidden_layers": raw["num_hidden_layers"] - guessing,
        "num_nextn_predict_layers": guessing,
        "first_k_dense_replace": stated.take("leading_dense_block_count", 0),
        "n_group": stated.take("expert_group_count", 1),
        "topk_group": stated.take("expert_group_used_count", 1),
        "routed_scaling_factor": float(stated.take("expert_weights_scale", 1.0)),
        "norm_topk_prob": stated.take("expert_weights_norm", False, TRUTH),
        "use_qk_norm": stated.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": stated.has_tensor("blk.0.attn_q.bias"),
    }


def _qwen35(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """Which layers attend follows from an interval, or is said of each. Blocks that guess the tokens after
    the next one are counted in the file, and are no layers."""
    blocks = raw["num_hidden_layers"]
    guessing = _guessing(stated, blocks)
    layers = blocks - guessing
    interval = stated.take("full_attention_interval", 4)
    by_interval = [place % interval != 0 for place in range(1, layers + 1)]
    has_state = stated.take("attention.recurrent_layers", [*by_interval, *[False] * guessing], LIST)
    if len(has_state) != blocks or not {*map(type, has_state)} <= {bool} or any(has_state[layers:]):
        stated.refuse("attention.recurrent_layers", has_state, f"true or false for each of {layers} layers")
    sections = stated.take("rope.dimension_sections", [0], LIST)
    if len(sections) == 4 and sections[3]:
        stated.refuse("rope.dimension_sections", sections, "no fourth section")
    stated.take("feed_forward_length")  # nothing is as wide in a mixture
    heads, inner = raw["linear_num_value_heads"], stated.need("ssm.inner_size")
    if inner % heads:
        stated.refuse("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {heads}")
    attends = has_state[:layers].index(False) if False in has_state[:layers] else 0
    return {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": guessing,
        "layer_types": [LINEAR if each else "full_attention" for each in has_state[:layers]],
        "linear_value_head_dim": inner // heads,
        "attention_bias": stated.has_tensor(f"blk.{attends}.attn_q.bias"),
    }


def _lfm2(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """The width of the feed-forward networks is what they have, and the constant of norms has another
    name."""
    return {"norm_eps": raw["rms_norm_eps"], "block_auto_adjust_ff_dim": False}


def _gpt_oss(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    """Every second layer has a window, the first one, too; no file states it."""
    return {
        "intermediate_size": stated.take("expert_feed_forward_length", raw["intermediate_size"]),
        "attention_bias": stated.has_tensor("blk.0.attn_q.bias"),
    }


def _smollm3(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    layers = range(1, raw["num_hidden_layers"] + 1)
    return {
        "no_rope_layers": [int(layer % _SMOLLM3_WITHOUT_ROTARY != 0) for layer in layers],
        "no_rope_layer_interval": _SMOLLM3_WITHOUT_ROTARY,
        "use_sliding_window": False,
    }


def _granite(stated: Stated, raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": stated.take("attention.scale", raw["head_dim"] ** -0.5),
        "embedding_multiplier": stated.take("embedding_scale", 1.0),
        "residual_multiplier": stated.take("residual_scale", 1.0),
        "logits_scaling": stated.take("logit_scale", 1.0),
    }


_OTHERS: Mapping[str, Callable[[Stated, dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(("gemma2", "gemma3"), _gemma),
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "lfm2": _lfm2,
    "llama": _llama,
    "olmoe": lambda stated, raw: {"norm_topk_prob": False},
    "phi3": lambda stated, raw: {"sliding_window": stated.take("attention.sliding_window")},
    **dict.fromkeys(("qwen35", "qwen35moe"), _qwen35),
    "qwen3moe": lambda stated, raw: {"norm_topk_prob": True},
    "smollm3": _smollm3,
}
"""What single architectures state besides."""
