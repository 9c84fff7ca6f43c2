"""The plain model: what it refuses to be compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowspec.core.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.sampler import F32
from flowspec.testbed.checkpoints import make_variant

PROMPT, GREEDY = tuple(range(3, 20)), Sampling(temperature=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_noise_that_is_no_rounding_is_refused(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As int8 gave on ARM: garbage for all numbers of rows but one."""
    reference = Reference(ModelFiles(str(make_variant(tmp_path, "llama-grouped"))), dtype)
    reference.generate(PROMPT, GREEDY, 8, frozenset())
    right = reference.forced_logits

    def garbage(prompt: tuple[int, ...], answer: list[int]) -> list[F32]:
        return [np.roll(row, 1) for row in right(prompt, answer)]

    monkeypatch.setattr(reference, "forced_logits", garbage)
    with pytest.raises(ClusterError, match=f"the plain model's logits in {dtype} differ by .* that is no rounding.*use another --dtype"):
        reference.generate(PROMPT, GREEDY, 9, frozenset())
