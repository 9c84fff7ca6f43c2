"""What each family does around its layers, bit for bit, and every feature of a config that is refused before
a weight is read.

Over 400 lines, for a good part are excerpts of published models' configs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.glm import modeling_glm

from flowspec.bench.checkpoints import SMALL, VARIANTS, VOCABULARY_SIZE, make_checkpoint, make_variant
from flowspec.core.protocol.messages import Sampling
from flowspec.core.stage.events import JobPart, RunLayers
from flowspec.errors import InputError
from flowspec.model import pieces
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.operations import turned, turned_alone
from flowspec.model.experts import row_experts
from flowspec.model.families import FAMILIES, check_family
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Pieces, Span, call_directly
from flowspec.model.products import filled
from flowspec.model.reference import Reference
from flowspec.model.safetensors_file import SafetensorsTensors
from flowspec.model.slice import Slice
from flowspec.model.support import context_max, family_of
from flowspec.model.weights import fill
from flowspec.runtime.loading import slice_memory
from tests.model.slices import CPU, assert_faithful, load, load_stages

ROPE = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GEMMA4: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
HALF = [torch.bfloat16, torch.float16]
RARELY = 3
"""Numbers of a test's thousands that the order of a sum may move by a last place."""


def config_of(family: str, **fields: Any) -> Any:
    shape = {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0, **fields}
    return AutoConfig.for_model(family, **shape)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_queries_and_keys_are_turned_by_our_own_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a family's own code."""
    monkeypatch.setattr(pieces, "in_fewer_calls", lambda *_: None)
    config = config_of(name)
    module = FAMILIES[name].piece("Attention")(getattr(config, FAMILIES[name].part or "", config), 0)
    own = type(module).forward
    call_directly(module, FAMILIES[name])
    assert type(module).__call__ is not own
    assert type(module).__call__.__globals__["apply_rotary_pos_emb"] in (turned, turned_alone)


def test_a_function_that_stands_in_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from 5.24 on, where one that renames an argument is around each."""
    kind = FAMILIES["llama"].piece("Attention")
    inner = inspect.unwrap(kind.forward)

    @functools.wraps(inner)
    def renaming(*given: Any, **named: Any) -> Any:
        return inner(*given, **named)

    monkeypatch.setattr(kind, "forward", renaming)
    monkeypatch.setattr(pieces, "in_fewer_calls", lambda *_: None)
    module = kind(config_of("llama"), 0)
    call_directly(module, FAMILIES["llama"])
    assert type(module).__call__.__globals__["apply_rotary_pos_emb"] is turned


def test_a_family_that_turns_otherwise_keeps_its_own_function() -> None:
    config = AutoConfig.for_model("glm", **SMALL, head_dim=16)  # turns neighbours
    module = modeling_glm.GlmAttention(config, 0)
    own = type(module).forward
    call_directly(module, replace(FAMILIES["llama"], module="glm", prefix="Glm"))
    assert type(module).__call__ is own


def test_silu_is_our_own_where_a_layer_calls_torchs() -> None:
    family = FAMILIES["lfm2"]
    module = family.piece("MLP")(config_of("lfm2"))
    call_directly(module, family)
    x = 3 * torch.randn((5, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = module.w2(plain.silu(module.w1(x)) * module.w3(x))
        assert torch.equal(module(x), expected)
    assert type(module).__call__.__globals__["F"] is not torch.nn.functional


def test_every_family_has_a_variant_that_is_tested() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_norms_are_the_familys_own(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    norm = family.piece("RMSNorm")(96, eps=1e-5).to(dtype)
    generator = torch.Generator().manual_seed(3)
    norm.weight.data = (1 + 0.5 * torch.randn(96, generator=generator)).to(dtype)
    hidden = (5 * torch.randn((1, 33, 96), generator=generator)).to(dtype)
    with torch.inference_mode():
        expected = norm(hidden)
        call_directly(norm, family)
        found = norm(hidden)
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            return
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3-text", "gemma4-text", "granite", "llama-tied"])
def test_embeddings_and_logits_are_the_plain_models(name: str, dtype: str, tmp_path: Path) -> None:
    """Scales round where transformers rounds them: hidden 72, whose root is no number of bfloat16."""
    family, overrides = VARIANTS[name]
    folder = make_checkpoint(
        tmp_path, family, {**SMALL, "num_hidden_layers": 4, **overrides, "hidden_size": 72}
    )
    part = load_stages(folder, 1, dtype)[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokens = torch.arange(40)
    with torch.inference_mode():
        out = plain.model(input_ids=tokens[None], use_cache=False)
        states = plain(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
        assert torch.equal(part.pieces.embed(tokens), states[0][0])
        last = torch.randn((5, 72), generator=torch.Generator().manual_seed(1)).to(
            out.last_hidden_state.dtype
        )
        expected = plain_logits(plain, last)
        near = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        torch.testing.assert_close(part.pieces.logits(last), expected, rtol=near, atol=near)


def plain_logits(plain: Any, last: torch.Tensor) -> torch.Tensor:
    """What the whole plain model makes of the last layer's output, by putting it in place of that output."""
    handle = plain.model.layers[-1].register_forward_hook(lambda module, args, output: last[None])
    logits: torch.Tensor = plain(input_ids=torch.arange(len(last))[None], use_cache=False).logits[0]
    handle.remove()
    return logits


@pytest.mark.parametrize(
    "name", sorted(set(VARIANTS) - {"llama-tied", "llama-rope3", "qwen2-sliding", "phi3-longrope"})
)
def test_in_bfloat16_slices_are_faithful_to_the_plain_model(name: str, tmp_path: Path) -> None:
    assert_faithful(make_variant(tmp_path, name), "bfloat16")


def test_the_reference_caps_scores_where_the_model_does(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma2")
    plain: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = tuple(range(3, 43))
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()
    found = Reference(ModelFiles(str(folder)), "float32").forced_logits(prompt, [])[-1]
    np.testing.assert_allclose(found, expected, atol=1e-4)


# ------------------------------------------------------------------------------------------------------
# experts


def chain(part: Slice, request: int, tokens: torch.Tensor) -> RunLayers:
    """A job that runs tokens as one text."""
    count = len(tokens)
    part.open_cache(request, 100)
    rows = JobPart(
        request=request,
        slots=np.arange(count),
        tokens=tokens.numpy(),
        positions=np.arange(count),
        key_positions=np.arange(count, dtype=np.int32),
        visible=np.tril(np.ones((count, count), dtype=bool)),
        sampled=np.ones(count, dtype=bool),
        sampling=Sampling(),
    )
    return RunLayers(job=0, parts=(rows,), payload=None, rows=tuple(range(count)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_experts_do_not_depend_on_the_other_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of("qwen3_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40)
    config._experts_implementation = "eager"
    block = FAMILIES["qwen3_moe"].piece("Experts")(config).to(dtype)
    generator = torch.Generator().manual_seed(5)
    for weight in block.parameters():
        weight.data.normal_(std=0.2, generator=generator)
    hidden = torch.randn((23, 64), generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(23)])
    shares = torch.rand((23, 3), generator=generator).to(dtype)
    block.__dict__["product"] = filled
    with torch.inference_mode():
        together = row_experts(block, hidden, chosen, shares)
        for row in range(23):
            own = slice(row, row + 1)
            assert torch.equal(together[own], row_experts(block, hidden[own], chosen[own], shares[own]))
            torch.testing.assert_close(together[own], block(hidden[own], chosen[own], shares[own]))


def test_experts_load_from_either_layout_and_count_the_same(tmp_path: Path) -> None:
    shape = {**SMALL, **VARIANTS["qwen3-moe"][1]}
    apart = make_checkpoint(tmp_path / "apart", "qwen3_moe", shape)
    fused = make_checkpoint(tmp_path / "fused", "qwen3_moe", shape, fused=True)
    names = [set(ModelFiles(str(folder)).weight_map()) for folder in (apart, fused)]
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]
    for span in (Span(first=0, end=2, count=4), Span(first=2, end=4, count=4)):
        parts = [Slice.load(ModelFiles(str(folder)), span, "float32", CPU) for folder in (apart, fused)]
        weights = [
            [weight for module in part.pieces.loaded for weight in module.parameters()] for part in parts
        ]
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
        for folder, part in zip((apart, fused), parts, strict=True):
            assert (
                slice_memory(ModelFiles(str(folder)), span, "float32", 100).weight_bytes == part.weight_bytes
            )


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
        assert torch.equal(found.load(f"{stem}4.{name}", tuple(expected.shape)), expected)
        assert found.files_of(f"{stem}4.{name}") == (stem + joined,)
        assert files.weight_map()[f"{stem}4.{name}"] == "model.safetensors"
    for span in (Span(first=0, end=2, count=4), Span(first=2, end=4, count=4)):
        part = Slice.load(files, span, "float32", CPU)
        assert slice_memory(files, span, "float32", 100).weight_bytes == part.weight_bytes
    tensors[stem + "gate_up_proj"] = both[:5].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
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
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    part, tokens = load_stages(folder, 1)[0], torch.arange(60)
    _, states = part.forward(chain(part, 1, tokens), None)
    with torch.inference_mode():
        expected = plain(input_ids=tokens[None], use_cache=False).logits[0]
    np.testing.assert_allclose(part.logits(states), expected.numpy(), atol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "qwen3-moe")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.mlp.experts.4.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"has no tensor model\.layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        load(folder, [0, 4])
    Slice.load(ModelFiles(str(folder)), Span(first=0, end=2, count=4), "float32", CPU)  # does without it


# -------------------------------------------------------------------------------------------------
# checkpoints


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_multimodal_gemma_is_found_under_either_name(prefix: str, tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma3")
    expected = load(folder, [0, 4])[0]
    path = folder / "model.safetensors"
    tensors = {
        name.replace("language_model.model.", prefix): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    found = load(folder, [0, 4])[0]
    tokens = torch.arange(9)
    _, expected_states = expected.forward(chain(expected, 1, tokens), None)
    _, states = found.forward(chain(found, 1, tokens), None)
    assert torch.equal(states, expected_states)
    raw = ModelFiles(str(folder)).raw_config()
    assert (raw["model_type"], raw["num_hidden_layers"]) == ("gemma3", 4)
    assert check_family(raw, "m").part == "text_config"


def test_a_head_of_its_own_counts_where_the_config_ties_it(tmp_path: Path) -> None:
    """As in transformers, which does not tie what a checkpoint holds twice with different values."""
    folder = make_variant(tmp_path, "llama-tied")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, path, metadata={"format": "pt"})
    files = ModelFiles(str(folder))
    part = load(folder, [0, 8])[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(20)
    with torch.inference_mode():
        expected = plain(input_ids=tokens[None], use_cache=False).logits[0]
    _, states = part.forward(chain(part, 1, tokens), None)
    np.testing.assert_allclose(part.logits(states), expected.numpy(), atol=2e-4, rtol=1e-4)
    assert (
        slice_memory(files, Span(first=0, end=8, count=8), "float32", 100).weight_bytes == part.weight_bytes
    )
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    whole = load(folder, [0, 8])[0]
    assert whole.pieces.embedding is not None
    assert whole.pieces.lm_head is not None
    assert whole.pieces.embedding.weight is whole.pieces.lm_head.weight


def test_filling_reads_the_slices_tensors_and_no_others(tmp_path: Path) -> None:
    files = ModelFiles(str(make_variant(tmp_path, "qwen3-moe")))
    read = []

    class Watched(SafetensorsTensors):
        def load(self, name: str, shape: tuple[int, ...]) -> Any:
            read.append(name)
            return super().load(name, shape)

    config = files.config()
    pieces = Pieces.build(config, family_of(config, "m"), Span(first=1, end=3, count=4))
    fill(pieces, Watched("m", files.weight_map(), files.path), torch.float32, CPU)
    assert len(read) == len(set(read))
    assert {name.split(".")[2] for name in read} == {"1", "2"}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.sinks",
        "lm_head.bias",
        "model.norm.bias",
    ],
)
def test_tensors_that_nothing_would_use_are_refused(name: str, tmp_path: Path) -> None:
    """Attention sinks, biases, scales: transformers leaves them out with no more than a warning."""
    folder = make_variant(tmp_path, "phi3")
    path = folder / "model.safetensors"
    save_file(
        {
            **load_file(path),
            name: torch.ones(4),
            "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8),
        },
        path,
    )
    with pytest.raises(
        InputError, match=f"holds {re.escape(name)}, for which transformers' Phi3 has no place"
    ):
        load(folder, [0, 4])
    Slice.load(ModelFiles(str(folder)), Span(first=2, end=3, count=4), "float32", CPU)  # has none of them


# ----------------------------------------------------------------------------------------------------
# refusals

REFUSED = {
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "'dynamic' position embeddings",
    ),
    "partial": (
        "llama",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor, which transformers' llama",
    ),
    "window": (
        "llama",
        {"sliding_window": 64},
        "sets sliding_window to 64, which transformers' llama does not know",
    ),
    "scale": (
        "qwen2",
        {"logits_scaling": 8.0},
        "sets logits_scaling to 8.0, which transformers' qwen2 does not know",
    ),
    "cap": ("mistral", {"final_logit_softcapping": 30.0}, "sets final_logit_softcapping to 30.0"),
    "experts": ("qwen3", {"num_experts": 8}, "sets num_experts to 8"),
    "both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens"),
    "not applied": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping, which transformers' gemma3_text does not apply",
    ),
    "classifier": (
        "llama",
        {"architectures": ["LlamaForSequenceClassification"]},
        "is a LlamaForSequenceClassification",
    ),
    "quantised": ("phi3", {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "quantised"),
    "chunked": (
        "qwen3",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types: expected 4 of full_attention and sliding_attention",
    ),
    "no window": (
        "smollm3",
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 9},
        "but no sliding_window that is in use",
    ),
    "zero window": ("mistral", {"sliding_window": 0}, "sliding_window: expected a number from 1, got 0"),
    "activation": (
        "gpt_oss",
        {"hidden_act": "gelu"},
        'hidden_act, which transformers\' gpt_oss does not apply; expected "silu"',
    ),
    "limit": ("llama", {"swiglu_limit": 7.0}, "sets swiglu_limit to 7.0, which transformers' llama does not"),
    "no limit": (
        "gpt_oss",
        {"swiglu_limit": 0.0},
        r"swiglu_limit(: expected a number above 0, got 0.0| to 0.0, which transformers' gpt_oss does not)",
    ),
    "heads": ("olmo2", {"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
    "slides": (
        "lfm2",
        {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "sliding_window": 9},
        "sets sliding_window to 9, which transformers' lfm2 does not know",
    ),
    "window of a convolution": (
        "lfm2",
        {"layer_types": ["conv", "sliding_attention"] * 2},
        "layer_types: expected 4 of full_attention and conv",
    ),
    "convolution": (
        "qwen3",
        {"layer_types": ["conv", "full_attention"] * 2},
        "layer_types: expected 4 of full_attention and sliding_attention",
    ),
    "length": ("lfm2", {"conv_L_cache": 0}, "conv_L_cache: expected a number from 1 to 64, got 0"),
    "two lists of layers": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 2]},
        r"full_attn_idxs: expected the layers that layer_types has as full_attention, \[1, 3\], got \[1, 2\]",
    ),
    "no such layer": (
        "lfm2",
        {"full_attn_idxs": [1, 4]},
        r"full_attn_idxs: expected the layers .*, \[1\], got \[1, 4\]",
    ),
    "no positions": ("lfm2", {"use_pos_enc": False}, "sets use_pos_enc to False"),
    "no gate": ("lfm2", {"block_use_swiglu": False}, "sets block_use_swiglu to False"),
    "two numbers of heads": (
        "lfm2",
        {"num_heads": 8},
        "sets num_heads to 8 and num_attention_heads to 4; expected one value",
    ),
    "two constants": (
        "lfm2",
        {"block_norm_eps": 1e-3},
        "sets block_norm_eps to 0.001 and norm_eps to 1e-05; expected one value",
    ),
    "two bases": ("lfm2", {"theta": 1e4}, "sets theta to 10000.0 and rope_theta to 1000000.0; expected one"),
    "no multiple": (
        "lfm2",
        {"block_multiple_of": 0},
        "block_multiple_of: expected a number from 1 to 1048576",
    ),
    "no gates": (
        "qwen3_5_text",
        {"attn_output_gate": False},
        "sets attn_output_gate to False, but FlowSpec runs qwen3_5_text with true alone",
    ),
    "gates": (
        "qwen3",
        {"attn_output_gate": True},
        "sets attn_output_gate to True, which transformers' qwen3",
    ),
    "narrow states": (
        "qwen3_5_text",
        {"mamba_ssm_dtype": "bfloat16"},
        "sets mamba_ssm_dtype to 'bfloat16', but FlowSpec runs qwen3_5_text with \"float32\" alone",
    ),
    "interval": (
        "qwen3_5_text",
        {"full_attention_interval": 2, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        "full_attention_interval: expected what layer_types says, .*, got 2",
    ),
    "no interval": (
        "qwen3_5_text",
        {"full_attention_interval": "2", "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        "full_attention_interval: expected what layer_types says, .*, got '2'",
    ),
    "heads of keys": (
        "qwen3_5_text",
        {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
        "expected linear_num_value_heads to be a multiple of linear_num_key_heads, got 4 and 3",
    ),
    "no input": (
        "qwen3_5_text",
        {"linear_conv_kernel_dim": 0},
        "linear_conv_kernel_dim: expected a number from 1 to 64, got 0",
    ),
    "shares as they are": (
        "qwen3_5_moe_text",
        {"norm_topk_prob": False},
        "sets norm_topk_prob to False, but FlowSpec runs qwen3_5_moe_text with true alone",
    ),
    "layers without experts": (
        "qwen3_5_moe_text",
        {"mlp_only_layers": [0]},
        r"sets mlp_only_layers to \[0\], but FlowSpec runs qwen3_5_moe_text with \[\] alone",
    ),
    "every second layer without experts": (
        "qwen3_5_moe_text",
        {"decoder_sparse_step": 2},
        "sets decoder_sparse_step to 2, but FlowSpec runs qwen3_5_moe_text with 1 alone",
    ),
    "more experts than there are": (
        "qwen3_5_moe_text",
        {"num_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok: expected a number from 1 to 4, got 5",
    ),
    "a window beside states": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "sliding_attention"] * 2},
        "layer_types: expected 4 of full_attention and linear_attention",
    ),
    "shares all": (
        "gemma4_text",
        {"num_kv_shared_layers": 4, **GEMMA4},
        "num_kv_shared_layers: expected a number from 0 to 3, got 4",
    ),
    "shares with nobody": (
        "gemma4_text",
        {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        "num_kv_shared_layers: expected a layer of the type full_attention before the last 1",
    ),
    "small table": (
        "gemma4_text",
        {"vocab_size_per_layer_input": 299, **GEMMA4},
        "vocab_size_per_layer_input: expected a number from vocab_size, 300, got 299",
    ),
    "no inputs of layers": (
        "gemma4_unified_text",
        {"hidden_size_per_layer_input": 16, **GEMMA4},
        "sets hidden_size_per_layer_input to 16, which transformers' gemma4_unified_text does not know",
    ),
    "both ways everywhere": (
        "gemma4_text",
        {"use_bidirectional_attention": "all", **GEMMA4},
        "attends to later tokens",
    ),
    "partial in a type": (
        "gemma4_text",
        {
            **GEMMA4,
            "rope_parameters": {
                "sliding_attention": {**ROPE, "partial_rotary_factor": 0.5},
                "full_attention": ROPE,
            },
        },
        "partial_rotary_factor, which transformers' gemma4_text",
    ),
    "no positions of a type": (
        "gemma4_text",
        {**GEMMA4, "rope_parameters": {"sliding_attention": ROPE}},
        "rope_parameters: expected those of full_attention, got none",
    ),
    "no experts": (
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 8},
        "num_experts: expected a number from 1 to 4096, got None",
    ),
    "more experts than Gemma has": (
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 3,
            "top_k_experts": 4,
            "moe_intermediate_size": 8,
        },
        "top_k_experts: expected a number from 1 to 3, got 4",
    ),
    "shared keys": (
        "llama",
        {"num_kv_shared_layers": 2},
        "sets num_kv_shared_layers to 2, which transformers' llama does not know",
    ),
    "longrope": (
        "llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64.5}},
        "longrope position embeddings to have a number as original_max_position_embeddings",
    ),
}


@pytest.mark.filterwarnings("ignore")  # transformers, too, has something to say about some of these
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_arithmetic_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    family, fields, expected = REFUSED[name]
    config = {"model_type": family, **SMALL, "num_hidden_layers": 4, "pad_token_id": 0, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=expected) as caught:
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


QWEN3_5_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
"""What the published configs of Qwen3.5 have in common."""
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "head_dim": 64,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
        },
        131072,
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "max_window_layers": 24,
            "sliding_window": 32768,
            "use_mrope": False,
            "use_sliding_window": False,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 24,
        },
        32768,
    ),
    "gemma-3-4b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152,
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 27,
            },
        },
        131072,
    ),
    "gemma-3-1b-it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 32768,
        },
        32768,
    ),
    "Phi-3-mini-4k-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "original_max_position_embeddings": 4096,
            "rope_scaling": None,
            "sliding_window": 2047,
            "max_position_embeddings": 4096,
        },
        4096,
    ),
    "Phi-4-mini-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "attention_bias": False,
            "full_attn_mod": 1,
            "hidden_size": 3072,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "sliding_window": 262144,
            "max_position_embeddings": 131072,
        },
        4096,
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "layer_types": ["full_attention"] * 36,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_hidden_layers": 36,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_position_embeddings": 65536,
        },
        65536,
    ),
    "granite-3.1-2b": (
        {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "rope_scaling": None,
            "max_position_embeddings": 131072,
        },
        131072,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_position_embeddings": 40960,
        },
        40960,
    ),
    "Mixtral-8x7B-Instruct-v0.1": (
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        32768,
    ),
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "use_qk_norm": False,
        },
        131072,
    ),
    "LFM2-1.2B": (
        {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": True,
            "block_dim": 2048,
            "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_mlp_init_scale": 1.0,
            "block_multiple_of": 256,
            "block_norm_eps": 1e-05,
            "block_out_init_scale": 1.0,
            "block_use_swiglu": True,
            "block_use_xavier_init": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 2048,
            "conv_dim_out": 2048,
            "conv_use_xavier_init": True,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "hidden_size": 2048,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-05,
            "num_attention_heads": 32,
            "num_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "use_pos_enc": True,
            "vocab_size": 65536,
        },
        128000,
    ),
    "Qwen3.5-4B": (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 248056,
            "model_type": "qwen3_5",
            "text_config": {
                **QWEN3_5_TEXT,
                "hidden_size": 2560,
                "intermediate_size": 9216,
                "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 32,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
            "tie_word_embeddings": True,
            "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_5", "num_heads": 16},
        },
        262144,
    ),
    "Qwen3.5-35B-A3B": (
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": 248056,
            "model_type": "qwen3_5_moe",
            "text_config": {
                **QWEN3_5_TEXT,
                "hidden_size": 2048,
                "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
                "model_type": "qwen3_5_moe_text",
                "moe_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "router_aux_loss_coef": 0.001,
                "shared_expert_intermediate_size": 512,
            },
            "tie_word_embeddings": False,
            "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe", "num_heads": 16},
        },
        262144,
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": 200002,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "output_router_logits": False,
            "pad_token_id": 199999,
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 201088,
        },
        131072,
    ),
    # of Gemma 4 from memory: the hub was out of reach
    "gemma-4-E2B-it": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                "attention_k_eq_v": False,
                "enable_moe_block": False,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size": 1536,
                "hidden_size_per_layer_input": 256,
                "intermediate_size": 6144,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
                "max_position_embeddings": 131072,
                "num_attention_heads": 8,
                "num_global_key_value_heads": None,
                "num_hidden_layers": 35,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "rope_parameters": GEMMA4_ROPE,
                "sliding_window": 512,
                "tie_word_embeddings": True,
                "use_bidirectional_attention": None,
                "use_double_wide_mlp": True,
                "vocab_size": 262144,
                "vocab_size_per_layer_input": 262144,
            },
            "tie_word_embeddings": True,
        },
        131072,
    ),
    "gemma-4-26B-A4B-it": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                "attention_k_eq_v": True,
                "enable_moe_block": True,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size": 2816,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 2112,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
                "max_position_embeddings": 262144,
                "moe_intermediate_size": 704,
                "num_attention_heads": 16,
                "num_experts": 128,
                "num_global_key_value_heads": 2,
                "num_hidden_layers": 30,
                "num_key_value_heads": 8,
                "num_kv_shared_layers": 0,
                "rope_parameters": GEMMA4_ROPE,
                "sliding_window": 1024,
                "top_k_experts": 8,
                "use_bidirectional_attention": "vision",
                "use_double_wide_mlp": False,
                "vocab_size": 262144,
                "vocab_size_per_layer_input": 262144,
            },
        },
        262144,
    ),
    "gemma-4-12B-it": (
        {
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "text_config": {
                "model_type": "gemma4_unified_text",
                "attention_k_eq_v": True,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
                "max_position_embeddings": 262144,
                "num_attention_heads": 16,
                "num_global_key_value_heads": 1,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "num_kv_shared_layers": 0,
                "rope_parameters": GEMMA4_ROPE,
                "sliding_window": 1024,
                "use_bidirectional_attention": "vision",
                "vocab_size": 262144,
            },
        },
        262144,
    ),
    "phi-4": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
        },
        16384,
    ),
}
"""What published config.json files hold, as far as it could matter here, and the context that they can be run
with."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published_are_run(name: str, tmp_path: Path) -> None:
    raw, context = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 16, **raw}))
    config = ModelFiles(str(tmp_path)).config()
    family = family_of(config, name)
    assert family.piece("DecoderLayer").__name__.startswith(family.prefix)
    assert context_max(config) == context


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


def test_longrope_is_run_where_it_depends_on_the_position_alone(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "phi3-longrope")
    assert context_max(ModelFiles(str(folder)).config()) == 480 < SMALL["max_position_embeddings"]
    part = load_stages(folder, 1)[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(90) % VOCABULARY_SIZE
    job = chain(part, 1, tokens)
    assert part.forward(job, None, lambda: frozenset(range(90)))[0] == (), (
        "a job that dies as a whole has no positions left"
    )
    _, states = part.forward(job, None)
    with torch.inference_mode():
        expected = plain(input_ids=tokens[None], use_cache=False).logits[0]
    np.testing.assert_allclose(part.logits(states), expected.numpy(), atol=2e-4, rtol=1e-4)


OF_OTHER_FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    # excerpts of published config.json
    "qwen3_next": (
        {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "linear_num_value_heads": 32},
        ", some of whose layers keep a state instead of keys and values",
    ),
    "lfm2_vl": (
        {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "text_config": {"model_type": "lfm2", "num_hidden_layers": 16, "conv_L_cache": 3},
            "vision_config": {"model_type": "siglip2_vision_model"},
        },
        ", with other parts beside a decoder of 'lfm2', some of whose layers keep a state instead of keys "
        "and values",
    ),
    "gemma3n": (
        {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "text_config": {"model_type": "gemma3n_text", "num_hidden_layers": 35},
            "audio_config": {"model_type": "gemma3n_audio"},
        },
        ", with other parts beside a decoder of 'gemma3n_text'",
    ),
    "gemma4_assistant": (
        {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 4},
        },
        ", which guesses for another model: name that one, and this as --drafter",
    ),
    "llava": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 24},
        },
        ", with other parts beside a decoder of 'llama'",
    ),
    "lfm2_moe": (
        {"architectures": ["Lfm2MoeForCausalLM"], "num_hidden_layers": 24, "conv_L_cache": 3},
        ", some of whose layers keep a state instead of keys and values",
    ),
    "mamba": (
        {"architectures": ["MambaForCausalLM"], "num_hidden_layers": 48, "state_size": 16},
        ", some of whose layers keep a state instead of keys and values",
    ),
    "deepseek_v3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, "kv_lora_rank": 512},
        ", which keeps keys and values compressed (MLA)",
    ),
    "t5": (
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "num_layers": 12},
        ", which has an encoder",
    ),
    "bert": (
        {"architectures": ["BertForMaskedLM"], "num_hidden_layers": 12},
        ", a BertForMaskedLM, which does not generate text",
    ),
    "gpt2": ({"architectures": ["GPT2LMHeadModel"], "n_layer": 12}, ""),
    "whisper_parts": ({"speech": {"model_type": "whisper"}}, ", whose parts are of whisper"),
}


@pytest.mark.parametrize("name", OF_OTHER_FAMILIES)
def test_a_model_of_another_family_is_refused_by_its_name_and_by_what_is_different(
    name: str, tmp_path: Path
) -> None:
    fields, obstacle = OF_OTHER_FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **fields}))
    with pytest.raises(InputError) as refusal:
        check_family(ModelFiles(str(tmp_path)).raw_config(), str(tmp_path))
    expected = f"model {str(tmp_path)!r} is of the family {name!r}{obstacle}, but FlowSpec runs gemma2"
    assert str(refusal.value).startswith(expected)


def test_no_family_of_transformers_is_refused_for_a_field_that_it_calls_something_else(
    tmp_path: Path,
) -> None:
    for name in set(CONFIG_MAPPING_NAMES) - set(FAMILIES):
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


def test_a_config_that_names_no_family_is_refused_for_that(tmp_path: Path) -> None:
    for named in ({}, {"model_type": None}, {"model_type": ["llama"]}):
        (tmp_path / "config.json").write_text(json.dumps({"n_layer": 4, **named}))
        with pytest.raises(InputError, match=r"names no family \(model_type\); FlowSpec runs gemma2"):
            ModelFiles(str(tmp_path)).raw_config()
