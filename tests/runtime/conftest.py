"""Daemons, a model and what it says, which all tests of a worker share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspec.model.files import ModelFiles
from flowspec.runtime import timeouts
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.machine import Machine
from lab.plain_model import PlainModel
from tests.checkpoints import make_variant

SHARED = 4
"""Daemons of a worker."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_variant(tmp_path_factory.mktemp("model"), "llama-grouped")


@pytest.fixture(scope="session")
def reference(folder: Path) -> PlainModel:
    return PlainModel(ModelFiles(str(folder)), "float32")


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(SHARED, log_level="CRITICAL") as started:
        yield started


@pytest.fixture(scope="session")
def daemons(cluster: LocalCluster) -> list[LocalDaemon]:
    """Daemons that serve one test after another, as daemons do."""
    return cluster.wait()


@pytest.fixture
def lent(daemons: list[LocalDaemon], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions on this machine begin no daemons of their own: they get the shared ones."""

    class Lent(LocalCluster):
        def __init__(self, count: int, **options: Any) -> None:
            assert count <= SHARED
            self._daemons = daemons[:count]

        def close(self) -> None:
            """They serve the next."""

    monkeypatch.setattr("flowspec.runtime.session.LocalCluster", Lent)


@pytest.fixture
def doomed() -> Iterator[list[LocalDaemon]]:
    """Daemons that a test may kill."""
    with LocalCluster(3, log_level="CRITICAL") as started:
        yield started.wait()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., LocalDaemon]]:
    """Starts a daemon in a thread; its store is `tmp_path / "store"` unless told otherwise."""
    started: list[tuple[Daemon, threading.Thread]] = []

    def start(store: str = "store", name: str = "alone", **machine: Any) -> LocalDaemon:
        allowed = Machine(device="cpu", threads=1, cache_dir=tmp_path / store, **machine)
        daemon = Daemon(host="127.0.0.1", port=0, name=name, machine=allowed)
        thread = threading.Thread(target=daemon.run)
        thread.start()
        started.append((daemon, thread))
        return LocalDaemon(name=name, port=daemon.port, pid=os.getpid())

    yield start
    for daemon, thread in started:
        daemon.stop("the test is over")
        thread.join()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says nothing is lost soon, and looked for often."""
    monkeypatch.setattr(timeouts, "SILENT_S", 2.0)
    monkeypatch.setattr(timeouts, "PROBE_EVERY_S", 0.5)
    monkeypatch.setattr(timeouts, "BACK_S", 0.5)
