"""From files to what the planner reckons with: a model's weights, and what chat's head and daemons need of
them."""

from __future__ import annotations

import re
from collections import Counter

from flowspec.model.files import ModelFiles
from flowspec.plan.memory import ModelWeights, drafter_memory, stage_memory, weights_of
from flowspec.plan.shape import ModelShape
from flowspec.plan.sites import PlanRequest, process_bytes

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
    layers: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for name in files.weight_map():
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if found:
            layers[int(found[1])] += tensors.element_count(name)
        else:
            others[name.removesuffix(".weight").rpartition(".")[2]] += tensors.element_count(name)
    known = weights_of(shape)
    embedding = others["embed_tokens"] or known.embedding
    return ModelWeights(
        layer=max(layers.values(), default=known.layer),
        embedding=embedding,
        head=embedding if shape.is_tied else others["lm_head"] or embedding,
        norm=others["norm"] or known.norm,
        is_tied=shape.is_tied,
    )


def enough_bytes(wish: PlanRequest) -> int:
    """What no device of a plan can take more than: all layers, the drafter, and the processes of a stage and
    of the head."""
    found = []
    for precision in wish.precisions:
        whole = stage_memory(
            wish.shape,
            wish.weights,
            precision,
            wish.shape.layers,
            first=True,
            last=True,
            context=wish.context,
            users=wish.users,
        )
        size = whole.total_bytes + process_bytes(2)
        if wish.drafter is not None and wish.drafter.shape is not None:
            size += drafter_memory(
                wish.drafter.shape, precision, context=wish.context, users=wish.users
            ).total_bytes
        found.append(size)
    return max(found)
