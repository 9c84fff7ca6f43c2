"""What a model would ask of each device of a cluster: planned as `chat` would, counted as the daemons will.
Nothing is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.model_spec import window_for
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import ClusterError
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles, canonical_name
from flowspec.model.weights import Span
from flowspec.plan.memory import SliceMemory
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.refusal import ModelDoesNotFitError
from flowspec.runtime.cluster import Device, check_local, pick_context, split_layers
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.session import ClusterOptions, choose_for, pick_dtype
from flowspec.wire.codec import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """Layers `[first, end)` of a device and their memory."""

    device: str
    first: int
    end: int
    memory: SliceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """A model on a cluster; `row_bytes` is a node's hidden state on its way to the next device,
    with the most that goes with it.

    Stages are in pipeline order; devices that `chat` would leave out have none. `layer` is the memory of one
    layer alone.
    """

    model: str
    fingerprint: str
    dtype: str
    context: int
    row_bytes: int
    layer: SliceMemory
    stages: tuple[StageNeed, ...]

    def of(self, device: str) -> StageNeed | None:
        """What a device needs; None for one that is left out."""
        return next((need for need in self.stages if need.device == device), None)


def find_needs(options: ClusterOptions, devices: Sequence[Device], keys: Keyring | None = None) -> ModelNeeds:
    """Counts as `chat` would split the model, with the cluster's `keys`; raises `InputError` for a model or a
    split that cannot be.

    Where `chat` would refuse, layers are those of its refusal, in proportion to memory; where it would not
    reach all devices, even.
    """
    files = ModelFiles(options.model)
    raw = files.raw_config()
    check_family(raw, files.model)
    files.check_weights()
    count = raw["num_hidden_layers"]
    if options.cluster is None and options.layers is None:
        check_local(options.local, count)
    is_planned = options.cluster is not None and options.layers is None and devices[0].layers is None
    stages = split_layers(devices[:count] if is_planned else devices, count, options.layers)
    spec = files.spec
    dtype = pick_dtype(options.dtype, files, files.config())
    context = pick_context(options.context, spec.context_max)
    if is_planned:
        wanted = ClusterPlan(
            model=files.model, fingerprint="", dtype=dtype, cache=options.cache, context=context, stages=()
        )
        with contextlib.suppress(ClusterError):  # a device that does not answer is told of by itself
            stages = _planned(options, files, devices, wanted, keys) or stages

    def memory(first: int, end: int) -> SliceMemory:
        return slice_memory(
            files,
            Span(first=first, end=end, count=count),
            dtype,
            context,
            cache=options.cache,
            window=window_for(spec.windows, context, has_states=any(spec.states)),
        )

    return ModelNeeds(
        model=canonical_name(options.model),
        fingerprint=files.fingerprint(),
        dtype=dtype,
        context=context,
        row_bytes=(spec.hidden + spec.carried_most) * DTYPE_BYTES[ACTIVATIONS[dtype]],
        layer=memory(count // 2, count // 2 + 1),
        stages=tuple(
            StageNeed(
                device=stage.name, first=stage.first, end=stage.end, memory=memory(stage.first, stage.end)
            )
            for stage in stages
        ),
    )


def _planned(
    options: ClusterOptions,
    files: ModelFiles,
    devices: Sequence[Device],
    wanted: ClusterPlan,
    keys: Keyring | None,
) -> list[StagePlan]:
    """The stages that `chat` would make; where the model does not fit, the shares that its refusal names."""
    try:
        return choose_for(options, files, devices, wanted, Decoding(), keys).stages(devices)
    except ModelDoesNotFitError as refusal:
        shares = {each.name: each.layers for each in refusal.shortfalls}
        there = [device for device in devices if device.name in shares]
        return split_layers(there, sum(shares.values()), [shares[device.name] for device in there])
