"""Prompts that begin with what another conversation has computed: the stages copy it, and no bit of any logit
changes by that, neither of the copy nor of what it was copied from.

Real slices behind the stages of a pipeline, with trees of guesses; each logit is compared with that of one
slice that is given one token of one text at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import make_method
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.sliding_window import SlidingWindow, states_of, windows_of
from flowspec.core.stage.events import ClearSlots, CloseCache, OpenCache
from flowspec.draft.language import LanguageModelDrafter
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from tests.model.slices import CPU, load_stages, pipeline
from tests.model.spy import Spy
from tests.pipeline import Pipeline, ask

CASES = [
    ("llama-grouped", "float32", "auto", 1),
    ("llama-grouped", "float32", "q8_0", 3),
    ("llama-grouped", "bfloat16", "auto", 3),
    ("qwen3", "bfloat16", "q8_0", 1),
    ("gemma3-text", "float32", "auto", 3),
    ("gemma2", "bfloat16", "q8_0", 3),
    ("lfm2", "float32", "auto", 3),
    ("lfm2", "bfloat16", "q8_0", 1),
    ("qwen3.5", "float32", "auto", 3),
    ("qwen3.5-text", "bfloat16", "q8_0", 3),
    ("gemma4", "float32", "auto", 3),
    ("gemma4", "bfloat16", "q8_0", 3),
]
BLOCK = 4
NEW_TOKENS = 9
SYSTEM = 40
"""Tokens that all dialogues begin with."""


def sampling_of(request: int) -> Sampling:
    """Half of them draw the likeliest tokens."""
    return Sampling(temperature=float(request % 2), seed=request)


@pytest.mark.parametrize(("variant", "dtype", "cache", "stages"), CASES)
def test_no_bit_depends_on_what_was_copied(
    variant: str,
    dtype: str,
    cache: str,
    stages: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = ModelFiles(str(make_variant(tmp_path_factory.mktemp(variant), variant)))
    config, rng = files.config(), random.Random(f"{variant} {dtype}")
    tokens, has_states = max(windows_of(config)), any(states_of(config))
    window = (
        SlidingWindow(tokens=tokens, back=24, step=4, snapshot=6 if has_states else 0) if tokens else None
    )
    drafter = LanguageModelDrafter.load(files, "bfloat16", CPU, context=150, coupled=False)
    head = HeadCore(
        context=150,
        stage_count=stages,
        method=make_method("continuous", segment_nodes=6, width=3),
        drafters=[DrafterTraits(context=drafter.context)],
        sliding_window=window,
        prefix_block=BLOCK,
    )
    slices = load_stages(Path(files.model), stages, dtype, cache)
    run, spy = pipeline(slices, head, [drafter]), Spy(slices)
    run.run_layers, run.rng = spy.run, rng
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
    for request in (1, 5, 6, 4):
        prompt, answer = tuple(prompts[request]), tuple(answers[request])
        assert answer == alone.generate(prompt, sampling_of(request), NEW_TOKENS, frozenset()), request
        path = (*prompt, *answer[:-1])
        for length, expected in enumerate(alone.logits(path), 1):
            if (found := spy.logits.get(path[:length])) is not None:
                assert found == expected.tobytes(), f"{length} tokens of request {request}"
                compared += 1
    assert compared > 4 * NEW_TOKENS


def asked(run: Pipeline, prompts: dict[int, list[int]], requests: Iterable[int]) -> dict[int, list[int]]:
    """The answers to these prompts, which are asked at once."""
    for request in requests:
        run.give(ask(request, prompts[request], NEW_TOKENS, sampling=sampling_of(request)))
    run.settle()
    return {request: run.answers.pop(request) for request in requests}
