"""Shapes of tensors in published layouts, and random values for them."""

from __future__ import annotations

import torch

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def attention(at: str, read: int, queries: int, keys: int, width: int, head_norms: int = 0) -> Shapes:
    """Matrices that read so many numbers, and norms of so many where queries and keys of a head have one."""
    found: Shapes = {
        f"{at}q_proj.weight": (queries, read),
        f"{at}k_proj.weight": (keys, read),
        f"{at}v_proj.weight": (keys, read),
        f"{at}o_proj.weight": (width, queries),
    }
    if head_norms:
        found |= {f"{at}{name}_norm.weight": (head_norms,) for name in "qk"}
    return found


def mlp(at: str, width: int, inner: int) -> Shapes:
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{at}{name}.weight": shape for name, shape in shapes.items()}


def norms(at: str, width: int, *names: str) -> Shapes:
    return {f"{at}{name}.weight": (width,) for name in names}


def random(shapes: Shapes, seed: int, scale: float, centre: float = 1.0) -> Tensors:
    """Norms are around `centre`, all else around 0."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: each + centre if "norm" in name else each for name, each in found.items()}
