"""What a layer computes, by `plain`'s functions, for arrays of numpy or torch: the definition to which
programs, and what runs them, are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, Dense, LayerSpec, Mixture, Norm
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import Array, cast, namespace, zeros
from flowspec.model.layer import RouterPart


class Rows(Protocol):
    """Rows of a job, and what a layer holds of their requests. `angles` are `[1, rows, turned width]`,
    `embedding` that of the rows' tokens, `[rows, hidden]`, where a layer needs it."""

    angles: tuple[Array, Array]
    embedding: Array | None

    def look_up(self, table: Any) -> Array:
        """The rows' tokens in a layer's table, `[rows, width]`."""

    def attend(self, queries: Array, keys: Array | None, values: Array | None, sinks: Array | None) -> Array:
        """`[rows, heads, width]` from queries of that shape, and from new keys and values `[rows, kv_heads,
        width]`, if the layer has its own."""

    def convolve(self, inputs: Array, taps: Array, bias: Array | None) -> Array:
        """`convolution` of inputs `[rows, width]`, which are held, and those before them."""

    def sum_up(self, inputs: Array, mixer: DeltaRule, taps: Array, rates: Array) -> Array:
        """`delta_rule` of inputs `[rows, width]`, which are held."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Of `parts` as `layer.py` has them. `multiply`: rows by a linear layer. `is_source`: later layers attend
    to its keys and values, which then have the dtype of hidden states wherever the model is cut."""

    spec: LayerSpec
    parts: Mapping[str, Any]
    how: Norm
    multiply: Callable[..., Array]
    is_source: bool

    @property
    def dense(self) -> Dense:
        assert self.spec.dense is not None, "there is a definition of everything"
        return self.spec.dense

    def run(self, hidden: Array, rows: Rows) -> Array:
        """Hidden states `[rows, width]` from those of that shape, in the dtype in which they travel. What is
        added to them is rounded to it, too, so that it can travel."""
        dense, parts, dtype = self.dense, self.parts, hidden.dtype
        hidden = cast(hidden, "float32")

        def added(found: Array, name: str) -> Array:
            rounded = cast(cast(found, dtype), "float32")
            return hidden + self._normed(rounded, name) * dense.added_scale

        x = self._normed(hidden, dense.norm_before_attention)
        hidden = x if dense.is_residual_normed else hidden
        if dense.embedding_norm:
            embedding = self._normed(cast(rows.embedding, "float32"), dense.embedding_norm)
            x = namespace(x).concatenate([embedding, x], 1)
        if isinstance(dense.mixer, Convolution):
            found = self._short_convolution(x, rows)
        elif dense.mixer is not None:
            found = self._linear_attention(dense.mixer, x, rows)
        else:
            found = self._attention(x, rows, dtype)
        hidden = added(found, dense.norm_after_attention)
        x = self._normed(hidden, dense.norm_before_mlp)
        if dense.mixture is None:
            found = self._mlp(x, "mlp")
        elif dense.mixture.is_parallel:
            own = self._normed(self._mlp(x, "mlp"), "post_feedforward_layernorm_1")
            x = self._normed(hidden, "pre_feedforward_layernorm_2")
            mixed = self._mixture(dense.mixture, x, hidden, "")
            found = own + self._normed(mixed, "post_feedforward_layernorm_2")
        else:
            found = self._mixture(dense.mixture, x, x, "mlp.")
        hidden = added(found, dense.norm_after_mlp)
        if dense.input_width:
            hidden = hidden + self._token_input(hidden, rows)
        return cast(hidden * parts["layer_scalar"] if dense.has_factor else hidden, dtype)

    def _normed(self, x: Array, name: str, how: Norm | None = None) -> Array:
        if not name:
            return x
        return plain.norm(x, self.parts[name].weights, self.parts[name].eps, how or self.how)

    def _product(self, x: Array, name: str, expert: int | None = None) -> Array:
        part = self.parts[name]
        return self.multiply(x, part if expert is None else part[expert])

    def _attention(self, x: Array, rows: Rows, dtype: Any) -> Array:
        """Queries, keys and values are three products or one, or queries alone where the layer attends to
        another's."""
        dense, own, width, gates = self.dense, "self_attn.", self.spec.kv.width, None
        if f"{own}qkv_proj" in self.parts:
            joined, first = self._product(x, f"{own}qkv_proj"), self.spec.heads * width
            second = first + self.spec.kv.count * width
            found = [joined[:, :first], joined[:, first:second], joined[:, second:]]
        else:
            names = [f"{own}{each}_proj" for each in "qkv" if f"{own}{each}_proj" in self.parts]
            found = [self._product(x, name) for name in names]
            found += found[1:] * (len(found) == 2)  # keys are values, too
        if dense.is_gated:
            both = found[0].reshape(len(x), -1, 2, width)
            found[0], gates = (both[:, :, place].reshape(len(x), -1) for place in (0, 1))
        if dense.query_norm:
            shape = (len(x), -1, width)[: 3 if dense.query_norm == "head" else 2]
            for place in range(min(2, len(found))):
                found[place] = self._normed(found[place].reshape(shape), f"{own}{'qk'[place]}_norm")
        found = [each.reshape(len(x), -1, width) for each in found]
        if dense.has_value_norm:
            found[2:] = [self._normed(each, f"{own}v_norm") for each in found[2:]]
        if dense.clip:
            found = [namespace(each).clip(each, -dense.clip, dense.clip) for each in found]
        if dense.is_turned:
            found[:2] = [plain.turned(each, *rows.angles) for each in found[:2]]
        if self.is_source:
            found[1:] = [cast(cast(each, dtype), "float32") for each in found[1:]]
        queries, keys, values = found if len(found) == 3 else (found[0], None, None)
        sinks = self.parts[f"{own}sinks"] if dense.has_sinks else None
        attended = rows.attend(queries, keys, values, sinks).reshape(len(x), -1)
        attended = attended if gates is None else plain.gated(gates, attended, "sigmoid")
        return self._product(attended, f"{own}o_proj")

    def _short_convolution(self, x: Array, rows: Rows) -> Array:
        """What a layer of LFM2 does that does not attend: `[rows, hidden]`."""
        joined, width = self._product(x, "conv.in_proj"), x.shape[1]
        inputs = joined[:, :width] * joined[:, 2 * width :]
        found = rows.convolve(inputs, self.parts["conv.taps"], self.parts.get("conv.bias"))
        return self._product(joined[:, width : 2 * width] * found, "conv.out_proj")

    def _linear_attention(self, mixer: DeltaRule, x: Array, rows: Rows) -> Array:
        """What a layer of Qwen3.5 does that does not attend: `[rows, hidden]`."""
        own, parts = "linear_attn.", self.parts
        products = [self._product(x, f"{own}in_proj_{each}") for each in ("qkv", "b", "a")]
        inputs = namespace(x).concatenate(products, 1)
        read = rows.sum_up(inputs, mixer, parts[f"{own}taps"], parts[f"{own}rates"])
        normed = self._normed(read, f"{own}norm", "weights")
        gates = self._product(x, f"{own}in_proj_z").reshape(normed.shape)
        found = plain.gated(gates, normed, "silu")
        return self._product(found.reshape(len(x), -1), f"{own}out_proj")

    def _mlp(self, x: Array, name: str, expert: int | None = None) -> Array:
        """Of a layer, or of an expert: gate and values are two products or one."""
        if f"{name}.gate_up_proj" in self.parts:
            joined = self._product(x, f"{name}.gate_up_proj", expert)
            half = joined.shape[1] // 2
            gate, up = joined[:, :half], joined[:, half:]
        else:
            gate, up = self._product(x, f"{name}.gate_proj"), self._product(x, f"{name}.up_proj")
        mixture = self.dense.mixture
        if expert is not None and mixture is not None and mixture.limit:
            found = plain.clamped(gate, up, mixture.limit, mixture.slope, plain)
        else:
            found = plain.gated(gate, up, self.dense.activation)
        return self._product(found, f"{name}.down_proj", expert)

    def _mixture(self, mixture: Mixture, x: Array, of: Array, own: str) -> Array:
        """What the experts that rows choose, by what they are `of`, make of them, each times its share, added
        in ascending order, then what an MLP for all makes."""
        router: RouterPart = self.parts[f"{own}router"]
        if router.norm is not None:
            of = plain.norm(of, router.norm.weights, router.norm.eps, "weights") * router.factor
        chosen, shares = plain.choose(mixture, router, of, plain)
        total = zeros(x, *x.shape)
        for expert in sorted({*chosen.reshape(-1).tolist()}):
            taken, place = namespace(x).where(chosen == expert)
            made = self._mlp(x[taken], f"{own}experts", expert)
            total[taken] = total[taken] + made * shares[taken, place][:, None]
        if not mixture.has_shared:
            return total
        if not mixture.is_shared_gated:
            return total + self._mlp(x, "mlp.shared_experts")
        gate = plain.function(self._product(x, "mlp.shared_expert_gate"), "sigmoid")
        return total + gate * self._mlp(x, "mlp.shared_expert")

    def _token_input(self, x: Array, rows: Rows) -> Array:
        """What a layer of Gemma 4 makes of its hidden states with what it takes of tokens."""
        table = self.parts["layer_input.table"]
        embedding = cast(rows.embedding, "float32")
        projected = self._product(embedding, "layer_input.projection") * embedding.shape[1] ** -0.5
        projected = self._normed(projected, "layer_input.norm")
        inputs = (projected + cast(rows.look_up(table), "float32") * table.factor) * 2.0**-0.5
        gated = plain.gated(self._product(x, "per_layer_input_gate"), inputs, self.dense.activation)
        return self._normed(self._product(gated, "per_layer_projection"), "post_per_layer_input_norm")
