import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from flowspec.model.files import DEMO_FOLDER
from tests import warm
from tests.caches import make_cache

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # the suite runs in the background; commands hear Ctrl-C all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, each with processes of its own
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # those with more wait without keeping a core busy
os.environ["HF_HUB_OFFLINE"] = "1"  # the hub is no part of any test

_state = tempfile.TemporaryDirectory(prefix="flowspec-state-")
os.environ["XDG_STATE_HOME"] = _state.name  # what chats keep is not the user's
os.environ["XDG_RUNTIME_DIR"] = _state.name  # nor is what daemons were promised
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")
)  # its list of fonts takes long to make
os.environ["XDG_CACHE_HOME"] = make_cache(Path(_state.name) / "cache")  # nor are digests of weights

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.register_profile(
    "deep", settings.get_profile("suite"), derandomize=False, max_examples=5000
)  # --hypothesis-profile=deep --timeout=0
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def warm_pools() -> Iterator[None]:
    """Local clusters start warm, in commands that tests start warm too; see `tests.warm`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowspec.runtime.local.start_pool", warm.start_pool)
        yield


@pytest.fixture(scope="session")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Two fresh processes: what they compute depends on its seed alone, so it does not matter who computes
    it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1), mp_context=context) as pool:
        yield pool


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
