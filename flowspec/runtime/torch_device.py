"""Which device torch computes on, and with how many threads. Imports torch and nothing as heavy."""

from __future__ import annotations

import torch

from flowspec.errors import InputError


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where torch sees it."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {name}: this torch ({torch.__version__}) sees no CUDA device; use --device cpu or install a CUDA build")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: expected one of the {torch.cuda.device_count()} CUDA devices of this machine")
    return device


def use_threads(count: int | None) -> None:
    if count is not None:
        torch.set_num_threads(count)
