"""The statistics of an answer in words, and what each model beside the target was worth so far, for a
terminal 80 columns wide; the terms are those of docs/methods.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from flowspec.cli.terminal import visible
from flowspec.core.head.hop_sums import DEAD, reported
from flowspec.core.protocol.messages import HOP_ROWS, HOP_SECONDS
from flowspec.errors import counted
from flowspec.model.text import Tokenizer
from flowspec.runtime.answer import Answer
from flowspec.runtime.session import Session

WIDTH = 79
CHAINS_SHOWN = 4
EXAMPLE_CHARS = 32
"""Of a prompt of the domain: its end."""
EARLIER = "(in earlier runs)"
"""Of whose prompts no text is kept."""
WAITED_SHOWN_S = 0.01
"""A wait for room that is told."""


def sentence(answer: Answer) -> str:
    """What an answer's statistics come to."""
    guessed, rate = answer.statistics["share_in_flight"], answer.timing.tokens_per_s
    if not rate:
        return f"The last answer had {counted(answer.new_tokens, 'token')}, too few for a rate."
    return (
        f"The last answer came at {rate:.1f} tokens/s; "
        + (f"{100 * guessed:.0f}%" if guessed else "none")
        + f" of its {counted(answer.new_tokens, 'token')} were guessed."
    )


def prompt_sentence(answer: Answer) -> str:
    """Of its prompt, how much was computed already; without a full stop."""
    known = f"{answer.reused_tokens} of them were" if answer.reused_tokens else "none was"
    return f"Its prompt had {counted(answer.prompt_tokens, 'token')}, {known} known before"


def lines(found: dict[str, Any], models: Sequence[str] = ()) -> list[str]:
    """`core.head.statistics.Statistics.report()` as a few lines of text; `models` are the names of those
    beside the target."""
    if not found["segments"]:
        return ["no segments were sent after the prompt"]
    busy = " ".join(f"{100 * share:.0f}%" for share in found["stage_busy"])
    rows = {name: f"{found[reported(name)]} {told}" for name, told in HOP_ROWS.items()}
    ran = ", ".join(text for name, text in rows.items() if not name.startswith(DEAD))
    dead = ", ".join(text for name, text in rows.items() if name.startswith(DEAD))
    spent = ", ".join(f"{told} {found[reported(name)]:.2f}" for name, told in HOP_SECONDS.items())
    told = [
        f"segments   {found['segments']} after the prompt, of which {found['committing_segments']} gave "
        f"tokens; window {found['window']:.1f}",
        f"tokens     {found['tokens_per_commit']:.2f} at a time (S), {found['acceptance_length']:.2f} per "
        f"segment; {100 * found['share_in_flight']:.0f}% were in flight (rho)",
        f"nodes      {found['nodes_drafted']} drafted, {found['nodes_sent']} sent, {found['dropped_alive']} "
        "given up alive",
        *_wrapped(f"rows       {ran}; {found['rows_dropped']} dropped dead: {dead}"),
        *_wrapped(f"stages     busy {busy}", 16),
        f"drafter    {found['draft_passes']} passes, {found['draft_rows']} rows, {found['draft_s']:.2f} s; "
        f"calibration error {found['calibration_error']:.3f}",
        *_wrapped(
            f"seconds    first token {found['prefill_s']:.2f}, the rest {found['decode_s']:.2f}; all stages: "
            f"{spent}; links {found['link_s']:.2f}, head {found['head_s']:.2f}"
        ),
    ]
    for place, (token, _, chain, reason) in enumerate(found["chains"][-CHAINS_SHOWN:]):
        names = " > ".join([*(models[model] for model in chain), "target"])
        told.append(f"{'' if place else 'chain':10} from token {token}: {names} ({reason})")
    if found["waited_s"] >= WAITED_SHOWN_S:
        told.append(f"waited     {found['waited_s']:.2f} s until the devices had memory for it")
    if found["recoveries"]:
        told.append(
            f"lost       devices {counted(found['recoveries'], 'time')}: {found['recovery_detect_s']:.2f} s "
            f"of silence, {found['recovery_load_s']:.2f} loading, {found['recovery_prefill_s']:.2f} prefill"
        )
    return told


def _wrapped(line: str, indent: int = 11) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent)


def expertise_table(session: Session, tokenizer: Tokenizer | None) -> Table | None:
    """What each drafter was worth by what prompts are about, the best in bold; None while nothing is
    known."""
    found = [domain for domain in session.expertise_report() if domain["answers"]]
    if not found:
        return None
    table = Table("prompts like", "answers", *session.drafters, box=None)
    for domain in found:
        if not domain["example"]:
            text = EARLIER
        elif tokenizer is None:
            text = " ".join(map(str, domain["example"]))
        else:
            text = " ".join(tokenizer.decode(domain["example"]).split())
        worth = [
            f"[bold]{value:.2f}[/]" if name == domain["best"] else f"{value:.2f}"
            for name, value in domain["worth"].items()
        ]
        table.add_row(escape(visible(text[-EXAMPLE_CHARS:])), str(domain["answers"]), *worth)
    return table
