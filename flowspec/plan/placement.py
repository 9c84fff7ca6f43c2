"""What runs where: the layers of a model on the devices of a cluster, and splits of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign, Drafting
from flowspec.core.protocol.model_spec import ModelSpec, SlidingWindow
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError, counted
from flowspec.validation import Misfit, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A device, its address, and the layers `[first, end)` it shall run."""

    name: str
    address: str
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What runs where; the stages are in pipeline order. `captures` are the features that the drafter wants
    (`Assign`).

    `vocabulary` and `hidden_size` are the model's: what comes back from the stages is held to them
    (`hidden_size` 0: not known); `carried` is the most numbers that go with a hidden state. With `drafting`
    its one stage is a drafter, and `vocabulary` the target's. Whoever draws or drafts gets the `tokens`,
    where answers may be bound by grammars. `spec`: what the model computes.
    """

    model: str
    fingerprint: str
    dtype: str
    context: int
    stages: tuple[StagePlan, ...]
    captures: tuple[int, ...] = ()
    vocabulary: int = limits.VOCABULARY_MAX
    hidden_size: int = 0
    carried: int = 0
    drafting: Drafting | None = None
    cache: str = CACHE_AUTO
    sliding_window: SlidingWindow | None = None
    tokens: TokenBytes | None = None
    spec: ModelSpec | None = None

    @property
    def layer_count(self) -> int:
        return self.stages[-1].end


def assigns_of(plan: ClusterPlan) -> list[Assign]:
    """What each device is told of a plan, in pipeline order; raises `InputError` for what cannot be told,
    such as a name of the model that does not fit into a line."""
    last, found = len(plan.stages) - 1, []
    for index, stage in enumerate(plan.stages):
        tokens = plan.tokens if index == last else None
        after = None if index == last else plan.stages[index + 1]
        found.append(
            Assign(
                model=plan.model,
                fingerprint=plan.fingerprint,
                stage=index,
                stages=len(plan.stages),
                first_layer=stage.first,
                end_layer=stage.end,
                layer_count=plan.layer_count,
                next_hop="" if after is None else after.address,
                next_name="" if after is None else after.name,
                dtype=plan.dtype,
                context=plan.context,
                captures=plan.captures,
                drafting=plan.drafting,
                cache=plan.cache,
                sliding_window=plan.sliding_window,
                tokens_digest="" if tokens is None else tokens.digest,
                tokens_bytes=0 if tokens is None else len(tokens.packed),
                spec=plan.spec,
            )
        )
    try:
        return [checked(assign) for assign in found]
    except Misfit as misfit:
        raise InputError(f"{misfit.field}: {misfit.said}") from None


def even_split(layer_count: int, stage_count: int) -> list[int]:
    """Layers per stage, as even as possible; the last stages get fewer, for the last one also runs
    `lm_head`."""
    return weighted_split(layer_count, [1.0] * stage_count)


def weighted_split(layer_count: int, weights: Sequence[float]) -> list[int]:
    """Layers per stage in proportion to `weights` (memory, say), at least one each; sums to `layer_count`."""
    stages = len(weights)
    if stages > layer_count:
        raise InputError(
            f"{stages} devices but only {layer_count} layers: each device needs at least one; use fewer "
            "devices"
        )
    ideal = [layer_count * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in ideal]
    while sum(counts) < layer_count:
        counts[max(range(stages), key=lambda i: (ideal[i] - counts[i], -i))] += 1
    while sum(counts) > layer_count:
        counts[
            min((i for i in range(stages) if counts[i] > 1), key=lambda i: (ideal[i] - counts[i], -i))
        ] -= 1
    return counts


def checked_split(counts: Sequence[int], layer_count: int, stage_count: int) -> list[int]:
    """A split given by hand; raises `InputError` when it does not add up."""
    if len(counts) != stage_count:
        raise InputError(
            f"--layers: expected {counted(stage_count, 'number')}, one for each device, got {len(counts)}"
        )
    if any(count < 1 for count in counts):
        raise InputError(
            f"--layers: expected at least one layer for each device, got {','.join(map(str, counts))}"
        )
    if sum(counts) != layer_count:
        raise InputError(
            f"--layers: {'+'.join(map(str, counts))} is {sum(counts)}, but the model has {layer_count} layers"
        )
    return list(counts)
