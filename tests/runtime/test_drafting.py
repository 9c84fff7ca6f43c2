"""The drafter's thread does what it is given in order, wakes the poller, and ends with its first failure;
features that stages send for it are held to what they were to capture."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from flowspec.core.head.events import Draft, Drafted, SendToDrafter, TakeFeatures
from flowspec.core.head.features import check_features
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.messages import Features, Proposal, Release, Segment
from flowspec.errors import ClusterError, InputError, PeerError
from flowspec.model.arithmetic.arrays import Array, narrowed, widened
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of
from flowspec.runtime.compute import Crashed, WorkFailed, split, to_array, to_wire
from flowspec.runtime.drafters import LocalDrafter
from flowspec.runtime.transport import Wake
from flowspec.wire.codec import Tensor, join_rows

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

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Array) -> None:
        self.told.append((request, epoch, tuple(ids), widened(features).tolist()))


@pytest.fixture
def thread() -> Iterator[tuple[LocalDrafter, Notebook, Wake]]:
    wake, drafter = Wake(), Notebook()
    running = LocalDrafter(drafter, 0, wake)
    yield running, drafter, wake
    running.stop(WAIT_S)
    assert not running._thread.is_alive()
    wake.close()


def job(number: int) -> Draft:
    return Draft(job=number, segment=Segment(segment=number, parts=()), width=3)


def result(thread: LocalDrafter, wake: Wake) -> Any:
    while not thread.results:
        assert select.select([wake.read_fd], [], [], WAIT_S)[0], "the drafter's thread never woke the poller"
        wake.clear()
    return thread.results.popleft()


def test_work_is_done_in_the_order_in_which_it_came(thread: tuple[LocalDrafter, Notebook, Wake]) -> None:
    running, drafter, wake = thread
    features = narrowed(np.array([[1, 2], [3, 4], [5, 6]], np.float32), "bfloat16")
    first_row, second_row, third_row = to_wire(features, "bfloat16").apart()
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
        (RuntimeError("CUDA out of memory"), ClusterError),
        (KeyError("a bug"), KeyError),
    ],
)
def test_the_first_failure_is_told_and_nothing_more_is_done(
    thread: tuple[LocalDrafter, Notebook, Wake], error: BaseException, shown: type[BaseException]
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


HIDDEN = 4


def assigns() -> list[Assign]:
    stages = tuple(
        StagePlan(name=name, address=f"{name}:1", first=at, end=at + 3) for name, at in (("a", 0), ("b", 3))
    )
    plan = ClusterPlan(
        model="m",
        fingerprint="f",
        dtype="float32",
        context=9,
        stages=stages,
        captures=(0, 2, 6),
        hidden_size=HIDDEN,
    )
    return assigns_of(plan)


def test_features_of_another_shape_than_was_asked_for_are_the_stages_fault() -> None:
    """They would end the drafter's thread, and with it the head."""
    first, last = assigns()
    said = Features(request=1, epoch=0, ids=(3,))
    check_features(first, HIDDEN, said, Tensor(rows=1, width=8, dtype="float32", data=bytes(32)))
    check_features(last, HIDDEN, said, Tensor(rows=1, width=4, dtype="float32", data=bytes(16)))
    for rows, width, dtype in ((1, 4, "float32"), (1, 9, "float32"), (1, 8, "bfloat16"), (2, 8, "float32")):
        with pytest.raises(PeerError, match=r"expected features of .* of stage 1"):
            check_features(first, HIDDEN, said, Tensor(rows=rows, width=width, dtype=dtype, data=b""))
    with pytest.raises(PeerError, match="got None"):
        check_features(first, HIDDEN, said, None)


def test_what_was_captured_is_taken_off_behind_all_that_the_next_stage_needs() -> None:
    """Which may be more than hidden states, and more than came (`core.protocol.model_spec`)."""
    states = np.arange(2 * 9, dtype=np.float32).reshape(2, 9)
    onward, captured = split(states, 4, "float32")
    assert onward is not None
    assert np.array_equal(to_array(onward, (0, 1)), states[:, :5])
    assert [row.rows for row in captured] == [1, 1]
    assert np.array_equal(to_array(join_rows([(row,) for row in captured]), (0, 1)), states[:, 5:])
    assert split(states, 9, "float32")[0] is None, "the last stage"
    onward, captured = split(states, 0, "float32")
    assert onward is not None
    assert (onward.width, captured) == (9, ())
