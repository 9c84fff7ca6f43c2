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

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flowspec.core.protocol import limits

Activation = Literal["silu", "gelu_tanh", "relu"]
QueryNorm = Literal["", "head", "width"]
"""How queries and keys are normalised: not at all, each head alone, or all heads together."""
Router = Literal["softmax", "softmax to 1", "scaled softmax to 1", "softmax of chosen", "sigmoid"]
"""How a mixture's rows choose experts (`plain.choose`)."""
Norm = Literal["weights", "1 + weights"]
"""What rows are multiplied by after they are normalised."""
NORMS: tuple[Norm, ...] = get_args(Norm)
"""In the order of `canonical.c` and `canonical.cu`."""
NUMBER_MAX = 1 << 20
MOST = {
    **dict.fromkeys(("vocabulary", "layer_input_tokens"), limits.VOCABULARY_MAX),
    "context_max": limits.ID_MAX,
    **dict.fromkeys(("heads", "count", "key_heads", "experts"), 1 << 12),
    "key_width": 1 << 8,
    "value_width": 1 << 10,
    "width": 1 << 13,
    "length": 1 << 6,
    "state": 1 << 28,
}
"""The largest number of a field, where that is not `NUMBER_MAX`: ten times and more above any model known."""
NAME_CHARS_MAX = 64


class _Checked:
    """Raises `ValueError` for what no model has: a description may come from a peer, and what runs by it
    reads memory where it says."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in _hints_of(type(self)):  # type: ignore[arg-type]
            value, most = getattr(self, name), MOST.get(name, NUMBER_MAX)
            if hint in (int, float, bool):
                _expect(type(value) is hint, name, value, "a number")
            if type(value) is float:
                _expect(math.isfinite(value), name, value, "a number")
            elif type(value) is int:
                _expect(0 <= value <= most, name, value, f"a number from 0 to {most}")
            elif get_origin(hint) is Literal:
                _expect(value in get_args(hint), name, value, ", ".join(get_args(hint)))
            elif type(value) is str:
                _expect(_is_name(value), name, value, "a short name")


def _is_name(value: str) -> bool:
    return len(value) <= NAME_CHARS_MAX and value.isascii() and value.isprintable()


@functools.cache
def _hints_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _expect(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads(_Checked):
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
class Rotary(_Checked):
    """Position embeddings: by how much each pair of a head's numbers turns from one position to the next,
    float32, and what cosine and sine are multiplied by. Pairs without a frequency do not turn."""

    frequencies: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        _expect(all(map(math.isfinite, self.frequencies)), "frequencies", self.frequencies, "numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(_Checked):
    """Experts of so many `neurons` in the place of an MLP, among which each row chooses so many; `is_normed`:
    their shares are brought to a sum of 1, then multiplied by `factor`. They are in `groups`, of which so
    many are `open` to a row. `has_shared`: what an MLP of `shared_neurons` makes of every row is added,
    `is_shared_gated`: times a number of the row. `is_parallel`: the layer has an MLP, too, and norms for both
    (Gemma 4). With a `limit` (0: none) gates and values are clamped, and gated with a `slope`
    (`plain.clamped`). `has_biases`: router and experts add some."""

    router: Router
    experts: int
    chosen: int
    neurons: int = 0
    is_normed: bool = True
    factor: float = 1.0
    groups: int = 1
    open: int = 1
    has_shared: bool = False
    shared_neurons: int = 0
    is_shared_gated: bool = False
    is_parallel: bool = False
    has_biases: bool = False
    limit: float = 0.0
    slope: float = 0.0

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        _expect(1 <= self.chosen <= self.experts, "chosen", self.chosen, f"1 to {self.experts} experts")
        is_known = self.is_parallel <= (self.router == "scaled softmax to 1")
        _expect(is_known, "router", self.router, "scaled softmax to 1, with an MLP")
        is_whole = 1 <= self.open <= self.groups and not self.experts % self.groups
        is_whole = is_whole and (self.groups == 1 or self.groups < self.experts)
        has_enough = is_whole and self.experts // self.groups * self.open >= self.chosen
        _expect(has_enough, "groups", (self.groups, self.open), "equal groups, as many open as are needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution(_Checked):
    """A short convolution of each channel, over a row and the few before it, in all so many (LFM2)."""

    length: int

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        _expect(self.length > 0, "length", self.length, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(_Checked):
    """Linear attention, whose inputs go through a convolution of this `length` first (Qwen3.5)."""

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    length: int

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        numbers = self.key_heads, self.heads, self.key_width, self.value_width, self.length
        is_whole = min(numbers) > 0 and not self.heads % self.key_heads
        _expect(is_whole, "heads", numbers, f"numbers above 0, a multiple of {self.key_heads} heads of keys")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(_Checked):
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

    scale: float
    activation: Activation
    neurons: int = 0
    mixer: Convolution | DeltaRule | None = None
    is_turned: bool = True
    is_gated: bool = False
    has_values: bool = True
    has_value_norm: bool = False
    is_joined: bool = False
    biases: tuple[str, ...] = ()
    input_width: int = 0
    has_factor: bool = False
    has_entry: bool = False
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

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        _expect(not (self.is_gated and self.is_joined), "is_gated", True, "no gates in a joined matrix")
        is_short = len(self.biases) <= NAME_CHARS_MAX and all(map(_is_name, self.biases))
        _expect(is_short, "biases", self.biases, "a few names")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(_Checked):
    """One layer: its `heads` of queries, the heads of its keys and values, and the layer, its `source`, to
    whose keys and values it attends, turned by a `rotary` of the model.

    `window`: how many positions a row sees, itself counted; 0: all. `inputs`: how many numbers it holds of a
    token in the place of keys and values (0: it holds these), and `state` how many its state has. `dense`:
    None where it computes anything else.
    """

    heads: int
    kv: Heads
    source: int
    rotary: int = 0
    window: int = 0
    inputs: int = 0
    state: int = 0
    dense: Dense | None = None

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        is_whole = self.heads > 0 and self.kv.numbers > 0 and not self.heads % self.kv.count
        of_keys = f"a multiple of {self.kv.count} heads of keys, {self.kv.width} wide"
        _expect(is_whole, "heads", self.heads, of_keys)
        mixer = None if self.dense is None else self.dense.mixer
        if isinstance(mixer, DeltaRule):
            held = mixer.inputs, mixer.heads * mixer.key_width * mixer.value_width, mixer.length
            _expect((self.inputs, self.state, self.window) == held, "inputs", self.inputs, f"{held[0]}")
        elif isinstance(mixer, Convolution):
            _expect(self.window == mixer.length, "window", self.window, f"{mixer.length}")
        elif self.dense is not None:
            _expect(not self.inputs and not self.state, "inputs", self.inputs, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(_Checked):
    """`family`: by whose names files hold its weights. `context_max`: the most positions that it runs with
    one and the same arithmetic. `layer_inputs`: what each layer takes of a token besides its hidden state,
    from a table of so many tokens, `layer_input_tokens`. `norm` and `eps`: how all norms compute. Embeddings
    are multiplied by `embedding_scale`; logits are divided by `logit_divisor` and bounded by `logit_cap` (0:
    they have no bound)."""

    family: str = ""
    hidden: int
    vocabulary: int
    context_max: int
    is_tied: bool
    layer_inputs: int = 0
    layer_input_tokens: int = 0
    norm: Norm = "weights"
    eps: float = 1e-6
    embedding_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float = 0.0
    rotaries: tuple[Rotary, ...] = ()
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        _expect(self.hidden > 0, "hidden", self.hidden, "1 or more")
        count = len(self.layers)
        _expect(1 <= count <= limits.LAYERS_MAX, "layers", count, f"1 to {limits.LAYERS_MAX}")
        rules = {layer.dense.mixer for layer in self.layers if layer.dense is not None}
        _expect(len(rules - {None}) < 2, "mixer", rules, "the same wherever layers have one")
        is_enough = not self.layer_inputs or self.layer_input_tokens >= self.vocabulary
        _expect(is_enough, "layer_input_tokens", self.layer_input_tokens, f"at least {self.vocabulary}")
        for place, layer in enumerate(self.layers):
            self._check_source(place, layer)
            is_known = not self.rotaries or layer.rotary < len(self.rotaries)
            _expect(is_known, "rotary", layer.rotary, f"one below {len(self.rotaries)}")
            pairs = 2 * len(self.rotaries[layer.rotary].frequencies) if self.rotaries else 0
            _expect(pairs <= layer.kv.width, "frequencies", pairs, f"at most {layer.kv.width} numbers")
            if layer.dense is not None:
                self._check_dense(layer, layer.dense)

    def _check_source(self, place: int, layer: LayerSpec) -> None:
        """It is the layer itself, or attends and holds keys and values of the same shape."""
        is_before = layer.source <= place and self.layers[layer.source].source == layer.source
        _expect(is_before, "source", layer.source, f"a layer up to {place} with keys of its own")
        if layer.source < place:
            source = self.layers[layer.source]
            is_alike = source.kv == layer.kv and not any(each.inputs for each in (source, layer))
            _expect(is_alike, "source", layer.source, "a layer with keys and values of the same shape")

    def _check_dense(self, layer: LayerSpec, dense: Dense) -> None:
        if isinstance(dense.mixer, Convolution):
            _expect(layer.inputs == self.hidden, "inputs", layer.inputs, f"{self.hidden}")
        elif dense.mixer is None and dense.is_turned:
            _expect(bool(self.rotaries), "rotaries", self.rotaries, "one at least")
        _expect(
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
