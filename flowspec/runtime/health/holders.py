"""Which of the devices that are held are in use: a head that died holds a device until its lease is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from flowspec.core.cluster.holder import Holder, head_called
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.health.examine import Failure, greet
from flowspec.runtime.security.keyring import Keyring

AGAIN_S = 1.1 * timeouts.PING_EVERY_S
"""How soon a device is asked again: a head that is there has renewed its lease by then."""


def in_use(devices: Sequence[Device], keys: Keyring | None) -> dict[str, str]:
    """The heads that use some of these devices, by the devices' names; all are asked at the same time."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        with ThreadPoolExecutor(max(1, len(devices))) as threads:
            heads = threads.map(lambda device: _user(context, device, keys), devices)
            return {device.name: head for device, head in zip(devices, heads, strict=True) if head}
    finally:
        context.destroy(linger=0)


def _user(context: zmq.Context[Any], device: Device, keys: Keyring | None) -> str:
    """The head that uses a device; empty where that died, or the device does not answer any more."""
    holder, until_s = Holder(), time.monotonic() + timeouts.HELD_S
    while time.monotonic() < until_s:
        welcome = greet(context, device, keys)
        if isinstance(welcome, Failure) or not welcome.is_held:
            return ""
        if holder.is_there(welcome.lease_s, time.monotonic()):
            return welcome.holder
        time.sleep(AGAIN_S)
    return ""


def name_users(users: dict[str, str]) -> str:
    """Who uses devices, in one sentence."""
    names = list(users)
    devices = f"device {names[0]} is" if len(names) == 1 else f"devices {', '.join(names)} are"
    heads = list(dict.fromkeys(users.values()))
    return f"{devices} in use by {' and '.join(map(head_called, heads))}"
