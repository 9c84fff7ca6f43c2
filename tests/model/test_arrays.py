"""Numbers in numpy are converted and rounded as torch does it; whatever reads weights needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flowspec.model import rounding
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import DTYPES, Numbers, fill, narrowed, room, widened
from flowspec.model.gpu import array_of, tensor_of
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.weight_files import FLOATS8, mapped, read_header

FREE = (
    *("files", "tensors", "weight_files", "joined_tensors", "rounding"),
    *("gguf.tensors", "gguf.config", "prequantised", "arithmetic.compiled"),
)


def test_whatever_reads_weights_needs_neither_torch_nor_transformers() -> None:
    names = [f"flowspec.model.{name}" for name in FREE]
    names += [f"flowspec.runtime.{name}" for name in ("loading", "weights.store", "weights.transfer")]
    code = f"import sys, {', '.join(names)}; print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def every_half(low: int) -> np.ndarray:
    """All that float32 has in its upper half, with these bits below."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16 | low).view(np.float32)
    return numbers[~np.isnan(numbers)]


def bits(x: Numbers) -> Numbers:
    """So that -0 is not 0."""
    return x.view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_numbers_are_narrowed_and_widened_as_by_torch(dtype: str, low: int) -> None:
    numbers = every_half(low)
    wide = numbers.astype(np.float64) * (1 + 2.0**-40)
    for given in (numbers, wide, narrowed(numbers, "float16"), narrowed(numbers, "bfloat16")):
        expected = tensor_of(given).to(getattr(torch, dtype))
        found = narrowed(given, dtype)
        assert np.array_equal(bits(found), bits(array_of(expected)))
        assert np.array_equal(bits(widened(found)), bits(expected.float().numpy()))
        part = np.empty((len(given), 2), DTYPES[dtype])[:, 0]
        fill(part, given)
        assert np.array_equal(part, found)
    nothing = narrowed(np.array(np.nan, np.float32), dtype)
    assert np.isnan(widened(nothing))


def test_floats_of_8_bits_are_those_of_torch() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FLOATS8, expected, equal_nan=True)


def test_whole_numbers_stay_such_and_room_begins_with_a_line_of_the_cache() -> None:
    part = np.zeros(3, np.int64)
    fill(part, np.array([1, 2, 1 << 40]))
    assert part.tolist() == [1, 2, 1 << 40]
    for shape in ((3, 5), (0, 4), ()):
        assert room(shape, np.float16).shape == shape
        assert room((7,), np.float32).ctypes.data % 64 == 0


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_is_rounded_row_by_row_whatever_dtype_it_has(
    precision: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, generator = ROUNDINGS[precision], np.random.default_rng(3)
    weight = narrowed(generator.normal(size=(70, 80)).astype(np.float32), dtype)
    weight[3] = 0
    whole, wide = how.round(weight), how.round(widened(weight))
    assert np.array_equal(whole, wide)
    monkeypatch.setattr(rounding, "_BLOCK", 1)
    assert np.array_equal(whole, how.round(weight))
    found = how.widen(whole, 70, 80)
    assert found.shape == (70, 80)
    assert not found[3].any()
    assert np.abs(found - widened(weight)).max() < {"int8": 0.02, "int4": 0.4}[precision]


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_what_is_no_number_shows_in_its_group(precision: str) -> None:
    how, weight = ROUNDINGS[precision], np.ones((4, 64), np.float32)
    weight[1, 3], weight[2, 40] = np.nan, np.inf
    found = how.widen(how.round(weight), 4, 64)
    assert np.isfinite(found[[0, 3]]).all()
    assert np.isnan(found[1]).any()
    assert np.isnan(found[2]).any()


@pytest.mark.arm
def test_levels_of_the_library_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(1).normal(size=(37, 100)).astype(np.float32)
    numbers[2] = 0
    found = rounding.as_q8_0(numbers)
    monkeypatch.setattr(compiled, "_library", None)
    expected = rounding.as_q8_0(narrowed(numbers, "float32"))
    assert np.array_equal(found.levels, expected.levels)
    assert np.array_equal(found.scales, expected.scales)


def test_tensors_over_a_mapped_file_outlive_it(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "a.safetensors")
    found = tensor_of(mapped(read_header(tmp_path / "a.safetensors")["a"]))
    (tmp_path / "a.safetensors").unlink()
    assert found.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
