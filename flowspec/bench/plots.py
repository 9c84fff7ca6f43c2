"""Pictures of a summary: speed-ups, loads, chains of models. They need matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flowspec.bench.experiment import AR, AUTO, WORLDS, Experiment
from flowspec.bench.records import Record
from flowspec.bench.report import (
    PLAIN,
    base_of,
    colours_of,
    format_rate,
    has_intervals,
    name_of,
    place,
    speed_of,
)
from flowspec.bench.statistics import OVERALL, PUBLISHED, TUNED
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
COLUMNS_MAX = 3
ALL_DOMAINS = "all domains"
HATCHES = {"": "", PUBLISHED: "///", TUNED: "..."}
OTHER_HATCH = "xxx"
MARKERS = "osD^vP*X"

Groups = dict[str, tuple[Mapping[str, Any], str]]
"""What a panel shows: tables and domains of them, by the name on the axis."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def figure(title: str, world: str, height_in: float, more: str = "") -> Any:
    """An empty one, which draws to files, with its title, and below it what its numbers are."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    drawing.suptitle(f"{title}\n{world} world: {WORLDS[world]}. {more}".strip(), fontsize=14)
    return drawing


def draw_legend(drawing: Any, marks: Mapping[str, Any], columns: int, **style: Any) -> None:
    """Below all panels."""
    where = {"loc": "outside lower center", "ncols": columns}
    drawing.legend(marks.values(), marks.keys(), frameon=False, **where, **style)


def _panels(
    drawing: Any, titles: Sequence[str], columns: int, *, grid: str = "both", **options: Any
) -> list[Any]:
    """Axes for each title, with a grid behind what is drawn."""
    rows = max(1, -(-len(titles) // columns))
    axes = list(drawing.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes[len(titles) :]:
        ax.set_visible(False)
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(axis=grid, color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return axes[: len(titles)]


# ------------------------------------------------------------------------------------------ speed-ups


def draw_speedup(summary: Mapping[str, Any], path: Path) -> None:
    """`speedup.png`: over plain decoding by domain, a panel for each testbed and temperature; with more than
    8 of these only overall.

    Without plain decoding in the experiment it is over the other reference, and without any it is tokens per
    second.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tables = summary["tables"]
    panels: dict[str, Groups] = {}
    if len(tables) <= PANELS_MAX:
        for table in tables:
            by_domain = {domain: (table, domain) for domain in table["domains"]}
            panels[place(table)] = {**by_domain, ALL_DOMAINS: (table, OVERALL)}
    else:
        for table in sorted(tables, key=lambda table: table["temperature"]):
            title = f"temperature {table['temperature']:g}, all domains (their harmonic mean)"
            panels.setdefault(title, {})[table["testbed"]] = (table, OVERALL)
    over = tables[0]["references"][0] if tables and tables[0]["references"] else None
    names = list(dict.fromkeys(name for table in tables for name in table["methods"] if name != over))
    looks: dict[str, dict[str, Any]] = {}
    for name, colour in colours_of(names).items():
        hatch = HATCHES.get(name.removeprefix(base_of(name)), OTHER_HATCH)
        looks[name] = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
    bars = max((len(groups) for groups in panels.values()), default=1) * max(1, len(looks))
    columns = 2 if 2 < len(panels) <= PANELS_MAX and WIDTH_PX / 2 / bars >= NUMBER_PX else 1
    what = f"speed-up over {name_of(over)}" if over else "tokens per second"
    intervals = "Lines on bars: 95% intervals over prompts." if over and has_intervals(summary) else ""
    height_in = max(HEIGHT_IN, -(-len(panels) // columns) * PANEL_HEIGHT_IN)
    drawing = figure(f"{summary['experiment']}: {what}", summary["world"], height_in, intervals)
    one: dict[str, Any] = {
        "color": colours_of([AR])[AR] if over == AR else "black",
        "linewidth": 1.5,
        "linestyle": "--",
    }
    axes = _panels(drawing, list(panels), columns, grid="y", sharey=True)
    for at, (ax, groups) in enumerate(zip(axes, panels.values(), strict=True)):
        _draw_bars(ax, groups, looks, over, WIDTH_PX / columns)
        if over:
            ax.axhline(1, **one)
        if at % columns == 0:
            ax.set_ylabel(f"times as fast as {name_of(over)}" if over else "tokens/s")
    marks: dict[str, Any] = {f"{name_of(over)} = 1": Line2D([], [], **one)} if over else {}
    marks |= {name_of(name): Patch(**look) for name, look in looks.items()}
    draw_legend(drawing, marks, max(1, min(LEGEND_COLUMNS, len(marks))), fontsize=11)
    drawing.savefig(path)


def _draw_bars(
    ax: Any, groups: Groups, looks: Mapping[str, dict[str, Any]], over: str | None, width_px: float
) -> None:
    """Groups of bars, a bar with its number for each method."""
    top, count = 0.0, max(1, len(looks))
    width = 0.84 / count
    bar_px = width_px * width / len(groups)
    for index, (method, look) in enumerate(looks.items()):
        for at, (table, domain) in enumerate(groups.values()):
            speed = speed_of(table, method, over, domain)
            if speed is None:
                continue
            x = at + (index - (count - 1) / 2) * width
            ax.bar(x, speed["ratio"], width * 0.92, **look)
            if speed["low"] is not None:
                ax.plot([x, x], [speed["low"], speed["high"]], color="black", linewidth=1.2)
            bar_top = max(speed["ratio"], speed["high"] or 0.0)
            top = max(top, bar_top)
            if bar_px >= NUMBER_PX:  # upright where the bar is narrower than the number
                rotation = 90 if bar_px < NUMBER_ACROSS_PX else 0
                style = {"ha": "center", "va": "bottom", "fontsize": 8, "rotation": rotation}
                number = format_rate(speed["ratio"])
                ax.annotate(number, (x, bar_top), (0, 3), textcoords="offset points", **style)
    letters = max(LETTERS_MIN, int(width_px / LETTER_PX / len(groups)))
    ax.set_xticks(range(len(groups)), [fill(name, letters) for name in groups])
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.set_ylim(0, max(HEADROOM * (top or 1.0), ax.get_ylim()[1]))
    if list(groups)[-1] == ALL_DOMAINS:
        ax.axvspan(len(groups) - 1.5, len(groups) - 0.4, color="#f2f2f2", zorder=0)


# ------------------------------------------------------------------------------------------ loads


def draw_loads(summary: Mapping[str, Any], path: Path) -> None:
    """`load.png`: a panel for each testbed and temperature, a line for each method, a point for each number
    of users, or step; up and to the left is better."""
    tables = summary["tables"]
    columns = min(2, len(tables))
    title = f"{summary['experiment']}: tokens per second against seconds per answer, by number of users"
    height_in = HEIGHT_IN * max(1, -(-len(tables) // columns) / 2)
    drawing = figure(title, summary["world"], height_in, "Up and to the left is better.")
    titles = []
    for table in tables:
        counted = "step" if any(load["step"] for load in table["loads"]) else "users"
        titles.append(f"{place(table)}; beside each point its {counted}")
    for ax, table in zip(_panels(drawing, titles, columns), tables, strict=True):
        names = list(dict.fromkeys(name for load in table["loads"] for name in load["methods"]))
        for at, (name, colour) in enumerate(colours_of(names).items()):
            points = [
                (str(load["step"] or load["users"]), load["methods"][name])
                for load in table["loads"]
                if name in load["methods"] and load["methods"][name]["latency_s"] is not None
            ]
            xs, ys = ([each[key] for _, each in points] for key in ("latency_s", "tokens_per_s"))
            style = {"marker": MARKERS[at % len(MARKERS)], "linestyle": "-" if base_of(name) else "--"}
            ax.plot(xs, ys, color=colour, label=name_of(name), **style)
            for (label, _), x, y in zip(points, xs, ys, strict=True):
                ax.annotate(label, (x, y), (5, 4), textcoords="offset points", fontsize=8, color="#555555")
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
        ax.set_xlabel("seconds from a question to the last token of its answer, mean")
        ax.set_ylabel("tokens/s of all users")
        ax.legend(frameon=False, fontsize=10)
    drawing.savefig(path)


# ------------------------------------------------------------------------------------------ chains


def draw_chains(experiment: Experiment, records: Sequence[Record], path: Path) -> None:
    """`chains.png`: a panel for each domain, a line for each answer: which chain was at work when. Nothing is
    drawn where none was chosen."""
    setups = {setup.name: setup for setup in experiment.setups if setup.chain == AUTO}
    chosen = [record for record in records if record.method in setups and record.chains]
    if not chosen:
        return

    def chain(record: Record, models: Sequence[int | str]) -> str:
        drafters = setups[record.method].drafters or ()
        return " + ".join(each if isinstance(each, str) else drafters[each] for each in models) or PLAIN

    steps = {
        record.key: [(at_s, chain(record, models)) for _, at_s, models, _ in record.chains]
        for record in chosen
    }
    names = sorted(
        {name for each in steps.values() for _, name in each},
        key=lambda name: (name != PLAIN, name.count("+"), name),
    )
    domains = list(dict.fromkeys(record.domain for record in chosen))
    title = f"{experiment.name}: the chain at work, answer by answer"
    drawing = figure(title, experiment.world, HEIGHT_IN)
    axes = _panels(drawing, domains, min(COLUMNS_MAX, len(domains)), sharey=True)
    for ax, domain in zip(axes, domains, strict=True):
        own = [record for record in chosen if record.domain == domain]
        for at, record in enumerate(own):
            shift = (at - (len(own) - 1) / 2) * 0.5 / max(1, len(own))  # lines must not hide each other
            times_s = [at_s for at_s, _ in steps[record.key]] + [record.whole_s]
            levels = [names.index(name) + shift for _, name in steps[record.key]]
            ax.step(times_s, [*levels, levels[-1]], where="post", color="#000000", alpha=0.7, linewidth=1.5)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(-0.5, len(names) - 0.5)
        ax.set_xlabel("seconds of the answer")
    drawing.savefig(path)
