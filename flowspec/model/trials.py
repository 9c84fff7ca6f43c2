"""What this machine computes with, tried in a child process before it is used: a wrong kernel, an illegal
instruction or one that hangs ends no process of ours.

On CPUs all arithmetic is that of `canonical.c`, whose bits are defined. A build is tried once, by cases whose
results are known (`arithmetic/cases.py`); one that fails gives way to a build for less of the processor, with
the same bits. On a GPU torch computes: its bits have a name, and what of them must be right is tried by
`gpu_trial.py`. Imports no torch.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from flowspec.child_process import python_module
from flowspec.core.protocol.precision import FILED, is_packed
from flowspec.errors import InputError
from flowspec.folders import cache_folder, locked, read_own, write_own
from flowspec.model.arithmetic import build

LANES16, PAIRS16, DIGITS, GROUPS32 = "lanes16", "pairs16", "digits", "groups32"
"""The arithmetics of our own products, with the same bits on all processors that have them: of numbers; of
bfloat16 in pairs, where there is an instruction for it; of int8; and of what is packed in groups of 32."""
CHILD = tuple(python_module("flowspec.model.arithmetic.cases"))
GPU_CHILD = tuple(python_module("flowspec.model.gpu_trial"))
CHILD_S = 120.0
"""How long a child may give no sign of life. The first comes after it has imported what it needs: torch from
a slow card takes most of a minute."""
TELL_S = 1.0
ERROR_CHARS_MAX = 300
"""Of what a child that failed said last."""
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/etc/nv_tegra_release", "/proc/device-tree/model")
_GPU_FILES = "/proc/driver/nvidia/gpus/*/information"
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
"""Signals that come from outside, as from the system where memory runs out: none is a kernel's own fault."""
log = logging.getLogger("flowspec.kernels")


class NoRightKernelError(InputError):
    """Nothing computes a precision right here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a trial found: `fault` is empty where all is right. `may_pass`: the machine's state may be the
    reason, such as little memory. `arithmetics` of a GPU, the best first."""

    fault: str
    may_pass: bool = False
    has_pairs: bool = False
    arithmetics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Of a precision on a device: the `arithmetics` that are right there, the best first. `slowed_by`: why it
    may be slow here; else empty."""

    dtype: str
    device: str
    arithmetics: tuple[str, ...]
    slowed_by: str = ""

    @property
    def kernel(self) -> str:
        return self.arithmetics[0].partition("@")[0]

    def check(self, arithmetic: str) -> None:
        """Raises `InputError` where it is not there."""
        if arithmetic and arithmetic not in self.arithmetics:
            where, has = f"{self.device} on {processor()}", ", ".join(self.arithmetics)
            raise InputError(f"expected the arithmetic {arithmetic} of {self.dtype}, {where} has {has}")

    @property
    def detour(self) -> str:
        """A line for people where `slowed_by` is one; else empty."""
        return f"{processor()} may be slow, for {self.slowed_by}" if self.slowed_by else ""


_found: dict[tuple[str, str], Trial] = {}
_library: tuple[Verdict, str] | None = None
"""What this process knows already; a processor does not change."""
Tell = Callable[[float], None]
"""Told now and then how far a trial has come, from 0 to 1, so that a user sees that it goes on."""
Look = Callable[[str, float], None]
"""The same, with what is done: `COMPILING` or `TRYING`."""
COMPILING, TRYING = "compiling kernels", "trying kernels"
_onlookers: list[Look] = []


@contextlib.contextmanager
def shown_to(look: Look) -> Iterator[None]:
    """Tells of all trials of this process, also of those that begin where a drafter is loaded, far from
    the command that waits."""
    _onlookers.append(look)
    try:
        yield
    finally:
        _onlookers.remove(look)


def _telling(doing: str, tell: Tell) -> Tell:
    def both(share: float) -> None:
        tell(share)
        for look in tuple(_onlookers):
            look(doing, share)

    return both


def run_trial(dtype: str, device: str, tell: Tell = lambda share: None) -> Trial:
    """Which arithmetics of a precision are right on a device of this machine (`cpu`, `cuda:0`), tried now if
    they were not before. Raises `NoRightKernelError`, and `InputError` where nothing can be computed here."""
    known = _found.get((dtype, device))
    if known is not None:
        return known
    verdict, slowed_by = prepare(tell)
    if device == "cpu":
        arithmetics = _cpu_arithmetics(dtype, verdict.has_pairs)
    else:
        arithmetics = _gpu_arithmetics(dtype, device, tell)
    found = Trial(dtype=dtype, device=device, arithmetics=arithmetics, slowed_by=slowed_by)
    _found[dtype, device] = found
    return found


def _cpu_arithmetics(dtype: str, has_pairs: bool) -> tuple[str, ...]:
    if is_packed(dtype):
        return (DIGITS,) if dtype == "int8" else (GROUPS32,)
    return (PAIRS16, LANES16) if dtype == "bfloat16" and has_pairs else (LANES16,)


def prepare(tell: Tell = lambda share: None) -> tuple[Verdict, str]:
    """Has this process use a build of `canonical.c` that was tried, and says why it is not the best one, or
    nothing. Raises `InputError` where none can be built, `NoRightKernelError` where none is right."""
    global _library
    if _library is not None and build.allowed() is not None:
        return _library
    faults: list[str] = []
    for level in build.levels():
        path = build.build(level, _telling(COMPILING, tell))
        if path is None:
            raise InputError(
                f"FlowSpec computes with kernels that it compiles once, and cannot here: {build.why_not()}"
            )
        verdict = _verdict(path.stem, [*CHILD, str(path)], tell)
        if not verdict.fault:
            build.allow(path)
            _library = verdict, "; ".join(faults)
            return _library
        faults.append(f"kernels that were compiled with {' '.join(level)}: {verdict.fault}")
    raise NoRightKernelError(
        f"FlowSpec's kernels do not run right on {processor()}: {'; '.join(faults)}; install another gcc or "
        "clang, and try again"
    )


def _gpu_arithmetics(dtype: str, device: str, tell: Tell) -> tuple[str, ...]:
    content = json.dumps([dtype, device, _driver(), _torch_build()])
    name = f"{dtype}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    verdict = _verdict(name, [*GPU_CHILD, dtype, device], tell)
    if verdict.fault:
        instead = f"use another --dtype ({'float32' if dtype == FILED else 'bfloat16'}), or --device cpu"
        text = f"{dtype} does not run right on {device} with torch {torch_version()}: {verdict.fault}"
        raise NoRightKernelError(f"{text}; {instead}")
    return verdict.arithmetics


def _verdict(name: str, command: Sequence[str], tell: Tell) -> Verdict:
    """That of a child, or what it said earlier on this machine."""

    def read(kept: Any) -> Verdict:
        return Verdict(**{**kept, "arithmetics": tuple(kept["arithmetics"])})

    golden = Path(build.SOURCE).with_name("golden.json").read_bytes()
    key = hashlib.sha256(_processor_block().encode() + golden).hexdigest()[:12]
    path = cache_folder() / "kernels" / f"{name}-{key}.json"
    telling = _telling(TRYING, tell)
    found = read_own(path, read)
    if found is not None:
        return found
    with locked(path, lambda: telling(0.0)):
        found = read_own(path, read)
        if found is None:
            found = _listen(command, telling)
            if not found.may_pass:
                with contextlib.suppress(OSError):  # it is tried again next time
                    write_own(path, asdict(found))
    telling(1.0)
    return found


def _listen(command: Sequence[str], tell: Tell) -> Verdict:
    heard_s, share, text = time.monotonic(), 0.0, b""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as child,
        selectors.DefaultSelector() as selector,
    ):
        assert child.stdout is not None
        try:
            selector.register(child.stdout, selectors.EVENT_READ)
            while True:
                tell(share)
                if not selector.select(TELL_S):
                    if time.monotonic() - heard_s <= CHILD_S:
                        continue
                    return Verdict(fault=f"gave no sign of life for {CHILD_S:.0f} s", may_pass=True)
                chunk = os.read(child.stdout.fileno(), 65536)
                if not chunk:
                    status = child.wait()
                    return Verdict(fault=ending(status, errors), may_pass=-status in _OUTSIDE)
                *lines, text = (text + chunk).split(b"\n")
                for word in filter(None, map(word_of, lines)):
                    if "fault" in word:
                        arithmetics = tuple(word.pop("arithmetics", ()))
                        return Verdict(arithmetics=arithmetics, **word)
                    heard_s, share = time.monotonic(), word.get("share", share)
        finally:
            child.kill()


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
