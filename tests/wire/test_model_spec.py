"""What a model computes goes to daemons as it is, and what no model has is refused in a line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.model_spec import (
    Convolution,
    DeltaRule,
    Dense,
    LayerSpec,
    Mixture,
    ModelSpec,
    Rotary,
)
from flowspec.errors import PeerError
from flowspec.wire.codec import Envelope, decode, encode
from tests.checkpoints import VARIANTS
from tests.specs import spec_of_variant

BODY = 5


def envelope_of(spec: ModelSpec) -> Envelope:
    count = len(spec.layers)
    assign = Assign(
        model="m",
        fingerprint="f",
        end_layer=count,
        layer_count=count,
        dtype="bfloat16",
        context=64,
        spec=spec,
    )
    return Envelope(incarnation=1, sender="head", sequence=0, message=assign)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_model_of_any_family_computes_arrives_as_it_was_sent(name: str) -> None:
    envelope = envelope_of(spec_of_variant(name))
    (frame,) = encode(envelope)
    assert decode([frame]) == envelope
    assert len(frame) < 1 << 12, "a layer is some bytes"


# ------------------------------------------------------------------------------------ what no model has

Path = tuple[Any, ...]
"""From a spec inwards: names of fields, and places in tuples."""


def place(cls: type, name: str) -> int:
    is_tagged = cls.__struct_config__.tag is not None
    return cls.__struct_fields__.index(name) + is_tagged


def index(path: Path) -> list[int]:
    """In nested lists, as a spec goes over the wire."""
    found, cls = [], ModelSpec
    inner: dict[Any, type] = {
        **{"layers": LayerSpec, "rotaries": Rotary, "dense": Dense, "mixture": Mixture},
        **{"convolution": Convolution, "delta rule": DeltaRule},
    }
    for step in path:
        if isinstance(step, int):
            found.append(step)
            continue
        name, _, kind = step.partition(":")
        found.append(place(cls, name))
        cls = inner.get(kind or name, cls)
    return found


def changed(variant: str, changes: dict[Path, Any]) -> list[bytes]:
    entries = msgpack.unpackb(encode(envelope_of(spec_of_variant(variant)))[0])
    spec = entries[BODY][place(Assign, "spec")]
    for path, value in changes.items():
        *way, last = index(path)
        where = spec
        for step in way:
            where = where[step]
        where[last] = value(where[last]) if isinstance(value, Callable) else value
    return [msgpack.packb(entries)]


LAYER: Path = ("layers", 0)
DENSE: Path = (*LAYER, "dense")
MIXTURE: Path = (*DENSE, "mixture")
RULE: Path = (*DENSE, "mixer:delta rule")
TURNS: Path = ("rotaries", 0)
HOSTILE: list[tuple[str, dict[Path, Any], str]] = [
    # As many as there may be, and more.
    ("qwen3", {("layers",): lambda layers: layers * 200}, "length <= 1024"),
    ("qwen3", {("layers",): []}, "layers: expected a list of 1 to 1024 entries"),
    ("qwen3", {("layers",): [[]] * 1_000_000}, "length <= 1024"),
    ("qwen3", {("layers",): [[]] * 4}, "layers.0..heads: expected .*, got nothing"),
    ("qwen3", {(*TURNS, "frequencies"): [1.0] * 500_000}, "length <= 4096"),
    ("qwen3", {(*TURNS, "frequencies"): [1.0] * 4096}, "frequencies: expected at most 24 numbers, got 8192"),
    ("qwen3", {(*TURNS, "frequencies"): [1.0] * 13}, "frequencies: expected at most 24 numbers, got 26"),
    (
        "qwen3",
        {(*DENSE, "biases"): ["mlp.up_proj"] * 65},
        "biases: expected a list of at most 64 entries, got 65 entries",
    ),
    # Numbers.
    ("qwen3", {("hidden",): 1 << 21}, "hidden: expected a whole number from . to 1048576"),
    ("qwen3", {("hidden",): -64}, "hidden: expected a whole number from . to"),
    ("qwen3", {("hidden",): 64.0}, "hidden: expected a whole number from 1 to 1048576, got 64.0"),
    ("qwen3", {("hidden",): True}, "hidden: .*, got True"),
    (
        "qwen3",
        {("vocabulary",): limits.VOCABULARY_MAX + 1},
        "vocabulary: expected a whole number from . to",
    ),
    ("qwen3", {(*LAYER, "kv", 0): 0}, "count: expected a whole number from 1"),
    ("qwen3", {(*LAYER, "kv", 1): 0}, "width: expected a whole number from 1"),
    ("qwen3", {(*LAYER, "heads"): 3}, "heads: expected a multiple of"),
    ("qwen3", {(*LAYER, "heads"): 0}, "heads: expected"),
    ("qwen3", {(*LAYER, "heads"): 1 << 20}, "heads: expected a whole number from . to 4096"),
    ("qwen3", {(*DENSE, "neurons"): 1 << 40}, "neurons: expected a whole number from . to"),
    ("qwen3", {(*LAYER, "window"): 1 << 21}, "window: expected a whole number from . to"),
    ("qwen3", {(*TURNS, "frequencies", 2): math.nan}, "frequencies.2.: expected a number, got"),
    ("qwen3", {(*TURNS, "frequencies", 2): math.inf}, "frequencies.2.: expected a number, got"),
    ("qwen3", {(*TURNS, "scale"): math.nan}, "scale: expected a number, got nan"),
    ("qwen3", {("eps",): math.nan}, "eps: expected a number, got nan"),
    ("qwen3", {(*DENSE, "scale"): math.inf}, "scale: expected a number, got inf"),
    ("gemma2", {("logit_cap",): -math.inf}, "logit_cap: expected a number, got -inf"),
    # Words.
    (
        "qwen3",
        {(*DENSE, "activation"): "exp"},
        "activation: expected one of silu, gelu_tanh, relu, got 'exp'",
    ),
    ("qwen3", {(*DENSE, "query_norm"): "heads"}, "query_norm: expected"),
    ("qwen3", {("norm",): "scale"}, "norm: expected one of weights, "),
    ("qwen3", {(*DENSE, "norm_before_mlp"): "x" * 65}, "norm_before_mlp: expected a short name"),
    ("qwen3", {(*DENSE, "norm_before_mlp"): "a\nb"}, "norm_before_mlp: expected a short name"),
    ("qwen3", {(*DENSE, "biases"): ["a\nb"]}, "biases.0.: expected a short name"),
    ("qwen3", {("family",): "x" * 65}, "family: expected a short name"),
    ("qwen3", {("family",): 3}, "family: expected a short name, got 3"),
    ("olmoe", {(*MIXTURE, "router"): "best"}, "router: expected one of softmax"),
    # What belongs together.
    ("olmoe", {(*MIXTURE, "chosen"): 6}, "chosen: expected 1 to 5 experts, got 6"),
    ("olmoe", {(*MIXTURE, "chosen"): 0}, "chosen: expected a whole number from 1"),
    ("olmoe", {(*MIXTURE, "groups"): 2}, "groups: expected equal groups"),
    ("olmoe", {(*MIXTURE, "groups"): 5}, "groups: expected equal groups, as many open as are needed"),
    ("olmoe", {(*MIXTURE, "open"): 2}, "groups: expected equal groups"),
    ("olmoe", {(*MIXTURE, "groups"): 0}, "groups: expected a whole number from 1"),
    ("qwen3", {(*LAYER, "source"): 1}, "source: expected a layer up to 0"),
    ("qwen3", {("layers", 3, "source"): 7}, "source: expected a layer up to 3"),
    ("qwen3", {("layers", 3, "source"): 1 << 19}, "source: expected a layer up to 3"),
    ("gemma4", {("layers", 6, "source"): 5}, "source: expected a layer up to 6 with keys of its own"),
    ("gemma4", {("layers", 6, "source"): 2}, "source: expected"),
    ("gemma4", {("layers", 6, "kv", 0): 4}, "source: expected"),
    ("qwen3.5", {("layers", 5, "source"): 4}, "source: expected"),
    ("qwen3.5", {("layers", 3, "source"): 2}, "source: expected"),
    ("lfm2", {("layers", 3, "source"): 2}, "source: expected"),
    ("gemma4", {("layer_inputs",): 0}, "layer_inputs: expected"),
    ("gemma4", {(*DENSE, "input_width"): 0}, "layer_inputs: expected"),
    ("qwen3", {(*DENSE, "input_width"): 4}, "layer_inputs: expected"),
    ("gemma4", {("layer_input_tokens",): 299}, "layer_input_tokens: expected"),
    ("qwen3", {(*LAYER, "rotary"): 1}, "rotary: expected one below 1"),
    ("qwen3", {("rotaries",): []}, "rotaries: expected one at least"),
    ("qwen3.5", {(*LAYER, "state"): 961}, "inputs: expected"),
    ("qwen3.5", {(*LAYER, "state"): 0}, "inputs: expected"),
    ("qwen3.5", {(*LAYER, "inputs"): 7}, "inputs: expected"),
    ("qwen3.5", {(*LAYER, "window"): 5}, "inputs: expected"),
    ("qwen3.5", {(*RULE, "heads"): 3}, "heads: expected numbers above 0, a multiple"),
    ("qwen3.5", {(*RULE, "key_heads"): 0}, "key_heads: expected a whole number from 1"),
    ("qwen3.5", {(*RULE, "key_width"): 1 << 9}, "key_width: expected a whole number from . to 256"),
    ("qwen3.5", {RULE: ["Convolution", 3]}, "window: expected 3"),
    ("qwen3.5", {RULE: [3, 4]}, "mixer: expected Convolution or DeltaRule, got .3, 4"),
    ("qwen3.5", {RULE: None}, "inputs: expected none"),
    ("qwen3", {(*LAYER, "inputs"): 64}, "inputs: expected none"),
    ("qwen3", {(*LAYER, "state"): 64}, "inputs: expected none"),
    ("qwen3.5", {(*RULE, "length"): 3, (*LAYER, "window"): 3}, "mixer: expected the same"),
    ("qwen3", {(*DENSE, "embedding_norm"): "input_layernorm"}, "spec: expected layers of a model"),
    ("qwen3", {(*DENSE, "has_entry"): True}, "spec: expected layers of a model"),
    ("lfm2", {(*DENSE, "mixer:convolution", "length"): 0}, "length: expected a whole number from 1"),
    ("lfm2", {(*LAYER, "inputs"): 63}, "inputs: expected 64"),
    ("lfm2", {(*LAYER, "window"): 2}, "window: expected 3"),
]


NAMES = [f"{number}, {message.partition(':')[0]}" for number, (_, _, message) in enumerate(HOSTILE)]


@pytest.mark.parametrize(("variant", "changes", "message"), HOSTILE, ids=NAMES)
def test_what_no_model_has_is_refused_in_a_line(variant: str, changes: dict[Path, Any], message: str) -> None:
    frames = changed(variant, changes)
    with pytest.raises(PeerError, match=message) as refusal:
        decode(frames)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_layers_are_as_many_as_the_assignment_says() -> None:
    frames = changed("qwen3", {("layers",): lambda layers: layers[:-1]})
    with pytest.raises(PeerError, match="spec: expected 8 layers, got 7"):
        decode(frames)
