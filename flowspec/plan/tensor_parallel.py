"""Tensor parallelism over Ethernet, as distributed-llama does it: every matrix is cut into equal parts, one
for each board, and boards exchange what they have twice a layer. What it would give, by formula.

Its source and documents (b4rtaz/distributed-llama, `src/llm.cpp` and README of 2025) say: 1, 2, 4, 8 ...
boards, no more than the model has heads of keys and values; behind attention and behind the feed-forward
network each board sends its part of the sum, hidden states in Q80 (34 bytes for 32 numbers), to every other
one; `lm_head` is cut, too, and its float32 logits are gathered at the root. Until version 0.12 both exchanges
went through the root, there and back, which had all of `lm_head` (`through_root`).

Computing and reading are the profile's, by the boards' number, and so is what a layer costs whatever its
size, but for `OVERHEAD`. `docs/rivals.md` has the published figures beside this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from flowspec.plan.cost import head_curve, layers_curve
from flowspec.plan.memory import stage_memory
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape
from flowspec.plan.sites import PlanRequest, Site, process_bytes
from flowspec.plan.timing import Curve, LinkSpec

Q80_BYTES = 34 / 32
LOGIT_BYTES = 4
EXCHANGES = 2
"""In each layer."""
OVERHEAD = 0.7
"""Of a layer's fixed time in the profile: on four Pi 5s 20 of a token's 72 ms were neither products nor
waiting for others, .42 ms for each of 48 layers of Qwen3-30B-A3B, where the profile has .6
(docs/PROFILING-FINDINGS.md of danielcorrea-hellomatik/distributed-llama, 2026)."""
BATCH = 32
"""Rows of a prompt's pass (`nBatches`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Boards with equal parts of a model, and the slowest link between two of them."""

    boards: tuple[DeviceProfile, ...]
    link: LinkSpec
    shape: ModelShape
    precision: str
    through_root: bool = False

    def pass_s(self, rows: int, context: int) -> float:
        """Until the root has the logits of a pass. With guesses to verify boards are taken to compare their
        best tokens first, so that logits of one row travel, whatever the rows."""
        share = 1 / len(self.boards)
        layers_s = max(self._part(board, share).seconds(rows, context) for board in self.boards)
        heads_s = [head_curve(board, self.shape, self.precision).seconds(rows) for board in self.boards]
        head_s = heads_s[0] if self.through_root else share * max(heads_s)
        return layers_s + head_s + self.waits_s(rows)

    def waits_s(self, rows: int) -> float:
        """Of it, for the others' parts."""
        others = len(self.boards) - 1
        size = others * rows * self.shape.hidden * Q80_BYTES
        ways = 2 if self.through_root else 1
        one_s = ways * (self._delay_s + self.link.transfer_s(size))
        logits = 0 if self.through_root else self.shape.vocabulary * LOGIT_BYTES * others / len(self.boards)
        return EXCHANGES * self.shape.layers * one_s + bool(logits) * (
            self._delay_s + self.link.transfer_s(logits)
        )

    def prompt_s(self, tokens: int) -> float:
        """From a prompt to the answer's first token."""
        return sum(self.pass_s(min(BATCH, tokens - first), first) for first in range(0, tokens, BATCH))

    @property
    def _delay_s(self) -> float:
        return self.link.delay_s + self.link.jitter_s / 2

    def _part(self, board: DeviceProfile, share: float) -> Curve:
        started = structs.replace(board, expert_us=0.0)  # `OVERHEAD` was measured of a mixture
        whole = layers_curve(started, self.shape, self.precision, self.shape.layers)
        return replace(whole.scaled(share), fixed_s=OVERHEAD * whole.fixed_s)


def can_cut(shape: ModelShape, precision: str) -> bool:
    """Whether distributed-llama has such models: Llama's and Qwen3's, in 4 bits."""
    is_usual = not any((*shape.windows, *shape.inputs, *shape.states)) and not shape.unlike
    return is_usual and precision in ("int4", "gguf")


def best_cut(request: PlanRequest, precision: str) -> TensorParallel | None:
    """The number of boards, the fastest first, that makes one user's plain decoding fastest; None where the
    model does not fit, or is not one that `can_cut`."""
    if not can_cut(request.shape, precision):
        return None
    ranked = sorted(request.stage_sites, key=lambda each: -each.profile.bytes_per_s())
    found = []
    count = 2
    while count <= min(len(ranked), request.shape.kv_heads):
        chosen = _placed(ranked[:count], request)
        if all(
            need <= place.memory_bytes
            for place, need in zip(chosen, needs(request, precision, count), strict=True)
        ):
            links = [
                request.network.between(one.name, other.name)
                for at, one in enumerate(chosen)
                for other in chosen[:at]
            ]
            found.append(
                TensorParallel(
                    boards=tuple(each.profile for each in chosen),
                    link=max(links, key=lambda link: link.delay_s + link.transfer_s(1e4)),
                    shape=request.shape,
                    precision=precision,
                )
            )
        count *= 2
    return min(found, key=lambda each: each.pass_s(1, request.typical_context), default=None)


def needs(request: PlanRequest, precision: str, count: int) -> list[int]:
    """Bytes on each board, the root first: a part of weights and caches, room to work, a process, and at the
    root the embedding."""
    shape, weights = request.shape, request.weights
    whole, more = (
        stage_memory(
            shape,
            weights,
            precision,
            shape.layers,
            first=is_first,
            last=True,
            context=request.context,
            users=request.users,
            cache=request.cache,
        )
        for is_first in (False, True)
    )
    part = (whole.weight_bytes + whole.cache_bytes) // count + whole.work_bytes + process_bytes(1)
    return [part + more.weight_bytes - whole.weight_bytes, *[part] * (count - 1)]


def _placed(sites: Sequence[Site], request: PlanRequest) -> list[Site]:
    """The root is the board with the most memory."""
    root = max(sites, key=lambda each: each.memory_bytes)
    return [root, *(each for each in sites if each is not root)]
