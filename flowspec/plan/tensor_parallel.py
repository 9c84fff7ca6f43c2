"""Tensor parallelism over Ethernet, as distributed-llama does it (b4rtaz/distributed-llama, `src/llm.cpp` and
README of 2025): what it would give, by formula.

1, 2, 4, 8 ... boards, no more than the model has heads of keys and values, hold equal parts of every matrix.
Behind attention and behind the feed-forward network each sends its part of the sum, hidden states in Q80 (34
bytes for 32 numbers), to every other one; `lm_head` is cut, too, and its float32 logits are gathered at the
root. Computing and reading are the profile's, by the boards' number, and so is what a layer costs whatever
its size, but for `OVERHEAD`. `docs/rivals.md` has the published figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from msgspec import structs

from flowspec.plan.cost import head_curve, layers_curve
from flowspec.plan.memory import PROCESS_BYTES
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape
from flowspec.plan.sites import PlanRequest, Site
from flowspec.plan.timing import Curve, LinkSpec

Q80_BYTES = 34 / 32
LOGIT_BYTES = 4
EXCHANGES = 2
"""In each layer."""
OVERHEAD = 0.7
"""Of a layer's fixed time in the profile: on four Pi 5s 20 of a token's 72 ms were neither products nor
waiting for others, .42 ms for each of 48 layers of Qwen3-30B-A3B, where the profile has .6
(docs/PROFILING-FINDINGS.md of danielcorrea-hellomatik/distributed-llama, 2026)."""


def best_cut(request: PlanRequest, precision: str) -> tuple[float, int] | None:
    """Seconds of a token of one user, and on how many boards, the fastest first, they are least; None where
    the model does not fit, or distributed-llama has no such models: it has Llama's and Qwen3's, in 4 bits."""
    shape = request.shape
    is_unusual = any((*shape.windows, *shape.inputs, *shape.states)) or shape.unlike
    if is_unusual or precision not in ("int4", "gguf"):
        return None
    ranked = sorted(request.stage_sites, key=lambda each: -each.profile.bytes_per_s())
    most, found = min(len(ranked), shape.kv_heads), []
    for count in (1 << doublings for doublings in range(1, most.bit_length())):
        chosen = ranked[:count]
        if _fits(chosen, request, precision):
            links = [request.network.between(one.name, other.name) for one, other in combinations(chosen, 2)]
            slowest = max(links, key=lambda link: link.delay_s + link.transfer_s(1e4))
            boards = [each.profile for each in chosen]
            found.append((token_s(boards, slowest, shape, precision, request.typical_context), count))
    return min(found, default=None)


def token_s(
    boards: Sequence[DeviceProfile], link: LinkSpec, shape: ModelShape, precision: str, context: int
) -> float:
    """Seconds of a token on boards with equal parts of a model; `link` is the slowest between two of them."""
    count = len(boards)
    share, others = 1 / count, count - 1
    layers_s = max(_part(board, shape, precision, share).seconds(1, context) for board in boards)
    head_s = share * max(head_curve(board, shape, precision).seconds(1) for board in boards)
    delay_s = link.delay_s + link.jitter_s / 2
    sums_s = delay_s + link.transfer_s(others * shape.hidden * Q80_BYTES)
    logits_s = delay_s + link.transfer_s(shape.vocabulary * LOGIT_BYTES * others / count)
    return layers_s + head_s + (EXCHANGES * shape.layers * sums_s + logits_s)


def _part(board: DeviceProfile, shape: ModelShape, precision: str, share: float) -> Curve:
    started = structs.replace(board, expert_us=0.0)  # `OVERHEAD` was measured of a mixture
    whole = layers_curve(started, shape, precision, shape.layers)
    return replace(whole.scaled(share), fixed_s=OVERHEAD * whole.fixed_s)


def _fits(chosen: Sequence[Site], request: PlanRequest, precision: str) -> bool:
    """Whether each board holds its part of weights and caches, with room to work and a process, and the one
    with the most memory, the root, the embedding, too."""
    parts, whole = (
        request.stage_memory(precision, request.shape.layers, first=is_first, last=True)
        for is_first in (False, True)
    )
    part = (parts.weight_bytes + parts.cache_bytes) // len(chosen) + parts.work_bytes + PROCESS_BYTES
    embedding = whole.weight_bytes - parts.weight_bytes
    room = [each.memory_bytes for each in chosen]
    return part <= min(room) and part + embedding <= max(room)
