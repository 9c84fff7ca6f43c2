"""The functions of `canonical.c` for tensors."""

from __future__ import annotations

import torch

from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import (
    FUNCTIONS,
    KEY_WIDTH_MAX,
    AttentionFields,
    DeltaFields,
    DigitsFields,
    HalvesFields,
    NormFields,
    PackedFields,
    PairsFields,
    StoredFields,
    TurnFields,
    kind_of,
    threads,
)
from flowspec.model.arithmetic.delta import DeltaRows
from flowspec.model.arithmetic.norms import NORMS, Norm
from flowspec.model.arithmetic.packed import GROUP, Form


class TensorLibrary:
    """Tensors are on the CPU, contiguous unless said otherwise, and in float32, bfloat16 or float16; results
    are new tensors of the dtype that is given."""

    def __init__(self, own: compiled.Library) -> None:
        self.own = own

    def linear(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[rows, out]` from `[rows, in]` and `[out, in]`, which may have another dtype."""
        (rows, inputs), outputs = x.shape, len(weights)
        found = x.new_empty((rows, outputs))
        given = (
            x.data_ptr(),
            kind_of(x.dtype),
            rows,
            inputs,
            weights.data_ptr(),
            kind_of(weights.dtype),
            outputs,
        )
        if not self.own.linear(*given, found.data_ptr(), threads()):
            raise MemoryError("no memory for a linear layer")
        return found

    @property
    def has_pairs(self) -> bool:
        """Whether the processor that this was built for multiplies pairs of bfloat16."""
        return self.own.pairs is not None

    def pairs(self, x: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `plain.pairs_product`, rounded to `dtype`, float32 or bfloat16; for `has_pairs` alone."""
        assert self.own.pairs is not None, "the processor that this was built for has no such instruction"
        (rows, inputs), outputs = x.shape, len(weights)
        assert all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in (x, weights))
        assert weights.shape == (outputs, inputs)
        assert dtype in (torch.float32, torch.bfloat16), "the source rounds to no other"
        found = x.new_empty((rows, outputs), dtype=dtype)
        where = x.data_ptr(), weights.data_ptr(), found.data_ptr()
        given = PairsFields(*where, rows, inputs, outputs, kind_of(dtype), threads())
        if not self.own.pairs(given):
            raise MemoryError("no memory for a linear layer")
        return found

    def halves(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `plain.product`, of at least one input."""
        (rows, inputs), outputs = x.shape, len(weights)
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in (x, weights))
        assert weights.shape == (outputs, inputs)
        assert inputs, "the source reads the first"
        found = x.new_empty((rows, outputs))
        where = x.data_ptr(), weights.data_ptr(), found.data_ptr()
        if not self.own.halves(HalvesFields(*where, rows, inputs, outputs, threads())):
            raise MemoryError("no memory for a small product")
        return found

    def shares(self, x: torch.Tensor, are_powers: bool) -> torch.Tensor:
        """Float32 `[..., width]`, of at least one number, over the sum by the last dimension
        (`plain.over_their_sum`); with `are_powers` as `plain.softmax`."""
        assert x.dtype == torch.float32
        width, found = x.shape[-1], torch.empty_like(x)
        assert width, "the source reads the first"
        if not self.own.shares(x.data_ptr(), x.numel() // width, width, are_powers, found.data_ptr()):
            raise MemoryError("no memory for shares")
        return found

    def packed(self, x: torch.Tensor, form: Form, panels: torch.Tensor, outputs: int) -> torch.Tensor:
        """As `plain.packed_product`."""
        rows, inputs = x.shape
        assert panels.numel() == form.panel_bytes(inputs, outputs), "the source reads so much"
        found = x.new_empty((rows, outputs))
        where, shape = (x.data_ptr(), panels.data_ptr(), found.data_ptr()), (rows, inputs, outputs)
        if not self.own.packed(PackedFields(*where, *shape, kind_of(x.dtype), form.number, threads())):
            raise MemoryError("no memory for a packed layer")
        return found

    def digits(
        self, x: torch.Tensor, panels: torch.Tensor, scales: torch.Tensor, outputs: int
    ) -> torch.Tensor:
        """`[rows, outputs]` from rows `[rows, in]`, both float32, `panels` (`packed.int8_panels`), and a
        scale for each output that these have, float32."""
        rows, inputs = x.shape
        assert x.dtype == scales.dtype == torch.float32
        assert panels.numel() == len(scales) * -(-inputs // GROUP) * GROUP, "the source reads so much"
        assert outputs <= len(scales)
        found = x.new_empty((rows, outputs))
        where = x.data_ptr(), scales.data_ptr(), panels.data_ptr(), found.data_ptr()
        if not self.own.digits(DigitsFields(*where, rows, inputs, outputs, threads())):
            raise MemoryError("no memory for a packed layer")
        return found

    def packed_rows(self, form: Form, panels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As `plain.packed_rows`, in float32."""
        inputs = panels.shape[1] * form.unit
        found = torch.empty((len(ids), inputs))
        self.own.packed_rows(
            panels.data_ptr(), form.number, inputs, ids.contiguous().data_ptr(), len(ids), found.data_ptr()
        )
        return found

    def function(self, x: torch.Tensor, name: str, times: torch.Tensor | None = None) -> torch.Tensor:
        """One of `FUNCTIONS`, number by number, which `times`, if given, is multiplied by (`gated`)."""
        assert times is None or (times.dtype, times.shape) == (x.dtype, x.shape), "both are read alike"
        found = torch.empty_like(x)
        by = None if times is None else times.data_ptr()
        self.own.function(
            x.data_ptr(), kind_of(x.dtype), x.numel(), FUNCTIONS.index(name), by, found.data_ptr()
        )
        return found

    def norm(self, x: torch.Tensor, weights: torch.Tensor, eps: float, how: Norm) -> torch.Tensor:
        """As `plain.norm`."""
        assert weights.dtype == x.dtype, "the source reads both alike"
        width = x.shape[-1]
        found = torch.empty_like(x)
        where, shape = (x.data_ptr(), weights.data_ptr(), found.data_ptr()), (x.numel() // width, width)
        if not self.own.norm(NormFields(*where, *shape, 1 / width, eps, kind_of(x.dtype), NORMS.index(how))):
            raise MemoryError("no memory for a norm")
        return found

    def delta_rule(self, given: DeltaRows, states: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """As `plain.delta_rule`, of keys of at most `KEY_WIDTH_MAX`; there is a step at least."""
        rows, heads, value_width = given.values.shape
        key_heads, key_width = given.keys.shape[1:]
        where = *given, states
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in where)
        assert (given.queries.shape, given.keys.shape) == ((rows, key_heads, key_width),) * 2
        assert given.decays.shape == given.shares.shape == (rows, heads)
        assert states.shape[1:] == (heads, key_width, value_width)
        assert heads % key_heads == 0
        assert key_width <= KEY_WIDTH_MAX, "the source has no more room"
        assert steps.dtype == torch.int32, "the source reads so"
        assert steps.is_contiguous()
        (_, columns), most = steps.shape, steps.amax(dim=0).tolist()
        assert columns == 4
        assert int(steps[:, :3].min()) >= 0, "the source reads and writes there"
        assert most[0] < rows
        assert max(most[1:3]) < len(states)
        found = given.values.new_zeros((max(most[3], -1) + 1, heads, value_width))
        places = (each.data_ptr() for each in (*where, states[1:], steps, found))
        shape = len(steps), key_heads, heads, key_width, value_width
        self.own.delta(DeltaFields(*places, *shape, threads()))
        return found

    def angles(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `plain.angles`."""
        assert (positions.dtype, frequencies.dtype) == (torch.int64, torch.float32), "the source reads so"
        assert positions.is_contiguous()
        assert frequencies.is_contiguous()
        count = len(frequencies)
        cosine, sine = torch.empty((2, *positions.shape, 2 * count), dtype=dtype)
        given = positions.data_ptr(), positions.numel(), frequencies.data_ptr(), count, scale, kind_of(dtype)
        self.own.angles(*given, cosine.data_ptr(), sine.data_ptr())
        return cosine, sine

    def turned(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """As `plain.turned`, of rows and heads however far apart; the result lies row by row."""
        _, heads, rows, width = x.shape
        for each in (cosine, sine):
            assert each.dtype == x.dtype, "the source reads both alike"
            assert each.is_contiguous()
            assert each.shape == (1, rows, cosine.shape[-1])
        found = x.new_empty((1, rows, heads, width))
        where = x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), found.data_ptr()
        _, between_heads, between_rows, _ = x.stride()
        shape = rows, heads, width, cosine.shape[-1]
        self.own.turn(TurnFields(*where, *shape, between_rows, between_heads, kind_of(x.dtype)))
        return found.transpose(1, 2)

    def store(
        self,
        places: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        to_keys: torch.Tensor,
        to_values: torch.Tensor,
        steps: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """As `plain.store`; rows and heads of `keys` and `values` may be however far apart."""
        kv_heads, rows, width = keys.shape
        _, slots, value_width = to_values.shape
        (key_heads, key_rows, _), (value_heads, value_rows, _) = keys.stride(), values.stride()
        where = (each.data_ptr() for each in (keys, values, places, to_keys, to_values))
        of_steps = (None, None) if steps is None else (steps[0].data_ptr(), steps[1].data_ptr())
        shape = rows, kv_heads, width, value_width, slots
        between = key_rows, key_heads, value_rows, value_heads
        self.own.store(
            StoredFields(*where, *of_steps, *shape, *between, kind_of(keys.dtype), kind_of(to_keys.dtype))
        )

    def levels(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 rows `[rows, width]` as levels, int8, and the steps between them `[rows, width / 32]`."""
        rows, width = x.shape
        levels = torch.empty((rows, width), dtype=torch.int8)
        steps = x.new_empty((rows, -(-width // GROUP)))
        self.own.levels(x.data_ptr(), rows, width, levels.data_ptr(), steps.data_ptr())
        return levels, steps

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        steps: tuple[torch.Tensor, torch.Tensor] | None,
        seen: torch.Tensor,
        order: torch.Tensor,
        ends: torch.Tensor,
        scale: float,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `plain.attention`, but for what rows see: `seen` `[rows, high]` bool, `order` int32 the slots
        that any row sees by position, `ends` int32 where in `order` each block of positions ends."""
        rows, heads, width = queries.shape
        found = torch.empty_like(queries)
        given = AttentionFields(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_steps=None if steps is None else steps[0].data_ptr(),
            value_steps=None if steps is None else steps[1].data_ptr(),
            seen=seen.data_ptr(),
            order=order.data_ptr(),
            ends=ends.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            found=found.data_ptr(),
            rows=rows,
            heads=heads,
            kv_heads=len(keys),
            width=width,
            value_width=values.shape[2],
            slots=values.shape[1],
            high=seen.shape[1],
            blocks=len(ends),
            scale=scale,
            cap=cap or 0.0,
            cap_inverse=1 / cap if cap else 0.0,
            kind=kind_of(queries.dtype),
            cache_kind=kind_of(keys.dtype),
            threads=threads(),
        )
        if not self.own.attention(given):
            raise MemoryError("no memory for attention")
        return found


_made: TensorLibrary | None = None


def library() -> TensorLibrary | None:
    """As `compiled.library`."""
    global _made
    own = compiled.library()
    if own is None:
        return None
    if _made is None or _made.own is not own:
        _made = TensorLibrary(own)
    return _made
