"""Real slices of small checkpoints behind the stages of a pipeline in one process, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.bench import faithfulness
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.core.stage.events import ClearSlots, CloseCache, JobPart, OpenCache, RunLayers
from flowspec.draft.base import Drafter
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import F32, I64, Array
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep
from flowspec.model.weights import Span
from flowspec.runtime.loading import slice_memory
from tests.nightly import NIGHT
from tests.pipeline import Pipeline

CPU = "cpu"


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """So many compute, for a while."""
    before = compiled.threads()
    compiled.use_threads(count)
    try:
        yield
    finally:
        compiled.use_threads(before)


def load(folder: Path, cuts: list[int], dtype: str = "float32", cache: str = CACHE_AUTO) -> list[Slice]:
    """A slice from each cut to the next."""
    files = ModelFiles(str(folder))
    spans = [Span(first=a, end=b, count=cuts[-1]) for a, b in itertools.pairwise(cuts)]
    return [Slice.load(files, span, dtype, cache=cache) for span in spans]


def load_stages(folder: Path, stages: int, dtype: str = "float32", cache: str = CACHE_AUTO) -> list[Slice]:
    """The whole model in so many slices, the last ones larger where they cannot be equal."""
    count = ModelFiles(str(folder)).raw_config()["num_hidden_layers"]
    return load(folder, [stage * count // stages for stage in range(stages + 1)], dtype, cache)


def assert_faithful(folder: Path, dtype: str, whole: Slice | None = None) -> None:
    """The whole model as one slice computes what transformers computes, but for rounding."""
    files = ModelFiles(str(folder))
    alone = StepByStep.load(files, dtype) if whole is None else StepByStep(whole)
    with pytest.MonkeyPatch.context() as patch:
        if not NIGHT:  # of a shorter text chance makes more
            patch.setattr(faithfulness, "TOKENS", 300)
            patch.setattr(faithfulness, "PERPLEXITY_LIMIT", 0.012)
        assert faithfulness.check(files, dtype, alone)["faults"] == []


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


def part_of(
    request: int, tokens: Sequence[int], parents: Sequence[int] = (), *, first: int = 0, **others: Any
) -> JobPart:
    """Rows of a tree behind `first` tokens that are there, of a chain without `parents`: row by row what each
    stands below, -1 for those first ones. A row's slot is its number; `others` take the place of fields."""
    count = len(tokens)
    visible = np.zeros((count, first + count), dtype=bool)
    for row, above in enumerate(parents or range(-1, count - 1)):
        visible[row] = visible[above] if above >= 0 else np.arange(first + count) < first
        visible[row, first + row] = True
    positions = visible.sum(axis=1) - 1
    rows = JobPart(
        request=request,
        slots=np.arange(first, first + count),
        tokens=np.array(tokens, dtype=np.int64),
        positions=positions,
        key_positions=np.concatenate([np.arange(first), positions]).astype(np.int32),
        visible=visible,
        sampled=np.ones(count, dtype=bool),
        sampling=Sampling(),
    )
    return replace(rows, **others)


def job_of(*parts: JobPart) -> RunLayers:
    """A job of all rows of these."""
    count = sum(len(part.slots) for part in parts)
    return RunLayers(job=0, parts=parts, payload=None, rows=tuple(range(count)))


def chain(part: Slice, request: int, tokens: I64) -> RunLayers:
    """A job that runs tokens as one text."""
    part.open_cache(request, 100)
    return job_of(part_of(request, tokens.tolist()))


def logits_of(slices: Sequence[Slice], tokens: I64) -> F32:
    """What a text of these tokens comes to, row by row, through a model's slices."""
    states: Array | None = None
    for part in slices:
        _, states = part.forward(chain(part, 1, tokens), states)
    return slices[-1].logits(states)


def plain_logits(folder: Path, tokens: I64, dtype: torch.dtype = torch.float32, **options: Any) -> F32:
    """The same by transformers."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    with torch.inference_mode():
        found: F32 = plain(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
    return found


def load_foretold(files: ModelFiles, span: Span, dtype: str = "float32") -> Slice:
    """A slice that takes as much memory as was foretold."""
    part = Slice.load(files, span, dtype)
    assert part.weight_bytes == slice_memory(files, span, dtype, 100).weight_bytes
    return part


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes a checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
