"""The forward of an EAGLE head as its publishers define it, in plain torch, with nothing of the product.

Norms, layers and what is fed back are said by the caller, who has them from the publisher's code:
speculators' `models/eagle3`, SpecForge's `llama3_eagle.py`, ModelOpt's `modeling_eagle.py`, DeepSpec's
`modeling/eagle3/qwen3`, SafeAILab's `cnets.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A head's sizes, and what it does where publishers differ. Tensors are named `layers.0.*`."""

    heads: int = 4
    key_heads: int = 2
    head_width: int = 16
    eps: float = 1e-5
    theta: float = 5000.0
    layers: int = 1
    is_first: bool = False  # EAGLE, and not EAGLE-3
    embedding_in_each_layer: bool = False
    later_norm: str = "input_layernorm"
    feature_norm: str = ""  # fc_norm: each state by itself; input_norm: all side by side
    norm_before_residual: bool = False
    norm_output: bool = False

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def project(self, w: Tensors, captured: list[torch.Tensor]) -> torch.Tensor:
        """Features from captured states, each `[rows, target width]`."""
        if self.feature_norm == "fc_norm":
            captured = [self.norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(captured)]
        joined = torch.cat(captured, dim=-1)
        if self.feature_norm == "input_norm":
            joined = self.norm(joined, w["input_norm.weight"])
        return joined @ w["fc.weight"].T if "fc.weight" in w and not self.is_first else joined

    def attention(self, w: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)

        def heads(name: str) -> torch.Tensor:
            bias = w.get(f"{prefix}.{name}_proj.bias")
            found = F.linear(x, w[f"{prefix}.{name}_proj.weight"], bias).view(rows, -1, self.head_width)
            norm = w.get(f"{prefix}.{name}_norm.weight")
            return (found if norm is None else self.norm(found, norm)).transpose(0, 1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            half = self.head_width // 2
            angle = torch.arange(rows)[:, None] * self.theta ** (-torch.arange(half) / half)
            a, b = x[..., :half], x[..., half:]
            return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)

        times = self.heads // self.key_heads
        q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
        k, v = (each.repeat_interleave(times, dim=0) for each in (k, v))
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / self.head_width**0.5).masked_fill(later, float("-inf"))
        mixed = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(rows, -1)
        return F.linear(mixed, w[f"{prefix}.o_proj.weight"], w.get(f"{prefix}.o_proj.bias"))

    def run(self, w: Tensors, embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """Predicted features of a chain, `[rows, width]`, as they are fed back."""
        hidden = feature
        if self.is_first:
            hidden = F.linear(torch.cat((embedded, feature), dim=-1), w["fc.weight"], w.get("fc.bias"))
        for index in range(self.layers):
            at = f"layers.{index}"
            residual = hidden
            if self.is_first:
                read = hidden
            elif index == 0 or self.embedding_in_each_layer:
                normed = self.norm(hidden, w[f"{at}.hidden_norm.weight"])
                if self.norm_before_residual:
                    residual = normed
                read = torch.cat((self.norm(embedded, w[f"{at}.input_layernorm.weight"]), normed), dim=-1)
            else:
                read = self.norm(hidden, w[f"{at}.{self.later_norm}.weight"])
            hidden = residual + self.attention(w, f"{at}.self_attn", read)
            x = self.norm(hidden, w[f"{at}.post_attention_layernorm.weight"])
            gate, up = (x @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            hidden = hidden + (F.silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
        return self.norm(hidden, w["norm.weight"]) if self.norm_output else hidden

    def logits(self, w: Tensors, predicted: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        has_norm = "norm.weight" in w and not self.norm_output
        return (self.norm(predicted, w["norm.weight"]) if has_norm else predicted) @ lm_head.T
