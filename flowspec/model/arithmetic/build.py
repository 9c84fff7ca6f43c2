"""Builds the canonical arithmetic's C file by the system's compiler, once for a processor. Imports no torch.

What was built is kept in the user's cache folder, by source, compiler and what the compiler knows of the
processor; a file that is damaged, as after a power cut, is built again. It is tried before it is used
(`trials.py`); `allow` is said by who has done that.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from flowspec.folders import OWN_BYTES_MAX, cache_folder, is_own, locked, private_folder, read_regular

SOURCE = Path(__file__).with_name("canonical.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC")
LEVELS = {
    "x86_64": (("-march=native",), ("-march=x86-64-v3",), ("-march=x86-64",)),
    "aarch64": (("-march=native",), ("-mcpu=native",), ("-march=armv8-a",)),
}
"""How compilers are asked for all that this processor can, and for less, by the machine's name. All give the
same bits."""
Level = tuple[str, ...]
NO_COMPILER = "no C compiler works there; install gcc"
BUILD_S = 900.0
ROOM_BYTES = 8 << 20
"""What building takes of a disk, several times over."""
_allowed: Path | None = None
_why_not = ""

log = logging.getLogger("flowspec.kernels")


def allow(path: Path | None) -> None:
    """From now on this process uses what was built there; with None nothing that was built."""
    global _allowed
    _allowed = path


def allowed() -> Path | None:
    """What this process may use."""
    return _allowed


def levels() -> Iterator[Level]:
    """Those of this machine, the best first; one alone where `FLOWSPEC_CFLAGS` has its flags."""
    wanted = os.environ.get("FLOWSPEC_CFLAGS", "").split()
    known = (tuple(wanted),) if wanted else LEVELS.get(platform.machine(), ())
    found = False
    for level in known:
        if _compiler(level):
            found = True
            yield level
    if not found:
        yield ()


def build(level: Level = (), tell: Callable[[float], None] = lambda share: None) -> Path | None:
    """Builds the library for a level (none: for the best) if that was not done before, which it is to `tell`
    first; None where that cannot be, for what `why_not` says."""
    global _why_not
    try:
        return _built(level or next(levels()), tell)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _why_not = f"{where}{error.strerror or error}"
        return None


def why_not() -> str:
    """Why the last build of this process gave nothing, and what to do."""
    return _why_not or NO_COMPILER


def _built(level: Level, tell: Callable[[float], None]) -> Path | None:
    """Raises `OSError` with why there is no library."""
    compiler = _compiler(level)
    if compiler is None:
        raise OSError(NO_COMPILER)
    command, description = compiler
    flags, linked = [*FLAGS, *level, *has_threads(command)], ["-shared", *has_threads(command), "-lm"]
    content = repr((description, flags, linked)).encode() + SOURCE.read_bytes()
    folder = _private_folder(cache_folder() / "arithmetic")
    name = f"canonical-{hashlib.sha256(content).hexdigest()[:24]}"
    found = _whole(folder, name)
    if found is not None:
        return found
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        room = f"{free >> 10} KiB, expected {ROOM_BYTES >> 20} MiB"
        raise OSError(f"{folder} has room for {room}; make room there")
    log.info("compiling kernels for this processor, once: what comes of it is kept in %s", folder)
    tell(0.0)
    with locked(folder / name, lambda: tell(0.0)):
        return _whole(folder, name) or _compile(command, flags, linked, folder, name)


@functools.cache
def _private_folder(folder: Path) -> Path:
    """The same all the time that this process runs."""
    return private_folder(folder)


def _whole(folder: Path, name: str) -> Path | None:
    """What was built under this name, if it has the bytes that it had then."""
    for path in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):
            if is_own(path) and path.name == f"{name}-{_hash(path)}.so":
                return path
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(read_regular(path, OWN_BYTES_MAX)).hexdigest()[:24]


def _compile(command: str, flags: list[str], linked: list[str], folder: Path, name: str) -> Path:
    """Builds it in place of what is there under this name. Raises `OSError`."""
    for damaged in folder.glob(f"{name}-*.so"):
        damaged.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as room:
        object_file, made = Path(room, "canonical.o"), Path(room, "canonical.so")
        for words in (
            [*flags, "-c", str(SOURCE), "-o", str(object_file)],
            [str(object_file), *linked, "-o", str(made)],
        ):
            if not _run(command, *words):
                raise OSError(f"{command} cannot compile {SOURCE.name}; install another gcc or clang")
        path = folder / f"{name}-{_hash(made)}.so"
        os.replace(made, path)
    return path


@functools.cache
def _compiler(level: Level) -> tuple[str, str] | None:
    """A compiler, and all that it says of itself and of what the level has."""
    for name in filter(None, (os.environ.get("CC"), *COMPILERS)):
        command = shutil.which(name)
        if command is not None:
            found = _run(command, *level, "-E", "-dM", "-x", "c", os.devnull)
            if found:
                return command, found
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
def has_threads(command: str) -> tuple[str, ...]:
    """The flag with which a compiler's code runs on several cores; none where it cannot."""
    flag = "-fopenmp"
    return (flag,) if _run(command, flag, "-shared", "-x", "c", os.devnull, "-o", os.devnull) else ()
