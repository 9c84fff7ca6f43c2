"""Scripts of launch/ that are Python, as modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """The script launch/`name`, not run."""
    loader = SourceFileLoader(f"launch_{name}", str(ROOT / "launch" / name))
    spec = spec_from_file_location(loader.name, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look themselves up there
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it would lie beside the script
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module


def fake_program(name: str) -> str:
    """The text of a program that stands for a real one."""
    return (ROOT / "tests" / "data" / "programs" / f"{name}.sh").read_text("utf-8")


def program(path: Path, text: str) -> None:
    """Makes a program of a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def ran(
    words: Sequence[str | Path], environment: Mapping[str, str], seconds: int = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, errors="surrogateescape", timeout=seconds
    )
