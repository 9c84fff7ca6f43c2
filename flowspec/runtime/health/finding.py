"""One thing that the doctor has to say."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM, WARNING, NOTE = "problem", "warning", "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names what was looked at, `device` a device or a link, `text` says what is, `advice` what to
    do."""

    severity: str
    device: str
    check: str
    text: str
    advice: str
