"""A summary as people read it: `summary.md`, tables of 80 columns in the terminal, and `report.html`, a page
that needs nothing else. All are made of the same tables; nothing is computed here."""

from __future__ import annotations

import itertools
import math
import platform
import shlex
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill
from typing import Any

from jinja2 import Environment, StrictUndefined

from flowspec.bench.cases import PlainCase
from flowspec.bench.console import show_table
from flowspec.bench.experiment import AR, CLUSTER, OURS, SYNTHETIC, WORLDS, Experiment, Testbed
from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.statistics import OVERALL, PAPER, PUBLISHED, Ratio
from flowspec.core.methods import METHODS
from flowspec.plan.timing import LinkSpec
from flowspec.version import __version__

TEMPLATE = Path(__file__).with_name("report.html")
PACKAGES = ("torch", "transformers", "numpy", "matplotlib")
"""Whose versions are told, if they are installed."""
NONE = "-"
WIDTH = 80
"""Columns of the terminal."""
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
EXPLAINED_NOTE = (
    "S: tokens per segment that gave any; rho: share of tokens that were in flight when they were known; "
    "accepted: tokens per segment sent; busy: of the time of each stage; dropped: rows found wrong before "
    "they were through, of 100 that were run; slot (tau) and trip: what they cost."
)
CELLS_NOTE = (
    "Its rate by that of others on the same prompts. A cell is a domain on a testbed at a temperature."
)
LOADS_NOTE = (
    "tok/s: all users' tokens by the time; of a step those that came while it lasted. Latency: of whole "
    "answers, and by their tokens; p95: the slowest of 20. Fairness: Jain's index of the users' rates; to "
    "alone: of how fast their answers came by what one user alone waits for them. Stages, drafters: share of "
    "the time for which the busiest of their boards computes. To single: throughput and latency by the best "
    "of the methods with one drafter."
)
LOAD_FIGURES = {
    "tok/s": "tokens_per_s",
    "latency s": "latency_s",
    "p95 s": "latency_p95_s",
    "s/token": "token_s",
    "p95": "token_p95_s",
    "first s": "first_token_s",
}
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
    """The first column is text, the others are numbers. `section` is the heading above it in `summary.md`, if
    it is another than that of the table before; `in_terminal` and `in_files` say where it is shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    section: str = ""
    in_terminal: bool = True
    in_files: bool = True


# ------------------------------------------------------------------------------------------ numbers


def format_rate(value: float | None) -> str:
    """Three digits, or all before the point."""
    return NONE if value is None else f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def format_ratio(ratio: Ratio | None) -> str:
    """`1.73 [1.60, 1.85]`, or without an interval `1.73`."""
    if ratio is None:
        return NONE
    low, high = ratio["low"], ratio["high"]
    interval = "" if low is None else f" [{format_rate(low)}, {format_rate(high)}]"
    return format_rate(ratio["ratio"]) + interval


def format_percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f}%"


def _fixed(value: float | None, digits: int, factor: float = 1.0) -> str:
    return NONE if value is None else f"{factor * value:.{digits}f}"


def _thousandths(ratio: Ratio) -> str:
    """`.998 [.996, 1.001]`: three digits would call it 1."""
    interval = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['ratio']:.3f}{interval}"


def place(of: Mapping[str, Any]) -> str:
    return f"{of['testbed']}, temperature {of['temperature']:g}"


def few(summary: Mapping[str, Any]) -> str:
    """`1 prompt` where so few were asked that they tell little of others; else nothing."""
    prompts: int = summary.get("setting", {}).get("prompts", FEW)
    return "" if prompts >= FEW else f"{prompts} prompt{'s' * (prompts != 1)}"


def is_load(summary: Mapping[str, Any]) -> bool:
    return "wrong" in summary


# ------------------------------------------------------------------------------------------ tables


def tables_of(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    if is_load(summary):
        yield from _load_tables(summary)
        return
    for table in summary["tables"]:
        yield from _answer_tables(table, summary["world"])
    if summary["cells"]:
        yield _cells_table(summary)
    for table in summary.get("chains", ()):
        yield _chain_table(table, summary["world"])


def _answer_tables(table: Mapping[str, Any], world: str) -> Iterator[ReportTable]:
    domains, methods = [*table["domains"], OVERALL], table["methods"]
    title = f"{place(table)} ({world})"
    yield _overview_table(table, title)
    by_method = table["tokens_per_s"]
    yield ReportTable(
        section=title,
        title=f"Tokens per second: {place(table)}",
        columns=["method", *domains],
        rows=[[name, *(format_rate(by_method[name].get(each)) for each in domains)] for name in methods],
        in_terminal=False,
    )
    for reference in table["references"]:
        ratios = table["speed_up"][reference]
        others = [name for name in methods if name != reference]
        yield ReportTable(
            title=f"Speed-up over {reference}: {place(table)}",
            columns=["method", *domains],
            rows=[[name, *(format_ratio(ratios[name].get(each)) for each in domains)] for name in others],
            in_terminal=False,
        )
    columns = ("S", "rho", "accepted", "busy by stage", "dropped", "kB per token", "J per token", "tau, ms")
    yield ReportTable(
        title=f"What explains it: {place(table)}",
        columns=["method", *columns, "trip, ms", "first token, s", EXACT, WRONG],
        rows=[[name, *_explained(table["statistics"][name])] for name in methods],
        note=EXPLAINED_NOTE,
        in_terminal=False,
    )


def _overview_table(table: Mapping[str, Any], title: str) -> ReportTable:
    """For the terminal: what fits into 80 columns."""
    reference = next((name for name in table["references"] if name != AR), None)
    rows = []
    for name in table["methods"]:
        of = table["statistics"][name]
        to_ar = table["speed_up"].get(AR, {}).get(name, {}).get(OVERALL)
        row = [
            name.replace(PUBLISHED, PUBLISHED_SHORT),
            format_rate(table["tokens_per_s"][name].get(OVERALL)),
        ]
        row.append(format_rate(to_ar and to_ar["ratio"]))
        if reference:
            ratio = table["speed_up"][reference][name].get(OVERALL)
            row.append("1" if name == reference else format_ratio(ratio).replace(", ", "-"))
        rows.append([*row, _fixed(of["S"], 2), _fixed(of["rho"], 2), format_percent(of["busy"])])
    over = [f"x {reference.removesuffix(PUBLISHED)}"] if reference else []
    columns = ["method", "tok/s", "x plain", *over, "S", "rho", "busy"]
    return ReportTable(title=title, columns=columns, rows=rows, in_files=False)


def _explained(of: Mapping[str, Any]) -> list[str]:
    return [
        *(_fixed(of[key], 2) for key in ("S", "rho", "acceptance")),
        _busy(of["stage_busy"]),
        _fixed(of["dropped_per_100_rows"], 0),
        _fixed(of["network_bytes_per_token"], 1, 1e-3),
        format_rate(of["energy_j_per_token"] or None),  # 0 where nothing is known about the boards
        *(_fixed(of[key], 1, 1e3) for key in ("tau_s", "trip_s")),
        _fixed(of["time_to_first_token_s"], 2),
        *(str(of["agreement"][each]) for each in (EXACT, WRONG)),
    ]


def _busy(shares: Sequence[float]) -> str:
    if len(shares) > STAGES_SHOWN:
        return f"{format_percent(min(shares))} to {format_percent(max(shares))}"
    return " ".join(_fixed(share, 0, 100) for share in shares) + "%" if shares else NONE


def _cells_table(summary: Mapping[str, Any]) -> ReportTable:
    """A line for each cell, and below those of a testbed and temperature one for all of them."""
    cells = [
        each
        for overall in summary["overall"]
        for each in [*(cell for cell in summary["cells"] if place(cell) == place(overall)), overall]
    ]
    paper = next((cell["paper"] for cell in cells if cell["paper"]), PAPER[-1])
    columns = ("tokens/s", "by the best other", "best other", "by the best tuned", f"by {paper}", f"by {AR}")
    rows = [
        [
            f"{place(cell)}, {cell['domain']}",
            format_rate(cell["tokens_per_s"]),
            format_ratio(cell["to_other"]),
            cell["other"] or NONE,
            format_ratio(cell["to_tuned"]) + (f" {cell['tuned']}" if cell["tuned"] else ""),
            *(format_ratio(cell[key]) for key in ("to_paper", "to_ar", "to_temperature_0")),
        ]
        for cell in cells
    ]
    return ReportTable(
        section=f"Where `{OURS}` stands ({summary['world']})",
        title=f"Where {OURS} stands",
        columns=["cell", *columns, "by its own at temperature 0"],
        rows=rows,
        note=CELLS_NOTE,
        in_terminal=False,
    )


def _chain_table(table: Mapping[str, Any], world: str) -> ReportTable:
    """A line for each chain and each comparison of a chosen one."""
    domains = list(next(iter(table["latency_s"].values()), {}))
    rows = [
        [name, *(format_rate(each[domain]) for domain in domains)]
        for name, each in table["latency_s"].items()
    ]
    for name, by_domain in table["chosen"].items():
        for key, other in CHAIN_RATIOS.items():
            ratios = [by_domain[domain][key] for domain in domains]
            texts = [NONE if each is None else f"{each['ratio']:.3f} ({each['other']})" for each in ratios]
            rows.append([f"{name} by {other}", *texts])
    return ReportTable(
        section=f"Chains: {place(table)} ({world})",
        title=f"{place(table)} ({world}): seconds from a question to the last token of its answer, mean",
        columns=["chain", *domains],
        rows=rows,
    )


def _load_tables(summary: Mapping[str, Any]) -> Iterator[ReportTable]:
    columns = [*LOAD_FIGURES, "fairness", "to alone", "stages", "drafters", "J/token", "to single"]
    for table in summary["tables"]:
        for load in table["loads"]:
            step = f"step {load['step']}: " if load["step"] else ""
            title = f"{place(table)}, {step}{load['label']} ({summary['world']})"
            rows = [[name, *_load_row(load, name)] for name in load["methods"]]
            yield ReportTable(
                section=title, title=title, columns=["method", *columns], rows=rows, note=LOADS_NOTE
            )


def _load_row(load: Mapping[str, Any], name: str) -> list[str]:
    of, ratios = load["methods"][name], load["to_single"].get(name)
    return [
        *(format_rate(of[key]) for key in LOAD_FIGURES.values()),
        *(_fixed(of[key], 3) for key in ("fairness", "fairness_to_alone")),
        *(format_percent(max(of[key])) for key in ("stage_busy", "board_busy")),
        format_rate(of["energy_j_per_token"]),
        NONE
        if ratios is None
        else ", ".join(_fixed(ratios[key], 2) for key in ("tokens_per_s", "latency_s")),
    ]


# ------------------------------------------------------------------------------------------ sentences


def headline(summary: Mapping[str, Any]) -> str | None:
    """How ours compares with plain decoding, in a sentence; None where one of them was not run."""
    compared = [
        (table, ratio["ratio"])
        for table in summary["tables"]
        if (ratio := table["speed_up"].get(AR, {}).get(OURS, {}).get(OVERALL))
    ]
    if not compared:
        return None
    on = f"On {some} only, {OURS}" if (some := few(summary)) else OURS
    least, most = (format_rate(pick(ratio for _, ratio in compared)) for pick in (min, max))
    if len(compared) > 1:
        return f"{on} is {least} to {most} times as fast as plain decoding, in {len(compared)} settings."
    rates = compared[0][0]["tokens_per_s"]
    ours, plain = (format_rate(rates[name][OVERALL]) for name in (OURS, AR))
    return f"{on} is {most} times as fast as plain decoding: {ours} instead of {plain} tokens per second."


def acceptance(summary: Mapping[str, Any]) -> list[str]:
    """What the drafter's guesses were worth to ours, else to the last method, place by place."""
    lines = []
    for table in summary["tables"]:
        method = OURS if OURS in table["methods"] else table["methods"][-1]
        tokens = table["statistics"][method]["acceptance"]
        if tokens is not None and method != AR:
            lines.append(f"{tokens:.2f} tokens per segment sent ({method}, {place(table)})")
    return lines


def exactness(summary: Mapping[str, Any]) -> str:
    of_methods = (each for table in summary["tables"] for each in table.get("statistics", {}).values())
    wrong = summary.get("wrong", sum(each["agreement"][WRONG] for each in of_methods))
    if wrong:
        return f"{wrong} of {summary['answers']} answers differ from plain decoding's: something is wrong"
    return f"all {summary['answers']} answers are plain decoding's, token for token"


def verdict(summary: Mapping[str, Any], key: str) -> list[str]:
    """In how many of the cells that have such a comparison `continuous` is slower, a line for each; `key` is
    one of `SLOWER`."""
    other, ratio = SLOWER[key]
    compared = sum(cell[ratio] is not None for cell in summary["cells"])
    if not compared:
        return []
    where = [
        f"- {place(each)}, {each['domain']}: {_thousandths(each)} of `{each['other']}`"
        for each in summary[key]
    ]
    cells = "1 cell" if compared == 1 else f"{compared} cells"
    head = f"`{OURS}` is slower than {other} in {len(where)} of {cells}"
    return [head + (":" if where else "."), *where]


def has_intervals(summary: Mapping[str, Any]) -> bool:
    """Whether any speed-up has one."""
    return not is_load(summary) and any(
        ratio["low"] is not None
        for table in summary["tables"]
        for reference, methods in table["speed_up"].items()
        for method, domains in methods.items()
        for ratio in domains.values()
        if method != reference
    )


# ------------------------------------------------------------------------------------------ three forms


def markdown(summary: Mapping[str, Any]) -> str:
    """`summary.md`."""
    world = summary["world"]
    some = f" to {few(summary)} only, which tells little of others" if few(summary) else ""
    lines = [
        f"# {summary['experiment']}: **{world.upper()} world**",
        "",
        f"**{world}** is {WORLDS[world]}. {summary['answers']} answers{some}: {exactness(summary)}.",
        "",
        LOADS_NOTE if is_load(summary) else RATES_NOTE,
        "",
    ]
    for table in (each for each in tables_of(summary) if each.in_files):
        lines += [f"## {table.section}", ""] if table.section else []
        lines += [f"{table.title}.", ""] if table.title != table.section else []
        lines += grid(table.columns, table.rows)
        lines += [table.note, ""] if table.note and table.note != LOADS_NOTE else []
    for key in SLOWER if summary.get("cells") else ():
        lines += [*verdict(summary, key), ""]
    return "\n".join(lines)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a GitHub table, and an empty one."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def show(summary: Mapping[str, Any]) -> None:
    """In the terminal, in 80 columns."""
    world, setting = summary["world"], summary.get("setting", {})
    print(fill(f"{summary['experiment']}, {world} world: {WORLDS[world]}", WIDTH))
    devices = setting.get("devices", {}) if world == CLUSTER else {}
    if devices:
        print(fill(f"devices: {'; '.join(f'{name} {what}' for name, what in devices.items())}", WIDTH))
    if (some := few(summary)) and not is_load(summary):
        print(f"Of {some} only, which tells little of others: --limit asks more.")
    for table in (each for each in tables_of(summary) if each.in_terminal):
        print("\n" + fill(table.title, WIDTH))
        show_table(table.columns, table.rows, numbers_from=1)
    print("\n" + fill("; ".join(_legend(summary)), WIDTH) + "\n")
    for key in SLOWER if summary.get("cells") else ():
        lines = verdict(summary, key)
        more = len(lines) - 1 - VERDICT_LINES
        for line in [*lines[: 1 + VERDICT_LINES], *([f"- and {more} more"] if more > 0 else [])]:
            print(fill(line.replace("`", ""), WIDTH, subsequent_indent="  "))


def _legend(summary: Mapping[str, Any]) -> list[str]:
    """What the terminal's columns are."""
    if is_load(summary):
        return [LOADS_NOTE]
    tables = summary["tables"]
    references = dict.fromkeys(name for table in tables for name in table["references"])
    is_warm = any(table["temperature"] for table in tables)
    short = [name for name in references if name.endswith(PUBLISHED)]
    return [
        f"x plain: over plain decoding ({AR})",
        *(f"x {name.removesuffix(PUBLISHED)}: over {name}" for name in short),
        *[f"{PUBLISHED_SHORT.strip()}: as the paper's code does it"]
        * any(name.endswith(PUBLISHED) for table in tables for name in table["methods"]),
        *["[]: 95% interval over prompts"] * has_intervals(summary),
        "S: tokens per segment that gave any",
        "rho: share of tokens that were in flight when they were known",
        "busy: of the stages' time",
        *["the synthetic drafter is right as often at every temperature"]
        * (is_warm and summary.get("setting", {}).get("model") == SYNTHETIC),
        *["cell: a domain on a testbed at a temperature"] * bool(summary["cells"]),
    ]


def write_report(summary: Mapping[str, Any], folder: Path) -> None:
    """`report.html` of a summary that has its `setting`, and of the pictures that lie in `folder`."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    page = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        experiment=summary["experiment"],
        world=summary["world"],
        meaning=WORLDS[summary["world"]],
        headline=None if is_load(summary) else headline(summary),
        setting=summary["setting"],
        acceptance=[] if is_load(summary) else acceptance(summary),
        exactness=exactness(summary),
        has_intervals=has_intervals(summary),
        charts=[] if is_load(summary) else [_chart(table) for table in summary["tables"]],
        tables=[table for table in tables_of(summary) if table.in_files],
        pictures=[
            (b64encode((folder / name).read_bytes()).decode(), caption)
            for name, caption in CAPTIONS.items()
            if (folder / name).exists()
        ],
    )
    (folder / "report.html").write_text(page, "utf-8")


def _chart(table: Mapping[str, Any]) -> dict[str, Any]:
    """Bars as long as the speed-up, or the rate, by the longest."""
    over = table["references"][0] if table["references"] else None
    colours, rates = colours_of(table["methods"]), table["tokens_per_s"]
    ratios = {name: table["speed_up"][over][name].get(OVERALL) if over else None for name in table["methods"]}
    lengths = {
        name: (ratio["ratio"] if ratio else 0.0) if over else rates[name].get(OVERALL) or 0.0
        for name, ratio in ratios.items()
    }
    longest = max(lengths.values(), default=0.0) or 1.0
    bars = []
    for name, ratio in ratios.items():
        rate = format_rate(rates[name].get(OVERALL))
        bar = {
            "name": name_of(name),
            "text": "1" if name == over else format_ratio(ratio) if over else rate,
            "share": 100 * lengths[name] / longest,
            "colour": colours[name],
            "tokens_per_s": rate,
        }
        bars.append(bar)
    what = f"Speed-up over {name_of(over)}" if over else "Speed"
    return {"title": place(table), "what": what, "bars": bars}


# ------------------------------------------------------------------------------------------ the setting


def setting_of(experiment: Experiment, cases: Sequence[PlainCase], command: Sequence[str]) -> dict[str, Any]:
    """What a benchmark was run with: the exact command (`command` are the words after `flowspec`), versions,
    models, devices and what their times are taken from."""
    versions = {"flowspec": __version__, "python": platform.python_version()}
    return {
        "command": command_of(command),
        "versions": versions | dict(_versions(PACKAGES)),
        "machine": f"{platform.system()} {platform.machine()}",
        "model": experiment.model,
        "drafters": list(experiment.drafters),
        "right_guesses": experiment.acceptance,
        "prompts": len(dict.fromkeys(case.prompt_id for case in cases)),
        "domains": sorted({case.domain for case in cases}),
        "new_tokens": experiment.new_tokens,
        "seeds": list(experiment.seeds) if any(experiment.temperatures) else [],
        "devices": _devices(experiment),
    }


def command_of(words: Sequence[str]) -> str:
    """The whole command, as a shell takes it; `words` are those after `flowspec`."""
    return shlex.join(["flowspec", *words])


def _versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _devices(experiment: Experiment) -> dict[str, str]:
    """What there is, a line by testbed."""
    if experiment.testbeds:
        return {testbed.name: _boards(testbed) for testbed in experiment.testbeds}
    assert experiment.world == CLUSTER, "other worlds have testbeds"
    if experiment.cluster is None:
        return {f"{experiment.local} local processes": "on this machine"}
    return {experiment.cluster.stem: f"(the devices of {experiment.cluster.name})"}


def _boards(testbed: Testbed) -> str:
    alike = [
        (name, len(list(some))) for name, some in itertools.groupby(each.name for each in testbed.devices)
    ]
    stages = ", ".join(name if count == 1 else f"{count}x {name}" for name, count in alike)
    links = " and ".join(dict.fromkeys(_link(link) for link in testbed.hops or (testbed.link,)))
    drafter = testbed.drafter_shape
    parts = [
        f"{stages} as stages, {testbed.head.name} as the head",
        f"links of {links}",
        f"timed as {testbed.shape.name} in {testbed.precision}",
        *([] if drafter is None else [f"a drafter at the head as {drafter.name}"]),
    ]
    parts += [
        f"{', '.join(board.models)} on {(board.device or testbed.head).name} as {board.shape.name}"
        for board in testbed.boards
    ]
    return "; ".join(parts)


def _link(link: LinkSpec) -> str:
    delay = f"{1000 * link.delay_s:g} ms"
    return delay if math.isinf(link.bandwidth_mbps) else f"{link.bandwidth_mbps:g} Mbit/s and {delay}"
