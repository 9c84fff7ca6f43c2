"""Kernels that are broken as real ones were, and processes that have them.

`python -m tests.model.broken_kernels HOW[,HOW] int8 cpu` checks them as `flowspec.model.kernel_checks` does,
`python -m tests.model.broken_kernels HOW[,HOW] daemon ...` is a `flowspec daemon` that finds them first.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from flowspec.model.kernels import DIGITS, Kernel
from flowspec.model.quantised import PlainInt8Linear, Rounded


class RightForTheFirstRowCount(PlainInt8Linear):
    """As oneDNN's on ARM: garbage for every number of rows but the one that came first; here for more than
    one."""

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        found = super()._products(digits)
        return found if len(digits) == 2 else found.roll(1, 1)  # two digits a row


class OffInOneScale(PlainInt8Linear):
    def pack(self, rounded: Rounded) -> None:
        scales = rounded["scales"].clone()
        scales[len(scales) // 2] *= 1.01
        super().pack({**rounded, "scales": scales})


class WithoutSecondDigit(PlainInt8Linear):
    """Right for what one digit holds, and the same for a row whatever runs beside it."""

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        digits[len(digits) // 2 :] = 0
        return super()._products(digits)


class RowsTogether(PlainInt8Linear):
    """Right for whole numbers, however many; all others are off by very little, the more rows there are."""

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        is_whole = not digits[len(digits) // 2 :].any()
        found = super()._products(digits)
        return found if is_whole else found * (1 + len(digits) * 2.0**-20)


class Killed(PlainInt8Linear):
    how = signal.SIGILL

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), self.how)
        return super()._products(digits)


class Segfault(Killed):
    how = signal.SIGSEGV


class KilledFromOutside(Killed):
    how = signal.SIGKILL


class Hanging(PlainInt8Linear):
    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        time.sleep(3600)
        return super()._products(digits)


class Raising(PlainInt8Linear):
    def pack(self, rounded: Rounded) -> None:
        raise RuntimeError("unknown architecure\nand a trace")


class Starving(PlainInt8Linear):
    def pack(self, rounded: Rounded) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Exiting(PlainInt8Linear):
    def pack(self, rounded: Rounded) -> None:
        os._exit(3)


BROKEN = {
    "wrong": RightForTheFirstRowCount,
    "scale": OffInOneScale,
    "sigill": Killed,
    "sigsegv": Segfault,
    "sigkill": KilledFromOutside,
    "hang": Hanging,
    "memory": Starving,
    "raise": Raising,
    "exit": Exiting,
}


def break_int8(names: list[str]) -> None:
    """Puts broken kernels before int8's plain one; with `only` among the names in its place."""
    from flowspec.model import kernel_checks, kernels

    whole = kernels.kernels_of

    def kernels_of(dtype: str, device: torch.device) -> tuple[Kernel, ...]:
        if dtype != "int8":
            return whole(dtype, device)
        broken = tuple(
            Kernel(name=name, linear=BROKEN[name], arithmetic=DIGITS) for name in names if name != "only"
        )
        return broken if "only" in names else (*broken, whole(dtype, device)[-1])

    kernels.kernels_of = kernels_of
    kernel_checks.kernels_of = kernels_of


def main() -> None:
    how = sys.argv.pop(1)
    break_int8(how.split(","))
    if sys.argv[1] == "daemon":
        from flowspec.cli import main as command
        from flowspec.model import trials

        trials.CHILD = (sys.executable, "-m", "tests.model.broken_kernels", how)
        trials._code = lambda: how  # what is known of other kernels is of no use
        trials.TRIAL_S = 10
        sys.exit(command.main())
    from flowspec.model import kernel_checks

    kernel_checks.main()


if __name__ == "__main__":
    main()
