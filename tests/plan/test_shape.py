"""Model shapes: their weights are those of the published models, and of transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.spec import spec_of
from flowspec.plan.memory import drafter_memory, weights_of
from flowspec.plan.shape import SHAPES, ModelShape, eagle_shape, find_shape, shape_of

PUBLISHED = {
    "llama-2-7b": (6_738_415_616, False),
    "llama-2-13b": (13_015_864_320, False),
    "llama-2-70b": (68_976_648_192, False),
    "llama-3-8b": (8_030_261_248, False),
    "llama-3-70b": (70_553_706_496, False),
    "llama-3.2-1b": (1_235_814_400, True),
    "tinyllama-1.1b": (1_100_048_384, False),
    "qwen2-7b": (7_615_616_512, False),
    "qwen2.5-14b": (14_770_033_664, False),
    "qwen3-0.6b": (596_049_920, True),
    "qwen3-4b": (4_022_468_096, True),
    "qwen3-8b": (8_190_735_360, False),
    "qwen3-1.7b": (1_720_574_976, True),
    "qwen3-14b": (14_768_307_200, False),
    "qwen3-32b": (32_762_123_264, False),
}
"""Parameters as safetensors headers on the hub count them, and whether the embedding is `lm_head` again."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name: str) -> None:
    shape = find_shape(name)
    published, tied = PUBLISHED[name]
    embedding = 0 if tied else shape.head_params
    assert shape.params + embedding == pytest.approx(published, rel=0.01)


def counted(*modules: torch.nn.Module) -> int:
    return sum(
        parameter.numel() for module in modules for parameter in module.parameters() if parameter.dim() > 1
    )


def modules_of(config: Any) -> Any:
    """The whole model, without numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def both_of(family: str, **settings: Any) -> tuple[ModelShape, Any]:
    """A model's shape, and its decoder."""
    config = AutoConfig.for_model(family, **settings)
    return shape_of(spec_of(config), family), modules_of(config).model


def test_layers_of_several_kinds_count_as_their_average() -> None:
    """LFM2-1.2B, as published (1,170,340,608 parameters); layers with states, as Qwen3.5-4B has; layers that
    share keys, as Gemma 4 E2B's, which have no keys and wider networks."""
    lfm2 = {"hidden_size": 2048, "block_ff_dim": 12288, "num_hidden_layers": 16}
    shape, decoder = both_of("lfm2", **lfm2, full_attn_idxs=[2, 5, 8, 10, 12, 14])
    assert (shape.intermediate, shape.attention_share) == (8192, 6 / 16)
    assert shape.layers * shape.layer_params == pytest.approx(counted(decoder.layers), rel=1e-3)
    assert shape.params == pytest.approx(1_170_340_608, rel=1e-3)
    qwen = {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}
    shape, decoder = both_of("qwen3_5_text", **qwen)
    assert shape.layers * shape.layer_params == pytest.approx(counted(decoder.layers), rel=1e-3)
    assert shape.attention_share == 8 / 32
    assert shape.held(0, 4).state_numbers == 3 * 32 * 128 * 128, "2 MiB in each of three"
    gemma = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35}
    gemma |= {"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    shape, decoder = both_of("gemma4_text", **gemma, layer_types=kinds)
    in_all = shape.layers * (shape.layer_params + shape.table)
    inputs = decoder.embed_tokens_per_layer, decoder.per_layer_model_projection
    assert in_all == pytest.approx(counted(decoder.layers, *inputs), rel=1e-6)
    assert shape.carried == 1536 + 2 * 256 + 2 * 512
    assert weights_of(shape).table == 262144 * 256


def layer_of(family: str, **settings: Any) -> tuple[ModelShape, torch.nn.Module]:
    """A model's shape, and its one layer."""
    shape, decoder = both_of(family, **settings, num_hidden_layers=1)
    return shape, decoder.layers[0]


def matrices_of(module: torch.nn.Module, *without: str) -> list[torch.nn.Parameter]:
    named = [(name, each) for name, each in module.named_parameters() if each.dim() > 1]
    return [each for name, each in named if not any(part in name for part in without)]


def test_mixtures_hold_all_experts_and_networks_in_memory() -> None:
    """By the modules themselves: all weights but the router's and the small norms."""
    qwen = {"moe_intermediate_size": 96, "num_experts": 10, "num_experts_per_tok": 4}
    shape, layer = layer_of("qwen3_moe", **qwen)
    matrices = matrices_of(layer, "mlp.gate.")
    assert weights_of(shape).layer == sum(each.numel() for each in matrices) + 2 * shape.hidden
    # As Gemma 4 26B-A4B is published, with fewer experts: its network is as wide as three of them.
    gemma = {"hidden_size": 96, "intermediate_size": 72, "hidden_size_per_layer_input": 0}
    gemma |= {"num_experts": 10, "top_k_experts": 4, "moe_intermediate_size": 24, "enable_moe_block": True}
    shape, layer = layer_of("gemma4_text", **gemma, layer_types=["full_attention"])
    assert (shape.experts, shape.experts_per_row, shape.shared_intermediate) == (10, 4, 72)
    assert shape.intermediate == 4 * 24 + 72
    held = sum(each.numel() for each in matrices_of(layer, "router"))
    assert weights_of(shape).layer == held + 2 * shape.hidden


@pytest.mark.parametrize(
    ("family", "shared", "width"),
    [
        ("qwen3_5_moe_text", {"num_experts": 10, "shared_expert_intermediate_size": 160}, 160),
        ("glm4_moe", {"n_shared_experts": 2, "first_k_dense_replace": 0, "n_routed_experts": 10}, 2 * 96),
    ],
)
def test_an_expert_that_every_row_runs_through_counts_beside_those_it_chooses(
    family: str, shared: dict[str, Any], width: int
) -> None:
    """As Qwen3.5's, which may be of another width than the others, and GLM-4.5's."""
    kinds = {"layer_types": ["full_attention"]} if "qwen" in family else {}
    shape, layer = layer_of(family, moe_intermediate_size=96, num_experts_per_tok=4, **shared, **kinds)
    held = sum(each.numel() for name, each in layer.mlp.named_parameters() if "gate." not in name)
    assert 3 * shape.hidden * shape.held_intermediate == held
    assert shape.intermediate == 4 * 96 + width


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_shape_of_a_config_has_the_weights_of_its_layers(name: str) -> None:
    files = ModelFiles(str(bundled_folder(name)))
    config = files.config()
    shape = shape_of(spec_of(config), name)
    count = config.num_hidden_layers
    model = modules_of(config)
    assert (shape.name, shape.layers, shape.vocabulary) == (name, count, config.vocab_size)
    assert shape.layers * shape.layer_params == counted(model.model.layers)
    assert shape.head_params == counted(model.lm_head)
    assert shape.params == counted(model.model.layers, model.lm_head)
    assert shape.cache_values() == 2 * config.num_key_value_heads * config.head_dim


@pytest.mark.parametrize(
    ("name", "published", "active"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        ("gpt-oss-20b", 20_914_757_184, 3.6e9),
        ("olmoe-1b-7b", 6_919_161_856, 1.3e9),
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
    ],
)
def test_known_mixtures_have_the_published_number_of_parameters(
    name: str, published: int, active: float
) -> None:
    """Those of the file, and those that the publisher calls active, with the embedding or without."""
    shape = find_shape(name)
    weights = weights_of(shape)
    assert shape.layers * weights.layer + weights.embedding + weights.head == pytest.approx(
        published, rel=0.01
    )
    assert shape.params <= active * 1.02
    assert shape.params + shape.head_params >= active * 0.98
    chosen = shape.layers * shape.chosen_params
    others = shape.params - chosen - shape.head_params
    assert others + chosen * shape.experts // shape.experts_per_row == pytest.approx(
        published - 2 * shape.head_params, rel=0.01
    )


def test_eagle_heads_are_one_layer_and_read_what_they_have() -> None:
    target = find_shape("llama-2-7b")
    eagle = SHAPES["eagle-llama-2-7b"]
    assert eagle == eagle_shape(target)
    assert eagle.params == target.layer_params + target.head_params + 2 * 4096 * 4096
    # EAGLE-3's for Llama 3.1 8B: `q_proj` [4096, 8192], `k_proj` and `v_proj` [1024, 8192], `o_proj` [4096,
    # 4096], an MLP, `fc` [4096, 12288], `lm_head` [32000, 4096], and the target's embedding, which no pass
    # reads.
    head, target = SHAPES["eagle3-llama-3-8b"], find_shape("llama-3-8b")
    attention = 4096 * 8192 + 2 * 1024 * 8192 + 4096 * 4096
    read = attention + 3 * 4096 * 14336 + 4096 * 12288 + 32000 * 4096
    assert head.params == read
    weights = drafter_memory(head, "float16", context=64, users=1).weight_bytes / 2
    assert read + 128256 * 4096 < weights < read + 128256 * 4096 + 10 * 4096
    assert head.vocabulary == target.vocabulary
    assert SHAPES["eagle3-llama-2-7b"].drafted == 0, "32,000 tokens are all of its vocabulary"


def test_an_unknown_shape_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match=r"^shape: there is no 'whisper'; expected one of llama-2-7b, "):
        find_shape("whisper")
