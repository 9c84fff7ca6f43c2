"""An experiment of rivals as people read it: a summary, a table for each kind of boards, and a plot of tokens
per second over how often the drafter is right."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flowspec.bench.config import OURS
from flowspec.bench.console import show as show_table
from flowspec.bench.plots import HEIGHT_IN, PALETTE, WIDTH_IN, figure, heading
from flowspec.bench.report import NONE, WIDTH, WORLDS, grid, rate
from flowspec.bench.rival_experiment import Cell, RivalExperiment, cells_of, request_of
from flowspec.bench.rival_runs import SPEC_PIPE, RivalRecord
from flowspec.plan.rival_pipelines import ALONE, RIVALS, rivals_of

OURS_SHOWN = f"FlowSpec ({OURS})"
SPEC_PIPE_SHOWN = f"SpecPipe ({SPEC_PIPE})"
SHOWN = (*RIVALS, SPEC_PIPE_SHOWN)
SHORT = {
    "one board alone": "alone",
    "tensor parallelism": "tensor",
    "tensor parallelism, speculating": "tensor+guesses",
    "plain pipeline": "plain",
    "EAGLE-3 chains over stages (vLLM)": "vLLM",
    "EAGLE-2 trees over stages (tree-sd)": "trees",
    "linear windows (Mesh-LLM, shard)": "windows",
    SPEC_PIPE_SHOWN: "SpecPipe",
}
"""Heads of columns; other rivals have theirs."""
EXPLAINED = (
    "Tokens/s of one user. FlowSpec and SpecPipe are simulated, the others are formulas with the same costs "
    "(docs/rivals.md). Best rival: the fastest of the other columns. First token: of a prompt; pipelines are "
    "those that the rate is of. Larger than one: no board holds the model alone."
)
MARKERS = "osD^vP*Xd"


def summarise(bench: RivalExperiment, records: Sequence[RivalRecord]) -> dict[str, Any]:
    """`summary.json`: a cell for each boards, network and model, with a point for each acceptance."""
    kept = {record.key: record for record in records}
    return {
        "experiment": bench.name,
        "world": "simulated",
        "precision": bench.precision,
        "prompt": bench.prompt,
        "context": bench.typical_context,
        "new_tokens": bench.new_tokens,
        "answers": bench.answers,
        "published_acceptance": bench.published,
        "cells": [_cell(bench, cell, kept) for cell in cells_of(bench)],
        "figures": [
            {
                "testbed": each.testbed,
                "model": each.model,
                "tokens_per_s": each.tokens_per_s,
                "what": each.what,
            }
            for each in bench.figures
        ],
    }


def _cell(bench: RivalExperiment, cell: Cell, kept: Mapping[Any, RivalRecord]) -> dict[str, Any]:
    where = (cell.testbed.name, cell.network.name, cell.model.name)
    points: list[dict[str, Any]] = []
    for acceptance in cell.network.acceptances:
        own, pipe = (kept.get((*where, acceptance, method)) for method in (OURS, SPEC_PIPE))
        if own is None:
            continue
        request = request_of(bench, cell, acceptance)
        rivals: dict[str, dict[str, Any]] = {
            name: {
                "tokens_per_s": rival.rated.tokens_per_s,
                "how": rival.rated.how,
                "boards": rival.boards,
                "first_token_s": rival.first_token_s,
            }
            for name, rival in rivals_of(request, bench.prompt).items()
        }
        if pipe is not None and pipe.seconds:
            rivals[SPEC_PIPE_SHOWN] = _simulated(pipe)
        ours = _ours(own)
        best = max(rivals, key=lambda name: rivals[name]["tokens_per_s"], default=None)
        points.append(
            {
                "acceptance": acceptance,
                "ours": ours,
                "rivals": rivals,
                "best_rival": best,
                "to_best_rival": None
                if ours is None or best is None
                else ours["tokens_per_s"] / rivals[best]["tokens_per_s"],
            }
        )
    return {
        "testbed": where[0],
        "network": where[1],
        "model": where[2],
        "fits": any(point["ours"] or point["rivals"] for point in points) if points else None,
        "is_larger_than_one": all(ALONE not in point["rivals"] for point in points) if points else None,
        "points": points,
    }


def _simulated(record: RivalRecord) -> dict[str, Any]:
    return {
        "tokens_per_s": record.tokens / record.seconds,
        "error": record.error,
        "how": "simulated",
        "boards": record.boards,
        "first_token_s": record.first_token_s,
    }


def _ours(record: RivalRecord) -> dict[str, Any] | None:
    """What FlowSpec makes; without guesses where these are slower, as the planner would have it."""
    if not record.boards:
        return None
    if record.seconds and record.tokens / record.seconds >= record.plain_tokens_per_s:
        return _simulated(record)
    return {
        "tokens_per_s": record.plain_tokens_per_s,
        "how": "plain",
        "boards": record.boards,
        "first_token_s": record.first_token_s,
    }


def _at(summary: Mapping[str, Any], cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = summary["published_acceptance"]
    return next((point for point in cell["points"] if point["acceptance"] == wanted), None)


def _testbeds(summary: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in summary["cells"]:
        found.setdefault(cell["testbed"], []).append(cell)
    return found


def columns(value: str) -> list[str]:
    """Of a table of `value` ("tokens/s" or "first token, s")."""
    names = [SHORT.get(name, name) for name in SHOWN]
    last = ["FlowSpec / best rival", "larger than one"] if value == "tokens/s" else []
    return [f"model, network: {value}", "FlowSpec", *names, *last]


def rows(summary: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], key: str) -> list[list[str]]:
    """A line for each model and network at the published acceptance; `key` is `tokens_per_s` or
    `first_token_s`."""
    found = []
    for cell in cells:
        name = f"{cell['model']}, {cell['network']}"
        point = _at(summary, cell)
        if point is None:
            found.append([name, "not run", *[NONE] * (len(SHOWN) + 2 * (key == "tokens_per_s"))])
            continue
        values = [point["ours"], *(point["rivals"].get(rival) for rival in SHOWN)]
        line = [name, *(NONE if each is None else rate(each[key]) for each in values)]
        if not cell["fits"]:
            line[1] = "does not fit"
        if key == "tokens_per_s":
            line += [rate(point["to_best_rival"]), "yes" if cell["is_larger_than_one"] else "no"]
        found.append(line)
    return found


def markdown(summary: Mapping[str, Any]) -> str:
    world = summary["world"]
    lines = [
        f"# {summary['experiment']}: **{world.upper()} world**",
        "",
        f"**{world}** is {WORLDS[world]}. {EXPLAINED}",
        "",
        f"In {summary['precision']}, {summary['context']} tokens of context on average, first token after a "
        f"prompt of {summary['prompt']}, {summary['published_acceptance']:.0%} of the drafter's best guesses "
        "right.",
        "",
    ]
    for testbed, cells in _testbeds(summary).items():
        lines += [f"## {testbed}", ""]
        lines += grid(columns("tokens/s"), rows(summary, cells, "tokens_per_s"))
        lines += grid(columns("first token, s"), rows(summary, cells, "first_token_s"))
        lines += [
            f"- {each['model']}: {each['tokens_per_s']:g} tokens/s measured by others: {each['what']}"
            for each in summary["figures"]
            if each["testbed"] == testbed
        ]
        lines.append("")
    return "\n".join(lines)


def show(summary: Mapping[str, Any]) -> None:
    """The same for the terminal."""
    world = summary["world"]
    print(fill(f"{summary['experiment']}, {world} world: {WORLDS[world]}", WIDTH))
    for testbed, cells in _testbeds(summary).items():
        for value, key in (("tokens/s", "tokens_per_s"), ("first token, s", "first_token_s")):
            show_table(f"{testbed} ({world})", columns(value), rows(summary, cells, key))
    print("\n" + fill(EXPLAINED, WIDTH))


def draw(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """`rivals-BOARDS.png` for each boards: a panel for each model over the network with most acceptances."""
    found = []
    for testbed, cells in _testbeds(summary).items():
        most = max(len(cell["points"]) for cell in cells)
        drawn = [cell for cell in cells if cell["fits"] and len(cell["points"]) == most > 1]
        if drawn:
            slug = "".join(letter if letter.isalnum() else "-" for letter in testbed.lower())
            found.append(folder / f"rivals-{slug}.png")
            _draw(summary, testbed, drawn, found[-1])
    return found


def _draw(summary: Mapping[str, Any], testbed: str, cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    drawing = figure(WIDTH_IN, HEIGHT_IN)
    title = f"{testbed}: tokens per second, by how often the drafter's best guess is right"
    heading(drawing, title, summary["world"], f"Networks: {', '.join({cell['network'] for cell in cells})}.")
    across = min(2, len(cells))
    axes = drawing.subplots(-(-len(cells) // across), across, squeeze=False)
    for ax, cell in zip(axes.flat, cells, strict=False):
        _lines(ax, cell)
    for ax in axes.flat[len(cells) :]:
        ax.set_visible(False)
    handles = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=11
    )
    drawing.savefig(path)


def _lines(ax: Any, cell: Mapping[str, Any]) -> None:
    colours = dict(zip(SHOWN, itertools.cycle((*PALETTE[1:], "#882255", "#117733")), strict=False))
    for at, name in enumerate((OURS_SHOWN, *SHOWN)):
        points = [
            (point["acceptance"], found["tokens_per_s"])
            for point in cell["points"]
            if (found := point["ours"] if name == OURS_SHOWN else point["rivals"].get(name))
        ]
        if points:
            ax.plot(
                *zip(*points, strict=True),
                color=PALETTE[0] if name == OURS_SHOWN else colours[name],
                linewidth=3 if name == OURS_SHOWN else 1.3,
                marker=MARKERS[at % len(MARKERS)],
                label=name,
            )
    ax.set_title(f"{cell['model']}, {cell['network']}", loc="left", fontsize=11)
    ax.set_xlabel("share of the drafter's best guesses that are right")
    ax.set_ylabel("tokens/s")
    ax.set_ylim(bottom=0)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
