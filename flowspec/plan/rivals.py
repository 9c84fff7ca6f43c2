"""Tokens per second of what people would pick instead, by formula, from the costs that plans are made of.

Each rival answers one user and is as its source describes it, with its best parameters for these costs. A
drafter's best guess is right with the chance `acceptance`, whatever came before, so guesses in a row are
right `a / (1 - a)` times on average. `docs/rivals.md` says what each formula was checked against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flowspec.plan.accepted_length import chain_length
from flowspec.plan.drafted_trees import DEPTH_MAX, tree_lengths
from flowspec.plan.forecast import HEAD_S
from flowspec.plan.partition import HEADER_BYTES, NODE_BYTES
from flowspec.plan.timing import Curve, LinkSpec

CHAIN_MAX = 8
"""Guesses of a chain, or of a window, that are tried."""
TREE_NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)
BEAM = 10
"""Rows of a drafter's pass for a level of a tree."""
WINDOWS_MAX = 64
"""Windows in flight, at most: Mesh-LLM's bound (`MAX_VERIFY_WINDOW_PIPELINE_DEPTH`)."""
CHUNKS = (16, 32, 64, 128)
"""Rows of a prompt's chunks that are tried."""

Seconds = Callable[[int], float]
"""By rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """What a rival makes, and `how`, in a few words for people."""

    tokens_per_s: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesser:
    """A drafter: the share of its best guesses that are right, and its pass's seconds by rows."""

    acceptance: float
    pass_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages with their links (head to first stage, between stages, last stage to head); `sampling` is what
    `lm_head` adds on the last one, and `row_bytes` are a hidden state's. Passes see `context` tokens."""

    stages: tuple[Curve, ...]
    sampling: Curve
    hops: tuple[LinkSpec, ...]
    row_bytes: int
    context: int

    def trip_s(self, rows: int) -> float:
        """From when the head has so many rows until it knows what follows each."""
        return self._trip_s(rows, rows, self.context)

    def slot_s(self, rows: int) -> float:
        """How long the slowest stage or link is busy with them."""
        return self._slot_s(rows, rows, self.context)

    def prompt_s(self, tokens: int) -> float:
        """From a prompt of so many tokens to the answer's first one: chunks of one size, the best, follow one
        another."""
        return min(
            self._trip_s(rows, 1, tokens // 2) + (-(-tokens // rows) - 1) * self._slot_s(rows, 0, tokens // 2)
            for rows in CHUNKS
        )

    def _stages_s(self, rows: int, drawn: int, context: int) -> list[float]:
        found = [stage.seconds(rows, context) for stage in self.stages]
        found[-1] += self.sampling.seconds(drawn) if drawn else 0.0
        return found

    def _links_s(self, rows: int) -> list[float]:
        last = len(self.hops) - 1
        sizes = [
            HEADER_BYTES + rows * (NODE_BYTES + self.row_bytes * (0 < at < last)) for at in range(last + 1)
        ]
        return [link.transfer_s(size) for link, size in zip(self.hops, sizes, strict=True)]

    def _trip_s(self, rows: int, drawn: int, context: int) -> float:
        waits_s = sum(link.delay_s + link.jitter_s / 2 for link in self.hops)
        return sum(self._stages_s(rows, drawn, context)) + sum(self._links_s(rows)) + waits_s + HEAD_S

    def _slot_s(self, rows: int, drawn: int, context: int) -> float:
        return max(*self._stages_s(rows, drawn, context), *self._links_s(rows))


def plain(pass_s: Seconds) -> Rated:
    return Rated(tokens_per_s=1 / pass_s(1), how="plain")


def chains(pass_s: Seconds, guesser: Guesser) -> Rated:
    """A chain of guesses verified in one pass, then the next is drafted, nothing overlapping: vLLM's EAGLE-3
    over pipeline stages (its pull request 50514), llama.cpp's draft models."""
    return _best(
        Rated(
            tokens_per_s=chain_length(guesser.acceptance, count)
            / (count * guesser.pass_s(1) + pass_s(count + 1)),
            how=f"chains of {count}",
        )
        for count in range(1, CHAIN_MAX + 1)
    )


def trees(pass_s: Seconds, guesser: Guesser) -> Rated:
    """The same with a tree, which a pass of the drafter takes one level further (EAGLE-2, SGLang): the
    simulator's `tree-sd`, tuned."""
    lengths = tree_lengths(guesser.acceptance)
    return _best(
        Rated(
            tokens_per_s=float(lengths[depth, nodes])
            / (guesser.pass_s(1) + (depth - 1) * guesser.pass_s(BEAM) + pass_s(nodes)),
            how=f"trees of {nodes}, {depth} deep",
        )
        for nodes in TREE_NODES
        for depth in range(1, DEPTH_MAX + 1)
    )


def speculating(pass_s: Seconds, guesser: Guesser) -> Rated:
    """The best that one pass after another gives: chains, trees, or no guesses."""
    return _best(iter((plain(pass_s), chains(pass_s, guesser), trees(pass_s, guesser))))


def linear_windows(pipeline: Pipeline, guesser: Guesser, windows_max: int = WINDOWS_MAX) -> Rated:
    """Windows of a chain that follow each other without waiting for verdicts (Mesh-LLM's pull requests 938
    and 1026, shard).

    After a miss all that is in flight is given up. The token that is right is the root of the next window,
    whose guesses are drafted first; the others are drafted meanwhile. With G guesses right in a row the miss
    is found by window `max(1, ceil(G / w))`, a trip after that was sent.
    """
    a = guesser.acceptance
    return _best(
        Rated(
            tokens_per_s=1
            / (1 - a)
            / (
                width * guesser.pass_s(1)
                + pipeline.trip_s(width + 1)
                + _every_s(pipeline, guesser, width, windows_max) * a ** (width + 1) / (1 - a**width)
            ),
            how=f"windows of {width}",
        )
        for width in range(1, CHAIN_MAX + 1)
    )


def always_one(pipeline: Pipeline, guesser: Guesser) -> Rated:
    """PipeInfer (2407.11798): as linear windows, but a token that is known goes out alone and at once, while
    guesses behind it are drafted, and what is wrong is cancelled and costs nothing further."""
    a = guesser.acceptance
    return _best(
        Rated(
            tokens_per_s=1
            / (1 - a)
            / (
                (1 - a) * pipeline.trip_s(1)
                + a * (max(width * guesser.pass_s(1), pipeline.slot_s(1)) + pipeline.trip_s(width))
                + _every_s(pipeline, guesser, width, WINDOWS_MAX) * a ** (width + 1) / (1 - a**width)
            ),
            how=f"runs of {width}",
        )
        for width in range(1, CHAIN_MAX + 1)
    )


def _every_s(pipeline: Pipeline, guesser: Guesser, width: int, windows_max: int) -> float:
    """Between two windows: the slowest stage or link, drafting, or the bound of how many are in flight."""
    return max(pipeline.slot_s(width), width * guesser.pass_s(1), pipeline.trip_s(width) / windows_max)


def _best(found: Iterator[Rated]) -> Rated:
    return max(found, key=lambda each: each.tokens_per_s)
