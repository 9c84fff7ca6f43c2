"""Checkpoints in the layouts of GPTQ, AWQ, FP8 and GPT-OSS, written by numpy alone (but for floats of 8 bits,
which it has not): nothing of it reads one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
BLOCK = 24
"""Outputs and inputs that share a scale of floats; no divisor of what the tests' experts have."""
FLOATS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Those of 4 bits that are not below zero."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LARGEST = 448
"""Of floats of 8 bits (e4m3)."""


def convert(
    source: Path, to: Path, method: str, *, is_whole: bool = True, experts: str = "apart", **settings: Any
) -> Path:
    """A checkpoint whose decoder's matrices are of 4 bits, or those of its layers alone; `method` is `gptq`
    (symmetric), `awq`, `fp8` (of 8 bits), or `mxfp4` of GPT-OSS, whose experts alone are.

    Experts that are one tensor for all are written `apart`, gate and up, too; `stacked` as they are, with
    scales (`fp8` alone); or `plain`, not quantised.
    """
    to.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        "fp8": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
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
        if values.dim() == 3 and ".experts." in name and experts != "plain":
            for expert_name, matrix in _by_expert(name, values.float().numpy()) if experts == "apart" else ():
                tensors.update(_made(method, expert_name, matrix))
            if experts == "stacked":
                both = [_fp8(matrix) for matrix in values.float().numpy()]
                tensors[name] = torch.stack([_floats(each["weight"]) for each in both])
                scales = [torch.from_numpy(each["weight_scale_inv"]) for each in both]
                tensors[f"{name}_scale_inv"] = torch.stack(scales)
            continue
        is_router = name.endswith(("mlp.gate.weight", "router.proj.weight"))
        is_matrix = values.dim() == 2 and ".layers." in name and not is_router
        is_matrix |= is_whole and "per_layer_model_projection" in name
        if not is_matrix:
            tensors[name] = values.bfloat16()
            continue
        tensors.update(_made(method, name, values.float().numpy()))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def _made(method: str, name: str, matrix: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    """What stands in the place of the weight `name`."""
    made = {"gptq": _gptq, "awq": _awq, "fp8": _fp8}[method](matrix)
    is_float = method == "fp8"
    return {
        name.removesuffix("weight") + leaf: _floats(found)
        if is_float and leaf == "weight"
        else torch.from_numpy(found.copy())
        for leaf, found in made.items()
    }


def _by_expert(name: str, values: np.ndarray[Any, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The matrices of single experts in a tensor `[experts, out, in]`, gate above up."""
    stem, _, kind = name.rpartition(".")
    for expert, matrix in enumerate(values):
        if kind == "down_proj":
            yield f"{stem}.{expert}.down_proj.weight", matrix
            continue
        for part, half in zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True):
            yield f"{stem}.{expert}.{part}.weight", half


def _fp8(weight: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Numbers that are floats of 8 bits after rounding, and a scale for each block of outputs and inputs."""
    outputs, inputs = weight.shape
    scales = np.zeros((-(-outputs // BLOCK), -(-inputs // BLOCK)), np.float32)
    numbers = np.empty_like(weight, np.float32)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            where = np.s_[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = np.abs(weight[where]).max() / LARGEST
            numbers[where] = weight[where] / scales[row, column]
    return {"weight": numbers, "weight_scale_inv": scales}


def _floats(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(numbers).to(torch.float8_e4m3fn)


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
