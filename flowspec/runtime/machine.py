"""What a daemon may use of the machine that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowspec.plan.profile import DeviceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the user allowed this daemon to use.

    Weights that a head sends, and quantised ones, are stored in `cache_dir` (None: in the user's cache
    folder), up to `cache_bytes` of them (None: a share of the disk; 0: none are taken). Of a model on the hub
    the files of a slice are fetched from there if it `uses_hub` and takes weights at all, up to `cache_bytes`
    at once. `profile` says how fast the device is, None: nobody told. Of what is free for caches a daemon
    takes its part where several, `sharers`, share the memory of one machine.
    """

    device: str = "auto"
    memory_bytes: int | None = None
    threads: int | None = None
    cache_dir: Path | None = None
    cache_bytes: int | None = None
    uses_hub: bool = True
    profile: DeviceProfile | None = None
    sharers: int = 1
