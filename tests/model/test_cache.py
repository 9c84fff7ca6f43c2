"""Caches of keys and values: ggml's levels in fewer bits, attention to them, copies, and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.limits import CACHE_BLOCK_SLOTS as BLOCK_SLOTS
from flowspec.core.protocol.model_spec import Heads
from flowspec.core.protocol.precision import CACHE_AUTO, Q8_0, cached_as
from flowspec.errors import ClusterError
from flowspec.model.arithmetic import build, compiled
from flowspec.model.arithmetic.operations import Sight, attention
from flowspec.model.arithmetic.plain import LANES
from flowspec.model.attention import MOVED_AT_ONCE, TreeCache
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.kernels import CACHE_DTYPES
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.runtime.loading import slice_memory

pytestmark = pytest.mark.arm
CPU = torch.device("cpu")
KV_HEADS = 2


def cache_of(width: int, slots: int, dtype: torch.dtype) -> TreeCache:
    cache = TreeCache(
        heads=dict.fromkeys(range(2), Heads(count=KV_HEADS, width=width)),
        slots_max=slots,
        dtype=dtype,
        device=CPU,
    )
    cache.reserve(slots)
    return cache


def held(cache: TreeCache, layer: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values `[kv_heads, slots, width]` that lie in a cache of levels, in float64."""
    levels_of_keys, levels_of_values, steps = cache.of(layer)
    assert steps is not None
    keys = levels_of_keys.permute(0, 1, 3, 2).flatten(1, 2).double()
    of_keys = steps[0].permute(0, 1, 3, 2).flatten(1, 2).double()
    each = [(keys, of_keys), (levels_of_values[:, :, :width].double(), steps[1].double())]
    found = [levels * by.repeat_interleave(32, dim=2)[..., :width] for levels, by in each]
    return found[0], found[1]


@settings(max_examples=30, deadline=None)
@given(
    width=st.sampled_from([32, 64, 96, 128]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_levels_are_ggmls(width: int, size: float, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(KV_HEADS, 3, width)).astype(np.float32) * size
    cache, slots = cache_of(width, 5, torch.int8), torch.tensor([4, 0, 2])
    cache.write(1, slots, torch.from_numpy(rows), torch.from_numpy(rows[:, ::-1].copy()))
    theirs = dequantize(quantize(rows, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    keys, values = (part[:, slots].numpy() for part in held(cache, 1, width))
    # ggml multiplies by a rounded reciprocal, so a number halfway between two levels may take the other one
    one_level = np.abs(rows).reshape(KV_HEADS, 3, -1, 32).max(axis=3).repeat(32, axis=2) / 127 * 1.001
    for ours, expected, allowed in ((keys, theirs, one_level), (values, theirs[:, ::-1], one_level[:, ::-1])):
        off = np.abs(ours - expected)
        assert (off <= allowed).all()
        assert (off > 0).mean() < 0.01
    assert not cache.of(0)[0].any(), "the other layer's"


@pytest.mark.parametrize("library", ["built", "plain"])
@pytest.mark.parametrize("width", [8, 40, 128])
def test_attention_is_that_of_the_numbers_held(
    width: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_allowed", build.build() if library == "built" else None)
    assert (compiled.library() is None) == (library == "plain"), "the suite needs a compiler"
    generator = torch.Generator().manual_seed(width)
    slots, rows, heads = 50, 4, 3 * KV_HEADS
    cache = cache_of(width, slots, torch.int8)
    numbers = torch.randn((2, KV_HEADS, slots, width), generator=generator)
    cache.write(0, torch.arange(slots), numbers[0], numbers[1])
    queries = torch.randn((rows, heads, width), generator=generator)
    seen = torch.rand((rows, slots), generator=generator) < 0.6
    seen[:, 0] = True
    sight = Sight(seen, torch.arange(slots, dtype=torch.int32))
    keys, values, steps = cache.of(0)
    found = attention(queries, keys, values, sight, width**-0.5, None, steps)
    keys, values = (part[:, :slots].repeat_interleave(3, dim=0) for part in held(cache, 0, width))
    scores = torch.einsum("rhd,hsd->rhs", queries.double(), keys) * width**-0.5
    shares = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=2)
    expected = torch.einsum("rhs,hsd->rhd", shares, values)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_what_is_no_number_shows() -> None:
    cache = cache_of(40, 4, torch.int8)
    rows = torch.ones((KV_HEADS, 1, 40))
    rows[1, 0, 35] = float("nan")
    cache.write(0, torch.tensor([2]), rows, rows)
    keys, values = held(cache, 0, 40)
    for part in (keys, values):
        assert part[1, 2, 32:].isnan().all(), "the group that it is in"
        assert not part[0].isnan().any()
    cache.clear((2,))
    assert not any(part.any() for part in held(cache, 0, 40)), "a slot that was freed holds nothing"


@pytest.mark.parametrize(
    ("dtype", "cache"), [("float32", CACHE_AUTO), ("bfloat16", Q8_0), ("float32", "float16")]
)
def test_a_cache_takes_what_is_foretold(dtype: str, cache: str) -> None:
    files = ModelFiles(BUNDLED)
    count = files.raw_config()["num_hidden_layers"]
    part = Slice.load(files, Span(first=0, end=2, count=count), dtype, CPU, cache=cache)
    foretold = slice_memory(files, Span(first=0, end=2, count=count), dtype, 256, cache=cache, nodes_max=256)
    part.open_cache(1, 512)
    part._caches[1].whole.reserve(512)
    width = part._caches[1].whole.of(0)[0].shape[2]
    filled = -(-width // LANES) * LANES - width
    beyond = 2 * part.config.num_key_value_heads * 512 * filled * CACHE_DTYPES[part.cache].itemsize
    assert part.cache_bytes - beyond == part.opened_bytes == foretold.cache_bytes
    assert part.cache == cached_as(cache, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("same", "moved"), [(700, 0), (37, 2 * MOVED_AT_ONCE + 9), (0, 1), (64, 16)])
def test_a_copy_has_each_slot_where_it_belongs_and_nothing_else(
    dtype: torch.dtype, same: int, moved: int
) -> None:
    """A prompt's slots lie where they lay, those of an answer with guesses beside it do not."""
    torch.manual_seed(same)
    source, copy = cache_of(48, 1600, dtype), cache_of(48, same + moved + 40, dtype)
    for of in source.of(0), source.of(1):
        for tensor in (*of[:2], *(of[2] or ())):
            tensor.copy_(torch.randint(-99, 99, tensor.shape))
    slots = torch.cat([torch.arange(same), same + 1 + torch.randperm(1500 - same)[:moved]])
    copy.copy(source, slots)
    for layer in range(2):
        mine, other = copy.of(layer), source.of(layer)
        pairs = [*zip(mine[:2], other[:2], strict=True), *zip(mine[2] or (), other[2] or (), strict=True)]
        for place, (own, theirs) in enumerate(pairs):
            is_keys = place % 2 == 0  # and their steps: blocks of lanes
            for slot in range(own.shape[1] * (LANES if is_keys else 1)):
                found = own[:, slot // LANES, ..., slot % LANES] if is_keys else own[:, slot]
                if slot >= len(slots):
                    assert not found.any()
                    continue
                of_slot = int(slots[slot])
                lane = theirs[:, of_slot // LANES, ..., of_slot % LANES] if is_keys else theirs[:, of_slot]
                assert torch.equal(found, lane), f"slot {slot}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("slots", [1, BLOCK_SLOTS, BLOCK_SLOTS + 1, 600])
def test_growth_is_foretold_to_the_byte(slots: int, dtype: torch.dtype) -> None:
    cache = TreeCache(
        heads={0: Heads(count=3, width=40), 1: Heads(count=3, width=40), -2: Heads(count=1, width=56)},
        slots_max=600,
        dtype=dtype,
        device=CPU,
    )
    cache.reserve(5)
    planned = cache.bytes + cache.growth_bytes(slots)
    cache.reserve(slots)
    assert cache.bytes == planned
    assert cache.growth_bytes(slots) == 0


def test_a_conversation_more_than_memory_holds_is_refused_before_it_is_taken() -> None:
    files = ModelFiles(BUNDLED)
    count = files.raw_config()["num_hidden_layers"]
    part = Slice.load(files, Span(first=0, end=1, count=count), "float32", CPU)
    for request in (1, 2):
        part.open_cache(request, 2 * BLOCK_SLOTS)
    part.cache_bytes_max = part._caches[1].growth_bytes(2 * BLOCK_SLOTS)
    part._reserve(part._caches[1], BLOCK_SLOTS, 0)
    part._reserve(part._caches[2], BLOCK_SLOTS, 0)
    with pytest.raises(ClusterError, match=r"the caches of 2 conversations need .* ask for fewer at once"):
        part._reserve(part._caches[1], BLOCK_SLOTS + 1, 0)
    assert part._caches[1].bytes == part._caches[2].bytes, "nothing was taken"
    part.close_cache(2)
    part._reserve(part._caches[1], BLOCK_SLOTS + 1, 0)
