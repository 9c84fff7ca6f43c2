"""What tensors and entries of GGUF files are called, and what was done to tensors, is what the gguf package
and transformers say of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import AutoConfig
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from flowspec.errors import InputError
from flowspec.model.families import FAMILIES, Family
from flowspec.model.gguf import config as ours
from flowspec.model.gguf.config import MODEL_TYPES
from flowspec.model.gguf.tensors import STORED_FADING, GgufTensors, checkpoint_names
from flowspec.model.spec import experts_of, spec_of
from tests.ggufs import ARCHITECTURES, SHAPES
from tests.nightly import nightly
from tests.specs import class_of

CONVERTED_AS = {"smollm3": "llama", "granite": "llama", "olmoe": "qwen3moe"}
"""Architectures that transformers does not know, by one that llama.cpp's converter treats alike."""
BIASED = ("glm4moe", "gemma4", "gpt-oss", "qwen35", "qwen35moe")
"""Architectures whose files tell by their tensors whether attention has biases."""
OF_GEMMA4 = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
"""What the gguf package has no names for."""
READ_OTHERWISE = {
    *("attention.key_length", "attention.sliding_window", "sliding_window", "vocab_size"),
    *("rope.dimension_count", "rope.freq_base", "attention.head_count_kv"),
}


def parameters(family: Family, config: Any, layer: int) -> list[str]:
    """A layer's, as checkpoints may call them, with `{}` for an expert; names of single matrices come after
    those of joined ones."""
    with torch.device("meta"):
        names = class_of(family, "DecoderLayer")(config, layer).state_dict()
    found: list[str] = []
    for name in names:
        ways = family.ways_to_stack(name) or ((family.renamed.get(name, name),),)
        found += [each for way in reversed(ways) for each in way]
    return found


def converters_name(name: str) -> str:
    """As llama.cpp's converter looks it up: experts are joined, and these are weights or biases."""
    name = name.replace(".experts.{}.", ".experts.").replace("_correction_bias", "_correction.bias")
    name = name.replace(".dt_bias", ".dt_proj.bias")
    return f"{name}.weight" if name.endswith((".sinks", ".layer_scalar")) else name


def expected_names(family: Family, config: Any, architecture: str) -> dict[str, str]:
    """Of the tensors in layers."""
    (kind,) = [key for key, value in MODEL_ARCH_NAMES.items() if value == architecture]
    table, found = get_tensor_name_map(kind, config.num_hidden_layers), {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in parameters(family, config, layer):
            if name in OF_GEMMA4:
                found[f"blk.{layer}.{OF_GEMMA4[name]}"] = prefix + name
                continue
            whole = converters_name(prefix + name)
            stem, _, leaf = whole.rpartition(".")
            has_suffix = leaf in ("weight", "bias")
            tensor = table.get_name(stem if has_suffix else whole)
            if tensor is not None:
                ours = name.replace("linear_attn.A_log", STORED_FADING)
                found[f"{tensor}.{leaf}" if has_suffix else tensor] = prefix + ours
    return found


def config_of(shape: str) -> Any:
    family, fields = SHAPES[shape]
    biases = {"attention_bias": True} if architecture_of(shape) in BIASED else {}
    return AutoConfig.for_model(family, **{**fields, **biases})


def architecture_of(shape: str) -> str:
    family, _ = SHAPES[shape]
    return ARCHITECTURES.get(family, family)


def test_tensors_in_layers_have_the_names_of_the_gguf_package() -> None:
    for shape, (kind, _) in SHAPES.items():
        config, architecture, family = config_of(shape), architecture_of(shape), FAMILIES[kind]
        expected = expected_names(family, config, architecture)
        found = checkpoint_names(architecture, family, spec_of(config), has_mtp=False)
        assert expected.items() <= found.items(), shape
        leaves = {tensor.split(".", 2)[2] for tensor in expected}
        assert {tensor.split(".", 2)[2] for tensor in found if tensor.startswith("blk.")} == leaves, shape
        if shape not in nightly(["llama", "mixtral", "gemma4", "qwen3.5-moe", "gpt-oss"], SHAPES):
            continue
        given = "m", architecture, {"model_type": kind}, spec_of(config)
        tensors = GgufTensors(*given, expected, lambda name: None)
        experts = range(experts_of(config))
        named = {
            name.format(expert): tensor
            for tensor, name in expected.items()
            for expert in (experts if "{}" in name else [0])
        }
        assert {name: tensors.files_of(name) for name in tensors} == {
            name: (tensor,) for name, tensor in named.items()
        }
        with pytest.raises(InputError, match=r"holds blk\.0\.strange\.weight, for which"):
            GgufTensors(*given, [*expected, "blk.0.strange.weight"], lambda name: None)
    assert {architecture_of(shape) for shape in SHAPES} == MODEL_TYPES.keys()


@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("qwen3.5")])
def test_what_was_done_to_tensors_is_taken_back_as_transformers_does(shape: str) -> None:
    """Of Qwen3.5 it knows nothing."""
    config, architecture = config_of(shape), architecture_of(shape)
    processor = TENSOR_PROCESSORS.get(CONVERTED_AS.get(architecture, architecture), TensorProcessor)
    theirs: Any = processor(config=config.to_dict())
    kind, _ = SHAPES[shape]
    generator, family = np.random.default_rng(0), FAMILIES[kind]
    tensors = GgufTensors("m", architecture, {"model_type": kind}, spec_of(config), (), lambda name: None)
    for name in checkpoint_names(architecture, family, spec_of(config), has_mtp=False):
        for size in ((256,), (256, 3)):
            numbers = generator.normal(size=size).astype(np.float32)
            expected = theirs.process(weights=numbers, name=name).weights.reshape(size)
            assert np.array_equal(tensors.undone(numbers, name), expected), name


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_entries_have_the_names_of_transformers(architecture: str) -> None:
    kind = MODEL_TYPES[architecture].removesuffix("_text")
    theirs = GGUF_CONFIG_MAPPING.get(kind, GGUF_CONFIG_MAPPING["llama"])
    expected = {key: name for key, name in theirs.items() if name and key not in READ_OTHERWISE}
    found = {**ours.FIELDS, **ours.ARCHITECTURES[architecture].needed}
    assert all(found[key] in (name, "") for key, name in expected.items())
    defaults = GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {})
    assert defaults == ({"norm_topk_prob": True} if architecture == "qwen3moe" else {})
