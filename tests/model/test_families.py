"""What each family does around its layers and in them, bit for bit, and every feature of a config that is
refused before a weight is read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from flowspec.bench.checkpoints import SMALL, VARIANTS, VOCABULARY_SIZE, make_checkpoint, make_variant
from flowspec.errors import InputError
from flowspec.model import passes
from flowspec.model.arithmetic import plain
from flowspec.model.bridge import tensor_of
from flowspec.model.families import FAMILIES, check_family, decoder_config
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import kernel_of
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.linear_attention import state_shape
from flowspec.model.pieces import Pieces, Span, call_directly
from flowspec.model.products import lanes16
from flowspec.model.slice import Slice
from flowspec.model.spec import context_max
from flowspec.model.support import family_of
from flowspec.model.torch_layers import TorchLayer
from tests.model.slices import (
    CPU,
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

DATA: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/configs.json").read_text())
"""Configs as they are published, as far as fields could matter (of Gemma 4 from memory), and the context that
they can be run with; fields that are refused; and models of other families."""
HALF = (torch.bfloat16, torch.float16)
RARELY = 3
"""Numbers of a test's thousands that the order of a sum may move by a last place."""


def config_of(family: str, **fields: Any) -> Any:
    shape = {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0, **fields}
    return AutoConfig.for_model(family, **shape)


def test_every_family_has_a_variant_that_is_tested() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_norms_are_the_familys_own(name: str) -> None:
    family = FAMILIES[name]
    for dtype in (torch.float32, *HALF):
        norm = family.piece("RMSNorm")(96, eps=1e-5).to(dtype)
        generator = torch.Generator().manual_seed(3)
        norm.weight.data = (1 + 0.5 * torch.randn(96, generator=generator)).to(dtype)
        hidden = (5 * torch.randn((1, 33, 96), generator=generator)).to(dtype)
        with torch.inference_mode():
            expected = norm(hidden)
            call_directly(norm, family, lanes16)
            found = norm(hidden)
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            continue
        # In 16 bits next to nothing of another order of sums is left: on ARM one of these 3,168 numbers lies
        # where it rounds otherwise. Rounding at another place moves hundreds.
        assert (found != expected).sum() <= RARELY
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0.0)


def test_a_norm_of_another_familys_arithmetic_would_be_seen() -> None:
    """Guards the test above: the three kinds differ in bfloat16."""
    hidden = 5 * torch.randn((33, 96), generator=torch.Generator().manual_seed(3)).bfloat16()
    found = []
    for name in ("llama", "olmo2", "gemma2"):
        norm = FAMILIES[name].piece("RMSNorm")(96).bfloat16()
        norm.weight.data = torch.linspace(-0.5, 1.5, 96).bfloat16()
        with torch.inference_mode():
            found.append(norm(hidden))
    assert (found[0] != found[1]).sum() > 100 * RARELY
    assert (found[0] != found[2]).sum() > 100 * RARELY


@pytest.mark.parametrize("dtype", nightly(["bfloat16"], ["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("name", ["gemma2", "gemma3-text", "gemma4-text", "granite"])
def test_embeddings_are_the_plain_models(name: str, dtype: str, tmp_path: Path) -> None:
    """Scales round where transformers rounds them: hidden 72, whose root is no number of bfloat16."""
    family, overrides = VARIANTS[name]
    folder = make_checkpoint(
        tmp_path, family, {**SMALL, "num_hidden_layers": 4, **overrides, "hidden_size": 72}
    )
    part = load_stages(folder, 1, dtype)[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokens = torch.arange(40)
    with torch.inference_mode():
        states = plain(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
        assert torch.equal(part.pieces.embed(tokens), states[0][0])


# ------------------------------------------------------------------------------------------------------
# experts


def test_experts_load_from_either_layout_and_count_the_same(tmp_path: Path) -> None:
    shape = {**SMALL, **VARIANTS["qwen3-moe"][1]}
    apart = make_checkpoint(tmp_path / "apart", "qwen3_moe", shape)
    fused = make_checkpoint(tmp_path / "fused", "qwen3_moe", shape, fused=True)
    names = [set(ModelFiles(str(folder)).weight_map()) for folder in (apart, fused)]
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]
    for span in (Span(first=0, end=2, count=4), Span(first=2, end=4, count=4)):
        parts = [load_foretold(ModelFiles(str(folder)), span) for folder in (apart, fused)]
        weights = [
            [weight for module in part.pieces.loaded for weight in module.parameters()] for part in parts
        ]
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


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
        own = tensor_of(found.load(f"{stem}4.{name}", tuple(expected.shape)))
        assert torch.equal(own, expected)
        assert found.files_of(f"{stem}4.{name}") == (stem + joined,)
        assert files.weight_map()[f"{stem}4.{name}"] == "model.safetensors"
    for span in (Span(first=0, end=2, count=4), Span(first=2, end=4, count=4)):
        load_foretold(files, span)
    rewrite(folder, lambda tensors: tensors.update({stem + "gate_up_proj": both[:5].clone()}))
    with pytest.raises(
        InputError, match=r"layers\.2\.mlp\.experts\.gate_up_proj of .* expected 6 experts and 3 "
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
    tokens = torch.arange(60)
    found = logits_of(load_stages(folder, 1), tokens)
    np.testing.assert_allclose(found, plain_logits(folder, tokens), atol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "qwen3-moe")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.4.up_proj.weight"))
    with pytest.raises(InputError, match=r"has no tensor model\.layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        load(folder, [0, 4])
    Slice.load(ModelFiles(str(folder)), Span(first=0, end=2, count=4), "float32", CPU)  # does without it


# -------------------------------------------------------------------------------------------------
# checkpoints


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_multimodal_gemma_is_found_under_either_name(prefix: str, tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma3")
    tokens = torch.arange(9)
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
    head, tokens = torch.randn(VOCABULARY_SIZE, SMALL["hidden_size"]), torch.arange(20)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    part = load_foretold(ModelFiles(str(folder)), Span(first=0, end=8, count=8))
    np.testing.assert_allclose(logits_of([part], tokens), plain_logits(folder, tokens), atol=2e-4, rtol=1e-4)
    rewrite(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    whole = load(folder, [0, 8])[0]
    assert whole.pieces.embedding is not None
    assert whole.pieces.lm_head is not None
    assert whole.pieces.embedding.weight is whole.pieces.lm_head.weight


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
        Slice.load(ModelFiles(str(folder)), Span(first=2, end=3, count=4), "float32", CPU)  # has none of them


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
        family_of(ModelFiles(str(tmp_path)).config(), "m")
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
    assert family.piece("DecoderLayer").__name__.startswith(family.prefix)
    assert context_max(config) == case["context"]


def test_the_part_of_a_multimodal_model_ties_and_is_quantised_as_the_whole(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma3")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for change, expected in (
        ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "quantised"),
        (
            {"text_config": {**raw["text_config"], "final_logit_softcapping": 30.0}},
            "final_logit_softcapping, which transformers' gemma3 does not",
        ),
        ({"architectures": ["Gemma3Model"]}, "is a Gemma3Model"),
    ):
        path.write_text(json.dumps({**raw, **change}))
        with pytest.raises(InputError, match=expected):
            family_of(ModelFiles(str(folder)).config(), "m")
    path.write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    with pytest.raises(InputError, match=r"has no tensor .*lm_head\.weight"):
        load(folder, [0, 4])


@pytest.mark.parametrize("name", DATA["other families"])
def test_a_model_of_another_family_is_refused_by_name_and_difference(name: str, tmp_path: Path) -> None:
    case = DATA["other families"][name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **case["fields"]}))
    with pytest.raises(InputError) as refusal:
        check_family(ModelFiles(str(tmp_path)).raw_config(), str(tmp_path))
    expected = (
        f"model {str(tmp_path)!r} is of the family {name!r}{case['obstacle']}, but FlowSpec runs gemma2"
    )
    assert str(refusal.value).startswith(expected)


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


FUNCTIONS = {"SiLUActivation": "silu", "SiLU": "silu"}


def slice_of(variant: str, dtype: str = "bfloat16", first: int = 2) -> Slice:
    """Two layers or all of random weights; of layers with and without a window, or turns, both kinds."""
    name, changes = VARIANTS[variant]
    changes = {**SMALL, **changes}
    changes = {"text_config": changes} if FAMILIES[name].part else changes
    config = decoder_config(AutoConfig.for_model(name, **changes), variant)
    end = 4 if first else config.num_hidden_layers
    made = Pieces.build(
        config, FAMILIES[name], Span(first=first, end=end, count=config.num_hidden_layers + 1)
    )
    generator = torch.Generator().manual_seed(1)
    for module in made.loaded:
        module.to_empty(device="cpu").to(getattr(torch, dtype))
        for name, weights in itertools.chain(module.named_parameters(), module.named_buffers()):
            kind = torch.float32 if name.endswith("correction_bias") else getattr(torch, dtype)
            weights.data = (torch.randn(weights.shape, generator=generator) * 0.15).to(kind)
    made.call_directly(kernel_of(dtype, CPU).product)
    return Slice(made, dtype, CPU)


def given_to(part: Slice, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    width = part.spec.hidden + part.carried_width
    return torch.randn((count, width), generator=generator).to(part.dtype)


def run(part: Slice, requests: list[tuple[int, int]]) -> torch.Tensor:
    """What layers give for so many rows each of some requests, behind what they have run."""
    parts = [
        part_of(request, [0] * count, first=first, sampled=np.zeros(count, dtype=np.bool_))
        for request, (first, count) in enumerate(requests)
    ]
    return part.forward(job_of(*parts), given_to(part, sum(count for _, count in requests)))[1]


PROGRAMS = (
    *("llama-grouped", "qwen2-sliding", "qwen3", "mistral-sliding", "gemma2", "smollm3", "granite"),
    *("llama-rope3", "qwen2", "gemma3-text", "phi3-longrope", "olmo2", "lfm2"),
    *("olmoe", "qwen3-moe", "mixtral", "glm4-moe", "gpt-oss", "qwen3.5-text", "qwen3.5-moe"),
    *("gemma4-text", "gemma4-unified-text", "gemma4-mixture"),
)


@pytest.mark.arm
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("variant", PROGRAMS)
def test_programs_give_the_bits_of_their_definition_in_numpy(variant: str, dtype: str) -> None:
    part, rows = slice_of(variant, dtype, first=0), 20
    part.open_cache(0, 64)
    places, tokens = np.arange(rows), [3 * row for row in range(rows)]
    hidden = part.pieces.embed(torch.tensor(tokens)).detach().numpy()
    embedding, family, lags = hidden, part.pieces.family, places[:, None] - places
    held = dict[int, plain.Held]()
    common = {own: name for name, own in family.layer_names.items()}
    for number, layer in enumerate(part.pieces.layers):
        spec = part.spec.layers[number]
        products, norms, vectors = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for own, each in layer.named_modules():
            name = common.get(own, own)
            name = name if name == f"{LAYER_INPUT}.norm" else name[name.rfind(".") + 1 :]
            if hasattr(each, "in_features"):
                products[name] = functools.partial(multiplied, of=each)
            elif hasattr(each, "eps") or hasattr(each, "variance_epsilon"):
                norms[name] = functools.partial(normed, of=each, how=getattr(each, "how", "cast, scale"))
            elif isinstance(each, torch.nn.Conv1d):
                vectors["conv"] = each.weight.detach()[:, 0].float().numpy()
        for name, each in itertools.chain(layer.named_parameters(), layer.named_buffers()):
            leaf = "conv.bias" if name.endswith("conv.bias") else name[name.rfind(".") + 1 :]
            vectors |= {leaf: each.detach().float().numpy()} if each.dim() == 1 else {}
        if "A_log" in vectors:
            vectors["fading"] = plain.exp(vectors["A_log"])
        modules = {name[name.rfind(".") + 1 :]: each for name, each in layer.named_modules()}
        router, experts = modules.get("router", modules.get("gate")), list[dict[str, Any]]()
        if router is not None:
            kind = "f4" if family.router == "sigmoid" else dtype
            products["gate"] = functools.partial(routed, router=router, kind=kind)
            stacks = dict(modules["experts"].named_parameters())
            for place in range(spec.dense.mixture.experts):
                stack = {name: each[place] for name, each in stacks.items()}
                experts.append({name: functools.partial(multiplied, of=stack, name=name) for name in EXPERTS})
        token = plain.Token(embedding)
        if spec.dense.input_width:
            own = modules[LAYER_INPUT]
            factor = torch.tensor(own.table_scale).to(part.dtype).item()
            token = plain.Token(embedding, own.table.weight.detach().numpy()[tokens], factor)
        kind = f"{part.config.layer_types[number]}_" if family.rotary_by_layer_type else ""
        turns = getattr(part.pieces.rotary, f"{kind}inv_freq").float().numpy()
        scale = np.float32(getattr(part.pieces.rotary, f"{kind}attention_scaling"))
        angles = plain.angles(places[None], turns, scale, hidden.dtype)
        seen = held[number] = plain.Held(
            dense=spec.dense,
            keys=np.zeros((spec.kv.count, 4, spec.kv.width, 16), hidden.dtype),
            values=np.zeros((spec.kv.count, 64, spec.kv.width), hidden.dtype),
            slots=places,
            paths=np.where((lags >= 0) & (lags < (spec.window or rows)), places, -1),
            inputs=np.zeros((64, spec.inputs), hidden.dtype),
            lines=np.maximum(places[:, None] - np.arange(spec.window)[::-1], -1),
            states=np.zeros((1, *state_shape(part.config)), np.float32) if spec.state else None,
            steps=np.stack([places, 0 * places, 0 * places, places], 1),
        )
        if spec.source != number:
            seen.keys, seen.values = held[spec.source].keys, held[spec.source].values
        parts = plain.Parts(products=products, norms=norms, vectors=vectors, experts=experts)
        hidden = plain.layer(spec, parts, hidden, angles, seen, token)
    job = job_of(part_of(0, tokens, sampled=np.zeros(rows, dtype=np.bool_)))
    assert np.array_equal(part.forward(job, None)[1].numpy(), hidden)


def normed(rows: np.ndarray, of: Any, how: Any) -> np.ndarray:
    weight = of.weight.detach().numpy() if "weight" in of._parameters else np.ones(rows.shape[-1], rows.dtype)
    return plain.norm(rows, weight, of.variance_epsilon if hasattr(of, "variance_epsilon") else of.eps, how)


EXPERTS = ("gate_up_proj", "down_proj")


def multiplied(rows: np.ndarray, of: Any, name: str = "") -> np.ndarray:
    """By a layer, or by an expert's weights, in the precision of what is given, rounded once."""
    weight, bias = (of[name], of.get(f"{name}_bias")) if name else (of.weight, of.bias)
    found = plain.lanes_product(rows, weight.detach().numpy())
    return (found if bias is None else found + bias.detach().numpy()).astype(rows.dtype)


def routed(rows: np.ndarray, router: Any, kind: str) -> np.ndarray:
    bias = getattr(router, "bias", None)
    if hasattr(router, "proj"):  # Gemma 4's
        rows = plain.norm(rows, router.scale.detach().numpy(), router.norm.eps, "cast, scale")
        rows = (rows.astype(np.float32) * np.float32(router.scalar_root_size)).astype(rows.dtype)
        router = router.proj
    found = plain.product(rows.astype(np.float32), router.weight.detach().float().numpy())
    return (found if bias is None else found + bias.detach().float().numpy()).astype(kind)


@pytest.mark.parametrize("variant", PROGRAMS)
def test_layers_by_torch_have_the_bits_of_programs(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs compute them, here with the same products."""
    first = slice_of(variant)
    monkeypatch.setattr(passes, "_is_on_cpu", lambda module: False)
    end = slice_of(variant)
    assert {type(layer) for layer in end.layers} == {TorchLayer}
    for part in (first, end):
        part.open_cache(0, 64)
        part.open_cache(1, 64)
    for requests in ([(0, 20), (0, 3)], [(20, 1)], [(21, 2), (3, 1)]):
        assert torch.equal(run(first, requests), run(end, requests))
