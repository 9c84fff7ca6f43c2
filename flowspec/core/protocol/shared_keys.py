"""Which layers of a model hold keys and values, and of how many heads, by its transformers config; and what
goes with a hidden state to later stages.

In most models each layer attends to keys and values of its own, all of one width. Gemma 4 has other heads in
layers that see all than in those with a window, and its last layers attend to what the last layer before them
holds that is of their type, their *source*. A slice that begins between the two has the source's keys and
values sent along with each row and holds them itself, so layers are cut anywhere. So are embeddings where
each layer takes something of its own from a token's (`model.layer_inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


def heads_of(config: Any) -> tuple[Heads, ...]:
    """Those of each layer of a transformers config."""
    count = config.num_hidden_layers
    by_layer = [config] * count
    if varying_of(config):
        by_layer = [config.per_layer_config[layer] for layer in range(count)]
    found = [Heads(count=_key_heads(each), width=_head_width(each)) for each in by_layer]
    if getattr(config, "global_head_dim", None):  # before transformers 5.20 two fields said it
        wide = config.num_global_key_value_heads if config.attention_k_eq_v else None
        whole = Heads(count=int(wide or found[0].count), width=int(config.global_head_dim))
        types = config.layer_types
        found = [whole if types[layer] == "full_attention" else found[layer] for layer in range(count)]
    return tuple(found)


def varying_of(config: Any) -> frozenset[str]:
    """The fields that a transformers config states for single layers."""
    return frozenset(getattr(config, "per_layer_attributes", None) or ())


def sources_of(config: Any) -> tuple[int, ...]:
    """The layer to whose keys and values each layer of a transformers config attends."""
    count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", None) or 0
    own = range(count - shared)
    if not shared:
        return tuple(own)
    last = {config.layer_types[layer]: layer for layer in own}
    return (*own, *(last[config.layer_types[layer]] for layer in range(count - shared, count)))


def holders(sources: tuple[int, ...], begin: int, end: int) -> tuple[int, ...]:
    """The layers whose keys and values a slice `[begin, end)` holds: its own, and sources before them."""
    return tuple(sorted({sources[layer] for layer in range(begin, end)}))


def carried_at(config: Any, begin: int) -> Carried:
    """What comes to a slice that begins with this layer, and to nobody behind the last one."""
    count, sources = config.num_hidden_layers, sources_of(config)
    has_inputs = bool(getattr(config, "hidden_size_per_layer_input", None)) and 0 < begin < count
    return Carried(
        embedding=int(config.hidden_size) * has_inputs,
        sources=tuple(layer for layer in holders(sources, begin, count) if layer < begin),
    )


def carried_width(config: Any, begin: int) -> int:
    """How many numbers that is for each row."""
    carried, heads = carried_at(config, begin), heads_of(config)
    return carried.embedding + sum(heads[source].numbers for source in carried.sources)


def carried_most(config: Any) -> int:
    """The most that goes with a hidden state from one slice to the next, wherever the two are cut."""
    return max(carried_width(config, layer) for layer in range(config.num_hidden_layers))


def _key_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
