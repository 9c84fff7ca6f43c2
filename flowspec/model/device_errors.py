"""What errors of torch and CUDA mean; only their text tells. Imports nothing: who catches one may have no torch."""

from __future__ import annotations

_NO_MEMORY = (
    "allocate",  # torch's own: "can't allocate memory", "Tried to allocate 20.00 MiB"
    "out of memory",  # CUDA's
    "cublas_status_alloc_failed",
    "nvml_success == r",  # torch's allocator on Jetsons, where it cannot ask how much is free (pytorch/pytorch#185240)
    "nvmapmemalloc",  # a Jetson's driver
)
_LOST = (
    "illegal memory access",
    "illegal instruction",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ecc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not to be had, of a processor or a GPU."""
    return isinstance(error, MemoryError) or _says(error, _NO_MEMORY)


def is_gpu_lost(error: BaseException) -> bool:
    """Whether a GPU takes no more work from this process: after these errors every call fails, until it is started again."""
    return _says(error, _LOST)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)
