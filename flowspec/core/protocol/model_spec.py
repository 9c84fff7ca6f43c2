"""What a model computes and holds, layer by layer, without its weights: one description for the planner, for
memory and for the stages. `model.spec` makes it of a transformers config.

In most models each layer attends to keys and values of its own, all of one width. Gemma 4 has other heads in
layers that see all than in those with a window, and its last layers attend to what the last layer before them
holds that is of their type, their *source*. A slice that begins between the two has the source's keys and
values sent along with each row and holds them itself, so layers are cut anywhere. So are embeddings where
each layer takes something of its own from a token's (`model.layer_inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu"]
QueryNorm = Literal["", "head", "width"]
"""How queries and keys are normalised: not at all, each head alone, or all heads together."""
Router = Literal["softmax", "softmax to 1", "scaled softmax to 1", "softmax of chosen", "sigmoid"]
"""How a mixture's rows choose experts (`model.routers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Of a layer's keys and values: so many of each, and their width."""

    count: int
    width: int

    @property
    def numbers(self) -> int:
        """A token's keys and values."""
        return 2 * self.count * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What comes with each hidden state to a slice, in this order: the token's embedding, of so many numbers,
    and keys, then values, of these layers before it."""

    embedding: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Experts in the place of an MLP, among which each row chooses so many; `is_normed`: their shares are
    brought to a sum of 1, then multiplied by `factor`. They are in `groups`, of which so many are `open` to a
    row. `has_shared`: what an MLP makes of every row is added, `is_shared_gated`: times a number of the row.
    `is_parallel`: the layer has an MLP, too, and norms for both (Gemma 4). With a `limit` (0: none) gates and
    values are clamped, and gated with a `slope` (`plain.clamped`)."""

    router: Router
    experts: int
    chosen: int
    is_normed: bool = True
    factor: float = 1.0
    groups: int = 1
    open: int = 1
    has_shared: bool = False
    is_shared_gated: bool = False
    is_parallel: bool = False
    limit: float = 0.0
    slope: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A short convolution of each channel, over a row and the few before it, in all so many (LFM2)."""

    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """Linear attention, whose inputs go through a convolution of this `length` first (Qwen3.5)."""

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A layer of attention, or of a `mixer` in its place, then of an MLP with a gate or a `mixture` of such,
    each added to the hidden state.

    `is_turned`: whether position embeddings turn queries and keys. `is_gated`: what heads find is multiplied
    by gates, which come with their queries. `has_value_norm`: values are normalised, without weights.
    `scale` and `cap` are of scores; cap 0: they have no bound. `has_sinks`: some scores are of no key and
    have no value. `clip`: queries, keys and values have a bound, or 0. `norm_...`: what a layer's norms are
    called, in the places where it has one. `added_scale`: of what is added to the hidden state.
    `input_width`: of what the layer takes of a token besides, or 0. `has_factor`: at its end the hidden state
    is multiplied by a number. In heads of EAGLE attention may read a token's embedding, through
    `embedding_norm`, then the hidden state, and to what it finds may be added the hidden state after its norm
    (`is_residual_normed`).
    """

    scale: float
    activation: Activation
    mixer: Convolution | DeltaRule | None = None
    is_turned: bool = True
    is_gated: bool = False
    has_value_norm: bool = False
    input_width: int = 0
    has_factor: bool = False
    embedding_norm: str = ""
    is_residual_normed: bool = False
    cap: float = 0.0
    has_sinks: bool = False
    clip: float = 0.0
    query_norm: QueryNorm = ""
    norm_before_attention: str = "input_layernorm"
    norm_after_attention: str = ""
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_mlp: str = ""
    added_scale: float = 1.0
    mixture: Mixture | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its `heads` of queries, the heads of its keys and values, and the layer, its `source`, to
    whose keys and values it attends.

    `window`: how many positions a row sees, itself counted; 0: all. `inputs`: how many numbers it holds of a
    token in the place of keys and values (0: it holds these), and `state` how many its state has. `params`:
    weights that a row runs through, where layers are unlike. `dense`: None where it computes anything else.
    """

    heads: int
    kv: Heads
    source: int
    window: int = 0
    inputs: int = 0
    state: int = 0
    params: int = 0
    dense: Dense | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`context_max`: the most positions that it runs with one and the same arithmetic. `experts`: among which
    a row of a mixture chooses `experts_per_row`; 0: it is none. `neurons`: that a row runs through in a
    layer, `shared_neurons` of them whatever it chooses. `layer_inputs`: what each layer takes of a token
    beside its hidden state, from a table of so many tokens, `layer_input_tokens`. `mixer_params`: weights of
    what a layer without keys and values has in the place of attention."""

    hidden: int
    vocabulary: int
    context_max: int
    is_tied: bool
    neurons: int
    experts: int = 0
    experts_per_row: int = 1
    shared_neurons: int = 0
    layer_inputs: int = 0
    layer_input_tokens: int = 0
    mixer_params: int = 0
    layers: tuple[LayerSpec, ...]

    @property
    def heads(self) -> tuple[Heads, ...]:
        return tuple(layer.kv for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(layer.inputs for layer in self.layers)

    @property
    def states(self) -> tuple[int, ...]:
        return tuple(layer.state for layer in self.layers)

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(layer.source for layer in self.layers)

    def carried_at(self, begin: int) -> Carried:
        """What comes to a slice that begins with this layer, and to nobody behind the last one."""
        count = len(self.layers)
        return Carried(
            embedding=self.hidden * (self.layer_inputs > 0 and 0 < begin < count),
            sources=tuple(layer for layer in holders(self.sources, begin, count) if layer < begin),
        )

    def carried_width(self, begin: int) -> int:
        """How many numbers that is for each row."""
        carried = self.carried_at(begin)
        return carried.embedding + sum(self.layers[source].kv.numbers for source in carried.sources)

    @property
    def carried_most(self) -> int:
        """The most that goes with a hidden state from one slice to the next, wherever the two are cut."""
        return max(map(self.carried_width, range(len(self.layers))))


def holders(sources: tuple[int, ...], begin: int, end: int) -> tuple[int, ...]:
    """The layers whose keys and values a slice `[begin, end)` holds: its own, and sources before them."""
    return tuple(sorted({sources[layer] for layer in range(begin, end)}))
