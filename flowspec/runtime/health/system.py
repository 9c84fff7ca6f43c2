"""What a report tells of a machine beside its board: system software, and the clocks of this moment.

Read from files under a root folder and from makers' tools; what is not there stays unknown. Nothing here
names a person, a host, a serial number or an address.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from flowspec.core.protocol.limits import NAME_CHARS_MAX
from flowspec.model.trials import processor
from flowspec.runtime.health.board import TOOL_S, read_number, read_text

GPU_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu")
"""What `nvidia-smi` is asked; on a Jetson it knows little."""
_DRIVER = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")
_L4T = re.compile(r"R(\d+) \(release\), REVISION: ([\d.]+)")
RunCommand = Callable[[Sequence[str]], str]


def read_system(root: Path = Path("/")) -> dict[str, Any]:
    """Kinds and versions, empty where they are not told. `l4t` is the system of a Jetson: 36 belongs to
    JetPack 6."""
    release = _L4T.search(read_text(root / "etc/nv_tegra_release"))
    driver = _DRIVER.search(read_text(root / "proc/driver/nvidia/version"))
    return {
        "system": _pretty_name(root),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "swap_bytes": psutil.swap_memory().total,
        "l4t": f"{release[1]}.{release[2]}" if release else "",
        "driver": driver[0] if driver else "",
    }


def read_clocks(root: Path = Path("/"), run: RunCommand | None = None) -> dict[str, Any]:
    """Clocks in MHz: of each group of cores now, its cap and its most; of each device with a clock of its
    own, as a Jetson's GPU; and what `nvidia-smi` tells."""
    cores = []
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        names = ("scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq")
        now, cap, most = (read_number(policy / name) for name in names)
        governor = read_text(policy / "scaling_governor")
        cores.append(
            {
                "mhz": _mega(now, 1e3),
                "cap_mhz": _mega(cap, 1e3),
                "max_mhz": _mega(most, 1e3),
                "governor": governor,
            }
        )
    devices = {}
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        now, most = read_number(folder / "cur_freq"), read_number(folder / "max_freq")
        devices[folder.name] = {"mhz": _mega(now, 1e6), "max_mhz": _mega(most, 1e6)}
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    lines = (run or _run)(command).splitlines()
    values = [value.strip()[:NAME_CHARS_MAX] for value in lines[0].split(",")] if lines else []
    gpu = dict(zip(GPU_FIELDS, values, strict=True)) if len(values) == len(GPU_FIELDS) else {}
    return {"cores": cores, "devices": devices, "gpu": gpu}


def _pretty_name(root: Path) -> str:
    try:
        lines = (root / "etc/os-release").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.system()
    named = dict(line.split("=", 1) for line in lines if "=" in line)
    return named.get("PRETTY_NAME", platform.system()).strip("\"' ")[:NAME_CHARS_MAX]


def _mega(number: int | None, unit: float) -> float | None:
    return None if number is None else round(number / unit, 1)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
