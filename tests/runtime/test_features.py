"""Features that come back from the stages are held to what the drafter asked for."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.messages import Verified, VerifiedPart
from flowspec.errors import PeerError
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.pipeline_connections import check_features
from flowspec.wire.codec import Tensor


def test_features_of_another_shape_than_was_asked_for_are_the_stages_fault() -> None:
    """They would end the drafter's thread, and with it the head."""
    plan = ClusterPlan(
        model="m",
        fingerprint="f",
        dtype="float32",
        context=9,
        stages=(),
        captures=(1, 2),
        vocabulary=9,
        hidden_size=4,
    )
    part = VerifiedPart(request=1, epoch=0, ids=(3,), next_tokens=(4,))
    said = Verified(segment=0, parts=(part,), hops=())
    check_features(plan, said, Tensor(rows=1, width=8, dtype="float32", data=bytes(32)))
    check_features(plan, Verified(segment=0, parts=(), hops=()), None)
    for width, dtype in ((4, "float32"), (9, "float32"), (8, "bfloat16")):
        with pytest.raises(PeerError, match="expected features of"):
            check_features(plan, said, Tensor(rows=1, width=width, dtype=dtype, data=b""))
    with pytest.raises(PeerError, match="got None"):
        check_features(plan, said, None)
