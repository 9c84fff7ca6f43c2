import functools
import os
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from flowspec.cli import commands
from flowspec.model.files import DEMO_FOLDER
from tests import nightly, warm
from tests.caches import make_cache

# The suite runs in the background; commands hear Ctrl-C all the same.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, each with processes of its own
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # those with more wait without keeping a core busy
os.environ["HF_HUB_OFFLINE"] = "1"  # the hub is no part of any test

_state = tempfile.TemporaryDirectory(prefix="flowspec-state-")
os.environ["XDG_STATE_HOME"] = _state.name  # what chats keep is not the user's
os.environ["XDG_RUNTIME_DIR"] = _state.name  # nor is what daemons were promised
# Its list of fonts takes long to make.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = make_cache(Path(_state.name) / "cache")  # nor are digests of weights
for _name in ("COLUMNS", "LINES", "FLOWSPEC_CONSTRAINTS", "FLOWSPEC_VENV", "PYTHON"):
    os.environ.pop(_name, None)  # a worker of the suite has them, and no terminal; the rest is launch/test's

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60 // (nightly.FEWER or 1))
settings.register_profile("nightly", settings.get_profile("suite"), derandomize=False, max_examples=500)
settings.load_profile("suite")


BEGAN_S = pytest.StashKey[float]()
SUM, SUM_S, sums_s = 100_000, 0.0037, list[float]()
PROCESS_WORDS = re.compile(
    r"\bsubprocess\b|\bwarm\b|LocalCluster|DaemonProcess|ProcessPool|multiprocessing|open_session|\bLLM\("
    r"|\"--local\"|tests\.daemons|tests\.cli\.terminal|lab\.checks|open_cluster|run_live"
)
PROCESS_FIXTURES = {"alone", "browsers", "cluster", "doomed", "llm", "real", "server", "session", "shared"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `process` what has a fixture that starts processes, or lies in a file that does."""
    files: dict[Path, bool] = {}
    for item in items:
        if item.path not in files:
            files[item.path] = bool(PROCESS_WORDS.search(item.path.read_text("utf-8")))
        if files[item.path] or PROCESS_FIXTURES & {*getattr(item, "fixturenames", ())}:
            item.add_marker("process")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--limit-minutes", type=float, help="fail if the suite is more work")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN_S] = time.monotonic()


@pytest.hookimpl(trylast=True)  # the workers are gone, so that their time is known
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and is_over_limit(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Takes the time of a sum, so often that what neighbours take from this machine shows."""
    if report.when == "call" and len(report.nodeid) % 32 == 0:
        began_s = time.thread_time()
        sum(number * number for number in range(SUM))
        sums_s.append(time.thread_time() - began_s)


def work_minutes() -> float:
    """Processor time of this process and of all that it started and saw end, in minutes of two processors
    that take `SUM_S` for a sum: a busy or a slow machine fails no suite that is as fast as ever."""
    times, sum_s = os.times(), statistics.fmean(sums_s or [SUM_S])
    return sum(times[:4]) / 60 / 2 * SUM_S / sum_s


def is_over_limit(config: pytest.Config) -> bool:
    limit = config.option.limit_minutes
    return limit is not None and work_minutes() > limit and not hasattr(config, "workerinput")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The seconds that tests took, by folder; `--durations` shows single ones."""
    spent_s: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent_s["/".join(Path(report.nodeid.split("::")[0]).parts[:2])] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, seconds in sorted(spent_s.items(), key=lambda pair: -pair[1]):
        terminalreporter.write_line(f"{seconds:8.1f} {folder}")
    terminalreporter.write_line(f"{sum(spent_s.values()):8.1f} all")
    minutes, work = (time.monotonic() - config.stash[BEGAN_S]) / 60, work_minutes()
    terminalreporter.write_line(f"{minutes:.1f} minutes, {work:.1f} of work, as it is limited")
    if is_over_limit(config):
        terminalreporter.write_line(f"expected at most {config.option.limit_minutes:g}: see what is slow")


@pytest.fixture(scope="session", autouse=True)
def warm_pools() -> Iterator[None]:
    """Local clusters start warm, in commands that tests start warm too; see `tests.warm`. What commands are
    said to do is read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowspec.runtime.local.start_pool", warm.start_pool)
        patch.setattr("flowspec.cli.commands._summary", functools.cache(commands._summary))
        yield


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's files."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def known_model(tmp_path: Path) -> str:
    """The bundled model under the name of one that drafters are published for."""
    return str(shutil.copytree(DEMO_FOLDER / "target", tmp_path / "Llama-2-7b-chat-hf"))
