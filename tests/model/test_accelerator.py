"""What differs between a CPU and a GPU, asked in one place; the CUDA half with a stand-in for
`torch.cuda`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flowspec.errors import InputError
from flowspec.host_memory import HostMemory
from flowspec.model import accelerator
from flowspec.model.accelerator import Accelerator, accelerator_of, find, is_gpu_lost, is_out_of_memory
from flowspec.model.arithmetic import compiled
from flowspec.runtime.compute import unexpected
from tests.model.fake_gpu import GIB, ORIN, pretend_cuda

ROOT = Path(__file__).parents[2]
OWNER = ROOT / "flowspec/model/accelerator.py"


def cuda_uses(source: str) -> Iterator[int]:
    """The lines in which a module asks `torch.cuda` or sets `torch.backends.cuda`, however it is written."""
    node: Any
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        if any(name.startswith(("torch.cuda", "torch.backends.cuda")) for name in names):
            yield node.lineno


def test_one_file_asks_cuda() -> None:
    for source in (
        "torch.cuda.wait()",
        "from torch import cuda",
        "import torch.cuda as c",
        "x = torch.backends.cuda.m",
    ):
        assert list(cuda_uses(source)), source
    sources = {path: path.read_text("utf-8") for path in (ROOT / "flowspec").rglob("*.py")}
    asking = {path for path, text in sources.items() if "cuda" in text and any(cuda_uses(text))}
    assert asking == {OWNER}


def test_the_processor_is_an_accelerator_too() -> None:
    cpu = find("cpu")
    assert (cpu.device, cpu.is_cpu, cpu.capability) == ("cpu", True, (0, 0))
    assert 0 < cpu.taken_bytes() < cpu.total_bytes() == psutil.virtual_memory().total
    assert 0 < cpu.free_bytes() <= cpu.total_bytes()
    assert cpu.facts()["threads"] == compiled.threads()
    cpu.wait()
    cpu.give_back()


def test_auto_takes_the_gpu_where_there_is_one_and_other_names_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(accelerator, "GPU_FILES", ("/dev/null",))
    assert find("auto").is_cpu
    pretend_cuda(monkeypatch, count=2)
    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "GPU_FILES", ("/dev/there-is-no-driver",))
        assert find("auto").is_cpu, "and torch is not asked"
    assert find("auto").device == find("cuda").device == "cuda:0"
    assert find("cuda:1").device == accelerator_of("cuda:1").device == "cuda:1"
    for name in ("mps", "cuda:x", "cuda:-1", ""):
        with pytest.raises(InputError, match="expected auto, cpu or cuda:N, got"):
            find(name)
    with pytest.raises(InputError, match="expected a CPU or CUDA device, got meta"):
        accelerator_of("meta")


def test_why_a_gpu_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InputError, match=r"--device cuda:0: .* built without CUDA"):
        find("cuda:0")
    pretend_cuda(monkeypatch)
    with pytest.raises(InputError, match="--device cuda:1: expected one of the 1 CUDA devices"):
        find("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(InputError, match=r"finds no GPU: Found no NVIDIA driver on your system\.; use"):
        find("cuda:0")
    assert find("auto").is_cpu


def test_memory_that_is_the_processors_too_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jetson's CUDA counts the files in memory as taken, from which weights were just read."""
    pretend_cuda(monkeypatch, is_integrated=True)
    found = HostMemory(total=64 * GIB, available=5 * GIB)
    monkeypatch.setattr(accelerator, "host_memory", lambda promised: found)
    gpu = Accelerator(0)
    assert gpu.free_bytes() == 5 * GIB + 100
    more = HostMemory(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(accelerator, "host_memory", lambda promised: more)
    assert gpu.free_bytes() == 8 * GIB + 100
    pretend_cuda(monkeypatch, is_integrated=False)
    assert gpu.free_bytes() == 1 * GIB + 100
    assert (gpu.total_bytes(), gpu.taken_bytes()) == (8 * GIB, 200)


def test_a_gpu_is_waited_for_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_cuda(monkeypatch)
    gpu = find("cuda:0")
    gpu.wait()
    gpu.give_back()
    assert asked[-2:] == ["synchronize", "empty_cache"]
    assert not gpu.is_cpu
    facts = gpu.facts()
    assert (facts["name"], facts["capability"], facts["built_for"]) == (ORIN["name"], "8.7", ["sm_87"])
    assert (facts["cuda"], facts["shares_memory"]) == ("12.6", True)


PRECISION = """
import torch
from flowspec.model.accelerator import Accelerator
m = torch.backends.cuda.matmul
found = torch.get_float32_matmul_precision(), m.allow_tf32
assert found == ("high", True), found
assert m.allow_bf16_reduced_precision_reduction and m.allow_fp16_reduced_precision_reduction
Accelerator(0)
assert (torch.get_float32_matmul_precision(), m.allow_tf32) == ("highest", False)
assert getattr(m, "fp32_precision", "ieee") == "ieee"
assert not m.allow_bf16_reduced_precision_reduction and not m.allow_fp16_reduced_precision_reduction
assert not getattr(m, "allow_fp16_accumulation", False)
"""


def test_float32_is_float32_also_where_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers for Jetsons are known to set this variable; torch reads it when it is imported."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    subprocess.run([sys.executable, "-W", "error", "-c", PRECISION], check=True)


NO_MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/x/CUDACachingAllocator.cpp":995, please'),
    RuntimeError("[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: can't allocate memory: you"),
)
LOST = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
)


def test_gpus_that_are_lost_or_full_are_recognised_and_told_of() -> None:
    for error in (*NO_MEMORY, *LOST, ValueError("cannot allocate")):
        assert is_out_of_memory(error) == (error in NO_MEMORY)
        assert is_gpu_lost(error) == (error in LOST)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
    assert "start that daemon again, for its GPU" in str(unexpected(lost, "while running layers"))
    assert "start that daemon again" not in str(unexpected(KeyError("x"), "while running layers"))
