"""How weights of 4 bits lie in memory: in panels of sixteen outputs, group of inputs by group of inputs.

A panel is what a processor's vectors multiply at once, and `canonical.c` reads it from its beginning to its
end. For each group of 32 inputs it has 256 bytes of levels, then sixteen scales in float16. Byte 64 v + 4 o
+ k has of output o the level of input 4 v + k in its low bits and of input 16 + 4 v + k in its high ones.
What is no output or input of the matrix has level 0 and scale 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PANEL = 16
"""Outputs of a panel."""
GROUP = 32
"""Inputs that have a scale together."""
MIDDLE = 8
"""Added to levels of -8 to 7, so that what is packed has no sign."""
GROUP_BYTES = PANEL * (GROUP // 2 + 2)
"""Of a panel, for each group."""


def packed(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Panels, uint8 `[panels, groups, GROUP_BYTES]`, of levels from 0 to 15, uint8 `[out, groups, 32]`, and
    their scales, float16 `[out, groups]`."""
    more = -len(levels) % PANEL
    levels = F.pad(levels, (0, 0, 0, 0, 0, more), value=MIDDLE)
    split = levels.view(-1, PANEL, levels.shape[1], 2, 4, 4)  # panel, output, group, half, v, k
    pairs = split[:, :, :, 0] | split[:, :, :, 1] << 4
    pairs = pairs.permute(0, 2, 3, 1, 4).flatten(2)  # panel, group, bytes
    scales = F.pad(scales, (0, 0, 0, more)).view(-1, PANEL, levels.shape[1]).transpose(1, 2).contiguous()
    return torch.cat([pairs, scales.view(torch.uint8)], dim=2)


def unpacked(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as whole numbers from -8 to 7, int8 `[out, groups, 32]`, and scales, float16 `[out, groups]`,
    of whole panels."""
    count, groups, _ = panels.shape
    pairs = panels[..., : PANEL * GROUP // 2].reshape(count, groups, 4, PANEL, 4)
    levels = torch.stack([pairs & 15, pairs >> 4], dim=2)  # panel, group, half, v, output, k
    levels = levels.permute(0, 4, 1, 2, 3, 5).reshape(count * PANEL, groups, GROUP)
    scales = panels[..., PANEL * GROUP // 2 :].contiguous().view(torch.float16)
    return levels.to(torch.int8) - MIDDLE, scales.transpose(1, 2).reshape(count * PANEL, groups)
