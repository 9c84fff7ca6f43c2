"""The line between compute thread and poller: answers go to the assignment that asked, and nobody waits for a
head that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.core.protocol.weight_messages import AskModel, NameList
from flowspec.errors import ClusterError
from flowspec.runtime.weights.head_channel import HeadQuestion, LoadProgress, QueuedHeadChannel

FIRST, SECOND = NameList(names=("first",)), NameList(names=("second",))


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def channel(told: list[Any]) -> QueuedHeadChannel:
    return QueuedHeadChannel(told.append)


def test_questions_go_out_and_answers_come_in_for_the_present_hold_only(
    channel: QueuedHeadChannel, told: list[Any]
) -> None:
    channel.begin(1)
    channel.ask(AskModel())
    assert told == [HeadQuestion(question=AskModel())]
    channel.deliver(1, FIRST, b"x")
    assert channel.answer() == (FIRST, b"x")
    channel.deliver(1, FIRST, b"")
    channel.hang_up(1)
    channel.begin(2)
    channel.deliver(2, SECOND, b"")
    assert channel.answer() == (SECOND, b"")


def test_a_head_that_let_go_ends_what_waits_for_it(channel: QueuedHeadChannel, told: list[Any]) -> None:
    channel.begin(1)
    channel.hang_up(1)
    with pytest.raises(ClusterError, match="let go before all weights were there"):
        channel.answer()
    with pytest.raises(ClusterError, match="let go"):
        channel.tell("checking", 0.5)
    assert told == []


def test_a_hold_that_ended_before_its_turn_came_waits_for_nothing(channel: QueuedHeadChannel) -> None:
    channel.begin(1)
    channel.hang_up(1)
    channel.hang_up(2)
    channel.end()
    channel.begin(2)
    with pytest.raises(ClusterError, match="let go"):
        channel.answer()
    channel.begin(3)
    channel.deliver(3, FIRST, b"")
    assert channel.answer() == (FIRST, b"")


def test_progress_is_told_now_and_then_and_at_once_of_something_else(
    channel: QueuedHeadChannel, told: list[Any]
) -> None:
    channel.begin(1)
    for doing in ("asking for weights", "receiving"):
        for share in (0.0, 0.0, 0.0):
            channel.tell(doing, share)
    assert [each.doing for each in told][:1] == ["asking for weights"]
    assert {each.doing for each in told} == {"asking for weights", "receiving"}
    channel.begin(2)
    channel.tell("receiving", 0.5)
    assert told[-1] == LoadProgress(doing="receiving", share=0.5)
