"""Shapes of models, a line each."""

from typing import Any

from flowspec.plan.shape import ModelShape

SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary")


def shape_of(name: str, *sizes: int, **more: Any) -> ModelShape:
    return ModelShape(name=name, **dict(zip(SIZES, sizes, strict=True)), **more)
