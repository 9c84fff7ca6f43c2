"""GPUs that are not there: a stand-in for `torch.cuda`, an accelerator that is the CPU, and kernels that run
there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowspec.model import accelerator
from flowspec.model.accelerator import Accelerator

GIB = 1 << 30
ROOM_IN_SOURCE, NOTHING = 1 << 16, 0xDEADBEEF
ORIN = {
    "name": "Orin",
    "capability": (8, 7),
    "free": 1 * GIB,
    "total": 8 * GIB,
    "reserved": 300,
    "allocated": 200,
}


def pretend_cuda(patch: pytest.MonkeyPatch, *, is_integrated: bool = True, count: int = 1) -> list[str]:
    """Makes torch say that it has an Orin; returns what is asked of the GPU from then on."""
    asked: list[str] = []
    properties = SimpleNamespace(multi_processor_count=8, is_integrated=int(is_integrated))
    answers = {
        "is_available": True,
        "device_count": count,
        "get_device_name": ORIN["name"],
        "get_device_capability": ORIN["capability"],
        "get_device_properties": properties,
        "get_arch_list": ["sm_87"],
        "is_bf16_supported": True,
        "mem_get_info": (ORIN["free"], ORIN["total"]),
        "memory_reserved": ORIN["reserved"],
        "memory_allocated": ORIN["allocated"],
        "synchronize": None,
        "empty_cache": None,
    }

    def tell(name: str, answer: object) -> None:
        def told(*args: object, **options: object) -> object:
            asked.append(name)
            return answer

        patch.setattr(torch.cuda, name, told)

    for name, answer in answers.items():
        tell(name, answer)
    patch.setattr(torch.version, "cuda", "12.6")
    patch.setattr(accelerator, "GPU_FILES", ("/dev/null",))
    return asked


class FakeGpu(Accelerator):
    """Looks like a GPU from outside and computes on the CPU; counts what it is asked."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.is_cpu = False
        self.waits = 0
        self.given_back = 0

    @property
    def name(self) -> str:
        return "Made-up GPU"

    @property
    def capability(self) -> tuple[int, int]:
        return 8, 7

    def wait(self) -> None:
        self.waits += 1

    def give_back(self) -> None:
        self.given_back += 1


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
