"""An EAGLE head (`draft.eagle`): it wants the target's features, which only the head of the pipeline is
sent."""

from __future__ import annotations

import math
from dataclasses import replace

from flowspec.draft.eagle_fields import fields_of
from flowspec.draft.eagle_files import HeadTensors, is_eagle
from flowspec.draft.kinds.base import FileKind
from flowspec.draft.protocol import Drafter
from flowspec.model.files import ModelFiles
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, eagle3_shape, eagle_shape, find_shape, shape_of

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
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
        self.reckoned(shape_of(target.spec, target.model))

    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
        from flowspec.draft.eagle import EagleDrafter
        from flowspec.draft.eagle_head import EagleHead

        loaded = EagleHead.load(self.files, target, dtype, device)
        return EagleDrafter(loaded, target, context=context, coupled=coupled)

    def parameter_count(self) -> int:
        tensors = HeadTensors(self.files)
        return sum(math.prod(tensors.shape(name)) for name in tensors.names)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        tensors = HeadTensors(self.files)
        return self.of_shape(
            _own_shape(self.files, tensors, target) if tensors.kind == "eagle3" else eagle_shape(target),
            target,
        )

    @classmethod
    def unseen(cls, target: ModelShape, layout: str) -> sites.PlannedDrafter:
        return cls.of_shape(eagle_shape(target) if layout == "eagle" else eagle3_shape(target), target)

    @classmethod
    def sketched(cls, name: str, target: ModelShape) -> sites.PlannedDrafter | None:
        if not name.startswith(SKETCH):
            return None
        return cls.of_shape(eagle_shape(target) if name == SKETCH else find_shape(name), target)


def _own_shape(files: ModelFiles, tensors: HeadTensors, target: ModelShape) -> ModelShape:
    """An EAGLE-3 head as its tensors are: heads differ in width, in how many states they project and in how
    many tokens they guess. What they lack is the target's."""
    fields, matrices = fields_of(files.raw_config(), files.model), dict[str, tuple[int, ...]]()
    for name in tensors.names:
        if len(shape := tensors.shape(name)) == 2:
            matrices[name] = shape

    def sizes(part: str) -> tuple[int, ...]:
        return tensors.shape(f"layers.0.{part}.weight")

    hidden, intermediate = sizes("mlp.down_proj")
    queries, keys = sizes("self_attn.q_proj")[0], sizes("self_attn.k_proj")[0]
    width, heads = fields.get("head_dim"), fields.get("num_attention_heads")
    if type(width) is not int or width < 1:
        width = queries // heads if type(heads) is int and heads > 0 else queries
    own = ModelShape(
        name=f"eagle3-{target.name}",
        layers=len({name.split(".")[1] for name in matrices if name.startswith("layers.")}),
        hidden=hidden,
        intermediate=intermediate,
        heads=queries // width,
        kv_heads=keys // width,
        head_dim=width,
        vocabulary=target.vocabulary,
        drafted=matrices[_LM_HEAD][0] if _LM_HEAD in matrices else 0,
    )
    inner = sum(math.prod(size) for name, size in matrices.items() if name not in (_EMBEDDING, _LM_HEAD))
    return replace(own, extra_params=inner - own.layers * own.layer_params)
