"""A summary as people read it: `summary.md`, tables of 80 columns in the terminal, and `report.html`, a page
that needs nothing else. All are made of the same tables; nothing is computed here."""

from __future__ import annotations

import contextlib
import itertools
import math
import platform
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flowspec.bench.cases import PlainCase
from flowspec.bench.experiment import AR, CLUSTER, OURS, SYNTHETIC, WORLDS, Experiment, Testbed
from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.statistics import OVERALL, PAPER, PUBLISHED, Ratio
from flowspec.core.methods import METHODS
from flowspec.version import __version__

TEMPLATE = Path(__file__).with_name("report.html")
PACKAGES = ("torch", "transformers", "numpy", "matplotlib")
"""Whose versions are told, if they are installed."""
NONE = "-"
FEW = 4
"""Prompts below which it is said how many there were; the experiment `paper` asks as many."""
STAGES_SHOWN = 8
"""Of longer pipelines the least and the greatest busy share are shown."""
PUBLISHED_SHORT = " (pub)"
VERDICT_LINES = 8
"""Slow cells that the terminal lists; `summary.md` has all."""
SLOWER = {"slower_than_other": ("another method", "to_other"), "below_ar": ("plain decoding", "to_ar")}
"""By the key of a summary's list: slower than what, and the key of that comparison in its cells."""
CHAIN_RATIOS = {
    "to_fixed": "the best fixed chain",
    "to_two": "the best with one model beside the target",
    "to_plain": "plain decoding",
}
RATES_NOTE = (
    "Tokens per second count after the first token; `overall` is the harmonic mean of the domains. Brackets "
    "are 95% intervals (bootstrap over prompts, the same for both methods); there is none where a domain has "
    "one prompt."
)
S_AND_RHO = (
    "S: tokens per segment that gave any; rho: share of tokens that were in flight when they were known"
)
EXPLAINED_NOTE = (
    f"{S_AND_RHO}; accepted: tokens per segment sent; busy: of the time of each stage; dropped: rows found "
    "wrong before they were through, of 100 that were run; slot (tau) and trip: what they cost."
)
CELL = "a domain on a testbed at a temperature"
CELLS_NOTE = f"Its rate by that of others on the same prompts. A cell is {CELL}."
LOADS_NOTE = (
    "tok/s: all users' tokens by the time; of a step those that came while it lasted. Latency: of whole "
    "answers, and by their tokens; p95: the slowest of 20. Fairness: Jain's index of the users' rates; to "
    "alone: of how fast their answers came by what one user alone waits for them. Stages, drafters: share of "
    "the time for which the busiest of their boards computes. To single: throughput and latency by the best "
    "of the methods with one drafter."
)
CAPTIONS = {
    "speedup.png": "Speed by kind of prompt.",
    "timeline.png": "What each device does, and when, in the same span of time: each lane is a device, white "
    "is idle, and a segment of tokens goes downwards from the head through the stages.",
    "chains.png": "The chain of models that is at work, answer by answer.",
    "load.png": "Tokens per second against seconds per answer; up and to the left is better.",
}
"""By the name of a picture; a report shows those that are there, in this order."""


PLAIN = "plain decoding"
PALETTE = ("#0072b2", "#d55e00", "#332288", "#8c8c8c", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
COLOURS = dict(zip(METHODS, PALETTE, strict=False))
OTHER_COLOURS = ("#000000", "#882255", "#117733", "#aa4499", "#999933")


def colours_of(setups: Sequence[str]) -> dict[str, str]:
    """Those of their methods; a colour of its own for what is called otherwise."""
    others = itertools.cycle(OTHER_COLOURS)
    bases = {setup: base_of(setup) for setup in setups}
    return {setup: COLOURS.get(base) or next(others) for setup, base in bases.items()}


def base_of(setup: str) -> str:
    """The method whose variant a setup is by its name; empty for none."""
    return max((name for name in METHODS if setup.startswith(name)), key=len, default="")


def name_of(setup: str) -> str:
    """What people call a setup: plain decoding is no method to them."""
    return PLAIN if setup == AR else setup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Texts by row and column. `section` is the heading above it in `summary.md`, if it is another than that
    of the table before."""

    title: str
    corner: str
    texts: Mapping[str, Mapping[str, str]]
    note: str = ""
    section: str = ""

    @property
    def columns(self) -> list[str]:
        return [self.corner, *next(iter(self.texts.values()))]

    @property
    def rows(self) -> list[list[str]]:
        return [[name, *row.values()] for name, row in self.texts.items()]


# ------------------------------------------------------------------------------------------ numbers


def format_rate(value: float | None) -> str:
    """Three digits, or all before the point."""
    return _fixed(value, 2 if value is None or value < 9.995 else 1 if value < 99.95 else 0)


def format_ratio(ratio: Ratio | None, form: Callable[[float], str] = format_rate) -> str:
    """`1.73 [1.60, 1.85]`, or without an interval `1.73`."""
    if ratio is None:
        return NONE
    interval = "" if ratio["low"] is None else f" [{form(ratio['low'])}, {form(ratio['high'])}]"
    return form(ratio["ratio"]) + interval


def format_percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f}%"


def _fixed(value: float | None, digits: int, factor: float = 1.0) -> str:
    return NONE if value is None else f"{factor * value:.{digits}f}"


def speed_of(table: Mapping[str, Any], method: str, over: str | None, domain: str = OVERALL) -> Ratio | None:
    """By that of the method `over`, or without one in tokens per second; None where it is not known."""
    speeds = table["speed_up"].get(over, {}) if over else table["tokens_per_s"]
    speed: Any = speeds.get(method, {}).get(domain)
    return {"ratio": speed, "low": None, "high": None} if isinstance(speed, float) else speed


def place(of: Mapping[str, Any]) -> str:
    return f"{of['testbed']}, temperature {of['temperature']:g}"


def few(summary: Mapping[str, Any]) -> str:
    """`1 prompt` where so few were asked that they tell little of others; else nothing."""
    prompts: int = summary.get("setting", {}).get("prompts", FEW)
    return "" if prompts >= FEW else f"{prompts} prompt{'s' * (prompts != 1)}"


def is_load(summary: Mapping[str, Any]) -> bool:
    return "wrong" in summary


def _answers_of(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables of answers; none of loads."""
    return [] if is_load(summary) else summary["tables"]


# ------------------------------------------------------------------------------------------ tables


def _file_tables(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Those of `summary.md` and `report.html`."""
    for table in _answers_of(summary):
        where, methods, domains = place(table), table["methods"], [*table["domains"], OVERALL]
        for over in (None, *table["references"]):
            texts = {
                name: {domain: format_ratio(speed_of(table, name, over, domain)) for domain in domains}
                for name in methods
                if name != over
            }
            title = f"Speed-up over {over}: {where}" if over else f"Tokens per second: {where}"
            section = "" if over else f"{where} ({summary['world']})"
            if texts:
                yield ReportTable(section=section, title=title, corner="method", texts=texts)
        texts = {name: _explain(table["statistics"][name]) for name in methods}
        title = f"What explains it: {where}"
        yield ReportTable(title=title, corner="method", texts=texts, note=EXPLAINED_NOTE)
    if summary.get("cells"):
        yield _cells_table(summary)
    yield from _chain_and_load_tables(summary)


def _explain(of: Mapping[str, Any]) -> dict[str, str]:
    return {
        "S": _fixed(of["S"], 2),
        "rho": _fixed(of["rho"], 2),
        "accepted": _fixed(of["acceptance"], 2),
        "busy by stage": _busy(of["stage_busy"]),
        "dropped": _fixed(of["dropped_per_100_rows"], 0),
        "kB per token": _fixed(of["network_bytes_per_token"], 1, 1e-3),
        "J per token": format_rate(of["energy_j_per_token"] or None),  # 0 where nothing is known about boards
        "tau, ms": _fixed(of["tau_s"], 1, 1e3),
        "trip, ms": _fixed(of["trip_s"], 1, 1e3),
        "first token, s": _fixed(of["time_to_first_token_s"], 2),
        **{each: str(of["agreement"][each]) for each in (EXACT, WRONG)},
    }


def _busy(shares: Sequence[float]) -> str:
    if len(shares) > STAGES_SHOWN:
        return f"{format_percent(min(shares))} to {format_percent(max(shares))}"
    return " ".join(_fixed(share, 0, 100) for share in shares) + "%" if shares else NONE


def _cells_table(summary: Mapping[str, Any]) -> ReportTable:
    """A line for each cell, and below those of a testbed and temperature one for all of them."""
    cells = [
        each
        for overall in summary["overall"]
        for each in (*summary["cells"], overall)
        if place(each) == place(overall)
    ]
    paper = next((cell["paper"] for cell in cells if cell["paper"]), PAPER[-1])
    texts = {
        f"{place(cell)}, {cell['domain']}": {
            "tokens/s": format_rate(cell["tokens_per_s"]),
            "by the best other": format_ratio(cell["to_other"]),
            "best other": cell["other"] or NONE,
            "by the best tuned": f"{format_ratio(cell['to_tuned'])} {cell['tuned'] or ''}".rstrip(),
            f"by {paper}": format_ratio(cell["to_paper"]),
            f"by {AR}": format_ratio(cell["to_ar"]),
            "by its own at temperature 0": format_ratio(cell["to_temperature_0"]),
        }
        for cell in cells
    }
    section, title = f"Where `{OURS}` stands ({summary['world']})", f"Where {OURS} stands"
    return ReportTable(section=section, title=title, corner="cell", texts=texts, note=CELLS_NOTE)


def _chain_and_load_tables(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    world = summary["world"]
    for table in summary.get("chains", ()):
        texts = {
            name: {domain: format_rate(latency_s) for domain, latency_s in each.items()}
            for name, each in table["latency_s"].items()
        }
        for name, by_domain in table["chosen"].items():
            for key, other in CHAIN_RATIOS.items():
                ratios = {domain: each[key] for domain, each in by_domain.items()}
                texts[f"{name} by {other}"] = {
                    domain: f"{each['ratio']:.3f} ({each['other']})" if each else NONE
                    for domain, each in ratios.items()
                }
        where = f"{place(table)} ({world})"
        title = f"{where}: seconds from a question to the last token of its answer, mean"
        yield ReportTable(section=f"Chains: {where}", title=title, corner="chain", texts=texts)
    for table in summary["tables"] if is_load(summary) else ():
        for load in table["loads"]:
            step = f"step {load['step']}: " if load["step"] else ""
            title = f"{place(table)}, {step}{load['label']} ({world})"
            texts = {name: _explain_load(load, name) for name in load["methods"]}
            yield ReportTable(section=title, title=title, corner="method", texts=texts, note=LOADS_NOTE)


def _explain_load(load: Mapping[str, Any], name: str) -> dict[str, str]:
    of, single = load["methods"][name], load["to_single"].get(name)
    return {
        "tok/s": format_rate(of["tokens_per_s"]),
        "latency s": format_rate(of["latency_s"]),
        "p95 s": format_rate(of["latency_p95_s"]),
        "s/token": format_rate(of["token_s"]),
        "p95": format_rate(of["token_p95_s"]),
        "first s": format_rate(of["first_token_s"]),
        "fairness": _fixed(of["fairness"], 3),
        "to alone": _fixed(of["fairness_to_alone"], 3),
        "stages": format_percent(max(of["stage_busy"])),
        "drafters": format_percent(max(of["board_busy"])),
        "J/token": format_rate(of["energy_j_per_token"]),
        "to single": ", ".join(_fixed(each, 2) for each in single.values()) if single else NONE,
    }


# ------------------------------------------------------------------------------------------ sentences


def _headline(summary: Mapping[str, Any]) -> str | None:
    """How ours compares with plain decoding; None where one of them was not run."""
    tables = [table for table in _answers_of(summary) if speed_of(table, OURS, AR)]
    if not tables:
        return None
    ratios = [table["speed_up"][AR][OURS][OVERALL]["ratio"] for table in tables]
    how = f"{format_rate(max(ratios))} times as fast as plain decoding"
    if len(tables) > 1:
        how = f"{format_rate(min(ratios))} to {how}, in {len(tables)} settings."
    else:
        ours, plain = (format_ratio(speed_of(tables[0], name, None)) for name in (OURS, AR))
        how += f": {ours} instead of {plain} tokens per second."
    return f"On {some} only, {OURS} is {how}" if (some := few(summary)) else f"{OURS} is {how}"


def _acceptance(summary: Mapping[str, Any]) -> Iterator[str]:
    """What the drafter's guesses were worth to ours, else to the last method, place by place."""
    for table in _answers_of(summary):
        method = OURS if OURS in table["methods"] else table["methods"][-1]
        tokens = table["statistics"][method]["acceptance"]
        if tokens is not None and method != AR:
            yield f"{tokens:.2f} tokens per segment sent ({method}, {place(table)})"


def _exactness(summary: Mapping[str, Any]) -> str:
    of_methods = [each for table in _answers_of(summary) for each in table["statistics"].values()]
    wrong = summary.get("wrong", sum(each["agreement"][WRONG] for each in of_methods))
    if wrong:
        return f"{wrong} of {summary['answers']} answers differ from plain decoding's: something is wrong"
    return f"all {summary['answers']} answers are plain decoding's, token for token"


def _verdicts(summary: Mapping[str, Any]) -> Iterator[list[str]]:
    """In how many of the cells that can be compared `continuous` is slower, and in which, a line for each."""
    for key, (other, ratio) in SLOWER.items() if summary.get("cells") else ():
        compared = sum(cell[ratio] is not None for cell in summary["cells"])
        where = [
            f"- {place(each)}, {each['domain']}: {format_ratio(each, '{:.3f}'.format)} of `{each['other']}`"
            for each in summary[key]
        ]
        cells = "1 cell" if compared == 1 else f"{compared} cells"
        head = f"`{OURS}` is slower than {other} in {len(where)} of {cells}" + (":" if where else ".")
        yield [head, *where] if compared else []


def has_intervals(summary: Mapping[str, Any]) -> bool:
    """Whether any speed-up has one."""
    return any(
        ratio["low"] is not None
        for table in _answers_of(summary)
        for reference, by_method in table["speed_up"].items()
        for method in by_method.keys() - {reference}
        for ratio in by_method[method].values()
    )


# ------------------------------------------------------------------------------------------ summary.md


def markdown(summary: Mapping[str, Any]) -> str:
    world = summary["world"]
    some = f" to {few(summary)} only, which tells little of others" if few(summary) else ""
    lines = [
        f"# {summary['experiment']}: **{world.upper()} world**",
        "",
        f"**{world}** is {WORLDS[world]}. {summary['answers']} answers{some}: {_exactness(summary)}.",
        "",
        LOADS_NOTE if is_load(summary) else RATES_NOTE,
        "",
    ]
    for table in _file_tables(summary):
        lines += [f"## {table.section}", ""] if table.section else []
        lines += [f"{table.title}.", ""] if table.title != table.section else []
        rules = ["---"] + ["---:"] * (len(table.columns) - 1)
        for row in (table.columns, rules, *table.rows):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        lines += ["", table.note, ""] if table.note and table.note != LOADS_NOTE else [""]
    for verdict in _verdicts(summary):
        lines += [*verdict, ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ the terminal


def overview(summary: Mapping[str, Any]) -> Iterator[str | ReportTable]:
    """What the terminal shows: lines and tables."""
    world, setting = summary["world"], summary.get("setting", {})
    yield f"{summary['experiment']}, {world} world: {WORLDS[world]}"
    if world == CLUSTER and (devices := setting.get("devices")):
        yield f"devices: {'; '.join(f'{name} {what}' for name, what in devices.items())}"
    if (some := few(summary)) and not is_load(summary):
        yield f"Of {some} only, which tells little of others: --limit asks more."
    yield from (_overview_table(table, world) for table in _answers_of(summary))
    yield from _chain_and_load_tables(summary)
    yield f"\n{LOADS_NOTE if is_load(summary) else _legend(summary)}\n"
    for verdict in _verdicts(summary):
        more = len(verdict) - 1 - VERDICT_LINES
        for line in [*verdict[: 1 + VERDICT_LINES], *([f"- and {more} more"] if more > 0 else [])]:
            yield line.replace("`", "")


def _overview_table(table: Mapping[str, Any], world: str) -> ReportTable:
    reference = next((name for name in table["references"] if name != AR), None)
    texts = {}
    for name in table["methods"]:
        of, to_ar = table["statistics"][name], speed_of(table, name, AR)
        row = {
            "tok/s": format_ratio(speed_of(table, name, None)),
            "x plain": format_rate(to_ar["ratio"] if to_ar else None),
        }
        if reference:
            ratio = format_ratio(speed_of(table, name, reference)).replace(", ", "-")
            row[f"x {reference.removesuffix(PUBLISHED)}"] = "1" if name == reference else ratio
        row |= {"S": _fixed(of["S"], 2), "rho": _fixed(of["rho"], 2), "busy": format_percent(of["busy"])}
        texts[name.replace(PUBLISHED, PUBLISHED_SHORT)] = row
    return ReportTable(title=f"{place(table)} ({world})", corner="method", texts=texts)


def _legend(summary: Mapping[str, Any]) -> str:
    """What the terminal's columns are."""
    tables, model = summary["tables"], summary.get("setting", {}).get("model")
    methods, references = (
        [name for table in tables for name in table[key]] for key in ("methods", "references")
    )
    texts = {
        f"x plain: over plain decoding ({AR})": True,
        **{f"x {name.removesuffix(PUBLISHED)}: over {name}": name != AR for name in references},
        f"{PUBLISHED_SHORT.strip()}: as the paper's code does it": any(
            name.endswith(PUBLISHED) for name in methods
        ),
        "[]: 95% interval over prompts": has_intervals(summary),
        S_AND_RHO: True,
        "busy: of the stages' time": True,
        "the synthetic drafter is right as often at every temperature": model == SYNTHETIC
        and any(table["temperature"] for table in tables),
        f"cell: {CELL}": any(_verdicts(summary)),
    }
    return "; ".join(text for text, is_said in texts.items() if is_said)


# ------------------------------------------------------------------------------------------ report.html


def write_report(summary: Mapping[str, Any], folder: Path) -> None:
    """`report.html` of a summary that has its `setting`, and of the pictures that lie in `folder`."""
    strict = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    page = strict.from_string(TEMPLATE.read_text("utf-8")).render(
        summary,
        meaning=WORLDS[summary["world"]],
        headline=_headline(summary),
        acceptance=list(_acceptance(summary)),
        exactness=_exactness(summary),
        has_intervals=has_intervals(summary),
        charts=[_chart(table) for table in _answers_of(summary)],
        tables=list(_file_tables(summary)),
        pictures=[
            (b64encode((folder / name).read_bytes()).decode(), caption)
            for name, caption in CAPTIONS.items()
            if (folder / name).exists()
        ],
    )
    (folder / "report.html").write_text(page, "utf-8")


def _chart(table: Mapping[str, Any]) -> dict[str, Any]:
    """Bars as long as the speed-up, or the rate, by the longest."""
    over = next(iter(table["references"]), None)
    speeds = {name: speed_of(table, name, over) for name in table["methods"]}
    longest = max((speed["ratio"] for speed in speeds.values() if speed), default=1.0)
    colours = colours_of(table["methods"])
    bars = [
        {
            "name": name_of(name),
            "text": "1" if name == over else format_ratio(speed),
            "share": 100 * speed["ratio"] / longest if speed else 0.0,
            "colour": colours[name],
            "tokens_per_s": format_ratio(speed_of(table, name, None)),
        }
        for name, speed in speeds.items()
    ]
    what = f"Speed-up over {name_of(over)}" if over else "Speed"
    return {"title": place(table), "what": what, "bars": bars}


# ------------------------------------------------------------------------------------------ the setting


def setting_of(experiment: Experiment, cases: Sequence[PlainCase], command: Sequence[str]) -> dict[str, Any]:
    """What a benchmark was run with: the exact command (`command` are the words after `flowspec`), versions,
    models, devices and what their times are taken from."""
    versions = {"flowspec": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    devices = {testbed.name: _describe(testbed) for testbed in experiment.testbeds}
    if not devices and experiment.cluster:
        devices = {experiment.cluster.stem: f"(the devices of {experiment.cluster.name})"}
    return {
        "command": command_of(command),
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}",
        "model": experiment.model,
        "drafters": list(experiment.drafters),
        "right_guesses": experiment.acceptance,
        "prompts": len({case.prompt_id for case in cases}),
        "domains": sorted({case.domain for case in cases}),
        "new_tokens": experiment.new_tokens,
        "seeds": list(experiment.seeds) if any(experiment.temperatures) else [],
        "devices": devices or {f"{experiment.local} local processes": "on this machine"},
    }


def command_of(words: Sequence[str]) -> str:
    """The whole command, as a shell takes it; `words` are those after `flowspec`."""
    return shlex.join(["flowspec", *words])


def _describe(testbed: Testbed) -> str:
    names = itertools.groupby(device.name for device in testbed.devices)
    counts = [(name, len(list(some))) for name, some in names]
    stages = ", ".join(name if count == 1 else f"{count}x {name}" for name, count in counts)
    links = dict.fromkeys(
        ("" if math.isinf(link.bandwidth_mbps) else f"{link.bandwidth_mbps:g} Mbit/s and ")
        + f"{1000 * link.delay_s:g} ms"
        for link in testbed.hops or (testbed.link,)
    )
    drafter = testbed.drafter_shape
    parts = [
        f"{stages} as stages, {testbed.head.name} as the head",
        f"links of {' and '.join(links)}",
        f"timed as {testbed.shape.name} in {testbed.precision}",
        *([f"a drafter at the head as {drafter.name}"] if drafter else []),
    ]
    for board in testbed.boards:
        device = board.device or testbed.head
        parts.append(f"{', '.join(board.models)} on {device.name} as {board.shape.name}")
    return "; ".join(parts)
