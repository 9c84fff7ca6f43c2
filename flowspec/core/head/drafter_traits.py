"""What a model beside the target can do, and what it wants."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.protocol import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTraits:
    """What the head must know of a model beside the target.

    The positions it can handle, whether it wants features of verified nodes, its level (0 for a drafter,
    higher for an intermediate), how many cache slots it has memory for, of all conversations together,
    whether it looks up texts, which takes next to no time, and whether it `copies_features`, if it wants any
    (`CopyFeatures`).
    """

    context: int
    needs_features: bool = False
    level: int = 0
    cache_slots: int = limits.ID_MAX
    looks_up: bool = False
    copies_features: bool = False
