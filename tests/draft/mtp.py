"""Small checkpoints with MTP layers of random weights, in the published layouts, and what the published code
computes with them, in plain torch: nothing here uses a line of what it checks.

Written after vLLM's `qwen3_5_mtp` and `glm4_moe_mtp` and SGLang's `qwen3_5_mtp` and `glm4_moe_nextn`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_variant
from tests.draft import weights
from tests.draft.published import attended, causal, norm, turned

Weights = dict[str, torch.Tensor]
SHARDS = ("layers.safetensors", "ends.safetensors", "mtp.safetensors")
"""What a checkpoint here is divided into: the model's layers, its embedding, norm and `lm_head`, and the MTP
layer."""
VARIANTS = ("qwen3.5", "qwen3.5-text", "qwen3.5-moe", "qwen3.5-moe-fused", "glm4-moe")


def make_mtp(folder: Path, variant: str, *, own_ends: bool = False, **changes: Any) -> Path:
    """A checkpoint of `tests.checkpoints` with an MTP layer; with `own_ends` GLM's layer has an embedding and
    a `lm_head` unlike the model's. `changes` go into the decoder's config."""
    made = make_variant(folder, variant)
    whole = json.loads((folder / "config.json").read_text())
    config = whole.get("text_config", whole)
    is_glm = variant.startswith("glm")
    config |= {"num_nextn_predict_layers": 1} if is_glm else {"mtp_num_hidden_layers": 1}
    config |= changes
    whole["tie_word_embeddings"] = config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(whole))
    weights = load_file(made / "model.safetensors")
    (made / "model.safetensors").unlink()
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    mtp = glm_layer(config, own_ends) if is_glm else qwen_layer(config, variant.endswith("-fused"))
    parts: tuple[Weights, ...] = ({}, {}, mtp)
    for name, values in weights.items():
        parts[".layers." not in name][name] = values
    write(folder, parts)
    return folder


def write(folder: Path, parts: tuple[Weights, ...]) -> None:
    """The shards of a checkpoint, and their index."""
    found: dict[str, str] = {}
    for shard, part in zip(SHARDS, parts, strict=True):
        save_file(part, folder / shard, {"format": "pt"})
        found |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": found}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read(folder: Path) -> tuple[Weights, Weights, Weights]:
    layers, ends, mtp = (load_file(folder / shard) for shard in SHARDS)
    return layers, ends, mtp


def _layer(prefix: str, config: dict[str, Any], outputs: int) -> weights.Shapes:
    width, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    of_keys, at = config["num_key_value_heads"] * size, f"{prefix}self_attn."
    found = weights.attention(at, width, outputs, of_keys, width, size)
    found[f"{at}o_proj.weight"] = (width, heads * size)
    found |= weights.norms(prefix, width, "input_layernorm", "post_attention_layernorm")
    rows = {"q_proj": outputs, "k_proj": of_keys, "v_proj": of_keys}
    if config["attention_bias"]:
        found |= {f"{prefix}self_attn.{name}.bias": (count,) for name, count in rows.items()}
    return found


def qwen_layer(config: dict[str, Any], fused: bool) -> Weights:
    width, layer = config["hidden_size"], "mtp.layers.0."
    shapes = _layer(layer, config, 2 * config["num_attention_heads"] * config["head_dim"])
    if config["attention_bias"]:
        shapes[f"{layer}self_attn.o_proj.bias"] = (width,)
    shapes["mtp.fc.weight"] = (width, 2 * width)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{name}.weight"] = (width,)
    count = config.get("num_experts", 0)
    if not count:
        return weights.random(
            shapes | weights.mlp(f"{layer}mlp.", width, config["intermediate_size"]), 11, 0.15, 0.0
        )
    inner = config["moe_intermediate_size"]
    if fused:
        shapes[f"{layer}mlp.experts.gate_up_proj"] = (count, 2 * inner, width)
        shapes[f"{layer}mlp.experts.down_proj"] = (count, width, inner)
    else:
        for expert in range(count):
            shapes |= weights.mlp(f"{layer}mlp.experts.{expert}.", width, inner)
    shapes[f"{layer}mlp.gate.weight"] = (count, width)
    shapes[f"{layer}mlp.shared_expert_gate.weight"] = (1, width)
    shapes |= weights.mlp(f"{layer}mlp.shared_expert.", width, config["shared_expert_intermediate_size"])
    return weights.random(shapes, 11, 0.15, 0.0)


def glm_layer(config: dict[str, Any], own_ends: bool) -> Weights:
    width, layer = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    shapes = _layer(layer, config, config["num_attention_heads"] * config["head_dim"])
    shapes[f"{layer}eh_proj.weight"] = (width, 2 * width)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{layer}{name}.weight"] = (width,)
    count, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    for expert in range(count):
        shapes |= weights.mlp(f"{layer}mlp.experts.{expert}.", width, inner)
    shapes[f"{layer}mlp.gate.weight"] = (count, width)
    shapes[f"{layer}mlp.gate.e_score_correction_bias"] = (count,)
    shapes |= weights.mlp(f"{layer}mlp.shared_experts.", width, inner * config["n_shared_experts"])
    if own_ends:
        for name in ("embed_tokens", "shared_head.head"):
            shapes[f"{layer}{name}.weight"] = (config["vocab_size"], width)
    return weights.random(shapes, 11, 0.15)


# ------------------------------------------------------------------------------------- the published forward


class Published:
    """What a checkpoint's MTP layer computes for a chain at positions 0, 1, ..., in float32."""

    def __init__(self, folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = whole.get("text_config", whole)
        _, ends, mtp = read(folder)
        self.is_glm = "n_routed_experts" in self.config
        prefix = f"model.layers.{self.config['num_hidden_layers']}." if self.is_glm else "mtp."
        own = {name.removeprefix(prefix): values.float() for name, values in mtp.items()}
        self.w = {name.removeprefix("layers.0."): values for name, values in own.items()}
        embedding = next(values for name, values in ends.items() if name.endswith("embed_tokens.weight"))
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        lm_head = ends.get("lm_head.weight", embedding)
        self.lm_head = self.w.get("shared_head.head.weight", lm_head)

    def __call__(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted features `[rows, hidden]`, and logits `[rows, vocabulary]` of the tokens after the next:
        row i has token i + 1 and feature i."""
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if not self.is_glm:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        of_token, of_feature, projection, last = names
        both = torch.cat(
            [self.norm(self.embedding[tokens].float(), of_token), self.norm(features.float(), of_feature)], -1
        )
        hidden = both @ self.w[f"{projection}.weight"].T
        hidden = hidden + self.attention(self.norm(hidden, "input_layernorm"))
        hidden = hidden + self.feed_forward(self.norm(hidden, "post_attention_layernorm"))
        predicted = self.norm(hidden, last)
        return predicted, predicted @ self.lm_head.float().T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.w[f"{name}.weight"] + (0 if self.is_glm else 1), self.config["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        rows, size, heads = len(x), self.config["head_dim"], self.config["num_attention_heads"]
        queries = self.linear(x, "self_attn.q_proj").view(rows, heads, -1)
        gate = queries[..., size:].reshape(rows, -1)  # empty where there is none
        keys, values = (self.linear(x, f"self_attn.{name}_proj").view(rows, -1, size) for name in "kv")
        rope, places = self.config["rope_parameters"], torch.arange(rows)
        turning = int(size * rope["partial_rotary_factor"])
        q = self.norm(queries[..., :size], "self_attn.q_norm")
        k = self.norm(keys, "self_attn.k_norm")
        q, k = (turned(each, places, rope["rope_theta"], turning) for each in (q, k))
        mixed = attended(q, k, values, causal(rows))
        return self.linear(mixed if self.is_glm else mixed * gate.sigmoid(), "self_attn.o_proj")

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gated = F.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")

    def expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if "mlp.experts.gate_up_proj" not in self.w:
            return self.mlp(x, f"mlp.experts.{number}")
        gate, up = (self.w["mlp.experts.gate_up_proj"][number] @ x).chunk(2)
        return self.w["mlp.experts.down_proj"][number] @ (F.silu(gate) * up)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mlp.gate.weight" not in self.w:
            return self.mlp(x, "mlp")
        logits = x @ self.w["mlp.gate.weight"].T
        chosen = self.chosen_by_groups(logits.sigmoid()) if self.is_glm else logits.softmax(-1)
        count = self.config["num_experts_per_tok"]
        rows = []
        for row, choice, shares in zip(
            x, chosen, logits.sigmoid() if self.is_glm else logits.softmax(-1), strict=True
        ):
            experts = sorted(range(len(choice)), key=lambda each: -float(choice[each]))[:count]
            total = sum(shares[each] for each in experts)
            scale = self.config.get("routed_scaling_factor", 1.0)
            parts = [self.expert(row, each) * shares[each] / total * scale for each in experts]
            rows.append(torch.stack(parts).sum(0))
        routed = torch.stack(rows)
        if self.is_glm:
            return routed + self.mlp(x, "mlp.shared_experts")
        return routed + self.mlp(x, "mlp.shared_expert") * self.linear(x, "mlp.shared_expert_gate").sigmoid()

    def chosen_by_groups(self, shares: torch.Tensor) -> torch.Tensor:
        """By what experts are chosen: shares and biases, within the groups whose two best are best."""
        choice = shares + self.w["mlp.gate.e_score_correction_bias"]
        groups = choice.view(len(choice), self.config["n_group"], -1)
        best = groups.sort(-1, descending=True).values[..., :2].sum(-1)
        for row, each in enumerate(best):
            for group in each.sort(descending=True).indices[self.config["topk_group"] :]:
                groups[row, group] = float("-inf")
        return groups.flatten(1)
