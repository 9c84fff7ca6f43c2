"""What `flowspec doctor` measures of this machine: its system, its GPU (or CPU), how fast that is, and in
which precisions it computes right. Nothing here names a person, a host, a serial number or an address.

`python -m flowspec.runtime.health.this_machine` measures, in a process of its own: a driver may kill it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowspec.child_process import ending, python_module
from flowspec.core.protocol.precision import PRECISIONS
from flowspec.model.accelerator import absence, find, has_driver
from flowspec.model.trials import processor
from flowspec.plan.memory import mib
from flowspec.rounding import rounded
from flowspec.runtime.health.board import read_number, read_text, run_tool
from flowspec.runtime.health.examine import TRYING_S
from flowspec.runtime.health.gather import kernel_facts
from flowspec.runtime.health.own_speed import own_speed
from flowspec.runtime.machine import Machine
from flowspec.validation import as_dict

_DRIVER = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")
SMI = ("--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu", "--format=csv")


def measure_apart() -> dict[str, Any]:
    """The system, and what `measure` returns, or a `fault` if its process fails."""
    measured: dict[str, Any] = {"system": read_system()}
    with tempfile.TemporaryFile() as errors:
        try:
            nothing, pipe, command = subprocess.DEVNULL, subprocess.PIPE, python_module(__name__)
            done = subprocess.run(command, stdin=nothing, stdout=pipe, stderr=errors, timeout=TRYING_S)
        except subprocess.TimeoutExpired:
            return measured | {"fault": f"it did not end in {TRYING_S:.0f} s"}
        if done.returncode:
            return measured | {"fault": ending(done.returncode, errors)}
    measured.update(json.loads(done.stdout.splitlines()[-1]))
    return measured


def measure() -> dict[str, Any]:
    machine = Machine()  # as a daemon's without flags, whose probe and trials are remembered
    here, kernels = find(machine.device), [kernel_facts(dtype, machine) for dtype in PRECISIONS]
    return {
        "device": here.device,
        "no_gpu": (absence() if has_driver() else "there is no driver of one") if here.is_cpu else "",
        "facts": here.facts(),
        "free_bytes": here.free_bytes(),
        "speed": as_dict(own_speed(machine)) if any(each.kernel for each in kernels) else None,
        "kernels": as_dict(kernels),
    }


def describe(measured: Mapping[str, Any]) -> str:
    """The figures of `measure`, in a line."""
    name, speed = measured["facts"]["name"], "speed unknown"
    if measured["speed"]:
        speed = f"reads {rounded(measured['speed']['gb_per_s'])} GB/s"
    if measured["no_gpu"]:
        return f"this machine has no GPU to use ({measured['no_gpu']}); {name}: {speed}"
    right = [each["dtype"] for each in measured["kernels"] if each["kernel"]]
    memory = f"{mib(measured['free_bytes'])} of {mib(measured['facts']['total_bytes'])} free"
    return f"this machine's GPU {name}: {memory}, {speed}, right in {', '.join(right) or 'no precision'}"


def read_system(root: Path = Path("/")) -> dict[str, Any]:
    """Names and versions, empty where unknown; clocks of devices, as a Jetson's GPU, in Hz: now, at most."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    driver = _DRIVER.search(read_text(root / "proc/driver/nvidia/version"))
    return {
        "name": name,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": processor(),
        "l4t": read_text(root / "etc/nv_tegra_release"),
        "driver": driver[0] if driver else "",
        "clocks": {
            folder.name: [read_number(folder / "cur_freq"), read_number(folder / "max_freq")]
            for folder in sorted((root / "sys/class/devfreq").glob("*"))
        },
        "nvidia_smi": run_tool("nvidia-smi", *SMI).splitlines(),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
