"""Clusters of local processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.runtime.local import LocalCluster
from flowspec.testbed.checkpoints import make_variant


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_variant(tmp_path_factory.mktemp("model"), "llama-grouped")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(ModelFiles(str(folder)), "float32")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Daemons that serve one test after another, as daemons do."""
    with LocalCluster(3, family="llama", log_level="CRITICAL") as started:
        yield started


@pytest.fixture
def doomed() -> Iterator[LocalCluster]:
    """Daemons that a test may kill."""
    with LocalCluster(3, family="llama", log_level="CRITICAL") as started:
        yield started
