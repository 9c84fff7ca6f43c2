"""Which device torch computes on, and with how many threads. Imports torch and nothing as heavy."""

from __future__ import annotations

import torch

from flowspec.model.accelerator import find


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU where torch can use one; raises `InputError` for one that cannot be used, with
    the reason."""
    return find(name).device


def use_threads(count: int | None) -> None:
    if count is not None:
        torch.set_num_threads(count)
