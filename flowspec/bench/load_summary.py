"""Loads into what they say: throughput, latency and fairness by the number of users, and how that compares
with one drafter's best.

Throughput is all tokens by all time. Latency is an answer's time from its question to its last token,
`token_s` that by its tokens. Fairness is Jain's index of the users' rates: 1 where all are served alike, 1 by
their number where one has everything. Some prompts are answered sooner than others by anybody, so
`fairness_to_alone` takes for a user's rate how fast its answers came by what one user alone waited for the
same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from flowspec.bench.config import AR
from flowspec.bench.load import LoadRecord
from flowspec.bench.outcome import EXACT

SLOWEST = 95
"""The percentile that stands for the slow answers."""


def jain(values: Sequence[float]) -> float:
    """`(sum x)^2 / (n sum x^2)` (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def figures(record: LoadRecord, alone: LoadRecord | None = None) -> dict[str, Any]:
    """Of one load; times in seconds of its world. `alone` is that of one user with the same method and
    prompts, if there was one."""
    answers = record.answers
    whole_s = [answer.whole_s for answer in answers]
    token_s = [answer.whole_s / answer.new_tokens for answer in answers if answer.new_tokens]
    tokens = sum(answer.new_tokens for answer in answers)
    time_s = max(answer.last_s for answer in answers)
    return {
        "users": record.users,
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_s": tokens / time_s,
        "latency_s": fmean(whole_s),
        "latency_p95_s": float(np.percentile(whole_s, SLOWEST)),
        "token_s": fmean(token_s) if token_s else None,
        "token_p95_s": float(np.percentile(token_s, SLOWEST)) if token_s else None,
        "first_token_s": fmean(answer.first_s - answer.asked_s for answer in answers),
        "fairness": jain(_rates(record, [answer.new_tokens for answer in answers])),
        "fairness_to_alone": None
        if alone is None
        else jain(_rates(record, [answer.whole_s for answer in alone.answers])),
        "stage_busy": record.stage_busy,
        "board_busy": record.board_busy,
        "energy_j_per_token": record.energy_j / tokens if tokens else None,
        "network_bytes_per_token": record.network_bytes / tokens if tokens else None,
        "wrong": sum(answer.agreement != EXACT for answer in answers),
    }


def _rates(record: LoadRecord, worth: Sequence[float]) -> list[float]:
    """What each user's answers were worth, by the time that the user waited for them."""
    had: dict[int, float] = {}
    waited_s: dict[int, float] = {}
    for answer, each in zip(record.answers, worth, strict=True):
        had[answer.user] = had.get(answer.user, 0.0) + each
        waited_s[answer.user] = waited_s.get(answer.user, 0.0) + answer.whole_s
    return [had[user] / waited_s[user] for user in had]


def summarise(name: str, world: str, records: Sequence[LoadRecord]) -> dict[str, Any]:
    """`summary.json` of loads: a table for each testbed, temperature and seed, in which each method has its
    figures by users.

    `to_single` of a method with several drafters is its throughput by the highest, and its latency by the
    least, that any method with one drafter has at that number of users.
    """
    tables = []
    for testbed, temperature, seed in dict.fromkeys(
        (record.testbed, record.temperature, record.seed) for record in records
    ):
        here = [
            record
            for record in records
            if (record.testbed, record.temperature, record.seed) == (testbed, temperature, seed)
        ]
        by_users = {
            users: {record.method: record for record in here if record.users == users}
            for users in _users(here)
        }
        loads = [_load(users, methods, by_users.get(1, {})) for users, methods in by_users.items()]
        tables.append({"testbed": testbed, "temperature": temperature, "seed": seed, "loads": loads})
    return {
        "experiment": name,
        "world": world,
        "answers": sum(len(record.answers) for record in records),
        "wrong": sum(answer.agreement != EXACT for record in records for answer in record.answers),
        "tables": tables,
    }


def _users(records: Sequence[LoadRecord]) -> list[int]:
    return sorted({record.users for record in records})


def _load(users: int, methods: Mapping[str, LoadRecord], alone: Mapping[str, LoadRecord]) -> dict[str, Any]:
    found = {name: figures(record, alone.get(name)) for name, record in methods.items()}
    single = [found[name] for name, record in methods.items() if record.drafters == 1]
    to_single = {}
    if single:
        most, least_s = (
            max(each["tokens_per_s"] for each in single),
            min(each["latency_s"] for each in single),
        )
        to_single = {
            name: {
                "tokens_per_s": found[name]["tokens_per_s"] / most,
                "latency_s": found[name]["latency_s"] / least_s,
            }
            for name, record in methods.items()
            if record.drafters > 1
        }
    return {"users": users, "methods": found, "to_single": to_single, "to_ar": _to_ar(found)}


def _to_ar(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    if AR not in found:
        return {}
    keys = ("tokens_per_s", "latency_s")
    return {
        name: {key: each[key] / found[AR][key] for key in keys} for name, each in found.items() if name != AR
    }
