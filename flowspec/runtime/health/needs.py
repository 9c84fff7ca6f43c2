"""What a model would ask of each device of a cluster: counted as the daemons will, from file headers. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.precision import ACTIVATIONS
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles, canonical_name
from flowspec.model.support import context_max, family_of
from flowspec.plan.memory import SliceMemory
from flowspec.runtime.cluster import Device, pick_context, split_layers
from flowspec.runtime.session import ClusterOptions, pick_dtype
from flowspec.wire.codec import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """Layers `[first, end)` of a device and their memory."""

    first: int
    end: int
    memory: SliceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """A model on a cluster; `row_bytes` is a node's hidden state on its way to the next device."""

    model: str
    fingerprint: str
    dtype: str
    context: int
    row_bytes: int
    stages: tuple[StageNeed, ...]


def find_needs(options: ClusterOptions, devices: Sequence[Device]) -> ModelNeeds:
    """Counts as `chat` would split the model; raises `InputError` for a model or a split that cannot be."""
    files = ModelFiles(options.model)
    raw = files.raw_config()
    check_family(str(raw.get("model_type")), files.model)
    files.check_weights()
    plans = split_layers(devices, raw["num_hidden_layers"], options.layers)
    config = files.config()
    family_of(config, files.model)
    dtype = pick_dtype(options.dtype, config)
    context = pick_context(options.context, context_max(config))
    from flowspec.model.pieces import Span  # these import torch, which takes seconds: after what can be wrong without it
    from flowspec.runtime.loading import slice_memory

    count = raw["num_hidden_layers"]
    stages = [
        StageNeed(
            first=plan.first, end=plan.end, memory=slice_memory(files, Span(first=plan.first, end=plan.end, count=count), dtype, context)
        )
        for plan in plans
    ]
    return ModelNeeds(
        model=canonical_name(options.model),
        fingerprint=files.fingerprint(),
        dtype=dtype,
        context=context,
        row_bytes=config.hidden_size * DTYPE_BYTES[ACTIVATIONS[dtype]],
        stages=tuple(stages),
    )
