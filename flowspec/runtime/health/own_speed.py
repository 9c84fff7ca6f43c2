"""How fast this device is, as far as it knows: told by the user, measured by `flowspec profile --keep`, or
probed once and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import time
from pathlib import Path

from flowspec.core.protocol.device_messages import Speed
from flowspec.errors import InputError
from flowspec.folders import cache_folder, locked, read_own, write_own
from flowspec.model.arithmetic import build
from flowspec.model.trials import prepare, torch_version
from flowspec.plan.profile import read_profile
from flowspec.plan.speed import speed_of
from flowspec.runtime.machine import Machine

log = logging.getLogger("flowspec.daemon")


def kept_profile() -> Path:
    """Where `flowspec profile --keep` writes: `$XDG_CONFIG_HOME/flowspec/profile.toml`, else under
    `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "flowspec" / "profile.toml"


def own_speed(machine: Machine, *, may_probe: bool = True) -> Speed | None:
    """The best that is known; None where that would take a probe, which `may_probe` forbids while the device
    works."""
    if machine.profile is not None:
        return speed_of(machine.profile, "given")
    kept = kept_profile()
    if kept.is_file():
        try:
            return speed_of(read_profile(kept), "kept")
        except InputError as error:
            log.warning("%s; measure again with flowspec profile --keep", error)
    path, key = cache_folder() / "speed.json", _key(machine)
    found = (read_own(path, dict[str, Speed]) or {}).get(key)
    if found is not None or not may_probe:
        return found
    with locked(path):  # one process at a time probes, for daemons of one machine are asked together
        known = read_own(path, dict[str, Speed]) or {}
        if key not in known:
            known[key] = _probe(machine)
            with contextlib.suppress(OSError):  # it is probed again next time
                write_own(path, known)
        return known[key]


def _probe(machine: Machine) -> Speed:
    prepare()
    from flowspec.model.accelerator import find, use_threads
    from flowspec.runtime.health.probe import probe  # what computes, which a daemon needs for its first slice

    use_threads(machine.threads)
    started_s = time.perf_counter()
    found = speed_of(probe(find(machine.device).device), "probed")
    log.info(
        "probed in %.1f s: reads %.3g GB/s, computes %.3g GFLOP/s",
        time.perf_counter() - started_s,
        found.gb_per_s,
        1e3 * found.float32,
    )
    return found


def _key(machine: Machine) -> str:
    """What a probe depends on; the host, for home folders may be shared."""
    cores = f"{os.cpu_count()} threads"
    threads = f"{machine.threads} of {cores}" if machine.threads else cores
    kernels = hashlib.sha256(build.SOURCE.read_bytes()).hexdigest()[:12]
    versions = f"torch {torch_version()}, kernels {kernels}"
    return f"{platform.node()}, {platform.machine()}, {machine.device}, {threads}, {versions}"
