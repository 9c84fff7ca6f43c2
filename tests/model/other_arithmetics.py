"""Processes whose int8 has other arithmetics than this machine's: all are the plain kernel, by other names.

`python -m tests.model.other_arithmetics NAME[,NAME] daemon ...` is a `flowspec daemon` that has these, the
best first; with `int8 cpu` in place of `daemon` it checks them as `flowspec.model.kernel_checks` does.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from flowspec.model import kernel_checks, kernels, trials
from flowspec.model.kernels import Kernel
from flowspec.model.quantised import PlainInt8Linear


def have(names: list[str]) -> None:
    """int8 has these arithmetics in this process, and nothing that was found before counts."""
    whole = kernels.kernels_of

    def kernels_of(dtype: str, device: torch.device) -> tuple[Kernel, ...]:
        if dtype != "int8":
            return whole(dtype, device)
        plain = Kernel(name="", linear=PlainInt8Linear, arithmetic="")
        return tuple(replace(plain, name=name, arithmetic=name) for name in names)

    kernels.kernels_of = kernels_of
    kernel_checks.kernels_of = kernels_of
    trials._code = lambda: ",".join(names)


if __name__ == "__main__":
    told = sys.argv.pop(1)
    have(told.split(","))
    if sys.argv[1] == "daemon":
        from flowspec.cli.main import main

        trials.CHILD = (sys.executable, "-m", "tests.model.other_arithmetics", told)
        sys.exit(main())
    kernel_checks.main()
