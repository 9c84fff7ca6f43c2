"""How many experts a layer of a mixture has, by a transformers config: classes call it by different names."""

from __future__ import annotations

from typing import Any


def experts_of(config: Any) -> int:
    """Those among which a row chooses; 0 where the model is no mixture, as most of Gemma 4's."""
    if getattr(config, "enable_moe_block", None) is False:
        return 0
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
