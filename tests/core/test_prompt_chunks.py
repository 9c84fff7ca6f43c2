"""Chunks of a prompt are as long as brings the first token soonest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.events import SendToFirstStage, Submit
from flowspec.core.head.head import HeadCore
from flowspec.core.head.prompt_chunks import GAIN, LEAST, SlotTime, chunk_rows
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve

BOARD = Curve(base_s=1.0, extra_row_s=0.1).seconds


def through_s(length: int, chunk: int, stages: int, slot_s: SlotTime) -> float:
    """When the last chunk has left the last stage: each waits for its own way and for the one before it."""
    free_s = [0.0] * stages
    for first in range(0, length, chunk):
        at_s = 0.0
        for stage in range(stages):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + slot_s(min(chunk, length - first))
    return free_s[-1]


@given(
    length=st.integers(1, 3000),
    most=st.sampled_from((1, 20, 100, 128)),
    stages=st.integers(1, 8),
    knee=st.floats(0.1, 300),
)
def test_no_other_size_is_through_sooner(length: int, most: int, stages: int, knee: float) -> None:
    curve = Curve(base_s=1.0, row_s=1 / knee, extra_row_s=0.1 / knee)
    found = chunk_rows(length, most, stages, curve.seconds)
    sizes = [most >> halved for halved in range(4) if halved == 0 or most >> halved >= LEAST]
    assert found in sizes
    taken = through_s(length, found, stages, curve.seconds)
    best = min(through_s(length, size, stages, curve.seconds) for size in sizes)
    assert taken <= best / (1 - GAIN) ** 3 + 1e-9


def sent(slot_s: SlotTime | None, answers: int) -> list[int]:
    """Rows of the segments that leave when the last of so many prompts of 512 tokens has come."""
    head = HeadCore(context=1000, stage_count=4, slot_s=slot_s)
    for request in range(answers):
        prompt = tuple(range(512))
        asked = Submit(
            request=request, prompt=prompt, new_tokens_max=9, sampling=Sampling(), stop_ids=frozenset()
        )
        commands = head.handle(asked, 0.0)
    return [
        len(part.ids)
        for command in commands
        if isinstance(command, SendToFirstStage)
        for part in command.segment.parts
    ]


def test_a_head_cuts_prompts_by_what_is_foretold_of_its_stages() -> None:
    assert set(sent(BOARD, answers=1)) == {32}
    assert set(sent(None, answers=1)) == {128}
