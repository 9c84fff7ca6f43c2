"""The drafter's thread does what it is given in order, wakes the poller, and ends with its first failure."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from flowspec.core.head.events import Draft, Drafted, SendToDrafter, TakeFeatures
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.errors import ClusterError, InputError
from flowspec.runtime.compute import Crashed, WorkFailed, to_wire
from flowspec.runtime.drafting import DraftThread
from flowspec.runtime.transport import Wake

WAIT_S = 20


class Notebook:
    """A drafter that writes down what it is told, and fails when asked to."""

    captures = (1, 2)
    context = 100
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.error: BaseException | None = None

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        if self.error is not None:
            raise self.error
        self.told.append((segment.segment, width))
        return (Proposal(request=1, epoch=0, node=segment.segment, tokens=(5,), confidences=(0.5,)),)

    def release(self, message: Release) -> None:
        self.told.append(message)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: torch.Tensor) -> None:
        self.told.append((request, epoch, tuple(ids), features.tolist()))


@pytest.fixture
def thread() -> Iterator[tuple[DraftThread, Notebook, Wake]]:
    wake, drafter = Wake(), Notebook()
    running = DraftThread(drafter, 0, wake)
    yield running, drafter, wake
    running.stop(WAIT_S)
    assert not running._thread.is_alive()
    wake.close()


def job(number: int) -> Draft:
    return Draft(job=number, segment=Segment(segment=number, parts=()), width=3)


def result(thread: DraftThread, wake: Wake) -> Any:
    while not thread.results:
        assert select.select([wake.read_fd], [], [], WAIT_S)[0], "the drafter's thread never woke the poller"
        wake.clear()
    return thread.results.popleft()


def test_work_is_done_in_the_order_in_which_it_came(thread: tuple[DraftThread, Notebook, Wake]) -> None:
    running, drafter, wake = thread
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16)
    first_row, second_row, third_row = to_wire(features).apart()
    running.post(job(0))
    for message in (
        TakeFeatures(request=1, epoch=0, nodes=(7, 8), rows=((first_row,), (second_row,))),
        TakeFeatures(request=2, epoch=4, nodes=(9,), rows=((third_row, first_row),)),
    ):
        running.post(SendToDrafter(message=message))
    running.post(SendToDrafter(message=Release(request=2)))
    running.post(job(1))
    first, second = result(running, wake), result(running, wake)
    assert isinstance(first, Drafted)
    assert (first.job, [each.node for each in first.proposals]) == (0, [0])
    assert (second.job, [each.node for each in second.proposals]) == (1, [1])
    assert first.started_s <= first.ended_s <= second.started_s <= second.ended_s
    assert drafter.told == [
        (0, 3),
        (1, 0, (7, 8), [[1.0, 2.0], [3.0, 4.0]]),
        (2, 4, (9,), [[5.0, 6.0, 1.0, 2.0]]),  # of two stages
        Release(request=2),
        (1, 3),
    ]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (InputError("wrong"), InputError),
        (MemoryError(), ClusterError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ClusterError),
        (KeyError("a bug"), KeyError),
    ],
)
def test_the_first_failure_is_told_and_nothing_more_is_done(
    thread: tuple[DraftThread, Notebook, Wake], error: BaseException, shown: type[BaseException]
) -> None:
    running, drafter, wake = thread
    drafter.error = error
    running.post(job(0))
    running.post(job(1))
    found = result(running, wake)
    assert isinstance(found, Crashed if shown is KeyError else WorkFailed)
    assert isinstance(found.error, shown)
    running.stop(WAIT_S)
    assert not running.results
    assert drafter.told == []
