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
    kind = rope.get("rope_type", "default")
    part = float(rope.get("partial_rotary_factor", 1.0))
    turned = int(width * part) if is_partial or kind not in ("default", "proportional") else width
    scale = 1.0
    found: Any
    if kind == "proportional":
        angles = int(part * width // 2)
        found = np.zeros(width // 2, np.float32)
        found[:angles] = 1 / _powers(rope, width, angles)
        found /= np.float32(rope.get("factor", 1.0))
    elif kind == "yarn":
        found, scale = _yarn(config, rope, turned)
    elif kind == "longrope":
        factors = np.array(rope["short_factor"], np.float32)
        found, scale = 1 / (factors * _powers(rope, turned)), _longrope_scale(config, rope)
    else:
        found = 1 / _powers(rope, turned)
        if kind == "linear":
            found /= np.float32(rope["factor"])
        elif kind == "llama3":
            found = _llama3(rope, found)
    return Rotary(frequencies=tuple(found.astype(np.float32).tolist()), scale=float(scale))


def _powers(rope: Mapping[str, Any], width: int, count: int | None = None) -> F32:
    """What the first so many pairs of numbers (all, if none are told) divide a turn by."""
    exponents = np.arange(0, width if count is None else 2 * count, 2).astype(np.float32) / np.float32(width)
    return np.power(np.float64(np.float32(rope["rope_theta"])), exponents.astype(np.float64)).astype(
        np.float32
    )


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


def _yarn(config: Any, rope: Mapping[str, Any], width: int) -> tuple[F32, float]:
    factor, context = rope["factor"], rope["original_max_position_embeddings"]
    if factor is None:
        factor = config.max_position_embeddings / context
    base = rope["rope_theta"]

    def place(turns: float) -> float:
        """Of the pair that turns so often in the original context."""
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if config.rope_parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    powers = _powers(rope, width)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = 1 - ramp
    found = 1 / (np.float32(factor) * powers) * (1 - kept) + 1 / powers * kept
    return found.astype(np.float32), _yarn_scale(rope, factor)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    stated, own, all_dims = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is not None:
        return float(stated)

    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    return scale(own) / scale(all_dims) if own and all_dims else scale(1)


def _longrope_scale(config: Any, rope: Mapping[str, Any]) -> float:
    stated, context = rope.get("attention_factor"), rope["original_max_position_embeddings"]
    if stated is not None:
        return float(stated)
    factor = rope.get("factor")
    factor = config.max_position_embeddings / context if factor is None else factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
