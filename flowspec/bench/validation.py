"""Beside published figures: tokens per second and ratios of a simulated testbed, and how far they are
apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowspec.bench.config import Bench
from flowspec.bench.console import show
from flowspec.bench.outcome import Record
from flowspec.bench.summary import counts


def validate(bench: Bench, records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each published figure; rates are all tokens by all time of the setup's answers."""
    rows = []
    for known in bench.published:
        some = [
            record
            for record in records
            if record.testbed == known.testbed and record.temperature == known.temperature
        ]
        rates = {
            name: _rate([record for record in some if record.method == name]) for name in known.tokens_per_s
        }
        reference = rates[known.reference]
        for name, published in known.tokens_per_s.items():
            found = rates[name]
            if found is None or reference is None:
                continue
            ratio, published_ratio = found / reference, published / known.tokens_per_s[known.reference]
            rows.append(
                {
                    "testbed": known.testbed,
                    "temperature": known.temperature,
                    "method": name,
                    "published_tokens_per_s": published,
                    "tokens_per_s": found,
                    "published_ratio": published_ratio,
                    "ratio": ratio,
                    "deviation": ratio / published_ratio - 1,
                    "rate_deviation": found / published - 1,
                    "fitted": known.fitted and name == known.reference,
                }
            )
    return rows


def _rate(records: Sequence[Record]) -> float | None:
    timed = [record for record in records if counts(record)]
    return (
        sum(record.new_tokens - 1 for record in timed) / sum(record.decode_s for record in timed)
        if timed
        else None
    )


def show_validation(rows: Sequence[dict[str, Any]]) -> None:
    """The table in the terminal; `*` marks what a free parameter was set on."""
    lines = [
        [
            f"{row['testbed']}: {row['method']}{' *' if row['fitted'] else ''}",
            f"{row['published_tokens_per_s']:.2f}",
            f"{row['tokens_per_s']:.2f}",
            f"{row['published_ratio']:.2f}",
            f"{row['ratio']:.2f}",
            f"{100 * row['deviation']:+.0f}%",
        ]
        for row in rows
    ]
    columns = ["* set on this", "published", "simulated", "published ratio", "simulated ratio", "off by"]
    show("beside published figures: tokens per second, and ratios to the reference", columns, lines)
