"""What a head's events tell of when tokens were known and guessed, and what trips tell of costs."""

from __future__ import annotations

import pytest

from flowspec.bench.oracle import SeenToken
from flowspec.bench.trace import Trace, oracle_s
from flowspec.core.head.events import Draft, Drafted, Emit, HeadCommand, SendToFirstStage, Submit
from flowspec.core.protocol.messages import Hop, Proposal, Sampling, Segment
from flowspec.watch.trips import Trip
from tests.core.stages import commit, part_of

SUBMIT = Submit(request=4, prompt=(7, 8), new_tokens_max=9, sampling=Sampling(), stop_ids=frozenset())
OTHER = 5


def rows(number: int, *nodes: tuple[int, int, int, int], request: int = 4) -> Segment:
    """A segment of rows (id, parent, token, position)."""
    return Segment(segment=number, parts=(part_of(commit(base=2, request=request), nodes),))


def said(job: int, node: int, *tokens: int, request: int = 4) -> Drafted:
    proposal = Proposal(request=request, epoch=0, node=node, tokens=tokens, confidences=(0.1,) * len(tokens))
    return Drafted(job=job, proposals=(proposal,), started_s=0.0, ended_s=0.0)


def watched(*more: tuple[object, list[HeadCommand], float]) -> Trace:
    """A prompt of two tokens, of which node 1 is the last, and what came then."""
    trace = Trace()
    prompt = SendToFirstStage(segment=rows(0, (0, -1, 7, 0), (1, 0, 8, 1)))
    for event, commands, now_s in ((SUBMIT, [prompt], 0.0), *more):
        trace.watch(event, commands, now_s)  # type: ignore[arg-type]
    return trace


def test_a_guess_is_there_once_a_drafter_has_said_it_and_was_asked_for_with_its_job() -> None:
    draft = Draft(job=0, segment=rows(0, (1, 0, 8, 1)), width=2)
    later = Draft(job=1, segment=rows(1, (2, 1, 11, 2)), width=2)
    log = watched(
        (None, [draft], 1.0),
        (said(0, 1, 10, 11), [later], 2.0),
        (said(7, 2, 21, request=OTHER), [], 2.5),
        (said(8, 1, 11), [], 3.0),
        (said(1, 2, 21), [Emit(request=OTHER, tokens=(99,))], 4.0),
        (None, [Emit(request=4, tokens=(11,))], 5.0),
        (None, [Emit(request=4, tokens=(21, 31))], 7.0),
    ).log
    assert log.prompt_segment == 0
    assert log.tokens() == []  # nothing tells which node the token 21 was
    log.watch(None, [SendToFirstStage(segment=rows(2, (5, 2, 21, 3)))], 8.0)  # type: ignore[arg-type]
    assert log.tokens() == [
        SeenToken(known_s=5.0, here_s=2.0, asked_s=1.0, rank=2, has_spoken=True),
        SeenToken(known_s=7.0, here_s=4.0, asked_s=2.0, sent_s=8.0, rank=1, has_spoken=True),
        SeenToken(known_s=7.0, here_s=7.0),
    ]
    log.watch(SUBMIT, [Emit(request=4, tokens=(1, 2))], 1.0)
    log.watch(SUBMIT, [], 2.0)
    assert log.tokens() == [], "it begins anew with each answer"


def hop(rows_alive: int, compute_s: float, dead: int = 0) -> Hop:
    return Hop(
        received_s=0.0, queued_s=0.0, compute_s=compute_s, own_s=0.5, rows=rows_alive + dead, dead_late=dead
    )


@pytest.mark.parametrize(("is_guessed", "least_s"), [(False, 2 * 4.25), (True, 4.25 + 2.5)])
def test_without_stations_costs_are_the_least_that_so_many_rows_or_more_took(
    is_guessed: bool, least_s: float
) -> None:
    """Two tokens. A row takes 1.5 at the first stage (that of 2 rows, one of which died), 2.5 at the second,
    and .25 on all links together; two rows take 3.5 at each, so the oracle sends one behind the other where
    both are there."""
    trace = watched(
        (None, [Emit(request=4, tokens=(11,))], 10.0),
        (said(0, 2, 12) if is_guessed else None, [SendToFirstStage(segment=rows(1, (2, 1, 11, 2)))], 10.0),
        (None, [Emit(request=4, tokens=(12,))], 20.0),
        (None, [SendToFirstStage(segment=rows(2, (3, 2, 12, 3)))], 20.0),
        (None, [Emit(request=4, tokens=(13,))], 30.0),
    )
    assert oracle_s(trace) is None  # nothing came back
    for number, sent_s, back_s, hops in (
        (0, 0.0, 9.0, (hop(2, 3.0), hop(2, 3.0))),
        (1, 10.0, 14.75, (hop(1, 1.0, dead=1), hop(1, 2.5))),
        (2, 20.0, 24.5, (hop(1, 1.25), hop(1, 2.0))),
    ):
        trace.trips.append(Trip(segment=number, rows=2, sent_s=sent_s, back_s=back_s, hops=hops))
    assert oracle_s(trace) == pytest.approx(least_s)
