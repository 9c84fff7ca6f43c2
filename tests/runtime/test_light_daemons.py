"""Daemons on CPUs run without torch and transformers, and take little memory besides their weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flowspec.core.methods import make_method
from flowspec.model.accelerator import has_driver
from flowspec.model.files import bundled_folder
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from tests.daemons import daemon_process
from tests.ggufs import convert
from tests.runtime.clusters import drafter_for, listening, plan_for, submit, tokens_of

pytestmark = pytest.mark.skipif(has_driver(), reason="torch is imported for the GPU")

EXTRA_BYTES_MAX = 70 << 20
"""Some 52 MiB are taken: Python, numpy, ZeroMQ, caches, and what loading left."""
MODULES = "modules:"
CODE = (
    "import os, sys; from flowspec.cli.main import main; end = os._exit; "
    f"told = lambda: print('{MODULES}', *sys.modules, file=sys.stderr, flush=True); "
    "os._exit = lambda status: (told(), end(status)); os._exit(main())"
)
"""A daemon that names in the end what it has imported."""
HEAVY = ("torch", "transformers")


def test_what_a_daemon_imports_needs_neither() -> None:
    names = ("daemon", "compute", "loading", "fork_server")
    imports = ", ".join(f"flowspec.runtime.{name}" for name in names)
    code = f"import sys, {imports}, flowspec.model.slice, flowspec.model.engines, flowspec.draft.registry; "
    code += f"print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@contextmanager
def light_daemon() -> Iterator[LocalDaemon]:
    """A daemon that is held to what the module says once it has done its work."""
    with daemon_process("light", run=("-c", CODE)) as process:
        yield listening(process)
        process.stop()
        (told,) = (line for line in process.lines if line.startswith(MODULES))
        imported = {name.partition(".")[0] for name in told.split()}
        assert "numpy" in imported
        assert not imported & {*HEAVY}


def check_memory(daemon: LocalDaemon, weight_bytes: int) -> None:
    assert weight_bytes > 0
    mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "numpy" in mapped
    assert not any(name in mapped for name in HEAVY)
    extra = psutil.Process(daemon.pid).memory_info().rss - weight_bytes
    assert extra <= EXTRA_BYTES_MAX, f"{extra >> 20} MiB and {weight_bytes >> 20} of weights"


def check_answer(plan: ClusterPlan, daemon: LocalDaemon) -> None:
    with Head(plan) as head:
        assert len(tokens_of(submit(head, count=12))) == 12
        (stage,) = head.stages
        assert stage.ready is not None
        check_memory(daemon, stage.ready.weight_bytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_with_a_model_that_it_finds(dtype: str) -> None:
    with light_daemon() as daemon:
        check_answer(replace(plan_for(bundled_folder("target"), [daemon]), dtype=dtype), daemon)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_with_a_model_that_it_is_sent(is_gguf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with light_daemon() as daemon:
        monkeypatch.chdir(tmp_path)
        model = shutil.copytree(bundled_folder("target"), tmp_path / "model")
        path = convert(model, tmp_path / "model.gguf") if is_gguf else model
        check_answer(replace(plan_for(path, [daemon]), model=path.name, dtype="bfloat16"), daemon)


def test_as_a_drafter(daemons: list[LocalDaemon], folder: Path) -> None:
    with light_daemon() as daemon:
        plan, drafter = plan_for(folder, daemons[:2]), drafter_for(folder, daemon)
        with Head(plan, method=make_method("continuous"), drafters=[drafter]) as head:
            assert len(tokens_of(submit(head, count=12))) == 12
            (remote,) = head.drafters
            check_memory(daemon, remote.report()["weight_bytes"])
