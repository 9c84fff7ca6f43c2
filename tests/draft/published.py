"""Parts of published forward passes, and that of an EAGLE head as its publishers define it, in plain torch,
with nothing of the product.

Norms, layers and what is fed back are said by the caller, who has them from the publisher's code:
speculators' `models/eagle3`, SpecForge's `llama3_eagle.py`, ModelOpt's `modeling_eagle.py`, DeepSpec's
`modeling/eagle3/qwen3`, SafeAILab's `cnets.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.draft.weights import Tensors


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float, turning: int = 0) -> torch.Tensor:
    """RoPE on the first `turning` (0: all) of each head, `[rows, heads, size]`."""
    turning = turning or x.shape[-1]
    half = turning // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions[:, None] * speeds)[:, None]  # [rows, 1, half]
    a, b, still = x[..., :half], x[..., half:turning], x[..., turning:]
    pairs = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat([*pairs, still], dim=-1).float()


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """What each row sees, `[rows, heads * size]`; queries, keys and values are `[rows, heads, size]`."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v).flatten(1)


def causal(rows: int) -> torch.Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


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
        return norm(x, weight, self.eps)

    def project(self, w: Tensors, captured: list[torch.Tensor]) -> torch.Tensor:
        """Features from captured states, each `[rows, target width]`."""
        if self.feature_norm == "fc_norm":
            captured = [self.norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(captured)]
        joined = torch.cat(captured, dim=-1)
        if self.feature_norm == "input_norm":
            joined = self.norm(joined, w["input_norm.weight"])
        return joined if self.is_first else joined @ w["fc.weight"].T

    def attention(self, w: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)

        def heads(name: str) -> torch.Tensor:
            bias = w.get(f"{prefix}.{name}_proj.bias")
            found = F.linear(x, w[f"{prefix}.{name}_proj.weight"], bias).view(rows, -1, self.head_width)
            weight = w.get(f"{prefix}.{name}_norm.weight")
            return found if weight is None else self.norm(found, weight)

        q, k = (turned(heads(name), torch.arange(rows), self.theta) for name in "qk")
        mixed = attended(q, k, heads("v"), causal(rows))
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
