"""Fetches files of a model from the hub for a daemon, in a process of its own, which ends at once when the
head has let go.

What is fetched is known by name and size before, and checked against what this device has room for. A
download that hangs cannot be ended from another thread, a process can. It ends with its parent, too, whose
end of a pipe it listens to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from flowspec.child_process import python_module
from flowspec.core.protocol.limits import JSON_BYTES_MAX
from flowspec.errors import InputError
from flowspec.model.hub import hub_cache
from flowspec.plan.memory import mib
from flowspec.runtime.weights.receive import HeadChannel
from flowspec.runtime.weights.store import DISK_SHARE, DISK_SPARED_BYTES

LOOK_EVERY_S = 0.2
"""How soon a download ends when its head is gone."""


class HubFetcher:
    """Fetches files of `owner/name` for the head behind `channel`. `limit_bytes` of weights at most (None:
    half of what is free)."""

    def __init__(self, repository: str, channel: HeadChannel, limit_bytes: int | None) -> None:
        self._repository = repository
        self._channel = channel
        self._limit_bytes = limit_bytes

    def get_json(self, *names: str) -> None:
        """Fetches those of these small files that the hub has. Raises `InputError` for one that is too large
        to be what it is called."""
        sizes = self._ask()
        there = [name for name in names if name in sizes]
        for name in there:
            if (size := sizes[name]) > JSON_BYTES_MAX:
                raise InputError(
                    f"{name} of {self._repository!r} on the hub: expected at most {JSON_BYTES_MAX} bytes, "
                    f"got {size}"
                )
        if there:
            self._ask(*there)

    def get_weights(self, names: Sequence[str]) -> None:
        """Fetches these files. Raises `InputError` for one that the hub lacks, and before a byte of them if
        there is no room."""
        sizes = self._ask()
        for name in names:
            if name not in sizes:
                raise InputError(f"{self._repository!r} on the hub has no {name}")
        self._check_room(sum(sizes[name] for name in names))
        self._ask(*names)

    def _check_room(self, needed: int) -> None:
        folder = hub_cache()
        while not folder.exists():
            folder = folder.parent
        free = max(0, shutil.disk_usage(folder).free - DISK_SPARED_BYTES)
        allowed = int(free * DISK_SHARE) if self._limit_bytes is None else min(free, self._limit_bytes)
        if needed > allowed:
            raise InputError(
                f"the files of {self._repository!r} that hold these layers have {mib(needed)}, but this "
                f"daemon may fetch {mib(allowed)} "
                "from the hub; give this device fewer layers, or its daemon more --cache-limit"
            )

    def _ask(self, *names: str) -> dict[str, Any]:
        """Has a child fetch these files, or without any tell the sizes of all. Raises `InputError` for what
        it says is wrong, `ClusterError` when the head has let go."""
        command = python_module("flowspec.model.hub", self._repository, *names)
        quiet = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=quiet
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while child.poll() is None:
                self._channel.tell("receiving", 0.0)
                try:
                    child.wait(LOOK_EVERY_S)
                except subprocess.TimeoutExpired:
                    continue
            text = child.stdout.read()
        finally:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
        try:
            said: dict[str, Any] | str = json.loads(text)
        except ValueError:
            raise InputError(
                f"cannot get {', '.join(names) or 'the sizes'} of {self._repository!r}: the download ended "
                f"with {child.returncode}"
            ) from None
        if isinstance(said, str):
            raise InputError(said)
        return said
