"""What a model computes and holds, layer by layer, without its weights: one description for the planner, for
memory, for the stages and for whatever reads weights. `model.spec` makes it of a transformers config; a stage
gets it from the head.

In most models each layer attends to keys and values of its own, all of one width. Gemma 4 has other heads in
layers that see all than in those with a window, and its last layers attend to what the last layer before them
holds that is of their type, their *source*. A slice that begins between the two has the source's keys and
values sent along with each row and holds them itself, so layers are cut anywhere. So are embeddings where
each layer takes something of its own from a token's.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal, get_args

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.types import Record
from flowspec.validation import expect

Activation = Literal["silu", "gelu_tanh", "relu"]
QueryNorm = Literal["", "head", "width"]
"""How queries and keys are normalised: not at all, each head alone, or all heads together."""
Router = Literal["softmax", "softmax to 1", "scaled softmax to 1", "softmax of chosen", "sigmoid"]
"""How a mixture's rows choose experts (`plain.choose`)."""
Norm = Literal["weights", "1 + weights"]
"""What rows are multiplied by after they are normalised."""
NORMS: tuple[Norm, ...] = get_args(Norm)
"""In the order of `canonical.c` and `canonical.cu`."""

# what runs by a description reads memory where it says; the most of each is ten times above any model known
Number = Annotated[int, Meta(ge=0, le=1 << 20)]
Some = Annotated[int, Meta(ge=1, le=1 << 20)]
HeadCount = Annotated[int, Meta(ge=1, le=1 << 12)]
ExpertCount = HeadCount
KeyWidth = Annotated[int, Meta(ge=1, le=1 << 8)]
ValueWidth = Annotated[int, Meta(ge=1, le=1 << 10)]
HeadWidth = Annotated[int, Meta(ge=1, le=1 << 13)]
ConvolutionLength = Annotated[int, Meta(ge=1, le=1 << 6)]
TokenCount = Annotated[int, Meta(ge=0, le=limits.VOCABULARY_MAX)]
Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, description="a number")]
FieldName = Annotated[str, Meta(max_length=64, pattern=r"\A[ -~]*\Z", description="a short name")]


class Heads(Record, frozen=True, kw_only=True):
    """Of a layer's keys and values: so many of each, and their width."""

    count: HeadCount
    width: HeadWidth

    @property
    def numbers(self) -> int:
        """A token's keys and values."""
        return 2 * self.count * self.width


class Carried(Record, frozen=True, kw_only=True):
    """What comes with each hidden state to a slice, in this order: the token's embedding, of so many numbers,
    and keys, then values, of these layers before it."""

    embedding: int
    sources: tuple[int, ...]


class Rotary(Record, frozen=True, kw_only=True):
    """Position embeddings: by how much each pair of a head's numbers turns from one position to the next,
    float32, and what cosine and sine are multiplied by. Pairs without a frequency do not turn."""

    frequencies: Annotated[tuple[Real, ...], Meta(max_length=1 << 12)]
    scale: Real = 1.0


class Mixture(Record, frozen=True, kw_only=True):
    """Experts of so many `neurons` in the place of an MLP, among which each row chooses so many; `is_normed`:
    their shares are brought to a sum of 1, then multiplied by `factor`. They are in `groups`, of which so
    many are `open` to a row. `has_shared`: what an MLP of `shared_neurons` makes of every row is added,
    `is_shared_gated`: times a number of the row. `is_parallel`: the layer has an MLP, too, and norms for both
    (Gemma 4). With a `limit` (0: none) gates and values are clamped, and gated with a `slope`
    (`plain.clamped`). `has_biases`: router and experts add some."""

    router: Router
    experts: ExpertCount
    chosen: ExpertCount
    neurons: Number = 0
    is_normed: bool = True
    factor: Real = 1.0
    groups: Some = 1
    open: Some = 1
    has_shared: bool = False
    shared_neurons: Number = 0
    is_shared_gated: bool = False
    is_parallel: bool = False
    has_biases: bool = False
    limit: Real = 0.0
    slope: Real = 0.0

    def __post_init__(self) -> None:
        expect(1 <= self.chosen <= self.experts, "chosen", self.chosen, f"1 to {self.experts} experts")
        is_known = self.is_parallel <= (self.router == "scaled softmax to 1")
        expect(is_known, "router", self.router, "scaled softmax to 1, with an MLP")
        is_whole = 1 <= self.open <= self.groups and not self.experts % self.groups
        is_whole = is_whole and (self.groups == 1 or self.groups < self.experts)
        has_enough = is_whole and self.experts // self.groups * self.open >= self.chosen
        expect(has_enough, "groups", (self.groups, self.open), "equal groups, as many open as are needed")


class Convolution(Record, frozen=True, kw_only=True, tag=True):
    """A short convolution of each channel, over a row and the few before it, in all so many (LFM2)."""

    length: ConvolutionLength


class DeltaRule(Record, frozen=True, kw_only=True, tag=True):
    """Linear attention, whose inputs go through a convolution of this `length` first (Qwen3.5)."""

    key_heads: HeadCount
    heads: HeadCount
    key_width: KeyWidth
    value_width: ValueWidth
    length: ConvolutionLength

    def __post_init__(self) -> None:
        numbers = self.key_heads, self.heads, self.key_width, self.value_width, self.length
        is_whole = self.key_heads > 0 and not self.heads % self.key_heads
        expect(is_whole, "heads", numbers, f"numbers above 0, a multiple of {self.key_heads} heads of keys")

    @property
    def key_numbers(self) -> int:
        return self.key_heads * self.key_width

    @property
    def value_numbers(self) -> int:
        return self.heads * self.value_width

    @property
    def inputs(self) -> int:
        """What is held of a token: queries, keys and values, and of each head a rate and a share."""
        return 2 * self.key_numbers + self.value_numbers + 2 * self.heads


class Dense(Record, frozen=True, kw_only=True):
    """A layer of attention, or of a `mixer` in its place, then of an MLP with a gate and so many `neurons`,
    or a `mixture` of such, each added to the hidden state.

    `is_turned`: whether position embeddings turn queries and keys. `is_gated`: what heads find is multiplied
    by gates, which come with their queries. `has_value_norm`: values are normalised, without weights.
    `has_values`: without them keys are values, too. `is_joined`: queries, keys and values are one matrix, and
    gates and values of an MLP. `biases`: the linear layers that add one. `scale` and `cap` are of scores; cap
    0: they have no bound. `has_sinks`: some scores are of no key and have no value. `clip`: queries, keys and
    values have a bound, or 0. `norm_...`: what a layer's norms are called, in the places where it has one.
    `added_scale`: of what is added to the hidden state. `input_width`: of what the layer takes of a token
    besides, or 0. `has_factor`: at its end the hidden state is multiplied by a number. `has_entry`: its input
    is made of a token and a feature, as in MTP. In heads of EAGLE attention may read a token's embedding,
    through `embedding_norm`, then the hidden state, and to what it finds may be added the hidden state after
    its norm (`is_residual_normed`).
    """

    scale: Real
    activation: Activation
    neurons: Number = 0
    mixer: Convolution | DeltaRule | None = None
    is_turned: bool = True
    is_gated: bool = False
    has_values: bool = True
    has_value_norm: bool = False
    is_joined: bool = False
    biases: Annotated[tuple[FieldName, ...], Meta(max_length=64)] = ()
    input_width: Number = 0
    has_factor: bool = False
    has_entry: bool = False
    embedding_norm: FieldName = ""
    is_residual_normed: bool = False
    cap: Real = 0.0
    has_sinks: bool = False
    clip: Real = 0.0
    query_norm: QueryNorm = ""
    norm_before_attention: FieldName = "input_layernorm"
    norm_after_attention: FieldName = ""
    norm_before_mlp: FieldName = "post_attention_layernorm"
    norm_after_mlp: FieldName = ""
    added_scale: Real = 1.0
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        expect(not (self.is_gated and self.is_joined), "is_gated", True, "no gates in a joined matrix")


class LayerSpec(Record, frozen=True, kw_only=True):
    """One layer: its `heads` of queries, the heads of its keys and values, and the layer, its `source`, to
    whose keys and values it attends, turned by a `rotary` of the model.

    `window`: how many positions a row sees, itself counted; 0: all. `inputs`: how many numbers it holds of a
    token in the place of keys and values (0: it holds these), and `state` how many its state has. `dense`:
    None where it computes anything else.
    """

    heads: HeadCount
    kv: Heads
    source: Number
    rotary: Number = 0
    window: Number = 0
    inputs: Number = 0
    state: Annotated[int, Meta(ge=0, le=1 << 28)] = 0
    dense: Dense | None = None

    def __post_init__(self) -> None:
        is_whole = self.heads > 0 and self.kv.numbers > 0 and not self.heads % self.kv.count
        of_keys = f"a multiple of {self.kv.count} heads of keys, {self.kv.width} wide"
        expect(is_whole, "heads", self.heads, of_keys)
        mixer = None if self.dense is None else self.dense.mixer
        if isinstance(mixer, DeltaRule):
            held = mixer.inputs, mixer.heads * mixer.key_width * mixer.value_width, mixer.length
            expect((self.inputs, self.state, self.window) == held, "inputs", self.inputs, f"{held[0]}")
        elif isinstance(mixer, Convolution):
            expect(self.window == mixer.length, "window", self.window, f"{mixer.length}")
        elif self.dense is not None:
            expect(not self.inputs and not self.state, "inputs", self.inputs, "none")


class ModelSpec(Record, frozen=True, kw_only=True):
    """`family`: by whose names files hold its weights. `context_max`: the most positions that it runs with
    one and the same arithmetic. `layer_inputs`: what each layer takes of a token besides its hidden state,
    from a table of so many tokens, `layer_input_tokens`. `norm` and `eps`: how all norms compute. Embeddings
    are multiplied by `embedding_scale`; logits are divided by `logit_divisor` and bounded by `logit_cap` (0:
    they have no bound)."""

    family: FieldName = ""
    hidden: Some
    vocabulary: TokenCount
    context_max: Annotated[int, Meta(ge=0, le=limits.ID_MAX)]
    is_tied: bool
    layer_inputs: Number = 0
    layer_input_tokens: TokenCount = 0
    norm: Norm = "weights"
    eps: Real = 1e-6
    embedding_scale: Real = 1.0
    logit_divisor: Real = 1.0
    logit_cap: Real = 0.0
    rotaries: Annotated[tuple[Rotary, ...], Meta(max_length=limits.LAYERS_MAX)] = ()
    layers: Annotated[tuple[LayerSpec, ...], Meta(min_length=1, max_length=limits.LAYERS_MAX)]

    def __post_init__(self) -> None:
        rules = {layer.dense.mixer for layer in self.layers if layer.dense is not None}
        expect(len(rules - {None}) < 2, "mixer", rules, "the same wherever layers have one")
        is_enough = not self.layer_inputs or self.layer_input_tokens >= self.vocabulary
        expect(is_enough, "layer_input_tokens", self.layer_input_tokens, f"at least {self.vocabulary}")
        for place, layer in enumerate(self.layers):
            self._check_source(place, layer)
            is_known = not self.rotaries or layer.rotary < len(self.rotaries)
            expect(is_known, "rotary", layer.rotary, f"one below {len(self.rotaries)}")
            pairs = 2 * len(self.rotaries[layer.rotary].frequencies) if self.rotaries else 0
            expect(pairs <= layer.kv.width, "frequencies", pairs, f"at most {layer.kv.width} numbers")
            if layer.dense is not None:
                self._check_dense(layer, layer.dense)

    def _check_source(self, place: int, layer: LayerSpec) -> None:
        """It is the layer itself, or attends and holds keys and values of the same shape."""
        is_before = layer.source <= place and self.layers[layer.source].source == layer.source
        expect(is_before, "source", layer.source, f"a layer up to {place} with keys of its own")
        if layer.source < place:
            source = self.layers[layer.source]
            is_alike = source.kv == layer.kv and not any(each.inputs for each in (source, layer))
            expect(is_alike, "source", layer.source, "a layer with keys and values of the same shape")

    def _check_dense(self, layer: LayerSpec, dense: Dense) -> None:
        if isinstance(dense.mixer, Convolution):
            expect(layer.inputs == self.hidden, "inputs", layer.inputs, f"{self.hidden}")
        elif dense.mixer is None and dense.is_turned:
            expect(bool(self.rotaries), "rotaries", self.rotaries, "one at least")
        expect(
            dense.input_width == self.layer_inputs, "layer_inputs", dense.input_width, f"{self.layer_inputs}"
        )

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

    @property
    def mixture(self) -> Mixture | None:
        """That of the first layer that has one; those of others have as many experts."""
        found = (layer.dense.mixture for layer in self.layers if layer.dense is not None)
        return next(filter(None, found), None)

    @property
    def experts(self) -> int:
        """Of a layer; 0: no layer has any."""
        return 0 if self.mixture is None else self.mixture.experts

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
