"""A summary as people read it: `report.md`, and tables of 80 columns in the terminal. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from flowspec.bench.config import AR, CLUSTER, EMULATED, OURS, SIMULATED
from flowspec.bench.console import show as show_table
from flowspec.bench.outcome import EXACT, WRONG
from flowspec.bench.summary import OVERALL, PAPER, Ratio

WORLDS = {
    SIMULATED: "virtual time: computed from device profiles, not measured on such devices",
    EMULATED: (
        "real processes on one machine that take as long as such devices would: not measured on such devices"
    ),
    CLUSTER: "real time on real devices",
}
"""What a number of this world is; it stands wherever one is shown."""
NONE = "-"
WIDTH = 80
"""Columns of the terminal."""
STAGES_SHOWN = 8
"""Of longer pipelines the least and the greatest busy share are shown."""
VERDICT_LINES = 8
"""Slow cells that the terminal lists; `report.md` has all."""


def rate(value: float | None) -> str:
    """Three digits, or all before the point."""
    return NONE if value is None else f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def times(ratio: Ratio | None) -> str:
    """`1.73 [1.60, 1.85]`."""
    return NONE if ratio is None else f"{rate(ratio['ratio'])} [{rate(ratio['low'])}, {rate(ratio['high'])}]"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f}%"


def _fixed(value: float | None, digits: int, factor: float = 1.0) -> str:
    return NONE if value is None else f"{factor * value:.{digits}f}"


def place(of: Mapping[str, Any]) -> str:
    return f"{of['testbed']}, temperature {of['temperature']:g}"


SLOWER = {"slower_than_other": ("another method", "to_other"), "below_ar": (f"`{AR}`", "to_ar")}
"""By the key of a summary's list: slower than what, and the key of that comparison in its cells."""


def verdict(summary: Mapping[str, Any], key: str) -> list[str]:
    """In how many of the cells that have such a comparison `continuous` is slower, a line for each; `key` is
    one of `SLOWER`."""
    other, ratio = SLOWER[key]
    compared = sum(cell[ratio] is not None for cell in summary["cells"])
    if not compared:
        return []
    where = [
        f"- {place(each)}, {each['domain']}: {each['ratio']:.3f} [{each['low']:.3f}, {each['high']:.3f}] of "
        f"`{each['other']}`"
        for each in summary[key]
    ]
    head = f"`{OURS}` is slower than {other} in {len(where)} of {compared} cells"
    return [head + (":" if where else "."), *where]


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a GitHub table."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def markdown(summary: Mapping[str, Any]) -> str:
    """GitHub tables: for each testbed and temperature rates, speed-ups and what explains them; the cells of
    `continuous` at the end."""
    world = summary["world"]
    lines = [
        f"# {summary['experiment']}: **{world.upper()} world**",
        "",
        f"**{world}** is {WORLDS.get(world, 'a world of its own')}. {summary['answers']} answers.",
        "",
        f"Tokens per second count after the first token; `{OVERALL}` is the harmonic mean of the domains. "
        "Brackets are 95% intervals"
        " (bootstrap over prompts, the same for both methods).",
        "",
    ]
    for table in summary["tables"]:
        lines += _section(table, world)
    if summary["cells"]:
        lines += [
            f"## Where `{OURS}` stands ({world})",
            "",
            "Its rate by that of others on the same prompts.",
            "",
            *_cells(summary["cells"]),
        ]
        for said in filter(None, (verdict(summary, key) for key in SLOWER)):
            lines += [*said, ""]
    return "\n".join(lines)


def _section(table: Mapping[str, Any], world: str) -> list[str]:
    domains = [*table["domains"], OVERALL]
    by_method = table["tokens_per_s"]
    best = {
        domain: max((each[domain] for each in by_method.values() if domain in each), default=0.0)
        for domain in domains
    }
    rows = [
        [name, *(_bold_best(by_method[name].get(domain), best[domain]) for domain in domains)]
        for name in table["methods"]
    ]
    lines = [
        f"## {place(table)} ({world})",
        "",
        "Tokens per second, the best in bold:",
        "",
        *grid(["method", *domains], rows),
    ]
    for reference in table["references"]:
        ratios = table["speed_up"][reference]
        others = [name for name in table["methods"] if name != reference]
        lines += [f"Speed-up over `{reference}`:", ""]
        lines += grid(
            ["method", *domains],
            [[name, *(times(ratios[name].get(domain)) for domain in domains)] for name in others],
        )
    explained = [[name, *_explained(table["statistics"][name])] for name in table["methods"]]
    bounds = [[name, *_bound(table["statistics"][name])] for name in table["methods"]]
    return [
        *lines,
        "What explains it (S: tokens per segment that gave any; rho: share of tokens that were in flight "
        "when they were known):",
        "",
        *grid(
            [
                "method",
                "S",
                "rho",
                "accepted per segment",
                "busy by stage",
                "rows dropped per 100 run",
                "kB per token",
                "J per token",
            ],
            explained,
        ),
        "Slot (tau), trip and the share of the bound `(1 - rho) trip + max(0, 1/S - (1 - rho)) tau` that was "
        "reached; agreement with plain decoding:",
        "",
        *grid(["method", "tau, ms", "trip, ms", "bound reached", "first token, s", EXACT, WRONG], bounds),
    ]


def _bold_best(value: float | None, best: float) -> str:
    return f"**{rate(value)}**" if value is not None and value >= best else rate(value)


def _explained(of: Mapping[str, Any]) -> list[str]:
    return [
        _fixed(of["S"], 2),
        _fixed(of["rho"], 2),
        _fixed(of["acceptance"], 2),
        _busy(of["stage_busy"]),
        _fixed(of["dropped_per_100_rows"], 0),
        _fixed(of["network_bytes_per_token"], 1, 1e-3),
        rate(of["energy_j_per_token"] or None),  # 0 where nothing is known about the boards
    ]


def _busy(shares: Sequence[float]) -> str:
    if len(shares) > STAGES_SHOWN:
        return f"{percent(min(shares))} to {percent(max(shares))}"
    return " ".join(_fixed(share, 0, 100) for share in shares) + "%" if shares else NONE


def _bound(of: Mapping[str, Any]) -> list[str]:
    times_s = [_fixed(of["tau_s"], 1, 1e3), _fixed(of["trip_s"], 1, 1e3)]
    agreement = [str(of["agreement"][each]) for each in (EXACT, WRONG)]
    return [*times_s, percent(of["bound_share"]), _fixed(of["time_to_first_token_s"], 2), *agreement]


def _cells(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    paper = next((cell["paper"] for cell in cells if cell["paper"]), PAPER[-1])
    columns = [
        "cell",
        "tokens/s",
        "by the best other",
        "best other",
        "by the best tuned",
        f"by {paper}",
        f"by {AR}",
        "by its own at temperature 0",
    ]
    rows = [
        [
            f"{place(cell)}, {cell['domain']}",
            rate(cell["tokens_per_s"]),
            times(cell["to_other"]),
            cell["other"] or NONE,
            times(cell["to_tuned"]) + (f" {cell['tuned']}" if cell["tuned"] else ""),
            times(cell["to_paper"]),
            times(cell["to_ar"]),
            times(cell["to_temperature_0"]),
        ]
        for cell in cells
    ]
    return grid(columns, rows)


def show(summary: Mapping[str, Any]) -> None:
    """The same for the terminal, in 80 columns: one table for each testbed and temperature, and the
    verdicts."""
    world = summary["world"]
    print(f"{summary['experiment']}: {world.upper()} world")
    print(fill(WORLDS.get(world, world), WIDTH))
    for table in summary["tables"]:
        reference = next((name for name in table["references"] if name != AR), None)
        rows = [
            [name.replace("(published)", "(publ.)"), *_row(table, name, reference)]
            for name in table["methods"]
        ]
        columns = [
            "method",
            "tok/s",
            "x ar",
            f"x {(reference or 'chunk-pp').split(' ')[0]}",
            "S",
            "rho",
            "busy",
            "bound",
        ]
        show_table(f"{place(table)} ({world})", columns, rows)
    published = [name for table in summary["tables"] for name in table["references"] if name.endswith(")")]
    note = f"x chunk-pp: over {published[0]}, (publ.); " if published else ""
    print("\n" + fill(f"{note}[]: 95% interval over prompts; bound: share of it reached", WIDTH) + "\n")
    for key in SLOWER if summary["cells"] else ():
        lines = verdict(summary, key)
        more = len(lines) - 1 - VERDICT_LINES
        for line in [*lines[: 1 + VERDICT_LINES], *([f"- and {more} more"] if more > 0 else [])]:
            print(fill(line.replace("`", ""), WIDTH, subsequent_indent="  "))


def _row(table: Mapping[str, Any], name: str, reference: str | None) -> list[str]:
    of = table["statistics"][name]
    to_ar = table["speed_up"].get(AR, {}).get(name, {}).get(OVERALL)
    to_reference = table["speed_up"][reference][name].get(OVERALL) if reference else None
    values = [
        rate(table["tokens_per_s"][name].get(OVERALL)),
        rate(to_ar and to_ar["ratio"]),
        times(to_reference).replace(", ", "-"),
    ]
    return [
        *values,
        _fixed(of["S"], 2),
        _fixed(of["rho"], 2),
        percent(of["busy"]),
        percent(of["bound_share"]),
    ]
