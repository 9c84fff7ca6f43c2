"""Processes whose int8 has other arithmetics than this machine's: all are the same kernel, by other names.

`python -m tests.model.other_arithmetics NAME[,NAME] daemon ...` is a `flowspec daemon` that has these, the
best first, and takes them for tried and right.
"""

from __future__ import annotations

import sys

from flowspec.model import trials


def have(names: list[str]) -> None:
    """int8 has these arithmetics in this process."""
    others = trials._cpu_arithmetics

    def arithmetics(dtype: str, has_pairs: bool) -> tuple[str, ...]:
        return tuple(names) if dtype == "int8" else others(dtype, has_pairs)

    trials._cpu_arithmetics = arithmetics


def main() -> int:
    have(sys.argv.pop(1).split(","))
    from flowspec.cli.main import main as flowspec

    return flowspec()


if __name__ == "__main__":
    sys.exit(main())
