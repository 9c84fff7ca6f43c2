"""From files to what the planner computes with: a model's weights, and what chat's head and daemons need of
them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowspec.draft.catalogue import published_acceptance
from flowspec.draft.registry import WITHOUT_TENSORS, plan_drafter
from flowspec.errors import InputError
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles
from flowspec.model.joined_tensors import TABLE
from flowspec.plan.memory import (
    PROCESS_BYTES,
    FiledBytes,
    ModelWeights,
    weights_of,
)
from flowspec.plan.shape import ModelShape
from flowspec.plan.sites import PlannedDrafter, PlanRequest
from flowspec.runtime.cluster_file import HEAD

TYPICAL_CONTEXT_MAX = 512


def typical_context(context: int) -> int:
    """Tokens before an average one, where so many are the most."""
    return min(TYPICAL_CONTEXT_MAX, context // 2)


def model_weights(files: ModelFiles, shape: ModelShape) -> ModelWeights:
    """Weights of a model's parts: counted in its files where these are here, else as its shape says."""
    return weights_of(shape) if files.folder is None else counted_weights(files, shape)


def counted_weights(files: ModelFiles, shape: ModelShape) -> ModelWeights:
    """Weights of a model's parts by the headers of its files; nothing is loaded."""
    tensors = files.tensors()
    tables = {name for name, layer in _decoders(files) if layer is not None and name.endswith(TABLE)}
    layers, others = _sums(files, lambda name: 0 if name in tables else tensors.element_count(name))
    if lacking := {*range(shape.layers)} - layers.keys():
        stated = "block_count" if files.gguf else "num_hidden_layers"
        raise InputError(
            f"model {files.model!r}: {stated}: expected as many layers as are in its files, got "
            f"{shape.layers}; layer {min(lacking)} is not there; fetch or convert the model again"
        )
    known = weights_of(shape)
    embedding = others["embed_tokens"] or known.embedding
    return ModelWeights(
        layer=max(layers.values(), default=known.layer),
        filed=_filed(files, shape.is_tied) if files.is_packed else None,
        embedding=embedding,
        head=embedding if shape.is_tied else others["lm_head"] or embedding,
        norm=others["norm"] or known.norm,
        table=max(map(tensors.element_count, tables), default=0),
        is_tied=shape.is_tied,
    )


def _decoders(files: ModelFiles) -> Iterator[tuple[str, int | None]]:
    """The tensors of a decoder, with the layer that each belongs to; not those of other parts beside it, nor
    of layers behind the last one, which guess further tokens."""
    names, raw = files.tensors(), files.raw_config()
    root = check_family(raw, files.model).root(names)
    for name in names:
        found = re.match(rf"{re.escape(root.prefix)}layers\.(\d+)\.", name)
        if found and int(found[1]) >= raw["num_hidden_layers"]:
            continue
        if found or name == root.lm_head or name.startswith(root.prefix):
            yield name, int(found[1]) if found else None


def _sums(files: ModelFiles, size_of: Callable[[str], int]) -> tuple[Counter[int], Counter[str]]:
    """The sizes of a decoder's layers, and of its other parts by name."""
    layers, others = Counter[int](), Counter[str]()
    for name, layer in _decoders(files):
        if layer is None:
            others[name.removesuffix(".weight").rpartition(".")[2]] += size_of(name)
        else:
            layers[layer] += size_of(name)
    return layers, others


def _filed(files: ModelFiles, is_tied: bool) -> FiledBytes:
    layers, others = _sums(files, files.filed_sizes().__getitem__)
    embedding = others["embed_tokens"]
    head = embedding if is_tied else others["lm_head"]
    return FiledBytes(layer=max(layers.values(), default=0), embedding=embedding, head=head)


def enough_bytes(request: PlanRequest) -> int:
    """What no device of a plan can take more than: all layers, the drafter, and the processes of a stage and
    of the head."""
    return 2 * PROCESS_BYTES + max(
        request.stage_memory(precision, request.shape.layers, first=True, last=True).total_bytes
        + request.drafter_bytes(precision)
        for precision in request.precisions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInputs:
    """What the planner computes with of the drafters by their names; `head_drafts` where the head's machine
    computes for one, `is_published` where the acceptance is that which is published for the model."""

    planned: PlannedDrafter | None
    head_drafts: bool
    is_published: bool = False


def drafter_inputs(
    names: Sequence[str], placed: Mapping[str, str], shape: ModelShape, *, may_fetch: bool = True
) -> DrafterInputs:
    """Of drafters, of which the cluster file gives those that are `placed` a device (or the head) each; the
    first at the head counts."""
    if not names:
        return DrafterInputs(planned=None, head_drafts=False)
    here = [name for name in names if placed.get(name, HEAD) == HEAD]
    name = (here or names)[0]
    planned = plan_drafter(name, shape, may_fetch=may_fetch)
    if not here:
        planned = replace(planned, shape=None)  # it costs neither the head nor a stage anything
    published = published_acceptance(name, shape.name)
    if published is not None:
        planned = replace(planned, acceptance=published)
    return DrafterInputs(
        planned=planned,
        head_drafts=any(name not in WITHOUT_TENSORS for name in here),
        is_published=published is not None,
    )
