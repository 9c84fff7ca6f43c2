"""The precisions that a model runs in, by name: those of its weights, and what its activations are then."""

from __future__ import annotations

ACTIVATIONS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "bfloat16",
    "int4": "bfloat16",
}
"""The dtype of hidden states, keys and values, and whatever else is no weight of a linear layer."""
