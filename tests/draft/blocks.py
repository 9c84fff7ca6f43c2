"""Small block drafters with random weights, in the published layout, for targets of `tests.checkpoints`.
Their configs are in `tests/data/drafters.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.draft import weights

DATA = json.loads((Path(__file__).parents[1] / "data" / "drafters.json").read_text("utf-8"))
BLOCK, DSPARK = DATA["block"], DATA["dspark"]


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    drop: str = "",
    extra: dict[str, list[int]] | None = None,
) -> Path:
    """A folder with these, but for `drop`, and with `extra` tensors of ones."""
    kept = {name: tensor for name, tensor in tensors.items() if name != drop}
    for name, shape in (extra or {}).items():
        kept[name] = torch.ones(shape, dtype=tensors[name].dtype if name in tensors else torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_dspark(folder: Path, *, is_gated: bool = False, **changes: Any) -> Path:
    """As `make_block_drafter`, a DSpark with an embedding and an `lm_head` of its own."""
    kind = {"markov_head_type": "gated"} if is_gated else {}
    return make_block_drafter(folder, is_dspark=True, **{**DSPARK, **kind, **changes})


def make_block_drafter(
    folder: Path,
    *,
    is_dspark: bool = False,
    drop: str = "",
    extra: dict[str, list[int]] | None = None,
    own: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A folder with a block drafter; `own` go into its config's `dflash_config`, `changes` beside it."""
    width, inner, head = (BLOCK[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, keys = BLOCK["num_attention_heads"] * head, BLOCK["num_key_value_heads"] * head
    shapes = {"fc.weight": (width, 3 * width), **weights.norms("", width, "hidden_norm", "norm")}
    for layer in range(BLOCK["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= weights.attention(f"{at}self_attn.", width, heads, keys, width, head)
        shapes |= weights.mlp(f"{at}mlp.", width, inner)
        shapes |= weights.norms(at, width, "input_layernorm", "post_attention_layernorm")
    tensors = weights.random(shapes, 13, 0.2)
    if is_dspark:
        rank, vocabulary = DSPARK["markov_rank"], BLOCK["vocab_size"]
        shapes = {f"{name}.weight": (vocabulary, width) for name in ("embed_tokens", "lm_head")}
        shapes |= {f"markov_head.markov_w{part}.weight": (vocabulary, rank) for part in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, width + rank), "confidence_head.proj.bias": (1,)}
        if changes.get("markov_head_type") == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        tensors |= weights.random(shapes, 17, 0.3)
        tensors["markov_head.markov_w2.weight"] *= 4
    dflash = {**BLOCK["dflash_config"], **(own or {})}
    config = {**BLOCK, "dflash_config": dflash, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    return write(folder, config, tensors, drop, extra)
