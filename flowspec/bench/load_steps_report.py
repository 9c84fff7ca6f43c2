"""Loads of steps as people read them: `summary.md`, tables in the terminal, and `steps.png`, tokens per
second over time with the steps marked. It computes nothing but means over a few bins, for lines that can be
read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flowspec.bench.console import show as show_table
from flowspec.bench.load_steps_summary import ALL, BELOW, FIRST, LATER
from flowspec.bench.plots import COLOURS, OTHER_COLOURS, PALETTE, WIDTH_IN, figure, heading, name_of
from flowspec.bench.report import NONE, WIDTH, WORLDS, grid, load_opening, percent, place, rate, times

COLUMNS = ("answers", "tok/s", "latency s", "p95 s", "first s", "lost s", "stages")
BESIDE = ("tok/s", "speed", *(FIRST, LATER), "by domain")
SMOOTHED = 5
"""Bins that a point of a line is the mean of."""
PANEL_IN = {"rate": 4.6, "ratio": 2.4, "drafted": 2.4}
AROUND_IN = 1.4
EXPLAINED = (
    "A step's tok/s are those that came while it lasted; latency is that of the answers that were asked for "
    "in it, p95 the slowest of 20. Lost: so long it would have had to give nothing, and else what it gives "
    "in the second half of the step, to give what it gave in the first. Stages: share of the time for which "
    "the busiest computes."
)
BESIDE_EXPLAINED = (
    "Speed is the time of the single drafter's answers by that of the same answers, with a 95% interval "
    "(bootstrap over answers); first: of each user's first answer in the step, later: of the others."
)


def step_title(step: Mapping[str, Any]) -> str:
    """`4 users, of-code 8 times as slow`."""
    return ", ".join([f"{step['users']} user{'s' * (step['users'] != 1)}", *_troubles(step)])


def _troubles(step: Mapping[str, Any]) -> list[str]:
    slow = [f"{name} {times_:g} times as slow" for name, times_ in step["slow"].items() if times_ != 1]
    return [*slow, *(f"{name} lost" for name in step["lost"])]


def rows(step: Mapping[str, Any]) -> list[list[str]]:
    """A line for each method of one step."""
    found = []
    for name, each in step["methods"].items():
        values = [rate(each[key]) for key in ("tokens_per_s", "latency_s", "latency_p95_s", "first_token_s")]
        lost = NONE if each["lost_s"] is None else f"{each['lost_s']:.1f}"
        found.append([name, str(each["answers"]), *values, lost, percent(max(each["stage_busy"]))])
    return found


def beside_columns() -> list[str]:
    return ["step", "method", *BESIDE]


def beside_rows(table: Mapping[str, Any]) -> list[list[str]]:
    """A line for each step and method with several drafters."""
    found = []
    for step in table["steps"]:
        for name, each in step["to_single"].items():
            domains = [
                f"{domain} {times(speed)}"
                for domain, speed in each["speed"].items()
                if domain not in (ALL, FIRST, LATER) and speed is not None
            ]
            speeds = [times(each["speed"][key]) for key in (ALL, FIRST, LATER)]
            line = [f"{step['step']}: {step_title(step)}", name, rate(each["tokens_per_s"]), *speeds]
            found.append([*line, "; ".join(domains)])
    return found


def verdict(table: Mapping[str, Any]) -> str:
    """Where a method with several drafters is below the single one, in a paragraph."""
    single = table["single"]
    below = [_cell(each) for each in table["below"] if each["of"] not in (FIRST, LATER)]
    said = f"Below {BELOW:g} of `{single}` in throughput or speed, in any step or on any domain"
    return f"{said}: {'; '.join(below) if below else 'nowhere'}."


def _cell(each: Mapping[str, Any]) -> str:
    more = f", {each['answers']} answers" if "answers" in each else ""
    return f"step {each['step']}, {each['of']}: {each['method']} {times(dict(each))}{more}"


def markdown(summary: Mapping[str, Any]) -> str:
    """GitHub tables, one for each step, and what is beside the single drafter."""
    world = summary["world"]
    lines = load_opening(summary, EXPLAINED)
    for table in summary["tables"]:
        if beside := beside_rows(table):
            lines += [f"## {place(table)}: by `{table['single']}` ({world})", "", BESIDE_EXPLAINED, ""]
            lines += [*grid(beside_columns(), beside), verdict(table), ""]
        for step in table["steps"]:
            lines += [f"## {place(table)}, step {step['step']}: {step_title(step)} ({world})", ""]
            lines += grid(["method", *COLUMNS], rows(step))
    return "\n".join(lines)


def show(summary: Mapping[str, Any]) -> None:
    world = summary["world"]
    print(fill(f"{summary['experiment']}, {world} world: {WORLDS.get(world, world)}", WIDTH))
    for table in summary["tables"]:
        for step in table["steps"]:
            title = f"{place(table)}, step {step['step']}: {step_title(step)} ({world})"
            show_table(title, ["method", *COLUMNS], rows(step))
        if beside := beside_rows(table):
            # Domains have no room in 80 columns; `summary.md` has them.
            show_table(f"by {table['single']}", beside_columns()[:-1], [line[:-1] for line in beside])
            print("\n" + fill(verdict(table).replace("`", ""), WIDTH))
    print("\n" + fill(f"{EXPLAINED} {BESIDE_EXPLAINED}", WIDTH))


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """For each testbed and temperature three panels on one axis of time: tokens per second of each method;
    those of methods with several drafters by the single one's; and who drafts for the first of these."""
    tables = summary["tables"]
    heights = [PANEL_IN["rate"], PANEL_IN["ratio"], PANEL_IN["drafted"]] * len(tables)
    drawing = figure(WIDTH_IN, AROUND_IN + sum(heights))
    said = f"Lines are means over {SMOOTHED} of the {_bins(tables)} spans of a step."
    heading(
        drawing, f"{summary['experiment']}: tokens per second while the load changes", summary["world"], said
    )
    axes = drawing.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for at, table in enumerate(tables):
        rate_ax, ratio_ax, drafted_ax = axes[3 * at : 3 * at + 3]
        _rates(rate_ax, table)
        _ratios(ratio_ax, table)
        _drafted(drafted_ax, table)
        for ax in (rate_ax, ratio_ax, drafted_ax):
            _mark(ax, table)
        _label(rate_ax, table)
        drafted_ax.set_xlabel("seconds")
    drawing.savefig(path)


def _bins(tables: Sequence[Mapping[str, Any]]) -> int:
    return max(
        (
            len(span)
            for table in tables
            for curve in table["curves"].values()
            for span in curve["tokens_per_s"]
        ),
        default=0,
    )


def _line(table: Mapping[str, Any], of: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Instants and values of a line, smoothed within each step and broken between steps."""
    xs: list[float] = []
    ys: list[float] = []
    for step, values in zip(table["steps"], of, strict=True):
        span_s = step["seconds"] / len(values)
        for first in range(len(values) - SMOOTHED + 1):
            xs.append(step["start_s"] + (first + SMOOTHED / 2) * span_s)
            ys.append(sum(values[first : first + SMOOTHED]) / SMOOTHED)
        xs.append(step["start_s"] + step["seconds"])
        ys.append(float("nan"))
    return xs, ys


def _looks(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    others = itertools.cycle(OTHER_COLOURS)
    return {
        name: {"color": COLOURS.get(name) or next(others), "linestyle": "-" if name in COLOURS else "--"}
        for name in table["curves"]
    }


def _rates(ax: Any, table: Mapping[str, Any]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for name, look in _looks(table).items():
        xs, ys = _line(table, table["curves"][name]["tokens_per_s"])
        ax.plot(xs, ys, linewidth=1.8, label=name_of(name), **look)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylabel("tokens/s of all users")
    ax.legend(frameon=False, fontsize=10, loc="lower right", ncols=len(table["curves"]))


def _ratios(ax: Any, table: Mapping[str, Any]) -> None:
    single = table["single"]
    names = [name for name in table["curves"] if any(name in step["to_single"] for step in table["steps"])]
    if single is None or not names:
        ax.set_visible(False)
        return
    _, theirs = _line(table, table["curves"][single]["tokens_per_s"])
    for name in names:
        xs, ys = _line(table, table["curves"][name]["tokens_per_s"])
        ratios = [own / other if other > 0 else float("nan") for own, other in zip(ys, theirs, strict=True)]
        ax.plot(xs, ratios, linewidth=1.4, alpha=0.6, label=name_of(name), **_looks(table)[name])
        for step in table["steps"]:
            mean = step["to_single"][name]["tokens_per_s"]
            if mean is not None:
                ends = (step["start_s"], step["start_s"] + step["seconds"])
                ax.plot(ends, (mean, mean), linewidth=2.6, **_looks(table)[name])
    ax.axhline(1.0, color="#222222", linewidth=0.9)
    ax.axhline(BELOW, color="#d55e00", linewidth=0.9, linestyle=":")
    ax.set_ylabel(f"by {single};\nthick: whole steps")
    if len(names) > 1:
        ax.legend(frameon=False, fontsize=10, loc="upper right", ncols=4)


def _drafted(ax: Any, table: Mapping[str, Any]) -> None:
    """Shares of the rows that drafters are asked about, in bars of a few bins."""
    names = [name for name in table["curves"] if any(name in step["to_single"] for step in table["steps"])]
    if not names:
        ax.set_visible(False)
        return
    asked = table["curves"][names[0]]["asked"]
    drafters = list(asked[0])
    for number, drafter in enumerate(drafters):
        lefts, widths, bottoms, heights = [], [], [], []
        for step, span in zip(table["steps"], asked, strict=True):
            bins = len(span[drafter])
            for first in range(0, bins, SMOOTHED):
                rows = [sum(span[each][first : first + SMOOTHED]) for each in drafters]
                lefts.append(step["start_s"] + first * step["seconds"] / bins)
                widths.append(min(SMOOTHED, bins - first) * step["seconds"] / bins)
                bottoms.append(sum(rows[:number]) / max(1, sum(rows)))
                heights.append(rows[number] / max(1, sum(rows)))
        colour = PALETTE[number % len(PALETTE)]
        ax.bar(lefts, heights, widths, bottoms, align="edge", color=colour, alpha=0.8, label=drafter)
    ax.set_ylim(0, 1)
    ax.set_ylabel(f"{names[0]}: who drafts\n(share of rows)")
    ax.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=len(drafters))


def _mark(ax: Any, table: Mapping[str, Any]) -> None:
    """A line where each step begins; what is slow or lost meanwhile is shaded."""
    end_s = table["steps"][-1]["start_s"] + table["steps"][-1]["seconds"]
    ax.set_xlim(0, end_s)
    for step in table["steps"]:
        ax.axvline(step["start_s"], color="#555555", linewidth=0.9)
        if _troubles(step):
            ax.axvspan(
                step["start_s"], step["start_s"] + step["seconds"], color="#888888", alpha=0.12, linewidth=0
            )
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _label(ax: Any, table: Mapping[str, Any]) -> None:
    """Above each step what it is."""
    ax.set_title(f"{place(table)}\n\n", loc="left", fontsize=11)
    for step in table["steps"]:
        ax.annotate(
            "\n".join(step_title(step).split(", ")),
            (step["start_s"] + step["seconds"] / 2, 1.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=9,
            annotation_clip=False,
        )
