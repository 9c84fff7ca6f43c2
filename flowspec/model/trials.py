"""Trials of kernels on this processor: in a child process, so that an illegal instruction is an answer and not our death.

What was found is kept for this processor, torch and version of the trials. Knows no tensors and imports no torch: whether torch can be
imported at all is the first thing that is tried. The checks themselves are in `kernel_checks.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowspec.errors import InputError
from flowspec.folders import cache_folder, locked, write_whole

FORMAT = 2
"""Counts up when trials try other things, so that what earlier ones found is tried again."""
IMPORT_S = 170.0
"""How long the child may take until torch is imported; from a slow card it takes most of a minute."""
TRIAL_S = 120.0
"""How long one kernel's trial may go on without a sign of life, of which it gives some twenty: a second in all on a laptop, a minute on an
emulated board."""
TELL_S = 1.0
CHILD = (sys.executable, "-m", "flowspec.model.kernel_checks")
ATTENTION = "attention"
"""What is tried beside kernels: all that a layer computes without a matrix of weights. There is no other one to take its place."""
_SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS", "LD_PRELOAD", "QEMU_CPU")
_SWITCHES_CUDA = ("NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "LD_LIBRARY_PATH")
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/etc/nv_tegra_release", "/proc/device-tree/model")
_GPU_FILES = "/proc/driver/nvidia/gpus/*/information"

"""Environment that makes libraries take other instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a trial found of one kernel; `fault` is empty where it is right, `is_late` where the trial was given up."""

    kernel: str
    fault: str
    is_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The kernels of a precision on a device in the order in which they were tried, to the first that is right."""

    dtype: str
    device: str
    verdicts: tuple[Verdict, ...]

    @property
    def kernel(self) -> str:
        """The one to be used; empty where none is right."""
        if any(verdict.kernel == ATTENTION and verdict.fault for verdict in self.verdicts):
            return ""
        return next((verdict.kernel for verdict in self.verdicts if not verdict.fault and verdict.kernel != ATTENTION), "")

    @property
    def faults(self) -> str:
        """What is wrong with those that are not used; empty where the first one is right."""
        return "; ".join(f"{verdict.kernel} {verdict.fault}" for verdict in self.verdicts if verdict.fault)

    @property
    def detour(self) -> str:
        """A line for people where a better kernel is not right here; else empty."""
        where = f"{self.dtype} with torch {torch_version()} on {processor()}"
        return f"{where}: {self.kernel} is used, for {self.faults}" if self.faults else ""


_found: dict[tuple[str, str], Trial] = {}
"""What this process knows already; a processor does not change."""
Tell = Callable[[float], None]
"""Told now and then how far a trial has come, from 0 to 1, so that whoever waits knows that something goes on."""


def check_torch() -> None:
    """Makes sure that torch may be imported into this process, and that it computes float32, which all else stands on.

    Raises `InputError` where importing it would end us.
    """
    tried("float32", "cpu")


def tried(dtype: str, device: str) -> Trial:
    """`run_trial`, or what it found earlier in this process."""
    return _found.get((dtype, device)) or run_trial(dtype, device)


def run_trial(
    dtype: str,
    device: str,
    tell: Tell = lambda share: None,
    *,
    folder: Path | None = None,
    command: Sequence[str] | None = None,
    limit_s: float | None = None,
) -> Trial:
    """What is known of a precision's kernels on a device of this machine (`cpu`, `cuda:0`): tried now if it was not before.

    What is found is kept in `folder` (None: the user's cache folder). Raises `InputError` where no kernel is right, or torch cannot run here.
    """
    path = (cache_folder() if folder is None else folder) / "kernels" / f"{_key(dtype, device)}.json"
    found = _kept(path, dtype, device)
    if found is None:
        with locked(path):
            found = _kept(path, dtype, device)
            if found is None:
                found = _try(dtype, device, tell, command or CHILD, limit_s or TRIAL_S)
                if not any(verdict.is_late for verdict in found.verdicts):  # the machine may just have been busy
                    with contextlib.suppress(OSError):  # it is tried again next time
                        write_whole(path, json.dumps(asdict(found), indent=1).encode())
    if not found.kernel:
        others = "bfloat16, float32" if dtype in ("int8", "int4") else "float32"
        where = f"{device} with torch {torch_version()} on {processor()}"
        raise InputError(f"{dtype} does not run right on {where}: {found.faults}; use another --dtype ({others})")
    _found[dtype, device] = found
    return found


def _try(dtype: str, device: str, tell: Tell, command: Sequence[str], limit_s: float) -> Trial:
    """One child after another, until one kernel is right or all are judged: a child that dies or hangs judges the kernel it was at."""
    verdicts: list[Verdict] = []
    while True:
        skipped = [f"--skip={verdict.kernel}" for verdict in verdicts]
        with subprocess.Popen([*command, dtype, device, *skipped], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
            try:
                more, is_done = _listen(child, tell, limit_s)
            finally:
                child.kill()
        verdicts += more
        if is_done:
            return Trial(dtype=dtype, device=device, verdicts=tuple(verdicts))


def _listen(child: subprocess.Popen[bytes], tell: Tell, limit_s: float) -> tuple[list[Verdict], bool]:
    """What a child finds, and whether it came to its end."""
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    verdicts: list[Verdict] = []
    at, text, heard_s, share, is_late = "", b"", time.monotonic(), 0.0, False
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            tell(share)
            allowed_s = limit_s if at else IMPORT_S
            if not selector.select(TELL_S):
                if time.monotonic() - heard_s <= allowed_s:
                    continue
                fault, is_late = f"gave no sign of life for {allowed_s:.0f} s", True
                break
            chunk = os.read(descriptor, 65536)
            if not chunk:
                fault = ending(child.wait())
                break
            text += chunk
            while b"\n" in text:
                line, text = text.split(b"\n", 1)
                word = json.loads(line)
                if "error" in word:
                    raise InputError(word["error"])
                if "done" in word:
                    return verdicts, True
                if "again" in word:
                    return verdicts, False
                if "at" in word:
                    at = word["at"]
                elif "fault" in word:
                    verdicts.append(Verdict(kernel=at, fault=word["fault"]))
                heard_s, share = time.monotonic(), word.get("share", share)
    if not at and is_late:
        raise InputError(
            f"a process that was to try kernels {fault}, while it imported torch {torch_version()}: this machine is very busy or very slow; "
            "try again when it is less busy"
        )
    if not at:
        raise InputError(
            f"torch {torch_version()} cannot be imported on {processor()}: a process that tried {fault}; install the versions that "
            "FlowSpec's constraints folder has for this machine"
        )
    return [*verdicts, Verdict(kernel=at, fault=fault, is_late=is_late)], False


def ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    number = signal.Signals(-status)
    return "ran an instruction that this processor does not have" if number is signal.SIGILL else f"ended by {number.name}"


def _kept(path: Path, dtype: str, device: str) -> Trial | None:
    """What an earlier trial found; None where there was none, or its file cannot be used."""
    try:
        data: Any = json.loads(path.read_text("utf-8"))
        verdicts = tuple(Verdict(kernel=str(each["kernel"]), fault=str(each["fault"])) for each in data["verdicts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    found = Trial(dtype=dtype, device=device, verdicts=verdicts)
    return found if found.kernel else None  # a refusal is tried again: it may have been the machine's state


def _key(dtype: str, device: str) -> str:
    """What a trial's outcome depends on."""
    names = _SWITCHES if device == "cpu" else (*_SWITCHES, *_SWITCHES_CUDA)
    switches = {name: os.environ[name] for name in names if name in os.environ}
    content = [FORMAT, dtype, device, platform.machine(), os.cpu_count(), _processor_block(), _torch_build(), switches]
    content += [] if device == "cpu" else [_driver()]
    return f"{dtype}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]}"


def processor() -> str:
    """This machine's processor, for people."""
    fields = dict(line.split(":", 1) for line in _processor_block().splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    part = named.get("CPU part")
    return named.get("model name") or (f"{platform.machine()} (CPU part {part})" if part else platform.machine())


@functools.cache
def _processor_block() -> str:
    """The first processor of /proc/cpuinfo, without what changes from moment to moment."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor()
    lines = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith(("cpu MHz", "bogomips", "BogoMIPS", "microcode")))


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
