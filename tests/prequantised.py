"""Checkpoints in the layouts of GPTQ, AWQ and GPT-OSS, written by numpy alone: nothing of it reads one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
FLOATS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Those of 4 bits that are not below zero."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def convert(source: Path, to: Path, method: str, *, is_whole: bool = True, **settings: Any) -> Path:
    """A checkpoint whose decoder's matrices are of 4 bits, or those of its layers alone; `method` is `gptq`
    (symmetric), `awq`, or `mxfp4` of GPT-OSS, whose experts alone are."""
    to.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        "mxfp4": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
            ],
        },
    }[method] | settings
    (to / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(source / "model.safetensors").items():
        if method == "mxfp4":
            is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            made = _mxfp4(values.float().numpy()) if is_expert else {"": values.bfloat16()}
            tensors.update({name + leaf: torch.as_tensor(found) for leaf, found in made.items()})
            continue
        is_matrix = values.dim() == 2 and ".layers." in name and not name.endswith("gate.weight")
        is_matrix |= is_whole and "per_layer_model_projection" in name
        if not is_matrix:
            tensors[name] = values.bfloat16()
            continue
        made = (_gptq if method == "gptq" else _awq)(values.float().numpy())
        stem = name.removesuffix("weight")
        tensors.update({stem + leaf: torch.from_numpy(found.copy()) for leaf, found in made.items()})
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def _mxfp4(weight: np.ndarray[Any, Any]) -> dict[str, Any]:
    """From `[experts, in, out]`."""
    rows = weight.swapaxes(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, GROUP)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=3))) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - FLOATS).argmin(axis=-1) + 8 * (scaled < 0)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    made = {"_blocks": pairs, "_scales": exponents + 127}
    return {name: np.ascontiguousarray(found, np.uint8) for name, found in made.items()}


def _gptq(weight: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = (np.abs(groups).max(axis=2) / 7).astype(np.float16)  # [out, groups]
    levels = np.rint(groups / scales[..., None].astype(np.float32)).clip(-8, 7) + 8
    levels = levels.reshape(weight.shape).astype(np.uint32).T  # [in, out]
    zeros = np.full((scales.shape[1], len(weight)), 7, dtype=np.uint32)  # one less than the middle
    return {
        "qweight": _joined(levels.reshape(-1, 8, len(weight)).transpose(0, 2, 1), range(8)),
        "qzeros": _joined(zeros.reshape(len(zeros), -1, 8), range(8)),
        "scales": scales.T,
        "g_idx": (np.arange(weight.shape[1]) // GROUP).astype(np.int32),
    }


def _awq(weight: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    groups = weight.reshape(len(weight), -1, GROUP)
    least, most = groups.min(axis=2).clip(max=0), groups.max(axis=2).clip(min=0)
    scales = ((most - least) / 15).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.rint(-least / wide).clip(0, 15)
    levels = (np.rint(groups / wide[..., None]) + zeros[..., None]).clip(0, 15)
    levels = levels.reshape(weight.shape).astype(np.uint32).T
    return {
        "qweight": _joined(levels.reshape(len(levels), -1, 8), AWQ_ORDER),
        "qzeros": _joined(zeros.T.astype(np.uint32).reshape(zeros.shape[1], -1, 8), AWQ_ORDER),
        "scales": scales.T,
    }


def _joined(eights: np.ndarray[Any, Any], order: Any) -> np.ndarray[Any, Any]:
    """Words of eight levels `[..., 8]`, of which `order` says whose are the lowest bits, the next, ..."""
    words = np.zeros(eights.shape[:-1], dtype=np.uint32)
    for place, number in enumerate(order):
        words |= eights[..., number] << np.uint32(4 * place)
    return words.view(np.int32)
