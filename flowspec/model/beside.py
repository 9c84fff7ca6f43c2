"""What layers need of a job's rows beside their hidden states: inputs of their own that follow from tokens,
and keys and values that an earlier layer made (Gemma 4).

What of it a later slice needs travels with the hidden states (`ModelSpec.carried_at`): the
embedding of each token, of which each layer's input is made, and keys and values of layers to which later
ones attend. A slice writes those that come to its caches, as if it had made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flowspec.core.protocol.model_spec import Carried, Heads, holders
from flowspec.model.attention import TreeBatch
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.layer_inputs import LayerInput
from flowspec.model.pieces import Span
from flowspec.model.spec import spec_of

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Each `[1, kv_heads, rows, head_dim]`."""


class Needs:
    """Of a slice's layers: what comes with hidden states, and what goes on."""

    def __init__(self, config: Any, span: Span) -> None:
        self.is_any = hasattr(config, "num_kv_shared_layers")
        self.types: Sequence[str] = getattr(config, "layer_types", None) or ()
        spec = spec_of(config)
        self.heads = spec.heads
        self.before, self.after = spec.carried_at(span.first), spec.carried_at(span.end)
        held = holders(spec.sources, span.first, span.end)
        self.held = [source for source in self.before.sources if source in held]

    def sizes(self, carried: Carried) -> list[int]:
        """Of what comes behind an embedding: keys and values of each source."""
        return [self.heads[source].numbers // 2 for source in carried.sources for _ in range(2)]


class Beside:
    """Of one job; `came` is what came with its rows, `[1, rows, numbers]`, at the first slice embeddings.

    Programs read `tokens` `[rows]` int64 and `embedding` `[1, rows, hidden]`, and write keys and values of
    the slice's own layers to `going` `[rows, numbers]`, where what only passes by is from the beginning.
    """

    def __init__(self, needs: Needs, tokens: torch.Tensor, came: torch.Tensor) -> None:
        self._needs = needs
        self.tokens = tokens
        of_keys = needs.sizes(needs.before)
        self.embedding, *parts = torch.split(came, [came.shape[2] - sum(of_keys), *of_keys], dim=2)
        self._shared: dict[str, KeysAndValues] = {}
        for source, keys, values in zip(needs.before.sources, parts[::2], parts[1::2], strict=True):
            own = needs.heads[source]
            self._shared[needs.types[source]] = _in_heads(keys, own), _in_heads(values, own)
        of_keys, ahead = needs.sizes(needs.after), needs.after.embedding
        self.going = came.new_empty((len(tokens), ahead + sum(of_keys)))
        whole, *others = torch.split(self.going, [ahead, *of_keys], dim=1)
        if ahead:
            whole.copy_(self.embedding[0])
        passing = {source: parts[2 * place :][:2] for place, source in enumerate(needs.before.sources)}
        for source, keys, values in zip(needs.after.sources, others[::2], others[1::2], strict=True):
            if source in passing:
                keys.copy_(passing[source][0][0])
                values.copy_(passing[source][1][0])

    def write(self, batch: TreeBatch) -> None:
        """Keys and values that came and are attended to here, to their slots."""
        for source in self._needs.held:
            batch.write(source, *self._shared[self._needs.types[source]])

    def select(self, kept: Sequence[int]) -> None:
        """Leaves these rows."""
        self.tokens, self.embedding = self.tokens[kept], self.embedding[:, kept]
        self.going = self.going[kept]
        for kind, (keys, values) in self._shared.items():
            self._shared[kind] = keys[:, :, kept], values[:, :, kept]

    def of(self, layer: Any) -> dict[str, Any]:
        """What a layer is called with in addition."""
        if not self._needs.is_any:
            return {}
        own: LayerInput | None = getattr(layer, LAYER_INPUT, None)
        inputs = {} if own is None else {"per_layer_input": own(self.tokens, self.embedding)}
        return {"shared_kv_states": self._shared, **inputs}

    @property
    def carried(self) -> list[torch.Tensor]:
        """What goes with the rows to the next slice: each `[1, rows, numbers]`."""
        after = self._needs.after
        parts = [self.embedding] if after.embedding else []
        for source in after.sources:
            parts += [each.transpose(1, 2).flatten(2) for each in self._shared[self._needs.types[source]]]
        return parts


def _in_heads(numbers: torch.Tensor, heads: Heads) -> torch.Tensor:
    return numbers.reshape(*numbers.shape[:2], heads.count, heads.width).transpose(1, 2)
