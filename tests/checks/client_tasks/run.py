"""Runs the tasks of one client in that client's own Python: `python run.py MODULE PART URL MODEL`.

A task is a function of the module whose name begins with the part, and what it does is its name; it returns
what it got where that is right, and raises where it is wrong. Each is told as one line of JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys

CHARS_MAX = 400


def main() -> None:
    name, part, url, model = sys.argv[1:]
    module = importlib.import_module(name)
    for task, work in inspect.getmembers(module, inspect.isfunction):
        if not task.startswith(f"{part}_") or work.__module__ != name:
            continue
        try:
            told = {"right": True, "got": str(work(url, model))[:CHARS_MAX]}
        except Exception as error:  # noqa: BLE001 - whatever a client raises is what it met
            told = {"right": False, "got": f"{type(error).__name__}: {error}"[:CHARS_MAX]}
        print(json.dumps({"task": task, **told}), flush=True)


if __name__ == "__main__":
    main()
