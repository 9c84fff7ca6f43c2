"""The line between compute thread and poller: answers go to the hold that asked, and nobody waits for a head
that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.core.protocol.weight_messages import AskModel, NameList
from flowspec.errors import ClusterError
from flowspec.runtime.weights.line import Asked, CourierLine, LoadProgress

FIRST, SECOND = NameList(names=("first",)), NameList(names=("second",))


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def line(told: list[Any]) -> CourierLine:
    return CourierLine(told.append)


def test_questions_go_out_and_answers_come_in_for_the_present_hold_only(
    line: CourierLine, told: list[Any]
) -> None:
    line.begin(1)
    line.ask(AskModel())
    assert told == [Asked(question=AskModel())]
    line.deliver(1, FIRST, b"x")
    assert line.answer() == (FIRST, b"x")
    line.deliver(1, FIRST, b"")
    line.hang_up(1)
    line.begin(2)
    line.deliver(2, SECOND, b"")
    assert line.answer() == (SECOND, b"")


def test_a_head_that_let_go_ends_what_waits_for_it(line: CourierLine, told: list[Any]) -> None:
    line.begin(1)
    line.hang_up(1)
    with pytest.raises(ClusterError, match="let go before all weights were there"):
        line.answer()
    with pytest.raises(ClusterError, match="let go"):
        line.tell("checking", 0.5)
    assert told == []


def test_a_hold_that_ended_before_its_turn_came_waits_for_nothing(line: CourierLine) -> None:
    line.begin(1)
    line.hang_up(1)
    line.hang_up(2)
    line.end()
    line.begin(2)
    with pytest.raises(ClusterError, match="let go"):
        line.answer()
    line.begin(3)
    line.deliver(3, FIRST, b"")
    assert line.answer() == (FIRST, b"")


def test_progress_is_told_now_and_then_and_at_once_of_something_else(
    line: CourierLine, told: list[Any]
) -> None:
    line.begin(1)
    for doing in ("asking", "receiving"):
        for share in (0.0, 0.0, 0.0):
            line.tell(doing, share)
    assert [each.doing for each in told][:1] == ["asking"]
    assert {each.doing for each in told} == {"asking", "receiving"}
    line.begin(2)
    line.tell("receiving", 0.5)
    assert told[-1] == LoadProgress(doing="receiving", share=0.5)
