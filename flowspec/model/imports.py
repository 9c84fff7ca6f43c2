"""How names of transformers are taken: by one thread at a time, since it imports the modules behind them when
they are asked for first, and another thread may find such a module half there. And without torch where
nothing needs it, which costs 200 MiB and a second wherever it is installed.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, ClassVar

from flowspec.extras import missing_part
from flowspec.model.accelerator import has_driver


class _Importing:
    """Reentrant."""

    _lock = threading.RLock()
    _hides: ClassVar[list[bool]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._hides.append("torch" not in sys.modules and not has_driver())
        if self._hides[-1]:
            sys.modules["torch"] = None  # type: ignore[assignment]
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is not there

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if self._hides.pop():
            del sys.modules["torch"]
        self._lock.release()
        if isinstance(error, ModuleNotFoundError) and (missing := missing_part(error)):
            raise missing from None


IMPORTING = _Importing()
