"""Caches of keys and values: ggml's levels in fewer bits, attention to them, copies, and memory."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.limits import CACHE_BLOCK_SLOTS as BLOCK_SLOTS
from flowspec.core.protocol.model_spec import Heads
from flowspec.core.protocol.precision import CACHE_AUTO, Q8_0, cached_as
from flowspec.errors import ClusterError
from flowspec.model import attention, cpu
from flowspec.model.arithmetic import compiled, plain
from flowspec.model.arithmetic.arrays import DTYPES, F32, I64, widened
from flowspec.model.arithmetic.plain import LANES
from flowspec.model.attention import MOVED_AT_ONCE, Sight, TreeCache
from flowspec.model.cpu import Room
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span
from flowspec.runtime.loading import slice_memory
from tests.model import functions
from tests.model.slices import threads_of

pytestmark = pytest.mark.arm
KV_HEADS = 2


def cache_of(width: int, slots: int, held: str) -> TreeCache:
    heads = dict.fromkeys(range(2), Heads(count=KV_HEADS, width=width))
    cache = TreeCache(heads, functions.engine(), slots_max=slots, held=held)
    cache.reserve(slots)
    return cache


def write(cache: TreeCache, layer: int, slots: I64, keys: F32, values: F32) -> None:
    """Keys and values `[kv_heads, rows, width]`."""
    functions.engine().store(slots, keys.swapaxes(0, 1), values.swapaxes(0, 1), cache.of(layer))


def numbers(cache: TreeCache, layer: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values `[kv_heads, slots, width]` that lie in a cache of levels, in float64."""
    levels_of_keys, levels_of_values, steps = cache.of(layer)
    assert steps is not None
    found = []
    for levels, by in (
        (in_slots(levels_of_keys), in_slots(steps[0])),
        (levels_of_values[:, :, :width], steps[1]),
    ):
        found.append(levels.astype(np.float64) * by.astype(np.float64).repeat(32, axis=2)[..., :width])
    return found[0], found[1]


def in_slots(keys: np.ndarray) -> np.ndarray:
    """`[kv_heads, slots, width]` of what lies in lanes."""
    moved = keys.swapaxes(2, 3)
    return moved.reshape(len(keys), -1, moved.shape[3])


@settings(max_examples=30, deadline=None)
@given(
    width=st.sampled_from([32, 64, 96, 128]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_levels_are_ggmls(width: int, size: float, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(KV_HEADS, 3, width)).astype(np.float32) * size
    cache, slots = cache_of(width, 5, Q8_0), np.array([4, 0, 2])
    write(cache, 1, slots, rows, rows[:, ::-1])
    theirs = dequantize(quantize(rows, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    keys, values = (part[:, slots] for part in numbers(cache, 1, width))
    # ggml multiplies by a rounded reciprocal, so a number halfway between two levels may take the other one
    one_level = np.abs(rows).reshape(KV_HEADS, 3, -1, 32).max(axis=3).repeat(32, axis=2) / 127 * 1.001
    for ours, expected, allowed in ((keys, theirs, one_level), (values, theirs[:, ::-1], one_level[:, ::-1])):
        off = np.abs(ours - expected)
        assert (off <= allowed).all()
        assert (off > 0).mean() < 0.01
    assert not cache.of(0)[0].any(), "the other layer's"


@pytest.mark.parametrize("library", ["built", "plain"])
@pytest.mark.parametrize("width", [8, 40, 128])
def test_attention_is_that_of_the_numbers_held(width: int, library: str) -> None:
    generator = np.random.default_rng(width)
    slots, rows, heads = 50, 4, 3 * KV_HEADS
    cache = cache_of(width, slots, Q8_0)
    write(cache, 0, np.arange(slots), *generator.standard_normal((2, KV_HEADS, slots, width), np.float32))
    queries = generator.standard_normal((rows, heads, width), np.float32)
    seen = generator.random((rows, slots)) < 0.6
    seen[:, 0] = True
    sight = Sight(seen, np.arange(slots, dtype=np.int32))
    if library == "built":
        found = functions.attention(queries, cache.of(0), sight, width**-0.5)
    else:
        found = plain.attention(queries, cache.of(0), sight.paths, width**-0.5)
    keys, values = (part[:, :slots].repeat(3, axis=0) for part in numbers(cache, 0, width))
    scores = np.einsum("rhd,hsd->rhs", queries.astype(np.float64), keys) * width**-0.5
    shares = np.exp(np.where(seen[:, None], scores, -np.inf))
    expected = np.einsum("rhs,hsd->rhd", shares / shares.sum(axis=2, keepdims=True), values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@given(
    rows=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    width=st.integers(1, 140),
    slots=st.integers(1, 200),
    held=st.sampled_from((*DTYPES, Q8_0)),
    cap=st.sampled_from((0.0, 3.0)),
    has_sinks=st.booleans(),
    threads=st.integers(1, 3),
)
def test_c_attends_with_the_bits_of_the_definition(
    rows: int,
    kv_heads: int,
    group: int,
    width: int,
    slots: int,
    held: str,
    cap: float,
    has_sinks: bool,
    threads: int,
) -> None:
    generator = np.random.default_rng(rows * width + slots)
    heads = {0: Heads(count=kv_heads, width=width)}
    cache = TreeCache(heads, functions.engine(), slots_max=slots, held=held)
    cache.reserve(slots)
    new = generator.standard_normal((2, slots, kv_heads, width), np.float32)
    functions.engine().store(np.arange(slots), new[0], new[1], cache.of(0))
    seen, positions = generator.random((rows, slots)) < 0.6, generator.permutation(slots)
    seen[:, -1] = True
    sight = Sight(seen, positions.astype(np.int32))
    queries = generator.standard_normal((rows, kv_heads * group, width), np.float32)
    sinks = generator.standard_normal(kv_heads * group, np.float32) if has_sinks else None
    keys, values, steps = cache.of(0)
    own = (widened(keys), widened(values), None) if steps is None else (keys, values, steps)
    expected = plain.attention(queries, own, sight.paths, 0.3, cap, sinks)
    with threads_of(threads):
        found = functions.attention(queries, cache.of(0), sight, 0.3, cap, sinks)
    assert functions.are_alike(found, expected)


def test_what_is_no_number_shows() -> None:
    cache = cache_of(40, 4, Q8_0)
    rows = np.ones((KV_HEADS, 1, 40), np.float32)
    rows[1, 0, 35] = np.nan
    write(cache, 0, np.array([2]), rows, rows)
    keys, values = numbers(cache, 0, 40)
    for part in (keys, values):
        assert np.isnan(part[1, 2, 32:]).all(), "the group that it is in"
        assert not np.isnan(part[0]).any()
    cache.clear((2,))
    assert not any(part.any() for part in numbers(cache, 0, 40)), "a slot that was freed holds nothing"


@pytest.mark.parametrize(
    ("dtype", "cache"), [("float32", CACHE_AUTO), ("bfloat16", Q8_0), ("float32", "float16")]
)
def test_a_cache_takes_what_is_foretold(dtype: str, cache: str) -> None:
    files = ModelFiles(BUNDLED)
    count = files.raw_config()["num_hidden_layers"]
    part = Slice.load(files, Span(first=0, end=2, count=count), dtype, cache=cache)
    foretold = slice_memory(files, Span(first=0, end=2, count=count), dtype, 256, cache=cache, nodes_max=256)
    part.open_cache(1, 512)
    part._caches[1][0].reserve(512)
    width = part._caches[1][0].of(0)[0].shape[2]
    filled = -(-width // LANES) * LANES - width
    beyond = 2 * part.spec.layers[0].kv.count * 512 * filled * part._caches[1][0].of(0)[0].itemsize
    assert part.cache_bytes - beyond == part.opened_bytes == foretold.cache_bytes
    assert part.cache == cached_as(cache, dtype)


@pytest.mark.parametrize("held", ["float32", "bfloat16", Q8_0])
@pytest.mark.parametrize(("same", "moved"), [(700, 0), (37, 2 * MOVED_AT_ONCE + 9), (0, 1), (64, 16)])
def test_a_copy_has_each_slot_where_it_belongs_and_nothing_else(held: str, same: int, moved: int) -> None:
    """A prompt's slots lie where they lay, those of an answer with guesses beside it do not."""
    generator = np.random.default_rng(same)
    source, copy = cache_of(48, 1600, held), cache_of(48, same + moved + 40, held)
    for of in source.of(0), source.of(1):
        for array in (*of[:2], *(of[2] or ())):
            array[...] = generator.integers(1, 99, array.shape)
    slots = np.concatenate([np.arange(same), same + 1 + generator.permutation(1500 - same)[:moved]])
    copy.copy(source, slots)
    for layer in range(2):
        mine, other = copy.of(layer), source.of(layer)
        pairs = [*zip(mine[:2], other[:2], strict=True), *zip(mine[2] or (), other[2] or (), strict=True)]
        for place, (own, theirs) in enumerate(pairs):
            is_keys = place % 2 == 0  # and their steps: blocks of lanes
            found, expected = (in_slots(each) if is_keys else each for each in (own, theirs))
            assert np.array_equal(found[:, : len(slots)], expected[:, slots])
            assert not found[:, len(slots) :].any()


@pytest.mark.parametrize("held", ["float32", Q8_0])
@pytest.mark.parametrize("slots", [1, BLOCK_SLOTS, BLOCK_SLOTS + 1, 600])
def test_growth_is_foretold_to_the_byte(slots: int, held: str) -> None:
    cache = TreeCache(
        {0: Heads(count=3, width=40), 1: Heads(count=3, width=40), -2: Heads(count=1, width=56)},
        functions.engine(),
        slots_max=600,
        held=held,
    )
    cache.reserve(5)
    planned = cache.bytes + cache.growth_bytes(slots)
    cache.reserve(slots)
    assert cache.bytes == planned
    assert cache.growth_bytes(slots) == 0


def test_a_conversation_more_than_memory_holds_is_refused_before_it_is_taken() -> None:
    files = ModelFiles(BUNDLED)
    count = files.raw_config()["num_hidden_layers"]
    part = Slice.load(files, Span(first=0, end=1, count=count), "float32")
    for request in (1, 2):
        part.open_cache(request, 2 * BLOCK_SLOTS)
    part.cache_bytes_max = part._caches[1][0].growth_bytes(2 * BLOCK_SLOTS)
    part._reserve(part._caches[1], BLOCK_SLOTS, 0)
    part._reserve(part._caches[2], BLOCK_SLOTS, 0)
    with pytest.raises(ClusterError, match=r"the caches of 2 conversations need .* ask for fewer at once"):
        part._reserve(part._caches[1], BLOCK_SLOTS + 1, 0)
    assert part._caches[1][0].bytes == part._caches[2][0].bytes, "nothing was taken"
    part.close_cache(2)
    part._reserve(part._caches[1], BLOCK_SLOTS + 1, 0)


def lack_memory(*_: object) -> None:
    raise MemoryError


def test_a_cache_for_which_memory_lacks_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {0: Heads(count=2, width=32), 1: Heads(count=1, width=64)}
    cache = TreeCache(heads, functions.engine(), slots_max=4 * BLOCK_SLOTS, held="float32")
    cache.reserve(LANES)
    write(cache, 0, np.arange(LANES), *np.ones((2, 2, LANES, 32), np.float32))
    before = [part for layer in heads for part in cache.of(layer)[:2]]
    grown = attention._grown
    for number in range(4):  # keys and values of two kinds
        tried = iter([grown] * number)
        monkeypatch.setattr(attention, "_grown", lambda *own, tried=tried: next(tried, lack_memory)(*own))
        with pytest.raises(MemoryError):
            cache.reserve(BLOCK_SLOTS + 1)
        after = [part for layer in heads for part in cache.of(layer)[:2]]
        assert all(one is other or one.base is other.base for one, other in zip(before, after, strict=True))
        assert [part.shape for part in before] == [part.shape for part in after]
    monkeypatch.setattr(attention, "_grown", grown)
    cache.reserve(BLOCK_SLOTS + 1)
    keys = cache.of(0)[0]
    assert keys.shape[1] > BLOCK_SLOTS // LANES
    assert in_slots(keys)[:, :LANES].all()
    assert not in_slots(keys)[:, LANES:].any()


def test_room_for_which_memory_lacks_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[int] = []

    class Library:
        def run(self, _program: object, call: object) -> int:
            lent.append(call._obj.room_bytes)
            return 0 if lent[-1] >= 1000 else 1000

    room = Room(Library())
    with monkeypatch.context() as patch:
        patch.setattr(cpu.np, "empty", lack_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                room.run(cpu.Operations(), compiled.Call())
    assert lent == [0, 0]
    room.run(cpu.Operations(), compiled.Call())
    assert lent == [0, 0, 0, 1062]
