"""Which boards a rival's pipeline would use, and the best that each rival makes of them.

Layers are shared out as the planner does it, over the fastest boards, and as many of these as suit the rival
best. Where drafter and stage compute at the same time on one board, both take twice as long, as in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from flowspec.plan.cost import drafter_curve, head_curve, layers_curve, row_bytes
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.rivals import (
    Guesser,
    Pipeline,
    Rated,
    always_one,
    chains,
    linear_windows,
    plain,
    speculating,
    trees,
)
from flowspec.plan.sites import PlanRequest
from flowspec.plan.tensor_parallel import best_cut

ALONE = "one board alone"
TENSOR_PARALLEL = "tensor parallelism"
TENSOR_PARALLEL_GUESSING = "tensor parallelism, speculating"
PLAIN = "plain pipeline"
LOCK_STEP = "EAGLE-3 chains over stages (vLLM)"
LOCK_STEP_TREES = "EAGLE-2 trees over stages (tree-sd)"
WINDOWS = "linear windows (Mesh-LLM, shard)"
PIPE_INFER = "PipeInfer"
RIVALS = (
    ALONE,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_GUESSING,
    PLAIN,
    LOCK_STEP,
    LOCK_STEP_TREES,
    WINDOWS,
    PIPE_INFER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Its rate, on how many `boards`, and from a prompt to the first token."""

    rated: Rated
    boards: int
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A pipeline with its drafter, on so many boards."""

    pipeline: Pipeline
    guesser: Guesser
    boards: int


def rivals_of(request: PlanRequest, prompt: int) -> dict[str, Rival]:
    """What each rival makes of a request for one user with a drafter, in its first precision; those are
    missing that the model does not fit, or that have no such models. They run all experts of a mixture in one
    kernel: `expert_us` is what it costs to start ours one by one."""
    sites = (replace(each, profile=structs.replace(each.profile, expert_us=0.0)) for each in request.sites)
    request = replace(request, sites=tuple(sites))
    plainly, in_turns, at_once = (
        list(_placed(request, guesses=guesses, overlaps=overlaps))
        for guesses, overlaps in ((False, False), (True, False), (True, True))
    )
    found = {
        ALONE: _alone(plainly, in_turns, prompt),
        **_cut(request, prompt),
        PLAIN: _best(plainly, prompt, lambda each: plain(each.pipeline.trip_s)),
        LOCK_STEP: _best(in_turns, prompt, lambda each: chains(each.pipeline.trip_s, each.guesser)),
        LOCK_STEP_TREES: _best(in_turns, prompt, lambda each: trees(each.pipeline.trip_s, each.guesser)),
        WINDOWS: _best(at_once, prompt, lambda each: linear_windows(each.pipeline, each.guesser)),
        PIPE_INFER: _best(at_once, prompt, lambda each: always_one(each.pipeline, each.guesser)),
    }
    return {name: rival for name, rival in found.items() if rival is not None}


def _alone(plainly: Sequence[_Placed], guessing: Sequence[_Placed], prompt: int) -> Rival | None:
    """One board, with the drafter beside the model if both fit."""
    single, bare = ([each for each in some if each.boards == 1] for some in (guessing, plainly))
    if single:
        return _best(single, prompt, lambda each: speculating(each.pipeline.trip_s, each.guesser))
    found = _best(bare, prompt, lambda each: plain(each.pipeline.trip_s))
    return None if found is None else replace(found, rated=replace(found.rated, how="plain: no drafter fits"))


def _best(placed: Sequence[_Placed], prompt: int, rate: Callable[[_Placed], Rated]) -> Rival | None:
    found = [
        Rival(rated=rate(each), boards=each.boards, first_token_s=each.pipeline.prompt_s(prompt))
        for each in placed
    ]
    return max(found, key=lambda each: each.rated.tokens_per_s, default=None)


def _cut(request: PlanRequest, prompt: int) -> dict[str, Rival | None]:
    """Tensor parallelism, plainly and with a drafter at its root."""
    cut = best_cut(request, request.precisions[0])
    if cut is None:
        return {}
    first_s = cut.prompt_s(prompt)
    guesser = _guesser(request, cut.boards[0], 1.0)

    def pass_s(rows: int) -> float:
        return cut.pass_s(rows, request.typical_context)

    return {
        name: Rival(rated=rated, boards=len(cut.boards), first_token_s=first_s)
        for name, rated in (
            (TENSOR_PARALLEL, plain(pass_s)),
            (TENSOR_PARALLEL_GUESSING, speculating(pass_s, guesser)),
        )
    }


def _placed(request: PlanRequest, *, guesses: bool, overlaps: bool) -> Iterator[_Placed]:
    """Pipelines over the fastest board, the two fastest, and so on, where the model fits. The drafter is on
    the next one, which does nothing else, else on the first stage's."""
    ranked = sorted(request.stage_sites, key=lambda each: -each.profile.bytes_per_s())
    partition, context = Partition(request), request.typical_context
    for count in range(1, len(ranked) + 1):
        order = tuple(ranked[:count])
        head = ranked[count] if overlaps and count < len(ranked) else order[0]
        arrangement = Arrangement(order=order, head=head, precision=request.precisions[0], guesses=guesses)
        split = partition.best(arrangement)
        if split is None:
            continue
        slowed = [
            place.profile.slowed(partition.slowdown(arrangement, place) if overlaps else 1.0)
            for place in order
        ]
        stages = [
            layers_curve(profile, request.shape, arrangement.precision, layers, request.cache)
            for profile, layers in zip(slowed, split.layers, strict=True)
        ]
        yield _Placed(
            pipeline=Pipeline(
                stages=tuple(stages),
                sampling=head_curve(slowed[-1], request.shape, arrangement.precision),
                hops=tuple(partition.hops(arrangement)),
                row_bytes=row_bytes(request.shape, arrangement.precision),
                context=context,
            ),
            guesser=_guesser(
                request, head.profile, partition.slowdown(arrangement, head) if overlaps else 1.0
            ),
            boards=count + (head not in order),
        )


def _guesser(request: PlanRequest, board: DeviceProfile, slowdown: float) -> Guesser:
    drafter = request.drafter
    assert drafter is not None, "rivals guess"
    if drafter.shape is None:
        return Guesser(acceptance=drafter.acceptance, pass_s=lambda rows: 0.0)
    curve = drafter_curve(board, drafter.shape, request.precisions[0]).scaled(slowdown)
    return Guesser(
        acceptance=drafter.acceptance, pass_s=lambda rows: curve.seconds(rows, request.typical_context)
    )
