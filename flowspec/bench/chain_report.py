"""Chains of models as people read them: tables of latencies, and `chains.png`, which chain was chosen when.
It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowspec.bench.chains import PLAIN, label
from flowspec.bench.config import AUTO, Bench
from flowspec.bench.console import show as show_table
from flowspec.bench.outcome import Record
from flowspec.bench.plots import HEIGHT_IN, OTHER_COLOUR, WIDTH_IN, figure, heading
from flowspec.bench.report import grid, place, rate

RATIOS = {
    "to_fixed": "the best fixed chain",
    "to_two": "the best with one model beside the target",
    "to_plain": "plain decoding",
}
NONE = "-"
COLUMNS_MAX = 3


def latency_rows(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns, and a line for each chain and each comparison of a chosen one."""
    domains = list(next(iter(table["latency_s"].values()), {}))
    rows = [[name, *(rate(each[domain]) for domain in domains)] for name, each in table["latency_s"].items()]
    for name, by_domain in table["chosen"].items():
        for key, other in RATIOS.items():
            found = [by_domain[domain][key] for domain in domains]
            rows.append(
                [
                    f"{name} by {other}",
                    *(NONE if each is None else f"{each['ratio']:.3f} ({each['other']})" for each in found),
                ]
            )
    return domains, rows


def markdown(tables: Sequence[Mapping[str, Any]], world: str) -> str:
    """A GitHub table for each testbed and temperature."""
    lines = []
    for table in tables:
        domains, rows = latency_rows(table)
        lines += [
            f"## Chains: {place(table)} ({world})",
            "",
            "Seconds from a question to the last token of its answer, mean:",
            "",
        ]
        lines += grid(["chain", *domains], rows)
    return "\n".join(lines)


def show(tables: Sequence[Mapping[str, Any]], world: str) -> None:
    for table in tables:
        domains, rows = latency_rows(table)
        show_table(
            f"{place(table)} ({world}): seconds per answer, mean",
            ["chain", *domains],
            rows,
        )


def draw(bench: Bench, records: Sequence[Record], path: Path) -> bool:
    """A panel for each domain, a line for each answer: which chain was at work when. Nothing is drawn where
    none was chosen."""
    setups = {setup.name: setup for setup in bench.setups if setup.chain == AUTO}
    chosen = [record for record in records if record.method in setups and record.chains]
    if not chosen:
        return False
    steps = {
        record.key: [(at_s, label(setups[record.method], models)) for _, at_s, models, _ in record.chains]
        for record in chosen
    }
    names = sorted(
        {name for each in steps.values() for _, name in each},
        key=lambda name: (name != PLAIN, name.count("+"), name),
    )
    domains = list(dict.fromkeys(record.domain for record in chosen))
    columns = min(COLUMNS_MAX, len(domains))
    drawing = figure(WIDTH_IN, HEIGHT_IN)
    heading(drawing, f"{bench.name}: the chain at work, answer by answer", bench.world)
    axes = drawing.subplots(-(-len(domains) // columns), columns, squeeze=False, sharey=True)
    for ax, domain in zip(axes.flat, domains, strict=False):
        own = [record for record in chosen if record.domain == domain]
        for at, record in enumerate(own):
            shift = (
                (at - (len(own) - 1) / 2) * 0.5 / max(1, len(own))
            )  # beside each other, not upon each other
            times_s = [at_s for at_s, _ in steps[record.key]] + [record.whole_s]
            levels = [names.index(name) + shift for _, name in steps[record.key]]
            ax.step(
                times_s, [*levels, levels[-1]], where="post", color=OTHER_COLOUR, alpha=0.7, linewidth=1.5
            )
        ax.set_title(domain, loc="left", fontsize=11)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(-0.5, len(names) - 0.5)
        ax.set_xlabel("seconds of the answer")
        ax.grid(color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes.flat[len(domains) :]:
        ax.set_visible(False)
    drawing.savefig(path)
    return True
