"""A plugin of pytest, for runs that take hours: what passed in an earlier one is not run again.

    pytest -p lab.arm64.resumed --resumed FILE ...

FILE has the names of tests, a line each, and gets more as tests pass; a test that was skipped has passed.
With xdist the workers are told what the file held in the beginning, so that all of them collect the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PASSED = pytest.StashKey[set[str]]()
"""Tests that passed before."""
FAILED = pytest.StashKey[set[str]]()
"""Those of which a part failed in this run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resumed", type=Path, required=True, metavar="FILE", help="tests that passed")


def pytest_configure(config: pytest.Config) -> None:
    told = getattr(config, "workerinput", None)
    file: Path = config.getoption("resumed")
    held = told["resumed"] if told else file.read_text("utf-8").splitlines() if file.exists() else []
    config.stash[PASSED], config.stash[FAILED] = set(held), set()
    if told is None:
        config.pluginmanager.register(_Record(config, file))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["resumed"] = sorted(node.config.stash[PASSED])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = config.stash[PASSED]
    done = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=done)


class _Record:
    """Where tests are reported: in the process that was started, not in workers."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._passed, self._failed, self._file = config.stash[PASSED], config.stash[FAILED], file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK
