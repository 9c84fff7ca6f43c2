"""Trials of kernels on this processor: in a child process, so that an illegal instruction does not end ours.

What was found is kept for this processor, the libraries that torch loaded, and the code that was tried.
Knows no tensors and imports no torch: whether torch can be imported at all is the first thing that is tried.
The checks themselves are in `kernel_checks.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from flowspec.child_process import python_module
from flowspec.core.protocol.precision import is_packed
from flowspec.errors import InputError
from flowspec.folders import cache_folder, locked, read_own, tell_of_damage, write_own
from flowspec.model.arithmetic import build
from flowspec.model.device_errors import tells_of_memory

CODE = (
    *("trials", "kernel_checks", "kernels", "quantised", "quantised_cuda", "half"),
    *("attention", "accelerator", "products", "gguf_layers", "program"),
    *("arithmetic/plain", "arithmetic/arrays", "arithmetic/packed", "arithmetic/norms", "arithmetic/delta"),
    *("arithmetic/operations", "arithmetic/compiled", "arithmetic/compiled_cuda", "arithmetic/build"),
)
"""The modules that are tried, or that try: what was found holds for them as they are."""
IMPORT_S = 170.0
"""How long the child may take until torch is imported; from a slow card it takes most of a minute."""
TRIAL_S = 120.0
"""How long one kernel's trial may go on without a sign of life. It gives some twenty, and takes a second in
all on a laptop, a minute on an emulated board."""
TELL_S = 1.0
ERROR_CHARS_MAX = 300
"""Of what a child that failed said last."""
CHILD = tuple(python_module("flowspec.model.kernel_checks"))
ATTENTION = "attention"
"""What is tried beside kernels: all that a layer computes without a matrix of weights. Nothing can take its
place."""
COMPILED = "canonical.c"
"""What is tried first of all where it could be built; the definitions in torch take its place."""
COMPILED_GPU = "canonical.cu"
"""The same on a GPU, where NVRTC builds it."""
_SWITCHES = (
    *("ATEN_", "BLIS_", "DNNL_", "FBGEMM_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_"),
    *("ONEDNN_", "OPENBLAS_", "PYTORCH_", "QEMU_CPU", "TORCH_"),
)
_SWITCHES_CUDA = ("CUBLAS", "CUDA_", "CUDNN_", "NVIDIA_")
"""How variables of the environment begin that make libraries take other instructions, or load others. How
many threads there are when a process starts counts: OpenBLAS on ARM gives a row other bits then, whatever is
chosen later."""
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/etc/nv_tegra_release", "/proc/device-tree/model")
_GPU_FILES = "/proc/driver/nvidia/gpus/*/information"
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
"""Signals that come from outside, as from the system where memory runs out: none is a kernel's own fault."""
log = logging.getLogger("flowspec.kernels")

Libraries = dict[str, list[int]]
"""Files of shared libraries, each with its size and the time when it was written."""


class NoRightKernelError(InputError):
    """Every kernel of a precision is wrong here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """What a trial found of one kernel; `fault` is empty where it is right, and computes this `arithmetic`.

    `may_pass`: the machine's state may be the reason, such as little memory or much else to do. The next
    trial may find otherwise.
    """

    kernel: str
    fault: str
    may_pass: bool = False
    arithmetic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The kernels of a precision on a device, best first: of each arithmetic up to the first right one."""

    dtype: str
    device: str
    verdicts: tuple[TrialVerdict, ...]
    libraries: Libraries = field(default_factory=dict)
    """Those that torch had loaded at the end."""

    @property
    def right(self) -> tuple[TrialVerdict, ...]:
        """What may be used: nothing where attention is wrong."""
        if any(verdict.kernel == ATTENTION and verdict.fault for verdict in self.verdicts):
            return ()
        return tuple(
            verdict
            for verdict in self.verdicts
            if not verdict.fault and verdict.kernel not in (ATTENTION, COMPILED, COMPILED_GPU)
        )

    @property
    def has_compiled(self) -> bool:
        """Whether what was built of `canonical.c` is right."""
        return any(verdict.kernel == COMPILED and not verdict.fault for verdict in self.verdicts)

    @property
    def has_compiled_for_gpu(self) -> bool:
        """Whether what is built of `canonical.cu` is right."""
        return any(verdict.kernel == COMPILED_GPU and not verdict.fault for verdict in self.verdicts)

    @property
    def kernel(self) -> str:
        """The best one; empty where none is right."""
        return self.right[0].kernel if self.right else ""

    @property
    def arithmetics(self) -> tuple[str, ...]:
        """Those of the kernels that are right, the best first."""
        return tuple(dict.fromkeys(verdict.arithmetic for verdict in self.right))

    def kernel_of(self, arithmetic: str) -> str:
        """The best one that computes this arithmetic (empty: of all). Raises `InputError` where none does."""
        if not arithmetic:
            return self.kernel
        for verdict in self.right:
            if verdict.arithmetic == arithmetic:
                return verdict.kernel
        where = f"{self.device} with torch {torch_version()} on {processor()}"
        has = ", ".join(self.arithmetics)
        raise InputError(f"expected the arithmetic {arithmetic} of {self.dtype}, {where} has {has}")

    @property
    def faults(self) -> str:
        """What is wrong with those that are better than the best right one; empty where none is."""
        best = next((place for place, verdict in enumerate(self.verdicts) if verdict in self.right), None)
        told = self.verdicts[:best]
        return "; ".join(f"{verdict.kernel} {verdict.fault}" for verdict in told if verdict.fault)

    @property
    def slowed_by(self) -> str:
        """Why this precision may be slow here: `faults`, and a library that could not be built; else
        empty."""
        is_missing = self.device == "cpu" and all(verdict.kernel != COMPILED for verdict in self.verdicts)
        missing = f"the faster library is not built ({build.why_not()})" if is_missing else ""
        return "; ".join(filter(None, (self.faults, missing)))

    @property
    def detour(self) -> str:
        """A line for people where `slowed_by` is one; else empty."""
        where = f"{self.dtype} with torch {torch_version()} on {processor()}"
        return f"{where}: {self.kernel} is used, for {self.slowed_by}" if self.slowed_by else ""


_found: dict[tuple[str, str], Trial] = {}
"""What this process knows already; a processor does not change."""
Tell = Callable[[float], None]
"""Told now and then how far a trial has come, from 0 to 1, so that whoever waits knows that it goes on."""
Look = Callable[[str, float], None]
"""The same, with what is done: `COMPILING` or `TRYING`."""
COMPILING, TRYING = "compiling kernels", "trying kernels"
_onlookers: list[Look] = []


@contextlib.contextmanager
def shown_to(look: Look) -> Iterator[None]:
    """Tells of all trials of this process, also of those that begin where a drafter is loaded, far from
    whoever waits."""
    _onlookers.append(look)
    try:
        yield
    finally:
        _onlookers.remove(look)


def check_torch(tell: Tell = lambda share: None) -> None:
    """Makes sure that torch may be imported into this process, and computes float32, which all else needs.

    Raises `InputError` where importing it would end us.
    """
    tried("float32", "cpu", tell)


def tried(dtype: str, device: str, tell: Tell = lambda share: None) -> Trial:
    """`run_trial`, or what it found earlier in this process."""
    return _found.get((dtype, device)) or run_trial(dtype, device, tell)


def run_trial(
    dtype: str,
    device: str,
    tell: Tell = lambda share: None,
    *,
    folder: Path | None = None,
    command: Sequence[str] | None = None,
    limit_s: float | None = None,
    is_anew: bool = False,
) -> Trial:
    """What is known of a precision's kernels on a device of this machine (`cpu`, `cuda:0`).

    They are tried now if they were not before, or if what was kept names a kernel that there is not
    (`is_anew`). What is found is kept in `folder` (None: the user's cache folder). Raises
    `NoRightKernelError`, and `InputError` where torch cannot run here or the device cannot do that precision.
    """
    shown: list[str] = []

    def show(doing: str, share: float) -> None:
        shown.append(doing)
        for look in tuple(_onlookers):
            look(doing, share)

    def telling(doing: str) -> Tell:
        def both(share: float) -> None:
            tell(share)
            show(doing, share)

        return both

    built = build.build(telling(COMPILING))
    path = (cache_folder() if folder is None else folder) / "kernels" / f"{_key(dtype, device, built)}.json"
    if is_anew:
        tell_of_damage(path, "it is damaged")
        with contextlib.suppress(OSError):
            path.unlink()
    found = _kept(path, dtype, device)
    if found is None:
        with locked(path, lambda: telling(TRYING)(0.0)):
            found = _kept(path, dtype, device)
            if found is None:
                log.info(
                    "trying kernels of %s on this processor, once: what is right is kept in %s",
                    dtype,
                    path.parent,
                )
                found = _try(dtype, device, built, telling(TRYING), command or CHILD, limit_s or TRIAL_S)
                if not any(verdict.may_pass for verdict in found.verdicts):
                    with contextlib.suppress(OSError):  # it is tried again next time
                        write_own(path, asdict(found))
    if shown:
        show(shown[-1], 1.0)
    if not found.kernel:
        where = f"{device} with torch {torch_version()} on {processor()}"
        text = f"{dtype} does not run right on {where}: {found.faults}; {_instead_of(dtype, device)}"
        raise NoRightKernelError(text)
    if found.has_compiled:
        build.allow(built)
    _found[dtype, device] = found
    return found


def _instead_of(dtype: str, device: str) -> str:
    if dtype != "float32":
        return f"use another --dtype ({'bfloat16, float32' if is_packed(dtype) else 'float32'})"
    if device != "cpu":
        return "use another --dtype (bfloat16), or --device cpu"
    return "install the versions that FlowSpec's constraints folder has for this machine"


def _try(
    dtype: str, device: str, built: Path | None, tell: Tell, command: Sequence[str], limit_s: float
) -> Trial:
    """
    Starts one child after another, until of each arithmetic one kernel is right or all are judged.

    A child that dies or hangs judges the kernel that it was at.
    """
    verdicts: list[TrialVerdict] = []
    far = 0.0

    def further(share: float) -> None:
        nonlocal far
        far = max(far, share)  # another child begins at nothing
        tell(far)

    while True:
        judged = [f"--{'skip' if verdict.fault else 'right'}={verdict.kernel}" for verdict in verdicts]
        words = [*command, dtype, device, *judged, *([] if built is None else [f"--built={built}"])]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as child,
        ):
            try:
                more, libraries = _listen(child, errors, further, limit_s)
            finally:
                child.kill()
        verdicts += more
        if libraries is not None:
            return Trial(dtype=dtype, device=device, verdicts=tuple(verdicts), libraries=libraries)


def _listen(
    child: subprocess.Popen[bytes],
    errors: IO[bytes],
    tell: Tell,
    limit_s: float,
) -> tuple[list[TrialVerdict], Libraries | None]:
    """What a child finds, and what it had loaded, if it came to its end."""
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    verdicts: list[TrialVerdict] = []
    at, text, heard_s, share, may_pass = "", b"", time.monotonic(), 0.0, False
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            tell(share)
            allowed_s = limit_s if at else IMPORT_S
            if not selector.select(TELL_S):
                if time.monotonic() - heard_s <= allowed_s:
                    continue
                if not at:
                    raise InputError(
                        f"a process that was to try kernels gave no sign of life for {allowed_s:.0f} s, "
                        f"while it imported torch {torch_version()}: this machine is very busy or very slow; "
                        "try again when it is less busy"
                    )
                fault, may_pass = f"gave no sign of life for {allowed_s:.0f} s", True
                break
            chunk = os.read(descriptor, 65536)
            if not chunk:
                status = child.wait()
                fault, may_pass = ending(status, errors), -status in _OUTSIDE
                break
            *lines, text = (text + chunk).split(b"\n")
            for word in filter(None, map(word_of, lines)):
                if "error" in word:
                    raise InputError(word["error"])
                if "done" in word:
                    return verdicts, word.get("libraries", {})
                if "again" in word:
                    return verdicts, None
                if "at" in word:
                    at = word["at"]
                elif "fault" in word:
                    verdicts.append(
                        TrialVerdict(
                            kernel=at,
                            fault=word["fault"],
                            may_pass=word.get("may_pass", False),
                            arithmetic=word.get("arithmetic", ""),
                        )
                    )
                heard_s, share = time.monotonic(), word.get("share", share)
    if not at:
        advice = "install the versions that FlowSpec's constraints folder has for this machine"
        if tells_of_memory(fault):
            advice = "it takes some hundred MiB of memory: free some, and try again"
        what = f"torch {torch_version()} cannot be imported on {processor()}"
        raise InputError(f"{what}: a process that tried {fault}; {advice}")
    return [*verdicts, TrialVerdict(kernel=at, fault=fault, may_pass=may_pass)], None


def word_of(line: bytes) -> dict[str, Any] | None:
    """What a child says in a line; None for a line of a library's."""
    try:
        word = json.loads(line)
    except ValueError:
        return None
    return word if isinstance(word, dict) else None


def ending(status: int, errors: IO[bytes] | None = None) -> str:
    """How a process ended, with its last line of `errors` where it failed by itself."""
    if status < 0:
        number = signal.Signals(-status)
        known = "ran an instruction that this processor does not have"
        killed = ", as where memory runs out" if number is signal.SIGKILL else ""
        return known if number is signal.SIGILL else f"ended by {number.name}{killed}"
    lines: list[str] = []
    if status and errors is not None:
        errors.seek(0)
        lines = errors.read()[-10_000:].decode("utf-8", "replace").strip().splitlines()
    said = "".join(letter for letter in lines[-1] if letter.isprintable())[:ERROR_CHARS_MAX] if lines else ""
    return f"ended with status {status}{said and ': '}{said}"


def loaded_libraries() -> Libraries:
    """The shared libraries of this process, as far as the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    paths = {line.split(maxsplit=5)[5] for line in lines if ".so" in line.rpartition("/")[2]}
    return {path: _stamp(path) for path in sorted(paths)}


def _stamp(path: str) -> list[int]:
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


def _kept(path: Path, dtype: str, device: str) -> Trial | None:
    """What an earlier trial found; None where there was none, or its file cannot be used."""

    def read(kept: Any) -> Trial | None:
        verdicts = tuple(TrialVerdict(**each) for each in kept["verdicts"])
        found = Trial(dtype=dtype, device=device, verdicts=verdicts, libraries=dict(kept["libraries"]))
        same = [_stamp(library) == stamp for library, stamp in found.libraries.items()]
        return found if all(same) else None

    found = read_own(path, read)
    if found is None or not found.kernel:  # a refusal is tried again: it may have been the machine's state
        return None
    return found


def _key(dtype: str, device: str, built: Path | None) -> str:
    """What a trial's outcome depends on, but for the libraries that torch will load."""
    begins = _SWITCHES if device == "cpu" else (*_SWITCHES, *_SWITCHES_CUDA)
    names = [name for name in os.environ if name.startswith(begins)]
    switches = {name: os.environ[name] for name in sorted(names)}
    machine = [platform.machine(), os.cpu_count(), _processor_block(), "" if device == "cpu" else _driver()]
    content = [dtype, device, machine, _torch_build(), switches, _code(), built and built.name]
    return f"{dtype}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]}"


@functools.cache
def _code() -> str:
    folder = Path(__file__).parent
    files = [*(folder / f"{name}.py" for name in CODE), folder / "arithmetic" / COMPILED_GPU]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def processor() -> str:
    fields = dict(line.split(":", 1) for line in _processor_block().splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    part = named.get("CPU part")
    machine = platform.machine()
    return named.get("model name") or (f"{machine} (CPU part {part})" if part else machine)


@functools.cache
def _processor_block() -> str:
    """The first processor of /proc/cpuinfo, without what changes from moment to moment."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor()
    lines = text.split("\n\n", 1)[0].splitlines()
    passing = ("cpu MHz", "bogomips", "BogoMIPS", "microcode")
    return "\n".join(line for line in lines if not line.startswith(passing))


def _driver(root: Path = Path("/")) -> str:
    """What tells one GPU and its driver from another, as far as it can be had without CUDA."""
    paths = [root / name.lstrip("/") for name in _DRIVER_FILES] + sorted(root.glob(_GPU_FILES.lstrip("/")))
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            lines = path.read_text("utf-8", "replace").splitlines()
            found += [line for line in lines if "IRQ" not in line]  # changes from boot to boot
    return "\n".join(found)


@functools.cache
def _torch_build() -> str:
    """The file in which torch's build writes down its version, commit and CUDA; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return ""


def torch_version() -> str:
    """Of the torch that is installed, without importing it."""
    for line in _torch_build().splitlines():
        if line.startswith("__version__"):
            return line.split("=", 1)[1].strip(" '\"")
    return "(none)"
