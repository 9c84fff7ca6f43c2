"""Which published files are an EAGLE head, told by the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterable

from flowspec.model.files import ModelFiles

LAYER = {"eagle": "layers.0", "eagle3": "midlayer"}
"""What the tensors of the one decoder layer begin with."""


def kind_of(tensor_names: Iterable[str]) -> str | None:
    """`eagle`, `eagle3`, or None for any other network."""
    names = set(tensor_names)
    layers = [kind for kind, prefix in LAYER.items() if any(name.startswith(f"{prefix}.") for name in names)]
    return layers[0] if "fc.weight" in names and len(layers) == 1 else None


def is_eagle(files: ModelFiles) -> bool:
    """Whether a folder holds an EAGLE head and not a model: by the tensors, for a head's config often looks
    like a model's. No weight is read."""
    return files.raw_config().get("num_hidden_layers") == 1 and kind_of(files.weight_map()) is not None
