"""A block drafter (`draft.block`): it wants the target's features, which only the head of the pipeline is
sent."""

from __future__ import annotations

import math
from dataclasses import replace

from flowspec.draft.block_files import BlockConfig, is_block_drafter
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.protocol import Drafter
from flowspec.model.files import ModelFiles
from flowspec.model.spec import spec_of
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, block_shape, shape_of


class Block(FileKind):
    plural = "block drafters"
    acceptance = 0.69  # a chain of 7 gives DFlash's published 3.11 tokens with it (Qwen3-8B, MT-bench)
    layouts = ("dflash", "dflash-deepspec", "dspark")
    reads_features = True

    @staticmethod
    def is_in(files: ModelFiles) -> bool:
        return is_block_drafter(files)

    def check(self, target: ModelFiles) -> None:
        super().check(target)
        config = target.config()
        BlockConfig.read(self.files.raw_config(), self.name, config.num_hidden_layers, config.vocab_size)

    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
        from flowspec.draft.block import BlockDrafter
        from flowspec.draft.block_head import BlockHead

        loaded = BlockHead.load(self.files, target, dtype, device)
        return BlockDrafter(loaded, target, context=context, coupled=coupled)

    @classmethod
    def unseen(cls, target: ModelShape, layout: str) -> sites.PlannedDrafter | None:
        if target.experts > 1:
            return None  # its layers are not as the target's
        return cls.of_shape(block_shape(target), target)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        shape, tensors = shape_of(spec_of(self.files.config()), self.name), self.files.tensors()
        extra = sum(math.prod(tensors.shape(name)) for name in _BESIDE_LAYERS if name in tensors)
        return self.of_shape(replace(shape, extra_params=extra), target)


_BESIDE_LAYERS = ("fc.weight", "markov_head.markov_w2.weight", "markov_head.gate_proj.weight")
"""Matrices of a pass that are in no layer: the projection of the target's states, and what the token before
adds to logits."""
