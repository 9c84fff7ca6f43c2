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


def untried_gpu(device: str) -> Finding:
    """Of a device that computes with CUDA."""
    return Finding(
        NOTE,
        device,
        "cuda",
        "FlowSpec's makers ran it on two servers' GPUs and on no Jetson: kernels are tried before they are "
        "used, but how fast they are is an estimate",
        "measure it with flowspec profile, and send in what flowspec doctor --local 1 --json prints",
    )
