"""What a head's drafter on a device is asked, what of its answers counts, and what a loss makes void: event
in, command list out."""

from __future__ import annotations

from collections import Counter

import pytest

from flowspec.core.cluster.membership import Tick
from flowspec.core.head.events import (
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    PipelineLost,
    PipelineReformed,
    SendToDrafter,
)
from flowspec.core.head.remote_drafter import (
    BreakPipeline,
    GivenUp,
    RemoteDrafterCommand,
    RemoteDrafterCore,
    RemoteDrafterEvent,
)
from flowspec.core.protocol.messages import Expand, Proposal, Proposed, Release, Segment
from flowspec.core.stage.slots import CacheRoom

VOCABULARY = 9
FORMED = PipelineReformed(stage_count=1, rooms=(CacheRoom(slots=500),))
BACK = DrafterRecovered(drafter=3, cache_slots=500)
LOST = DrafterLost(drafter=3)
RELEASE = SendToDrafter(drafter=3, message=Release(request=2))


class Bench:
    """The head's drafter 3, at an instant that the test sets."""

    def __init__(self) -> None:
        self.core = RemoteDrafterCore(3, VOCABULARY)
        self.now_s = 10.0

    def give(self, *events: RemoteDrafterEvent) -> list[RemoteDrafterCommand]:
        """What the last of these events leads to."""
        commands: list[RemoteDrafterCommand] = []
        for event in events:
            commands = self.core.handle(event, self.now_s)
            self.core.validate()
        return commands


def draft(job: int) -> Draft:
    return Draft(job=job, segment=Segment(segment=job, parts=()), width=4, drafter=3)


def expand(job: int) -> Expand:
    return Expand(segment=Segment(segment=job, parts=()), width=4)


def answer(job: int, token: int = 7, compute_s: float = 0.0) -> Proposed:
    proposal = Proposal(request=1, epoch=0, node=5, tokens=(token,), confidences=(0.5,))
    return Proposed(job=job, proposals=(proposal,), compute_s=compute_s)


@pytest.mark.parametrize(
    ("compute_s", "started_s"), [(0.5, 11.5), (1e4, 10.0)], ids=["its time", "no longer than we waited"]
)
def test_a_job_goes_out_and_what_is_proposed_comes_back_in_the_heads_time(
    compute_s: float, started_s: float
) -> None:
    bench = Bench()
    assert bench.give(FORMED) == [BACK]
    assert bench.give(BACK, draft(0)) == [expand(0)]
    assert bench.give(RELEASE) == [RELEASE.message], "in order with jobs"
    bench.now_s = 12.0
    assert bench.core.tick(bench.now_s) == Tick(flight_s=2.0, tokens=0)
    drafted = Drafted(drafter=3, job=0, proposals=answer(0).proposals, started_s=started_s, ended_s=12.0)
    assert bench.give(answer(0, compute_s=compute_s)) == [drafted]
    assert bench.core.tick(bench.now_s) == Tick(flight_s=0.0, tokens=1)


def test_what_the_head_asks_before_it_has_heard_of_a_return_is_for_one_that_is_gone() -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, draft(0), PipelineLost()) == [LOST]
    assert bench.give(draft(1)) == [], "the head has not heard yet that it is lost"
    assert bench.give(FORMED) == [BACK]
    assert bench.give(draft(1)) == []
    assert bench.give(RELEASE) == []
    assert bench.give(BACK, draft(2)) == [expand(2)]
    assert bench.core.fired == Counter({"there": 2, "gone": 1, "job lost": 1, "for one that is gone": 3})


def test_one_lost_twice_before_the_head_looks() -> None:
    bench = Bench()
    bench.give(FORMED, PipelineLost(), FORMED, PipelineLost(), FORMED)
    assert bench.give(BACK, draft(0)) == [], "of the time between its losses"
    assert bench.give(BACK, draft(0)) == []
    assert bench.give(BACK, draft(1)) == [expand(1)]


def test_a_loss_before_it_was_there_is_none() -> None:
    bench = Bench()
    assert bench.give(PipelineLost()) == []
    assert bench.give(answer(0)) == []


@pytest.mark.parametrize(
    ("said", "text", "rule"),
    [
        (answer(1), "expected proposals of job 0, got those of 1", "not asked for"),
        (answer(0, VOCABULARY), "expected token ids below 9, got 9", "no token"),
    ],
)
def test_proposals_that_cannot_be_are_not_believed(said: Proposed, text: str, rule: str) -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, draft(0), said) == [BreakPipeline(text=text)]
    assert bench.give(PipelineLost()) == [LOST]
    assert bench.core.fired[rule] == bench.core.fired["job lost"] == 1


def test_an_answer_that_nobody_asked_for_is_not_believed() -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, answer(0)) == [
        BreakPipeline(text="expected proposals of job None, got those of 0")
    ]


def test_one_that_is_given_up_is_lost_for_good() -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, draft(0), GivenUp()) == [LOST]
    assert bench.give(draft(1)) == []
    assert bench.give(PipelineLost()) == [], "it is known"
    assert bench.core.fired["given up"] == 1
