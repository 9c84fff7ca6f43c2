"""A summary as people read it: `report.md`, and tables of 80 columns in the terminal. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from flowspec.bench.config import AR, CLUSTER, EMULATED, OURS, SIMULATED, SYNTHETIC
from flowspec.bench.console import show as show_table
from flowspec.bench.outcome import EXACT, WRONG
from flowspec.bench.summary import OVERALL, PAPER, PUBLISHED, Ratio

WORLDS = {
    SIMULATED: "virtual time, computed from device profiles and not measured on such devices",
    EMULATED: (
        "real processes on one machine that take as long as such devices would; not measured on such devices"
    ),
    CLUSTER: "real processes in real time",
}
"""What a number of this world is; it stands wherever one is shown."""
NONE = "-"
WIDTH = 80
"""Columns of the terminal."""
FEW = 4
"""Prompts below which it is said how many there were; the experiment `paper` asks as many."""
STAGES_SHOWN = 8
"""Of longer pipelines the least and the greatest busy share are shown."""
PUBLISHED_SHORT = " (pub)"
VERDICT_LINES = 8
"""Slow cells that the terminal lists; `report.md` has all."""


def rate(value: float | None) -> str:
    """Three digits, or all before the point."""
    return NONE if value is None else f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def times(ratio: Ratio | None) -> str:
    """`1.73 [1.60, 1.85]`, or without an interval `1.73`."""
    if ratio is None:
        return NONE
    interval = "" if ratio["low"] is None else f" [{rate(ratio['low'])}, {rate(ratio['high'])}]"
    return rate(ratio["ratio"]) + interval


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f}%"


def _fixed(value: float | None, digits: int, factor: float = 1.0) -> str:
    return NONE if value is None else f"{factor * value:.{digits}f}"


def place(of: Mapping[str, Any]) -> str:
    return f"{of['testbed']}, temperature {of['temperature']:g}"


SLOWER = {"slower_than_other": ("another method", "to_other"), "below_ar": ("plain decoding", "to_ar")}
"""By the key of a summary's list: slower than what, and the key of that comparison in its cells."""


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


def _thousandths(ratio: Ratio) -> str:
    """`.998 [.996, 1.001]`: three digits would call it 1."""
    interval = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['ratio']:.3f}{interval}"


def load_opening(summary: Mapping[str, Any], explained: str) -> list[str]:
    """How the document of an experiment of loads begins."""
    world = summary["world"]
    return [
        f"# {summary['experiment']}: **{world.upper()} world**",
        "",
        f"**{world}** is {WORLDS.get(world, 'a world of its own')}. {summary['answers']} answers, "
        f"{summary['wrong']} of them wrong.",
        "",
        explained,
        "",
    ]


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a GitHub table."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def few(summary: Mapping[str, Any]) -> str:
    """`1 prompt` where so few were asked that they tell little of others; else nothing."""
    prompts: int = summary.get("setting", {}).get("prompts", FEW)
    return "" if prompts >= FEW else f"{prompts} prompt{'s' * (prompts != 1)}"


def markdown(summary: Mapping[str, Any]) -> str:
    """GitHub tables: for each testbed and temperature rates, speed-ups and what explains them; the cells of
    `continuous` at the end."""
    world = summary["world"]
    lines = [
        f"# {summary['experiment']}: **{world.upper()} world**",
        "",
        f"**{world}** is {WORLDS.get(world, 'a world of its own')}. {summary['answers']} answers"
        + (f" to {some} only, which tells little of others." if (some := few(summary)) else "."),
        "",
        f"Tokens per second count after the first token; `{OVERALL}` is the harmonic mean of the domains. "
        "Brackets are 95% intervals (bootstrap over prompts, the same for both methods); there is none where "
        "a domain has one prompt.",
        "",
    ]
    for table in summary["tables"]:
        lines += _section(table, world)
    if summary["cells"]:
        lines += [
            f"## Where `{OURS}` stands ({world})",
            "",
            "Its rate by that of others on the same prompts. A cell is a domain on a testbed at a "
            "temperature.",
            "",
            *_compared(summary),
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
    oracles = [[name, *_oracle(table["statistics"][name])] for name in table["methods"]]
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
        "Slot (tau) and trip; *oracle*: the least time in which one who knows the answers could have had "
        "them with the best of all methods' guesses, by the time that they took, and *own*: with the guesses "
        "of the method itself; agreement with plain decoding:",
        "",
        *grid(["method", "tau, ms", "trip, ms", "oracle", "own", "first token, s", EXACT, WRONG], oracles),
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


def _oracle(of: Mapping[str, Any]) -> list[str]:
    times_s = [_fixed(of["tau_s"], 1, 1e3), _fixed(of["trip_s"], 1, 1e3)]
    shares = [percent(of[each]) for each in ("oracle_share", "own_oracle_share")]
    agreement = [str(of["agreement"][each]) for each in (EXACT, WRONG)]
    return [*times_s, *shares, _fixed(of["time_to_first_token_s"], 2), *agreement]


def _compared(summary: Mapping[str, Any]) -> list[str]:
    """A line for each cell, and below those of a testbed and temperature one for all of them."""
    lines = [
        each
        for overall in summary["overall"]
        for each in [*(cell for cell in summary["cells"] if place(cell) == place(overall)), overall]
    ]
    paper = next((cell["paper"] for cell in lines if cell["paper"]), PAPER[-1])
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
        for cell in lines
    ]
    return grid(columns, rows)


def show(summary: Mapping[str, Any]) -> None:
    """The same for the terminal, in 80 columns: one table for each testbed and temperature, and the
    verdicts."""
    world = summary["world"]
    print(fill(f"{summary['experiment']}, {world} world: {WORLDS.get(world, world)}", WIDTH))
    devices = summary.get("setting", {}).get("devices", {}) if world == CLUSTER else {}
    if devices:
        print(fill(f"devices: {'; '.join(f'{name} {what}' for name, what in devices.items())}", WIDTH))
    if some := few(summary):
        print(f"Of {some} only, which tells little of others: --limit asks more.")
    notes = [f"x plain: over plain decoding ({AR})"]
    for table in summary["tables"]:
        reference = next((name for name in table["references"] if name != AR), None)
        rows = [
            [name.replace(PUBLISHED, PUBLISHED_SHORT), *_row(table, name, reference)]
            for name in table["methods"]
        ]
        columns = ["method", "tok/s", "x plain", *_column(reference), "S", "rho", "busy", "oracle"]
        show_table(f"{place(table)} ({world})", columns, rows)
        if reference is not None and _column(reference) != [f"x {reference}"]:
            notes.append(f"{_column(reference)[0]}: over {reference}")
        if any(name.endswith(PUBLISHED) for name in table["methods"]):
            notes.append(f"{PUBLISHED_SHORT.strip()}: as the paper's code does it")
    notes += [
        *["[]: 95% interval over prompts"] * has_intervals(summary),
        "S: tokens per segment that gave any",
        "rho: share of tokens that were in flight when they were known",
        "busy: of the stages' time",
        "oracle: the least time possible with the best of these guesses, by the time it took",
        *["the synthetic drafter is right as often at every temperature"] * _is_synthetic_and_warm(summary),
        *["cell: a domain on a testbed at a temperature"] * bool(summary["cells"]),
    ]
    print("\n" + fill("; ".join(dict.fromkeys(notes)) + ".", WIDTH) + "\n")
    for key in SLOWER if summary["cells"] else ():
        lines = verdict(summary, key)
        more = len(lines) - 1 - VERDICT_LINES
        for line in [*lines[: 1 + VERDICT_LINES], *([f"- and {more} more"] if more > 0 else [])]:
            print(fill(line.replace("`", ""), WIDTH, subsequent_indent="  "))


def has_intervals(summary: Mapping[str, Any]) -> bool:
    """Whether any speed-up has one."""
    return any(
        ratio["low"] is not None
        for table in summary["tables"]
        for reference, methods in table["speed_up"].items()
        for method, domains in methods.items()
        for ratio in domains.values()
        if method != reference
    )


def _is_synthetic_and_warm(summary: Mapping[str, Any]) -> bool:
    model = summary.get("setting", {}).get("model")
    return model == SYNTHETIC and any(table["temperature"] for table in summary["tables"])


def _column(reference: str | None) -> list[str]:
    """The head of a column of ratios, short enough for the terminal; none without a reference."""
    return [] if reference is None else [f"x {reference.removesuffix(PUBLISHED)}"]


def _row(table: Mapping[str, Any], name: str, reference: str | None) -> list[str]:
    of = table["statistics"][name]
    to_ar = table["speed_up"].get(AR, {}).get(name, {}).get(OVERALL)
    ratios = [
        "1" if name == each else times(table["speed_up"][each][name].get(OVERALL)).replace(", ", "-")
        for each in [reference]
        if each
    ]
    return [
        rate(table["tokens_per_s"][name].get(OVERALL)),
        rate(to_ar and to_ar["ratio"]),
        *ratios,
        _fixed(of["S"], 2),
        _fixed(of["rho"], 2),
        percent(of["busy"]),
        percent(of["oracle_share"]),
    ]
