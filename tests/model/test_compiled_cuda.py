"""What runs on GPUs, as far as CPUs can tell: `canonical.cu` as C, where a block has one thread; integers by
the same operator, int4's layout with a stand-in; and refusals."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flowspec.errors import InputError
from flowspec.model import gpu_trial
from flowspec.model.arithmetic import compiled_cuda, plain
from flowspec.model.arithmetic.compiled_cuda import NAMES, SOURCE, WIDTH_MAX, CudaLibrary
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.kernels import kernels_of
from flowspec.model.products import BLOCKS, in_blocks
from flowspec.model.quantised import LINEARS, PlainInt4Linear, pack
from flowspec.model.quantised_cuda import CudaInt4Linear, CudaInt8Linear
from tests.model.slices import CPU, PLAIN_LINEARS

ROOM_IN_SOURCE, NOTHING = 1 << 16, 0xDEADBEEF


class OnHost:
    """Starts kernels one after another, and looks whether they kept to their room."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._room = (ctypes.c_uint32 * ROOM_IN_SOURCE).in_dll(self._library, "flowspec_room")
        self.started: list[str] = []

    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        assert 0 < blocks < 1 << 31
        assert 4 * room <= 48 << 10, "a GPU's block has no more"
        beyond = ROOM_IN_SOURCE - room
        self._room[room:] = [NOTHING] * beyond
        getattr(self._library, f"flowspec_{name}")(ctypes.byref(given), blocks)
        assert self._room[room:] == [NOTHING] * beyond, f"{name} writes beyond its room"
        self.started.append(name)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    made = tmp_path_factory.mktemp("cuda") / "canonical_cu.so"
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    words = ["cc", *flags, "-DFLOWSPEC_HOST", "-shared", "-x", "c", str(SOURCE), "-lm", "-o", str(made)]
    subprocess.run(words, check=True)
    return OnHost(made)


def test_kernels_of_a_gpu_compute_what_is_defined(host: OnHost) -> None:
    assert gpu_trial.library_fault(CudaLibrary(host), CPU) == ""
    assert set(host.started) == set(NAMES)


@pytest.mark.parametrize("name", ["exp", "halves_sum", "turned", "store", "softmax", "attention"])
def test_kernels_of_another_definition_are_found(
    name: str, host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(plain, name)

    def other(*given: Any) -> Any:
        found = right(*given)
        if name == "store":
            given[3][:] = given[3].roll(1, 0)
            return None
        return torch.nextafter(found.float(), torch.ones(())).to(found.dtype) if name != "turned" else -found

    monkeypatch.setattr(plain, name, other)
    assert gpu_trial.library_fault(CudaLibrary(host), CPU)


def test_long_contexts_go_through_attention_part_by_part(
    host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_cuda, "SCORES_MAX", 500)
    before = len(host.started)
    assert gpu_trial.library_fault(CudaLibrary(host), CPU) == ""
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
    found = CudaLibrary(host).attention(queries, keys, values, paths, 0.3, None, None)
    expected = plain.attention(queries, keys, values[..., :8], paths, 0.3)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_the_widest_norm_fits_and_a_wider_one_is_left_to_the_definition(host: OnHost) -> None:
    library = CudaLibrary(host)
    rows, weights = torch.randn((2, WIDTH_MAX)), torch.randn(WIDTH_MAX)
    rows[1, 3] = float("inf")
    found, expected = (
        each.norm(rows, weights, 1e-6, "cast, scale").nan_to_num(7.0) for each in (library, plain)
    )
    assert torch.equal(found, expected)
    wider = torch.zeros((1, WIDTH_MAX + 1))
    with pytest.raises(AssertionError, match="no more room"):
        library.norm(wider, wider[0], 1e-6, "cast, scale")


CUDA_LINEARS = {"int8": CudaInt8Linear, "int4": CudaInt4Linear}


def both(kind: str, inputs: int, outputs: int) -> tuple[nn.Linear, nn.Linear]:
    """A packed layer for CPUs, and the same one for GPUs."""
    weight = torch.randn(outputs, inputs)
    layers = []
    for linears in (PLAIN_LINEARS, CUDA_LINEARS):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            assert layer.bias is not None
            layer.bias.fill_(0.25)
        pack(layer, LINEARS[kind].rounded(weight), linears[kind])
        layers.append(layer)
    return layers[0], layers[1]


@torch.inference_mode()
@given(
    rows=st.integers(0, 40),
    inputs=st.sampled_from([32, 75, 512]),
    outputs=st.sampled_from([16, 21]),
    seed=st.integers(0, 9),
)
def test_int8_is_the_same_bits_as_on_cpus(rows: int, inputs: int, outputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    cpu, cuda = both("int8", inputs, outputs)
    x = torch.randn(rows, inputs) * 10
    assert torch.equal(cuda(x), cpu(x))


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


@torch.inference_mode()
def test_int4_is_laid_out_as_its_kernel_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", _stand_in_packing)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", _stand_in_product)
    torch.manual_seed(3)
    cpu, cuda = both("int4", 4 * GROUP, 21)
    x = torch.randn(2, 5, 4 * GROUP)
    expected, found = cpu(x), cuda(x)
    assert found.shape == expected.shape
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_gpu_takes_the_kernels_that_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    with pytest.raises(InputError, match="int8 runs on CPUs and CUDA, not on mps"):
        kernels_of("int8", torch.device("mps"))
    capability = (7, 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [kernel.linear for kernel in kernels_of("int4", gpu)] == [PlainInt4Linear], (
        "an Xavier has no tinygemm"
    )
    capability = (8, 7)
    assert [kernel.linear for kernel in kernels_of("int4", gpu)] == [CudaInt4Linear]
    assert [kernel.linear for kernel in kernels_of("int8", gpu)] == [CudaInt8Linear]
    (plain,) = kernels_of("float16", gpu)
    assert (plain.linear, plain.product) == (None, in_blocks)


def test_on_a_gpu_always_so_many_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernel a library takes for that number, a row's neighbours do not matter then."""
    x, weight, bias = torch.randn(70, 24), torch.randn(5, 24), torch.randn(5)
    counts: list[int] = []
    linear = F.linear

    def counted(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return linear(rows, *others)

    monkeypatch.setattr(F, "linear", counted)
    for dtype, block in BLOCKS.items():
        for count in (0, 1, block, block + 1, 70):
            given = [each.to(dtype) for each in (x[:count], weight, bias)]
            found = in_blocks(*given)
            assert found.shape == (count, 5)
            assert found.dtype == dtype
            exact = given[0].double() @ given[1].double().T + given[2].double()
            assert torch.allclose(found.double(), exact, rtol=0.02, atol=0.05)
        assert {*counts} == {block} or {*counts} == {0, block}
        counts.clear()
