"""The flag `--check`: what the cores say of themselves (`validate`) is asked after every event.

The simulated worlds always ask. A running head or daemon asks where it is told to, since it costs time. If
something is not true, that is a fault in FlowSpec: its state goes to the log, and the process ends.
"""

from __future__ import annotations

import logging
import os
from typing import Protocol

from flowspec.errors import FlowSpecError, first_line

VARIABLE = "FLOWSPEC_CHECK"
"""Set to anything, it is as the flag; so daemons that a command starts on this machine check, too."""
STATE_CHARS_MAX = 20_000

log = logging.getLogger("flowspec.check")


class BrokenCoreError(FlowSpecError):
    """What a core says of itself is not true."""


class Core(Protocol):
    def validate(self) -> None: ...


def turn_on() -> None:
    """From now on, for this process and those that it starts."""
    os.environ[VARIABLE] = "1"


def is_on() -> bool:
    return bool(os.environ.get(VARIABLE))


def check(core: Core, event: object) -> None:
    """Asks a core after an event; where something is not true its state goes to the log, and
    `BrokenCoreError` is raised."""
    try:
        core.validate()
    except AssertionError as error:
        name, last, why = type(core).__name__, type(event).__name__, first_line(error)
        log.critical("%s is broken after %r: %s", name, event, why)
        log.critical("its state: %s", state_of(core))
        text = (
            f"a check failed: {name} after {last}: {why}; this is a fault in FlowSpec, here or at a peer; "
            "its state is in the log"
        )
        raise BrokenCoreError(text) from error


def state_of(core: object, chars_max: int = STATE_CHARS_MAX) -> str:
    found = told(core, 5)
    return found if len(found) <= chars_max else f"{found[:chars_max]}... ({len(found)} characters)"


def told(value: object, depth: int) -> str:
    """A value with the fields of what is in it, `depth` deep."""
    names = list(getattr(value, "__dict__", ())) or [
        name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
    ]
    if depth == 0 or isinstance(value, type) or callable(value):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {told(each, depth - 1)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return "[" + ", ".join(told(each, depth - 1) for each in value) + "]"
    if not names or not type(value).__module__.startswith("flowspec"):
        return repr(value)
    fields = ", ".join(
        f"{name}={told(getattr(value, name), depth - 1)}" for name in names if hasattr(value, name)
    )
    return f"{type(value).__name__}({fields})"
