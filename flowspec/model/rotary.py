"""Position embeddings of a model, from its transformers config: by how much heads turn, and how far
(`ModelSpec.rotaries`), after `modeling_rope_utils` of transformers.

Frequencies are in float32, each step rounded as there; but a power is the right one, rounded once, where
libraries differ in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import Rotary

F32 = npt.NDArray[np.float32]
PI2 = np.float32(2 * math.pi)


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Those of all layers, or of each type of layers."""
    parameters = config.rope_parameters or {}
    by_type = [each for each in parameters.values() if isinstance(each, dict)]
    yield from by_type or [parameters]


def rotary_of(config: Any, rope: Mapping[str, Any], width: int, is_partial: bool) -> Rotary:
    """Of heads of a width, of which in families with that `is_partial` a part turns."""
    kind, part = rope.get("rope_type", "default"), float(rope.get("partial_rotary_factor", 1.0))
    turned = int(width * part) if is_partial or kind != "default" else width
    if kind == "proportional":
        turned = 2 * int(part * width // 2)
    exponents = np.arange(0, turned, 2).astype(np.float32)
    exponents /= np.float32(width if kind == "proportional" else turned)
    base = np.float64(np.float32(rope["rope_theta"]))
    powers = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    found: Any = 1 / powers
    scale = 1.0
    if kind == "proportional":
        found = np.pad(found / np.float32(rope.get("factor", 1.0)), (0, width // 2 - len(found)))
    elif kind == "linear":
        found /= np.float32(rope["factor"])
    elif kind == "llama3":
        found = _llama3(rope, found)
    elif kind in ("yarn", "longrope"):
        factor, context = rope.get("factor"), rope["original_max_position_embeddings"]
        if factor is None:
            factor = config.max_position_embeddings / context
        if kind == "longrope":
            found = 1 / (np.array(rope["short_factor"], np.float32) * powers)
            scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
        else:
            is_truncated = config.rope_parameters.get("truncate", True)
            found, scale = _yarn(rope, powers, turned, factor, is_truncated), _yarn_scale(rope, factor)
        if rope.get("attention_factor") is not None:
            scale = rope["attention_factor"]
    return Rotary(frequencies=tuple(np.asarray(found, np.float32).tolist()), scale=float(scale))


def _llama3(rope: Mapping[str, Any], frequencies: F32) -> F32:
    factor, low = np.float32(rope["factor"]), np.float32(rope["low_freq_factor"])
    context = rope["original_max_position_embeddings"]
    longest, shortest = (np.float32(context / rope[f"{name}_freq_factor"]) for name in ("low", "high"))
    lengths = PI2 / frequencies
    found = np.where(lengths > longest, frequencies / factor, frequencies)
    smooth = (np.float32(context) / lengths - low) / np.float32(
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = (1 - smooth) * found / factor + smooth * found
    is_between = ~(lengths < shortest) & ~(lengths > longest)
    return np.where(is_between, between, found)


def _yarn(rope: Mapping[str, Any], powers: F32, width: int, factor: float, is_truncated: bool) -> F32:
    def place(turns: float) -> float:
        """Of the pair that turns so often in the original context."""
        lengths = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return width * math.log(lengths) / (2 * math.log(rope["rope_theta"]))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = 1 - ramp
    return np.asarray(1 / (np.float32(factor) * powers) * (1 - kept) + 1 / powers * kept, np.float32)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    own, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(own) / scale(all_dims) if own and all_dims else scale(1)
