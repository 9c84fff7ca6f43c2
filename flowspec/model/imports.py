"""One thread at a time takes names of transformers: it imports the modules behind them when they are asked
for first, and another thread that asks meanwhile may find one that is half there, and no such name in it."""

from __future__ import annotations

import threading

IMPORTING = threading.RLock()
