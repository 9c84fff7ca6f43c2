"""What a GPU computes of `canonical.cu`, on a CPU: the same file as C, where a block has one thread."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from flowspec.model import kernel_checks
from flowspec.model.arithmetic import compiled_cuda, plain
from flowspec.model.arithmetic.compiled_cuda import NAMES, SOURCE, WIDTH_MAX, CudaLibrary
from tests.model.slices import CPU

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
    signs: list[None] = []
    assert kernel_checks.gpu_fault(CudaLibrary(host), CPU, lambda: signs.append(None)) == ""
    assert len(signs) == kernel_checks.gpu_steps(), "how far it is is told by that"
    assert set(host.started) == set(NAMES)


@pytest.mark.parametrize(
    "name", ["exp", "halves_sum", "tanh", "turned", "store", "product", "softmax", "attention"]
)
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
    assert kernel_checks.gpu_fault(CudaLibrary(host), CPU)


def test_long_contexts_go_through_attention_part_by_part(
    host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_cuda, "SCORES_MAX", 500)
    before = len(host.started)
    assert kernel_checks.gpu_fault(CudaLibrary(host), CPU) == ""
    started = host.started[before:]
    assert started.count("scores") == started.count("values") > 12, "there are twelve cases"


@pytest.mark.parametrize("positions", [1, 64, 65, 8192, 8193, 16400])
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
