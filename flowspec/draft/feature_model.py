"""The network of drafters that read the target's features, on one device: norms, projections, layers and
`lm_head`, as far as a `Layout` has them.

Row i reads token i + 1 and feature i, and predicts feature i + 1, from which comes token i + 2. A feature is
what the target computed, or for guesses what was predicted. Rows of a block drafter read their tokens alone,
and attend to keys and values that each layer makes of the features of all tokens before the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowspec.core.protocol.precision import ACTIVATIONS, PRECISION_BYTES
from flowspec.draft.layouts import KeySource, Layout, Shapes
from flowspec.model.arithmetic.arrays import DTYPES, F32, I64, Array, Numbers, room
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows
from flowspec.model.engines import Engine, engine_of
from flowspec.model.files import ModelFiles
from flowspec.model.layer import MATRICES, Linear, NormPart, Place, Plain, RowsFunction, Table
from flowspec.model.slice import embedded, finished
from flowspec.model.weights import (
    EMBEDDING,
    LM_HEAD,
    NORM,
    Span,
    end_names,
    family_named,
    held_bytes,
    load_parts,
)

Parts = dict[str, Any]


class FeatureModel:
    """The caches belong to the caller. Not thread-safe: one thread runs it.

    `feature_width`: of what `run` reads and predicts; `hidden_size`: of what `logits` takes. `target_ids`:
    the target's id of every draft id, None where they are the same.
    """

    def __init__(self, layout: Layout, engine: Engine, parts: Parts, table: Numbers | None = None) -> None:
        """`table` has the embedding's rows, on the CPU, where it is no part."""
        spec = layout.spec
        self.layout, self.engine, self.block = layout, engine, layout.block
        self.captures, self.target_ids = layout.captures, layout.target_ids
        self.context_max, self.hidden_size = spec.context_max, spec.hidden + layout.rank
        self.feature_width = layout.feature_width
        self.weight_bytes = held_bytes(parts)
        self._parts, self._table = parts, table
        self._heads = dict(enumerate([each.heads for each in layout.key_sources] or spec.heads))
        norms = [part for name, part in parts.items() if name.startswith("state_norm.")]
        self._state_norms = [engine.rows(norm=norm) for norm in norms] or [_same]
        self._project, self._feature_norm = self._rows("project"), self._rows("feature_norm")
        self._entry, self._leave = self._rows("entry.projection"), self._rows("leave")
        self._token_norm, self._entry_norm = self._rows("entry.embedding"), self._rows("entry.feature")
        self._norm = self._rows("norm") if layout.is_output_normed else _same
        lm_head = parts.get("lm_head")
        if lm_head is None:
            lm_head = Linear(inputs=spec.hidden, matrices=(parts["embed_tokens"].matrix,))
        last_norm = None if layout.is_output_normed else parts.get("norm")
        self._lm_head = engine.rows(norm=last_norm, linear=lm_head, are_logits=True)
        self._gate, self._centroids = self._rows("markov.gate"), self._rows("centroids", are_logits=True)
        self._markov, self._scored = self._rows("markov.head", are_logits=True), lm_head.matrices[0]
        attends = layout.attends or range(len(spec.layers))
        self._layers = [
            engine.layer(self._within(f"layers.{index}."), layer, Place(place))
            for index, (layer, place) in enumerate(zip(spec.layers, attends, strict=True))
        ]
        self._key_makers = [self._key_maker(source) for source in layout.key_sources]

    @staticmethod
    def load(layout: Layout, target: ModelFiles, dtype: str, device: str) -> FeatureModel:
        """Reads its parts, and those that it shares with the target. Raises `InputError` for files that are
        incomplete."""
        spec, whole = layout.spec, target.spec
        if layout.is_in_target:
            engine = engine_of(dtype, device, spec.norm)
            own = load_parts(spec, Span(first=0, end=1, count=1), layout.tensors, dtype, engine)
            parts = {"embed_tokens": Table(matrix=own[EMBEDDING]), "norm": own[NORM], "lm_head": own[LM_HEAD]}
            for name, part in own[0].items():
                parts[name if name.startswith("entry.") else f"layers.0.{name}"] = part
            return FeatureModel(layout, engine, parts)
        engine, of_target = engine_of(ACTIVATIONS[dtype], device, spec.norm), target.tensors()
        prefix, (embedding, lm_head) = family_named(whole).root(of_target).prefix, end_names(whole, of_target)
        ends, shared = {"embed_tokens.weight": embedding, "lm_head.weight": lm_head}, dict(layout.of_target)
        if "embed_tokens" in shared and embedding == lm_head:  # one copy is enough
            shared.pop("lm_head", None)

        def copy_of_target(name: str, array: Numbers) -> None:
            of_target.copy_into(ends.get(name, prefix + name), array)

        parts = _read_parts(layout.shapes, layout.tensors.copy_into, engine, spec.eps)
        parts |= _read_parts(shared, copy_of_target, engine, whole.eps)
        if "embed_tokens" in parts:
            return FeatureModel(layout, engine, parts)
        tensors, name = of_target, embedding
        if "embed_tokens.weight" in layout.tensors:
            tensors, name = layout.tensors, "embed_tokens.weight"
        table = tensors.load(name, (whole.vocabulary, whole.hidden))  # over the mapped file, without memory
        if table.itemsize > DTYPES[engine.dtype].itemsize:
            table = np.empty(table.shape, DTYPES[engine.dtype])
            tensors.copy_into(name, table)
        return FeatureModel(layout, engine, parts, table)

    def _within(self, prefix: str) -> Parts:
        """The parts whose names begin so, by what follows."""
        own = (name for name in self._parts if name.startswith(prefix))
        return {name.removeprefix(prefix): self._parts[name] for name in own}

    def _rows(self, name: str, are_logits: bool = False) -> RowsFunction:
        """What a part makes of rows; where there is no such part, they stay as they are."""
        part = self._parts.get(name)
        if part is None:
            return _same
        if isinstance(part, NormPart):
            return self.engine.rows(norm=part)
        return self.engine.rows(linear=part, are_logits=are_logits)

    def _key_maker(self, source: KeySource) -> Callable[[Array, I64], tuple[Array, Array]]:
        """Of features `[rows, width]` and positions makes keys and values `[rows, kv_heads, head_dim]`."""
        engine, count, width = self.engine, source.heads.count, source.heads.width
        parts = self._within(source.prefix)
        of_keys = parts["self_attn.k_proj"]
        linears = of_keys, parts.get("self_attn.v_proj", of_keys)  # keys may be values, too
        makers = [engine.rows(norm=parts.get(source.norm), linear=linear) for linear in linears]
        norms = [self._rows(f"{source.prefix}self_attn.{name}_norm") for name in ("k", "v")]

        def make(features: Array, positions: I64) -> tuple[Array, Array]:
            given = features[:, source.first : source.first + of_keys.inputs]
            keys, values = (
                norm(maker(given).reshape(-1, width)).reshape((len(given), count, width))
                for maker, norm in zip(makers, norms, strict=True)
            )
            return engine.turn(keys, engine.angles(positions, source.rotary)), values

        return make

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values of all layers, and what is read of its feature."""
        numbers = sum(heads.numbers for heads in self._heads.values()) + self.feature_width
        return numbers * int(PRECISION_BYTES[self.engine.dtype])

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty one for a request; a block needs slots of its own."""
        more = 0 if self.block is None else self.block.size
        return TreeCache(self._heads, self.engine, slots_max=slots_max + more)

    def project(self, target_features: Numbers) -> Array:
        """The target's features `[rows, hidden * len(captures)]` as they are kept `[rows, width]`."""
        features = self.engine.cast(target_features)
        width = features.shape[1] // len(self._state_norms)
        states = (
            norm(features[:, place * width : (place + 1) * width])
            for place, norm in enumerate(self._state_norms)
        )
        return self._feature_norm(self._project(self.engine.joined([*states])))

    def write(self, features: Array, positions: I64, cache: TreeCache) -> None:
        """Keys and values of committed nodes at `positions` `[rows]`, of `project`'s `[rows, width]`."""
        for place, make in enumerate(self._key_makers):
            self.engine.store(positions, *make(features, positions), cache.of(place))

    def run(self, tokens: I64, features: Array, batch: TreeBatch) -> tuple[Array, Array]:
        """Of `tokens` `[rows]` and `features` `[rows, feature_width]` what `logits` takes, `[rows,
        hidden_size]`, and predicted features, which may be `features` of further rows.

        Only distances between positions matter, so a row may have its token's position or its feature's.
        """
        for rows in batch.requests:
            rows.cache.reserve(len(rows.key_positions))
        batch.embedding = self._embedded(tokens)
        entries = self._token_norm(batch.embedding), self._entry_norm(features)
        has_entry = "entry.projection" in self._parts
        hidden = self._entry(self.engine.joined(entries)) if has_entry else self.engine.copied(features)
        hidden = self._run_layers(hidden, batch)
        return hidden, self._leave(hidden)

    def guess(self, tokens: Sequence[int], begins: Sequence[int], caches: Sequence[TreeCache]) -> Array:
        """Of each block what is guessed of the places after its first, `[blocks, guesses, width]`.

        Each block begins at a position of its own with a token that is known; its cache holds keys of all
        positions before. What it writes from there on is the next writer's.
        """
        assert self.block is not None
        size, batch = self.block.size, TreeBatch([])
        ids = np.full((len(tokens), size), self.block.mask)
        ids[:, 0] = tokens
        for first, (begin, cache) in enumerate(zip(begins, caches, strict=True)):
            cache.reserve(begin + size)
            own, keys = np.arange(begin, begin + size), np.arange(begin + size, dtype=np.int32)
            before = keys[None] <= own[:, None]
            given = cache, first * size, own, own, keys
            rows = TreeRows(*given, np.ones_like(before))
            for window in {layer.window for layer in self.layout.spec.layers}:
                is_causal = window > 0 if self.block.is_causal is None else self.block.is_causal
                if is_causal:
                    rows.sights[window or None] = TreeRows(*given, before).sight(window or None)
            batch.requests.append(rows)
        hidden = self._run_layers(self._embedded(ids.reshape(-1)), batch)
        return hidden.reshape(len(tokens), size, -1)[:, size - self.block.guesses :]

    def after(self, guesses: Array, tokens: Sequence[int]) -> Array:
        """What `logits` takes, `[rows, hidden_size]`: guesses `[rows, width]` of a block, and what the tokens
        that stand before them add."""
        engine = self.engine
        if not self.layout.rank:
            return guesses
        latent = engine.take(self._parts["markov.table"].matrix, np.array(tokens, np.int64))
        if "markov.gate" in self._parts:
            gates = engine.function(engine.wide(self._gate(engine.joined([guesses, latent]))), "sigmoid")
            latent = engine.narrow(gates * engine.wide(latent))
        return engine.joined([guesses, latent])

    def logits(self, hidden: Array) -> F32:
        """`[rows, draft vocabulary]` in float32 from `[rows, hidden_size]`."""
        engine, size = self.engine, self.layout.spec.hidden
        if self.layout.clusters is not None:
            return self._nearest_logits(hidden, self.layout.clusters)
        logits = self._lm_head(hidden[:, :size])
        if self.layout.logits_scale != 1:
            logits = logits * self.layout.logits_scale
        found = finished(engine, self.layout.spec, logits)
        return found + engine.numpy(self._markov(hidden[:, size:])) if self.layout.rank else found

    def _nearest_logits(self, hidden: Array, clusters: I64) -> F32:
        """Tokens of other clusters have the least number: they are not scored, so none of them is ever
        proposed (the published code gives each a little less than the least)."""
        engine = self.engine
        near = engine.numpy(self._centroids(hidden))
        found = np.full((len(near), clusters.size), np.finfo(np.float32).min, np.float32)
        order = np.argsort(-near, axis=1, kind="stable")[:, : self.layout.clusters_chosen]
        for row, chosen in enumerate(order):
            tokens = clusters[chosen].reshape(-1)
            own = Linear(inputs=hidden.shape[1], matrices=(Plain(self._scored.weights[tokens]),))
            score = engine.rows(linear=own, are_logits=True)
            found[row, tokens] = engine.numpy(score(hidden[row : row + 1]))[0]
        return found

    def _embedded(self, tokens: I64) -> Array:
        if self._table is None:
            return embedded(self.engine, self.layout.spec, self._parts["embed_tokens"].matrix, tokens)
        rows, scale = self.engine.cast(self._table[tokens]), self.layout.spec.embedding_scale
        return rows if scale == 1 else self.engine.scaled(rows, scale)

    def _run_layers(self, hidden: Array, batch: TreeBatch) -> Array:
        angles = [self.engine.angles(batch.positions, rotary) for rotary in self.layout.spec.rotaries]
        run = self.engine.begin(hidden, batch)
        for layer, spec in zip(self._layers, self.layout.spec.layers, strict=True):
            run.run(layer, angles[spec.rotary])
        return self._norm(run.hidden)


def _same(rows: Array) -> Array:
    return rows


def _read_parts(shapes: Shapes, copy: Callable[[str, Numbers], None], engine: Engine, eps: float) -> Parts:
    found = {}
    for name, (stem, shape) in shapes.items():
        values = {}
        for end, parameter in shape.parameters.items():
            kind = engine.dtype if parameter.role in MATRICES else "float32"
            array = room(parameter.shape, DTYPES[kind])
            copy(stem + end, array)
            held = engine.array(array)
            values[end] = (Plain(held),) if parameter.role == "matrix" else held
        found[name] = shape.part(values, eps, engine)
    return found
