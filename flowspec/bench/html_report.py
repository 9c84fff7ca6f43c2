"""`report.html`: a benchmark on one page that needs nothing else, to be read on any screen, printed and sent
on. It computes nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flowspec.bench import chain_report, load_report, load_steps_report, validation
from flowspec.bench.config import AR, OURS
from flowspec.bench.outcome import EXACT, WRONG
from flowspec.bench.plots import looks, name_of
from flowspec.bench.report import NONE, WORLDS, few, has_intervals, percent, place, rate, times
from flowspec.bench.summary import OVERALL

TEMPLATE = Path(__file__).with_name("report.html")
CAPTIONS = {
    "speedup.png": "Speed by kind of prompt.",
    "timeline.png": "What each device does, and when, in the same span of time: each lane is a device, white "
    "is idle, and a segment of tokens goes downwards from the head through the stages.",
    "chains.png": "The chain of models that is at work, answer by answer.",
    "load.png": "Tokens per second against seconds per answer, by number of users; up and to the left is "
    "better.",
    "steps.png": "Tokens per second while the load changes, beside the single drafter, and who drafts.",
}
"""By the name of a picture; a report shows those that are there, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBar:
    """A method in a chart: `share` is its length by the longest, in per cent."""

    name: str
    text: str
    share: float
    colour: str
    tokens_per_s: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    what: str
    bars: Sequence[SpeedBar]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_report(summary: Mapping[str, Any], folder: Path) -> None:
    """Of a summary that has its `setting`, and of the pictures that lie in `folder`."""
    (folder / "report.html").write_text(page(summary, folder), "utf-8")


def page(summary: Mapping[str, Any], folder: Path) -> str:
    template = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    ).from_string(TEMPLATE.read_text("utf-8"))
    is_load = "wrong" in summary
    return template.render(
        experiment=summary["experiment"],
        world=summary["world"],
        meaning=WORLDS.get(summary["world"], summary["world"]),
        headline=None if is_load else headline(summary),
        setting=summary["setting"],
        acceptance=[] if is_load else acceptance(summary),
        exactness=exactness(summary),
        has_intervals=not is_load and has_intervals(summary),
        charts=[] if is_load else [_chart(table) for table in summary["tables"]],
        tables=list(_tables_of(summary)),
        pictures=[
            (b64encode((folder / name).read_bytes()).decode(), caption)
            for name, caption in CAPTIONS.items()
            if (folder / name).exists()
        ],
    )


def headline(summary: Mapping[str, Any]) -> str | None:
    """How ours compares with plain decoding, in a sentence; None where one of them was not run."""
    found = [
        (table, ratio["ratio"])
        for table in summary["tables"]
        if (ratio := table["speed_up"].get(AR, {}).get(OURS, {}).get(OVERALL))
    ]
    if not found:
        return None
    on = f"On {some} only, {OURS}" if (some := few(summary)) else OURS
    least, most = (rate(pick(ratio for _, ratio in found)) for pick in (min, max))
    if len(found) > 1:
        return f"{on} is {least} to {most} times as fast as plain decoding, in {len(found)} settings."
    rates = found[0][0]["tokens_per_s"]
    ours, plain = (rate(rates[name][OVERALL]) for name in (OURS, AR))
    return f"{on} is {most} times as fast as plain decoding: {ours} instead of {plain} tokens per second."


def acceptance(summary: Mapping[str, Any]) -> list[str]:
    """What the drafter's guesses were worth to ours, else to the last method, place by place."""
    found = []
    for table in summary["tables"]:
        method = OURS if OURS in table["methods"] else table["methods"][-1]
        tokens = table["statistics"][method]["acceptance"]
        if tokens is not None and method != AR:
            found.append(f"{tokens:.2f} tokens per segment sent ({method}, {place(table)})")
    return found


def exactness(summary: Mapping[str, Any]) -> str:
    wrong = (
        summary["wrong"]
        if "wrong" in summary
        else sum(
            each["agreement"][WRONG] for table in summary["tables"] for each in table["statistics"].values()
        )
    )
    answers = summary["answers"]
    if wrong:
        return f"{wrong} of {answers} answers differ from plain decoding's: something is wrong"
    return f"all {answers} answers are plain decoding's, token for token"


def _chart(table: Mapping[str, Any]) -> Chart:
    over = table["references"][0] if table["references"] else None
    colours = looks(table["methods"])
    values = {name: table["speed_up"][over][name].get(OVERALL) if over else None for name in table["methods"]}
    rates = {name: table["tokens_per_s"][name].get(OVERALL) for name in table["methods"]}
    lengths = {
        name: (value["ratio"] if (value := values[name]) else 0.0) if over else rates[name] or 0.0
        for name in table["methods"]
    }
    longest = max(lengths.values(), default=0.0) or 1.0
    return Chart(
        title=place(table),
        what=f"Speed-up over {name_of(over)}" if over else "Speed",
        bars=[
            SpeedBar(
                name=name_of(name),
                text="1" if name == over else times(values[name]) if over else rate(rates[name]),
                share=100 * lengths[name] / longest,
                colour=colours[name]["facecolor"],
                tokens_per_s=rate(rates[name]),
            )
            for name in table["methods"]
        ],
    )


def _tables(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    if known := summary.get("validation"):
        yield ReportTable(
            title=validation.HEADING,
            columns=validation.COLUMNS,
            rows=validation.lines_of(known),
            note=validation.explained(known, summary["world"], few(summary)),
        )
    for table in summary["tables"]:
        domains, statistics = table["domains"], table["statistics"]
        yield ReportTable(
            title=f"Tokens per second by kind of prompt: {place(table)}",
            columns=["method", *domains],
            rows=[
                [name_of(name), *(rate(table["tokens_per_s"][name].get(domain)) for domain in domains)]
                for name in table["methods"]
            ],
        )
        yield ReportTable(
            title=f"What explains it: {place(table)}",
            columns=["method", "tokens per segment", "stages busy", "rows dropped", "oracle", EXACT],
            rows=[
                [
                    name_of(name),
                    NONE if (of := statistics[name])["acceptance"] is None else f"{of['acceptance']:.2f}",
                    percent(of["busy"]),
                    NONE if of["dropped_per_100_rows"] is None else f"{of['dropped_per_100_rows']:.0f}%",
                    percent(of["oracle_share"]),
                    f"{of['agreement'][EXACT]} of {of['answers']}",
                ]
                for name in table["methods"]
            ],
            note="Tokens per segment: that a segment sent gave, on average. Rows dropped: of those computed, "
            "found wrong before they were through. Oracle: the least time in which one who knows the "
            "answers could have had them with the best of all methods' guesses, by the time it took.",
        )
    for table in summary.get("chains", ()):
        domains, rows = chain_report.latency_rows(table)
        yield ReportTable(
            title=f"Seconds per answer by chain: {place(table)}", columns=["chain", *domains], rows=rows
        )


def _tables_of(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Of answers, of loads, or of a load of steps."""
    if "silent_s" in summary:
        return _step_tables(summary)
    return _load_tables(summary) if "wrong" in summary else _tables(summary)


def _step_tables(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    for table in summary["tables"]:
        if beside := load_steps_report.beside_rows(table):
            yield ReportTable(
                title=f"{place(table)}: by {table['single']}",
                columns=load_steps_report.beside_columns(),
                rows=beside,
                note=f"{load_steps_report.BESIDE_EXPLAINED} {load_steps_report.verdict(table)}".replace(
                    "`", ""
                ),
            )
        for step in table["steps"]:
            yield ReportTable(
                title=f"{place(table)}, step {step['step']}: {load_steps_report.step_title(step)}",
                columns=["method", *load_steps_report.COLUMNS],
                rows=load_steps_report.rows(step),
                note=load_steps_report.EXPLAINED,
            )


def _load_tables(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    for table in summary["tables"]:
        for load in table["loads"]:
            yield ReportTable(
                title=load_report.load_title(table, load),
                columns=["method", *load_report.COLUMNS],
                rows=load_report.rows(load),
                note=load_report.EXPLAINED,
            )
