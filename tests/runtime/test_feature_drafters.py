"""Drafters on real processes that read the target's features, and the target's own MTP layer: every answer is
that of decoding step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.bench.exactness import Case, ClusterAnswer, answer, found_of, judge
from flowspec.bench.outcome import EXACT
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import FILED
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from tests.draft.assistants import make_assistant
from tests.draft.blocks import make_dspark
from tests.draft.mtp import make_mtp
from tests.ggufs import convert

pytestmark = pytest.mark.usefixtures("lent")
DTYPE = "bfloat16"
NEW_TOKENS = 16
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
                for temperature, (name, prompt) in zip((0.0, 1.0), PROMPTS.items(), strict=True):
                    sampling = Sampling(temperature=temperature, seed=4)
                    case = Case(prompt_id=name, prompt=prompt, sampling=sampling)
                    running, timing = session.ask(prompt, sampling, limits)
                    found.append(found_of(session, case, running, timing, limits))
                    assert running.end is not None
                    guessed += running.end.statistics["nodes_sent"] - running.end.statistics["segments"]
    plain = StepByStep.load(ModelFiles(model), DTYPE)
    assert [verdict for one in found if (verdict := judge(plain, one, limits.stop_ids)).kind != EXACT] == []
    assert guessed > NEW_TOKENS, f"guesses took part: {guessed}"


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("qwen3.5-moe-fused", "float32"), ("glm4-moe", FILED)],
)
def test_answers_on_processes_are_exact(variant: str, dtype: str, tmp_path: Path) -> None:
    model = make_mtp(tmp_path / "model", variant)
    if dtype == FILED:
        model = convert(model, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    limits = Limits(new_tokens_max=12, stop_ids=frozenset())
    cases = [
        Case(prompt_id="text", prompt=tuple(range(7, 30)), sampling=Sampling(temperature=temperature, seed=1))
        for temperature in (0.0, 1.0)
    ]
    options = ClusterOptions(model=str(model), dtype=dtype, local=2, context=200)
    with (
        open_cluster(options) as cluster,
        cluster.session(Decoding(method="tree-sd", drafters=("mtp",)), lambda text, share: None) as session,
    ):
        found = [answer(session, case, limits) for case in cases]
    plain = StepByStep.load(ModelFiles(str(model)), dtype)
    assert [verdict.kind for one in found if (verdict := judge(plain, one, limits.stop_ids))] == [EXACT] * 2
    assert [(len(one.tokens), one.drafter) for one in found] == [(12, "mtp")] * 2
