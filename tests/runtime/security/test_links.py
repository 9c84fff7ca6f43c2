"""Encrypted clusters of real processes: who gets in, and what somebody in the network can see and do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.core.methods import make_method
from flowspec.core.protocol.device_messages import AskFacts
from flowspec.errors import ClusterError
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.device.links import GLANCE, measure_link
from flowspec.runtime.doctor import examine
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.security.keyfiles import head_keyring, make_keys
from flowspec.runtime.security.keyring import Keyring
from lab.checks.intrusion import try_everything
from lab.checks.wiretap import Wiretap, play
from lab.plain_model import PlainModel
from tests.runtime.clusters import WAIT_S, drafter_for, plain, plan_for, submit, tokens_of

STAGES = 3


@pytest.fixture(scope="module")
def keys_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keyed") / "keys"
    make_keys(folder, ["head", "other"], [f"local-{index}" for index in range(STAGES)], force=False)
    return folder


@pytest.fixture(scope="module")
def keys(keys_folder: Path) -> Keyring:
    return head_keyring(keys_folder)


@pytest.fixture(scope="module")
def keyed(keys_folder: Path) -> Iterator[LocalCluster]:
    with LocalCluster(STAGES, log_level="CRITICAL", keys=keys_folder) as cluster:
        yield cluster


def devices_of(daemons: list[LocalDaemon]) -> list[Device]:
    return [Device(name=daemon.name, address=daemon.address) for daemon in daemons]


def test_a_drafter_is_spoken_to_in_secret_too(
    keyed: LocalCluster, keys: Keyring, folder: Path, reference: PlainModel
) -> None:
    *stages, drafter = keyed.wait()
    with Head(
        plan_for(folder, stages),
        method=make_method("continuous"),
        drafters=[drafter_for(folder, drafter)],
        keys=keys,
    ) as head:
        drafted, ended_s = 0, time.monotonic() + WAIT_S
        while not drafted and time.monotonic() < ended_s:  # a busy machine may be done before it drafts
            answer = submit(head)
            assert tokens_of(answer) == plain(reference)
            assert answer.end is not None
            drafted = answer.end.statistics["draft_passes"]
        assert drafted


def test_every_break_in_fails_and_the_same_ones_succeed_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", 2.0)
    attempts = list(try_everything(tmp_path))
    assert len(attempts) == 10
    broken = [attempt for attempt in attempts if not attempt.as_promised]
    assert not broken, broken


def test_the_doctor_and_the_measuring_of_links_use_the_keys(keyed: LocalCluster, keys: Keyring) -> None:
    devices = devices_of(keyed.wait())[:2]
    found = examine(devices, keys, AskFacts())
    assert [each.failure for each in found] == [None, None]
    for link in (found[0].from_head, found[0].onward):  # the second is measured by one device to the next
        assert link is not None
        assert (link.problem, link.bandwidth_mbps > 0) == ("", True)
    assert measure_link(devices[0], keys, GLANCE).latency_s > 0


def test_a_daemon_that_plays_its_part_from_a_recording_is_refused(
    daemons: list[LocalDaemon], folder: Path
) -> None:
    """What a daemon once said in the clear is played to a new head."""
    with (
        Wiretap(daemons[0].address) as tap,
        Head(plan_for(folder, [LocalDaemon(name="x", port=port_of(tap), pid=0)])) as head,
    ):
        tokens_of(submit(head, count=2))
    recorded = bytes(tap.recordings[0].received)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                play(recorded, connection)

        player = threading.Thread(target=serve, daemon=True)
        player.start()
        with pytest.raises(ClusterError, match="belongs to another session: it is stale or replayed"):
            Head(plan_for(folder, [LocalDaemon(name="x", port=server.getsockname()[1], pid=0)]))
        player.join()


def port_of(tap: Wiretap) -> int:
    return int(tap.address.rpartition(":")[2])
