"""Loads as people read them: `summary.md`, tables in the terminal, and `load.png`, throughput against latency
over the users. It computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flowspec.bench.console import show as show_table
from flowspec.bench.plots import COLOURS, HEIGHT_IN, OTHER_COLOURS, WIDTH_IN, figure, heading, name_of
from flowspec.bench.report import WIDTH, WORLDS, grid, load_opening, percent, place, rate

NONE = "-"
COLUMNS = (
    "tok/s",
    "latency s",
    "p95 s",
    "s/token",
    "p95",
    "first s",
    "fairness",
    "to alone",
    "stages",
    "drafters",
    "J/token",
    "to single",
)
MARKERS = "osD^vP*X"
EXPLAINED = (
    "tok/s: all users' tokens by the time. Latency: of whole answers, and by their tokens; p95: the slowest "
    "of 20. Fairness: Jain's index of the"
    " users' rates; to alone: of how fast their answers came by what one user alone waits for them. Stages, "
    "drafters: share of the time for which the busiest of their boards computes. To single: throughput and "
    "latency by"
    " the best of the methods with one drafter."
)


def rows(load: Mapping[str, Any]) -> list[list[str]]:
    """A line for each method of one load."""
    found = []
    for name, each in load["methods"].items():
        values = [
            rate(each[key])
            for key in (
                "tokens_per_s",
                "latency_s",
                "latency_p95_s",
                "token_s",
                "token_p95_s",
                "first_token_s",
            )
        ]
        busy = [percent(max(each["stage_busy"])), percent(max(each["board_busy"]))]
        fair = [
            NONE if each[key] is None else f"{each[key]:.3f}" for key in ("fairness", "fairness_to_alone")
        ]
        ratios = load["to_single"].get(name)
        single = NONE if ratios is None else f"{ratios['tokens_per_s']:.2f}, {ratios['latency_s']:.2f}"
        found.append([name, *values, *fair, *busy, rate(each["energy_j_per_token"]), single])
    return found


def load_title(table: Mapping[str, Any], load: Mapping[str, Any]) -> str:
    return f"{place(table)}, {load['users']} user{'s' if load['users'] > 1 else ''}"


def markdown(summary: Mapping[str, Any]) -> str:
    """GitHub tables, one for each load."""
    world = summary["world"]
    lines = load_opening(summary, EXPLAINED)
    for table in summary["tables"]:
        for load in table["loads"]:
            lines += [f"## {load_title(table, load)} ({world})", "", *grid(["method", *COLUMNS], rows(load))]
    return "\n".join(lines)


def show(summary: Mapping[str, Any]) -> None:
    world = summary["world"]
    print(fill(f"{summary['experiment']}, {world} world: {WORLDS.get(world, world)}", WIDTH))
    for table in summary["tables"]:
        for load in table["loads"]:
            show_table(f"{load_title(table, load)} ({world})", ["method", *COLUMNS], rows(load))
    print("\n" + fill(EXPLAINED, WIDTH))


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """A panel for each testbed and temperature: a line for each method, a point for each number of users; up
    and to the left is better."""
    tables = summary["tables"]
    columns = min(2, len(tables))
    lines = -(-len(tables) // columns)
    drawing = figure(WIDTH_IN, HEIGHT_IN * max(1, lines / 2))
    title = f"{summary['experiment']}: tokens per second against seconds per answer, by number of users"
    heading(drawing, title, summary["world"], "Up and to the left is better.")
    axes = drawing.subplots(lines, columns, squeeze=False)
    for ax, table in zip(axes.flat, tables, strict=False):
        _curves(ax, table)
    for ax in axes.flat[len(tables) :]:
        ax.set_visible(False)
    drawing.savefig(path)


def _curves(ax: Any, table: Mapping[str, Any]) -> None:
    names: Sequence[str] = list(dict.fromkeys(name for load in table["loads"] for name in load["methods"]))
    others = itertools.cycle(OTHER_COLOURS)
    for at, name in enumerate(names):
        colour = COLOURS.get(name) or next(others)
        points = [
            (load["users"], load["methods"][name]) for load in table["loads"] if name in load["methods"]
        ]
        xs, ys = [each["latency_s"] for _, each in points], [each["tokens_per_s"] for _, each in points]
        ax.plot(
            xs,
            ys,
            color=colour,
            marker=MARKERS[at % len(MARKERS)],
            linestyle="-" if name in COLOURS else "--",
            label=name_of(name),
        )
        for (users, _), x, y in zip(points, xs, ys, strict=True):
            ax.annotate(str(users), (x, y), (5, 4), textcoords="offset points", fontsize=8, color="#555555")
    ax.set_title(f"{place(table)}; beside each point its users", loc="left", fontsize=11)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    ax.set_xlabel("seconds from a question to the last token of its answer, mean")
    ax.set_ylabel("tokens/s of all users")
    ax.grid(which="both", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=10)
