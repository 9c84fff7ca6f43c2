"""What a daemon checks before it loads a slice: the device, the model's identity, and the memory."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from flowspec.core.cluster_messages import Assign
from flowspec.core.precision import ACTIVATIONS
from flowspec.errors import ClusterError, NoRoomError
from flowspec.model.files import ModelFiles, is_gguf
from flowspec.model.free_memory import free_bytes
from flowspec.model.kernels import packing_of
from flowspec.model.pieces import Pieces, Span, head_dim
from flowspec.model.quantised import LINEARS
from flowspec.model.slice import DTYPES
from flowspec.model.support import family_of
from flowspec.model.weights import SliceWeights, sorted_weights, weight_bytes
from flowspec.plan.memory import SliceMemory, cache_bytes, mib
from flowspec.runtime.weights.receive import Courier, ask_model, ask_tensors
from flowspec.runtime.weights.rounded import in_files
from flowspec.runtime.weights.store import WeightStore
from flowspec.runtime.weights.stored import StoredModel

CPU = torch.device("cpu")


def open_model(assign: Assign, *, is_served: bool) -> ModelFiles:
    """The model's files, checked to be the ones that the head means.

    Where the head would serve the slice, a GGUF file on the hub is not fetched: it comes whole or not at all.
    """
    files = ModelFiles(assign.model, may_fetch=not (is_served and is_gguf(assign.model)))
    found = files.fingerprint()
    if found != assign.fingerprint:
        raise ClusterError(f"model {assign.model!r} on this device ({found[:8]}) is not the head's ({assign.fingerprint[:8]})")
    _check_layers(files, assign)
    return files


def offered_model(assign: Assign, span: Span, courier: Courier, store: WeightStore) -> StoredModel:
    """The model as the head offers it, the tensors of the slice known but not there yet."""
    model = ask_model(assign, courier, store)
    _check_layers(model, assign)
    weights = slice_weights(model, span, assign.dtype, CPU)
    ask_tensors(model, sorted(in_files(model, (*weights.plain, *weights.packed))), courier)
    return model


def _check_layers(files: ModelFiles, assign: Assign) -> None:
    layer_count = files.config().num_hidden_layers
    if layer_count != assign.layer_count:
        raise ClusterError(f"model {assign.model!r} has {layer_count} layers, the head expects {assign.layer_count}")


def slice_weights(files: ModelFiles, span: Span, dtype: str, device: torch.device) -> SliceWeights:
    """The parameters of a slice, those that are packed and the others; nothing is loaded."""
    config = files.config()
    pieces = Pieces.build(config, family_of(config, files.model), span)
    return sorted_weights(pieces, files.tensors(), packing_of(dtype, device))


def slice_memory(files: ModelFiles, span: Span, dtype: str, context: int, device: torch.device | None = None) -> SliceMemory:
    """The memory of a slice on a device (None: on most), from file headers; nothing is loaded. A tied embedding counts once per slice."""
    config = files.config()
    pieces = Pieces.build(config, family_of(config, files.model), span)
    activations = DTYPES[ACTIVATIONS[dtype]]
    packing = LINEARS.get(dtype) if device is None else packing_of(dtype, device)
    return SliceMemory(
        weight_bytes=weight_bytes(pieces, files.tensors(), activations, packing),
        cache_bytes=cache_bytes(
            layers=span.end - span.first,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            context=context,
            element_bytes=activations.itemsize,
        ),
    )


def check_memory(
    files: ModelFiles, span: Span, assign: Assign, device: torch.device, limit_bytes: int | None, *, is_loaded: bool = False
) -> int:
    """Refuses a slice that does not fit, before anything of it is loaded; `is_loaded`: its weights are there already.

    Returns the bytes that are left for the caches of all requests.
    """
    need = slice_memory(files, span, assign.dtype, assign.context, device)
    if is_loaded:
        need = replace(need, weight_bytes=0)
    if limit_bytes is None:
        have = free_bytes(device)
    elif device.type == "cuda":
        have = min(free_bytes(device), limit_bytes)
    else:
        have = limit_bytes - psutil.Process().memory_info().rss
    if need.total_bytes > have:
        smaller = "give this device fewer layers" if assign.drafting is None else "give this device a smaller drafter"
        raise NoRoomError(
            f"layers {span.first} to {span.end - 1} need {mib(need.total_bytes)} (weights {mib(need.weight_bytes)}, "
            f"cache {mib(need.cache_bytes)} for {assign.context} tokens), but {mib(max(0, have))} are free here; "
            f"{smaller}, or use a smaller --context or --dtype"
        )
    return have - need.weight_bytes
