"""The precisions that a model runs in, by name: what its weights take, and what its activations are then; and
how keys and values are held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What is true of a precision wherever it runs.

    `activations` is the dtype of hidden states between layers and of embeddings; within a layer numbers are
    float32 (on GPUs, products come in the dtype of weights). A weight takes `weight_bytes` and, with its part
    of a group's scale, `group_bytes` more (`model.rounding`). One that `is_unpacked` is multiplied in the
    fastest precision that the device has.
    `logits_off` is how far a logit may be from float32's, as a share of how far logits lie apart: four times
    what an x86 processor's kernels have.
    """

    activations: str
    weight_bytes: float
    group_bytes: float = 0.0
    logits_off: float


FILED = "gguf"
"""As a GGUF file packs its matrices, each in its own form."""
PRECISIONS = {
    "float32": Precision(activations="float32", weight_bytes=4.0, logits_off=0.001),
    "bfloat16": Precision(activations="bfloat16", weight_bytes=2.0, logits_off=0.25),
    "float16": Precision(activations="float16", weight_bytes=2.0, logits_off=0.04),
    # a scale for 32 inputs
    "int8": Precision(activations="bfloat16", weight_bytes=1.0, group_bytes=2.0 / 32, logits_off=0.6),
    "int4": Precision(activations="bfloat16", weight_bytes=0.5, group_bytes=2.0 / 32, logits_off=4.0),
    # where no file is known, as in the usual mix Q4_K_M
    FILED: Precision(activations="bfloat16", weight_bytes=0.5, group_bytes=0.106, logits_off=0.6),
}
OF_ANY_MODEL = tuple(name for name in PRECISIONS if name != FILED)
"""Those in which a model runs whatever files it has."""
ACTIVATIONS = {name: each.activations for name, each in PRECISIONS.items()}
PRECISION_BYTES = {name: each.weight_bytes for name, each in PRECISIONS.items()}
"""Of a weight."""


CACHE_AUTO, Q8_0 = "auto", "q8_0"
CACHES = (CACHE_AUTO, "float16", Q8_0)
"""How keys and values may be held: in float16 (`auto`: in float32 where that is the precision), or as levels
of 8 bits, where each 32 numbers of a key or a value are rounded alone (ggml's q8_0)."""
Q8_0_NUMBERS, Q8_0_STEP_BYTES = 32, 2


def cached_as(cache: str, precision: str) -> str:
    """The dtype of keys and values, or `q8_0`."""
    if cache != CACHE_AUTO:
        return cache
    return "float32" if precision == "float32" else "float16"


def cached_bytes(head_dim: int, held: str) -> int:
    """Of a key or a value of one head, held as `cached_as` says."""
    if held == Q8_0:
        return head_dim + Q8_0_STEP_BYTES * -(-head_dim // Q8_0_NUMBERS)
    return head_dim * int(PRECISION_BYTES[held])


def is_packed(precision: str) -> bool:
    """Whether the matrices of linear layers are packed, and nothing else is."""
    return ACTIVATIONS[precision] != precision


PACKED = tuple(filter(is_packed, PRECISIONS))
UNPACKED = tuple(name for name in PRECISIONS if name not in PACKED)
