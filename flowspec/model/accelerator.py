"""What computes: the CPU, or a GPU through torch and CUDA. The only file that asks `torch.cuda`; torch is
imported where there is a GPU. `flowspec doctor --local 1` measures it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from flowspec.errors import InputError, first_line
from flowspec.extras import how_to_get, imported, missing_part
from flowspec.host_memory import NOTHING, host_memory
from flowspec.model.arithmetic import compiled

log = logging.getLogger("flowspec.kernels")

GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg")
"""One is there where a driver has a GPU: servers', Jetsons' of either kind, and Windows' in its Linux."""
_IMPORTS = threading.RLock()


def find(name: str) -> Accelerator:
    """`cpu`, `cuda` (the first GPU), `cuda:N`; `auto` is the first GPU where there is one that torch can use,
    else the CPU. Raises `InputError` for another name, and for a GPU that cannot be used, with the reason."""
    if name == "cpu" or (name == "auto" and not has_driver()):
        return Accelerator()
    if name == "auto" and (why := absence()):
        _warn_once(why)
        return Accelerator()
    kind, _, number = "cuda:0".partition(":") if name in ("auto", "cuda") else name.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise InputError(f"--device: expected auto, cpu or cuda:N, got {name!r}")
    imported("torch")
    if why := absence(int(number)):
        advice = "use --device cpu, or a torch for this machine's GPU (docs/devices.md)"
        raise InputError(f"--device {name}: {why}; {advice}")
    return Accelerator(int(number))


@functools.cache
def _warn_once(why: str) -> None:
    log.warning("the driver of a GPU is here, but the CPU computes: %s", why)


def has_driver() -> bool:
    """Whether there may be a GPU."""
    return any(Path(name).exists() for name in GPU_FILES)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Names of transformers are taken within: by one thread at a time, since it imports the modules behind
    them when they are asked for first, and another thread may find such a module half there. And without
    torch where nothing needs it, which costs 200 MiB and a second wherever it is installed."""
    with _IMPORTS:
        if hides := "torch" not in sys.modules and not has_driver():
            sys.modules["torch"] = None  # type: ignore[assignment]
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is not there
        try:
            yield
        except ModuleNotFoundError as error:
            raise missing_part(error) or error from None
        finally:
            if hides:
                del sys.modules["torch"]


def absence(index: int = 0) -> str:
    """Why torch cannot use this GPU; empty where it can."""
    if importlib.util.find_spec("torch") is None:
        return f"torch is not installed; {how_to_get('gpu')}"
    torch = imported("torch")
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        text = f"this torch ({torch.__version__}, CUDA {torch.version.cuda}) finds no GPU"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # says which of driver, GPU and rights is missing
            return f"{text}: {first_line(error)}"
        return text
    count = torch.cuda.device_count()
    return "" if index < count else f"expected one of the {count} CUDA devices of this machine"


def accelerator_of(device: str) -> Accelerator:
    """By its name. Raises `InputError` for a device that FlowSpec does not know."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise InputError(f"expected a CPU or CUDA device, got {device}")
    return Accelerator(None if kind == "cpu" else int(number or 0))


@functools.cache
def compute_precisely() -> None:
    """Products of float32 in float32, and sums of 16-bit products, too.

    NVIDIA's containers switch TF32 on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE); of torch's settings this one works
    in all versions. Partial sums in 16 bits are on by default.
    """
    torch = imported("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch ask for a way that older ones do not have
        torch.set_float32_matmul_precision("highest")
    products = torch.backends.cuda.matmul
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_bf16_reduced_precision_reduction = False
    if hasattr(products, "allow_fp16_accumulation"):  # since torch 2.7
        products.allow_fp16_accumulation = False


class Accelerator:
    """The processor itself, or the GPU of an `index`, which computes precisely."""

    def __init__(self, index: int | None = None) -> None:
        self.is_cpu = index is None
        """Its weights are then part of this process; calls of a GPU return before their work is done."""
        self.device = "cpu" if index is None else f"cuda:{index}"  # as torch calls it, too
        self._cuda = None
        if index is not None:
            self._cuda = imported("torch").cuda
            compute_precisely()

    @property
    def name(self) -> str:
        return str(self._cuda.get_device_name(self.device)) if self._cuda else f"{platform.machine()} CPU"

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 is worth measuring: on CPUs it always is, a GPU may only emulate it."""
        return self._cuda is None or bool(self._cuda.is_bf16_supported(including_emulation=False))

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA's number of what a GPU can do; zeros for a CPU."""
        major, minor = self._cuda.get_device_capability(self.device) if self._cuda else (0, 0)
        return int(major), int(minor)

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the processor's, as on a Jetson."""
        properties = self._cuda.get_device_properties(self.device) if self._cuda else None
        return bool(getattr(properties, "is_integrated", self.is_cpu))

    def total_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self.device)[1]) if self._cuda else host_memory().total

    def free_bytes(self, promised: Mapping[int, int] = NOTHING) -> int:
        """What is to be had of it now; what torch keeps for later counts as free. Where it is the processor's
        memory, less what is `promised` to other processes (`memory_claims.py`), and by what the system says:
        CUDA counts files in memory, from which weights are read, as taken."""
        if not self._cuda:
            return host_memory(promised=promised).available
        free, total = self._cuda.mem_get_info(self.device)
        kept = self._cuda.memory_reserved(self.device) - self._cuda.memory_allocated(self.device)
        if self.shares_memory:
            free = min(total, max(free, host_memory(promised=promised).available))
        return int(free + kept)

    def taken_bytes(self) -> int:
        if self._cuda:
            return int(self._cuda.memory_allocated(self.device))
        return int(psutil.Process().memory_info().rss)

    def wait(self) -> None:
        if self._cuda:
            self._cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Lets others have the memory that torch keeps for later."""
        if self._cuda:
            self._cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        """What a report tells of it: versions, sizes, what it can do."""
        found = {"name": self.name, "total_bytes": self.total_bytes(), "threads": compiled.threads()}
        if not self._cuda:
            return found
        torch = imported("torch")
        cudnn = torch.backends.cudnn.version()
        return found | {
            "capability": ".".join(map(str, self.capability)),
            "built_for": list(self._cuda.get_arch_list()),
            "processors": int(self._cuda.get_device_properties(self.device).multi_processor_count),
            "shares_memory": self.shares_memory,
            "has_bfloat16": self.has_bfloat16,
            "cuda": str(torch.version.cuda),
            "cudnn": "" if cudnn is None else str(cudnn),
        }


# -------------------------------------------------------------------- what errors of torch and CUDA mean

_NO_MEMORY = (
    "allocate",  # torch's own: "can't allocate memory", "Tried to allocate 20.00 MiB"; the system's
    "out of memory",  # CUDA's
    "cublas_status_alloc_failed",
    "nvml_success == r",  # torch's allocator on Jetsons, where it cannot ask what is free (pytorch#185240)
    "nvmapmemalloc",  # a Jetson's driver
)
_NO_MEMORY_TO_IMPORT = ("memoryerror", "memory runs out", "bad_alloc", "failed to map segment")
_LOST = (
    *("illegal memory access", "illegal instruction", "device-side assert", "misaligned address"),
    *("unspecified launch failure", "launch timed out", "uncorrectable ecc"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not to be had, of a processor or a GPU."""
    return isinstance(error, MemoryError) or _says(error, _NO_MEMORY)


def tells_of_memory(text: str) -> bool:
    """Whether a process that ended with this text had too little memory, to import what it needs."""
    return any(word in text.lower() for word in (*_NO_MEMORY, *_NO_MEMORY_TO_IMPORT))


def is_gpu_lost(error: BaseException) -> bool:
    """Whether a GPU takes no more work from this process: every call fails, until that is started again."""
    return _says(error, _LOST)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
