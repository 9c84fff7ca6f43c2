"""A daemon's lease is judged by when its turn began, not by how long the turn's work took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowspec.core.cluster.daemon import Caller, CallerConnected, CallerMessageArrived
from flowspec.runtime import daemon as module
from flowspec.runtime import timeouts
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.machine import Machine
from tests.runtime.clusters import whole_model


def test_a_turn_that_was_held_up_does_not_end_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=1.0)
    daemon = Daemon(host="127.0.0.1", port=0, name="slow", machine=Machine(device="cpu"))
    core, held = daemon._core, cast(Any, daemon)
    done: list[str] = []

    def hold_up(*, is_held: bool) -> None:
        assert is_held
        clock.now_s += timeouts.LEASE_S + 1

    try:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
        monkeypatch.setattr(daemon._driver, "_do", lambda command: done.append(type(command).__name__))
        held._poller = SimpleNamespace(poll=lambda timeout_ms: [])
        held._worker = SimpleNamespace(answer=hold_up)
        head = Caller("head", "head-control", 1)
        core.handle(CallerConnected(caller=head), clock.now_s)
        core.handle(CallerMessageArrived(caller=head, message=whole_model("m", "f")), clock.now_s)
        daemon._turn()
        assert done == [], "nobody has looked yet whether the head said something meanwhile"
        daemon._turn()
        assert done == ["Log", "Send", "EndAssignment", "Log"], "now somebody has, and it did not"
        assert core.fired["lapsed"] == 1
    finally:
        daemon._compute.stop(timeouts.COMPUTE_STOP_S)
        daemon._context.destroy(linger=0)
