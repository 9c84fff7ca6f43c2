"""The folder that an experiment's results are kept in: whose it is is written beside them, so that nobody
goes on with those of another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowspec.errors import InputError

EXPERIMENT = "experiment.json"
COMMAND = "command"
"""In it: the command that made it."""

Described = dict[str, Any]
"""An experiment as its file has it."""


def shown(value: Any) -> str:
    """A value, whole; of what has names, and many figures, its names."""
    if value is None:
        return "nothing"
    named = value if isinstance(value, list) else [value]
    if named and all(isinstance(each, dict) and "name" in each for each in named):
        return ", ".join(each["name"] for each in named)
    return json.dumps(value)


def first_difference(known: Any, new: Any, where: str = "") -> str | None:
    """What of a known experiment is not so in the new one, as people read it."""
    if isinstance(known, dict) and isinstance(new, dict):
        pairs = [(key, known.get(key), new.get(key)) for key in dict.fromkeys((*known, *new))]
    elif isinstance(known, list) and isinstance(new, list) and len(known) == len(new):
        pairs = [(number, *pair) for number, pair in enumerate(zip(known, new, strict=True), 1)]
    else:
        if known == new:
            return None
        return f"{where}: expected {shown(known)}, got {shown(new)}"
    differences = (first_difference(old, now, f"{where} {key}".strip()) for key, old, now in pairs)
    return next((difference for difference in differences if difference is not None), None)


def open_folder(
    experiment: object,
    out: Path,
    command: str,
    *,
    results: Sequence[str],
    difference: Callable[[Described, Described], str | None] = first_difference,
    lists: Sequence[str] = (),
    stays: bool = False,
) -> None:
    """Makes the folder, or finds that what it holds is of this experiment, of which all fields are given;
    raises `InputError` if it is of another.

    It holds something where one of the files `results` is there. `difference` says what of the known one is
    not so in the new one, None if it may be gone on with; `lists` are the keys that it looks for lists at.
    The new one is written down with the `command` that began it, unless the known one `stays`.
    """
    new = json.loads(json.dumps(msgspec.to_builtins(experiment, enc_hook=str)))
    path = out / EXPERIMENT
    try:
        out.mkdir(parents=True, exist_ok=True)
        known = _read(path, lists) if any((out / name).exists() for name in results) else None
        before = "" if known is None else str(known.pop(COMMAND, ""))
        found = None if known is None else difference(known, new)
        if found is not None:
            how = f"go on with those by: {before}" if before else "give the same flags as then"
            raise InputError(
                f"--out: {out} holds results of another experiment ({found}); {how}; or begin anew: give "
                "another --out, or remove the folder"
            )
        if known is None or not (stays or known == new):
            path.write_text(json.dumps({COMMAND: command, **new}, indent=1), "utf-8")
    except OSError as error:
        raise InputError(
            f"--out: expected a folder that can be written, got {out} ({error.strerror})"
        ) from None


def _read(path: Path, lists: Sequence[str]) -> Described:
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict) and all(isinstance(found.get(key), list) for key in lists):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    raise InputError(
        f"{path}: expected what an earlier run wrote, got something else; remove the folder, or give another "
        "--out"
    )
