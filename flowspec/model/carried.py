"""What comes with a job's hidden states and goes on with them: embeddings, of which layers make inputs of
their own, and keys and values that an earlier layer made (Gemma 4; `ModelSpec.carried_at`).

A slice writes keys and values that come to its caches, as if it had made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import ModelSpec, holders
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.attention import Memory, TreeBatch


@dataclass(slots=True)
class Carry:
    """Of a job's rows: their tokens `[rows]`, their embeddings `[rows, hidden]`, and `going` `[rows,
    numbers]`, to which layers write keys and values that go on; each where layers need it."""

    tokens: npt.NDArray[np.int64] | None = None
    embedding: Array | None = None
    going: Array | None = None

    def select(self, kept: Sequence[int]) -> Carry:
        """Of these rows."""
        tokens, embedding, going = self.tokens, self.embedding, self.going
        return Carry(
            None if tokens is None else tokens[kept],
            None if embedding is None else embedding[kept],
            None if going is None else going[kept],
        )


class Carrier:
    """Of layers `[first, end)`: sorts what comes to them."""

    def __init__(self, spec: ModelSpec, first: int, end: int, memory: Memory) -> None:
        self._spec, self._memory = spec, memory
        self._before, self._after = spec.carried_at(first), spec.carried_at(end)
        held = holders(spec.sources, first, end)
        self._written = [source for source in self._before.sources if source in held]
        self._reads_embedding = spec.layer_inputs > 0
        self.width = spec.carried_width(first)
        """How many numbers come with a row to a slice that is not the first."""
        self._going_width = self._after.embedding + sum(map(self._numbers, self._after.sources))
        self.going_from = dict[int, int]()
        """Of each layer whose keys and values go on, where in `going` they begin."""
        at = self._after.embedding
        for source in self._after.sources:
            self.going_from[source] = at
            at += self._numbers(source)

    def _numbers(self, layer: int) -> int:
        return self._spec.layers[layer].kv.numbers

    def begin(
        self, tokens: npt.NDArray[np.int64], hidden: Array, came: Array | None, batch: TreeBatch
    ) -> Carry:
        """With what `came` to a slice, `[rows, width]`; None: it is the first, whose `hidden` are
        embeddings."""
        if not self._reads_embedding and not self.width and not self._going_width:
            return Carry(tokens)
        embedding, parts = None, dict[int, Array]()
        if self._reads_embedding:
            embedding = self._memory.copied(hidden) if came is None else came[:, : self._before.embedding]
        if came is not None:
            at = self._before.embedding
            for source in self._before.sources:
                parts[source] = came[:, at : at + self._numbers(source)]
                at += self._numbers(source)
        going = self._memory.zeros((len(tokens), self._going_width), self._memory.dtype)
        if self._after.embedding:
            going[:, : self._after.embedding] = embedding
        for source, part in parts.items():
            if source in self.going_from:
                first = self.going_from[source]
                going[:, first : first + part.shape[1]] = part
        for source in self._written:
            heads = self._spec.layers[source].kv
            keys, values = (
                each.reshape(len(tokens), heads.count, heads.width)
                for each in (
                    parts[source][:, : heads.numbers // 2],
                    parts[source][:, heads.numbers // 2 :],
                )
            )
            batch.write(self._memory, source, keys, values)
        return Carry(tokens, embedding, going if self._going_width else None)
