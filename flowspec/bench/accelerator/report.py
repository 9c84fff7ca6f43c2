"""What an accelerator's check found, as findings for people and as one file to send in.

The file holds nothing private: what is told of a machine is chosen field by field, and texts that libraries
made lose names of users and hosts, paths and addresses.
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowspec.bench.accelerator.check import LEFT_OUT, RIGHT, UNFINISHED, Outcome
from flowspec.core.protocol.facts import Board
from flowspec.errors import InputError
from flowspec.runtime.health.finding import NOTE, PROBLEM, WARNING, Finding, untried_gpu
from flowspec.runtime.health.gather import read_software
from flowspec.runtime.health.heat import heat_findings
from flowspec.validation import as_dict
from flowspec.version import __version__

FORMAT = 2
"""Of the file; counts up when its fields change."""
KIND = "flowspec accelerator report"
SEND = "To send it in, attach it to an issue of the FlowSpec project, and say how the board is cooled."
_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?/(?:[^\s'\":;,/()]+/)*([^\s'\":;,/()]*)")
_SOURCE = re.compile(r"[\w.-]+\.(?:cpp|cc|cu|cuh|h|py)")
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # IPv4
    r"|\b[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}\b"  # hardware
    r"|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}(?![\w:])"  # IPv6
    r"|\b[\w.+-]+@[\w.-]+"  # mail, and user@host
)
ADVICE_TORCH = "install the versions that FlowSpec's constraints folder has for this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardState:
    """A board and its clocks at one time."""

    board: Board
    clocks: Mapping[str, Any]


def private_names() -> tuple[str, ...]:
    host = socket.gethostname()
    names = {host, host.split(".")[0], platform.node(), Path.home().name}
    with contextlib.suppress(OSError, KeyError):  # a user without an entry, as in containers
        names.add(getpass.getuser())
    return tuple(sorted(name for name in names if name and name != "localhost"))


def without_private(text: str, names: Sequence[str]) -> str:
    """A text without paths, addresses and these names; of a path the name of a source file stays."""

    def path(found: re.Match[str]) -> str:
        if len(found[0]) < 2:
            return found[0]
        return f"(path)/{found[1]}" if _SOURCE.fullmatch(found[1]) else "(path)"

    text = _ADDRESS.sub("(address)", _PATH.sub(path, text))
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(name)", text)
    return text


# ------------------------------------------------------------------------------------------- findings


def findings_of(
    outcomes: Sequence[Outcome], before: BoardState, after: BoardState, device: str
) -> list[Finding]:
    found = [finding for outcome in outcomes for finding in _of_outcome(outcome)]
    found += _of_choice(outcomes, before.board, device)
    for moment in (before, after):
        found += [finding for finding in heat_findings("this machine", moment.board) if finding not in found]
    order = (PROBLEM, WARNING, NOTE)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _of_outcome(outcome: Outcome) -> Iterator[Finding]:
    what = f"{outcome.step} {outcome.dtype}".strip()
    if outcome.state == LEFT_OUT:
        advice = "give it more time with --seconds, or an idle machine"
        yield _finding(NOTE, what, f"left out: {outcome.fault}", advice)
    elif outcome.state == UNFINISHED:
        advice = "give it more time with --seconds, or an idle machine; if it still hangs, send the report in"
        yield _finding(WARNING, what, f"{UNFINISHED}: {outcome.fault}", advice)
    elif outcome.state != RIGHT:
        advice = "send the report in; until then use another --dtype or --device cpu"
        advice = ADVICE_TORCH if outcome.step == "torch" else advice
        yield _finding(PROBLEM, what, outcome.fault or "failed", advice)
    else:
        yield from _OF_STEPS.get(outcome.step, _nothing)(what, outcome.found)


def _nothing(what: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    return iter(())


def _of_kernels(what: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    if not found["kernel"]:
        severity, advice = (WARNING, "use another --dtype") if found["is_lack"] else (PROBLEM, ADVICE_TORCH)
        yield _finding(severity, what, found["faults"], advice)
    elif found["faults"]:
        text = f"{found['kernel']} is used, for {found['faults']}"
        yield _finding(WARNING, what, text, "send the report in")


def _of_slice(what: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    if not found["logits_off"] <= found["logits_allowed"]:
        text = f"its logits are off by {found['logits_off']}, where {found['logits_allowed']} is allowed"
        advice = f"send the report in, and do not use --dtype {found['dtype']} on this device"
        yield _finding(PROBLEM, what, text, advice)


def _of_verify(what: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    if found["wrong"]:
        text = f"{found['wrong']} of {found['answers']} answers are not those of decoding step by step"
        yield _finding(PROBLEM, what, text, "send the report in, and do not use this device")


_OF_STEPS = {"kernels": _of_kernels, "slice": _of_slice, "verify": _of_verify}


def _of_choice(outcomes: Sequence[Outcome], board: Board, device: str) -> Iterator[Finding]:
    """A Jetson whose GPU idles; one that does not is new to the makers."""
    used = [outcome.found for outcome in outcomes if outcome.step == "torch" and outcome.state == RIGHT]
    if board.is_jetson and used and used[0]["is_cpu"] and device == "auto":
        text = "a Jetson, but torch can use its CPU only"
        yield _finding(PROBLEM, "device", text, "install JetPack's torch (docs/devices.md, Jetson)")
    elif used and not used[0]["is_cpu"]:
        yield untried_gpu("this machine")


def _finding(severity: str, check: str, text: str, advice: str) -> Finding:
    return Finding(severity, "this machine", check, text, advice)


# ----------------------------------------------------------------------------------------------- file


def report_of(
    outcomes: Sequence[Outcome],
    findings: Sequence[Finding],
    *,
    system: Mapping[str, Any],
    before: BoardState,
    after: BoardState,
    device: str,
    seconds: float,
    names: Sequence[str],
) -> dict[str, Any]:
    """The file's content. `names` are to be found nowhere in it."""
    document: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "flowspec": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "send": SEND,
        "asked_device": device,
        "seconds": round(seconds, 1),
        "problems": sum(finding.severity == PROBLEM for finding in findings),
        "system": dict(system),
        "software": as_dict(read_software()),
        "before": {"board": as_dict(before.board), "clocks": before.clocks},
        "after": {"board": as_dict(after.board), "clocks": after.clocks},
        "steps": [{**asdict(outcome), "s": round(outcome.s, 1)} for outcome in outcomes],
        "findings": [asdict(finding) for finding in findings],
    }
    cleaned: dict[str, Any] = _clean(document, names)
    return cleaned


def _clean(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, str):
        return without_private(value, names)
    if isinstance(value, Mapping):
        return {key: _clean(each, names) for key, each in value.items()}
    return [_clean(each, names) for each in value] if isinstance(value, list | tuple) else value


def check_file(path: Path) -> None:
    """Raises `InputError` for a path where no report can be written; an earlier report is written over."""
    if not path.parent.is_dir():
        raise InputError(f"--report: expected a file in a folder that exists, got {path}")
    if path.exists() and not _is_report(path):
        raise InputError(f"--report: {path} exists and is no earlier report; give another file")


def write_file(path: Path, document: Mapping[str, Any]) -> None:
    """Raises `InputError` where that cannot be done."""
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    except OSError as error:
        text = f"--report: expected a file that can be written, got {path} ({error.strerror})"
        raise InputError(text) from None


def _is_report(path: Path) -> bool:
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND
