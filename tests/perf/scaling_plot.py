"""`scaling.png`: tokens per second by devices and by users, and what an event of the simulation costs. Knows
no simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowspec.bench.config import AR
from flowspec.bench.plots import COLOURS, HEIGHT_IN, OTHER_COLOUR, WIDTH_IN, figure
from flowspec.errors import InputError
from tests.perf.scaling_run import CONTEXT_HELD, Point

MARKERS = "osD^vP"
"""One for each number of devices."""
STYLES = ("-", "--", "-.", ":")
MARKER_SIZE = 8
HEADROOM = 1.15
NOTE = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": "#555555"}
LEGEND = {"frameon": False, "fontsize": 9.5}
TOO_MUCH = "#b00020"


def check(path: Path) -> None:
    """Raises `InputError` where `draw` could not: without matplotlib, or without the folder."""
    figure(1, 1)
    if not path.parent.is_dir():
        raise InputError(f"--out: expected a file in a folder that exists, got {path}")


def draw(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Left: one user by devices, below it the cost of the simulation. Right: all users together, and each of
    them."""
    drawing = figure(WIDTH_IN, HEIGHT_IN)
    drawing.suptitle(title, fontsize=14, fontweight="bold")
    one = [point for point in points if point.users == 1]
    several = {point.devices for point in points if point.users > 1}
    many = [point for point in points if point.devices in several]
    grid = drawing.add_gridspec(3, 2 if many else 1)
    _alone(drawing.add_subplot(grid[:2, 0]), one)
    _cost(drawing.add_subplot(grid[2, 0]), one)
    if many:
        together, each = drawing.add_subplot(grid[:2, 1]), drawing.add_subplot(grid[2, 1])
        _by_users(
            together,
            many,
            lambda point: point.tokens_per_s,
            "several users, all together: simulated tokens/s",
        )
        _by_users(each, many, lambda point: point.user_tokens_per_s, "each of them: simulated tokens/s")
        together.legend(**LEGEND)
    try:
        drawing.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--out: expected a .png file that can be written, got {path} ({error})") from None


def _alone(ax: Any, points: Sequence[Point]) -> None:
    fitting = {point.devices: point.fits for point in points}
    for method in _methods(points):
        found = _by(points, method, lambda point: point.devices)
        colour = COLOURS.get(method, OTHER_COLOUR)
        _line(
            ax,
            found,
            [p.devices for p in found],
            [p.tokens_per_s for p in found],
            color=colour,
            marker="o",
            label=method,
        )
        if method == AR:
            continue
        bounds = [(p.devices, p.bound_tokens_per_s) for p in found if p.bound_tokens_per_s is not None]
        if bounds:
            ax.plot(
                *zip(*bounds, strict=True),
                color=colour,
                linestyle=":",
                linewidth=1.5,
                label=f"{method}: the bound at its S and rho",
            )
        for p in found:
            ax.annotate(
                f"S {p.S:.1f}\nrho {p.rho:.2f}", (p.devices, p.tokens_per_s), (0, -10), va="top", **NOTE
            )
    memory = {point.devices: f"{point.devices}\n{point.memory_gb:.1f} GB" for point in points}
    counts = sorted(memory)
    ax.set_title("one user, by devices: simulated tokens/s", loc="left", fontsize=12)
    ax.set_xlabel(
        f"devices, and the memory that the fullest of them needs ({CONTEXT_HELD} tokens of context)"
    )
    _doubling(ax, counts, [memory[count] for count in counts])
    for label, count in zip(ax.get_xticklabels(), counts, strict=True):
        label.set_color("black" if fitting[count] else TOO_MUCH)
    _finish(ax, points)
    ax.legend(**LEGEND)


def _by_users(ax: Any, points: Sequence[Point], value: Callable[[Point], float], what: str) -> None:
    counts = sorted({point.devices for point in points})
    for method in _methods(points):
        for at, devices in enumerate(counts):
            found = [
                point for point in _by(points, method, lambda point: point.users) if point.devices == devices
            ]
            look = {
                "color": COLOURS.get(method, OTHER_COLOUR),
                "marker": MARKERS[at % len(MARKERS)],
                "linestyle": STYLES[at % len(STYLES)],
            }
            _line(
                ax,
                found,
                [p.users for p in found],
                [value(p) for p in found],
                label=f"{method}, {devices} devices",
                **look,
            )
    ax.set_title(what, loc="left", fontsize=12)
    ax.set_xlabel("users at once")
    _doubling(ax, sorted({point.users for point in points}))
    _finish(ax, points)


def _cost(ax: Any, points: Sequence[Point]) -> None:
    for method in _methods(points):
        found = _by(points, method, lambda point: point.devices)
        colour, devices = COLOURS.get(method, OTHER_COLOUR), [point.devices for point in found]
        ax.plot(
            devices,
            [p.event_cpu_us for p in found],
            "o-",
            color=colour,
            label=f"{method}: µs of a core per event",
        )
        ax.plot(
            devices,
            [p.events_per_token for p in found],
            "x--",
            color=colour,
            label=f"{method}: events per token",
        )
    ax.set_title("what simulating one user costs, measured on this machine", loc="left", fontsize=12)
    ax.set_yscale("log")
    _doubling(ax, sorted({point.devices for point in points}))
    ax.set_xlabel("devices")
    _finish(ax, [])
    ax.legend(ncols=2, **LEGEND)


def _methods(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.method for point in points))


def _by(points: Sequence[Point], method: str, key: Callable[[Point], int]) -> list[Point]:
    return sorted((point for point in points if point.method == method), key=key)


def _line(
    ax: Any,
    points: Sequence[Point],
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    color: str,
    marker: str,
    **look: Any,
) -> None:
    """Hollow where the memory does not suffice."""
    ax.plot(xs, ys, color=color, linewidth=2, marker=marker, markersize=MARKER_SIZE, **look)
    lacking = [(x, y) for x, y, point in zip(xs, ys, points, strict=True) if not point.fits]
    if lacking:
        ax.plot(
            *zip(*lacking, strict=True),
            linestyle="",
            marker=marker,
            markersize=MARKER_SIZE,
            color=color,
            markerfacecolor="white",
        )


def _doubling(ax: Any, counts: Sequence[int], names: Sequence[str] | None = None) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, names or [str(count) for count in counts])
    ax.minorticks_off()


def _finish(ax: Any, points: Sequence[Point]) -> None:
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if points:
        ax.set_ylim(0, HEADROOM * ax.get_ylim()[1])
    if any(not point.fits for point in points):
        ax.plot(
            [],
            [],
            "o",
            color=TOO_MUCH,
            markerfacecolor="white",
            markersize=MARKER_SIZE,
            label="hollow: a device's memory does not suffice",
        )
