"""Records by hand: what is not named is as plain as it can be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowspec.bench.records import EXACT, LoadAnswer, LoadRecord, Record

PLAIN = json.loads((Path(__file__).parents[1] / "data" / "bench" / "record.json").read_text())


def record(method: str, prompt: str, tokens: int, seconds: float, **changes: Any) -> Record:
    """An answer of so many tokens *after the first* in so many seconds."""
    rate = tokens / seconds if seconds else 0.0
    own = {"method": method, "prompt_id": prompt, "new_tokens": tokens + 1, "decode_s": seconds}
    return Record(**PLAIN | own | {"tokens_per_s": rate} | changes)


def load_record(method: str, users: int, seconds: Sequence[float], *, drafters: int = 1) -> LoadRecord:
    """A load in which someone waits each of `seconds` for ten tokens, and then as long for the next."""
    answers = [
        LoadAnswer(
            user=user,
            prompt_id=f"{user}{turn}",
            domain="made",
            asked_s=turn * each_s,
            first_s=turn * each_s + 0.5,
            last_s=(turn + 1) * each_s,
            new_tokens=10,
            agreement=EXACT,
        )
        for turn in range(2)
        for user, each_s in enumerate(seconds)
    ]
    own = {
        name: PLAIN[name] for name in ("experiment", "world", "testbed", "temperature", "seed", "stage_busy")
    }
    return LoadRecord(
        **own,
        method=method,
        users=users,
        step=0,
        label=f"{users} users",
        drafters=drafters,
        seconds=2 * max(seconds),
        tokens=10 * len(answers),
        answers=answers,
        board_busy=[0.0, 0.125],
        network_bytes=400,
        energy_j=80.0,
        events=1,
        digest="00",
    )
