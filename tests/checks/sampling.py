"""What drawing a token costs with a large vocabulary: per node, for a segment of nodes at their own
positions.

Logits are random with the spread of a language model's (`--spread 3`) or flat (`--spread 1`). The first pass
over a position draws its noise, later ones (siblings) find it cached; both are shown.

    python -m tests.checks.sampling [--vocabulary 152000] [--nodes 16] [--spread 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from flowspec.core.protocol.messages import Sampling
from flowspec.model.sampler import Sampler

SETTINGS = {
    "top-p 0.95": Sampling(temperature=1.0, top_p=0.95, seed=1),
    "unfiltered": Sampling(temperature=1.0, seed=1),
    "top-k 50": Sampling(temperature=1.0, top_k=50, seed=1),
    "top-p 0.95, min-p 0.05": Sampling(temperature=1.0, top_p=0.95, min_p=0.05, seed=1),
    "temperature 0": Sampling(),
}
ROUNDS = 9


def measure(sampling: Sampling, vocabulary_size: int, nodes: int, spread: float) -> tuple[float, float]:
    """Median milliseconds per node: with fresh noise, and with the noise of its position cached."""
    logits = np.random.default_rng(0).normal(0, spread, (nodes, vocabulary_size)).astype(np.float32)
    sampler = Sampler(sampling, vocabulary_size)
    fresh, cached = [], []
    for number in range(ROUNDS):
        for row in range(nodes):
            position = number * nodes + row
            started_s = time.perf_counter()
            sampler.draw(logits[row], position)
            between_s = time.perf_counter()
            sampler.draw(logits[row], position)
            fresh.append(between_s - started_s)
            cached.append(time.perf_counter() - between_s)
    return 1000 * statistics.median(fresh), 1000 * statistics.median(cached)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.sampling", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {
        name: measure(sampling, args.vocabulary, args.nodes, args.spread)
        for name, sampling in SETTINGS.items()
    }
    if args.json:
        print(
            json.dumps(
                {name: {"fresh_ms": fresh, "cached_ms": cached} for name, (fresh, cached) in found.items()}
            )
        )
        return
    print(f"{args.vocabulary} entries, {args.nodes} nodes, milliseconds per node:")
    for name, (fresh, cached) in found.items():
        print(f"  {name:24} {fresh:.2f} with fresh noise, {cached:.2f} with cached noise")


if __name__ == "__main__":
    main()
