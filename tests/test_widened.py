"""A widened model's logits are those of the model that it was made of, and nothing of it is idle by being
zero but what makes that so."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowspec.model.files import bundled_folder
from tests.widened import Width, widen

WIDTH = Width(hidden=512, intermediate=1024, layers=6, heads=16, kv_heads=8)


def test_it_says_what_the_small_one_says(tmp_path: Path) -> None:
    small = bundled_folder("mid")
    wide = widen(small, tmp_path / "wide", WIDTH)
    ids = torch.arange(6, 70)[None]
    with torch.inference_mode():
        few, many = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (small, wide)
        )
    assert few.abs().max() > 5, "zeros would be alike, too"
    assert torch.allclose(few, many, atol=1e-3)


def test_only_outputs_are_zeros(tmp_path: Path) -> None:
    weights = load_file(widen(bundled_folder("mid"), tmp_path, WIDTH) / "model.safetensors")
    shares = {name: float((values == 0).float().mean()) for name, values in weights.items()}
    zeros = {name for name, share in shares.items() if share > 0.01}
    assert all(name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")) for name in zeros)
    assert sum(shares[f"model.layers.{number}.mlp.down_proj.weight"] == 1 for number in range(6)) == 2
