"""A block drafter guesses as its publisher's definition has it, and goes on with what the target gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE, make_variant
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.block import BlockDrafter
from flowspec.draft.block_head import BlockHead
from flowspec.draft.kinds import check_drafter, find_drafter, open_drafter
from flowspec.draft.kinds.block import Block
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.plan.shape import shape_of
from tests.draft.blocks import IDS, SIZE, make_block_drafter, make_dspark
from tests.draft.mirrors import CPU, WIDTH, check, draft, grow, make_case
from tests.draft.trees import segment

HIDDEN = SMALL["hidden_size"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 10,
    },
    "both ways in windows": {
        "layer_types": ["sliding_attention"] * 3,
        "use_sliding_window": True,
        "sliding_window": 10,
        "is_causal": False,
        "own": {"output_multiplier": 0.4, "final_logit_softcapping": 2.0, "input_embedding_scale": 3.0},
    },
    "one way": {"is_causal": True, "own": {"block_size": 4}},
    "DSpark": {"make": make_dspark},
    "DSpark, gated": {"make": make_dspark, "is_gated": True, "block_size": 3},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_variant(tmp_path_factory.mktemp("target"), "llama-grouped")))


@pytest.fixture(scope="module", params=[make_block_drafter, make_dspark])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(request.param(tmp_path_factory.mktemp("block"))))


class Published:
    """What the published definitions compute, written down anew, without caches: one block behind a text."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.is_dspark = self.config["architectures"] == ["Qwen3DSparkModel"]
        self.own = {**self.config, **self.config.get("dflash_config", {})}
        self.weights = load_file(folder / "model.safetensors")
        of_target = load_file(target / "model.safetensors")
        shared = {name: of_target[f"model.{name}"] for name in ("embed_tokens.weight",)}
        shared["lm_head.weight"] = of_target["lm_head.weight"]
        self.embedding, self.lm_head = ({**shared, **self.weights}[name] for name in shared)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[name]

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, width]`, by pairs of halves."""
        half = x.shape[-1] // 2
        speeds = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones(()).double(), positions[:, None].double() * speeds)[:, None]
        found = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat([found.real, found.imag], dim=-1).float()

    def logits(self, features: torch.Tensor, token: int, before: list[int]) -> torch.Tensor:
        """`[guesses, vocabulary]` from the target's features `[length, hidden * layers]` and the token
        behind them; `before` each guess stands a token."""
        hidden = self.hidden(features, token)
        found = hidden @ self.lm_head.T * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        found = torch.tanh(found / cap) * cap if cap else found
        if self.is_dspark:
            latent = self.weights["markov_head.markov_w1.weight"][before]
            if self.config["markov_head_type"] == "gated":
                gate = torch.cat([hidden, latent], -1) @ self.weights["markov_head.gate_proj.weight"].T
                latent = latent / (1 + (-gate - self.weights["markov_head.gate_proj.bias"]).exp())
            found = found + latent @ self.weights["markov_head.markov_w2.weight"].T
        return found

    def hidden(self, features: torch.Tensor, token: int) -> torch.Tensor:
        """Of the places that are guessed, in a DSpark also by the first row."""
        before, size = len(features), self.own["block_size"]
        context = self.norm(features @ self.weights["fc.weight"].T, "hidden_norm.weight")
        ids = torch.tensor([token, *[self.own["mask_token_id"]] * (size - 1)])
        x = self.embedding[ids] * self.own.get("input_embedding_scale", 1.0)
        positions = torch.arange(before + size)
        own, keys = positions[before:, None], positions[None]
        types = self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]
        for layer, kind in enumerate(types):
            at = f"layers.{layer}.self_attn."

            def heads(y: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
                return (y @ self.weights[f"{at}{name}.weight"].T).view(len(y), -1, self.config["head_dim"])

            h = self.norm(x, f"layers.{layer}.input_layernorm.weight")
            q = self.turned(self.norm(heads(h, "q_proj"), f"{at}q_norm.weight"), positions[before:])
            k = torch.cat([heads(context, "k_proj"), heads(h, "k_proj")])
            k = self.turned(self.norm(k, f"{at}k_norm.weight"), positions)
            v = torch.cat([heads(context, "v_proj"), heads(h, "v_proj")])
            is_window = kind == "sliding_attention"
            seen = torch.ones(size, before + size, dtype=torch.bool)
            if self.config.get("is_causal", is_window and not self.is_dspark):
                seen &= keys <= own
            if is_window:
                seen &= (own - keys).abs() < self.config["sliding_window"]
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
            scores = (scores / math.sqrt(self.config["head_dim"])).masked_fill(~seen, -math.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
            x = x + mixed.flatten(1) @ self.weights[f"{at}o_proj.weight"].T
            h = self.norm(x, f"layers.{layer}.post_attention_layernorm.weight")
            mlp = f"layers.{layer}.mlp."
            gate = torch.nn.functional.silu(h @ self.weights[f"{mlp}gate_proj.weight"].T)
            h = gate * (h @ self.weights[f"{mlp}up_proj.weight"].T)
            x = x + h @ self.weights[f"{mlp}down_proj.weight"].T
        return self.norm(x, "norm.weight")[0 if self.is_dspark else 1 :]


def features_of(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, HIDDEN * len(IDS)), generator=generator)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_is_guessed_as_published(name: str, target: ModelFiles, tmp_path: Path) -> None:
    """Also where its context came in several parts, and where another block was tried there before."""
    changes = dict(VARIANTS[name])
    folder = changes.pop("make", make_block_drafter)(tmp_path, **changes)
    head = BlockHead.load(ModelFiles(str(folder)), target, "float32", CPU)
    assert head.capture == ((0, 4, 8) if name.startswith("DSpark") else (2, 5, 7))
    features = features_of(23)
    published = Published(folder, Path(target.model))
    cache = head.new_cache(60)
    cache.reserve(23)
    projected = head.project(features)
    head.write(projected[:9], torch.arange(9), cache)
    for length, first, token in ((9, 9, 17), (23, 23, 40)):
        guesses = head.run([token], [length], [cache])[0]
        before = [(53 * place + token) % VOCABULARY_SIZE for place in range(len(guesses))]
        expected = published.logits(features[:length], token, before)
        torch.testing.assert_close(head.logits(head.after(guesses, before)), expected, rtol=1e-3, atol=1e-4)
        head.write(projected[first:], torch.arange(first, 23), cache)


def test_blocks_of_several_requests_run_together(files: ModelFiles, target: ModelFiles) -> None:
    head = BlockHead.load(files, target, "float32", CPU)
    caches, alone = [], []
    for length, token in ((5, 3), (12, 8)):
        cache = head.new_cache(40)
        cache.reserve(length)
        head.write(head.project(features_of(length, seed=length)), torch.arange(length), cache)
        alone.append(head.run([token], [length], [cache])[0])
        caches.append(cache)
    together = head.run([3, 8], [5, 12], caches)
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------- as a drafter


@pytest.mark.parametrize("kind", ["block", "dspark"])
def test_all_that_lives_is_proposed_anew_with_the_next_block(kind: str, tmp_path: Path) -> None:
    case = make_case(kind, tmp_path)
    drafter, mirror = case.new_drafter(), case.new_mirror(1, Sampling(temperature=0.8, seed=6))
    teller = mirror.teller
    teller.begin([3, 5, 8, 13, 21])
    mirror.tell_path(drafter)
    draft(drafter, mirror, [teller.root])
    chain, tip = [], teller.root
    for _ in range(SIZE):  # one deeper than the block
        nodes = grow(teller, tip, 2)
        draft(drafter, mirror, nodes)
        chain.append(nodes)
        tip = nodes[0]
    assert not mirror.expected(chain[-1]), "nothing is guessed behind the end of a block"
    mirror.tell(drafter, [teller.root])
    teller.commit(chain[0][0])
    last = grow(teller, chain[1][1], 1)
    found = drafter.draft(segment(teller.part(last)), WIDTH)
    living = [node for nodes in [*chain, last] for node in nodes if teller.is_living(node)]
    check(mirror, found, mirror.expected(living))
    assert len(found) > SIZE


# ------------------------------------------------------------------------------------------- what it takes


def test_it_is_found_reckoned_and_opened(files: ModelFiles, target: ModelFiles) -> None:
    kind = find_drafter(files.model)
    assert isinstance(kind, Block)
    check_drafter(files.model)
    reckoned = kind.reckoned(shape_of(target.config(), "target"))
    assert reckoned.shape is not None
    assert (reckoned.shape.layers, reckoned.shape.heads) == (3, 4)
    drafter = open_drafter(files.model, target, "bfloat16", CPU, context=100)
    assert isinstance(drafter, BlockDrafter)
    assert drafter.captures == drafter._head.block.captures
    assert drafter._head.slot_bytes == 2 * 3 * 2 * 2 * 24


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "is a DFlash2DraftModel, which guesses blocks in another way"),
    ({"architectures": ["Gemma4DSparkModel"]}, "is a Gemma4DSparkModel, which guesses blocks in another way"),
    (
        {"make": make_dspark, "markov_head_type": "rnn"},
        "markov_head_type: expected vanilla or gated, got 'rnn'",
    ),
    ({"make": make_dspark, "markov_rank": 11}, "expected shape [300, 11] by config.json, got [300, 10]"),
    ({"make": make_dspark, "markov_rank": None}, "markov_rank: expected 0 to 16384, got None"),
    ({"make": make_dspark, "target_layer_ids": [-2, 3]}, "in growing order, got [-2, 3]"),
    ({"dflash_config": [1]}, "dflash_config: expected its fields, got [1]"),
    ({"own": {"selector_rank": 4}}, "dflash_config: selector_rank is not supported; expected block_size"),
    ({"own": {"target_layer_ids": [1, 8]}}, "expected layers of the target's 8 in growing order, got [1, 8]"),
    ({"own": {"target_layer_ids": [4, 1, 6]}}, "in growing order, got [4, 1, 6]"),
    ({"own": {"mask_token_id": 300}}, "mask_token_id: expected 0 to 299, got 300"),
    ({"own": {"mask_token_id": None}}, "mask_token_id: expected 0 to 299, got None"),
    ({"block_size": 1000}, "block_size: expected 2 to 64, got 1000"),
    ({"own": {"output_multiplier": "1"}}, "output_multiplier: expected a number, got '1'"),
    ({"is_causal": 3}, "is_causal: expected true or false, got 3"),
    ({"num_target_layers": 36}, "for another model: expected num_target_layers 8, got 36"),
    ({"vocab_size": 320}, "for another model: expected vocab_size 300 as of"),
    ({"hidden_size": 48}, "for another model: expected hidden_size 64 as of"),
    ({"drop": ("layers.1.self_attn.k_norm.weight",)}, "has no tensor layers.1.self_attn.k_norm.weight"),
    (
        {"extra": {"candidate_selector.w": torch.ones(2)}},
        "has tensors that no published one has, cand",
    ),
    ({"extra": {"norm.weight": torch.ones(3)}}, "expected shape [64] by config.json, got [3]"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, "quantised"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_does_not_fit_is_refused_in_a_line(
    changes: dict[str, Any], message: str, target: ModelFiles, tmp_path: Path
) -> None:
    changes = dict(changes)
    folder = changes.pop("make", make_block_drafter)(tmp_path / "block", **changes)
    with pytest.raises(InputError) as refusal:
        open_drafter(str(folder), target, "float32", CPU, context=100)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
