"""What each family does around its layers and in them, bit for bit, and every feature of a config that is
refused before a weight is read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from flowspec.core.protocol.model_spec import NORMS, DeltaRule
from flowspec.core.protocol.precision import ACTIVATIONS, FILED
from flowspec.errors import InputError
from flowspec.model import gpu
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import DTYPES, narrowed
from flowspec.model.cpu import Cpu
from flowspec.model.engines import Engine
from flowspec.model.families import FAMILIES, check_family, decoder_config
from flowspec.model.files import ModelFiles
from flowspec.model.gpu import CudaLibrary, Gpu, array_of, tensor_of
from flowspec.model.layer import MATRICES, Layer, NormPart, Plain
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.slice import Slice, embedded
from flowspec.model.spec import context_max, family_of, spec_of
from flowspec.model.weights import EMBEDDING, LM_HEAD, SliceParts, Span, arrays_of, load_parts
from tests import ggufs
from tests.checkpoints import SMALL, VARIANTS, VOCABULARY_SIZE, make_checkpoint, make_variant
from tests.model import definition
from tests.model.defined_products import DefinedRows, lanes_product
from tests.model.fake_gpu import OnHost
from tests.model.functions import multiplied
from tests.model.slices import (
    assert_faithful,
    job_of,
    load,
    load_foretold,
    load_stages,
    logits_of,
    part_of,
    plain_logits,
    rewrite,
)
from tests.nightly import nightly
from tests.specs import class_of

DATA: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/configs.json").read_text())
"""Configs as they are published, as far as fields could matter (of Gemma 4 from memory), and the context that
they can be run with; and fields that are refused."""


def config_of(family: str, **fields: Any) -> Any:
    shape = {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0, **fields}
    return AutoConfig.for_model(family, **shape)


def test_every_family_has_a_variant_that_is_tested() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_norms_are_the_familys_own(name: str) -> None:
    """By weights, or by 1 + weights: the other would be seen."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(3)
    norm = class_of(family, "RMSNorm")(96, eps=1e-5)
    norm.weight.data = 1 + 0.5 * torch.randn(96, generator=generator)
    hidden = 5 * torch.randn((33, 96), generator=generator)
    with torch.inference_mode():
        expected = norm(hidden).numpy()
    part = NormPart(weights=array_of(norm.weight), eps=1e-5)
    for how in NORMS:
        found = Cpu("float32", how).rows(norm=part)(hidden.numpy())
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-6) == (how == family.norm)


@pytest.mark.parametrize("dtype", nightly(["bfloat16"], ["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("name", ["gemma2", "gemma3-text", "gemma4-text", "granite"])
def test_embeddings_are_the_plain_models(name: str, dtype: str, tmp_path: Path) -> None:
    """In float32, and rounded once: hidden 72, whose root is no number of bfloat16."""
    family, overrides = VARIANTS[name]
    shape = {**SMALL, "num_hidden_layers": 4, **overrides, "hidden_size": 72}
    folder, tokens = make_checkpoint(tmp_path, family, shape), np.arange(40)
    part = load_stages(folder, 1, dtype)[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    table = plain.get_input_embeddings().weight
    table.data = table.to(getattr(torch, dtype)).float()
    given = {"input_ids": torch.from_numpy(tokens)[None], "use_cache": False, "output_hidden_states": True}
    with torch.inference_mode():
        expected = plain(**given).hidden_states[0][0].numpy()
    found = embedded(part.engine, part.spec, part.parts[EMBEDDING], tokens)
    assert np.array_equal(found, narrowed(expected, dtype))


# ------------------------------------------------------------------------------------------------------
# experts


def test_experts_load_from_either_layout_and_count_the_same(tmp_path: Path) -> None:
    shape = {**SMALL, **VARIANTS["qwen3-moe"][1]}
    apart = make_checkpoint(tmp_path / "apart", "qwen3_moe", shape)
    fused = make_checkpoint(tmp_path / "fused", "qwen3_moe", shape, fused=True)
    names = [set(ModelFiles(str(folder)).tensors()) for folder in (apart, fused)]
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]
    for span in (Span(first=0, end=2, count=4), Span(first=2, end=4, count=4)):
        parts = [load_foretold(ModelFiles(str(folder)), span) for folder in (apart, fused)]
        weights = [[*arrays_of(part.parts)] for part in parts]
        assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))


def test_experts_in_one_tensor_have_the_names_of_single_ones_and_their_values(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gpt-oss")
    tensors, files = load_file(folder / "model.safetensors"), ModelFiles(str(folder))
    stem, found = "model.layers.2.mlp.experts.", files.tensors()
    assert set(tensors) - set(found) == {name for name in tensors if ".experts." in name}
    both, biases = tensors[stem + "gate_up_proj"], tensors[stem + "gate_up_proj_bias"]
    for name, expected, joined in (
        ("gate_proj.weight", both[4, :, ::2].T, "gate_up_proj"),
        ("up_proj.weight", both[4, :, 1::2].T, "gate_up_proj"),
        ("down_proj.weight", tensors[stem + "down_proj"][4].T, "down_proj"),
        ("gate_proj.bias", biases[4, ::2], "gate_up_proj_bias"),
        ("up_proj.bias", biases[4, 1::2], "gate_up_proj_bias"),
        ("down_proj.bias", tensors[stem + "down_proj_bias"][4], "down_proj_bias"),
    ):
        assert np.array_equal(found.load(f"{stem}4.{name}", tuple(expected.shape)), expected.numpy())
        assert found.files_of(f"{stem}4.{name}") == (stem + joined,)
        assert f"{stem}4.{name}" in files.tensors()
    for span in (Span(first=0, end=2, count=4), Span(first=2, end=4, count=4)):
        load_foretold(files, span)
    rewrite(folder, lambda tensors: tensors.update({stem + "gate_up_proj": both[:5].clone()}))
    with pytest.raises(
        InputError, match=r"layers\.2\.mlp\.experts\.gate_up_proj of .* expected 6 experts by "
    ):
        load(folder, [0, 4])


@pytest.mark.parametrize("limit", [0.3, 7.0])
def test_a_limit_of_experts_is_obeyed_or_refused(limit: float, tmp_path: Path) -> None:
    shape = {**SMALL, **VARIANTS["gpt-oss"][1], "swiglu_limit": limit}
    folder = make_checkpoint(tmp_path, "gpt_oss", shape)
    config = ModelFiles(str(folder)).config()
    if limit != 7 and "swiglu_limit" not in {field.name for field in dataclasses.fields(config)}:
        with pytest.raises(InputError, match=r"sets swiglu_limit to 0\.3"):  # an older transformers
            family_of(config, "m")
        return
    tokens = np.arange(60)
    found = logits_of(load_stages(folder, 1), tokens)
    np.testing.assert_allclose(found, plain_logits(folder, tokens), atol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "qwen3-moe")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.4.up_proj.weight"))
    with pytest.raises(InputError, match=r"has no tensor model\.layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        load(folder, [0, 4])
    Slice.load(ModelFiles(str(folder)), Span(first=0, end=2, count=4), "float32")  # does without it


# -------------------------------------------------------------------------------------------------
# checkpoints


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_multimodal_gemma_is_found_under_either_name(prefix: str, tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma3")
    tokens = np.arange(9)
    expected = logits_of(load(folder, [0, 4]), tokens)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("language_model.model.", prefix)] = tensors.pop(name)

    rewrite(folder, rename)
    assert np.array_equal(logits_of(load(folder, [0, 4]), tokens), expected)
    raw = ModelFiles(str(folder)).raw_config()
    assert (raw["model_type"], raw["num_hidden_layers"]) == ("gemma3", 4)
    assert check_family(raw, "m").part == "text_config"


def test_a_head_of_its_own_counts_where_the_config_ties_it(tmp_path: Path) -> None:
    """As in transformers, which does not tie what a checkpoint holds twice with different values."""
    folder = make_variant(tmp_path, "llama-tied")
    head, tokens = torch.randn(VOCABULARY_SIZE, SMALL["hidden_size"]), np.arange(20)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    part = load_foretold(ModelFiles(str(folder)), Span(first=0, end=8, count=8))
    np.testing.assert_allclose(logits_of([part], tokens), plain_logits(folder, tokens), atol=2e-4, rtol=1e-4)
    rewrite(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    whole = load(folder, [0, 8])[0]
    assert whole.parts[EMBEDDING].weights is whole.parts[LM_HEAD].matrices[0].weights


def test_tensors_that_nothing_would_use_are_refused(tmp_path: Path) -> None:
    """Attention sinks, biases, scales: transformers leaves them out with no more than a warning."""
    folder = make_variant(tmp_path, "phi3")
    path = folder / "model.safetensors"
    tensors = load_file(path) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    layer = "model.layers.1.self_attn."
    for name in (f"{layer}q_proj.bias", f"{layer}sinks", "lm_head.bias", "model.norm.bias"):
        save_file({**tensors, name: torch.ones(4)}, path)
        with pytest.raises(InputError, match=f"holds {re.escape(name)}, for which"):
            load(folder, [0, 4])
        Slice.load(ModelFiles(str(folder)), Span(first=2, end=3, count=4), "float32")  # has none of them


@pytest.mark.parametrize("name", ["qwen3", "glm4-moe"])
def test_layers_that_the_config_does_not_count_are_refused_but_for_mtp(name: str, tmp_path: Path) -> None:
    folder = make_variant(tmp_path, name)
    path, count = folder / "model.safetensors", ModelFiles(str(folder)).raw_config()["num_hidden_layers"]
    tensors, last = load_file(path), f"model.layers.{count}."
    tensors = {each: value for each, value in tensors.items() if not each.startswith(last)}
    more = {f"{last}input_layernorm.weight": torch.ones(4)}
    told = f"num_hidden_layers: expected {count + 1}, .* layers 0 to {count}, got {count}$"
    for mtp, is_refused in ({}, True), ({f"{last}eh_proj.weight": torch.ones(4)}, name == "qwen3"):
        save_file({**tensors, **more, **mtp}, path)
        with pytest.raises(InputError, match=told) if is_refused else contextlib.nullcontext():
            load(folder, [0, count])


# ----------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.filterwarnings("ignore")  # transformers, too, has something to say about some of these
@pytest.mark.parametrize("case", DATA["refused"].values(), ids=DATA["refused"])
def test_what_would_change_the_arithmetic_is_refused_with_its_reason(
    case: dict[str, Any], tmp_path: Path
) -> None:
    config = {"model_type": case["family"], **SMALL, "num_hidden_layers": 4, "pad_token_id": 0}
    config |= case["fields"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=case["expected"]) as caught:
        _ = ModelFiles(str(tmp_path)).spec
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"sliding_window": 512, "layer_types": ["full_attention"] * 4, "logit_scale": 1.0}),
        ("llama", {"architectures": ["LLaMAForCausalLM"], "partial_rotary_factor": 1.0}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma3_text", {"architectures": ["Gemma3ForCausalLM"]}),
        ("gemma4_text", {"architectures": ["Gemma4ForCausalLM"], "use_bidirectional_attention": "vision"}),
    ],
)
def test_what_changes_nothing_is_let_pass(family: str, fields: dict[str, Any]) -> None:
    assert family_of(config_of(family, **fields), "m") is FAMILIES[family]


@pytest.mark.parametrize("name", DATA["published"])
def test_published_configs_are_run(name: str, tmp_path: Path) -> None:
    case = DATA["published"][name]
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 16, **case["config"]}))
    config = ModelFiles(str(tmp_path)).config()
    family = family_of(config, name)
    assert class_of(family, "DecoderLayer").__name__.startswith(family.prefix)
    assert context_max(config) == case["context"]


def test_the_part_of_a_multimodal_model_ties_and_is_quantised_as_the_whole(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma3")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for change, expected in (
        ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "quantised"),
        (
            {"text_config": {**raw["text_config"], "final_logit_softcapping": 30.0}},
            "sets final_logit_softcapping to 30.0, but FlowSpec runs gemma3 with null",
        ),
        ({"architectures": ["Gemma3Model"]}, "is a Gemma3Model"),
    ):
        path.write_text(json.dumps({**raw, **change}))
        with pytest.raises(InputError, match=expected):
            family_of(ModelFiles(str(folder)).config(), "m")
    path.write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    with pytest.raises(InputError, match=r"has no tensor .*lm_head\.weight"):
        load(folder, [0, 4])


@pytest.mark.parametrize(
    ("variant", "field", "value"),
    [
        ("qwen3", "hidden_activation", "gelu_pytorch_tanh"),
        ("qwen3-moe", "n_group", 2),
        ("mixtral", "topk_group", 2),
        ("qwen3.5", "hidden_act", "relu"),
    ],
)
def test_a_field_that_the_family_does_not_compute_is_refused(
    variant: str, field: str, value: object, tmp_path: Path
) -> None:
    folder = make_variant(tmp_path, variant)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.get("text_config", raw)[field] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=field):
        family_of(ModelFiles(str(folder)).config(), "m")


def test_an_assistant_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    with pytest.raises(InputError, match=r"'gemma4_assistant', .* name that one, and this as --drafter, but"):
        ModelFiles(str(tmp_path)).raw_config()


def test_no_family_of_transformers_is_refused_for_a_field_that_it_calls_something_else(
    tmp_path: Path,
) -> None:
    for name in sorted(set(CONFIG_MAPPING_NAMES) - set(FAMILIES))[:: nightly(8, 1)]:
        for fields in (
            {},
            {"num_hidden_layers": [4]},
            {"text_config": {"num_hidden_layers": 4}},
            {"architectures": 5, "layer_types": 7, "text_config": {"model_type": 3, "layer_types": None}},
            {"architectures": [[]], "num_layers": 4},
        ):
            (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **fields}))
            with pytest.raises(InputError, match=re.escape(f"is of the family {name!r}")):
                ModelFiles(str(tmp_path)).raw_config()


# ------------------------------------------------------------------------------------------- layers


def config_of_variant(name: str, **fields: Any) -> Any:
    family, changes = VARIANTS[name]
    changes = {**SMALL, **changes, **fields}
    changes = {"text_config": changes} if FAMILIES[family].part else changes
    return decoder_config(AutoConfig.for_model(family, **changes), name)


BIASES = [
    {"attention_bias": True, "mlp_bias": True, "conv_bias": True},
    {"attention_bias": False, "mlp_bias": False, "conv_bias": False},
]


@pytest.mark.parametrize("biases", [{}, *BIASES], ids=["as it is", "biases", "none"])
@pytest.mark.parametrize("name", VARIANTS)
def test_layers_have_the_parameters_of_transformers(name: str, biases: dict[str, bool]) -> None:
    config = config_of_variant(name, **biases)
    spec, family = spec_of(config), FAMILIES[config.model_type]
    for number, own in enumerate(spec.layers):
        with torch.device("meta"):
            layer = class_of(family, "DecoderLayer")(config, number)
        is_own, rows = own.source == number, spec.layer_input_tokens
        shape = Layer(spec=own, family=family, hidden=spec.hidden, is_own=is_own, table_rows=rows)
        expected = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
        if family.joins_experts:  # whose inputs come first
            joined = {name: shape for name, shape in expected.items() if len(shape) == 3}
            expected |= {name: (count, outputs, inputs) for name, (count, inputs, outputs) in joined.items()}
        found = {name: each.shape for name, each in shape.parameters().items()}
        for name in [name for name in found if name.startswith("layer_input.")]:
            del found[name]  # files have them of all layers
        assert found == expected
        constants = {
            getattr(each, "eps", getattr(each, "variance_epsilon", None)) for each in layer.modules()
        }
        assert constants <= {spec.eps, None}


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_rounded_finely_for_values_and_states(name: str) -> None:
    made = ["self_attn.v_proj", "self_attn.k_proj", "self_attn.qkv_proj", "conv.in_proj"]
    made += ["linear_attn.in_proj_qkv"]
    config = config_of_variant(name)
    spec, family = spec_of(config), FAMILIES[config.model_type]
    for number, own in enumerate(spec.layers):
        places = Layer(
            spec=own, family=family, hidden=spec.hidden, is_own=own.source == number, table_rows=1
        ).places
        expected = [part for part in made if part in places][:1]
        assert [part for part, (_, shape) in places.items() if shape.is_fine] == expected
        assert len(expected) == (own.source == number)


@pytest.mark.parametrize("name", VARIANTS)
def test_position_embeddings_are_those_of_transformers(name: str) -> None:
    """A power may be off by a last place there."""
    config = config_of_variant(name)
    spec, family = spec_of(config), FAMILIES[config.model_type]
    theirs = class_of(family, "RotaryEmbedding")(config=config)
    for number, own in enumerate(spec.layers):
        kind, rotary = "", spec.rotaries[own.rotary]
        if family.rotary_by_layer_type:
            kind = f"{config.layer_types[number]}_"
        found, expected = np.array(rotary.frequencies, np.float32), getattr(theirs, f"{kind}inv_freq").numpy()
        assert found.shape == expected.shape
        places = np.abs(found.view(np.int32).astype(np.int64) - expected.view(np.int32))
        assert places.max() <= 1
        assert rotary.scale == getattr(theirs, f"{kind}attention_scaling")


def slice_of(name: str, dtype: str, engine: Callable[[Any], Engine]) -> Slice:
    """All layers but the last norm, of random weights."""
    config = config_of_variant(name)
    spec, family, generator = spec_of(config), FAMILIES[config.model_type], np.random.default_rng(1)
    found = engine(spec)

    def values(shape: tuple[int, ...], role: str) -> Any:
        numbers = generator.standard_normal(shape, np.float32) * np.float32(0.15)
        held = found.array(narrowed(numbers, dtype) if role in MATRICES else numbers)
        if role == "experts":
            return tuple((Plain(each),) for each in held)
        return (Plain(held),) if role == "matrix" else held

    parts: dict[Any, Any] = {EMBEDDING: Plain(values((spec.vocabulary, spec.hidden), "table"))}
    for number, own in enumerate(spec.layers):
        is_own, rows = own.source == number, spec.layer_input_tokens
        shape = Layer(spec=own, family=family, hidden=spec.hidden, is_own=is_own, table_rows=rows)
        given = {key: values(each.shape, each.role) for key, each in shape.parameters().items()}
        parts[number] = shape.parts(given, spec.eps, found)
    count = len(spec.layers)
    return Slice(spec, Span(first=0, end=count, count=count + 1), SliceParts(parts), found, dtype)


def run(part: Slice, requests: list[tuple[int, int]]) -> np.ndarray:
    """What layers give for so many rows each of some requests, behind what they have run."""
    parts = [
        part_of(
            request,
            [7 * row % 97 + request for row in range(first, first + count)],
            first=first,
            sampled=np.zeros(count, dtype=np.bool_),
        )
        for request, (first, count) in enumerate(requests)
    ]
    return np.asarray(part.engine.numpy(part.forward(job_of(*parts), None)[1]))


@pytest.mark.arm
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_programs_give_the_bits_of_their_definition_in_numpy(name: str, dtype: str) -> None:
    part, rows = slice_of(name, dtype, lambda spec: Cpu(dtype, spec.norm)), 20
    part.open_cache(0, 64)
    places, tokens = np.arange(rows), 3 * np.arange(rows)
    embedding = hidden = embedded(part.engine, part.spec, part.parts[EMBEDDING], tokens)
    lags, held = places[:, None] - places, dict[int, plain.Held]()
    for number, spec in enumerate(part.spec.layers):
        assert spec.dense is not None
        mixer, rotary = spec.dense.mixer, part.spec.rotaries[spec.rotary]
        state = (mixer.heads, mixer.key_width, mixer.value_width) if isinstance(mixer, DeltaRule) else (0,)
        turns = np.array(rotary.frequencies, np.float32)
        keys = np.zeros((spec.kv.count, 4, spec.kv.width, 16), hidden.dtype)
        held[number] = keys, np.zeros((spec.kv.count, 64, spec.kv.width), hidden.dtype), None
        held[number] = held[spec.source]
        rows_of = DefinedRows(
            dense=spec.dense,
            angles=plain.angles(places[None], turns, rotary.scale),
            held=held[number],
            slots=places,
            paths=np.where((lags >= 0) & (lags < (spec.window or rows)), places, -1),
            inputs=np.zeros((64, spec.inputs), hidden.dtype),
            lines=np.maximum(places[:, None] - np.arange(spec.window)[::-1], -1),
            states=np.zeros((1, *state), np.float32),
            steps=np.stack([places, 0 * places, 0 * places, places], 1),
            embedding=embedding,
            tokens=tokens,
        )
        parts = part.parts[number]
        how = part.spec.norm, lanes_product, part.spec.sources.count(number) > 1
        hidden = definition.layer_of(spec, parts, *how).run(hidden, rows_of)
    job = job_of(part_of(0, tokens.tolist(), sampled=np.zeros(rows, dtype=np.bool_)))
    assert np.array_equal(part.forward(job, None)[1][:, : part.spec.hidden], hidden)


def multiplied_there(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return tensor_of(multiplied(array_of(x), Plain(array_of(weights))))


@pytest.mark.parametrize("dtype", nightly(["bfloat16"], DTYPES))
@pytest.mark.parametrize("name", VARIANTS)
def test_torch_computes_layers_with_the_bits_of_programs(
    name: str, dtype: str, host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, with our kernels and without, here with the same products."""
    monkeypatch.setattr(gpu, "in_blocks", multiplied_there)
    programs = slice_of(name, dtype, lambda spec: Cpu(dtype, spec.norm))
    engines = [Gpu(dtype, "torch-in-blocks", programs.spec.norm, "cpu") for _ in range(2)]
    engines[1].ops = CudaLibrary(host.start)
    torchs = [slice_of(name, dtype, lambda spec, own=own: own) for own in engines]
    for part in (programs, *torchs):
        part.open_cache(0, 64)
        part.open_cache(1, 64)
    for requests in ([(0, 20), (0, 3)], [(20, 1)], [(21, 2), (3, 1)]):
        expected = run(programs, requests)
        assert all(np.array_equal(run(part, requests), expected) for part in torchs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in nightly(sorted(VARIANTS)[::3], VARIANTS)),
        *((name, dtype) for name in nightly(["glm4-moe"], ["glm4-moe", "gemma4"]) for dtype in ROUNDINGS),
        ("gguf", FILED),
    ],
)
def test_whole_models_by_torch_are_faithful(
    name: str, dtype: str, variant: Callable[[str], Path], tmp_path: Path
) -> None:
    if dtype == FILED:
        path = ggufs.convert(ggufs.make(tmp_path / "checkpoint", "gemma4"), tmp_path / "m.gguf", ggufs.KEPT)
    else:
        path = variant(name)
    files, tokens = ModelFiles(str(path)), np.arange(40)
    count = len(files.spec.layers)
    span, engine = Span(first=0, end=count, count=count), Gpu(dtype, "plain", files.spec.norm, "cpu")
    parts = load_parts(files.spec, span, files.tensors(), dtype, engine)
    part = Slice(files.spec, span, parts, engine, ACTIVATIONS[dtype])
    if dtype == "float32":
        expected = logits_of(load_stages(path, 1, dtype), tokens)
        np.testing.assert_allclose(logits_of([part], tokens), expected, atol=2e-4, rtol=1e-4)
    else:
        assert_faithful(path, dtype, part)
