"""Real slices of small checkpoints behind the stages of a pipeline in one process, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flowspec.bench.faithfulness import check
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.core.stage.events import ClearSlots, CloseCache, JobPart, OpenCache, RunLayers
from flowspec.draft.protocol import Drafter
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.quantised import PanelInt4Linear, PlainInt8Linear, QuantisedLinear, quantise
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep
from tests.pipeline import Pipeline

CPU = torch.device("cpu")


PLAIN_LINEARS: dict[str, type[QuantisedLinear]] = {"int8": PlainInt8Linear, "int4": PanelInt4Linear}
"""Those for CPUs that need no kernel but float32's."""


def load(folder: Path, cuts: list[int], dtype: str = "float32", cache: str = CACHE_AUTO) -> list[Slice]:
    """A slice from each cut to the next."""
    files = ModelFiles(str(folder))
    spans = [Span(first=a, end=b, count=cuts[-1]) for a, b in itertools.pairwise(cuts)]
    return [Slice.load(files, span, dtype, CPU, cache=cache) for span in spans]


def load_stages(folder: Path, stages: int, dtype: str = "float32", cache: str = CACHE_AUTO) -> list[Slice]:
    """The whole model in so many slices, the last ones larger where they cannot be equal."""
    count = ModelFiles(str(folder)).raw_config()["num_hidden_layers"]
    return load(folder, [stage * count // stages for stage in range(stages + 1)], dtype, cache)


def assert_faithful(folder: Path, dtype: str) -> None:
    """The whole model as one slice computes what transformers computes, but for rounding."""
    files = ModelFiles(str(folder))
    assert check(files, dtype, StepByStep.load(files, dtype)).faults == []


def pipeline(slices: list[Slice], head: HeadCore, drafters: Sequence[Drafter] = ()) -> Pipeline:
    def on_cache(stage: int, command: OpenCache | ClearSlots | CloseCache) -> None:
        if isinstance(command, OpenCache):
            slices[stage].open_cache(command.request, command.slots, command.window_slots, command.copied)
        elif isinstance(command, ClearSlots):
            slices[stage].clear_slots(command)
        else:
            slices[stage].close_cache(command.request)

    def run_layers(stage: int, job: RunLayers, payload: Any) -> tuple[Any, ...]:
        return slices[stage].run(job, payload)

    return Pipeline(head, run_layers, len(slices), on_cache, drafters=drafters)


def chain(part: Slice, request: int, tokens: torch.Tensor) -> RunLayers:
    """A job that runs tokens as one text."""
    count = len(tokens)
    part.open_cache(request, 100)
    rows = JobPart(
        request=request,
        slots=np.arange(count),
        tokens=tokens.numpy(),
        positions=np.arange(count),
        key_positions=np.arange(count, dtype=np.int32),
        visible=np.tril(np.ones((count, count), dtype=bool)),
        sampled=np.ones(count, dtype=bool),
        sampling=Sampling(),
    )
    return RunLayers(job=0, parts=(rows,), payload=None, rows=tuple(range(count)))


def packed_layer(weight: torch.Tensor, linear: type[QuantisedLinear]) -> nn.Linear:
    """A packed layer with a weight, and no bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    quantise(layer, weight, linear)
    return layer
