"""How FlowSpec starts Python anew: with the modules that this process has, wherever it stands."""

from __future__ import annotations

import os
import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does, but finds all modules where this process finds
    them.

    `python -m` looks into the working folder first, where a folder named `flowspec` (a clone, say) would hide
    the package. The option against that, `-P`, came with Python 3.11.
    """
    path = [os.path.abspath(folder) for folder in sys.path]
    run = (  # sys is in the interpreter; anything else could be a file of the working folder
        f"import sys; sys.path[:] = {path!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", run, *arguments]
