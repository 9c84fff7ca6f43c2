"""Where each device's time goes: `timeline.png` for people, and the same as a Chrome trace for Perfetto
(https://ui.perfetto.dev).

A trace is laid out in lanes: the drafter, each stage, each link, and the output; with the first token at 0
seconds. It knows how long each trip spent where, and spreads what remains over the links evenly, so where
messages differ in size passes of one stage may seem to overlap by some milliseconds. A stage runs one segment
after the other, in order: the later pass is moved behind the earlier one. Lengths, and so the busy shares,
are as measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flowspec.bench.plots import WIDTH_IN, figure
from flowspec.bench.records import Trace, slots_of
from flowspec.bench.report import name_of

METHODS_MAX = 4
TRIPS_SHOWN, SLOTS_SHOWN = 14, 160
"""The default window: so many trips, of long pipelines so many slots."""
STARTS = 40
"""Windows that are looked at are so many, and one."""
LANE_IN = 0.34
PANEL_IN = 0.75
AROUND_IN = 1.7
HEIGHT_MAX_IN = 60.0
LEGEND_COLUMNS = 4
READING = "Each lane is a device, white is idle; segments go downwards from the head through the stages"
ALIVE = ("#0072b2", "#56b4e9")
"""Alternating, so that a segment can be told from the next."""
DEAD = "#e5874f"
DRAFTING = "#009e73"
WAITING = "#e6a700"
LINK = "#9a9a9a"
TOKENS = "#222222"
BETWEEN, BAR_TOP, BAR_BOTTOM = 0.08, 0.16, 0.9
"""Parts of a lane, downwards; between it and the lane above are waits and drops."""
NUMBER_SHARE = 0.011
"""Numbers nearer to each other than this share of the window are left out."""
THREADS = 10_000
"""Numbers of threads begin at multiples of this: viewers tell them apart by number alone, and 0 is special to
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stage computing a segment from `start_s` to `end_s`, of which it had waited in its queue since
    `arrived_s`."""

    segment: int
    arrived_s: float
    start_s: float
    end_s: float
    alive: int
    dead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpan:
    """A segment with living rows on a link; link 0 leads from the head to the first stage, the last one back
    to the head."""

    segment: int
    start_s: float
    end_s: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """A pass of the drafter."""

    start_s: float
    end_s: float


Each = TypeVar("Each", Bar, LinkSpan, DraftPass)


@dataclass(slots=True)
class Lanes:
    """By stage and by link, in order of segments. `drops` are instants and numbers of rows, all dead, of
    segments that a stage did not run."""

    stages: list[list[Bar]]
    links: list[list[LinkSpan]]
    drops: list[list[tuple[float, int]]]
    drafter: list[DraftPass] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        """When the first thing happened."""
        lanes: tuple[Sequence[Bar | LinkSpan | DraftPass], ...] = (self.drafter, *self.stages, *self.links)
        return min(
            (*(each.start_s for lane in lanes for each in lane), *(at_s for at_s, _ in self.commits)),
            default=0.0,
        )

    @property
    def end_s(self) -> float:
        """When the last token was there."""
        return max((at_s for at_s, _ in self.commits), default=0.0)

    def commits_within(self, start_s: float, end_s: float) -> list[tuple[float, int]]:
        return [commit for commit in self.commits if start_s < commit[0] <= end_s]

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens per second in a span of time."""
        tokens = sum(count for _, count in self.commits_within(start_s, end_s))
        return tokens / (end_s - start_s) if end_s > start_s else 0.0


def lanes_of(trace: Trace, stages: int) -> Lanes:
    origin_s = min((at_s for at_s, _ in trace.commits), default=0.0)
    found = Lanes(
        stages=[[] for _ in range(stages)],
        links=[[] for _ in range(stages + 1)],
        drops=[[] for _ in range(stages)],
    )
    found.drafter = [
        DraftPass(start_s=each.started_s - origin_s, end_s=each.ended_s - origin_s) for each in trace.passes
    ]
    found.commits = [(at_s - origin_s, tokens) for at_s, tokens in trace.commits]
    free_s = [float("-inf")] * stages
    for trip in sorted(trace.trips, key=lambda trip: trip.segment):
        left_s, rows = trip.sent_s - origin_s, trip.rows
        for stay in trip.visits()[:stages]:
            arrived_s = max(stay.arrived_s - origin_s, left_s)
            if rows:
                found.links[stay.stage].append(
                    LinkSpan(segment=trip.segment, start_s=left_s, end_s=arrived_s, rows=rows)
                )
            left_s = arrived_s + (stay.left_s - stay.arrived_s)
            if stay.ended_s > stay.started_s:
                start_s = max(stay.started_s - origin_s, arrived_s, free_s[stay.stage])
                end_s = start_s + (stay.ended_s - stay.started_s)
                bar = Bar(
                    segment=trip.segment,
                    arrived_s=arrived_s,
                    start_s=start_s,
                    end_s=end_s,
                    alive=stay.alive,
                    dead=stay.dead,
                )
                found.stages[stay.stage].append(bar)
                free_s[stay.stage] = end_s
                left_s = end_s + (stay.left_s - stay.ended_s)
            elif rows:
                found.drops[stay.stage].append((left_s, rows))
            rows = stay.alive
        if rows:
            back_s = max(trip.back_s - origin_s, left_s)
            found.links[stages].append(
                LinkSpan(segment=trip.segment, start_s=left_s, end_s=back_s, rows=rows)
            )
    return found


def busy_share(lane: Iterable[Bar | DraftPass], start_s: float, end_s: float) -> float:
    """The share of a span of time that a lane's bars fill."""
    filled_s = sum(max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s)) for each in lane)
    return filled_s / (end_s - start_s) if end_s > start_s else 0.0


def draw_timeline(
    traces: Mapping[str, Trace],
    path: Path,
    *,
    name: str,
    world: str,
    stages: int,
    window_s: float | None = None,
) -> None:
    """`timeline.png`: what each device did in a span of time, the methods below each other (the first four)
    on one axis.

    The span is some trips long unless `window_s` is given, and lies where the methods are most nearly as fast
    as in their whole answers. Raises `InputError` without matplotlib.
    """
    laid = {name: lanes_of(trace, stages) for name, trace in list(traces.items())[:METHODS_MAX]}
    assert laid, "there is a trace to draw"
    if window_s is None:
        found = [slots for trace in traces.values() if (slots := slots_of(trace.trips))]
        window_s = min(
            (min(TRIPS_SHOWN * slots.trip_s, SLOTS_SHOWN * slots.tau_s) for slots in found), default=1.0
        )
    shortest_s = min(lanes.end_s for lanes in laid.values())
    start_s = _typical_start_s(list(laid.values()), window_s, shortest_s)
    end_s = start_s + (min(window_s, shortest_s) or 1.0)
    height_in = AROUND_IN + len(laid) * (PANEL_IN + (stages + 2) * LANE_IN)
    title = f"{name}: what each device does, and when"
    drawing = figure(title, world, WIDTH_IN, min(HEIGHT_MAX_IN, height_in))
    axes = drawing.subplots(len(laid), 1, squeeze=False, sharex=True)[:, 0]
    for ax, (method, lanes) in zip(axes, laid.items(), strict=True):
        _lanes(ax, method, lanes, start_s, end_s)
    axes[-1].set_xlabel(f"seconds since the first token. {READING}")
    _legend(drawing)
    drawing.savefig(path)


def _typical_start_s(laid: Sequence[Lanes], window_s: float, shortest_s: float) -> float:
    """Where a window begins whose tokens per second are, over all methods, nearest to those of their whole
    answers; of equals the one nearest to the middle of the shortest."""
    last_s = max(0.0, shortest_s - window_s)

    def distance(start_s: float) -> float:
        return sum(
            abs(lanes.rate(start_s, start_s + window_s) / mean - 1)
            for lanes in laid
            if (mean := lanes.rate(0.0, lanes.end_s))
        )

    starts = [last_s * at / STARTS for at in range(STARTS + 1)]
    return min(starts, key=lambda start_s: (round(distance(start_s), 3), abs(start_s - last_s / 2)))


def _lanes(ax: Any, name: str, lanes: Lanes, start_s: float, end_s: float) -> None:
    """Lanes from the top: the head's drafter, the stages, the output; so a trip goes downwards."""
    from matplotlib.collections import LineCollection

    count = len(lanes.stages) + 2
    ax.set_xlim(start_s, end_s)
    ax.set_ylim(count, 0)
    passes = _within(lanes.drafter, start_s, end_s)
    _bars(ax, 0, passes, [DRAFTING] * len(passes), [1.0] * len(passes))
    for stage, bars in enumerate(lanes.stages, 1):
        shades = {bar.segment: ALIVE[index % len(ALIVE)] for index, bar in enumerate(bars)}
        shown = _within(bars, start_s, end_s)
        _bars(
            ax,
            stage,
            shown,
            [shades[bar.segment] for bar in shown],
            [bar.alive / max(1, bar.alive + bar.dead) for bar in shown],
        )
        waits = [((bar.arrived_s, stage + BETWEEN), (bar.start_s, stage + BETWEEN)) for bar in bars]
        ax.add_collection(LineCollection(waits, colors=WAITING, linewidths=2.2))
        drops_s = [at_s for at_s, _ in lanes.drops[stage - 1]]
        ax.plot(drops_s, [stage + BETWEEN] * len(drops_s), "x", color=DEAD, markersize=5, markeredgewidth=1.6)
    for link, flights in enumerate(lanes.links):
        last = count - 1 if link == len(lanes.stages) else link + 1 + BAR_TOP
        lines = [
            ((each.start_s, link + BAR_BOTTOM), (each.end_s, last))
            for each in _within(flights, start_s, end_s)
        ]
        ax.add_collection(LineCollection(lines, colors=LINK, linewidths=0.9, zorder=1.5))
    tokens = _commits(ax, count - 1, lanes.commits_within(start_s, end_s), end_s - start_s)
    names = ["head: drafter", *(f"stage {stage}" for stage in range(1, count - 1)), "tokens out"]
    ax.set_yticks([lane + 0.5 for lane in range(count)], names)
    ax.hlines(range(1, count), start_s, end_s, colors="#dddddd", linewidths=0.6, zorder=0)
    worked: list[Sequence[Bar | DraftPass]] = [lanes.drafter, *lanes.stages]
    for lane, each in enumerate(worked):
        _at_right(ax, lane, f"{100 * busy_share(each, start_s, end_s):.0f}% busy")
    _at_right(ax, count - 1, f"{tokens} tokens")
    ax.set_title(
        f"{name_of(name)}: {lanes.rate(start_s, end_s):.3g} tokens/s in this window, "
        f"{lanes.rate(0.0, lanes.end_s):.3g} in the whole answer",
        loc="left",
        fontsize=12,
        fontweight="bold",
    )
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _within(lane: Sequence[Each], start_s: float, end_s: float) -> list[Each]:
    return [each for each in lane if each.end_s > start_s and each.start_s < end_s]


def _bars(
    ax: Any, lane: int, bars: Sequence[Bar | DraftPass], colours: Sequence[str], alive: Sequence[float]
) -> None:
    """Bars split at the height that the living rows are of all."""
    height = BAR_BOTTOM - BAR_TOP
    starts, widths = [each.start_s for each in bars], [each.end_s - each.start_s for each in bars]
    dead = [height * (1 - share) for share in alive]
    style: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.4, "zorder": 2}
    ax.bar(starts, dead, widths, [lane + BAR_TOP] * len(dead), color=DEAD, **style)
    ax.bar(
        starts,
        [height * share for share in alive],
        widths,
        [lane + BAR_TOP + each for each in dead],
        color=colours,
        **style,
    )


def _commits(ax: Any, lane: int, commits: Sequence[tuple[float, int]], span_s: float) -> int:
    """A tick for each commit, with its number of tokens where there is room; returns the sum."""
    ax.vlines([at_s for at_s, _ in commits], lane + 0.02, lane + 0.4, colors=TOKENS, linewidths=1.6, zorder=3)
    free_s = float("-inf")
    for at_s, tokens in commits:
        if at_s >= free_s:
            ax.text(
                at_s, lane + 0.46, str(tokens), ha="center", va="top", fontsize=8, color=TOKENS, clip_on=True
            )
            free_s = at_s + span_s * NUMBER_SHARE
    return sum(tokens for _, tokens in commits)


def _at_right(ax: Any, lane: int, text: str) -> None:
    ax.annotate(
        text,
        (1.005, lane + 0.5),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        annotation_clip=False,
    )


def _legend(drawing: Any) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: dict[str, Any] = {
        "drafting": Patch(color=DRAFTING),
        "computing a segment (shades alternate)": (Patch(color=ALIVE[0]), Patch(color=ALIVE[1])),
        "share of its rows found wrong before it was done": Patch(color=DEAD),
        "all wrong: not run": Line2D([], [], color=DEAD, marker="x", markeredgewidth=1.6, linestyle="none"),
        "waits in a queue": Line2D([], [], color=WAITING, linewidth=2.2),
        "on a link": Line2D([], [], color=LINK, linewidth=0.9),
        "tokens out, and how many": Line2D(
            [], [], color=TOKENS, marker="|", markersize=10, markeredgewidth=1.6, linestyle="none"
        ),
    }
    drawing.legend(
        marks.values(),
        marks.keys(),
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        fontsize=10,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def chrome(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """A Chrome trace: a process for each method, a thread for each lane; 0 is where the method's trace
    begins."""
    events: list[dict[str, Any]] = []
    for process, (name, trace) in enumerate(traces.items(), 1):
        events += _process(process, name, trace)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(process: int, name: str, trace: Trace) -> Iterable[dict[str, Any]]:
    stages = max((len(trip.hops) for trip in trace.trips), default=0)
    lanes = lanes_of(trace, stages)
    yield _about(process, process * THREADS, "process_name", name=name)
    lines = [("head: drafter", [_whole("draft", each, {}) for each in lanes.drafter])]
    for stage, (bars, drops) in enumerate(zip(lanes.stages, lanes.drops, strict=True), 1):
        dropped = [_instant(f"{rows} rows dropped", at_s, {"rows": rows}) for at_s, rows in drops]
        lines.append((f"stage {stage}", [*map(_pass, bars), *dropped]))
    for link, flights in enumerate(lanes.links):
        for number, line in enumerate(_side_by_side(flights)):
            more = f" ({number + 1})" if number else ""
            lines.append(
                (
                    f"link {link}{more}",
                    [_whole(f"segment {each.segment}", each, {"rows": each.rows}) for each in line],
                )
            )
    lines.append(
        ("output", [_instant(f"{tokens} tokens", at_s, {"tokens": tokens}) for at_s, tokens in lanes.commits])
    )
    for thread, (lane_name, found) in enumerate(lines, process * THREADS):
        yield _about(process, thread, "thread_name", name=lane_name)
        yield _about(process, thread, "thread_sort_index", sort_index=thread)
        for event in found:
            at_s = event.pop("at_s") - lanes.start_s
            yield event | {"pid": process, "tid": thread, "ts": 1e6 * at_s}


def _about(process: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": args}


def _whole(name: str, of: Bar | LinkSpan | DraftPass, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "at_s": of.start_s, "dur": 1e6 * (of.end_s - of.start_s), "args": args}


def _instant(name: str, at_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "at_s": at_s, "args": args}


def _pass(bar: Bar) -> dict[str, Any]:
    args = {
        "segment": bar.segment,
        "alive": bar.alive,
        "dead": bar.dead,
        "queued_ms": 1e3 * (bar.start_s - bar.arrived_s),
    }
    return _whole(f"segment {bar.segment}", bar, args)


def _side_by_side(flights: Sequence[LinkSpan]) -> list[list[LinkSpan]]:
    """Lines of flights that do not overlap, which a thread's events must not."""
    lines: list[list[LinkSpan]] = [[]]
    for flight in sorted(flights, key=lambda flight: flight.start_s):
        free = next((line for line in lines if not line or line[-1].end_s <= flight.start_s), None)
        if free is None:
            free = []
            lines.append(free)
        free.append(flight)
    return lines
