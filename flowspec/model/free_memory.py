"""Memory that a device has left, for weights and caches."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """What is to be had on a device now; on CUDA what torch keeps for later counts as free."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
