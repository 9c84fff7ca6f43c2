"""Reading the modules of a drafter: their config, and their values from its own files and its target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flowspec.errors import InputError
from flowspec.model.bridge import read_into, tensor_of
from flowspec.model.files import ModelFiles
from flowspec.model.support import family_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import embedding_name


def built_config(build: Callable[[], Any], drafter: str) -> Any:
    """A transformers config; raises `InputError` for what its class does not take, `drafter` being what it is
    called."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - transformers lets out whatever it meets in a broken file
        raise InputError(
            f"cannot read the config.json of {drafter}: {' '.join(str(error).split()):.200}"
        ) from None


def fill(
    module: nn.Module,
    own: Tensors,
    dtype: torch.dtype,
    device: torch.device,
    *,
    prefix: str = "",
    renamed: Mapping[str, str] | None = None,
    others: Tensors | None = None,
    shared: Mapping[str, str] | None = None,
) -> None:
    """Gives every parameter and buffer its values, floating ones in `dtype`.

    They have the module's names behind a `prefix`, or `renamed` ones; those that are `shared` are `others`,
    by the names there. Raises `InputError` for one that is missing or of another shape.
    """
    renamed, shared = renamed or {}, shared or {}
    for name, value in module.state_dict(keep_vars=True).items():
        kind = dtype if value.dtype.is_floating_point else value.dtype
        values = torch.empty(value.shape, dtype=kind, device=device)
        if others is not None and name in shared:
            read_into(others, shared[name], values)
        else:
            read_into(own, prefix + renamed.get(name, name), values)
        path, _, leaf = name.rpartition(".")
        is_weight = isinstance(value, nn.Parameter)
        setattr(
            module.get_submodule(path),
            leaf,
            nn.Parameter(values, requires_grad=False) if is_weight else values,
        )


def embedding_rows(target: ModelFiles, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """`rows_of` the target's embedding."""
    config = target.config()
    name = embedding_name(config, family_of(config, target.model), tensors)
    return rows_of(tensors, name, (config.vocab_size, config.hidden_size), dtype)


def rows_of(tensors: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A table of which rows are to be taken: over the mapped file, which needs no memory, or where the file's
    numbers are wider, in `dtype`."""
    table = tensor_of(tensors.load(name, shape))
    return table.to(dtype) if table.element_size() > dtype.itemsize else table
