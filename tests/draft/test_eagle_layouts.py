"""Every published layout of EAGLE-3 heads: read as its publisher computes it, or refused in one line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.draft.eagle_captures import captures_of
from flowspec.draft.eagle_files import is_eagle
from flowspec.draft.eagle_head import EagleHead
from flowspec.draft.kinds import check_drafter, find_drafter
from flowspec.draft.kinds.eagle import Eagle
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from tests.draft.published import Published, Tensors
from tests.draft.test_eagle_head import DRAFT_VOCABULARY, HIDDEN, VOCABULARY, tree_batch

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCABULARY,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
MODELOPT = {
    "next_layer_regular": True,
    "parallel_draft_heads_num_layers": 1,
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
LAYER = {
    **{
        name: CONFIG[name]
        for name in CONFIG
        if name not in ("architectures", "draft_vocab_size", "rope_theta")
    },
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": DRAFT_VOCABULARY,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "embed_requires_grad": False,
    "fc_norm": False,
    "has_no_defaults_at_init": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/model"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": LAYER,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a publisher writes a head: its config, the names of its tensors, and what they mean."""

    config: dict[str, Any]
    means: Published = field(default_factory=Published)
    captures: tuple[int, ...] = (2, 4, 5)
    width: int = HIDDEN
    midlayer: bool = False
    has_fc: bool = True
    has_own_embedding: bool = False
    has_lm_head: bool = True
    renamed: dict[str, str] = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """Under the names of `Published`."""
        means, width = self.means, self.width
        inner, keys = means.heads * means.head_width, means.key_heads * means.head_width
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
        if self.has_lm_head:
            shapes["lm_head.weight"] = (DRAFT_VOCABULARY, width)
        if self.has_fc:
            shapes["fc.weight"] = (width, len(self.captures) * HIDDEN)
        if self.has_own_embedding:
            shapes["embed_tokens.weight"] = (VOCABULARY, width)
        for index in range(len(self.captures) if means.feature_norm == "fc_norm" else 0):
            shapes[f"fc_norm.{index}.weight"] = (HIDDEN,)
        if means.feature_norm == "input_norm":
            shapes["input_norm.weight"] = (len(self.captures) * HIDDEN,)
        for index in range(means.layers):
            at, reads = f"layers.{index}", index == 0 or means.embedding_in_each_layer
            read = 2 * width if reads else width
            norms = ("input_layernorm", "hidden_norm") if reads else (means.later_norm,)
            shapes |= {f"{at}.{norm}.weight": (width,) for norm in (*norms, "post_attention_layernorm")}
            shapes |= {
                f"{at}.self_attn.q_proj.weight": (inner, read),
                f"{at}.self_attn.k_proj.weight": (keys, read),
                f"{at}.self_attn.v_proj.weight": (keys, read),
                f"{at}.self_attn.o_proj.weight": (width, inner),
                f"{at}.mlp.gate_proj.weight": (128, width),
                f"{at}.mlp.up_proj.weight": (128, width),
                f"{at}.mlp.down_proj.weight": (width, 128),
            }
            if self.config.get("model_type") == "qwen3" or self.layer_type == "qwen3":
                shapes |= {f"{at}.self_attn.{name}_norm.weight": (means.head_width,) for name in "qk"}
            if self.config.get("attention_bias"):
                shapes |= {
                    f"{at}.self_attn.{name}_proj.bias": (inner if name == "q" else keys,) for name in "qkv"
                }
        rng = torch.Generator().manual_seed(5)
        found = {name: 0.15 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
        return {name: 1 + 2 * value if "norm" in name else value for name, value in found.items()}

    @property
    def layer_type(self) -> str:
        return str(self.config.get("transformer_layer_config", {}).get("model_type"))

    def write(self, folder: Path, tensors: Tensors, **config: Any) -> ModelFiles:
        named = {self.published(name): tensor for name, tensor in tensors.items()}
        if self.has_lm_head:
            kept = torch.arange(DRAFT_VOCABULARY) * 3 + 1
            is_kept = torch.zeros(VOCABULARY, dtype=torch.bool)
            is_kept[kept] = True
            named |= {"d2t": kept - torch.arange(DRAFT_VOCABULARY), "t2d": is_kept}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**self.config, **config}), encoding="utf-8")
        save_file(named, folder / "model.safetensors")
        return ModelFiles(str(folder))

    def published(self, name: str) -> str:
        name = name.replace("layers.0.", "midlayer.") if self.midlayer else name
        return self.renamed.get(name, name)


def nested(**changes: Any) -> dict[str, Any]:
    return {"eagle_config": {**MODELOPT, "eagle_aux_hidden_state_layer_ids": [1, 3, 4], **changes}}


def speculators(kind: str = "llama", layers: int = 1, **changes: Any) -> dict[str, Any]:
    layer = {**LAYER, "model_type": kind, "num_hidden_layers": layers, "head_dim": 16}
    return {**SPECULATORS, "transformer_layer_config": layer, **changes}


EACH, JOINED = Published(feature_norm="fc_norm"), Published(feature_norm="input_norm")
LAYOUTS = {
    "safeailab": Layout(config=CONFIG, midlayer=True),
    "safeailab-target-hidden-size": Layout(
        config={**CONFIG, "hidden_size": 96, "num_attention_heads": 6, "target_hidden_size": HIDDEN},
        means=Published(heads=6),
        width=96,
        midlayer=True,
        has_own_embedding=True,
    ),
    "angelslim": Layout(
        config={
            **CONFIG,
            "architectures": ["Eagle3LlamaForCausalLM"],
            "head_dim": 24,
            "modal_type": "LLM",
            "rope_scaling": None,
            "sliding_window": 32,
            "target_model_type": "qwen3",
            "tie_word_embeddings": True,  # left over from the target: it has an `lm_head` of its own
            "num_experts": 128,  # the same
            "use_qk_norm": True,  # the same, and it has no such norms
            "use_sliding_window": False,
        },
        means=Published(head_width=24),
        midlayer=True,
        has_own_embedding=True,
    ),
    "specforge-gpt-oss": Layout(
        config={**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
        captures=(1, 4, 6),
        midlayer=True,
    ),
    "specforge-3.1": Layout(
        config={**CONFIG, "fc_norm": True, "norm_output": True},
        means=replace(EACH, norm_output=True),
        midlayer=True,
    ),
    "specforge-3.1-older-names": Layout(
        config={**CONFIG, "use_aux_norm": True},
        means=EACH,
        midlayer=True,
        renamed={f"fc_norm.{i}.weight": f"aux_norm_{n}.weight" for i, n in enumerate(("low", "mid", "high"))},
    ),
    "modelopt": Layout(config={**CONFIG, **nested(), "head_dim": 16}),
    "modelopt-norm-before-fc": Layout(config={**CONFIG, **nested(norm_before_fc=True)}, means=JOINED),
    "modelopt-two-layers": Layout(
        config={
            **CONFIG,
            **nested(eagle_aux_hidden_state_layer_ids=[0, 5]),
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
        },
        means=Published(layers=2),
        captures=(1, 6),
    ),
    "modelopt-last-hidden-state": Layout(
        config={**CONFIG, **nested(use_aux_hidden_state=False, eagle_aux_hidden_state_layer_ids=[])},
        captures=(8,),
        has_fc=False,
    ),
    "sglang-two-layers": Layout(
        config={**CONFIG, "num_aux_hidden_states": 3, "num_hidden_layers": 2},
        means=Published(layers=2, later_norm="hidden_norm"),
    ),
    "vllm-layer-ids-and-biases": Layout(
        config={
            **CONFIG,
            "attention_bias": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 7],
            "norm_before_residual": True,
        },
        means=Published(norm_before_residual=True),
        captures=(0, 1, 7),
    ),
    "deepspec": Layout(
        config={
            **CONFIG,
            "architectures": ["Qwen3Eagle3Model"],
            "draft_num_hidden_layers": 1,
            "head_dim": 16,
            "layer_types": ["full_attention"],
            "model_type": "qwen3",
            "num_target_layers": 8,
            "step_loss_decay": 0.8,
            "target_layer_ids": [0, 1, 2, 4, 6],
            "target_model_name_or_path": "Qwen/Qwen3-4B",
            "ttt_length": 7,
        },
        captures=(1, 2, 3, 5, 7),
    ),
    "deepspec-two-layers": Layout(
        config={
            **CONFIG,
            "head_dim": 16,
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "target_layer_ids": [1, 3, 4],
        },
        means=Published(layers=2, embedding_in_each_layer=True),
    ),
    "target-lm-head": Layout(config={**CONFIG, "draft_vocab_size": None}, midlayer=True, has_lm_head=False),
    "own-embedding-as-lm-head": Layout(
        config={**CONFIG, "draft_vocab_size": VOCABULARY, "tie_word_embeddings": True},
        midlayer=True,
        has_lm_head=False,
        has_own_embedding=True,
    ),
    **{
        f"speculators-{kind}-{name}": Layout(
            config=speculators(kind, **config), means=means, has_own_embedding=True
        )
        for kind in ("llama", "qwen3")
        for name, config, means in (
            ("plain", {}, Published()),
            ("residual", {"norm_before_residual": True}, Published(norm_before_residual=True)),
            ("input-norm", {"norm_before_fc": True}, JOINED),
            ("3.1", {"fc_norm": True, "norm_output": True}, replace(EACH, norm_output=True)),
            (
                "two-layers",
                {"layers": 2, "norm_before_residual": True},
                Published(layers=2, norm_before_residual=True),
            ),
        )
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_checkpoint(tmp_path_factory.mktemp("target"), "llama", SMALL)))


@pytest.mark.parametrize("is_pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_computes_what_its_publisher_does(
    name: str, is_pickled: bool, target: ModelFiles, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    w, means = layout.tensors(), layout.means
    files = layout.write(tmp_path / "head", w)
    if is_pickled:
        path = tmp_path / "head/model.safetensors"
        torch.save(load_file(path), tmp_path / "head/pytorch_model.bin")
        path.unlink()
    assert is_eagle(files)
    head = EagleHead.load(files, target, "float32", CPU)
    assert (head.kind, head.capture, head.hidden_size) == ("eagle3", layout.captures, layout.width)
    assert head.feature_width == HIDDEN * len(layout.captures)
    rng = torch.Generator().manual_seed(3)
    rows = 9
    tokens = torch.randint(0, VOCABULARY, (rows,), generator=rng)
    captured = [torch.randn(rows, HIDDEN, generator=rng) for _ in layout.captures]
    assert target.folder is not None
    own = load_file(target.folder / "model.safetensors")
    embedding = w.get("embed_tokens.weight", own["model.embed_tokens.weight"])
    lm_head = w["lm_head.weight"] if layout.has_lm_head else own["lm_head.weight"]
    if not layout.has_lm_head and layout.config["tie_word_embeddings"]:
        lm_head = embedding
    feature = head.project(torch.cat(captured, dim=-1))
    expected = means.project(w, captured)
    torch.testing.assert_close(feature, expected, atol=2e-5, rtol=1e-5)
    for _ in range(2):  # the second time from the head's own features, as for guesses
        expected = means.run(w, embedding[tokens], expected)
        batch, positions = tree_batch(head.new_cache(64), list(range(-1, rows - 1)), 0)
        feature = head.run(tokens, feature, positions, batch)
        torch.testing.assert_close(feature, expected, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(
            head.logits(feature), means.logits(w, expected, lm_head), atol=5e-5, rtol=1e-5
        )
    ids = head.target_ids()
    assert (ids is not None) == layout.has_lm_head
    numbers = 2 * means.layers * means.key_heads * means.head_width + layout.width
    assert head.slot_bytes == 4 * numbers


def test_a_folder_of_either_kind_of_file_is_found_by_its_name(tmp_path: Path) -> None:
    layout = LAYOUTS["speculators-qwen3-two-layers"]
    for name in ("safetensors", "bin"):
        layout.write(tmp_path / name, layout.tensors())
    path = tmp_path / "bin/model.safetensors"
    torch.save(load_file(path), tmp_path / "bin/pytorch_model.bin")
    path.unlink()
    count = sum(each.numel() for each in load_file(tmp_path / "safetensors/model.safetensors").values())
    for name in ("safetensors", "bin"):
        check_drafter(str(tmp_path / name))
        kind = find_drafter(str(tmp_path / name))
        assert isinstance(kind, Eagle)
        assert kind.parameter_count() == count


@pytest.mark.parametrize("name", ["specforge-3.1", "speculators-qwen3-two-layers", "deepspec-two-layers"])
def test_a_tree_in_two_segments_is_every_branch_alone(name: str, target: ModelFiles, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    w = layout.tensors()
    head = EagleHead.load(layout.write(tmp_path / "head", w), target, "float32", CPU)
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (9,), generator=rng)
    features = torch.randn(9, HIDDEN, generator=rng)
    parents, cache, parts = [-1, 0, 1, 1, 2, 3, 3, 4, 0], head.new_cache(64), []
    for first, end in ((0, 4), (4, 9)):
        batch, positions = tree_batch(cache, parents[:end], first)
        parts.append(head.run(tokens[first:end], features[first:end], positions, batch))
    found = torch.cat(parts)
    assert target.folder is not None
    own = load_file(target.folder / "model.safetensors")["model.embed_tokens.weight"]
    for path in ([0, 1, 2, 4, 7], [0, 1, 3, 5], [0, 1, 3, 6], [0, 8]):
        embedded = w.get("embed_tokens.weight", own)[tokens[path]]
        expected = layout.means.run(w, embedded, features[path])
        torch.testing.assert_close(found[path], expected, atol=5e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------------------- captures

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "layer_count", "captures"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 36, (2, 18, 33)),
        ({IDS: [1, 11, 21]}, 24, (1, 11, 21)),  # beside the other fields: what enters a layer
        ({"eagle_config": {IDS: [1, 11, 21]}}, 24, (2, 12, 22)),  # within: what leaves one
        ({"eagle_config": {IDS: [1, 29, 57]}}, 61, (2, 30, 58)),
        ({"eagle_config": {IDS: [1, 15, 28]}}, 32, (2, 16, 29)),
        ({"eagle_config": {IDS: [2, 16, 29]}}, 32, (2, 16, 29)),  # the default, counted as it is used
        ({"eagle_config": {IDS: []}}, 32, (2, 16, 29)),
        ({"target_layer_ids": [1, 9, 17, 25, 33]}, 36, (2, 10, 18, 26, 34)),
        ({"aux_hidden_states_layer_ids": [1, 17, 32]}, 36, (2, 18, 33)),
        ({IDS: [2, 16, 29], "eagle_config": {IDS: [1, 15, 28]}}, 32, (2, 16, 29)),
        ({IDS: [3], "num_aux_hidden_states": 1}, 4, (3,)),
    ],
)
def test_layers_are_counted_as_their_publisher_does(
    config: dict[str, Any], layer_count: int, captures: tuple[int, ...]
) -> None:
    assert captures_of(config, layer_count, "head", "target") == captures


@pytest.mark.parametrize(
    ("config", "layer_count", "message"),
    [
        ({}, 6, "needs a target of 7 layers or more, but 'target' has 6"),
        ({IDS: [2, 16, 40]}, 32, r"reads the inputs of layers \[2, 16, 40\] .* but 'target' has 32"),
        ({IDS: [24, 30, 36]}, 36, "what leaves the last layer of 'target' before its final norm"),
        ({"eagle_config": {IDS: [24, 30, 36]}}, 36, "what leaves the last layer of 'target'"),
        ({"target_layer_ids": [1, 35]}, 36, "what leaves the last layer of 'target'"),
        ({IDS: [33, 2, 18]}, 36, r"expected up to 8 numbers of layers in growing order, got \[33, 2, 18\]"),
        ({IDS: [2, 2]}, 36, "in growing order"),
        ({IDS: [-1, 2]}, 36, "in growing order"),
        ({IDS: [True, 2]}, 36, "in growing order"),
        ({IDS: "2,16"}, 36, "in growing order, got '2,16'"),
        ({IDS: list(range(9))}, 36, "expected up to 8 numbers"),
        ({"eagle_config": {IDS: {"a": 1}}}, 36, r"eagle_config\.eagle_aux.*: expected up to 8 numbers"),
        ({IDS: [2, 3], "target_layer_ids": [2, 3]}, 36, r"expected the same ones"),
        ({IDS: [2, 3], "num_aux_hidden_states": 3}, 36, "num_aux_hidden_states: expected 2"),
    ],
)
def test_layers_that_cannot_be_captured_are_refused(
    config: dict[str, Any], layer_count: int, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        captures_of(config, layer_count, "head", "target")
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------- refusals

ONES = torch.ones(HIDDEN)
REFUSED: dict[str, tuple[str, Tensors, dict[str, Any], str]] = {
    "p-eagle of SpecForge": (
        "safeailab",
        {"mask_hidden": torch.ones(1, 1, 3 * HIDDEN)},
        {},
        r"several tokens at once \(P-EAGLE\)",
    ),
    "p-eagle by its class": ("safeailab", {}, {"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
    "p-eagle of speculators": (
        "speculators-llama-plain",
        {},
        {"speculators_model_type": "peagle"},
        "P-EAGLE",
    ),
    "eagle of speculators": (
        "speculators-llama-plain",
        {},
        {"speculators_model_type": "eagle"},
        "speculators' kind 'eagle'",
    ),
    "residual left open": (
        "speculators-llama-plain",
        {},
        {"norm_before_residual": None},
        "norm_before_residual: expected true or false",
    ),
    "medusa's heads": ("modelopt", {}, nested(parallel_draft_step=2), "sets parallel_draft_step to 2"),
    "norms of MTP": ("modelopt", {}, nested(use_mtp_layernorm=True), "sets use_mtp_layernorm to True"),
    "no norm in the first layer": (
        "modelopt",
        {},
        nested(use_input_layernorm_in_first_layer=False),
        "use_input_layernorm_in_first_layer to False",
    ),
    "eagle_config no object": ("modelopt", {}, {"eagle_config": [1]}, "eagle_config: expected an object"),
    "two values": (
        "modelopt",
        {},
        {**nested(), "use_aux_hidden_state": False},
        "sets use_aux_hidden_state to False, and within eagle_config to True",
    ),
    "no projection, but its tensor": (
        "modelopt",
        {},
        nested(use_aux_hidden_state=False),
        "gives no use for, fc.weight",
    ),
    "no final norm, but its tensor": (
        "modelopt",
        {},
        nested(use_last_layernorm=False),
        "gives no use for, norm.weight",
    ),
    "norm_output without a norm": (
        "modelopt",
        {},
        {**nested(use_last_layernorm=False), "norm_output": True},
        "sets norm_output, but has no final norm",
    ),
    "norms of captures without the flag": (
        "specforge-3.1",
        {},
        {"fc_norm": False},
        "has fc_norm.0.weight, but does not set fc_norm",
    ),
    "the flag without norms of captures": ("safeailab", {}, {"fc_norm": True}, "no tensor fc_norm.0.weight"),
    "norm_before_fc without its norm": (
        "modelopt",
        {},
        {"norm_before_fc": True},
        "no tensor input_norm.weight",
    ),
    "both norms before fc": (
        "specforge-3.1",
        {},
        {"norm_before_fc": True},
        "sets both fc_norm and norm_before_fc",
    ),
    "a flag that is a word": ("safeailab", {}, {"norm_output": "yes"}, "norm_output: expected true or false"),
    "an unknown flag": ("safeailab", {}, {"norm_everything": True}, "switches on norm_everything"),
    "HASS": ("safeailab", {}, {"add_para_norm": True}, "sets add_para_norm to True"),
    "a cap": ("safeailab", {}, {"final_logit_softcapping": 30.0}, "sets final_logit_softcapping to 30.0"),
    "a scale": ("safeailab", {}, {"logit_scale": 0.5}, "sets logit_scale to 0.5"),
    "a window": ("safeailab", {}, {"use_sliding_window": True}, "sets use_sliding_window to True"),
    "sliding layers": (
        "safeailab",
        {},
        {"layer_types": ["sliding_attention"]},
        "sets layer_types to .'sliding_attention'",
    ),
    "outputs that are no feature": (
        "angelslim",
        {},
        {"early_stop_method": "confidence"},
        "sets early_stop_method to 'confidence'",
    ),
    "layers of Gemma 4": ("deepspec", {}, {"model_type": "gemma4_text"}, "layers of Gemma 4"),
    "turned by mrope": (
        "safeailab",
        {},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "'mrope' position embeddings",
    ),
    "another activation": ("safeailab", {}, {"hidden_act": "mish"}, "FlowSpec computes silu"),
    "quantised": (
        "modelopt",
        {},
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        "quantised",
    ),
    "another target's width": (
        "safeailab",
        {},
        {"target_hidden_size": 128},
        "expected target_hidden_size 64",
    ),
    "a width that is a word": ("safeailab", {}, {"target_hidden_size": "64"}, "expected target_hidden_size"),
    "no embedding of its width": (
        "safeailab-target-hidden-size",
        {"embed_tokens.weight": torch.empty(0)},
        {},
        "has no embed_tokens.weight, and its hidden_size is not the target's",
    ),
    "one tensor twice": ("safeailab", {"layers.0.hidden_norm.weight": ONES}, {}, "which are one tensor"),
    "a tensor of whole numbers": (
        "modelopt",
        {"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)},
        {},
        "norm.weight .* is int8; expected float32",
    ),
    "ids that are no whole numbers": (
        "modelopt",
        {"d2t": torch.zeros(DRAFT_VOCABULARY)},
        {},
        "expected d2t to hold whole numbers",
    ),
    "two norms before one input": (
        "modelopt-two-layers",
        {"layers.1.hidden_norm.weight": ONES},
        {},
        "two norms before layer 1",
    ),
    "a layer that is not there": ("modelopt", {}, {"num_hidden_layers": 2}, "no tensor layers.1."),
    "a layer too many": (
        "modelopt-two-layers",
        {},
        {"num_hidden_layers": 1, "layer_types": None},
        "gives no use for, layers.1.input_layernorm.weight",
    ),
    "attention of DeepSeek": (
        "modelopt",
        {"layers.0.self_attn.kv_a_proj_with_mqa.weight": ONES},
        {},
        "gives no use for, layers.0.self_attn.kv_a_proj",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_in_one_line(name: str, target: ModelFiles, tmp_path: Path) -> None:
    of, tensors, config, message = REFUSED[name]
    layout = LAYOUTS[of]
    written = layout.write(tmp_path / "head", layout.tensors(), **config)
    path = tmp_path / "head/model.safetensors"
    changed = {**load_file(path), **tensors}
    save_file({key: value for key, value in changed.items() if value.numel()}, path)
    assert is_eagle(written)
    with pytest.raises(InputError, match=message) as caught:
        EagleHead.load(written, target, "float32", CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "extra", [{"hidden_norm.weight": ONES}, {"markov_head.w1.weight": ONES}], ids=["dflash", "dspark"]
)
def test_a_drafter_of_blocks_is_no_eagle_head(extra: Tensors, tmp_path: Path) -> None:
    layout = LAYOUTS["modelopt"]
    assert not is_eagle(layout.write(tmp_path / "head", {**layout.tensors(), **extra}))


def test_a_d2t_of_a_whole_vocabulary_moves_nothing(target: ModelFiles, tmp_path: Path) -> None:
    layout = LAYOUTS["safeailab"]
    whole = {**layout.tensors(), "lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}
    for index, first in enumerate((0, 1)):
        files = layout.write(tmp_path / str(index), whole, draft_vocab_size=VOCABULARY)
        path = tmp_path / str(index) / "model.safetensors"
        d2t = torch.zeros(VOCABULARY, dtype=torch.long)
        d2t[0] = first
        save_file({**load_file(path), "d2t": d2t}, path)
        if first:
            with pytest.raises(InputError, match="expected a d2t of zeros for a whole vocabulary"):
                EagleHead.load(files, target, "float32", CPU)
        else:
            assert EagleHead.load(files, target, "float32", CPU).target_ids() is None
