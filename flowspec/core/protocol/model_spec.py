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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.types import Length, Position, Record
from flowspec.validation import expect

Activation = Literal["silu", "gelu_tanh", "relu"]
QueryNorm = Literal["", "head", "width"]  # of queries and keys: none, of each head alone, of all together
# how a mixture's rows choose experts (`plain.choose`)
Router = Literal["softmax", "softmax to 1", "scaled softmax to 1", "softmax of chosen", "sigmoid"]
Norm = Literal["weights", "1 + weights"]  # what rows are multiplied by after they are normalised
NORMS: tuple[Norm, ...] = get_args(Norm)  # in the order of `canonical.c` and `canonical.cu`

CONVOLUTION = "conv"  # what transformers' configs call layers that are one, of the length `conv_L_cache`
LINEAR = "linear_attention"  # behind a convolution of the length `linear_conv_kernel_dim`
BACK_TOKENS = 1024  # that a request can go back at least without being read again: a turn with its answer
STATE_BACK_TOKENS = 64  # the same where layers have states, and the `step` there
STATES_HELD = 3  # by a layer with states: that behind what was given back, the output's, and a snapshot
STATE_BYTES = 4  # of each number: float32 in every precision, since sums over a whole text are held in it
# templates end a prompt with fewer tokens that the dialogue's next prompt may not have there, such as the
# beginning of the answer's thoughts; a snapshot is of so many before
PROMPT_END_TOKENS = 32

# what runs by a description reads memory where it says; the most of each is ten times above any model known
Number = Annotated[int, Meta(ge=0, le=1 << 20)]
Some = Annotated[int, Meta(ge=1, le=1 << 20)]
HeadCount = Annotated[int, Meta(ge=1, le=1 << 12)]  # of experts, too
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


class Rotary(Record, frozen=True, kw_only=True):
    """Position embeddings: by how much each pair of a head's numbers turns from one position to the next,
    float32, and what cosine and sine are multiplied by. Pairs without a frequency do not turn."""

    frequencies: Annotated[tuple[Real, ...], Meta(max_length=1 << 12)]
    scale: Real = 1.0


class Mixture(Record, frozen=True, kw_only=True):
    """Experts in the place of an MLP, among which each row chooses."""

    router: Router
    experts: HeadCount
    chosen: HeadCount  # by a row
    neurons: Number = 0  # of an expert
    is_normed: bool = True  # shares are brought to a sum of 1, then multiplied by `factor`
    factor: Real = 1.0
    groups: Some = 1
    open: Some = 1  # groups, to a row
    has_shared: bool = False  # what an MLP of `shared_neurons` makes of every row is added
    shared_neurons: Number = 0
    is_shared_gated: bool = False  # that is multiplied by a number of the row
    is_parallel: bool = False  # the layer has an MLP, too, and norms for both (Gemma 4)
    has_biases: bool = False  # of router and experts
    limit: Real = 0.0  # of gates and values, which are then gated with a `slope` (`plain.clamped`); 0: none
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
    """A layer of attention, or of a `mixer` in its place, then of an MLP with a gate, or a `mixture` of such,
    each added to the hidden state. In heads of EAGLE attention may read a token's embedding first."""

    scale: Real  # of scores
    activation: Activation
    neurons: Number = 0
    mixer: Convolution | DeltaRule | None = None
    is_turned: bool = True  # position embeddings turn queries and keys
    is_gated: bool = False  # what heads find is multiplied by gates, which come with their queries
    has_values: bool = True  # without them keys are values, too
    has_value_norm: bool = False  # without weights
    is_joined: bool = False  # queries, keys and values are one matrix, and gates and values of an MLP
    biases: Annotated[tuple[FieldName, ...], Meta(max_length=64)] = ()  # linear layers that add one
    input_width: Number = 0  # of what the layer takes of a token besides; 0: nothing
    has_factor: bool = False  # at its end the hidden state is multiplied by a number
    has_entry: bool = False  # its input is made of a token and a feature, as in MTP
    embedding_norm: FieldName = ""  # through which attention reads the embedding, then the hidden state
    is_residual_normed: bool = False  # to what that attention finds the normed hidden state is added
    cap: Real = 0.0  # of scores; 0: none
    has_sinks: bool = False  # some scores are of no key and have no value
    clip: Real = 0.0  # of queries, keys and values; 0: none
    query_norm: QueryNorm = ""
    norm_before_attention: FieldName = "input_layernorm"  # names of norms, in the places where there is one
    norm_after_attention: FieldName = ""
    norm_before_mlp: FieldName = "post_attention_layernorm"
    norm_after_mlp: FieldName = ""
    added_scale: Real = 1.0  # of what is added to the hidden state
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        expect(not (self.is_gated and self.is_joined), "is_gated", True, "no gates in a joined matrix")


class LayerSpec(Record, frozen=True, kw_only=True):
    """One layer of a model."""

    heads: HeadCount  # of queries
    kv: Heads
    source: Number  # the layer to whose keys and values it attends
    rotary: Number = 0  # of the model's, by which those are turned
    window: Number = 0  # positions that a row sees, itself counted; 0: all
    inputs: Number = 0  # numbers held of a token in the place of keys and values; 0: it holds these
    state: Annotated[int, Meta(ge=0, le=1 << 28)] = 0  # numbers of its state
    dense: Dense | None = None  # None: it computes anything else

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
    """What a model computes."""

    family: FieldName = ""  # by whose names files hold its weights
    hidden: Some
    vocabulary: TokenCount
    context_max: Annotated[int, Meta(ge=0, le=limits.ID_MAX)]  # positions, by one and the same arithmetic
    is_tied: bool
    layer_inputs: Number = 0  # numbers that each layer takes of a token besides its hidden state
    layer_input_tokens: TokenCount = 0  # in the table of these
    norm: Norm = "weights"  # how all norms compute, with `eps`
    eps: Real = 1e-6
    embedding_scale: Real = 1.0
    logit_divisor: Real = 1.0
    logit_cap: Real = 0.0  # 0: none
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
        width, expected = dense.input_width, self.layer_inputs
        expect(width == expected, "layer_inputs", width, f"{expected}")

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

    def carried_at(self, begin: int) -> tuple[int, tuple[int, ...]]:
        """What comes with each hidden state to a slice that begins with this layer, in this order: the
        token's embedding, of so many numbers, and keys, then values, of these layers before it."""
        count = len(self.layers)  # nothing comes behind the last one
        embedding = self.hidden if self.layer_inputs and 0 < begin < count else 0
        return embedding, tuple(each for each in holders(self.sources, begin, count) if each < begin)

    def carried_width(self, begin: int) -> int:
        """How many numbers that is for each row."""
        embedding, sources = self.carried_at(begin)
        return embedding + sum(self.layers[source].kv.numbers for source in sources)

    @property
    def carried_most(self) -> int:
        """The most that goes with a hidden state from one slice to the next, wherever the two are cut."""
        return max(map(self.carried_width, range(len(self.layers))))


def holders(sources: tuple[int, ...], begin: int, end: int) -> tuple[int, ...]:
    """The layers whose keys and values a slice `[begin, end)` holds: its own, and sources before them."""
    return tuple(sorted({sources[layer] for layer in range(begin, end)}))


class SlidingWindow(Record, frozen=True, kw_only=True):
    """What layers with a window hold of a request. A row at position p sees those above p - `tokens`. What
    lies more than `back` before that is given back, `step` positions at a time; but not the end of the
    prompt, from at least `snapshot` positions before it on (0: that, too).

    Who goes back (an edited turn, another answer to the same question) goes on behind what is held, and needs
    the window before that place. Further back nobody can go: there the text is read again from its beginning,
    since a key in the window depends, layer by layer, on all that is before it.

    A short convolution holds its inputs in the same way. So does linear attention, which sums up all before
    them in a *state*. A state cannot be taken back, so one is held of the place behind what was given back;
    from there the inputs that are held lead to any later one. They are far larger than keys and values. But a
    next turn often goes on where the answer began, as its template leaves the answer's thoughts out: so the
    end of each prompt stays held during its answer, from a *snapshot* of the states on.
    """

    tokens: Length
    back: Position = BACK_TOKENS
    step: Length = limits.CACHE_BLOCK_SLOTS
    snapshot: Position = 0

    @property
    def slots(self) -> int:
        """The most that a layer holds of a request: what may be seen, how far one can go back, what is not
        given back yet, the end of a prompt, a tree, and the segment that runs."""
        prompt_end = self.snapshot + self.step if self.snapshot else 0
        path = self.tokens + self.back + self.step + prompt_end
        return path + limits.TREE_NODES_MAX + limits.NODES_PER_SEGMENT_MAX

    def nothing_run(self, prompt: int) -> HeldPositions:
        """Of a request whose prompt of so many tokens is read from its beginning."""
        return HeldPositions(window=self)._with_prompt(prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPositions:
    """Of the output's path all from `given_back` on, and before that what lies from `snapshot` on and before
    `prompt_end`.

    A stage decides by what it has run, the head by the most that any stage can have run: places never come to
    lie further ahead for having run less, so the head never goes on behind what a stage has given back.
    """

    window: SlidingWindow
    given_back: int = 0
    snapshot: int = 0
    prompt_end: int = 0

    @property
    def prompt(self) -> range:
        """Positions that stay held during the answer."""
        return range(self.snapshot, self.prompt_end)

    def run(self, length: int) -> HeldPositions:
        """Once `length` positions of the output's path were run."""
        window = self.window
        given_back = (length - window.tokens - window.back) // window.step * window.step
        return replace(self, given_back=max(self.given_back, given_back))

    def keepable(self, count: int) -> int:
        """How many of the first `count` positions, at most, may be kept, so that the rows behind them find
        all that they see."""
        return next((most for most in (count, min(count, self.prompt_end)) if self._finds_all(most)), 0)

    def keep(self, count: int, prompt: int) -> HeldPositions:
        """With the first `count` positions kept, which must be `keepable`, and a prompt of so many tokens to
        go on with."""
        if count == 0:
            return self.window.nothing_run(prompt)
        return replace(self, given_back=self._first(count))._with_prompt(prompt)

    def _first(self, count: int) -> int:
        """Of the positions that lead to those behind the first `count`."""
        return min(self.given_back, self.snapshot) if count <= self.prompt_end else self.given_back

    def _finds_all(self, count: int) -> bool:
        first = self._first(count)
        return first == 0 or count + 1 - self.window.tokens >= first

    def _with_prompt(self, prompt: int) -> HeldPositions:
        window = self.window
        if not window.snapshot:
            return self
        place = (prompt - window.snapshot) // window.step * window.step
        return replace(self, snapshot=max(self.given_back, place), prompt_end=prompt)


def window_for(windows: Sequence[int], context: int, *, has_states: bool = False) -> SlidingWindow | None:
    """What layers with these windows hold of requests with such a context at a stage; None where
    there are none, and where holding less would save nothing."""
    tokens = max(windows, default=0)
    if not tokens:
        return None
    window = SlidingWindow(tokens=tokens)
    if has_states:
        back = STATE_BACK_TOKENS
        window = SlidingWindow(tokens=tokens, back=back, step=back, snapshot=PROMPT_END_TOKENS)
    return window if window.slots < context + limits.TREE_NODES_MAX else None
