"""What errors of torch and CUDA mean, of which only the text tells. Needs no torch itself."""

from __future__ import annotations

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
    text = text.lower()
    return any(word in text for word in (*_NO_MEMORY, *_NO_MEMORY_TO_IMPORT))


def is_gpu_lost(error: BaseException) -> bool:
    """Whether a GPU takes no more work from this process: every call fails, until that is started again."""
    return _says(error, _LOST)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)
