"""Real processes, and drafters that read the target's features, which come from whichever device has the
layers: answers are those of decoding step by step."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.draft.blocks import make_dspark

DTYPE = "bfloat16"
NEW_TOKENS = 24
METHODS = ("continuous", "tree-sd")
PROMPTS = {"short": (5, 6, 7), "long": tuple((17 * each) % VOCABULARY_SIZE for each in range(3, 50))}


@pytest.mark.parametrize(
    ("target", "make", "stages"), [("gemma4", make_assistant, 3), ("llama-grouped", make_dspark, 2)]
)
def test_answers_are_exact(target: str, make: Callable[[Path], Path], stages: int, tmp_path: Path) -> None:
    model = str(make_variant(tmp_path / "target", target))
    drafter = str(make(tmp_path / "drafter"))
    limits = Limits(new_tokens_max=NEW_TOKENS, stop_ids=frozenset())
    found: list[ClusterAnswer] = []
    guessed = 0
    with open_cluster(ClusterOptions(model=model, dtype=DTYPE, local=stages, context=200)) as cluster:
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
                                drafter=make.__name__,
                                stages=stages,
                                new_tokens_max=NEW_TOKENS,
                                tokens=tokens,
                            )
                        )
    plain = StepByStep.load(ModelFiles(model), DTYPE)
    assert [verdict for one in found if (verdict := judge(plain, one, limits.stop_ids)).kind != EXACT] == []
    assert guessed > NEW_TOKENS, f"guesses took part: {guessed}"
