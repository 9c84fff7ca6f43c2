"""How libraries say that there is no memory left. Imports nothing: who catches such an error may have no torch."""

from __future__ import annotations

_WORDS = (
    "allocate",  # torch's own: "can't allocate memory", "Tried to allocate 20.00 MiB"
    "out of memory",  # CUDA's
    "cublas_status_alloc_failed",
    "nvml_success == r",  # torch's allocator on Jetsons, where it cannot ask how much is free (pytorch/pytorch#185240)
    "nvmapmemalloc",  # a Jetson's driver
)


def is_out_of_memory(error: BaseException) -> bool:
    """torch and CUDA report memory that is not to be had as a RuntimeError; only its text tells."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in text for word in _WORDS))
