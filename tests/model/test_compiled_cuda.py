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
from flowspec.model.arithmetic.compiled_cuda import KERNELS, SOURCE, CudaLibrary
from tests.model.slices import CPU


class OnHost:
    """Starts kernels one after another; `room` counts what they may use of a block's memory."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.started: list[str] = []

    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        assert 0 < blocks < 1 << 31
        assert 4 * room <= 48 << 10, "a GPU's block has no more"
        assert f"flowspec_{name}" in KERNELS
        self.started.append(name)
        getattr(self._library, f"flowspec_{name}")(ctypes.byref(given), blocks)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    made = tmp_path_factory.mktemp("cuda") / "canonical_cu.so"
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    words = ["cc", *flags, "-DFLOWSPEC_HOST", "-shared", "-x", "c", str(SOURCE), "-lm", "-o", str(made)]
    subprocess.run(words, check=True)
    return OnHost(made)


def test_kernels_of_a_gpu_compute_what_is_defined(host: OnHost) -> None:
    assert kernel_checks.gpu_fault(CudaLibrary(host), CPU) == ""
    assert {f"flowspec_{name}" for name in host.started} == set(KERNELS)


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
    assert kernel_checks.gpu_fault(CudaLibrary(host), CPU) == ""
