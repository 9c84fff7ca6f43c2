"""Processes whose int8 has other arithmetics than this machine's: all are the plain kernel, by other names.

`python -m tests.model.other_arithmetics NAME[,NAME] daemon ...` is a `flowspec daemon` that has these, the
best first, and takes them for tried and right.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from flowspec.model import kernels, trials
from flowspec.model.kernels import Kernel
from flowspec.model.quantised import PlainInt8Linear
from flowspec.model.trials import Trial, TrialVerdict


def have(names: list[str]) -> None:
    """int8 has these arithmetics in this process."""
    others, kept = kernels.kernels_of, trials._kept
    plain = Kernel(name="", linear=PlainInt8Linear, arithmetic="")
    own = tuple(replace(plain, name=name, arithmetic=name) for name in names)
    verdicts = tuple(TrialVerdict(kernel=name, fault="", arithmetic=name) for name in names)

    def kernels_of(dtype: str, device: torch.device) -> tuple[Kernel, ...]:
        return own if dtype == "int8" else others(dtype, device)

    def known(path: Path, dtype: str, device: str) -> Trial | None:
        return (
            Trial(dtype=dtype, device=device, verdicts=verdicts)
            if dtype == "int8"
            else kept(path, dtype, device)
        )

    kernels.kernels_of = kernels_of
    trials._kept = known


def main() -> int:
    have(sys.argv.pop(1).split(","))
    from flowspec.cli.main import main as flowspec

    return flowspec()


if __name__ == "__main__":
    sys.exit(main())
