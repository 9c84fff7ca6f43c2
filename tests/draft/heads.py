"""Small EAGLE heads with random weights, in every published layout, for targets of `tests.checkpoints`.

Layouts, and what is none, are in `tests/data/eagle_layouts.json`: configs are changes to one of its `bases`,
tensors of ones if nothing else is said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowspec.model.files import ModelFiles
from tests.draft import weights
from tests.draft.published import Published, Tensors

HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 64, 300, 96
DATA = json.loads((Path(__file__).parents[1] / "data" / "eagle_layouts.json").read_text("utf-8"))


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Also what is within."""
    found = dict(config)
    for name, value in changes.items():
        old = found.get(name)
        found[name] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return found


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a publisher writes a head: its config, the names of its tensors, and what they mean."""

    config: dict[str, Any]
    means: Published = field(default_factory=Published)
    captures: tuple[int, ...] = (2, 4, 5)
    width: int = HIDDEN
    midlayer: bool = False
    has_bias: bool = False
    has_own_embedding: bool = False
    has_lm_head: bool = True

    def tensors(self) -> Tensors:
        """Under the names of `Published`."""
        means, width = self.means, self.width
        inner, keys = means.heads * means.head_width, means.key_heads * means.head_width
        shapes: dict[str, tuple[int, ...]] = {} if means.is_first else {"norm.weight": (width,)}
        if self.has_lm_head:
            shapes["lm_head.weight"] = (DRAFT_VOCABULARY, width)
        shapes["fc.weight"] = (width, (2 if means.is_first else len(self.captures)) * HIDDEN)
        if self.has_bias:
            shapes["fc.bias"] = (width,)
        if self.has_own_embedding:
            shapes["embed_tokens.weight"] = (VOCABULARY, width)
        for index in range(len(self.captures) if means.feature_norm == "fc_norm" else 0):
            shapes[f"fc_norm.{index}.weight"] = (HIDDEN,)
        if means.feature_norm == "input_norm":
            shapes["input_norm.weight"] = (len(self.captures) * HIDDEN,)
        for index in range(means.layers):
            at, reads = f"layers.{index}", index == 0 or means.embedding_in_each_layer
            read, norms = width, ["post_attention_layernorm"]
            if not means.is_first:
                read = 2 * width if reads else width
                norms += ["input_layernorm", "hidden_norm"] if reads else [means.later_norm]
            has_norms = "qwen3" in (self.config.get("model_type"), self.layer_type)
            size = means.head_width if has_norms else 0
            shapes |= weights.attention(f"{at}.self_attn.", read, inner, keys, width, size)
            shapes |= {**weights.mlp(f"{at}.mlp.", width, 128), **weights.norms(f"{at}.", width, *norms)}
            if self.config.get("attention_bias") or self.config.get("qkv_bias"):
                shapes |= {
                    f"{at}.self_attn.{name}_proj.bias": (inner if name == "q" else keys,) for name in "qkv"
                }
        return weights.random(shapes, 5, 0.15)

    @property
    def layer_type(self) -> str:
        return str(self.config.get("transformer_layer_config", {}).get("model_type"))

    def write(self, folder: Path, tensors: Tensors | None = None, **config: Any) -> ModelFiles:
        named = {self.published(name): each for name, each in (tensors or self.tensors()).items()}
        if self.has_lm_head:
            kept = torch.arange(DRAFT_VOCABULARY) * 3 + 1
            is_kept = torch.zeros(VOCABULARY, dtype=torch.bool)
            is_kept[kept] = True
            named |= {"d2t": kept - torch.arange(DRAFT_VOCABULARY), "t2d": is_kept}
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(merged(self.config, config)), encoding="utf-8")
        save_file(named, folder / "model.safetensors")
        return ModelFiles(str(folder))

    def published(self, name: str) -> str:
        return name.replace("layers.0.", "midlayer.") if self.midlayer else name


def layout_of(entry: dict[str, Any]) -> Layout:
    fields = {name: value for name, value in entry.items() if name not in ("base", "config", "computes")}
    config = merged(DATA["bases"][entry["base"]], entry.get("config", {}))
    means = Published(**entry.get("computes", {}))
    if means.is_first:
        fields |= {"captures": (8,), "has_lm_head": False}
    captures = tuple(fields.pop("captures", Layout.captures))
    return Layout(config=config, means=means, captures=captures, **fields)


LAYOUTS = {name: layout_of(entry) for name, entry in DATA["layouts"].items()}


def make_head(folder: Path, layout: str = "eagle") -> Path:
    """A folder with a head."""
    LAYOUTS[layout].write(folder, max_position_embeddings=512)
    return folder
