"""No bit of any logit depends on what layers with a window gave back, nor on what was copied of another
conversation.

Real slices behind the stages of a pipeline, dialogues that go on, back and apart, trees of guesses: each
logit is compared with that of one slice that holds all and is given one token of one text at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import make_method
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.model_spec import Heads, SlidingWindow, window_for
from flowspec.core.stage.events import ClearSlots, CloseCache, JobPart, OpenCache, RunLayers
from flowspec.core.stage.slots import CacheRoom
from flowspec.draft.language import LanguageModelDrafter
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep
from flowspec.model.weights import Span
from flowspec.plan.memory import stage_memory
from flowspec.plan.shape import shape_of
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.plan_inputs import counted_weights
from tests.checkpoints import VOCABULARY_SIZE
from tests.model.slices import CPU, load_stages, pipeline
from tests.nightly import nightly
from tests.pipeline import Pipeline, ask

GIVEN_BACK = [
    ("mistral-sliding", "bfloat16", "q8_0"),
    ("qwen3.5", "float32", "auto"),
    ("gemma4", "bfloat16", "q8_0"),
    *nightly(
        [],
        [
            ("gemma2", "bfloat16", "q8_0"),
            ("gemma3-text", "float32", "auto"),
            ("phi3", "float32", "q8_0"),
            ("qwen2-sliding", "float16", "auto"),
            ("lfm2", "float32", "auto"),
            ("lfm2", "bfloat16", "q8_0"),
            ("mistral-sliding", "int8", "auto"),
            ("qwen3.5-text", "bfloat16", "q8_0"),
            ("gemma4", "float32", "auto"),
        ],
    ),
]
COPIED = [
    ("llama-grouped", "float32", "q8_0", 3),
    ("gemma4", "float32", "auto", 3),
    *nightly(
        [],
        [
            ("llama-grouped", "bfloat16", "auto", 3),
            ("qwen3", "bfloat16", "q8_0", 1),
            ("gemma2", "bfloat16", "q8_0", 3),
            ("gemma3-text", "float32", "auto", 3),
            ("lfm2", "bfloat16", "q8_0", 1),
            ("lfm2", "float32", "auto", 3),
            ("qwen3.5", "float32", "auto", 3),
            ("qwen3.5-text", "bfloat16", "q8_0", 3),
            ("gemma4", "bfloat16", "q8_0", 3),
        ],
    ),
]
TURNS = ((0, 30), (0, 20), (3, 5), (8, 0), (50, 20), (0, 15))
"""How many tokens the next question goes back, and how many are new."""
WITHOUT_THOUGHTS = ((2, 6), (1, 5), (0, 9))
"""The same of questions that go on where the answer before them began, or a little before."""


class Spy:
    """Keeps the logits of all rows that the last stage ran, by the path that each stands for."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = slices
        self.logits: dict[tuple[int, ...], bytes] = {}
        self.most_bytes = 0
        self._tokens: dict[tuple[int, int], int] = {}

    def run(self, stage: int, job: RunLayers, payload: Any) -> tuple[Any, ...]:
        part = self.slices[stage]
        if stage < len(self.slices) - 1:
            return part.run(job, payload)
        rows, states = part.forward(job, payload)
        logits = part.logits(states)
        paths = [path for each in job.parts for path in self._paths(each)]
        self.logits |= {paths[row]: found.tobytes() for row, found in zip(rows, logits, strict=True)}
        requests = [each for each in job.parts for _ in each.slots]
        drawn = [
            part._sampler(requests[row]).draw(logits[place], len(paths[row])) if job.sampled[row] else -1
            for place, row in enumerate(rows)
        ]
        return rows, states[:, :0], tuple(drawn)

    def opened(self, stage: int, command: OpenCache | ClearSlots | CloseCache) -> None:
        """Tells of a change of the caches: tokens that were copied stand in other slots, too."""
        if stage == len(self.slices) - 1 and isinstance(command, OpenCache) and command.copied is not None:
            copied = command.copied
            for slot, other in enumerate(copied.slots.tolist()):
                self._tokens[command.request, slot] = self._tokens[copied.source, other]

    def _paths(self, part: JobPart) -> list[tuple[int, ...]]:
        self._tokens |= {
            (part.request, slot): token
            for slot, token in zip(part.slots.tolist(), part.tokens.tolist(), strict=True)
        }
        paths = []
        for visible in part.visible:
            slots = np.flatnonzero(visible)
            slots = slots[np.argsort(part.key_positions[slots])]
            paths.append(tuple(self._tokens[part.request, slot] for slot in slots.tolist()))
        return paths


def begun(
    files: ModelFiles, dtype: str, cache: str, stages: int, context: int, **fields: Any
) -> tuple[HeadCore, Pipeline, Spy]:
    """A head of these fields before real slices, with a drafter of the same weights, and all that runs."""
    drafter = LanguageModelDrafter.load(files, "bfloat16", CPU, context=context, coupled=False)
    method = make_method("continuous", segment_nodes=6, width=3)
    traits = [DrafterTraits(context=drafter.context)]
    head = HeadCore(context=context, stage_count=stages, method=method, drafters=traits, **fields)
    slices = load_stages(Path(files.model), stages, dtype, cache)
    run, spy = pipeline(slices, head, [drafter]), Spy(slices)
    run.run_layers = spy.run
    return head, run, spy


def compare(spy: Spy, alone: StepByStep, path: tuple[int, ...]) -> int:
    """How many rows of this path have run, each with the bits of step-by-step decoding."""
    known = [spy.logits.get(path[:length]) for length in range(1, len(path) + 1)]
    for length, (found, expected) in enumerate(zip(known, alone.logits(path), strict=True), 1):
        assert found is None or found == expected.tobytes(), f"{length} tokens"
    return sum(found is not None for found in known)


@pytest.mark.parametrize(("name", "dtype", "cache"), GIVEN_BACK)
def test_no_bit_depends_on_what_was_given_back(
    name: str, dtype: str, cache: str, variant: Callable[[str], Path]
) -> None:
    files, rng = ModelFiles(str(variant(name))), random.Random(name)
    spec = files.spec
    tokens, has_states = max(spec.windows), any(spec.states)
    window = SlidingWindow(tokens=tokens, back=9, step=4, snapshot=6 if has_states else 0)
    head, run, spy = begun(files, dtype, cache, 3, 130, sliding_window=window)
    run.rng = rng
    texts: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    turns = [(False, *turn) for turn in TURNS] + [(True, *turn) for turn in WITHOUT_THOUGHTS if has_states]
    for number, (is_without, back, more) in enumerate(turns):
        for request in (1, 2):
            text = prompts[request] if is_without else texts.get(request, [])
            kept = text[: max(0, len(text) - back)]
            prompt = [*kept, *(rng.randrange(3, VOCABULARY_SIZE) for _ in range(more + request))]
            sampling = Sampling(temperature=rng.choice([0.0, 0.9]), seed=number)
            count = 25 if has_states and number + 1 >= len(TURNS) else rng.randrange(2, 9)
            run.give(ask(request, prompt, count, sampling=sampling))
            texts[request], prompts[request] = list(prompt), list(prompt)
        run.settle()
        for stage in run.stages:
            stage.validate()
        for request in texts:
            texts[request] += run.answers.pop(request)
    assert head.fired["read anew"], "somebody went back too far"
    assert head.fired["kept"], "somebody did not"
    assert all(stage.fired["given back"] for stage in run.stages)
    assert all((stage.fired["restored"] > 0) == has_states for stage in run.stages)
    alone = StepByStep.load(files, dtype, cache=cache)
    longest = sorted(spy.logits, key=len, reverse=True)
    paths = (longest[0], *rng.sample(sorted(spy.logits), nightly(0, 2)))
    assert sum(compare(spy, alone, path) for path in paths) > 50


@pytest.mark.parametrize(
    ("name", "first", "end", "cache"),
    [
        ("gemma3-text", 0, 3, "auto"),
        ("phi3", 2, 4, "q8_0"),
        ("lfm2", 1, 6, "q8_0"),
        ("qwen3.5", 1, 5, "auto"),
        ("qwen3.5-moe", 1, 5, "q8_0"),
        ("gemma4", 0, 4, "q8_0"),
        ("gemma4", 3, 6, "auto"),
        ("gemma4", 4, 7, "q8_0"),
    ],
)
def test_memory_is_foretold_to_the_byte(
    name: str, first: int, end: int, cache: str, variant: Callable[[str], Path]
) -> None:
    files = ModelFiles(str(variant(name)))
    spec, context = files.spec, 3072
    count = len(spec.layers)
    span, slots = Span(first=first, end=end, count=count), context + limits.TREE_NODES_MAX
    window = window_for(spec.windows, context, has_states=any(spec.states))
    assert window is not None
    part = Slice.load(files, span, "bfloat16", cache=cache)
    part.open_cache(1, slots, window.slots)
    assert part.opened_bytes == part.request_bytes(slots, window.slots) < slots * part.slot_bytes
    foretold = slice_memory(files, span, "bfloat16", context, cache=cache, window=window)
    assert part.opened_bytes == foretold.cache_bytes
    room = CacheRoom(
        slots=1,
        slot_bytes=part.slot_bytes,
        windowed_bytes=part.windowed_slot_bytes,
        state_bytes=part.state_bytes,
    )
    assert room.need(slots, window.slots) == foretold.cache_bytes, "as the head reckons"
    shape = shape_of(spec, name)
    own = shape, counted_weights(files, shape), "bfloat16", end - first
    planned = partial(stage_memory, *own, first=first == 0, last=end == count, context=context)
    assert planned(users=1, cache=cache, begin=first).cache_bytes == foretold.cache_bytes
    assert planned(users=1, cache=cache).cache_bytes >= foretold.cache_bytes, "wherever they are"
    with pytest.raises(InputError, match=f"a window of {window.tokens} positions, .*got 7 from the head"):
        slice_memory(files, span, "bfloat16", context, window=SlidingWindow(tokens=7))
    part._reserve(part._caches[1], slots, window.slots)
    whole_cache, windowed = part._caches[1]
    assert windowed is not None
    beyond = (windowed.slots - window.slots) * part.windowed_slot_bytes  # up to a whole vector of slots
    attending = [layer for layer, held in part._held.items() if isinstance(held, Heads)]
    for layer in attending:  # and of a value's numbers
        keys, values, _ = (whole_cache if layer in whole_cache else windowed).of(layer)
        beyond += values[..., keys.shape[2] :].nbytes
    assert part.cache_bytes - beyond == foretold.cache_bytes


BLOCK = 4
NEW_TOKENS = 9
SYSTEM = 40
"""Tokens that all dialogues begin with."""


def sampling_of(request: int) -> Sampling:
    """Half of them draw the likeliest tokens."""
    return Sampling(temperature=float(request % 2), seed=request)


@pytest.mark.parametrize(("name", "dtype", "cache", "stages"), COPIED)
def test_no_bit_depends_on_what_was_copied(
    name: str, dtype: str, cache: str, stages: int, variant: Callable[[str], Path]
) -> None:
    files = ModelFiles(str(variant(name)))
    spec, rng = files.spec, random.Random(f"{name} {dtype}")
    tokens, has_states = max(spec.windows), any(spec.states)
    window = (
        SlidingWindow(tokens=tokens, back=24, step=4, snapshot=6 if has_states else 0) if tokens else None
    )
    head, run, spy = begun(files, dtype, cache, stages, 150, sliding_window=window, prefix_block=BLOCK)
    run.rng = rng
    change, copied = run.on_cache, list[int]()

    def on_cache(stage: int, command: OpenCache | ClearSlots | CloseCache) -> None:
        spy.opened(stage, command)
        change(stage, command)
        if isinstance(command, OpenCache) and command.copied is not None:
            copied.append(len(command.copied.slots))

    run.on_cache = on_cache
    system = [rng.randrange(3, VOCABULARY_SIZE) for _ in range(SYSTEM)]
    prompts = {
        request: [*system, *(rng.randrange(3, VOCABULARY_SIZE) for _ in range(3 + request))]
        for request in range(1, 5)
    }
    answers = asked(run, prompts, range(1, 4))  # at once: two wait for the first to read
    in_use = [*prompts[1], *answers[1][:6], 5, 6]
    prompts |= {5: in_use, 6: [*prompts[2][:-1], 7], 1: [*prompts[1], *answers[1], 8, 9]}
    # While the first goes on: what branches off from it, an edited question, and a new dialogue.
    answers |= asked(run, prompts, (1, 5, 6, 4))
    for stage in run.stages:
        stage.validate()
    assert head.fired["copies"] >= (2 if window is not None else 4), "prompts were copied"
    assert len(copied) == head.fired["copies"] * stages
    assert all(count % BLOCK == 0 for count in copied)
    alone = StepByStep.load(files, dtype, cache=cache)
    compared = 0
    checked = nightly((1, 5), (1, 5, 6, 4))
    for request in checked:
        prompt, answer = tuple(prompts[request]), tuple(answers[request])
        assert answer == alone.generate(prompt, sampling_of(request), NEW_TOKENS, frozenset()), request
        compared += compare(spy, alone, (*prompt, *answer[:-1]))
    assert compared > len(checked) * NEW_TOKENS


def asked(run: Pipeline, prompts: dict[int, list[int]], requests: Iterable[int]) -> dict[int, list[int]]:
    """The answers to these prompts, which are asked at once."""
    for request in requests:
        run.give(ask(request, prompts[request], NEW_TOKENS, sampling=sampling_of(request)))
    run.settle()
    return {request: run.answers.pop(request) for request in requests}
