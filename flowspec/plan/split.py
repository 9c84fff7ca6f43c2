"""Which layers each device gets, when the user does not say."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.errors import InputError, counted


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
