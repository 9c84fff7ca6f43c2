"""Log-probabilities of the bundled model over real daemons are those of transformers' logits, for each token
its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowspec.core.protocol.limits import TOP_LOGPROBS_MAX
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_session

pytestmark = pytest.mark.usefixtures("lent")
PROMPT = tuple(range(300, 320))
LIMITS = Limits(new_tokens_max=12, stop_ids=frozenset())
TOLERANCE = 1e-3
"""Float32 through eight layers, in other batches than transformers' one pass."""


def test_each_token_comes_with_what_transformers_says_of_it() -> None:
    reference = Reference(ModelFiles(BUNDLED), "float32")
    options = ClusterOptions(model=BUNDLED, dtype="float32", local=2, context=200)
    with open_session(options, Decoding(), lambda text, share: None) as session:
        for top, temperature in ((-1, 0.0), (0, 1.0), (5, 0.0), (TOP_LOGPROBS_MAX, 1.0)):
            sampling = Sampling(temperature=temperature, top_k=50, seed=4)
            answer = session.submit(
                PROMPT, sampling, LIMITS, request=session.head.new_request(), top_logprobs=top
            )
            batches = list(answer)
            tokens = [token for batch in batches for token in batch.tokens]
            found = [each for batch in batches for each in batch.logprobs]
            assert len(tokens) == LIMITS.new_tokens_max
            assert [len(batch.logprobs) for batch in batches] == [
                len(batch.tokens) if top >= 0 else 0 for batch in batches
            ]
            logits = np.stack(reference.forced_logits(PROMPT, tokens[:-1]))  # [tokens, vocabulary]
            expected = torch.log_softmax(torch.from_numpy(logits), dim=-1)
            for row, token, each in zip(expected, tokens, found, strict=False):
                assert each.chosen == pytest.approx(float(row[token]), abs=TOLERANCE)
                assert each.values == pytest.approx(row.topk(top).values.tolist(), abs=TOLERANCE)
                assert row[list(each.ids)].tolist() == pytest.approx(each.values, abs=TOLERANCE)
        for wrong in (-2, TOP_LOGPROBS_MAX + 1):
            with pytest.raises(InputError, match=f"expected -1 .none. to {TOP_LOGPROBS_MAX}, got {wrong}"):
                session.submit(
                    PROMPT, Sampling(), LIMITS, request=session.head.new_request(), top_logprobs=wrong
                )
