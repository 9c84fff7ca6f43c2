"""How patient a membership is in tests."""

from __future__ import annotations

from flowspec.core.cluster.membership import MembershipTimeouts

MEMBERSHIP_TIMEOUTS = MembershipTimeouts(
    silent_s=5.0,
    loading_silent_s=15.0,
    loading_s=60.0,
    stuck_s=30.0,
    probe_s=2.0,
    back_s=4.0,
    forgive_s=300.0,
)
