"""Builds the canonical arithmetic's C file by the system's compiler, once for a processor. Imports no torch.

Nothing needs it: without a compiler `plain.py`, which says what is computed, computes it, too. What was built
is kept in the user's cache folder, by source, compiler and what the compiler knows of the processor. It is
tried before it is used, as kernels are (`trials.py`); `allow` is said by who has done that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from flowspec.folders import cache_folder, locked

SOURCE = Path(__file__).with_name("canonical.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC")
NATIVE = ("-march=native", "-mcpu=native")
"""How compilers are asked for all that this processor can, on x86 and on ARM."""
BUILD_S = 300.0
_allowed: Path | None = None


def allow(path: Path | None) -> None:
    """From now on this process uses what was built there; with None nothing that was built."""
    global _allowed
    _allowed = path


def allowed() -> Path | None:
    """What this process may use."""
    return _allowed


def build() -> Path | None:
    """Builds the library for this processor if that was not done before; None where no compiler can."""
    compiler = _compiler()
    if compiler is None:
        return None
    command, native, description = compiler
    flags = [*FLAGS, *native, *(["-fopenmp"] if openmp() else [])]
    content = repr((description, flags)).encode() + SOURCE.read_bytes()
    path = cache_folder() / "arithmetic" / f"canonical-{hashlib.sha256(content).hexdigest()[:24]}.so"
    if path.exists():
        return path
    try:
        with locked(path):
            return path if path.exists() or _compile(command, flags, path) else None
    except OSError:
        return None


def _compile(command: str, flags: list[str], path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_file, made = f"{folder}/canonical.o", f"{folder}/canonical.so"
        for words in (
            [*flags, "-c", str(SOURCE), "-o", object_file],
            ["-shared", object_file, "-lm", "-o", made],
        ):
            if not _run(command, *words):
                return False
        os.replace(made, path)
    return True


@functools.cache
def _compiler() -> tuple[str, list[str], str] | None:
    """A compiler, how it is asked for this processor, and all that it says of itself and of the processor."""
    for name in filter(None, (os.environ.get("CC"), *COMPILERS)):
        command = shutil.which(name)
        for native in [[word] for word in NATIVE] if command else []:
            found = _run(command or "", *native, "-E", "-dM", "-x", "c", os.devnull)
            if found:
                return command or "", native, found
    return None


def _run(*words: str) -> str:
    """What a command printed; empty where it failed."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=BUILD_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout or "done" if done.returncode == 0 else ""


@functools.cache
def openmp() -> str:
    """The file of GNU's OpenMP that torch brings; empty where it uses another one, or none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent
    found = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    return str(found[0]) if len(found) == 1 else ""
