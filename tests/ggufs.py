"""GGUF files made from checkpoints, as llama.cpp's converter writes them: for tests, and to run llama.cpp
beside us."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors.torch import load_file

from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.families import FAMILIES
from flowspec.model.files import ModelFiles
from flowspec.model.spec import experts_of, heads_of
from tests.checkpoints import SMALL, make_checkpoint

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
WIDE: dict[str, Any] = {
    **SMALL,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}
"""Rows of whole blocks of every type."""
_DATA = json.loads((Path(__file__).parent / "data" / "gguf_shapes.json").read_text("utf-8"))
_BASES = {"wide": WIDE} | {name: {**WIDE, **own} for name, (_, own) in _DATA["bases"].items()}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family, {**_BASES[base], **own}) for name, (family, base, own) in _DATA["shapes"].items()
}
"""Families and configs by name. Gemma 4's and the mixture of Qwen3.5 have small weights: with wider ones
rounding alone would move perplexity by more than is allowed."""
RANDOM = {
    GGMLQuantizationType.Q4_K: ((0, 5e-4), (2, 3.75e-3)),
    GGMLQuantizationType.Q5_K: ((0, 2.5e-4), (2, 3.75e-3)),
    GGMLQuantizationType.Q6_K: ((208, 6e-5),),
    GGMLQuantizationType.IQ4_NL: ((0, 2e-3),),
}
"""Types that the gguf package cannot pack: where float16 lie in a block, each with a value that makes weights
about as large as small checkpoints'."""
KEPT = tuple(map(GGMLQuantizationType.__getitem__, FORMS))
"""Types with which layers compute as they are."""
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
LINEAR = ("qwen35", "qwen35moe")
PLAIN = (
    "per_layer_model_proj.",
    ".ffn_gate_inp.",
    ".ffn_gate_inp_shexp.",
    ".shortconv.conv.",
    ".ssm_conv1d.",
)
"""Of names of matrices that are in float32 in every file."""


def make(folder: Path, name: str) -> Path:
    """The checkpoint of one of `SHAPES`, in the hub's layout."""
    return make_checkpoint(folder, *SHAPES[name], seed=sum(map(ord, name)))


def convert(
    checkpoint: Path,
    path: Path,
    kind: GGMLQuantizationType | Sequence[GGMLQuantizationType] = GGMLQuantizationType.F32,
    *,
    metadata: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: Tensors | None = None,
    part_tensors: int = 0,
    plain: tuple[str, ...] = PLAIN,
) -> Path:
    """A GGUF file of a checkpoint with matrices in `kind`, or in several in turns (Q8_0 where rows are no
    whole blocks), but in float32 where a name has a part of `plain`; `metadata` is set, or with None left
    out, after the converter's own.

    With `part_tensors` it is written in parts of so many tensors, behind a first one that has none; the
    first's path is returned.
    """
    config = ModelFiles(str(checkpoint)).config()
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    written, numbers = _metadata(config, architecture), _numbers(checkpoint)
    if any(name.startswith(_ahead(config)) for name in numbers):
        written[f"{architecture}.block_count"] += 1
        written[f"{architecture}.nextn_predict_layers"] = 1
    written |= metadata or {}
    path.parent.mkdir(exist_ok=True)
    writer = GGUFWriter(
        path, architecture, split_max_tensors=part_tensors, small_first_shard=bool(part_tensors)
    )
    for key, value in written.items():
        add_entry(writer, key, value)
    tensors = {**_tensors(numbers, config, architecture), **(extra or {})}
    kinds = [kind] if isinstance(kind, GGMLQuantizationType) else list(kind)
    for number, (name, values) in enumerate(tensors.items()):
        own = kinds[number % len(kinds)]
        if values.ndim == 1 or name.endswith(".bias") or any(part in name for part in plain):
            own = GGMLQuantizationType.F32
        elif len(kinds) > 1 and values.shape[-1] % GGML_QUANT_SIZES[own][0]:
            own = GGMLQuantizationType.Q8_0
        if name not in drop:
            writer.add_tensor(
                name,
                blocks(own, values.shape, number) if own in RANDOM else quantize(values, own),
                raw_dtype=own,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*.gguf")) if part_tensors else path


def _numbers(checkpoint: Path) -> Tensors:
    shards = sorted(set(ModelFiles(str(checkpoint)).file_map().values()))
    return {
        name: values.float().numpy()
        for shard in shards
        for name, values in load_file(checkpoint / shard).items()
    }


def add_entry(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    heads = heads_of(config)[0]
    head_dim = heads.width
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    found = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": heads.count,
        "attention.layer_norm_rms_epsilon": getattr(config, FAMILIES[config.model_type].norm_eps),
        "rope.freq_base": float(full["rope_theta"]),
    }
    if architecture in ("llama", "phi3", "smollm3", "granite", "glm4moe", *LINEAR):
        found["rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1.0))
        found["vocab_size"] = config.vocab_size
    if architecture not in ("phi3", "granite", "olmo2", "olmoe", "smollm3"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if full["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(full["factor"]),
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    if architecture == "gemma4":
        found |= _gemma4_metadata(config)
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        found["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "gemma2":
        found |= {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if architecture == "phi3":
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if full["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        found["rope.scaling.attn_factor"] = float(
            np.sqrt(1 + np.log(scale) / np.log(config.original_max_position_embeddings))
        )
    if experts_of(config) and architecture != "gemma4":
        found |= {"expert_count": experts_of(config), "expert_used_count": config.num_experts_per_tok}
    if architecture == "glm4moe":
        found |= {
            "expert_shared_count": config.n_shared_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_gating_func": 2,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
        }
    if architecture == "qwen3moe":
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture in LINEAR:
        found |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "rope.dimension_sections": [*rope["mrope_section"], 0],
        }
        del found["vocab_size"]
    if architecture == "qwen35moe":
        found |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    if architecture == "lfm2":
        found |= {
            "feed_forward_length": -(-int(2 * config.intermediate_size / 3) // 256) * 256,
            "shortconv.l_cache": config.conv_L_cache,
            "attention.head_count_kv": [
                0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types
            ],
        }
    if architecture == "gpt-oss":
        found["expert_feed_forward_length"] = config.intermediate_size
    if architecture == "granite":
        found |= {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    own = {f"{architecture}.{key}": value for key, value in found.items()}
    return {
        "general.name": config.model_type,
        **own,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _gemma4_metadata(config: Any) -> dict[str, Any]:
    """As `Gemma4Model` of llama.cpp's converter writes them."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    heads, shared = heads_of(config), config.num_kv_shared_layers
    near, wide = heads[windows.index(True)], heads[windows.index(False)]
    found = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windows,
        "attention.key_length": wide.width,
        "attention.value_length": wide.width,
        "attention.key_length_swa": near.width,
        "attention.value_length_swa": near.width,
        "attention.head_count_kv": near.count,
        "rope.dimension_count": wide.width,
        "rope.dimension_count_swa": near.width,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.use_double_wide_mlp:
        count, width = config.num_hidden_layers, config.intermediate_size
        found["feed_forward_length"] = [width] * (count - shared) + [2 * width] * shared
    if near.count != wide.count:
        found["attention.head_count_kv"] = [each.count for each in heads]
    if config.enable_moe_block:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return found


_GEMMA4_NAMES = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}


NEXTN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}
"""What llama.cpp calls the parts of an MTP layer beside its decoder layer, by what checkpoints call them."""


def _ahead(config: Any) -> tuple[str, ...]:
    """How names of an MTP layer begin in checkpoints of Qwen3.5 and GLM-4.5."""
    return "mtp.", f"model.layers.{config.num_hidden_layers}."


def _nextn(name: str, config: Any) -> str:
    """The name in a GGUF file of what is no part of the decoder layer in an MTP layer; else empty."""
    _, of_glm = _ahead(config)
    leaf = NEXTN.get(name.removeprefix(of_glm).removesuffix(".weight"), "")
    return f"blk.{config.num_hidden_layers}.nextn.{leaf}.weight" if leaf else ""


def _tensors(checkpoint: Tensors, config: Any, architecture: str) -> Tensors:
    (arch,) = [key for key, value in MODEL_ARCH_NAMES.items() if value == architecture]
    names = get_tensor_name_map(arch, config.num_hidden_layers + 1)
    found: Tensors = {}
    experts: dict[str, list[Any]] = {}
    for name, values in checkpoint.items():
        if name.startswith(_ahead(config)) and (renamed := _nextn(name, config)):
            is_moved = architecture in LINEAR and values.ndim == 1
            found[renamed] = (values + 1 if is_moved else values).astype(np.float32)
            continue
        name = name.replace("mtp.layers.0.", f"model.layers.{config.num_hidden_layers}.")
        if architecture == "gemma4" and name.endswith((*_GEMMA4_NAMES,)):
            layer, _, leaf = name.partition("layers.")[2].partition(".")
            found[f"blk.{layer}.{_GEMMA4_NAMES[leaf]}"] = values.astype(np.float32)
            continue
        if ".experts." in name and architecture == "gpt-oss":
            before, _, leaf = name.partition(".experts.")
            suffix = "bias" if leaf.endswith("_bias") else "weight"
            rows = values.swapaxes(1, 2) if suffix == "weight" else values
            parts = {"down": rows} if leaf.startswith("down") else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            for part, some in parts.items():
                joined = names.get_name(f"{before}.experts.{part}_proj")
                found[f"{joined}.{suffix}"] = np.ascontiguousarray(some, np.float32)
            continue
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            expert, _, leaf = after.partition(".")
            stack = experts.setdefault(
                f"{names.get_name(f'{before}.experts.{leaf}'.removesuffix('.weight'))}.weight",
                [None] * experts_of(config),
            )
            stack[int(expert)] = values
            continue
        if architecture in ("llama", "smollm3", "granite") and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if architecture in LINEAR:
            name, values = _linear_attention(name, values, config)
        if name.endswith(".ssm_a"):
            found[name] = values
            continue
        if name.endswith(".conv.conv.weight"):
            values = values.squeeze(1)
        if name.endswith(".sinks"):
            name += ".weight"
        stem, _, suffix = name.replace("_correction_bias", "_correction.bias").rpartition(".")
        found[f"{names.get_name(stem)}.{suffix}"] = values.astype(np.float32)
    found |= {name: np.stack(stack).astype(np.float32) for name, stack in experts.items()}
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_divisors(config, rope)
    if architecture == "gemma4":
        own = rope["full_attention"]
        width = max(each.width for each in heads_of(config))
        turning = int(width * own["partial_rotary_factor"] / 2)
        found["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (width // 2 - turning), np.float32)
    if rope.get("rope_type") == "longrope":
        found |= {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        }
    return found


def _linear_attention(name: str, values: Any, config: Any) -> tuple[str, Any]:
    """What the converter makes of a tensor of Qwen3.5, head by head; how fast a state fades has its name in
    the file."""
    leaf = name.rpartition(".linear_attn.")[2]
    if leaf.endswith("norm.weight") and leaf != "norm.weight":
        return name, values + 1
    if leaf in (name, "norm.weight"):
        return name, values
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    is_of_heads = leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
    width = 1 if is_of_heads else config.linear_value_head_dim
    if leaf == "out_proj.weight":
        return name, np.ascontiguousarray(_tiled(values.T, keys, heads, width).T)
    before = 2 * keys * config.linear_key_head_dim if leaf.startswith(("in_proj_qkv", "conv1d")) else 0
    values = values.reshape(len(values), -1) if values.ndim > 1 else values
    values = np.concatenate([values[:before], _tiled(values[before:], keys, heads, width)])
    if leaf == "A_log":
        return f"blk.{name.split('.')[2]}.ssm_a", -torch.exp(torch.from_numpy(values)).numpy()
    return name.replace("dt_bias", "dt_proj.bias"), values


def _tiled(rows: Any, keys: int, heads: int, width: int) -> Any:
    """Of each head of keys the first head of values, then of each the second, ..."""
    each = heads // keys
    order = [key * each + place for place in range(each) for key in range(keys)]
    return np.concatenate([rows[head * width : (head + 1) * width] for head in order])


def _llama3_divisors(config: Any, rope: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As llama.cpp's converter computes them."""
    width, original = config.head_dim, rope["original_max_position_embeddings"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(
        lengths < original / high, 1.0, np.where(lengths > original / low, rope["factor"], between)
    ).astype(np.float32)


def blocks(
    kind: GGMLQuantizationType, shape: tuple[int, ...], seed: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random packed rows of one of `RANDOM`, for a tensor of this shape."""
    *others, columns = shape
    size, count = GGML_QUANT_SIZES[kind]
    assert columns % size == 0, "rows are of whole blocks"
    found = np.random.default_rng(seed).integers(0, 256, (*others, columns // size, count), np.uint8)
    for at, scale in RANDOM[kind]:
        found[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return found.reshape(*others, -1)
