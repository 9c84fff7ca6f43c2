"""Kinds of drafters that read the target's features, which only the head of the pipeline is sent."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace

from flowspec.draft import layouts
from flowspec.draft.base import Drafter, FileKind, Kind, WordKind
from flowspec.draft.layouts import DrafterTensors, Layout
from flowspec.model.files import ModelFiles
from flowspec.model.spec import spec_of
from flowspec.plan.shape import ModelShape, eagle_shape, find_shape, mtp_shape, shape_of
from flowspec.plan.sites import PlannedDrafter

SKETCH = "eagle"
"""What `flowspec plan` calls a head for the model in question; before a model's name it is one for that."""


class FeatureKind(Kind):
    reads_features = True

    @abstractmethod
    def layout(self, target: ModelFiles) -> Layout:
        """Raises `InputError` where it does not fit the target."""

    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
        from flowspec.draft.feature_drafter import drafter_over
        from flowspec.draft.feature_model import FeatureModel

        model = FeatureModel.load(self.layout(target), target, dtype, device)
        return drafter_over(model)(model, target.spec.vocabulary, context=context, coupled=coupled)


class Mtp(FeatureKind, WordKind):
    """The layer of the target's own checkpoint that guesses further tokens."""

    word = "mtp"
    plural = "MTP heads"
    acceptance = 0.69  # of all that Qwen3.6's guessed in llama.cpp, at its pull request 24025
    layouts = ("mtp",)

    def layout(self, target: ModelFiles) -> Layout:
        return layouts.mtp_layout(target)

    def plan(self, target: ModelShape) -> PlannedDrafter:
        if not target.has_mtp:
            raise layouts.no_mtp(target.name)
        return PlannedDrafter(name=self.name, shape=mtp_shape(target), acceptance=self.acceptance)


class FeatureFileKind(FeatureKind, FileKind):
    def check(self, target: ModelFiles) -> None:
        self.layout(target)
        self.plan(shape_of(target.spec, target.model))

    def parameter_count(self) -> int:
        tensors = DrafterTensors(self.files)
        return sum(map(tensors.element_count, tensors))


class Block(FeatureFileKind):
    is_in = staticmethod(layouts.is_block_drafter)
    plural = "block drafters"
    acceptance = 0.69  # a chain of 7 gives DFlash's published 3.11 tokens with it (Qwen3-8B, MT-bench)
    layouts = ("dflash", "dflash-deepspec", "dspark")

    def layout(self, target: ModelFiles) -> Layout:
        return layouts.block_layout(self.files, target)

    def plan(self, target: ModelShape) -> PlannedDrafter:
        shape, tensors = shape_of(spec_of(self.files.config()), self.name), DrafterTensors(self.files)
        names = ("fc.weight", "markov_head.markov_w2.weight", "markov_head.gate_proj.weight")
        extra = sum(math.prod(tensors.shape(name)) for name in names if name in tensors)
        return self.of_shape(replace(shape, extra_params=extra), target)


class Eagle(FeatureFileKind):
    is_in = staticmethod(layouts.is_eagle)
    plural = "EAGLE heads"
    acceptance = 0.635  # on the published testbed
    layouts = ("eagle", "eagle3", "eagle3-narrow", "eagle3-qk-norm", "eagle3-speculators")

    def layout(self, target: ModelFiles) -> Layout:
        return layouts.eagle_layout(self.files, target)

    @classmethod
    def sketch(cls, name: str, target: ModelShape) -> PlannedDrafter | None:
        if not name.startswith(SKETCH):
            return None
        return cls.of_shape(eagle_shape(target) if name == SKETCH else find_shape(name), target)

    def plan(self, target: ModelShape) -> PlannedDrafter:
        """An EAGLE-3 head as its tensors are: heads differ in width, in how many states they project and in
        how many tokens they guess. What they lack is the target's."""
        tensors = DrafterTensors(self.files)
        version, _, spec, _ = layouts.read_eagle(self.files, tensors)
        if version == 1:
            return self.of_shape(eagle_shape(target), target)
        sizes = {name: size for name in tensors if len(size := tensors.shape(name)) == 2}
        drafted, _ = sizes.pop("lm_head.weight", (0, 0))
        sizes.pop("embed_tokens.weight", None)
        own = replace(shape_of(spec, f"eagle3-{target.name}"), vocabulary=target.vocabulary, is_tied=False)
        extra = sum(map(math.prod, sizes.values())) - own.layers * own.layer_params
        return self.of_shape(replace(own, drafted=drafted, extra_params=extra), target)


class Assistant(FeatureFileKind):
    is_in = staticmethod(layouts.is_assistant)
    plural = "assistants of Gemma 4"
    acceptance = 0.635  # an EAGLE head's: none is published
    layouts = ("gemma4-assistant",)

    def layout(self, target: ModelFiles) -> Layout:
        return layouts.assistant_layout(self.files, target)

    def plan(self, target: ModelShape) -> PlannedDrafter:
        spec = spec_of(layouts.read_assistant(self.files)[1])
        alike = replace(shape_of(spec, self.name), unlike=(), sources=(), windows=(), mean_params=0)
        extra = 3 * target.hidden * spec.hidden
        return self.of_shape(replace(alike, is_tied=True, extra_params=extra), target)
