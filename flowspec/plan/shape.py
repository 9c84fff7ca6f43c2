"""Model shapes: the numbers of an architecture that time and memory follow from, with those of well-known
models.

A shape needs no weights, so the tokens of a small model can be timed as those of a large one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import DeltaRule, Dense, Heads, ModelSpec, holders
from flowspec.core.protocol.precision import FILED, PRECISIONS
from flowspec.errors import InputError, meant
from flowspec.plan.timing import EXPERTS_SHARED

USUAL_FILED_BYTES = PRECISIONS[FILED].weight_bytes + PRECISIONS[FILED].group_bytes
"""Of a weight in a GGUF file, where nothing else is known of it."""


HeadsOfLayers = tuple[tuple[Heads, int], ...]
"""Heads of keys and values, and how many layers have such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersHeld:
    """How some layers hold a request: keys and values `whole`, or in a window; so many `with_inputs` hold
    `input_width` numbers instead, in a window, too, and those with states have `state_numbers` in all."""

    whole: HeadsOfLayers = ()
    windowed: HeadsOfLayers = ()
    with_inputs: int = 0
    input_width: int = 0
    state_numbers: int = 0


def layers_held(
    heads: Sequence[Heads],
    windows: Sequence[int] = (),
    inputs: Sequence[int] = (),
    states: Sequence[int] = (),
    sources: Sequence[int] = (),
    begin: int = 0,
    end: int | None = None,
) -> LayersHeld:
    """Of the layers `[begin, end)` of a model, from what `core.protocol` says of its config; what is not
    given is as in most models."""
    end = len(heads) if end is None else min(end, len(heads))  # a plan asks how many fit, more than there are
    whole: Counter[Heads] = Counter()
    windowed: Counter[Heads] = Counter()
    for layer in holders(tuple(sources) or tuple(range(len(heads))), begin, end):
        if not any(inputs[layer : layer + 1]):
            (windowed if any(windows[layer : layer + 1]) else whole)[heads[layer]] += 1
    return LayersHeld(
        whole=tuple(whole.items()),
        windowed=tuple(windowed.items()),
        with_inputs=sum(width > 0 for width in inputs[begin:end]),
        input_width=max(inputs, default=0),
        state_numbers=sum(states[begin:end]),
    )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated feed-forward layers.

    `positions`: tokens that it takes at most. `extra_params` are outside layers, embedding and `lm_head`.
    `is_tied`: `lm_head` has the embedding's weights. A mixture of experts counts those that one row runs
    through: `experts` are there, of which a row runs through `experts_per_row`, `experts_shared` of them with
    the row before it, and each through `shared_intermediate` neurons besides. `windows` are how many
    positions each layer sees (0: all; none given: all see all). `inputs` are how many numbers a layer holds
    of a token in the place of keys and values (0: it holds these; none given: all do), with `mixer_params`
    weights in the place of attention's, and `states` how many numbers its state has. `has_gates`: attention
    has as many outputs again for gates as for queries. Where layers are unlike, `unlike` are the heads of
    each, `sources` to whose keys and values it attends, and `mean_params` the weights of one on average.
    `table` are the weights of a layer's own embedding of tokens, `carried` the most numbers that go with a
    hidden state. `has_mtp`: the checkpoint has a layer that guesses further tokens. `filed_bytes`: a weight's
    on average as the model's GGUF file packs it. `drafted`: tokens that a drafter's own `lm_head` chooses
    among (0: all).
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int = limits.CONTEXT_MAX
    extra_params: int = 0
    is_tied: bool = False
    experts: int = 1
    experts_per_row: int = 1
    experts_shared: float = EXPERTS_SHARED
    shared_intermediate: int = 0
    windows: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    mixer_params: int = 0
    states: tuple[int, ...] = ()
    has_gates: bool = False
    unlike: tuple[Heads, ...] = ()
    sources: tuple[int, ...] = ()
    mean_params: int = 0
    table: int = 0
    carried: int = 0
    has_mtp: bool = False
    filed_bytes: float = USUAL_FILED_BYTES
    drafted: int = 0

    @property
    def layer_heads(self) -> tuple[Heads, ...]:
        """Of what each layer attends to."""
        own = self.unlike or (Heads(count=self.kv_heads, width=self.head_dim),) * self.layers
        return tuple(own[source] for source in self.sources) or own

    def held(self, begin: int, layers: int) -> LayersHeld:
        kinds = self.windows, self.inputs, self.states, self.sources
        return layers_held(self.layer_heads, *kinds, begin, begin + layers)

    def held_anywhere(self, layers: int) -> set[LayersHeld]:
        """`held` of so many layers in a row, wherever they are."""
        places = max(1, len(self.windows) - layers + 1)
        return {self.held(begin, layers) for begin in range(places)}

    @property
    def attention_share(self) -> float:
        """Of the layers, those that hold keys and values."""
        return 1 - sum(width > 0 for width in self.inputs) / self.layers

    @property
    def layer_params(self) -> int:
        """Weights of one layer, the average where they are unlike; norms are too small to count."""
        if self.mean_params:
            return self.mean_params
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        attention += self.hidden * self.head_dim * self.heads * self.has_gates
        share = self.attention_share
        mixer = attention if share == 1 else round(share * attention + (1 - share) * self.mixer_params)
        return mixer + 3 * self.hidden * self.intermediate

    @property
    def held_intermediate(self) -> int:
        """Neurons of a layer that are in memory, those of all experts."""
        of_experts = (self.intermediate - self.shared_intermediate) // self.experts_per_row * self.experts
        return of_experts + self.shared_intermediate

    @property
    def chosen_params(self) -> int:
        """Of `layer_params`, the weights of the experts that one row of a mixture chooses, and another may
        not."""
        chosen = self.intermediate - self.shared_intermediate if self.experts > self.experts_per_row else 0
        return 3 * self.hidden * chosen

    @property
    def head_params(self) -> int:
        return self.hidden * self.choices

    @property
    def choices(self) -> int:
        """Outputs of `lm_head`."""
        return self.drafted or self.vocabulary

    @property
    def params(self) -> int:
        """All weights that a pass reads: the embedding is a lookup."""
        return self.layers * self.layer_params + self.head_params + self.extra_params

    def cache_values(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim


def shape_of(spec: ModelSpec, name: str, filed_bytes: float = 0.0, *, has_mtp: bool = False) -> ModelShape:
    """That of a model; `filed_bytes` and `has_mtp` as in `ModelShape`, 0 where there is no such file."""
    first, sources, states = spec.layers[0], spec.sources, spec.states
    is_unlike = len({*spec.heads}) > 1 or len({*sources}) < len(sources)
    layers = [layer.dense for layer in spec.layers if layer.dense is not None]
    usual = next((dense for dense in layers if dense.mixture is not None), layers[0])
    mixture = usual.mixture
    params = [_params(spec, number) for number in range(len(spec.layers))]
    return ModelShape(
        name=name,
        layers=len(spec.layers),
        hidden=spec.hidden,
        intermediate=_neurons(usual),
        heads=first.heads,
        kv_heads=first.kv.count,
        head_dim=first.kv.width,
        vocabulary=spec.vocabulary,
        positions=spec.context_max,
        is_tied=spec.is_tied,
        experts=1 if mixture is None else mixture.experts,
        experts_per_row=1 if mixture is None else mixture.chosen,
        shared_intermediate=0 if mixture is None else _shared_neurons(usual),
        windows=spec.windows,
        inputs=spec.inputs,
        mixer_params=max(_mixer_params(dense, spec.hidden) for dense in layers),
        states=states,
        has_gates=any(states),  # as all families with states have
        unlike=spec.heads if is_unlike else (),
        sources=sources if is_unlike else (),
        mean_params=sum(params) // len(params) if is_unlike or spec.layer_inputs else 0,
        table=spec.layer_inputs * spec.layer_input_tokens,
        carried=spec.carried_most,
        has_mtp=has_mtp,
        filed_bytes=filed_bytes or USUAL_FILED_BYTES,
    )


def _shared_neurons(dense: Dense) -> int:
    """Neurons of a layer that all rows run through."""
    mixture = dense.mixture
    return dense.neurons if mixture is None or mixture.is_parallel else mixture.shared_neurons


def _neurons(dense: Dense) -> int:
    """Neurons of a layer that one row runs through."""
    mixture = dense.mixture
    return _shared_neurons(dense) + (0 if mixture is None else mixture.chosen * mixture.neurons)


def _mixer_params(dense: Dense, hidden: int) -> int:
    """Weights of what a layer has in the place of attention."""
    if isinstance(dense.mixer, DeltaRule):
        return hidden * (dense.mixer.inputs + 2 * dense.mixer.value_numbers)  # besides, a gate and its output
    return 0 if dense.mixer is None else 4 * hidden**2  # a short convolution's three inputs and its output


def _params(spec: ModelSpec, number: int) -> int:
    """Weights of a layer that attends, of which a row runs through all."""
    layer = spec.layers[number]
    dense, own = layer.dense, layer.source == number
    assert dense is not None, "there is an operation for everything"
    heads = 2 * layer.heads + own * (1 + dense.has_values) * layer.kv.count
    return spec.hidden * (heads * layer.kv.width + 3 * (_neurons(dense) + dense.input_width))


_BLOCK_LAYERS = 5
_CAPTURES = 3
_DRAFT_VOCABULARY = 32_000


def eagle_shape(target: ModelShape) -> ModelShape:
    """An EAGLE-1/2 head: one layer of the target's, a projection of (embedding, feature), the target's
    `lm_head` (2401.15077)."""
    return ModelShape(
        name=f"eagle-{target.name}",
        layers=1,
        hidden=target.hidden,
        intermediate=target.intermediate,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocabulary=target.vocabulary,
        positions=target.positions,
        extra_params=2 * target.hidden * target.hidden,
    )


def eagle3_shape(target: ModelShape) -> ModelShape:
    """An EAGLE-3 head: one layer whose queries, keys and values read embedding and feature side by side, a
    projection of three of the target's states, and an `lm_head` for 32,000 tokens (2503.01840, and the heads
    that are published)."""
    return replace(
        eagle_shape(target),
        name=f"eagle3-{target.name}",
        extra_params=_CAPTURES * target.hidden**2
        + target.hidden * target.head_dim * (target.heads + 2 * target.kv_heads),
        drafted=_DRAFT_VOCABULARY if target.vocabulary > _DRAFT_VOCABULARY else 0,
    )


def block_shape(target: ModelShape) -> ModelShape:
    """A block drafter: five layers of the target's, as DeepSpec's have, and a projection of five of its
    hidden states (2602.06036)."""
    return replace(
        target,
        name=f"block-{target.name}",
        layers=_BLOCK_LAYERS,
        extra_params=_BLOCK_LAYERS * target.hidden**2,
    )


def mtp_shape(target: ModelShape) -> ModelShape:
    """The MTP layer of a model's checkpoint: as an EAGLE head's, with the experts and gates of the model's
    own layers, and the model's embedding beside its `lm_head`."""
    return replace(
        eagle_shape(target),
        name=f"mtp-{target.name}",
        is_tied=target.is_tied,
        experts=target.experts,
        experts_per_row=target.experts_per_row,
        experts_shared=target.experts_shared,
        shared_intermediate=target.shared_intermediate,
        has_gates=target.has_gates,
        filed_bytes=target.filed_bytes,
    )


_GPT_OSS = ModelShape(
    "gpt-oss-20b", 24, 2880, 4 * 2880, 64, 8, 64, 201088, 131072, experts=32, experts_per_row=4
)
_KNOWN = (  # from each model's published config.json
    ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096),
    ModelShape("llama-2-13b", 40, 5120, 13824, 40, 40, 128, 32000, 4096),
    ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096),
    ModelShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192),
    ModelShape("llama-3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192),
    ModelShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, is_tied=True),
    ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072, is_tied=True),
    ModelShape("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 64, 32000, 2048),
    ModelShape("llama-68m", 2, 768, 3072, 12, 12, 64, 32000, 2048),
    ModelShape("qwen2-7b", 28, 3584, 18944, 28, 4, 128, 152064, 131072),
    ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, 131072),
    ModelShape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, 40960, is_tied=True),
    ModelShape("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, 40960, is_tied=True),
    ModelShape("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, 40960, is_tied=True),
    ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40960),
    ModelShape("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936, 40960),
    ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960),
    ModelShape("qwen3-30b-a3b", 48, 2048, 8 * 768, 32, 4, 128, 151936, 40960, experts=128, experts_per_row=8),
    replace(_GPT_OSS, windows=(128, 0) * 12),
    ModelShape("mixtral-8x7b", 32, 4096, 2 * 14336, 32, 8, 128, 32000, 32768, experts=8, experts_per_row=2),
    ModelShape("olmoe-1b-7b", 16, 2048, 8 * 1024, 16, 16, 128, 50304, 4096, experts=64, experts_per_row=8),
)
_OF_DRAFTERS = (
    *map(eagle_shape, _KNOWN),
    *map(eagle3_shape, _KNOWN),
    *(block_shape(shape) for shape in _KNOWN if shape.experts == 1),  # its layers are not a mixture's
)
SHAPES_ALIKE = 0.8
"""As `errors.ALIKE`; more, for all Llamas are alike, and few of them are meant."""
SHAPES = {shape.name: shape for shape in (*_KNOWN, *_OF_DRAFTERS)}


def find_shape(name: str) -> ModelShape:
    """A shape by name; raises `InputError` naming what may be meant, else those that are known."""
    if name in SHAPES:
        return SHAPES[name]
    known = [shape.name for shape in _KNOWN]
    hint = meant(name, SHAPES, SHAPES_ALIKE) or meant(name, known, SHAPES_ALIKE)
    these = f"; expected one of {', '.join(known)}, or eagle-, eagle3- or block- before one of these"
    raise InputError(f"shape: there is no {name!r:.80}{hint or these}")
