"""Whether any device of a cluster answers at all, before a head imports what it works with: that takes
seconds, and many on a board, and the most common mistake is that no daemon runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from flowspec.runtime.cluster import Device
from flowspec.runtime.health.examine import (
    EXAMINE_TIMEOUTS,
    REACHABLE,
    Examined,
    Failure,
    ask_all,
    greet,
)
from flowspec.runtime.planning.survey import absent_of, absent_timeouts
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import end_context

LOOK_S = 1.0
"""For an answer; who takes longer is asked as ever."""


def refuse_silent(
    devices: Sequence[Device], keys: Keyring | None, *, needs_all: bool, hint: str = ""
) -> None:
    """Raises the survey's `ClusterError` where no device answers, where one does not of which all are needed,
    and where one refuses us, as for its keys; the `hint` then says what else to do.

    Whoever answers is left to the survey, which comes when all is imported.
    """
    looked = _looked_at(devices, keys)
    silent = [each.device for each in looked if each.failure is not None and each.failure.check == REACHABLE]
    refusing = [each for each in looked if each.failure is not None and each.failure.check != REACHABLE]
    if refusing:
        absent_of(refusing, needs_all=needs_all)
    if silent and (needs_all or len(silent) == len(devices)):
        examine_timeouts = EXAMINE_TIMEOUTS if needs_all else absent_timeouts(len(silent))
        found = ask_all(silent, keys=keys, examine_timeouts=examine_timeouts, cluster=devices)
        absent_of(found, needs_all=needs_all, hint=hint)


def _looked_at(devices: Sequence[Device], keys: Keyring | None) -> list[Examined]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        with ThreadPoolExecutor(len(devices)) as threads:
            found = threads.map(lambda device: greet(context, device, keys, LOOK_S), devices)
            return [
                Examined(device=device, failure=said if isinstance(said, Failure) else None)
                for device, said in zip(devices, found, strict=True)
            ]
    finally:
        end_context(context)
