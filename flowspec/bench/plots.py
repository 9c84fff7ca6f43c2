"""Figures of a summary, and what all figures share: matplotlib, which is optional, and one colour for each
method."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flowspec.bench.config import AR
from flowspec.bench.report import WORLDS, has_intervals, rate
from flowspec.bench.summary import OVERALL, Ratio
from flowspec.core.methods import METHODS
from flowspec.errors import InputError
from flowspec.extras import how_to_get

NEEDED = f"plots need matplotlib, which is not installed: {how_to_get('plots')}"
DPI = 100
WIDTH_IN, HEIGHT_IN = 16.0, 9.0
PANELS_MAX = 8
PANEL_HEIGHT_IN = 3.2
HEADROOM = 1.14
"""Above the tallest bar, for its number."""
WIDTH_PX = 0.94 * DPI * WIDTH_IN
"""Of the axes, nearly."""
LETTER_PX, LETTERS_MIN = 8.5, 12
"""Names of groups are broken where they have no room, and at the earliest after so many letters."""
NUMBER_PX, NUMBER_ACROSS_PX = 10.0, 27.0
"""As wide are bars that have room for an upright number, and for one across."""
LEGEND_COLUMNS = 7
PLAIN = "plain decoding"
ALL_DOMAINS = "all domains"
PALETTE = ("#0072b2", "#d55e00", "#332288", "#8c8c8c", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
OTHER_COLOUR = "#000000"
COLOURS = dict(zip(METHODS, PALETTE, strict=False))
OTHER_COLOURS = (OTHER_COLOUR, "#882255", "#117733", "#aa4499", "#999933")
HATCHES = {"": "", " (published)": "///", " tuned": "..."}
OTHER_HATCH = "xxx"

Groups = dict[str, tuple[Mapping[str, Any], str]]
"""What a panel shows: tables and domains of them, by the name on the axis."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def figure(width_in: float, height_in: float) -> Any:
    """An empty matplotlib `Figure`, which draws to files; raises `InputError` without matplotlib."""
    if not can_draw():
        raise InputError(NEEDED)
    from matplotlib.figure import Figure

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


def name_of(setup: str) -> str:
    """What people call a setup: plain decoding is no method to them."""
    return PLAIN if setup == AR else setup


def heading(drawing: Any, title: str, world: str, more: str = "") -> None:
    """A figure's title, and below it what its numbers are."""
    drawing.suptitle(f"{title}\n{world} world: {WORLDS.get(world, world)}. {more}".strip(), fontsize=14)


def speedup(summary: Mapping[str, Any], path: Path) -> None:
    """`speedup.png`: over plain decoding by domain, a panel for each testbed and temperature; with more than
    8 of these only overall.

    Without plain decoding in the experiment it is over the other reference, and without any it is tokens per
    second.
    """
    tables = summary["tables"]
    panels = _by_domain(tables) if len(tables) <= PANELS_MAX else _by_testbed(tables)
    over = tables[0]["references"][0] if tables and tables[0]["references"] else None
    methods = looks(
        [
            name
            for name in dict.fromkeys(name for table in tables for name in table["methods"])
            if name != over
        ]
    )
    bars = max((len(groups) for groups in panels.values()), default=1) * max(1, len(methods))
    columns = 2 if 2 < len(panels) <= PANELS_MAX and WIDTH_PX / 2 / bars >= NUMBER_PX else 1
    rows = max(1, -(-len(panels) // columns))
    drawing = figure(WIDTH_IN, max(HEIGHT_IN, rows * PANEL_HEIGHT_IN))
    what = f"speed-up over {name_of(over)}" if over else "tokens per second"
    intervals = "Lines on bars: 95% intervals over prompts." if over and has_intervals(summary) else ""
    heading(drawing, f"{summary['experiment']}: {what}", summary["world"], intervals)
    axes = drawing.subplots(rows, columns, squeeze=False, sharey=True)
    for ax, (title, groups) in zip(axes.flat, panels.items(), strict=False):
        _bars(ax, groups, methods, over, WIDTH_PX / columns)
        ax.set_title(title, loc="left", fontsize=11)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"times as fast as {name_of(over)}" if over else "tokens/s")
    _legend(drawing, methods, over)
    drawing.savefig(path)


def _legend(drawing: Any, methods: Mapping[str, dict[str, Any]], over: str | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [Line2D([], [], **_line(over), label=f"{name_of(over)} = 1")] if over else []
    marks += [Patch(**look, label=name_of(method)) for method, look in methods.items()]
    drawing.legend(
        handles=marks,
        loc="outside lower center",
        ncols=max(1, min(LEGEND_COLUMNS, len(marks))),
        frameon=False,
        fontsize=11,
    )


def _line(over: str) -> dict[str, Any]:
    return {"color": COLOURS[AR] if over == AR else "black", "linewidth": 1.5, "linestyle": "--"}


def _by_domain(tables: Sequence[Mapping[str, Any]]) -> dict[str, Groups]:
    return {
        f"{table['testbed']}, temperature {table['temperature']:g}": {
            **{domain: (table, domain) for domain in table["domains"]},
            ALL_DOMAINS: (table, OVERALL),
        }
        for table in tables
    }


def _by_testbed(tables: Sequence[Mapping[str, Any]]) -> dict[str, Groups]:
    """A panel for each temperature."""
    found: dict[str, Groups] = {}
    for table in sorted(tables, key=lambda table: table["temperature"]):
        title = f"temperature {table['temperature']:g}, all domains (their harmonic mean)"
        found.setdefault(title, {})[table["testbed"]] = (table, OVERALL)
    return found


def _bars(
    ax: Any, groups: Groups, methods: Mapping[str, dict[str, Any]], over: str | None, width_px: float
) -> None:
    """Groups of bars, a bar with its number for each method."""
    tops = []
    count = max(1, len(methods))
    width = 0.84 / count
    bar_px = width_px * width / len(groups)
    for index, (method, look) in enumerate(methods.items()):
        for place, (table, domain) in enumerate(groups.values()):
            found = _ratio(table, method, domain, over)
            if found is None:
                continue
            x = place + (index - (count - 1) / 2) * width
            ax.bar(x, found["ratio"], width * 0.92, **look)
            if found["low"] is not None:
                ax.plot([x, x], [found["low"], found["high"]], color="black", linewidth=1.2)
            tops.append(max(found["ratio"], found["high"] or 0.0))
            if bar_px >= NUMBER_PX:
                _number(ax, rate(found["ratio"]), x, tops[-1], upright=bar_px < NUMBER_ACROSS_PX)
    if over:
        ax.axhline(1, **_line(over))
    ax.set_xticks(
        range(len(groups)),
        [fill(name, max(LETTERS_MIN, int(width_px / LETTER_PX / len(groups)))) for name in groups],
    )
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.set_ylim(0, max(HEADROOM * max(tops, default=1.0), ax.get_ylim()[1]))
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if list(groups)[-1] == ALL_DOMAINS:
        ax.axvspan(len(groups) - 1.5, len(groups) - 0.4, color="#f2f2f2", zorder=0)


def _number(ax: Any, text: str, x: float, y: float, *, upright: bool) -> None:
    """Above a bar; upright where the bar is narrower than the number."""
    ax.annotate(
        text,
        (x, y),
        (0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        rotation=90 if upright else 0,
    )


def _ratio(table: Mapping[str, Any], method: str, domain: str, over: str | None) -> Ratio | None:
    if over is None:
        value = table["tokens_per_s"].get(method, {}).get(domain)
        return None if value is None else {"ratio": value, "low": None, "high": None}
    found: Ratio | None = table["speed_up"].get(over, {}).get(method, {}).get(domain)
    return found
