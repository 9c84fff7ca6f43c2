"""A daemon's drafter has one job at a time, in order with Releases, and knows whose caches are open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Expand, Proposed, Release, Segment, SegmentPart
from flowspec.core.stage.drafter import DrafterCore
from flowspec.errors import PeerError
from tests.core.stages import opening


def job(number: int, *requests: int, releases: tuple[int, ...] = ()) -> Expand:
    parts = tuple(
        SegmentPart(
            commit=Commit(request=request, epoch=0, base=1, path=()),
            opening=None,
            ids=(),
            parents=(),
            tokens=(),
            positions=(),
            committed=(),
        )
        for request in requests
    )
    given_up = tuple(Release(request=request) for request in releases)
    return Expand(segment=Segment(segment=number, parts=parts, releases=given_up), width=4)


def done(number: int) -> Proposed:
    return Proposed(job=number, proposals=(), compute_s=0.5)


def test_jobs_and_releases_go_to_the_drafter_and_answers_to_the_head() -> None:
    core = DrafterCore()
    assert core.handle(job(7, 1, 2), 10.0) == (job(7, 1, 2),)
    assert (core.running_s(12.5), core.done, core.queued) == (2.5, 0, 0)
    release = Release(request=1)
    assert core.handle(release, 12.0) == (release,), "in order behind the job that runs"
    assert core.requests() == [2]
    assert core.handle(done(7), 13.0) == (done(7),)
    assert (core.running_s(14.0), core.done) == (0.0, 1)
    core.handle(job(8, 3, releases=(2,)), 15.0)
    assert core.requests() == [3]


def test_a_second_job_must_wait_for_the_first_ones_answer() -> None:
    core = DrafterCore()
    core.handle(job(0, 1), 0.0)
    with pytest.raises(PeerError, match="job 1 came while job 0 runs"):
        core.handle(job(1, 1), 0.0)


def test_a_drafter_copies_nothing() -> None:
    core, sent = DrafterCore(), job(0, 1)
    copying = opening(keep=1, source=2)
    parts = tuple(replace(part, opening=copying) for part in sent.segment.parts)
    with pytest.raises(PeerError, match="request 1 begins with a copy"):
        core.handle(replace(sent, segment=replace(sent.segment, parts=parts)), 0.0)
    core.handle(sent, 0.0)


def test_requests_are_bounded() -> None:
    core = DrafterCore()
    for number in range(limits.REQUESTS_MAX):
        core.handle(job(number, number), 0.0)
        core.handle(done(number), 0.0)
    with pytest.raises(PeerError, match=f"at most {limits.REQUESTS_MAX} requests"):
        core.handle(job(1000, 1000), 0.0)
