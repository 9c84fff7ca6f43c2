"""Where the models beside the target run: here, in the head's process, or on a device that runs no stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowspec.core.protocol.cluster_messages import Drafting
from flowspec.draft.base import Drafter
from flowspec.draft.registry import KINDS, WITHOUT_TENSORS, find_drafter, model_name
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, canonical_name
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.cluster import Device
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.drafters import PlacedDrafter


def own_devices(names: Sequence[str]) -> int:
    """How many daemons of their own these drafters get in a local cluster: one each where several are
    models."""
    models = [name for name in names if name not in WITHOUT_TENSORS]
    return len(models) if len(models) > 1 else 0


def assign_devices(names: Sequence[str], devices: Sequence[Device]) -> dict[str, Device]:
    """Of these drafters those that have a device: the one that the cluster file has for it, or one of those
    that are for any."""
    fixed = {model_name(device.drafter): device for device in devices if device.drafter is not None}
    if fixed:
        return {name: fixed[model_name(name)] for name in names if model_name(name) in fixed}
    models = [name for name in names if name not in WITHOUT_TENSORS]
    return dict(zip(models, devices, strict=False)) if own_devices(names) else {}


def open_drafters(
    names: Sequence[str],
    target: ModelFiles,
    plan: ClusterPlan,
    decoding: Decoding,
    devices: Mapping[str, Device],
) -> list[Drafter | PlacedDrafter]:
    """All of them, in order: loaded, or planned for their devices. Raises `InputError` for one that does not
    fit the target, or its place."""
    kinds = {name: find_drafter(name, may_fetch=decoding.may_fetch) for name in names}
    placed = dict[str, PlacedDrafter]()
    for name, kind in kinds.items():  # what is wrong with one is told before another is loaded
        device = devices.get(name)
        files = kind.model_for_device(target)
        if files is not None and device is not None:
            placed[name] = _placed(name, files, device, plan, decoding)
        elif device is not None and device.drafter is not None:
            raise InputError(
                f"drafter {name} cannot run on {device.name}: {kind.plural} are drafted with at the head"
            )
    return [
        placed.get(name)
        or kind.open(target, plan.dtype, None, context=plan.context, coupled=decoding.coupled)
        for name, kind in kinds.items()
    ]


def captures_of(drafters: Sequence[Drafter | PlacedDrafter]) -> tuple[int, ...]:
    """The hidden states of the target that a drafter wants; raises `InputError` where several want some."""
    wanted = [
        drafter.captures
        for drafter in drafters
        if not isinstance(drafter, PlacedDrafter) and drafter.captures
    ]
    if len(wanted) > 1:
        readers = " or ".join(kind.plural for kind in KINDS if kind.reads_features)
        raise InputError(f"--drafter: expected one of {readers} at most, got {len(wanted)}")
    return wanted[0] if wanted else ()


def _placed(
    name: str, files: ModelFiles, device: Device, plan: ClusterPlan, decoding: Decoding
) -> PlacedDrafter:
    spec = files.spec
    stage = StagePlan(name=device.name, address=device.address, first=0, end=len(spec.layers))
    own = ClusterPlan(
        model=canonical_name(files.model),
        fingerprint=files.fingerprint(),
        dtype=files.precision_beside(plan.dtype),
        context=min(spec.context_max, plan.context),
        stages=(stage,),
        vocabulary=plan.vocabulary,
        drafting=Drafting(vocabulary=plan.vocabulary, coupled=decoding.coupled),
        tokens=plan.tokens,
        spec=spec,
    )
    return PlacedDrafter(name=name, plan=own)


def use_one_thread() -> None:
    """Local stages and the drafters that run here share this machine's cores: one thread each."""
    from flowspec.model.arithmetic.compiled import use_threads

    use_threads(1)
