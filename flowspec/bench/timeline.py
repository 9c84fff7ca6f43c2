"""Where each device's time goes: `timeline.png` for people, and the same as a Chrome trace for Perfetto
(https://ui.perfetto.dev).

A trace is laid out in lanes: the drafter, each stage, each link, and the output. It knows
how long each trip spent where, and spreads what remains over the links evenly, so where messages differ in
size passes of one stage may seem to overlap by some milliseconds. A stage runs one segment
after the other, in order: the later pass is moved behind the earlier one. Lengths, and so the busy shares,
are as measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flowspec.bench.plots import draw_legend, figure
from flowspec.bench.records import Trace, slots_of
from flowspec.bench.report import name_of

METHODS_MAX = 4
TRIPS_SHOWN, SLOTS_SHOWN = 14, 160
"""The window: so many trips, of long pipelines so many slots."""
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


@dataclass(frozen=True, slots=True)
class Span:
    """What lasts from `start_s` to `end_s`, or happens then; `about` are numbers that a trace has of it."""

    name: str
    start_s: float
    end_s: float
    about: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Spans by device, which is the head's drafter or a stage, in order of segments, with the first token at
    0 seconds; `links` are those to the next device, the last one back to the head. `drops` are the instants
    in which a stage did not run a segment, for all its rows were dead; `commits` are instants, too."""

    passes: list[list[Span]]
    drops: list[list[Span]]
    links: list[list[Span]]
    commits: list[Span]

    @property
    def names(self) -> list[str]:
        """Of the devices."""
        return ["head: drafter", *(f"stage {stage}" for stage in range(1, len(self.passes)))]

    @property
    def end_s(self) -> float:
        """When the last token was there."""
        return max((commit.end_s for commit in self.commits), default=0.0)

    def tokens(self, start_s: float, end_s: float) -> int:
        return sum(int(commit.about["tokens"]) for commit in _within(self.commits, start_s, end_s))

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens per second in a span of time."""
        return self.tokens(start_s, end_s) / (end_s - start_s) if end_s > start_s else 0.0


def lanes_of(trace: Trace) -> Lanes:
    origin_s = min((at_s for at_s, _ in trace.commits), default=0.0)
    stages = range(max((len(trip.hops) for trip in trace.trips), default=0))
    drafting = [Span("draft", each.started_s - origin_s, each.ended_s - origin_s) for each in trace.passes]
    found = Lanes(
        passes=[drafting, *([] for _ in stages)],
        drops=[[], *([] for _ in stages)],
        links=[[], *([] for _ in stages)],
        commits=[
            Span(f"{tokens} tokens", at_s - origin_s, at_s - origin_s, {"tokens": tokens})
            for at_s, tokens in trace.commits
        ],
    )
    for trip in sorted(trace.trips, key=lambda trip: trip.segment):
        name = f"segment {trip.segment}"
        left_s, rows = trip.sent_s - origin_s, trip.rows
        for stage, stay in enumerate(trip.visits(), 1):
            passes = found.passes[stage]
            arrived_s = max(stay.arrived_s - origin_s, left_s)
            if rows:
                found.links[stage - 1].append(Span(name, left_s, arrived_s, {"rows": rows}))
            left_s = arrived_s + (stay.left_s - stay.arrived_s)
            if stay.ended_s > stay.started_s:
                free_s = passes[-1].end_s if passes else arrived_s
                start_s = max(stay.started_s - origin_s, arrived_s, free_s)
                end_s = start_s + (stay.ended_s - stay.started_s)
                about = {"segment": trip.segment, "alive": stay.alive, "dead": stay.dead}
                passes.append(Span(name, start_s, end_s, about | {"queued_ms": 1e3 * (start_s - arrived_s)}))
                left_s = end_s + (stay.left_s - stay.ended_s)
            elif rows:
                found.drops[stage].append(Span(f"{rows} rows dropped", left_s, left_s, {"rows": rows}))
            rows = stay.alive
        if rows:
            back_s = max(trip.back_s - origin_s, left_s)
            found.links[-1].append(Span(name, left_s, back_s, {"rows": rows}))
    return found


def _within(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    return [each for each in spans if each.end_s > start_s and each.start_s <= end_s]


# ------------------------------------------------------------------------------------------ the picture


def draw_timeline(traces: Mapping[str, Trace], path: Path, *, name: str, world: str) -> None:
    """`timeline.png`: what each device did during some trips, the methods below each other (the first four)
    on one axis, where they are most nearly as fast as in their whole answers."""
    from matplotlib.legend_handler import HandlerTuple

    laid = {method: lanes_of(trace) for method, trace in list(traces.items())[:METHODS_MAX]}
    found = [slots for trace in traces.values() if (slots := slots_of(trace.trips))]
    window_s = min(
        (min(TRIPS_SHOWN * slots.trip_s, SLOTS_SHOWN * slots.tau_s) for slots in found), default=1.0
    )
    shortest_s = min(lanes.end_s for lanes in laid.values())
    start_s = _typical_start_s(list(laid.values()), window_s, shortest_s)
    end_s = start_s + (min(window_s, shortest_s) or 1.0)
    height_in = AROUND_IN + sum(PANEL_IN + (len(lanes.passes) + 1) * LANE_IN for lanes in laid.values())
    title = f"{name}: what each device does, and when"
    drawing = figure(title, world, min(HEIGHT_MAX_IN, height_in))
    axes = drawing.subplots(len(laid), 1, squeeze=False, sharex=True)[:, 0]
    for ax, (method, lanes) in zip(axes, laid.items(), strict=True):
        _draw_lanes(ax, lanes, start_s, end_s)
        ax.set_title(
            f"{name_of(method)}: {lanes.rate(start_s, end_s):.3g} tokens/s in this window, "
            f"{lanes.rate(0.0, lanes.end_s):.3g} in the whole answer",
            loc="left",
            fontsize=12,
            fontweight="bold",
        )
    axes[-1].set_xlabel(f"seconds since the first token. {READING}")
    pairs = {tuple: HandlerTuple(ndivide=None, pad=0)}
    draw_legend(drawing, _marks(), LEGEND_COLUMNS, fontsize=10, handler_map=pairs)
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


def _draw_lanes(ax: Any, lanes: Lanes, start_s: float, end_s: float) -> None:
    """Lanes from the top: the head's drafter, the stages, the output; so a trip goes downwards."""
    from matplotlib.collections import LineCollection

    span_s, output = end_s - start_s, len(lanes.passes)
    names = [*lanes.names, "tokens out"]
    ax.set_xlim(start_s, end_s)
    ax.set_ylim(len(names), 0)
    ax.set_yticks([lane + 0.5 for lane in range(len(names))], names)
    ax.hlines(range(1, len(names)), start_s, end_s, colors="#dddddd", linewidths=0.6, zorder=0)
    at_right = []
    for lane, (passes, drops) in enumerate(zip(lanes.passes, lanes.drops, strict=True)):
        colours = ALIVE if lane else (DRAFTING,)
        within = [at for at, each in enumerate(passes) if _within([each], start_s, end_s)]
        _draw_passes(ax, lane, [passes[at] for at in within], [colours[at % len(colours)] for at in within])
        y = lane + BETWEEN
        waits = [
            ((each.start_s - each.about["queued_ms"] / 1e3, y), (each.start_s, y))
            for each in passes
            if each.about
        ]
        ax.add_collection(LineCollection(waits, colors=WAITING, linewidths=2.2))
        drops_s = [each.start_s for each in drops]
        ax.plot(drops_s, [y] * len(drops), "x", color=DEAD, markersize=5, markeredgewidth=1.6)
        busy_s = sum(max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s)) for each in passes)
        at_right.append(f"{100 * busy_s / span_s:.0f}% busy")
    for link, flights in enumerate(lanes.links):
        last = link + 1 + BAR_TOP * (link + 1 < output)
        shown = _within(flights, start_s, end_s)
        lines = [((each.start_s, link + BAR_BOTTOM), (each.end_s, last)) for each in shown]
        ax.add_collection(LineCollection(lines, colors=LINK, linewidths=0.9, zorder=1.5))
    commits, free_s = _within(lanes.commits, start_s, end_s), start_s
    ticks_s = [commit.start_s for commit in commits]
    ax.vlines(ticks_s, output + 0.02, output + 0.4, colors=TOKENS, linewidths=1.6, zorder=3)
    for at_s, commit in zip(ticks_s, commits, strict=True):
        if at_s >= free_s:
            text, style = str(commit.about["tokens"]), {"ha": "center", "va": "top", "clip_on": True}
            ax.text(at_s, output + 0.46, text, fontsize=8, color=TOKENS, **style)
            free_s = at_s + span_s * NUMBER_SHARE
    at_right.append(f"{lanes.tokens(start_s, end_s)} tokens")
    for lane, text in enumerate(at_right):
        place, coordinates = (1.005, lane + 0.5), ("axes fraction", "data")
        ax.annotate(text, place, xycoords=coordinates, va="center", fontsize=9, annotation_clip=False)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _draw_passes(ax: Any, lane: int, passes: Sequence[Span], colours: Sequence[str]) -> None:
    """Bars split at the height that the living rows are of all."""
    starts_s, lengths_s = [each.start_s for each in passes], [each.end_s - each.start_s for each in passes]
    rows = [(each.about.get("alive", 1), each.about.get("dead", 0)) for each in passes]
    heights = [(BAR_BOTTOM - BAR_TOP) * alive / max(1, alive + dead) for alive, dead in rows]
    middles = [lane + BAR_BOTTOM - height for height in heights]
    style: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.4, "zorder": 2}
    top = lane + BAR_TOP
    ax.bar(starts_s, [middle - top for middle in middles], lengths_s, top, color=DEAD, **style)
    ax.bar(starts_s, heights, lengths_s, middles, color=colours, **style)


def _marks() -> dict[str, Any]:
    """By what they mean, in the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    line = partial(Line2D, [], [])
    return {
        "drafting": Patch(color=DRAFTING),
        "computing a segment (shades alternate)": (Patch(color=ALIVE[0]), Patch(color=ALIVE[1])),
        "share of its rows found wrong before it was done": Patch(color=DEAD),
        "all wrong: not run": line(color=DEAD, marker="x", markeredgewidth=1.6, linestyle="none"),
        "waits in a queue": line(color=WAITING, linewidth=2.2),
        "on a link": line(color=LINK, linewidth=0.9),
        "tokens out, and how many": line(
            color=TOKENS, marker="|", markersize=10, markeredgewidth=1.6, linestyle="none"
        ),
    }


# ------------------------------------------------------------------------------------------ the trace


def chrome(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """A Chrome trace: a process for each method, a thread for each lane; 0 is where the method's trace
    begins."""
    events = [_events(process, *item) for process, item in enumerate(traces.items(), 1)]
    return {"traceEvents": [event for some in events for event in some], "displayTimeUnit": "ms"}


def _events(process: int, method: str, trace: Trace) -> Iterator[dict[str, Any]]:
    lanes = lanes_of(trace)
    lines: list[tuple[str, Sequence[Span], Sequence[Span]]]
    lines = list(zip(lanes.names, lanes.passes, lanes.drops, strict=True))
    for link, flights in enumerate(lanes.links):
        for number, line in enumerate(_side_by_side(flights), 1):
            lines.append((f"link {link}" + f" ({number})" * (number > 1), line, ()))
    lines.append(("output", (), lanes.commits))
    begin_s = min((each.start_s for _, *some in lines for spans in some for each in spans), default=0.0)

    def event(thread: int, kind: str, name: str, args: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        where = {"pid": process, "tid": thread, "ts": 0}
        return {"name": name, "ph": kind, "args": args, **where, **more}

    yield event(process * THREADS, "M", "process_name", {"name": method})
    for thread, (lane, spans, instants) in enumerate(lines, process * THREADS):
        yield event(thread, "M", "thread_name", {"name": lane})
        yield event(thread, "M", "thread_sort_index", {"sort_index": thread})
        for each in spans:
            ts, dur = 1e6 * (each.start_s - begin_s), 1e6 * (each.end_s - each.start_s)
            yield event(thread, "X", each.name, each.about, ts=ts, dur=dur)
        for each in instants:
            yield event(thread, "i", each.name, each.about, ts=1e6 * (each.start_s - begin_s), s="t")


def _side_by_side(flights: Sequence[Span]) -> list[list[Span]]:
    """Lines of flights that do not overlap, which a thread's events must not."""
    lines: list[list[Span]] = [[]]
    for flight in sorted(flights, key=lambda flight: flight.start_s):
        free = next((line for line in lines if not line or line[-1].end_s <= flight.start_s), None)
        if free is None:
            lines.append(free := [])
        free.append(flight)
    return lines
