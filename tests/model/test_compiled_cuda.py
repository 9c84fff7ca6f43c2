"""What runs on GPUs, as far as CPUs can tell: `canonical.cu` as C, where a block has one thread; int4's
layout with a stand-in; and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flowspec.core.protocol.precision import FILED
from flowspec.errors import InputError
from flowspec.model import gpu, gpu_trial
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.gpu import BLOCKS, DTYPES, KERNELS, WIDTH_MAX, CudaLibrary, Gpu, arithmetic_of, in_blocks
from flowspec.model.layer import Linear
from flowspec.model.rounding import ROUNDINGS
from tests.model.fake_gpu import OnHost, pretend_cuda

CPU = torch.device("cpu")


def test_kernels_of_a_gpu_compute_what_is_defined(host: OnHost) -> None:
    assert gpu_trial.library_fault(CudaLibrary(host.start), CPU) == ""
    assert set(host.started) == set(KERNELS)


@pytest.mark.parametrize("name", ["exp", "halves_sum", "turned", "store", "softmax", "attention"])
def test_kernels_of_another_definition_are_found(
    name: str, host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(plain, name)

    def other(*given: Any) -> Any:
        found = right(*given)
        if name == "store":
            given[3][0][:] = given[3][0].roll(1, 0)
            return None
        return torch.nextafter(found.float(), torch.ones(())).to(found.dtype) if name != "turned" else -found

    monkeypatch.setattr(plain, name, other)
    assert gpu_trial.library_fault(CudaLibrary(host.start), CPU)


def test_long_contexts_go_through_attention_part_by_part(
    host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SCORES_MAX", 500)
    before = len(host.started)
    assert gpu_trial.library_fault(CudaLibrary(host.start), CPU) == ""
    started = host.started[before:]
    assert started.count("scores") == started.count("values") > 9, "there are nine cases"


@pytest.mark.parametrize("positions", [1, 65, 8193])
def test_attention_has_room_for_its_positions(positions: int, host: OnHost) -> None:
    generator = torch.Generator().manual_seed(positions)
    slots = -(-positions // 16) * 16
    queries = torch.randn((2, 2, 8), generator=generator)
    keys = torch.randn((1, slots // 16, 8, 16), generator=generator)
    values = torch.randn((1, slots, 16), generator=generator)
    paths = torch.stack([torch.randperm(positions, generator=generator) for _ in range(2)])
    paths[1, : positions // 2] = -1
    if positions > 64:
        keys[0, 0, 0, 0] = float("inf")
    found = CudaLibrary(host.start).attention(queries, (keys, values, None), paths, 0.3)
    expected = plain.attention(queries, (keys, values, None), paths, 0.3)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_the_widest_norm_fits_and_a_wider_one_is_left_to_the_definition(host: OnHost) -> None:
    library = CudaLibrary(host.start)
    rows, weights = torch.randn((2, WIDTH_MAX)), torch.randn(WIDTH_MAX)
    rows[1, 3] = float("inf")
    found, expected = (each.norm(rows, weights, 1e-6, "weights").nan_to_num(7.0) for each in (library, plain))
    assert torch.equal(found, expected)
    wider, before = torch.ones((1, WIDTH_MAX + 1)), len(host.started)
    assert torch.equal(library.norm(wider, wider[0], 0.0, "weights"), wider)
    assert len(host.started) == before


def _stand_in_packing(pairs: torch.Tensor, tiles: int) -> torch.Tensor:
    """What tinygemm documents of its input: two levels a byte, the first in the high bits."""
    assert pairs.dtype == torch.uint8
    assert pairs.shape[0] % 8 == 0
    assert 2 * pairs.shape[1] % (16 * tiles) == 0
    return torch.stack([pairs >> 4, pairs & 15], dim=2).flatten(1).float()


def _stand_in_product(
    rows: torch.Tensor, levels: torch.Tensor, group: int, scales_and_zeros: torch.Tensor
) -> torch.Tensor:
    scales, zeros = (part.float().t().repeat_interleave(group, dim=1) for part in scales_and_zeros.unbind(2))
    return (rows.float() @ ((levels - 8) * scales + zeros).t()).bfloat16()


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [("int4", "tinygemm"), ("int4", "plain"), ("int8", "plain")]
)
@pytest.mark.parametrize("inputs", [4 * GROUP, 4 * GROUP - 5])
def test_what_is_packed_is_laid_out_as_its_kernel_wants(
    inputs: int, dtype: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", _stand_in_packing)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", _stand_in_product)
    generator, engine = np.random.default_rng(3), Gpu("float32", arithmetic, "weights", "cpu")
    x, weights = (generator.standard_normal((rows, inputs), np.float32) for rows in (10, 21))
    how, bias = ROUNDINGS[dtype], np.full(21, 0.25, np.float32)
    panels = how.round(weights)
    matrix = engine.packed_matrix(how.form, panels, 21)
    linear = Linear(inputs=inputs, matrices=(matrix,), bias=engine.array(bias))
    found = engine.numpy(engine.rows(linear=linear)(engine.array(x)))
    expected = x.astype(np.float64) @ how.widen(panels, 21, inputs).T + bias
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


def test_a_gpu_takes_the_kernels_that_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected a CPU or CUDA device, got mps"):
        arithmetic_of("int4", "mps")
    pretend_cuda(monkeypatch)
    version = ".".join(torch.__version__.split(".")[:2])
    for capability, name in (((7, 2), "plain"), ((8, 7), "tinygemm")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, its=capability: its)
        number = "".join(map(str, capability))
        assert arithmetic_of("int4", "cuda:0") == f"{name}-int4@sm{number}-torch{version}"
        assert arithmetic_of("float16", "cuda:0") == f"torch-in-blocks-f16@sm{number}-torch{version}"
        assert arithmetic_of("int8", "cuda:0") == f"plain-int8@sm{number}-torch{version}"


@pytest.mark.parametrize("dtype", [*DTYPES, *ROUNDINGS, FILED])
def test_products_of_a_gpu_are_tried(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trial, "SHAPES", gpu_trial.SHAPES[:2])
    monkeypatch.setattr(gpu_trial, "say", lambda **word: None)
    assert gpu_trial.product_fault(dtype, "plain", "cpu") == ""
    linear = gpu.multiplied
    most = max(gpu_trial.ROW_COUNTS)
    for change, fault in (
        (lambda rows: rows if len(rows) == most else 1.5 * rows, "depend on the rows beside it"),
        (lambda rows: 2 * rows, "is not what it should be"),
    ):
        monkeypatch.setattr(gpu, "multiplied", lambda rows, *given, do=change: linear(do(rows), *given))
        assert fault in gpu_trial.product_fault(dtype, "plain", "cpu")


def test_on_a_gpu_always_so_many_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernel a library takes for that number, a row's neighbours do not matter then."""
    x, weight = torch.randn(70, 24), torch.randn(5, 24)
    counts: list[int] = []
    linear = F.linear

    def counted(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return linear(rows, *others)

    monkeypatch.setattr(F, "linear", counted)
    for dtype, block in BLOCKS.items():
        for count in (0, 1, block, block + 1, 70):
            found = in_blocks(x[:count], weight.to(dtype))
            assert found.shape == (count, 5)
            assert found.dtype == torch.float32
            exact = x[:count].double() @ weight.double().T
            assert torch.allclose(found.double(), exact, rtol=0.02, atol=0.05)
        assert {*counts} == {block} or {*counts} == {0, block}
        counts.clear()
