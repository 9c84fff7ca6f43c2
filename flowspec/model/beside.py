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
from flowspec.model.pieces import Span
from flowspec.model.spec import spec_of


class Needs:
    """Of a slice's layers: what comes with hidden states, and what goes on."""

    def __init__(self, config: Any, span: Span) -> None:
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

    Layers read `tokens` `[rows]` int64 and `embedding` `[1, rows, hidden]`, and write keys and values of
    the slice's own layers to `going` `[rows, numbers]`, where what only passes by is from the beginning.
    """

    def __init__(self, needs: Needs, tokens: torch.Tensor, came: torch.Tensor) -> None:
        self._needs = needs
        self.tokens = tokens
        of_keys = needs.sizes(needs.before)
        self.embedding, *parts = torch.split(came, [came.shape[2] - sum(of_keys), *of_keys], dim=2)
        self._came = {source: parts[2 * place :][:2] for place, source in enumerate(needs.before.sources)}
        of_keys, ahead = needs.sizes(needs.after), needs.after.embedding
        self.going = came.new_empty((len(tokens), ahead + sum(of_keys)))
        whole, *others = torch.split(self.going, [ahead, *of_keys], dim=1)
        if ahead:
            whole.copy_(self.embedding[0])
        for source, keys, values in zip(needs.after.sources, others[::2], others[1::2], strict=True):
            if source in self._came:
                keys.copy_(self._came[source][0][0])
                values.copy_(self._came[source][1][0])

    def write(self, batch: TreeBatch) -> None:
        """Keys and values that came and are attended to here, to their slots."""
        for source in self._needs.held:
            heads, (keys, values) = self._needs.heads[source], self._came[source]
            batch.write(source, _in_heads(keys, heads), _in_heads(values, heads))

    def select(self, kept: Sequence[int]) -> None:
        """Leaves these rows."""
        self.tokens, self.embedding = self.tokens[kept], self.embedding[:, kept]
        self.going = self.going[kept]


def _in_heads(numbers: torch.Tensor, heads: Heads) -> torch.Tensor:
    return numbers.reshape(*numbers.shape[:2], heads.count, heads.width).transpose(1, 2)
