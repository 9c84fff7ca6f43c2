"""A cluster where nobody answers is refused before anything slow is imported; who answers is left to the
survey."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from flowspec.errors import ClusterError
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.health import examine
from flowspec.runtime.health.examine import ExamineTimeouts, ask_all
from flowspec.runtime.planning.first_look import refuse_silent
from tests.daemons import DaemonProcess, daemon_process


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for as a slow board would have to be."""
    monkeypatch.setattr(examine, "REFUSED_S", 0.2)
    monkeypatch.setattr(timeouts, "ABSENT_S", 0.6)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with daemon_process("there", "--threads=1") as found:
        yield found


@pytest.fixture
def there(daemon: DaemonProcess) -> Device:
    return Device(name="there", address=daemon.address)


def silent() -> Device:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Device(name="gone", address=f"127.0.0.1:{server.getsockname()[1]}")


def test_a_machine_that_refuses_is_not_waited_for_longer() -> None:
    ages = ExamineTimeouts(hello_s=6.0, why_s=0.0)  # whoever waits to the end cannot tell why
    one, other = silent(), replace(silent(), name="too")
    (found,) = ask_all([one], examine_timeouts=ages)
    assert found.failure is not None
    port = one.address.rpartition(":")[2]
    start = f"start its daemon, with your other flags: flowspec daemon --host 127.0.0.1 --port {port}"
    assert (found.failure.check, found.failure.advice) == ("reachable", start)
    assert "nothing listens" in found.failure.text
    both = ask_all([one, other], examine_timeouts=ages)
    advice = [each.failure.advice for each in both if each.failure is not None]
    assert advice[0] == f"{start} --name gone --threads 1", "they share a machine's cores"
    assert advice[1].endswith(" --name too --threads 1")


def test_one_that_answers_is_enough_unless_all_are_needed(there: Device) -> None:
    refuse_silent([silent(), there], None, needs_all=False)
    refuse_silent([there], None, needs_all=True)
    with pytest.raises(ClusterError, match=r"gone at .* --name gone --threads 1"):
        refuse_silent([silent(), there], None, needs_all=True)
    with pytest.raises(ClusterError, match=r"gone at 127\.0\.0\.1:\d+: .*start its daemon"):
        refuse_silent([silent()], None, needs_all=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = Device(name="other", address=f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ClusterError, match="did not answer as a FlowSpec daemon"):
            refuse_silent([other], None, needs_all=False)


def test_a_daemon_that_is_looked_at_has_nothing_to_complain_of(daemon: DaemonProcess, there: Device) -> None:
    before = len(daemon.lines)
    refuse_silent([there], None, needs_all=True)
    time.sleep(1.0)  # what it complains of it says within half a second
    assert daemon.lines[before:] == []
