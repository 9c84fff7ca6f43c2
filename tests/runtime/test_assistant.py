"""Real processes, Gemma 4 and its assistant: the target's features come from whichever device has the layers,
and answers are those of decoding step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.bench.exactness import Case, ClusterAnswer, judge
from flowspec.bench.outcome import EXACT
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from tests.draft.assistants import make_assistant

NEW_TOKENS = 24
METHODS = ("continuous", "tree-sd")
PROMPTS = {"short": (5, 6, 7), "long": tuple((17 * each) % VOCABULARY_SIZE for each in range(3, 50))}


@pytest.mark.parametrize(("dtype", "stages"), [("float32", 3), ("bfloat16", 2)])
def test_answers_with_an_assistant_are_exact(dtype: str, stages: int, tmp_path: Path) -> None:
    model = str(make_variant(tmp_path / "target", "gemma4"))
    drafter = str(make_assistant(tmp_path / "assistant"))
    limits = Limits(new_tokens_max=NEW_TOKENS, stop_ids=frozenset())
    found: list[ClusterAnswer] = []
    guessed = 0
    with open_cluster(ClusterOptions(model=model, dtype=dtype, local=stages, context=200)) as cluster:
        for method in METHODS:
            decoding = Decoding(method=method, drafters=(drafter,))
            with cluster.session(decoding, lambda text, share: None) as session:
                for name, prompt in PROMPTS.items():
                    for temperature in (0.0, 1.0):
                        sampling = Sampling(temperature=temperature, seed=4)
                        answer = session.submit(prompt, sampling, limits, request=session.head.new_request())
                        tokens = tuple(token for batch in answer for token in batch.tokens)
                        assert answer.end is not None
                        guessed += answer.end.statistics["nodes_sent"] - answer.end.statistics["segments"]
                        found.append(
                            ClusterAnswer(
                                case=Case(prompt_id=name, prompt=prompt, sampling=sampling),
                                method=method,
                                drafter="assistant",
                                stages=stages,
                                new_tokens_max=NEW_TOKENS,
                                tokens=tokens,
                            )
                        )
    plain = StepByStep.load(ModelFiles(model), dtype)
    assert [verdict for one in found if (verdict := judge(plain, one, limits.stop_ids)).kind != EXACT] == []
    assert guessed > NEW_TOKENS, f"guesses took part: {guessed}"
