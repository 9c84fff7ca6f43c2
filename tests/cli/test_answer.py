"""What is said of an answer when it has ended."""

from __future__ import annotations

import pytest

from flowspec.cli.answer import figures
from flowspec.runtime.answer import Answer
from flowspec.runtime.token_stream import Timing


def answer(reason: str, ended_s: float, *at_s: float, resumed: int = 0) -> Answer:
    timing = Timing(new_tokens=[1] * resumed, resumed=resumed)
    for each in at_s:
        timing.add((1,), each)
    timing.ended_s = ended_s
    return Answer(
        text="",
        token_ids=tuple(timing.new_tokens),
        finish_reason=reason,
        prompt_tokens=1,
        resumed_tokens=resumed,
        timing=timing,
        statistics={},
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (answer("stop", 3.0, 1.0, 1.5, 2.0), "3 tokens, 2.0 tokens/s, first after 1.00 s"),
        (answer("cancelled", 2.1, 1.0, 1.5, 2.0), "3 tokens, 2.0 tokens/s, first after 1.00 s, stopped"),
        (
            answer("cancelled", 42.0, 1.0, 1.5, 2.0),
            "3 tokens, 2.0 tokens/s, first after 1.00 s, stopped after 40 s without a token",
        ),
        (answer("cancelled", 40.0), "0 tokens, stopped after 40 s without a token"),
        (answer("stop", 1.0), "0 tokens: the model ended the answer at once"),
        (answer("cancelled", 0.1, resumed=5), "5 tokens (5 taken over), stopped"),
    ],
)
def test_a_wait_that_ctrl_c_ended_is_told_beside_the_rate(found: Answer, expected: str) -> None:
    assert figures(found) == expected
