"""Giving the modules of a drafter their values, from its own files and its target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from flowspec.model.files import ModelFiles
from flowspec.model.support import family_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import embedding_name


def fill(
    module: nn.Module,
    tensors: Tensors,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    renamed: Mapping[str, str],
) -> None:
    """Gives every parameter and buffer its values, floating ones in `dtype`; `renamed` says which have other
    names in the files. Raises `InputError` for one that is missing or of another shape."""
    for name, value in module.state_dict(keep_vars=True).items():
        own = dtype if value.dtype.is_floating_point else value.dtype
        values = torch.empty(value.shape, dtype=own, device=device)
        tensors.copy_into(prefix + renamed.get(name, name), values)
        path, _, leaf = name.rpartition(".")
        is_weight = isinstance(value, nn.Parameter)
        setattr(
            module.get_submodule(path),
            leaf,
            nn.Parameter(values, requires_grad=False) if is_weight else values,
        )
    tensors.close()


def embedding_rows(target: ModelFiles, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """The target's embedding `[vocabulary, hidden]`, of which rows are to be taken: over the mapped file,
    which needs no memory, or where the file's numbers are wider, in `dtype`."""
    config = target.config()
    name = embedding_name(config, family_of(config, target.model), tensors)
    table: torch.Tensor = tensors.load(name, (config.vocab_size, config.hidden_size))
    return table.to(dtype) if table.element_size() > dtype.itemsize else table
