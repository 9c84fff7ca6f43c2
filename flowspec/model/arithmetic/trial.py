"""Tries a build of `canonical.c`: `python -m flowspec.model.arithmetic.trial LIBRARY`.

In a process of its own, which may die of it. Says in JSON lines how far it is, and in the end that all cases
have the bits of the definition, or which has not. Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from flowspec.errors import first_line
from flowspec.model.arithmetic import cases
from flowspec.model.arithmetic.compiled import Library

GOLDEN = Path(__file__).with_name("golden.json")
LIMIT_S = 60
"""For a case, on the slowest board that is emulated."""


def main() -> None:
    try:
        library = Library(Path(sys.argv[1]))
    except (OSError, AttributeError) as error:
        _say(fault=f"cannot be loaded: {first_line(error)}")
        return
    golden = json.loads(GOLDEN.read_text("utf-8"))
    expected = {name: value for name, value in golden.items() if not name.startswith("pairs")}
    for place, (name, found, threads) in enumerate(_found(library)):
        _say(share=round(min(1.0, place / (2 * len(expected))), 3))
        if golden[name] != found:
            _say(fault=f"differs from its definition in {name}, with {threads} threads")
            return
    _say(fault="", has_pairs=library.has_pairs)


def _found(library: Library) -> Iterator[tuple[str, str, int]]:
    """The names of cases, with what came out and by how many threads."""
    runner = cases.Runner(library)
    for name, found in runner.functions():
        yield name, found, 1
    for case in cases.cases(library.has_pairs):
        for rows in cases.ROW_COUNTS:
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                yield f"{case.name} {rows}", runner.run(case, rows, threads), threads


def _say(**word: object) -> None:
    """A line for the parent. What hangs long after it was given up has no parent: it ends."""
    signal.alarm(int(2 * LIMIT_S))
    print(json.dumps(word), flush=True)


if __name__ == "__main__":
    main()
