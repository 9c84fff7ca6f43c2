"""How much memory a slice takes, from the model's shape alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import STATE_BYTES, STATES_HELD, Heads, SlidingWindow, window_for
from flowspec.core.protocol.precision import (
    ACTIVATIONS,
    CACHE_AUTO,
    FILED,
    PRECISION_BYTES,
    PRECISIONS,
    cached_as,
    cached_bytes,
)
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.plan.shape import USUAL_FILED_BYTES, LayersHeld, ModelShape

PROCESS_BYTES = 512 << 20
"""A daemon's or a head's process before anything is loaded, on a GPU with torch and what that maps."""
SYSTEM_SHARE = 0.1
"""Of a device's memory, for its operating system; a plan leaves it alone."""
ACTIVATION_BYTES_MIN = 2.0
"""Of what no precision quantises: the embedding, and norms, which are counted so, though they are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMemory:
    """Bytes of a slice: its weights, the keys and values of one full context, and room to work."""

    weight_bytes: int
    cache_bytes: int
    work_bytes: int = WORK_BYTES

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.work_bytes


def cache_bytes(
    of_layers: LayersHeld,
    *,
    context: int,
    held: str,
    nodes_max: int = limits.TREE_NODES_MAX,
    window: SlidingWindow | None = None,
    precision: str = "float32",
) -> int:
    """What is held of one request, keys and values as `precision.cached_as` says (`held`), with a full
    context and a full tree, which has more nodes at a drafter. Layers with a window hold what `window` says
    (None: all); inputs have the width of activations in this `precision`."""
    slots = context + nodes_max
    window_slots = slots if window is None else min(slots, window.slots)
    kept = sum(layers * keys_bytes(heads, held) for heads, layers in of_layers.whole) * slots
    kept += sum(layers * keys_bytes(heads, held) for heads, layers in of_layers.windowed) * window_slots
    input_bytes = of_layers.input_width * int(PRECISION_BYTES[ACTIVATIONS[precision]])
    inputs = of_layers.with_inputs * window_slots * input_bytes
    states = STATES_HELD * STATE_BYTES * of_layers.state_numbers
    return kept + inputs + states


def keys_bytes(heads: Heads, held: str) -> int:
    """A token's keys and values in one layer."""
    return 2 * heads.count * cached_bytes(heads.width, held)


class FiledBytes(NamedTuple):
    """Bytes of a model's parts as its GGUF file packs them: its largest layer, the embedding, `lm_head`."""

    layer: int
    embedding: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """Weights of a model's parts: of each layer, the embedding, `lm_head`, and the last norm. Tied ones are
    counted in both. `table` is a layer's own embedding of tokens, beside `layer`. `filed` is there where a
    GGUF file tells it."""

    layer: int
    embedding: int
    head: int
    norm: int
    table: int = 0
    is_tied: bool = False
    filed: FiledBytes | None = None


def weights_of(shape: ModelShape) -> ModelWeights:
    """As its shape says; biases and norms of single heads, of which it knows nothing, are left out."""
    idle_experts = 3 * shape.hidden * (shape.held_intermediate - shape.intermediate)
    return ModelWeights(
        layer=shape.layer_params + idle_experts + 2 * shape.hidden,
        embedding=shape.hidden * shape.vocabulary,
        head=shape.head_params,
        norm=shape.hidden,
        table=shape.table,
        is_tied=shape.is_tied,
    )


def read_bytes(precision: str, filed_bytes: float = USUAL_FILED_BYTES) -> float:
    """Of a weight of the matrices of a layer or of `lm_head`, with its part of a group's scale."""
    held = PRECISIONS[precision]
    return filed_bytes if precision == FILED else held.weight_bytes + held.group_bytes


def _weight_bytes(
    shape: ModelShape, weights: ModelWeights, precision: str, layers: int, *, first: bool, last: bool
) -> float:
    """A tied embedding counts once where both ends are and none is quantised, or both are as a file packs
    them."""
    kept = max(PRECISION_BYTES[precision], ACTIVATION_BYTES_MIN)  # of what is never quantised
    is_shared = first and last and weights.is_tied
    parts: tuple[float, ...] = (weights.layer, weights.embedding, weights.head)
    if precision == FILED:
        layer, embedding, head = (float(round(each * shape.filed_bytes)) for each in parts)
        layer += round(weights.table * kept)
        layer, embedding, head = weights.filed or (layer, embedding, head)
    else:
        is_shared = is_shared and PRECISION_BYTES[precision] == kept
        layer, _, head = (each * read_bytes(precision) for each in parts)
        layer, embedding = layer + weights.table * kept, weights.embedding * kept
    size = layers * layer + embedding * (first and not is_shared)
    return size + (head + weights.norm * kept) * last


def stage_memory(
    shape: ModelShape,
    weights: ModelWeights,
    precision: str,
    layers: int,
    *,
    first: bool,
    last: bool,
    context: int,
    users: int,
    cache: str = CACHE_AUTO,
    begin: int | None = None,
) -> SliceMemory:
    """A slice of so many layers with the caches of all users: those from `begin` on (None: the most that so
    many in a row take, where some have a window)."""
    held = max(
        cache_bytes(
            of_layers,
            context=context,
            held=cached_as(cache, precision),
            window=window_for(shape.windows, context, has_states=any(shape.states)),
            precision=precision,
        )
        for of_layers in (shape.held_anywhere(layers) if begin is None else {shape.held(begin, layers)})
    )
    size = _weight_bytes(shape, weights, precision, layers, first=first, last=last)
    return SliceMemory(weight_bytes=round(size), cache_bytes=users * held)


def drafter_memory(shape: ModelShape, precision: str, *, context: int, users: int) -> SliceMemory:
    """A drafter at the head: all its weights, and caches that hold what it drafted, too."""
    size = _weight_bytes(shape, weights_of(shape), precision, shape.layers, first=True, last=True)
    size += shape.extra_params * read_bytes(precision, shape.filed_bytes)
    held = cache_bytes(
        shape.held(0, shape.layers),
        context=context,
        held=cached_as(CACHE_AUTO, precision),
        nodes_max=limits.DRAFT_NODES_MAX,
        precision=precision,
    )
    return SliceMemory(weight_bytes=round(size), cache_bytes=users * held)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes < 10 * 2**30 else f"{size_bytes / 2**30:.1f} GiB"
