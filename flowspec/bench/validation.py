"""Beside published figures: tokens per second and ratios of a simulated testbed, and how far they are
apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from flowspec.bench.config import Bench
from flowspec.bench.console import show
from flowspec.bench.outcome import Record
from flowspec.bench.report import PUBLISHED_SHORT, WIDTH, grid, rate
from flowspec.bench.summary import PUBLISHED, counts

HEADING = "Beside published figures"


def validate(bench: Bench, records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each published figure; rates are all tokens by all time of the setup's answers."""
    rows = []
    testbeds = {testbed.name: testbed for testbed in bench.testbeds}
    for known in bench.published:
        testbed = testbeds.get(known.testbed)
        if testbed is None:
            continue
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
                    "reference": known.reference,
                    "published_tokens_per_s": published,
                    "tokens_per_s": found,
                    "published_ratio": published_ratio,
                    "ratio": ratio,
                    "deviation": ratio / published_ratio - 1,
                    "rate_deviation": found / published - 1,
                    "fitted": known.fitted and name == known.reference,
                    "slowdown": testbed.slowdown,
                    "head_slowdown": testbed.head_slowdown,
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


COLUMNS = (
    "testbed: method",
    "published tokens/s",
    "tokens/s here",
    "published speed-up",
    "speed-up here",
    "off by",
    "slowdown",
)
SHORT = ("method", "published tok/s", "here tok/s", "published x", "here x", "off by")
"""For the terminal, where each testbed has a table of its own."""


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of `COLUMNS`."""
    return [[f"{row['testbed']}: {_name(row)}", *_figures(row), _slowdown(row)] for row in rows]


def explained(rows: Sequence[Mapping[str, Any]], world: str, some: str) -> str:
    """What the columns are, and that they mean little where `some` prompts only were asked (else empty)."""
    over = " or ".join(dict.fromkeys(row["reference"] for row in rows))
    return (
        f"Here: in this run, {world}. Speed-up: over {over}. Off by: how far the speed-up here is from the "
        "published one. Slowdown: how many times as long as by their profiles the stages' boards compute. "
        "*: the slowdown was set on this figure, so that it says nothing."
        + (f" It was set with all prompts: of {some} these columns mean next to nothing." if some else "")
    )


def _name(row: Mapping[str, Any]) -> str:
    hot = f" at temperature {row['temperature']:g}" if row["temperature"] else ""
    return f"{row['method']}{hot}{' *' if row['fitted'] else ''}"


def _figures(row: Mapping[str, Any]) -> list[str]:
    return [
        rate(row["published_tokens_per_s"]),
        rate(row["tokens_per_s"]),
        rate(row["published_ratio"]),
        rate(row["ratio"]),
        f"{100 * row['deviation']:+.0f}%",
    ]


def _slowdown(row: Mapping[str, Any]) -> str:
    head = "" if row["head_slowdown"] == row["slowdown"] else f" (head {row['head_slowdown']:g})"
    return f"{row['slowdown']:g}{head}"


def markdown(rows: Sequence[Mapping[str, Any]], world: str, some: str) -> str:
    """A section of `summary.md`; nothing where nothing is published."""
    if not rows:
        return ""
    lines = [f"{HEADING} ({world})", "", *grid(COLUMNS, lines_of(rows)), explained(rows, world, some), ""]
    return "\n".join(["", f"## {lines[0]}", *lines[1:]])


def show_validation(rows: Sequence[Mapping[str, Any]], world: str, some: str) -> None:
    """A table for each testbed in the terminal."""
    for testbed in dict.fromkeys(row["testbed"] for row in rows):
        here = [row for row in rows if row["testbed"] == testbed]
        show(
            f"{testbed}, {HEADING.lower()}; slowdown {_slowdown(here[0])}",
            SHORT,
            [[_name(row).replace(PUBLISHED, PUBLISHED_SHORT), *_figures(row)] for row in here],
        )
    if rows:
        print("\n" + fill(explained(rows, world, some).replace("Speed-up:", "x:"), WIDTH) + "\n")
