"""An EAGLE head (`draft.eagle`): it wants the target's features, which only the head of the pipeline is
sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flowspec.draft.eagle_files import HeadTensors, is_eagle
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.protocol import Drafter
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, eagle_shape, find_shape

if TYPE_CHECKING:
    import torch

SKETCH = "eagle"
"""What `flowspec plan` calls a head for the model in question; before a model's name it is one for that."""


class Eagle(FileKind):
    plural = "EAGLE heads"
    acceptance = 0.635  # on the published testbed
    layouts = ("eagle", "eagle3")
    reads_features = True

    @staticmethod
    def is_in(files: ModelFiles) -> bool:
        return is_eagle(files)

    def check(self, target: ModelFiles) -> None:
        super().check(target)
        raw, expected = self.files.raw_config(), target.config().hidden_size
        found = raw.get("target_hidden_size") or raw.get("hidden_size")
        if isinstance(found, int) and found != expected:
            raise InputError(f"{self.name!r} is for a model of hidden_size {found}, not {expected}")

    def load(
        self, target: ModelFiles, dtype: str, device: torch.device, *, context: int, coupled: bool
    ) -> Drafter:
        from flowspec.draft.eagle import EagleDrafter

        return EagleDrafter.load(self.files, target, dtype, device, context=context, coupled=coupled)

    def parameter_count(self) -> int:
        tensors = HeadTensors(self.files)
        return sum(math.prod(tensors.shape(name)) for name in tensors.names)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        return self.of_shape(eagle_shape(target), target)

    @classmethod
    def sketched(cls, name: str, target: ModelShape) -> sites.PlannedDrafter | None:
        if not name.startswith(SKETCH):
            return None
        return cls.of_shape(eagle_shape(target) if name == SKETCH else find_shape(name), target)
