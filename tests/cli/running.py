"""What commands print, in this process or as processes of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowspec.cli.answer import STARTING
from tests import warm

FLOWSPEC = [sys.executable, "-m", "flowspec.cli.main"]


@dataclass(frozen=True)
class Ended:
    """What a command has printed."""

    out: str
    err: str

    @property
    def words(self) -> str:
        """Of its output, wherever lines are broken."""
        return " ".join(self.out.split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def told(self) -> list[str]:
        """The lines of standard error, but for those that tell that a model is being loaded: how many these
        are depends on how busy the machine is."""
        return [line for line in self.err.splitlines() if not line.startswith((f"({STARTING})", "(still "))]


Run = Callable[..., Ended]


def real(*arguments: object, status: int = 0, stdin: str = "", code: str = "", **options: Any) -> Ended:
    """Runs a process of its own, whose code may be another than the command's."""
    command = [sys.executable, "-c", code] if code else FLOWSPEC
    done = warm.run(
        [*command, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Ended(done.stdout, done.stderr)
