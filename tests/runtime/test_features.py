"""Features that stages send are held to what they were to capture, and rows carry none of them."""

from __future__ import annotations

import pytest
import torch

from flowspec.core.head.features import check_features
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.messages import Features
from flowspec.errors import PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of
from flowspec.runtime.compute import split, to_torch
from flowspec.wire.codec import Tensor, joined

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


def test_each_stage_captures_what_its_layers_have_and_passes_on_none_of_it() -> None:
    first, last = assigns()
    assert (first.captured, last.captured) == (2, 1), "the output after the final norm is the last stage's"
    assert last.payload_width(HIDDEN, carried=3) == HIDDEN + 3


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
    """Which may be more than hidden states, and more than came (`core.protocol.shared_keys`)."""
    states = torch.arange(2 * 9, dtype=torch.float32).view(2, 9)
    onward, captured = split(states, 4)
    assert onward is not None
    assert torch.equal(to_torch(onward, (0, 1)), states[:, :5])
    assert [row.rows for row in captured] == [1, 1]
    assert torch.equal(to_torch(joined([(row,) for row in captured]), (0, 1)), states[:, 5:])
    assert split(states, 9)[0] is None, "the last stage"
    onward, captured = split(states, 0)
    assert onward is not None
    assert (onward.width, captured) == (9, ())
