"""What a head says of a device that hangs up: of one that answered before, nothing of keys."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from flowspec.core.cluster.forming import CONTROL, DialRefused
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.monitor import Refusal
from flowspec.runtime.pipeline_connections import PipelineConnections
from flowspec.runtime.security.keyfiles import head_keyring, make_keys
from flowspec.runtime.transport import Wake

WANTS_KEYS = "it hung up; if nobody ended it, it takes encrypted connections only"
ENDED = "it hung up; see the daemon's log there"


@pytest.mark.parametrize(("answered", "expected"), [(set(), WANTS_KEYS), ({"pi"}, ENDED)])
def test_a_device_that_hangs_up(answered: set[str], expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stage = StagePlan(name="pi", address=f"127.0.0.1:{server.getsockname()[1]}", first=0, end=1)
        plan = ClusterPlan(model="m", fingerprint="", dtype="float32", context=8, stages=(stage,))
        connections = PipelineConnections(plan, 1, 1, Wake(), None, answered)
        with contextlib.closing(connections):
            connections.dial("pi", CONTROL)
            server.settimeout(10)
            server.accept()[0].close()
            assert refused(connections).text.startswith(expected)


def refused(connections: PipelineConnections) -> DialRefused:
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        for event in connections.heard(set(connections.sources), time.monotonic()):
            if isinstance(event, DialRefused):
                return event
    raise AssertionError("nobody hung up")


def test_keys_still_explain_one_that_was_started_again_with_or_without_them(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["head"], ["pi"], force=False)
    for keys in (None, head_keyring(tmp_path / "keys")):
        assert Refusal.HUNG_UP.told(keys, has_answered=True) == ENDED
        assert "keys" in Refusal.MECHANISM.told(keys, has_answered=True)
