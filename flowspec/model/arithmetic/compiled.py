"""The canonical arithmetic's C file as a library, called by ctypes: one of those that came with the wheel, or
one that the system's compiler builds, once for a processor. Imports no torch.

What was built here is kept in the user's cache folder, by source, compiler and what the compiler knows of the
processor; a file that is damaged, as after a power cut, is built again. Each is tried before it is used
(`engines.py`).

`python -m flowspec.model.arithmetic.compiled MACHINE FOLDER` builds those of a wheel, by the compiler that
`CC` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from flowspec.errors import InputError
from flowspec.folders import OWN_BYTES_MAX, cache_folder, is_own, locked, private_folder, read_regular
from flowspec.model.arithmetic import plain

SOURCE = Path(__file__).with_name("canonical.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
THREADS_FLAG = "-fopenmp"  # with which code runs on several cores; some compilers have it not
LEVELS = {
    "x86_64": (("-march=native",), ("-march=x86-64-v3",), ("-march=x86-64",)),
    "aarch64": (("-march=native",), ("-mcpu=native",), ("-march=armv8-a",)),
}
"""How compilers are asked for all that this processor can, and for less, by the machine's name. All give the
same bits."""
Level = tuple[str, ...]
WHEEL: dict[str, dict[str, Level]] = {
    "x86_64": {
        "avx512-bf16": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mtune=icelake-server"),
        "avx512-vnni": ("-march=x86-64-v4", "-mavx512vnni", "-mtune=icelake-server"),
        "avx2": ("-march=x86-64-v3",),
        "x86-64": ("-march=x86-64",),
    },
    "aarch64": {
        "dotprod": ("-march=armv8.2-a+fp16+dotprod", "-mtune=cortex-a76"),
        "armv8": ("-march=armv8-a", "-mtune=cortex-a72"),
    },
}
"""What libraries of a wheel are built for, by the machine's name, the best first. Tuned for no processor,
code with AVX-512 takes half as long again to decode on Zen 4."""
WHEEL_FOLDER = Path(__file__).with_name("built")  # has `{level}-{hash}.so`, and GCC's OpenMP for them
OPENMP = "libgomp.so.1"
OPENMP_LICENSE = (
    "libgomp.so.1 is a part of GCC: https://gcc.gnu.org, GNU General Public License 3 with the GCC Runtime "
    "Library Exception 3.1, https://www.gnu.org/licenses/gcc-exception-3.1.html\n"
)
BUILD_S = 900.0
ROOM_BYTES = 8 << 20  # what building takes of a disk, several times over

log = logging.getLogger("flowspec.kernels")


# ------------------------------------------------------------------------------------------- building


def levels() -> Iterator[Level]:
    """Those of this machine, the best first; one alone where `FLOWSPEC_CFLAGS` has its flags."""
    wanted = os.environ.get("FLOWSPEC_CFLAGS", "").split()
    known = (tuple(wanted),) if wanted else LEVELS.get(platform.machine(), ())
    yield from filter(_compiler, known)
    if not any(map(_compiler, known)):
        yield ()


def libraries(tell: Callable[[float], None]) -> Iterator[tuple[str, Path | None, str]]:
    """For this machine, the best first: what each is built for, its path, and without one why. Those of the
    wheel come before those that are built now; where `FLOWSPEC_CFLAGS` has flags, these count alone."""
    for name in () if os.environ.get("FLOWSPEC_CFLAGS") else WHEEL.get(platform.machine(), ()):
        for path in sorted(WHEEL_FOLDER.glob(f"{name}-*.so")):
            try:
                is_whole, why = path.stem.endswith(_wheel_hash(path)), "is damaged, or of another version"
            except OSError as error:
                is_whole, why = False, f"cannot be read ({error.strerror})"
            yield name, path if is_whole else None, f"{path} {why}; install FlowSpec's wheel again"
    for level in levels():
        try:
            yield " ".join(level), build(level, tell), ""
        except InputError as error:
            yield " ".join(level), None, str(error)


def build(level: Level = (), tell: Callable[[float], None] = lambda share: None) -> Path:
    """Builds the library for a level (none: for the best) if that was not done before, which it is to `tell`
    first. Raises `InputError` where that cannot be, with why and what to do."""
    try:
        return _built(level or next(levels()), tell)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(
            "FlowSpec computes with kernels that it compiles once, and cannot here: "
            f"{where}{error.strerror or error}"
        ) from error


def _built(level: Level, tell: Callable[[float], None]) -> Path:
    found = _compiler(level)
    if found is None:
        raise OSError("no C compiler works there; install gcc")
    compiler, description = found
    command = [compiler, *FLAGS, *level, *_flag_of_threads(compiler)]
    content = repr((description, command[1:])).encode() + SOURCE.read_bytes()
    folder = _private_folder(cache_folder() / "arithmetic")
    name = f"canonical-{hashlib.sha256(content).hexdigest()[:24]}"
    whole = _whole(folder, name)
    if whole is not None:
        return whole
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        sizes = f"{free >> 10} KiB, expected {ROOM_BYTES >> 20} MiB"
        raise OSError(f"{folder} has room for {sizes}; make room there")
    log.info("compiling kernels for this processor, once: what comes of it is kept in %s", folder)
    tell(0.0)
    with locked(folder / name, lambda: tell(0.0)), tempfile.TemporaryDirectory(dir=folder) as room:
        if (whole := _whole(folder, name)) is not None:
            return whole
        for damaged in folder.glob(f"{name}-*.so"):
            damaged.unlink()
        made = Path(room, "canonical.so")
        if not _run(*command, str(SOURCE), "-lm", "-o", str(made)):
            raise OSError(f"{command[0]} cannot compile {SOURCE.name}; install another gcc or clang")
        path = folder / f"{name}-{_hash(made)}.so"
        os.replace(made, path)
        return path


_private_folder = functools.cache(private_folder)  # the same all the time that this process runs


def _whole(folder: Path, name: str) -> Path | None:
    """What was built under this name, if it has the bytes that it had then."""
    for path in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):
            if is_own(path) and path.name == f"{name}-{_hash(path)}.so":
                return path
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(read_regular(path, OWN_BYTES_MAX)).hexdigest()[:24]


def _wheel_hash(path: Path) -> str:
    """Of all that the library of a wheel is made of and stands on."""
    files = SOURCE, path, path.with_name(OPENMP)
    return hashlib.sha256(b"".join(read_regular(each, OWN_BYTES_MAX) for each in files)).hexdigest()[:24]


def build_wheel(machine: str, folder: Path) -> None:
    """Builds the libraries of a wheel for a machine into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler, made = os.environ.get("CC", "gcc"), folder / "made.so"
    asked = [compiler, f"-print-file-name={OPENMP}"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    shutil.copyfile(found, folder / OPENMP)
    (folder / "LICENSE.libgomp").write_text(OPENMP_LICENSE, "utf-8")
    for name, level in WHEEL[machine].items():
        command = [compiler, *FLAGS, *level, THREADS_FLAG, "-s", "-Wl,-rpath,$ORIGIN", str(SOURCE), "-lm"]
        subprocess.run([*command, "-o", str(made)], check=True)
        made.rename(folder / f"{name}-{_wheel_hash(made)}.so")


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


@functools.cache
def _flag_of_threads(compiler: str) -> list[str]:
    is_known = _run(compiler, THREADS_FLAG, "-shared", "-x", "c", os.devnull, "-o", os.devnull)
    return [THREADS_FLAG] if is_known else []


def _run(*words: str) -> str:
    """What a command printed; empty where it failed."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=BUILD_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout or "done" if done.returncode == 0 else ""


# -------------------------------------------------------------------------------------------- calling

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}  # in the source's order
FUNCTIONS = tuple(plain.FUNCTIONS)


@functools.cache
def kind_of(dtype: Any) -> int:
    """Of torch or numpy, which has no bfloat16: its bits are uint16 there. -1: of what is none of them."""
    name = str(dtype).rpartition(".")[2]
    return KINDS.get("bfloat16" if name == "uint16" else name, -1)


def address(x: Any) -> int:
    """Of an array's numbers."""
    found: int = x.__array_interface__["data"][0]
    return found


_threads = 0


def use_threads(count: int | None) -> None:
    """So many compute from now on in this process; None leaves it as it is."""
    global _threads
    _threads = count or _threads


def threads() -> int:
    """How many compute: as many as were told, or as `OMP_NUM_THREADS` says, or one on each core."""
    if not _threads:
        told = os.environ.get("OMP_NUM_THREADS", "")
        cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
        use_threads((int(told) if told.isdecimal() else 0) or cores)
    return _threads


def fields(pointers: str, longs: str, ints: str = "", floats: str = "") -> tuple[tuple[str, type], ...]:
    """Of a structure: names of those of each kind, in this order."""
    kinds = (
        (ctypes.c_void_p, pointers),
        (ctypes.c_int64, longs),
        (ctypes.c_int32, ints),
        (ctypes.c_float, floats),
    )
    return tuple((name, kind) for kind, names in kinds for name in names.split())


class StoredFields(ctypes.Structure):
    """As in the sources, as the other structures are."""

    _fields_ = fields(
        "keys values places to_keys to_values key_steps value_steps",
        "rows kv_heads width value_width slots"
        " between_keys between_key_heads between_values between_value_heads",
        "cache_kind",
    )


class TurnFields(ctypes.Structure):
    _fields_ = fields("x cosine sine y", "rows heads width turned between_rows between_heads")


class Operation(ctypes.Structure):
    _fields_ = fields(
        "weights bias scales",
        "from_at with_at to_at inputs outputs",
        "code source other to waits how kind heads kv_heads spread experts",
        "factor eps cap",
    )


class ProgramFields(ctypes.Structure):
    _fields_ = fields(
        "operations widths starts", "count registers numbers sums products", "kind experts chosen"
    )


class Cache(ctypes.Structure):
    _fields_ = fields("keys values key_steps value_steps inputs state", "slots inputs_width", "kind")


class Part(ctypes.Structure):
    _fields_ = fields(
        "cache slots seen order ends lines steps", "first rows high blocks nodes steps_count places"
    )


class Call(ctypes.Structure):
    _fields_ = fields(
        "hidden going cosine sine embedding tokens parts room",
        "rows parts_count room_bytes angles between_embeddings between_going",
        "threads",
    )


class Library:
    """The functions of the source, built at a `path`, with what they take and give."""

    def __init__(self, path: Path) -> None:
        library, self.path = ctypes.CDLL(str(path)), path
        number, pointer, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int

        def of(name: str, *given: Any, gives: Any = None) -> Any:
            found = library[f"flowspec_{name}"]
            found.argtypes, found.restype = given, gives
            return found

        self.run = of("run", pointer, pointer, gives=number)
        """Of pointers to a `ProgramFields` and a `Call`; gives 0, or how many bytes of room that needs, where
        it has less and nothing was done."""
        self.function = of("function", pointer, number, small, pointer, pointer)
        self.levels = of("levels", pointer, number, number, pointer, pointer)
        self.packed_rows = of("packed_rows", pointer, small, number, pointer, number, pointer)
        self.angles = of("angles", pointer, number, pointer, number, ctypes.c_float, pointer, pointer)
        self.turn = of("turn", ctypes.POINTER(TurnFields))
        self.store = of("store", ctypes.POINTER(StoredFields))


_library: Library | None = None


def use(library: Library | None) -> None:
    """From now on this process computes by a library that was tried; None: by none."""
    global _library
    _library = library


def library() -> Library | None:
    """What this process computes by."""
    return _library


if __name__ == "__main__":
    build_wheel(sys.argv[1], Path(sys.argv[2]))
