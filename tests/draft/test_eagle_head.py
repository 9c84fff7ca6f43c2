"""EAGLE heads against a plain implementation of the published forward, from files in the published
layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from flowspec.bench.checkpoints import SMALL, make_checkpoint, make_variant
from flowspec.draft.eagle_files import is_eagle
from flowspec.draft.eagle_head import EagleHead
from flowspec.errors import InputError
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from tests.draft.heads import make_head

Tensors = dict[str, torch.Tensor]
HIDDEN, HEADS, KV_HEADS, VOCABULARY, DRAFT_VOCABULARY, EPS, THETA = 64, 4, 2, 300, 96, 1e-5, 5000.0
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "torch_dtype": "float16",
    "vocab_size": VOCABULARY,
}


# ------------------------------------------------------------------------------------ the published layouts


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    spread = {name: 0.15 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return {name: 1 + value if "norm" in name else value for name, value in spread.items()}


def layer_shapes(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    kv_width = KV_HEADS * HIDDEN // HEADS
    return {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv_width, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv_width, inputs),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": (128, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (128, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, 128),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle(*, bias: bool = False, qkv_bias: bool = False) -> Tensors:
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes("layers.0", HIDDEN)}
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    if qkv_bias:
        shapes |= {
            f"layers.0.self_attn.{x}_proj.bias": (shapes[f"layers.0.self_attn.{x}_proj.weight"][0],)
            for x in "qkv"
        }
    return random_tensors(shapes, seed=1)


def eagle3() -> Tensors:
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (DRAFT_VOCABULARY, HIDDEN),
        **layer_shapes("midlayer", 2 * HIDDEN),
        **{f"{name}.weight": (HIDDEN,) for name in norms},
    }
    kept = torch.arange(DRAFT_VOCABULARY) * 3 + 1
    is_kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    is_kept[kept] = True
    return {**random_tensors(shapes, seed=2), "d2t": kept - torch.arange(DRAFT_VOCABULARY), "t2d": is_kept}


EAGLE3_CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCABULARY}


def write(folder: Path, tensors: Tensors, **config: Any) -> ModelFiles:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return ModelFiles(str(folder))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, ModelFiles]:
    """Targets by whether their embeddings are tied."""
    folder = tmp_path_factory.mktemp("targets")
    make = {
        tied: make_checkpoint(folder / str(tied), "llama", {**SMALL, "tie_word_embeddings": tied})
        for tied in (False, True)
    }
    return {tied: ModelFiles(str(path)) for tied, path in make.items()}


# ------------------------------------------------------------------------------------- the published forward


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """RoPE on `[heads, rows, width]` at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def attention(w: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    rows, width = len(x), HIDDEN // HEADS

    def heads(name: str) -> torch.Tensor:
        bias = w.get(f"{prefix}.self_attn.{name}_proj.bias")
        return (
            F.linear(x, w[f"{prefix}.self_attn.{name}_proj.weight"], bias)
            .view(rows, -1, width)
            .transpose(0, 1)
        )

    q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
    scores = q @ k.transpose(1, 2) / width**0.5
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
    return mixed.transpose(0, 1).reshape(rows, HIDDEN) @ w[f"{prefix}.self_attn.o_proj.weight"].T


def mlp(w: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate = F.silu(x @ w[f"{prefix}.mlp.gate_proj.weight"].T)
    return (gate * (x @ w[f"{prefix}.mlp.up_proj.weight"].T)) @ w[f"{prefix}.mlp.down_proj.weight"].T


def published(
    w: Tensors, target: Tensors, tokens: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted features and logits of a chain, from the target's features `[rows, hidden * captures]` or own
    ones."""
    embedded = F.embedding(tokens, w.get("embed_tokens.weight", target["model.embed_tokens.weight"]))
    if "fc.weight" in w and w["fc.weight"].shape[1] == 2 * HIDDEN:
        h = F.linear(torch.cat((embedded, features), dim=-1), w["fc.weight"], w.get("fc.bias"))
        h = h + attention(w, "layers.0", h)
        h = h + mlp(w, "layers.0", rms_norm(h, w["layers.0.post_attention_layernorm.weight"]))
        return h, h @ target.get("lm_head.weight", target["model.embed_tokens.weight"]).T
    h = features if features.shape[1] == HIDDEN else features @ w["fc.weight"].T
    x = torch.cat(
        (
            rms_norm(embedded, w["midlayer.input_layernorm.weight"]),
            rms_norm(h, w["midlayer.hidden_norm.weight"]),
        ),
        dim=-1,
    )
    h = h + attention(w, "midlayer", x)
    h = h + mlp(w, "midlayer", rms_norm(h, w["midlayer.post_attention_layernorm.weight"]))
    return h, rms_norm(h, w["norm.weight"]) @ w["lm_head.weight"].T


# --------------------------------------------------------------------------------------------------- parity


def tree_batch(cache: TreeCache, parents: list[int], first: int) -> tuple[TreeBatch, torch.Tensor]:
    """Rows `first..` of a tree given by parents (-1: none), in slots of the same numbers, and their
    positions."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, path in enumerate(paths):
        visible[node, path] = True
    positions = torch.tensor([len(path) - 1 for path in paths])
    slots = torch.arange(first, len(parents))
    return TreeBatch(
        [TreeRows(cache, 0, slots, positions[first:], positions.int(), visible[first:])], 0
    ), positions[first:]


def chain_input(width: int, rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (rows,), generator=rng), torch.randn(rows, width, generator=rng)


HEAD_CASES: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "eagle": (eagle(), {}),
    "eagle-bias": (eagle(bias=True), {"bias": True}),
    "eagle-qkv-bias": (eagle(qkv_bias=True), {"qkv_bias": True, "model_type": "qwen2"}),
    "eagle-embedding": ({**eagle(), "embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN)}, {}),
    "eagle3": (eagle3(), EAGLE3_CONFIG),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", HEAD_CASES)
def test_a_chain_is_what_the_published_forward_computes(
    name: str, tied: bool, targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    tensors, config = HEAD_CASES[name]
    files = write(tmp_path / "head", tensors, **config)
    assert is_eagle(files)
    head = EagleHead.load(files, targets[tied], "float32", CPU)
    is_three = name == "eagle3"
    assert (head.kind, head.capture) == (("eagle3", (2, 4, 5)) if is_three else ("eagle", (8,)))
    assert head.feature_width == (3 if is_three else 1) * HIDDEN
    tokens, features = chain_input(head.feature_width)
    folder = targets[tied].folder
    assert folder is not None
    expected, expected_logits = published(tensors, load_file(folder / "model.safetensors"), tokens, features)
    cache = head.new_cache(64)
    batch, positions = tree_batch(cache, list(range(-1, len(tokens) - 1)), 0)
    found = head.run(tokens, head.project(features), positions, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    logits = head.logits(found)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)
    ids = head.target_ids()
    assert (ids.tolist() if ids is not None else None) == (
        [3 * d + 1 for d in range(DRAFT_VOCABULARY)] if is_three else None
    )


@pytest.mark.parametrize("name", ["eagle-bias", "eagle3"])
def test_a_tree_in_two_segments_is_every_branch_alone(
    name: str, targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    tensors, config = HEAD_CASES[name]
    head = EagleHead.load(write(tmp_path / "head", tensors, **config), targets[False], "float32", CPU)
    tokens, features = chain_input(HIDDEN)
    parents = [-1, 0, 1, 1, 2, 3, 3, 4, 0]
    cache = head.new_cache(64)
    parts = []
    for first, end in ((0, 4), (4, 9)):
        batch, positions = tree_batch(cache, parents[:end], first)
        parts.append(head.run(tokens[first:end], features[first:end], positions, batch))
    found = torch.cat(parts)
    for path in ([0, 1, 2, 4, 7], [0, 1, 3, 5], [0, 1, 3, 6], [0, 8]):
        expected, _ = published(tensors, target_tensors(targets), tokens[path], features[path])
        torch.testing.assert_close(found[path], expected, atol=1e-5, rtol=1e-5)


def target_tensors(targets: dict[bool, ModelFiles]) -> Tensors:
    folder = targets[False].folder
    assert folder is not None
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("variant", "finish"),
    [
        ("granite", lambda logits: logits / 1.7),
        ("gemma2", lambda logits: 6 * torch.tanh(logits / 6)),
        ("gemma3", lambda logits: logits),
    ],
)
def test_an_eagle_head_ranks_by_what_a_target_of_any_family_would(
    variant: str, finish: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    target = ModelFiles(str(make_variant(tmp_path / "target", variant)))
    head = EagleHead.load(ModelFiles(str(make_head(tmp_path / "head", "eagle"))), target, "float32", CPU)
    count = target.config().num_hidden_layers
    last = Slice.load(target, Span(first=count - 1, end=count, count=count), "float32", CPU)
    assert last.pieces.lm_head is not None
    hidden = torch.randn((5, head.hidden_size), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(head.logits(hidden), finish(last.pieces.lm_head(hidden)))


def test_weights_are_counted_once(targets: dict[bool, ModelFiles], tmp_path: Path) -> None:
    files = write(tmp_path / "head", eagle())
    own = sum(tensor.numel() for tensor in eagle().values())
    sizes = [EagleHead.load(files, targets[tied], "bfloat16", CPU).weight_bytes for tied in (False, True)]
    assert sizes == [2 * (own + 2 * VOCABULARY * HIDDEN), 2 * (own + VOCABULARY * HIDDEN)]


def test_an_eagle3_head_of_the_whole_vocabulary_needs_no_ids(
    targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    tensors = {**without(eagle3(), "d2t"), "lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}
    head = EagleHead.load(write(tmp_path / "head", tensors), targets[False], "float32", CPU)
    assert head.kind == "eagle3"
    assert head.target_ids() is None


def test_the_bundled_head_belongs_to_the_bundled_target() -> None:
    files = ModelFiles(str(bundled_folder("eagle")))
    head = EagleHead.load(files, ModelFiles("bundled"), "float32", CPU)
    assert (head.kind, head.capture, head.feature_width) == ("eagle", (8,), 320)
    model = ModelFiles("bundled")
    assert not is_eagle(model)


# -------------------------------------------------------------------------------------------------- refusals


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without(eagle(), "layers.0.mlp.up_proj.weight"), {}, "no tensor layers.0.mlp.up_proj.weight"),
        (without(eagle(), "fc.weight"), {}, "is no EAGLE head"),
        (
            {**eagle(), "fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            {},
            r"fc.weight .*expected shape \[64, 128\].* got \[64, 64\]",
        ),
        (
            {**eagle(), "layers.0.input_layernorm.weight": torch.ones(HIDDEN)},
            {},
            "input_layernorm.weight: not supported",
        ),
        (eagle(), {"hidden_size": 32}, "expected hidden_size 64 as of .* got 32"),
        (eagle(), {"rms_norm_eps": "x"}, "cannot read the config.json"),
        (eagle(), {"num_attention_heads": 0}, "cannot (read|build)"),
        (eagle(), {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' position embeddings"),
        (without(eagle3(), "d2t"), EAGLE3_CONFIG, "no tensor d2t"),
        (
            {**eagle3(), "d2t": torch.full((DRAFT_VOCABULARY,), VOCABULARY)},
            EAGLE3_CONFIG,
            "expected d2t to lead to ids below 300",
        ),
        (eagle3(), {**EAGLE3_CONFIG, "draft_vocab_size": 301}, "draft_vocab_size: expected 1 to 300"),
        (eagle3(), {}, r"lm_head.weight .*expected shape \[300, 64\]"),
        (
            eagle3(),
            {**EAGLE3_CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}},
            r"what leaves the last layer .* before its final norm",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tensors: Tensors, config: dict[str, Any], message: str, targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    files = write(tmp_path / "head", tensors, **config)
    with pytest.raises(InputError, match=message) as caught:
        EagleHead.load(files, targets[False], "float32", CPU)
    assert "\n" not in str(caught.value)
