"""Processes whose int8 has other arithmetics than this machine's: all are the same kernel, by other names.

`python -m tests.model.other_arithmetics NAME[,NAME] daemon ...` is a `flowspec daemon` that has these, the
best first, and takes them for tried and right.
"""

from __future__ import annotations

import sys

from flowspec.model import engines


def have(names: list[str]) -> None:
    """int8 has these arithmetics in this process."""
    engines.prepare()
    engines._found["int8", "cpu"] = engines.Trial(arithmetics=tuple(names))


def main() -> int:
    have(sys.argv.pop(1).split(","))
    from flowspec.cli.main import main as flowspec

    return flowspec()


if __name__ == "__main__":
    sys.exit(main())
