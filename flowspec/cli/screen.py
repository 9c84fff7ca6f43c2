"""What a watched head shows in a terminal: a table of its devices with its figures, a line for a chat, and
the same for programs.

All of it fits 80 columns. Names and texts may come from elsewhere: only what can be printed of them is shown.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowspec.errors import counted
from flowspec.plan.memory import mib
from flowspec.watch.state import LiveAnswer, WatchState

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
METER_CELLS = 12
STAGES_SHOWN = 24
ANSWERS_SHOWN = 4


def blocks_of(console: Console) -> bool:
    """Whether a terminal shows block characters."""
    return console.encoding.lower().startswith("utf")


def printable(text: str) -> str:
    """Somebody else's text on one line, without what would move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def meter(share: float, cells: int = METER_CELLS, *, blocks: bool = True) -> str:
    """A bar of so many cells, to an eighth of one; without `blocks` in ASCII."""
    share = min(1.0, max(0.0, share))
    if not blocks:
        return ("#" * round(share * cells)).ljust(cells, ".")
    full, rest = divmod(round(share * cells * 8), 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(cells)


def level(share: float, *, blocks: bool = True) -> str:
    """A share in one cell."""
    share = min(1.0, max(0.0, share))
    return LEVELS[min(7, int(share * 8))] if blocks else str(min(9, int(share * 10)))


def figures_of(present: WatchState) -> Mapping[str, Any]:
    """The newest figures, those of nothing before there were any."""
    nothing = {"tokens_per_s": 0.0, "S": 0.0, "rho": 0.0, "acceptance": 0.0, "busy": [], "dropped_rows": 0}
    return present.figures or nothing


LEGEND = (
    "a bar for each device, the higher the busier; guesses alive: not checked yet; tokens a step: so many "
    "each result settles, where plain decoding has 1"
)


def trouble_of(present: WatchState) -> str:
    """Why nothing is answered now, in a line; empty where it is."""
    if present.failed is not None:
        return f"it failed: {printable(present.failed['text'])}; nothing is answered any more"
    return "" if present.lost is None else "the pipeline was lost; another is being formed"


def strip_line(present: WatchState | None, width: int, *, blocks: bool = True) -> str:
    """One line, narrower than the terminal: how busy each stage is, and how it goes. `LEGEND` explains it."""
    if present is None:
        return ""
    if trouble := trouble_of(present):
        return f"({trouble})"[: width - 1]
    found = figures_of(present)
    shares = list(found["busy"])[:STAGES_SHOWN] or [0.0] * min(STAGES_SHOWN, len(present.stages))
    busy = "".join(level(share, blocks=blocks) for share in shares)
    line = (
        f"busy {busy}  {found['tokens_per_s']:.1f} tokens/s  {counted(present.living, 'guess', 'es')} alive  "
        f"{found['S']:.1f} tokens a step"
    )
    return line[: width - 1]


def devices_report(present: WatchState) -> list[dict[str, Any]]:
    """The stages in pipeline order, then devices that run none now; what is not known of one is None."""
    said = {row["name"]: row for row in (present.devices or {"devices": []})["devices"]}
    busy = list(figures_of(present)["busy"])
    names = [(stage["name"], stage["layers"], at) for at, stage in enumerate(present.stages)]
    names += [(name, None, -1) for name in said if name not in {stage["name"] for stage in present.stages}]
    found = []
    for name, layers, at in names:
        row = said.get(name, {})
        found.append(
            {
                "name": name,
                "layers": layers,
                "present": None if not row else bool(row["present"]) and layers is not None,
                "lost": None if not row else not row["present"],
                "memory_bytes": row.get("memory_bytes"),
                "temperature_c": row.get("temperature_c"),
                "throttled": row.get("throttled"),
                "queued": row.get("queued"),
                "done": row.get("done"),
                "running_s": row.get("running_s"),
                "busy": busy[at] if 0 <= at < len(busy) else None,
            }
        )
    return found


def report(present: WatchState, about: Mapping[str, Any]) -> dict[str, Any]:
    """All that the screen shows, for programs."""
    found = figures_of(present)
    return {
        "t": present.t,
        **{name: about[name] for name in ("world", "model", "method", "drafters")},
        "lost": present.lost is not None,
        "failed": None if present.failed is None else present.failed["text"],
        **{name: found[name] for name in ("tokens_per_s", "S", "rho", "acceptance", "dropped_rows")},
        "living": present.living,
        "devices": devices_report(present),
        "answers": [
            {
                "request": number,
                "prompt_tokens": answer.begin["prompt_tokens"],
                "tokens": answer.tokens,
                "living": len(answer.nodes),
                "text": answer.text,
            }
            for number, answer in present.answers.items()
        ],
    }


def screen(
    present: WatchState, about: Mapping[str, Any], *, blocks: bool = True, rows_max: int | None = None
) -> RenderableType:
    """The whole picture. Of more devices than `rows_max` the first are shown."""
    found = figures_of(present)
    drafters = ", ".join(about["drafters"]) or "none"
    title = Text(printable(f"{about['model']}"), style="bold", overflow="ellipsis", no_wrap=True)
    title.append(
        printable(f"  {about['method']}, drafter {drafters}, {about['world']}, {present.t:.1f} s"),
        style="not bold",
    )
    trouble = trouble_of(present)
    state = Text(trouble, style="red")
    if not trouble and not present.answers:
        state = Text("no answer is under way", style="dim")
    rows = devices_report(present)
    shown = rows if rows_max is None else rows[: max(1, rows_max)]
    parts: list[RenderableType] = [
        title,
        _figures_line(found, present),
        state,
        _devices(shown, _loading(present), blocks=blocks),
    ]
    if len(rows) > len(shown):
        parts.append(Text(f"and {len(rows) - len(shown)} more devices", style="dim"))
    if present.answers:
        parts.append(Text(""))
    parts += [
        _answer_line(number, answer) for number, answer in list(present.answers.items())[:ANSWERS_SHOWN]
    ]
    if len(present.answers) > ANSWERS_SHOWN:
        parts.append(Text(f"and {len(present.answers) - ANSWERS_SHOWN} more answers", style="dim"))
    return Group(*parts)


def _figures_line(found: Mapping[str, Any], present: WatchState) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{found['tokens_per_s']:.1f} tokens/s", style="bold")
    line.append(f"  {found['S']:.1f} tokens a step  {100 * found['rho']:.0f}% guessed")
    line.append(f"  {counted(present.living, 'guess', 'es')} alive, {found['dropped_rows']} dropped")
    return line


def _loading(present: WatchState) -> set[str]:
    """The devices that make ready."""
    rows = (present.devices or {"devices": []})["devices"]
    return {row["name"] for row in rows if row.get("loading")}


def _devices(rows: Sequence[Mapping[str, Any]], loading: Container[str], *, blocks: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("device", no_wrap=True, overflow="ellipsis", max_width=18)
    for name in ("layers", "state", "memory", "heat", "queued"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    table.add_column("busy", no_wrap=True)
    for row in rows:
        layers, busy, heat = row["layers"], row["busy"], row["temperature_c"]
        state = "lost" if row["lost"] else "unused" if layers is None else "here"
        state = "loads" if row["name"] in loading else state
        if row["lost"] is None:
            state = "-"
        table.add_row(
            Text(printable(row["name"])),
            "-" if layers is None else f"{layers[0]}-{layers[1] - 1}",
            Text(state, style="red" if state == "lost" else ""),
            "-" if row["memory_bytes"] is None else mib(row["memory_bytes"]),
            _heat(heat, is_throttled=bool(row["throttled"])),
            "-" if row["queued"] is None else str(row["queued"]),
            "-" if busy is None else f"{meter(busy, blocks=blocks)} {100 * busy:3.0f}%",
        )
    return table


def _heat(celsius: float | None, *, is_throttled: bool) -> Text:
    """How hot a device is; `!` where that holds its clock down."""
    shown = "-" if celsius is None else f"{celsius:.0f} C"
    return Text(f"{shown}!" if is_throttled else shown, style="red" if is_throttled else "")


def _answer_line(number: int, answer: LiveAnswer) -> Text:
    """An answer on one line: the end of its text is what counts."""
    guesses = counted(len(answer.nodes), "guess", "es")
    head = f"answer {number}: {counted(answer.tokens, 'token')}, {guesses}"
    text = printable(answer.text)
    line = Text(head, no_wrap=True, overflow="ellipsis")
    room = 78 - len(head)
    if room > 8 and text:
        line.append("  " + (text if len(text) <= room - 2 else "…" + text[-(room - 3) :]), style="dim")
    return line
