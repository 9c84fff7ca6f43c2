"""An EAGLE head (`draft.eagle`): it wants the target's features, which only the head of the pipeline is
sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flowspec.draft.eagle_files import HeadTensors, is_eagle
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.protocol import Drafter
from flowspec.model.files import ModelFiles
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, eagle_shape, find_shape, shape_of

if TYPE_CHECKING:
    import torch

SKETCH = "eagle"
"""What `flowspec plan` calls a head for the model in question; before a model's name it is one for that."""


class Eagle(FileKind):
    plural = "EAGLE heads"
    acceptance = 0.635  # on the published testbed
    layouts = ("eagle", "eagle3", "eagle3-narrow", "eagle3-qk-norm", "eagle3-speculators")
    file_forms = ("safetensors", "bin")
    reads_features = True

    @staticmethod
    def is_in(files: ModelFiles) -> bool:
        return is_eagle(files)

    def check(self, target: ModelFiles) -> None:
        from flowspec.draft.eagle_config import head_config

        if not self.is_in(self.files):
            raise self.another_layout()
        head_config(self.files, HeadTensors(self.files), target)
        self.reckoned(shape_of(target.config(), target.model))

    def load(
        self, target: ModelFiles, dtype: str, device: torch.device, *, context: int, coupled: bool
    ) -> Drafter:
        from flowspec.draft.eagle import EagleDrafter
        from flowspec.draft.eagle_head import EagleHead

        loaded = EagleHead.load(self.files, target, dtype, device)
        return EagleDrafter(loaded, target, context=context, coupled=coupled)

    def parameter_count(self) -> int:
        tensors = HeadTensors(self.files)
        return sum(math.prod(tensors.shape(name)) for name in tensors.names)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        return self.of_shape(eagle_shape(target), target)

    @classmethod
    def unseen(cls, target: ModelShape) -> sites.PlannedDrafter:
        return cls.of_shape(eagle_shape(target), target)

    @classmethod
    def sketched(cls, name: str, target: ModelShape) -> sites.PlannedDrafter | None:
        if not name.startswith(SKETCH):
            return None
        return cls.of_shape(eagle_shape(target) if name == SKETCH else find_shape(name), target)
