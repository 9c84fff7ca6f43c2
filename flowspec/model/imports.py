"""How names of transformers are taken.

One thread at a time: transformers imports the modules behind them when they are asked for first, and another
thread that asks meanwhile may find one that is half there, and no such name in it. And without torch where
nothing needs it: transformers would import it wherever it is installed, for 200 MiB and a second, though
tokenizers and configs do without.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from flowspec.model.accelerator import has_driver


class _Importing:
    """Reentrant."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hides: list[bool] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._hides.append("torch" not in sys.modules and not has_driver())
        if self._hides[-1]:
            sys.modules["torch"] = None  # type: ignore[assignment]
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is not there

    def __exit__(self, *_unused: Any) -> None:
        if self._hides.pop():
            del sys.modules["torch"]
        self._lock.release()


IMPORTING = _Importing()
