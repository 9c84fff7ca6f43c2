"""What runs where: the layers of a model on the devices of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign, Drafting
from flowspec.core.protocol.model_spec import ModelSpec, SlidingWindow
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError
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
    found = []
    for index, stage in enumerate(plan.stages):
        tokens = plan.tokens if index + 1 == len(plan.stages) else None
        after = plan.stages[index + 1] if index + 1 < len(plan.stages) else None
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
