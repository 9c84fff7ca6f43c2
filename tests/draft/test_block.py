"""A block drafter guesses as its publisher's definition has it, and goes on with what the target gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowspec.core.protocol.messages import Sampling
from flowspec.draft.registry import find_drafter
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from tests.checkpoints import SMALL, VOCABULARY_SIZE, make_variant
from tests.draft.blocks import BLOCK, DATA, make_block_drafter, make_dspark
from tests.draft.mirrors import WIDTH, check, draft, grow, load_block, make_case
from tests.draft.published import attended, norm, turned
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
        return norm(x, self.weights[name], 1e-6)

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
            q = turned(self.norm(heads(h, "q_proj"), f"{at}q_norm.weight"), positions[before:], 10000.0)
            k = torch.cat([heads(context, "k_proj"), heads(h, "k_proj")])
            k = turned(self.norm(k, f"{at}k_norm.weight"), positions, 10000.0)
            v = torch.cat([heads(context, "v_proj"), heads(h, "v_proj")])
            is_window = kind == "sliding_attention"
            seen = torch.ones(size, before + size, dtype=torch.bool)
            if self.config.get("is_causal", is_window and not self.is_dspark):
                seen &= keys <= own
            if is_window:
                seen &= (own - keys).abs() < self.config["sliding_window"]
            x = x + attended(q, k, v, seen) @ self.weights[f"{at}o_proj.weight"].T
            h = self.norm(x, f"layers.{layer}.post_attention_layernorm.weight")
            mlp = f"layers.{layer}.mlp."
            gate = torch.nn.functional.silu(h @ self.weights[f"{mlp}gate_proj.weight"].T)
            h = gate * (h @ self.weights[f"{mlp}up_proj.weight"].T)
            x = x + h @ self.weights[f"{mlp}down_proj.weight"].T
        return self.norm(x, "norm.weight")[0 if self.is_dspark else 1 :]


def features_of(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, HIDDEN * 3), generator=generator)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_is_guessed_as_published(name: str, target: ModelFiles, tmp_path: Path) -> None:
    """Also where its context came in several parts, and where another block was tried there before."""
    changes = dict(VARIANTS[name])
    folder = changes.pop("make", make_block_drafter)(tmp_path, **changes)
    head = load_block(ModelFiles(str(folder)), target, "float32", "cpu")
    assert head.captures == ((0, 4, 8) if name.startswith("DSpark") else (2, 5, 7))
    features = features_of(23)
    published = Published(folder, Path(target.model))
    cache = head.new_cache(60)
    cache.reserve(23)
    projected = head.project(features.numpy())
    head.write(projected[:9], np.arange(9), cache)
    for length, first, token in ((9, 9, 17), (23, 23, 40)):
        guesses = head.guess([token], [length], [cache])[0]
        before = [(53 * place + token) % VOCABULARY_SIZE for place in range(len(guesses))]
        expected = published.logits(features[:length], token, before)
        np.testing.assert_allclose(head.logits(head.after(guesses, before)), expected, rtol=1e-3, atol=1e-4)
        head.write(projected[first:], np.arange(first, 23), cache)


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
    for _ in range(BLOCK["block_size"]):  # one deeper than the block
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
    assert len(found) > BLOCK["block_size"]


# ------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize(("message", "changes"), DATA["refused blocks"], ids=lambda each: str(each)[:30])
def test_what_does_not_fit_is_refused_in_a_line(
    message: str, changes: dict[str, Any], target: ModelFiles, tmp_path: Path
) -> None:
    changes = dict(changes)
    make = make_dspark if changes.pop("is_dspark", False) else make_block_drafter
    folder = make(tmp_path / "block", **changes)
    with pytest.raises(InputError) as refusal:
        find_drafter(str(folder)).open(target, "float32", "cpu", context=100)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
