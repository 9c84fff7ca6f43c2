"""Whether any device of a cluster answers at all, before a head imports what it works with: that takes
seconds, and many on a board, and the most common mistake is that no daemon runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from flowspec.runtime.cluster import Device
from flowspec.runtime.health.examine import EXAMINE_TIMEOUTS, ask_all, is_silent
from flowspec.runtime.planning.survey import absent_of, absent_timeouts
from flowspec.runtime.security.keyring import Keyring

LOOK_S = 1.0
"""For an answer; who takes longer is asked as ever."""


def refuse_silent(
    devices: Sequence[Device], keys: Keyring | None, *, needs_all: bool, hint: str = ""
) -> None:
    """Raises the survey's `ClusterError` where no device answers, or one does not of which all are needed;
    the `hint` then says what else to do.

    Whoever answers is left to the survey, which comes when all is imported.
    """
    silent = _silent(devices, keys, needs_all=needs_all)
    if not silent:
        return
    examine_timeouts = EXAMINE_TIMEOUTS if needs_all else absent_timeouts(len(silent))
    found = ask_all(silent, speed=[], keys=keys, examine_timeouts=examine_timeouts)
    absent_of(found, needs_all=needs_all, hint=hint)


def _silent(devices: Sequence[Device], keys: Keyring | None, *, needs_all: bool) -> list[Device]:
    """Those that do not answer; none, where not all are needed and one does."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        with ThreadPoolExecutor(len(devices)) as threads:
            found = list(threads.map(lambda device: is_silent(context, device, keys, LOOK_S), devices))
    finally:
        context.destroy(linger=0)
    silent = [device for device, is_so in zip(devices, found, strict=True) if is_so]
    return silent if needs_all or len(silent) == len(devices) else []
