"""Records by hand: what is not named is as plain as it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowspec.bench.outcome import Record

PLAIN = json.loads((Path(__file__).parents[1] / "data" / "bench" / "record.json").read_text())


def record(method: str, prompt: str, tokens: int, seconds: float, **changes: Any) -> Record:
    """An answer of so many tokens *after the first* in so many seconds."""
    rate = tokens / seconds if seconds else 0.0
    own = {"method": method, "prompt_id": prompt, "new_tokens": tokens + 1, "decode_s": seconds}
    return Record(**PLAIN | own | {"tokens_per_s": rate} | changes)
