"""The cost model: exact arithmetic of the roofline, where its knee is, and what must never shrink."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.plan.cost import (
    CHOOSING,
    OPERATIONS,
    drafter_curve,
    head_curve,
    layers_curve,
    row_bytes,
    weights_curve,
)
from flowspec.plan.profile import DeviceProfile, KernelRates, find_profile, profile_names
from flowspec.plan.shape import ModelShape, eagle_shape, find_shape
from flowspec.plan.timing import EXPERTS_SHARED

BOARD = DeviceProfile(
    name="board",
    memory_gb=8.0,
    memory_gb_per_s=20.0,
    memory_efficiency=0.5,
    tflops={"float32": 0.5, "float16": 1.0},
    compute_efficiency=0.5,
    packed={"int8": KernelRates(gb_per_s=5.0, tflops=2.0, serial=0.25)},
    layer_us=100.0,
    pass_us=500.0,
)
"""10 GB/s, and 0.5 TFLOP/s in float16: 50 operations for each byte, so 50 rows for two bytes and two
operations."""
SHAPE = ModelShape("small", 4, 1000, 2000, 10, 5, 100, 5000)
"""2 * 1000 * 100 * (10 + 5) + 3 * 1000 * 2000 = 9 million weights a layer."""
ROWS = st.integers(1, 512)
CONTEXTS = st.integers(0, 8192)
SERIAL = st.sampled_from((0.0, 0.25, 1.0))


def knee(device: DeviceProfile, precision: str) -> float:
    """Nodes that a pass over weights runs in the time of one: where computing takes as long as reading."""
    rates = device.rates(precision)
    return PRECISION_BYTES[precision] * rates.tflops / (OPERATIONS * rates.gb_per_s) * 1e3


def test_reading_weights_is_what_few_rows_take_and_computing_what_many_do() -> None:
    curve = layers_curve(BOARD, SHAPE, "float16", 2)
    fixed_s = 2 * 100e-6 + 500e-6
    assert SHAPE.layer_params == 9_000_000
    assert knee(BOARD, "float16") == pytest.approx(50)
    assert curve.seconds(1) == pytest.approx(2 * 9e6 * 2 / 10e9 + fixed_s)
    assert curve.seconds(50) == pytest.approx(curve.seconds(1))
    assert curve.seconds(200) == pytest.approx(200 * 2 * 2 * 9e6 / 0.5e12 + fixed_s)


def test_keys_and_values_are_read_in_their_own_precision_and_multiplied_with() -> None:
    curve = layers_curve(BOARD, SHAPE, "float16", 2)
    read_s = 1000 * 2 * (2 * 5 * 100) * 2 / 10e9
    assert curve.seconds(1, 1000) - curve.seconds(1) == pytest.approx(read_s)
    multiplied_s = 1000 * 200 * 2 * (2 * 2 * 10 * 100) / 0.5e12
    assert curve.seconds(200, 1000) - curve.seconds(200) == pytest.approx(multiplied_s)
    width, rest = divmod(SHAPE.head_dim, 32)
    share = (SHAPE.head_dim + 2 * (width + (rest > 0))) / (2 * SHAPE.head_dim)
    usual, q8_0 = (layers_curve(BOARD, SHAPE, "int8", 1, cache).context_s for cache in ("auto", "q8_0"))
    assert q8_0 / usual == pytest.approx(share)
    int8, float16, float32 = (
        layers_curve(BOARD, SHAPE, name, 1).context_s for name in ("int8", "float16", "float32")
    )
    assert int8 == float16 == float32 / 2
    sizes = [row_bytes(SHAPE, name) for name in ("float32", "float16", "int8", "int4")]
    assert sizes == [4000, 2000, 2000, 2000]


def test_packed_weights_take_what_their_kernels_take_or_are_read_as_others() -> None:
    curve = weights_curve(BOARD, 1e9, "int8")
    assert curve.base_s == pytest.approx((1 + 2 / 32) * 1e9 / 5e9)
    assert (curve.row_s, curve.extra_row_s) == (
        pytest.approx(0.75 * 2e9 / 2e12),
        pytest.approx(0.25 * 2e9 / 2e12),
    )
    slow = weights_curve(BOARD.slowed(3), 1e9, "int8")
    assert slow.seconds(7) == pytest.approx(3 * curve.seconds(7))
    twice = weights_curve(BOARD, 1e9, "gguf", filed_bytes=1.2).base_s
    assert twice == pytest.approx(2 * weights_curve(BOARD, 1e9, "gguf", filed_bytes=0.6).base_s)
    curve = weights_curve(BOARD, 1e9, "int4")
    assert curve.base_s == pytest.approx((0.5 + 2 / 32) * 1e9 / 10e9)
    assert (curve.row_s, curve.extra_row_s) == (pytest.approx(2e9 / 0.5e12), 0)
    assert "not measured" in BOARD.basis("int4")
    assert "as float16" in BOARD.basis("int4")
    assert BOARD.basis("float32") == ""


def test_what_reading_does_not_hide_comes_on_top() -> None:
    roofline = weights_curve(BOARD, 1e9, "float16")
    both = weights_curve(structs.replace(BOARD, serial=1.0), 1e9, "float16")
    half = weights_curve(structs.replace(BOARD, serial=0.5), 1e9, "float16")
    assert both.seconds(50) == pytest.approx(2 * roofline.seconds(50))
    assert half.seconds(50) == pytest.approx(1.5 * roofline.seconds(50))
    assert half.seconds(1000) == pytest.approx(roofline.seconds(1000)), "reading hides what it can"


def test_more_rows_of_a_mixture_read_more_experts() -> None:
    """Beside rows that are drawn as it is said: some experts as the row before, the others by chance among
    those that it did not choose."""
    mixture = replace(SHAPE, experts=32, experts_per_row=4)
    reading = structs.replace(BOARD, tflops={"float16": 1e6}, layer_us=0.0, pass_us=0.0)
    dense, curve = (layers_curve(reading, shape, "float16", 1) for shape in (SHAPE, mixture))
    assert curve.seconds(1) == pytest.approx(dense.seconds(1)), "one row reads what it runs through"
    attention_s = curve.seconds(1) * 3 / 9  # 3 of 9 million weights a layer
    rng = np.random.default_rng(3)
    for rows in (2, 4, 8, 16, 32):
        read = np.mean([len(_experts_read(rng, rows)) for _ in range(500)]) / 4
        expected_s = attention_s + (curve.seconds(1) - attention_s) * read
        assert curve.seconds(rows) == pytest.approx(expected_s, rel=0.04)
    all_s = attention_s + (curve.seconds(1) - attention_s) * 32 / 4
    assert curve.seconds(10_000) == pytest.approx(all_s), "there are no more than all"
    assert drafter_curve(reading, mixture, "float16").seconds(8) > drafter_curve(
        reading, mixture, "float16"
    ).seconds(1)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (64, 8), (128, 8), (6, 5), (4, 4)])
def test_rows_that_share_no_more_than_chance_has_it_read_as_many_experts_as_draws(
    experts: int, chosen: int
) -> None:
    mixture = replace(SHAPE, experts=experts, experts_per_row=chosen, experts_shared=0.0)
    curve = layers_curve(BOARD, mixture, "float16", 1)
    rng = np.random.default_rng(4)
    for rows in (1, 2, 3, 8, 20):
        draws = [
            {int(each) for _ in range(rows) for each in rng.choice(experts, chosen, replace=False)}
            for _ in range(500)
        ]
        assert curve.choices_of(rows) * chosen == pytest.approx(np.mean([*map(len, draws)]), rel=0.04)
    alike = layers_curve(BOARD, replace(mixture, experts_shared=1.0), "float16", 1)
    if experts > chosen:
        assert alike.choices_of(50) == 1


def test_experts_have_to_be_chosen_and_each_that_is_read_to_be_started() -> None:
    mixture = replace(SHAPE, experts=32, experts_per_row=4)
    plain = layers_curve(BOARD, mixture, "float16", 3)
    starting = layers_curve(structs.replace(BOARD, expert_us=20.0), mixture, "float16", 3)
    for rows in (1, 2, 16, 500):
        more_s = starting.seconds(rows) - plain.seconds(rows)
        more_us = CHOOSING * BOARD.layer_us + 20 * 4 * plain.choices_of(rows)
        assert more_s == pytest.approx(3e-6 * more_us)
    assert layers_curve(structs.replace(BOARD, expert_us=20.0), SHAPE, "float16", 3) == layers_curve(
        BOARD, SHAPE, "float16", 3
    ), "other models have none"
    slow = layers_curve(structs.replace(BOARD, expert_us=20.0).slowed(3), mixture, "float16", 3)
    assert slow.seconds(7) == pytest.approx(3 * starting.seconds(7))


def _experts_read(rng: np.random.Generator, rows: int) -> set[int]:
    last = set(rng.choice(32, 4, replace=False))
    read = set(last)
    for _ in range(rows - 1):
        kept = {each for each in last if rng.random() < EXPERTS_SHARED}
        others = rng.choice(list(set(range(32)) - last), 4 - len(kept), replace=False)
        last = kept | set(others)
        read |= last
    return read


def test_a_drafter_reads_its_lm_head_in_each_pass() -> None:
    drafter = drafter_curve(BOARD, SHAPE, "float16")
    layers = layers_curve(BOARD, SHAPE, "float16", 4)
    head = head_curve(BOARD, SHAPE, "float16")
    assert head.seconds(1) == pytest.approx(5e6 * 2 / 10e9)
    assert drafter.seconds(1, 100) == pytest.approx(layers.seconds(1, 100) + head.seconds(1))
    assert drafter.seconds(400) == pytest.approx(layers.seconds(400) + head.seconds(400))
    eagle = eagle_shape(SHAPE)
    assert drafter_curve(BOARD, eagle, "float16").base_s == pytest.approx((9e6 + 5e6 + 2e6) * 2 / 10e9)


@given(st.integers(1, 32), ROWS, CONTEXTS, SERIAL)
def test_layers_add_up(layers: int, rows: int, context: int, serial: float) -> None:
    device = structs.replace(BOARD, serial=serial, pass_us=0.0)
    one, all_of_them = (layers_curve(device, SHAPE, "float16", count) for count in (1, layers))
    assert all_of_them.seconds(rows, context) == pytest.approx(layers * one.seconds(rows, context))


@given(st.sampled_from(("float32", "float16", "int8", "int4")), ROWS, ROWS, CONTEXTS, CONTEXTS, SERIAL)
def test_more_rows_and_more_context_never_take_less(
    precision: str, rows: int, more: int, context: int, longer: int, serial: float
) -> None:
    curve = layers_curve(structs.replace(BOARD, serial=serial), SHAPE, precision, 3)
    assert curve.seconds(rows, context) <= curve.seconds(rows + more, context + longer)
    assert curve.seconds(rows + more) <= curve.seconds(rows) + curve.seconds(more), (
        "one pass is no slower than two"
    )


@pytest.mark.parametrize("name", profile_names())
def test_shipped_boards_run_a_layer_of_7b_in_plausible_time(name: str) -> None:
    device = find_profile(name)
    one_s = layers_curve(device, find_shape("llama-2-7b"), "float16", 1).seconds(1)
    assert 2e-4 < one_s < 0.2
    assert 1 < knee(device, "float16") < 200
    assert device.tflops.keys() | device.packed.keys() <= PRECISION_BYTES.keys()
