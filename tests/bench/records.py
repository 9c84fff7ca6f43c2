"""Records by hand: what is not named is as plain as it can be."""

from __future__ import annotations

from typing import Any

from flowspec.bench.outcome import Record


def record(method: str, prompt: str, tokens: int, seconds: float, **changes: Any) -> Record:
    """An answer of so many tokens *after the first* in so many seconds."""
    plain: dict[str, Any] = {
        "experiment": "by hand",
        "world": "simulated",
        "testbed": "two boards",
        "domain": "chat",
        "temperature": 0.0,
        "seed": 1,
        "repeat": 0,
        "finish_reason": "length",
        "agreement": "exact",
        "time_to_first_token_s": 0.5,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "S": 1.0,
        "rho": 0.0,
        "acceptance": 1.0,
        "stage_busy": [0.5, 0.25],
        "dropped_rows": 0,
        "rows": 10,
        "network_bytes": 100,
        "energy_j": 3.0,
        "tau_s": 0.1,
        "trip_s": 0.2,
        "oracle_s": 0.1,
        "chains": [],
        "events": 1,
        "digest": "00",
        "arithmetic": "",
    }
    return Record(
        method=method, prompt_id=prompt, new_tokens=tokens + 1, decode_s=seconds, **(plain | changes)
    )
