"""What computes here: engines, of a CPU (`cpu.py`, programs in C) or a GPU (`gpu.py`, by torch), and which
arithmetics of a machine are right. Either gives a row the same bits whatever rows run with it.

An arithmetic is tried in a child process before it is used: a wrong kernel, an illegal instruction or one
that hangs ends no process of ours. On CPUs all arithmetic is that of `canonical.c`, whose bits are defined. A
build is tried once, by cases whose results are known (`arithmetic/cases.py`); one that fails gives way to a
build for less of the processor, with the same bits. On a GPU torch computes: its bits have a name, and what
of them must be right is tried by `gpu_trial.py`. Imports torch only for a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import platform
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from flowspec.child_process import NOT_OF_THIS_PROCESSOR, ending, python_module, words
from flowspec.core.protocol.model_spec import Norm
from flowspec.core.protocol.precision import FILED, is_packed
from flowspec.errors import InputError
from flowspec.folders import cache_folder, locked, read_own, write_own
from flowspec.model.arithmetic import compiled
from flowspec.model.cpu import Cpu

if TYPE_CHECKING:
    from flowspec.model.gpu import Gpu

Engine: TypeAlias = "Cpu | Gpu"
"""Computes for one model in one precision; what `Cpu` says of its methods is true of both."""

LANES16, PAIRS16, GROUPS32 = "lanes16", "pairs16", "groups32"
"""The arithmetics of our own products, with the same bits on all processors that have them: of numbers; of
bfloat16 in pairs; and of what is packed in groups of 32."""
CHILD = tuple(python_module("flowspec.model.arithmetic.cases"))
GPU_CHILD = tuple(python_module("flowspec.model.gpu_trial"))
CHILD_S = 120.0
"""How long a child may give no sign of life. The first comes after it has imported what it needs: torch from
a slow card takes most of a minute."""
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGBUS)
"""Signals that come from outside, as where memory runs out or a disk fails: none is a kernel's own fault."""

log = logging.getLogger("flowspec.kernels")


def engine_of(dtype: str, device: str, norm: Norm, arithmetic: str = "") -> Engine:
    """For a model in a precision, whose norms compute so: by an `arithmetic`, or the best that the device
    has. Raises `InputError` where it lacks that."""
    known = run_trial(dtype, device).arithmetics
    arithmetic = arithmetic or known[0]
    if arithmetic not in known:
        has = f"{device} on {processor()} has {', '.join(known)}"
        raise InputError(f"expected the arithmetic {arithmetic} of {dtype}, {has}")
    if device == "cpu":
        return Cpu(dtype, norm)
    from flowspec.model.gpu import Gpu  # where torch is

    return Gpu(dtype, arithmetic, norm, device)


# ------------------------------------------------------------------------------------------- trials


class NoRightKernelError(InputError):
    """Nothing computes a precision right here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a trial found: `fault` is empty where all is right. `may_pass`: the machine's state may be the
    reason, such as little memory. `arithmetics` of a GPU, the best first."""

    fault: str
    may_pass: bool = False
    arithmetics: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The `arithmetics` that are right, the best first. `slowed_by`: why it may be slow here, or empty."""

    arithmetics: tuple[str, ...]
    slowed_by: str = ""

    @property
    def kernel(self) -> str:
        return self.arithmetics[0].partition("@")[0]


_found: dict[tuple[str, str], Trial] = {}
_slowed_by: str | None = None  # what this process knows already; a processor does not change
Look = Callable[[str, float], None]  # told what is done, `COMPILING` or `TRYING`, and which share of it
COMPILING, TRYING = "compiling kernels", "trying kernels"
_look: ContextVar[Look] = ContextVar("look", default=lambda doing, share: None)


@contextlib.contextmanager
def shown_to(look: Look) -> Iterator[None]:
    """Tells of all trials in this block, also where a drafter is loaded, far from the command."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def run_trial(dtype: str, device: str) -> Trial:
    """Which arithmetics of a precision are right on a device of this machine (`cpu`, `cuda:0`), tried now if
    they were not before. Raises `NoRightKernelError`, and `InputError` where nothing can be computed here."""
    if (dtype, device) not in _found:
        slowed_by = prepare()
        if device == "cpu":
            arithmetics: tuple[str, ...] = (GROUPS32,)
            if not is_packed(dtype):
                arithmetics = (PAIRS16,) if dtype == "bfloat16" else (LANES16,)
        else:
            verdict = _verdict(f"{dtype}-{device}", [*GPU_CHILD, dtype, device], _driver(), torch_version())
            if verdict.fault:
                instead = "float32" if dtype == FILED else "bfloat16"
                raise NoRightKernelError(
                    f"{dtype} does not run right on {device} with torch {torch_version()}: {verdict.fault}; "
                    f"use another --dtype ({instead}), or --device cpu"
                )
            arithmetics = tuple(verdict.arithmetics)
        _found[dtype, device] = Trial(arithmetics=arithmetics, slowed_by=slowed_by)
    return _found[dtype, device]


def prepare() -> str:
    """Has this process use a build of `canonical.c` that was tried, and says why it is not the best one, or
    nothing. Raises `InputError` where none can be built, `NoRightKernelError` where none is right."""
    global _slowed_by
    if _slowed_by is not None and compiled.library() is not None:
        return _slowed_by
    faults, wrong = list[str](), False
    for built_for, path, why in compiled.libraries(functools.partial(_look.get(), COMPILING)):
        if path is None:
            faults.append(why)
            continue
        verdict = _verdict(path.stem, [*CHILD, str(path)])
        if not verdict.fault:
            compiled.use(compiled.Library(path))
            _slowed_by = "; ".join(faults)
            if faults:
                log.warning("%s may be slow, for %s", processor(), _slowed_by)
            return _slowed_by
        if path.parent != compiled.WHEEL_FOLDER or verdict.fault != NOT_OF_THIS_PROCESSOR:
            faults.append(f"kernels that were compiled with {built_for}: {verdict.fault}")
            wrong = True
    if not wrong:
        raise InputError("; ".join(faults))
    raise NoRightKernelError(
        f"FlowSpec's kernels do not run right on {processor()}: {'; '.join(faults)}; install another gcc or "
        "clang, and try again"
    )


def _verdict(name: str, command: Sequence[str], *depends: str) -> Verdict:
    """That of a child, or what it said earlier on this machine, with all the same that it `depends` on."""
    golden = Path(compiled.__file__).with_name("golden.json").read_bytes()
    key = hashlib.sha256(repr((_processor_block(), *depends)).encode() + golden).hexdigest()[:12]
    path, tell = cache_folder() / "kernels" / f"{name}-{key}.json", functools.partial(_look.get(), TRYING)
    with locked(path, lambda: tell(0.0)):
        found = read_own(path, Verdict)
        if found is None:
            found = _listen(command, tell)
            if not found.may_pass:
                with contextlib.suppress(OSError):  # it is tried again next time
                    write_own(path, found)
            tell(1.0)
    return found


def _listen(command: Sequence[str], tell: Callable[[float], None]) -> Verdict:
    heard_s, share = time.monotonic(), 0.0
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        try:
            tell(share)
            for word in words(child):
                if "fault" in word:
                    return Verdict(**word)
                if word:
                    heard_s, share = time.monotonic(), word.get("share", share)
                elif time.monotonic() - heard_s > CHILD_S:
                    return Verdict(fault=f"gave no sign of life for {CHILD_S:.0f} s", may_pass=True)
                tell(share)
            status = child.wait()
            return Verdict(fault=ending(status, errors), may_pass=-status in _OUTSIDE)
        finally:
            child.kill()


def processor() -> str:
    """What this machine's processor is called."""
    named = dict(re.findall(r"^(\w[^:]*?)\s*:\s*(.*\S)", _processor_block(), re.MULTILINE))
    part = f" (CPU part {named['CPU part']})" if "CPU part" in named else ""
    return named.get("model name") or platform.machine() + part


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
    files = ("proc/driver/nvidia/version", "etc/nv_tegra_release", "proc/device-tree/model")
    paths, found = sorted(root.glob("proc/driver/nvidia/gpus/*/information")), list[str]()
    for path in (*(root / name for name in files), *paths):
        with contextlib.suppress(OSError):
            lines = path.read_text("utf-8", "replace").splitlines()
            found += [line for line in lines if "IRQ" not in line]  # changes from boot to boot
    return "\n".join(found)


def torch_version() -> str:
    """Of the torch that is installed, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "(none)"
