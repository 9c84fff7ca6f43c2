"""Models whose own MTP layer drafts for them, on real processes: every answer is that of decoding step by
step."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from flowspec.bench.exactness import Case, answer, judge
from flowspec.bench.outcome import EXACT
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import FILED
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from tests.draft.mtp import make_mtp
from tests.ggufs import convert


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("qwen3.5-moe-fused", "float32"), ("glm4-moe", "bfloat16"), ("glm4-moe", FILED)],
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
