"""An accelerator's check on a machine that is broken, or a small one on this machine:
`python -m tests.bench.broken_accelerator HOW STEP ...`.

Steps that are not about what is broken say what they would say on a machine that is well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flowspec.bench.accelerator import steps
from flowspec.model import trials

TORCH = {
    "device": "cpu",
    "is_cpu": True,
    "facts": {"name": "made-up CPU"},
    "free_bytes": 1 << 30,
    "gb_per_s": 1.0,
    "tflops": {},
    "layer_us": 1.0,
}
KERNELS = {"kernel": "lanes16", "faults": ""}
SLICE = {
    "logits_off": 1e-6,
    "logits_allowed": 1e-3,
    "rows_alone": {"rows": 8, "other_bits": 0, "off": 0.0},
    "pass_ms": {"1": 1.0, "4": 2.0, "16": 3.0},
}
VERIFY = {"answers": 12, "exact": 12, "wrong": 0, "tokens_per_s": {"ar": 1.0}}


def well(name: str, found: dict[str, Any]) -> None:
    steps.STEPS[name] = lambda device, folder, dtype: {"dtype": dtype, **found}


def die(signal_number: int, at: str) -> Any:
    """A slice step that ends by a signal at one precision."""

    def step(device: str, folder: Path, dtype: str) -> dict[str, Any]:
        if dtype == at:
            os.kill(os.getpid(), signal_number)
        return {"dtype": dtype, **SLICE}

    return step


def hang(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    time.sleep(3600)
    return {}


def fail(device: str, folder: Path, dtype: str) -> dict[str, Any]:
    raise RuntimeError(
        "CUDA error: no kernel image is available for execution on the device\nat /home/alice/x.py"
    )


def refuse(*_: Any) -> Any:
    raise trials.NoRightKernelError("FlowSpec's kernels do not run right here")


def main() -> None:
    how = sys.argv.pop(1)
    if how == "small":
        steps.PROMPTS, steps.NEW_TOKENS, steps.SPEED_S = 1, 8, 0.05
        steps.main()
        return
    whole_kernels = steps.STEPS["kernels"]
    for name, found in (
        ("torch", TORCH),
        ("plain", {}),
        ("kernels", KERNELS),
        ("slice", SLICE),
        ("verify", VERIFY),
    ):
        well(name, found)
    if how == "kernel":
        trials.prepare = refuse
        steps.STEPS["kernels"] = whole_kernels
    elif how == "torch":
        steps.STEPS["torch"] = die(signal.SIGILL, "")
    elif how == "dies":
        steps.STEPS["slice"] = die(signal.SIGSEGV, "bfloat16")
    else:
        steps.STEPS["verify"] = {"hangs": hang, "fails": fail}[how]
    steps.main()


if __name__ == "__main__":
    main()
