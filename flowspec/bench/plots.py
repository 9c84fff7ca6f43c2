"""Figures of a summary, and what all figures share: matplotlib, which is optional, and one colour for each
method."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flowspec.bench.config import AR
from flowspec.bench.summary import OVERALL
from flowspec.core.methods import METHODS
from flowspec.errors import InputError

DPI = 100
WIDTH_IN, HEIGHT_IN = 16.0, 9.0
PANELS_MAX = 8
PANEL_HEIGHT_IN = 3.2
HEADROOM = 1.12
"""Above the tallest bar, for its number."""
LETTERS, LETTERS_MIN = 180, 12
"""What a panel's names of groups have room for in a line, and where names are broken at the earliest."""
PALETTE = ("#0072b2", "#d55e00", "#332288", "#8c8c8c", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
OTHER_COLOUR = "#000000"
COLOURS = dict(zip(METHODS, PALETTE, strict=False))
OTHER_COLOURS = (OTHER_COLOUR, "#882255", "#117733", "#aa4499", "#999933")
HATCHES = {"": "", " (published)": "///", " tuned": "..."}
OTHER_HATCH = "xxx"

Groups = dict[str, tuple[Mapping[str, Any], str]]
"""What a panel shows: tables and domains of them, by the name on the axis."""


def figure(width_in: float, height_in: float) -> Any:
    """An empty matplotlib `Figure`, which draws to files; raises `InputError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "plots need matplotlib, which is not installed: pip install 'flowspec[plots]'"
        ) from None
    return Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")


def looks(setups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and hatch of each setup's bars: those of its method, hatched where it is a variant; a colour of
    its own where it is called otherwise."""
    others = itertools.cycle(OTHER_COLOURS)
    found = {}
    for setup in setups:
        base = max((name for name in METHODS if setup.startswith(name)), key=len, default="")
        colour = COLOURS.get(base) or next(others)
        found[setup] = {
            "facecolor": colour,
            "hatch": HATCHES.get(setup.removeprefix(base), OTHER_HATCH),
            "edgecolor": "white",
            "linewidth": 0.5,
        }
    return found


def speedup(summary: Mapping[str, Any], path: Path) -> None:
    """`speedup.png`: over `ar` by domain, a panel for each testbed and temperature; with more than 8 of these
    only overall.

    Without `ar` in the experiment it is over the other reference, and without any it is tokens per second.
    """
    tables = summary["tables"]
    panels = _by_domain(tables) if len(tables) <= PANELS_MAX else _by_testbed(tables)
    columns = 2 if 2 < len(panels) <= PANELS_MAX else 1
    rows = max(1, -(-len(panels) // columns))
    drawing = figure(WIDTH_IN, max(HEIGHT_IN, rows * PANEL_HEIGHT_IN))
    over = tables[0]["references"][0] if tables and tables[0]["references"] else None
    methods = looks(
        [
            name
            for name in dict.fromkeys(name for table in tables for name in table["methods"])
            if name != over
        ]
    )
    what = f"speed-up over {over}, 95% intervals" if over else "tokens per second"
    drawing.suptitle(
        f"{summary['experiment']}: {what}   ({summary['world'].upper()} world)",
        fontsize=15,
        fontweight="bold",
    )
    axes = drawing.subplots(rows, columns, squeeze=False, sharey=True)
    for ax, (title, groups) in zip(axes.flat, panels.items(), strict=False):
        _drafters(ax, groups, methods, over, LETTERS // columns)
        ax.set_title(title, loc="left", fontsize=11)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"times {over}" if over else "tokens/s")
    _legend(drawing, methods, over)
    drawing.savefig(path)


def _legend(drawing: Any, methods: Mapping[str, dict[str, Any]], over: str | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [Line2D([], [], **_line(over), label=f"{over} = 1")] if over else []
    marks += [Patch(**look, label=method) for method, look in methods.items()]
    drawing.legend(
        handles=marks, loc="outside lower center", ncols=max(1, len(marks)), frameon=False, fontsize=11
    )


def _line(over: str) -> dict[str, Any]:
    return {"color": COLOURS[AR] if over == AR else "black", "linewidth": 1.5, "linestyle": "--"}


def _by_domain(tables: Sequence[Mapping[str, Any]]) -> dict[str, Groups]:
    return {
        f"{table['testbed']}, temperature {table['temperature']:g}": {
            domain: (table, domain) for domain in [*table["domains"], OVERALL]
        }
        for table in tables
    }


def _by_testbed(tables: Sequence[Mapping[str, Any]]) -> dict[str, Groups]:
    """A panel for each temperature."""
    found: dict[str, Groups] = {}
    for table in sorted(tables, key=lambda table: table["temperature"]):
        title = f"temperature {table['temperature']:g}, harmonic mean of the domains"
        found.setdefault(title, {})[table["testbed"]] = (table, OVERALL)
    return found


def _drafters(
    ax: Any, groups: Groups, methods: Mapping[str, dict[str, Any]], over: str | None, letters: int
) -> None:
    """Groups of bars, a bar for each method."""
    tops = []
    width = 0.84 / max(1, len(methods))
    for index, (method, look) in enumerate(methods.items()):
        for place, (table, domain) in enumerate(groups.values()):
            found = _ratio(table, method, domain, over)
            if found is None:
                continue
            ratio, low, high = found
            tops.append(max(ratio, high))
            x = place + (index - (len(methods) - 1) / 2) * width
            ax.bar(x, ratio, width * 0.92, **look)
            ax.plot([x, x], [low, high], color="black", linewidth=1.2)
            if domain == OVERALL:
                ax.annotate(
                    f"{ratio:.2f}",
                    (x, max(ratio, high)),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
    if over:
        ax.axhline(1, **_line(over))
    ax.set_xticks(
        range(len(groups)), [fill(name, max(LETTERS_MIN, letters // len(groups))) for name in groups]
    )
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.set_ylim(0, max(HEADROOM * max(tops, default=1.0), ax.get_ylim()[1]))
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if list(groups)[-1] == OVERALL:
        ax.axvspan(len(groups) - 1.5, len(groups) - 0.4, color="#f2f2f2", zorder=0)


def _ratio(
    table: Mapping[str, Any], method: str, domain: str, over: str | None
) -> tuple[float, float, float] | None:
    if over is None:
        value = table["tokens_per_s"].get(method, {}).get(domain)
        return None if value is None else (value, value, value)
    found = table["speed_up"].get(over, {}).get(method, {}).get(domain)
    return None if found is None else (found["ratio"], found["low"], found["high"])
