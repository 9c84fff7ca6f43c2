"""One answer as the harness keeps it: a line of `results.jsonl`, the same from every world."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from msgspec import to_builtins

from flowspec.errors import InputError
from flowspec.folders import why_unread
from flowspec.plan.tables import among
from flowspec.validation import Document, Misfit, fit

EXACT, WRONG = "exact", "wrong"
"""How an answer agrees with plain decoding's: all tokens are equal, or not."""

Agreement = Annotated[str, among((EXACT, WRONG))]
Kept = TypeVar("Kept")
Key = tuple[str, str, str, float, int, int]


class Record(Document, frozen=True, kw_only=True):
    """Figures of one answer; times in seconds of its world. `tau_s` and `trip_s` are what a slot and a trip
    cost in it.

    `chains` are the chains of models that were chosen, each as (tokens known, seconds, models, reason), none
    where nothing is chosen. `oracle_s` is the least that the time after the first token could have been with
    the guesses of this answer (`bench.oracle`), None where that is not known; `energy_j` counts all boards of
    the testbed.

    `arithmetic` is what was computed with (`core.cluster.agreement`), empty where nothing was.
    """

    experiment: str
    world: str
    testbed: str
    method: str
    prompt_id: str
    domain: str
    temperature: float
    seed: int
    repeat: int
    new_tokens: int
    finish_reason: str
    agreement: Agreement
    decode_s: float
    time_to_first_token_s: float
    tokens_per_s: float
    S: float
    rho: float
    acceptance: float
    stage_busy: list[float]
    dropped_rows: int
    rows: int
    network_bytes: int
    energy_j: float
    tau_s: float
    trip_s: float
    oracle_s: float | None
    chains: list[Any]
    events: int
    digest: str
    arithmetic: str

    @property
    def key(self) -> Key:
        """What tells one answer of an experiment from all others."""
        return (self.testbed, self.method, self.prompt_id, self.temperature, self.seed, self.repeat)

    @property
    def whole_s(self) -> float:
        """From the question to the last token."""
        return self.time_to_first_token_s + self.decode_s


def write_records(path: Path, records: Sequence[Any]) -> None:
    """Appends records, a line each; half a line that an interruption left is removed first.
    Several processes may do so at once. Raises `InputError` if it cannot be."""
    lines = "".join(json.dumps(to_builtins(record)) + "\n" for record in records)
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or its process has ended
            _remove_half_line(file)
            file.write(lines.encode())
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be written ({error.strerror})") from None


def _remove_half_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read_records(path: Path, kind: type[Kept]) -> list[Kept]:
    """All whole records of a file (none if it is not there); raises `InputError` for another kind of file."""
    if not path.exists():
        return []
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return fit(found, list[kind])  # type: ignore[valid-type]
    except Misfit as misfit:
        what, why = "results of this version of FlowSpec", str(misfit)
    except (OSError, ValueError, RecursionError) as error:
        what, why = "results of an earlier run, but they cannot be read", why_unread(error)
    raise InputError(f"{path}: expected {what} ({why}); remove it, or give another --out")
