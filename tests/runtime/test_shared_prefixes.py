"""Prompts that begin alike, over real daemons: what is shared is computed once, and answers are those of one
process that shares nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from flowspec.core.head.sharing import BLOCK
from flowspec.core.protocol.messages import Sampling
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.answer import Answer

pytestmark = pytest.mark.usefixtures("lent")
SYSTEM = list(range(300, 300 + 2 * BLOCK + 5))
NEW_TOKENS = 12


def test_what_is_shared_is_computed_once_and_changes_no_answer() -> None:
    asked: list[tuple[list[int], int, Answer]] = []
    with LLM(local=2, dtype="bfloat16", cache="q8_0", context=400) as llm:
        stop_ids = llm.recommended.stop_ids

        def ask(prompt: list[int], seed: int) -> Answer:
            """Half of them draw the likeliest tokens."""
            found = llm.generate(
                prompt, max_new_tokens=NEW_TOKENS, temperature=float(seed % 2), top_p=1, top_k=0, seed=seed
            )
            asked.append((prompt, seed, found))
            return found

        prompts = [[*SYSTEM, 500 + client, *range(600, 620)] for client in range(3)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, prompts, range(3)))
        reused = sorted(answer.reused_tokens for answer in answers)
        assert reused == [0, *[2 * BLOCK] * 2], "one has read it for all"
        goes_on = [*prompts[0], *answers[0].token_ids]
        edited = ask([*goes_on[: len(SYSTEM)], *range(700, 700 + 2 * BLOCK)], 7)
        assert edited.reused_tokens == 2 * BLOCK
        branch = ask([*SYSTEM, *range(700, 700 + BLOCK), 9], 8)
        assert branch.reused_tokens == 3 * BLOCK, "of the one before"
        own = ask([*goes_on, 8, 9], 10)
        assert own.reused_tokens >= len(prompts[0]) - 1, "nobody took it"
    alone = StepByStep.load(ModelFiles(BUNDLED), "bfloat16", cache="q8_0")
    for prompt, seed, answer in asked:
        sampling = Sampling(temperature=float(seed % 2), seed=seed)
        expected = alone.generate(tuple(prompt), sampling, NEW_TOKENS, stop_ids)
        assert answer.token_ids == tuple(token for token in expected if token not in stop_ids)


def test_a_head_that_reads_features_guesses_behind_what_was_copied() -> None:
    """It gets those of the rows that were not run again from whom they were copied."""
    # a method that guesses whatever the clock says: on a busy machine `continuous` may rest
    with LLM(local=2, dtype="float32", context=400, drafter="eagle", method="tree-sd") as llm:
        prompts = [[*SYSTEM, 500 + client, *range(600, 640)] for client in range(2)]
        answers = [llm.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=0) for prompt in prompts]
        stop_ids = llm.recommended.stop_ids
    assert [answer.reused_tokens for answer in answers] == [0, 2 * BLOCK]
    assert all(answer.statistics["nodes_drafted"] >= NEW_TOKENS // 2 for answer in answers)
    alone = StepByStep.load(ModelFiles(BUNDLED), "float32")
    expected = alone.generate(tuple(prompts[1]), Sampling(), NEW_TOKENS, stop_ids)
    assert answers[1].token_ids == tuple(token for token in expected if token not in stop_ids)


def test_nothing_is_shared_where_that_is_switched_off() -> None:
    with LLM(local=1, context=400, enable_prefix_caching=False) as llm:
        prompts = [[*SYSTEM, 500 + client, *range(600, 700)] for client in range(2)]
        answers = llm.generate(prompts, max_new_tokens=2)
        assert [answer.reused_tokens for answer in answers] == [0, 0]
